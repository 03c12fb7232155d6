//! Processes in a sandbox's network namespace, or started by `run`. Pid and start time identify a process; a pidfd
//! keeps signals from a process that reuses the pid.

use std::{
    collections::BTreeSet,
    fs, io,
    os::{fd::OwnedFd, unix::fs::MetadataExt as _},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde::Serialize;

use crate::record::{Identity, Process};

/// After SIGKILL.
const KILL_PATIENCE: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(200);

/// A process in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Running {
    /// Process id.
    pub pid: i32,
    /// From `/proc/PID/comm`.
    pub command: String,
}

/// Identified by its descriptor even after its end.
#[derive(Debug)]
struct Living {
    process: Process,
    descriptor: OwnedFd,
}

impl Living {
    /// `None` for other processes.
    fn find(pid: i32, namespace: Option<Identity>, known: &[Process]) -> io::Result<Option<Self>> {
        let Some(number) = Pid::from_raw(pid.max(0)) else { return Ok(None) };
        let descriptor = match pidfd_open(number, PidfdFlags::empty()) {
            Ok(descriptor) => descriptor,
            Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        // Read after opening the descriptor: it belongs to the descriptor's process, or that process has ended.
        let Some(started) = started(pid)? else { return Ok(None) };
        let process = Process { pid, started };
        let is_inside = namespace.is_some_and(|namespace| is_in(pid, namespace));
        Ok((is_inside || known.contains(&process)).then_some(Self { process, descriptor }))
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.descriptor, signal) {
            Err(rustix::io::Errno::SRCH) => Ok(()),
            result => Ok(result?),
        }
    }
}

fn living(namespace: Option<Identity>, known: &[Process]) -> io::Result<Vec<Living>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let is_candidate = namespace.is_some_and(|n| is_in(pid, n)) || known.iter().any(|p| p.pid == pid);
        if is_candidate {
            found.extend(Living::find(pid, namespace, known)?);
        }
    }
    Ok(found)
}

pub(crate) fn running(namespace: Option<Identity>, known: &[Process]) -> io::Result<Vec<Running>> {
    let comm = |pid: i32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned();
    let mut all: Vec<i32> = living(namespace, known)?.into_iter().map(|l| l.process.pid).collect();
    all.sort_unstable();
    Ok(all.into_iter().map(|pid| Running { pid, command: comm(pid) }).collect())
}

/// Sends SIGTERM, and SIGKILL after `grace`, also to new processes. Returns the remaining pids.
pub(crate) fn end(namespace: Option<Identity>, known: &[Process], grace: Duration) -> io::Result<Vec<i32>> {
    let mut left = Vec::new();
    for (signal, patience) in [(Signal::TERM, grace), (Signal::KILL, KILL_PATIENCE)] {
        let until = Instant::now() + patience;
        let mut told = BTreeSet::new();
        loop {
            left = living(namespace, known)?;
            if left.is_empty() {
                return Ok(Vec::new());
            }
            for one in &left {
                if told.insert(one.process) {
                    one.signal(signal)?;
                }
            }
            let time = until.saturating_duration_since(Instant::now());
            if time.is_zero() {
                break;
            }
            await_any(&left, time.min(LOOK))?;
        }
    }
    Ok(left.into_iter().map(|l| l.process.pid).collect())
}

fn await_any(all: &[Living], time: Duration) -> io::Result<()> {
    let mut ends: Vec<PollFd<'_>> = all.iter().map(|l| PollFd::new(&l.descriptor, PollFlags::IN)).collect();
    let time = Timespec::try_from(time).map_err(|_| io::ErrorKind::InvalidInput)?;
    match poll(&mut ends, Some(&time)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn is_in(pid: i32, namespace: Identity) -> bool {
    fs::metadata(format!("/proc/{pid}/ns/net"))
        .is_ok_and(|there| (there.dev(), there.ino()) == (namespace.dev, namespace.inode))
}

pub(crate) fn is_inside(namespace: Identity) -> bool {
    fs::metadata("/proc/thread-self/ns/net")
        .is_ok_and(|there| (there.dev(), there.ino()) == (namespace.dev, namespace.inode))
}

/// `None` for a missing process or a zombie.
pub(crate) fn started(pid: i32) -> io::Result<Option<u64>> {
    let text = match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(text) => text,
        // ESRCH: it ended between open and read.
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        Err(e) => return Err(e),
    };
    Ok(parse_stat(&text))
}

/// Field 22, counted from the end of field 2, which may contain any character; `None` for an ended process (field 3).
fn parse_stat(text: &str) -> Option<u64> {
    let (_, fields) = text.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_name_of_a_program_cannot_fake_its_start() {
        let stat = |name: &str, state: &str| {
            format!("7 ({name}) {state} 1 7 7 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 4711 9 9")
        };
        assert_eq!(parse_stat(&stat("sleep", "S")), Some(4711));
        assert_eq!(parse_stat(&stat("a) R 1 2 3", "S")), Some(4711));
        assert_eq!(parse_stat(&stat("sleep", "Z")), None);
        assert_eq!(parse_stat("7"), None);
    }

    #[test]
    fn only_the_very_process_that_was_started_is_ended() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let begun = started(pid).unwrap().unwrap();
        // The pid was reused.
        let other = Process { pid, started: begun + 1 };
        assert_eq!(end(None, &[other], Duration::ZERO).unwrap(), Vec::<i32>::new());
        assert!(child.try_wait().unwrap().is_none(), "a process that was not meant was ended");
        let own = Process { pid, started: begun };
        assert_eq!(end(None, &[own], Duration::from_secs(10)).unwrap(), Vec::<i32>::new());
        assert!(!child.wait().unwrap().success());
        assert_eq!(started(pid).unwrap(), None);
    }

    #[test]
    fn a_process_that_ignores_sigterm_is_killed_after_the_grace() {
        let script = "trap '' TERM; echo ready; read line";
        let pipe = std::process::Stdio::piped;
        let mut child = Command::new("sh").args(["-c", script]).stdin(pipe()).stdout(pipe()).spawn().unwrap();
        let mut ready = [0; 6];
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut ready).unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let own = Process { pid, started: started(pid).unwrap().unwrap() };
        let begun = Instant::now();
        assert_eq!(end(None, &[own], Duration::from_millis(300)).unwrap(), Vec::<i32>::new());
        assert!(begun.elapsed() >= Duration::from_millis(300));
        assert!(!child.wait().unwrap().success());
    }
}
