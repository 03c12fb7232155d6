//! Identity and end of any process.

use std::{fs, io, os::fd::OwnedFd};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use tokio::io::{Interest, unix::AsyncFd};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProcessId {
    pub(crate) pid: i32,
    /// Clock ticks since boot (proc_pid_stat(5), field 22); differs for a reused number.
    pub(crate) started: u64,
}

impl ProcessId {
    pub(crate) fn own() -> io::Result<Self> {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        Ok(Self { pid, started: start_time(pid)? })
    }
}

#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) id: ProcessId,
    descriptor: AsyncFd<OwnedFd>,
}

impl Process {
    pub(crate) fn open(pid: i32) -> io::Result<Self> {
        // rustix panics on a negative number in debug builds.
        let number = Pid::from_raw(pid.max(0)).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let descriptor = pidfd_open(number, PidfdFlags::NONBLOCK)?;
        // After the pidfd, which shows the end if the number was reused.
        let started = start_time(pid)?;
        // SAFETY: only the AsyncFd owns the descriptor, and it deregisters before closing.
        let descriptor = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }?;
        Ok(Self { id: ProcessId { pid, started }, descriptor })
    }

    pub(crate) fn find(pid: i32) -> io::Result<Option<Self>> {
        match Self::open(pid) {
            Ok(process) => Ok(Some(process)),
            Err(error) if means_none(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Cancel safe.
    pub(crate) async fn ended(&self) -> io::Result<()> {
        // Readable after the end (pidfd_open(2)).
        self.descriptor.readable().await.map(|mut guard| guard.retain_ready())
    }

    pub(crate) fn has_ended(&self) -> bool {
        let mut descriptors = [PollFd::new(self.descriptor.get_ref(), PollFlags::IN)];
        poll(&mut descriptors, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// No effect on an ended process.
    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(self.descriptor.get_ref(), signal) {
            Err(rustix::io::Errno::SRCH) => Ok(()),
            result => Ok(result?),
        }
    }
}

/// Ended; or a thread's (EINVAL, pidfd_open(2)) or invalid number.
fn means_none(error: &io::Error) -> bool {
    error.raw_os_error() == Some(nix::libc::ESRCH)
        || matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidInput)
}

/// Field 22. Field 2, in parentheses, can contain any character.
fn start_time(pid: i32) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = text.rsplit_once(')').ok_or(io::ErrorKind::InvalidData)?;
    let field = fields.split_ascii_whitespace().nth(19).ok_or(io::ErrorKind::InvalidData)?;
    field.parse().map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_end_of_a_process_is_seen_and_another_start_is_another_process() {
        let mut child = tokio::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = i32::try_from(child.id().expect("a number")).expect("a pid");
        let process = Process::open(pid).expect("it lives");
        assert_eq!(process.id, Process::open(pid).expect("it lives").id);
        let soon = std::time::Duration::from_millis(50);
        assert!(tokio::time::timeout(soon, process.ended()).await.is_err(), "it still runs");
        assert!(!process.has_ended());
        process.signal(Signal::KILL).expect("a signal");
        process.ended().await.expect("its end");
        assert!(process.has_ended(), "also before it is reaped");
        child.wait().await.expect("reaped");
        process.signal(Signal::KILL).expect("nobody is met");
        assert!(Process::open(pid).is_err(), "nobody has the number");
        for none in [pid, 0, -1, i32::MAX] {
            assert!(Process::find(none).expect("known").is_none(), "{none}");
        }
    }

    #[test]
    fn a_look_that_fails_does_not_mean_that_there_is_no_process() {
        for errno in [nix::libc::EMFILE, nix::libc::ENOMEM, nix::libc::EACCES] {
            assert!(!means_none(&io::Error::from_raw_os_error(errno)), "{errno}");
        }
    }
}
