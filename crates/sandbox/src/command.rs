//! Commands in a sandbox: in its network namespace, and a mount namespace with its `/sys` and `/etc/resolv.conf`.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io,
    net::IpAddr,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{
            fs::OpenOptionsExt as _,
            process::{CommandExt as _, ExitStatusExt as _},
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
};

use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
    sys::statvfs::{FsFlags, statvfs},
    unistd::setsid,
};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;

use crate::{
    error::{SandboxError, errno, io},
    name::SandboxName,
    netns::on_thread,
};

const SYS: &str = "/sys";
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// A command for a sandbox.
#[derive(Debug, Clone)]
pub struct Launch {
    pub program: OsString,
    pub arguments: Vec<OsString>,
    pub output: Output,
}

/// Standard input and output.
#[derive(Debug, Clone)]
pub enum Output {
    /// Inherited from this process.
    Inherited,
    /// No input; inherited output.
    NoInput,
    /// The command's end of a terminal, its controlling terminal.
    Terminal(Arc<OwnedFd>),
    /// No input; output appended to a file, or discarded. The command outlives this process.
    Detached(Option<PathBuf>),
}

/// A running command.
#[derive(Debug)]
pub struct Started {
    child: Child,
    descriptor: OwnedFd,
}

/// Signals through a pidfd, never to a process that reuses the pid.
#[derive(Debug)]
pub struct Handle(OwnedFd);

impl Started {
    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A handle for signals.
    pub fn handle(&self) -> io::Result<Handle> {
        self.descriptor.try_clone().map(Handle)
    }

    pub(crate) fn end(mut self) {
        // Both calls fail only after the command's end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Exit status, or 128 plus the ending signal.
    pub fn wait(mut self) -> io::Result<u8> {
        let status = self.child.wait()?;
        let number = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
        Ok(number.and_then(|n| u8::try_from(n).ok()).unwrap_or(u8::MAX))
    }
}

impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Handle {
    /// Sends a signal. An ended command is no error.
    ///
    /// # Errors
    /// No such signal, or the kernel rejects the call.
    pub fn signal(&self, number: i32) -> io::Result<()> {
        let signal = Signal::from_named_raw(number).ok_or(io::ErrorKind::InvalidInput)?;
        match pidfd_send_signal(&self.0, signal) {
            Err(rustix::io::Errno::SRCH) => Ok(()),
            result => Ok(result?),
        }
    }
}

pub(crate) fn start(
    name: &SandboxName,
    namespace: &File,
    dns: Option<&str>,
    launch: &Launch,
) -> Result<Started, SandboxError> {
    let mut command = Command::new(&launch.program);
    command.args(&launch.arguments);
    match &launch.output {
        Output::Inherited => {}
        Output::NoInput => {
            command.stdin(Stdio::null());
        }
        Output::Terminal(end) => {
            let end = || end.try_clone().map(Stdio::from).map_err(io("copy terminal for", name.as_ref()));
            command.stdin(end()?).stdout(end()?).stderr(end()?);
            let take = || {
                setsid().map_err(io::Error::from)?;
                // SAFETY: the call takes a number and touches no memory.
                match unsafe { libc::ioctl(libc::STDIN_FILENO, libc::TIOCSCTTY, 0) } {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                }
            };
            // SAFETY: between fork and exec the closure only makes two system calls.
            unsafe { command.pre_exec(take) };
        }
        Output::Detached(log) => {
            let out = match log {
                Some(path) => {
                    let log = OpenOptions::new().append(true).create(true).mode(0o600).open(path);
                    Stdio::from(log.map_err(io("open log", path))?)
                }
                None => Stdio::null(),
            };
            let err = match log {
                Some(path) => Stdio::from(OpenOptions::new().append(true).open(path).map_err(io("open log", path))?),
                None => Stdio::null(),
            };
            command.stdin(Stdio::null()).stdout(out).stderr(err);
            let leave = || setsid().map(drop).map_err(io::Error::from);
            // A new session: the caller's terminal, interrupts and hangup do not affect the command.
            // SAFETY: between fork and exec the closure only makes one system call.
            unsafe { command.pre_exec(leave) };
        }
    }
    // The child inherits the thread's namespaces.
    on_thread(|| {
        enter(name, namespace, dns)?;
        command.spawn().and_then(started).map_err(|source| SandboxError::Start {
            name: name.clone(),
            program: launch.program.to_string_lossy().into_owned(),
            source,
        })
    })
}

fn started(child: Child) -> io::Result<Started> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
    // Not reaped yet, so the pid is valid.
    Ok(Started { descriptor: pidfd_open(pid, PidfdFlags::empty())?, child })
}

fn enter(name: &SandboxName, namespace: &File, dns: Option<&str>) -> Result<(), SandboxError> {
    let sys = Path::new(SYS);
    setns(namespace, CloneFlags::CLONE_NEWNET).map_err(errno("enter network namespace of", name.as_ref()))?;
    unshare(CloneFlags::CLONE_NEWNS).map_err(errno("make mount namespace for", name.as_ref()))?;
    // Mounts propagate from the node, but not to it.
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>)
        .map_err(errno("make slaves of the mounts below", Path::new("/")))?;
    if let Some(text) = dns {
        resolve_by(text)?;
    }
    let read_only = statvfs(sys).is_ok_and(|sys| sys.flags().contains(FsFlags::ST_RDONLY));
    match umount2(sys, MntFlags::MNT_DETACH) {
        // Not a mount point.
        Ok(()) | Err(Errno::EINVAL) => {}
        Err(e) => return Err(errno("unmount", sys)(e)),
    }
    let flags = if read_only { MsFlags::MS_RDONLY } else { MsFlags::empty() };
    mount(Some("wharf-sandbox"), sys, Some("sysfs"), flags, None::<&str>).map_err(errno("mount sysfs on", sys))
}

/// The bind mount alone keeps the tmpfs alive, so no cleanup is needed.
fn resolve_by(text: &str) -> Result<(), SandboxError> {
    let (sys, target) = (Path::new(SYS), Path::new(RESOLV_CONF));
    // `/sys` always exists, and a sysfs later covers the tmpfs.
    mount(Some("wharf-sandbox"), sys, Some("tmpfs"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some("mode=0755"))
        .map_err(errno("mount tmpfs on", sys))?;
    let file = sys.join("resolv.conf");
    fs::write(&file, text).map_err(io("write", &file))?;
    mount(Some(&file), target, None::<&str>, MsFlags::MS_BIND, None::<&str>).map_err(errno("bind to", target))?;
    umount2(sys, MntFlags::MNT_DETACH).map_err(errno("unmount", sys))
}

/// resolv.conf(5) from a CNI result, without invalid words; `None` without a server.
#[must_use]
pub fn resolv_conf(result: &Value) -> Option<String> {
    let dns = result.get("dns")?;
    let texts = |key: &str| -> Vec<&str> {
        let list = dns.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        list.iter().filter_map(Value::as_str).filter(|text| is_word(text)).collect()
    };
    let servers: Vec<&str> = texts("nameservers").into_iter().filter(|s| s.parse::<IpAddr>().is_ok()).collect();
    if servers.is_empty() {
        return None;
    }
    let mut out: String = servers.iter().map(|server| format!("nameserver {server}\n")).collect();
    let (search, domain) = (texts("search"), dns.get("domain").and_then(Value::as_str).filter(|text| is_word(text)));
    // `search` and `domain` are exclusive; the last one would win.
    match (search.is_empty(), domain) {
        (false, _) => out.push_str(&format!("search {}\n", search.join(" "))),
        (true, Some(domain)) => out.push_str(&format!("domain {domain}\n")),
        (true, None) => {}
    }
    let options = texts("options");
    if !options.is_empty() {
        out.push_str(&format!("options {}\n", options.join(" ")));
    }
    Some(out)
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.len() <= 255 && text.bytes().all(|b| b.is_ascii_graphic())
}

impl SandboxError {
    /// Exit status of a failed start, as in shells: 127 for a missing program, else 126.
    #[must_use]
    pub fn start_status(&self) -> Option<u8> {
        match self {
            Self::Start { source, .. } if source.kind() == io::ErrorKind::NotFound => Some(127),
            Self::Start { .. } => Some(126),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn resolv_conf_of_a_result() {
        let all = json!({"dns": {"nameservers": ["10.0.0.53", "fd00::53"], "domain": "a.example", "search": ["b.example", "c"],
                         "options": ["ndots:2"]}});
        let text = "nameserver 10.0.0.53\nnameserver fd00::53\nsearch b.example c\noptions ndots:2\n";
        assert_eq!(resolv_conf(&all).as_deref(), Some(text));
        let domain = json!({"dns": {"nameservers": ["10.0.0.53"], "domain": "a.example"}});
        assert_eq!(resolv_conf(&domain).as_deref(), Some("nameserver 10.0.0.53\ndomain a.example\n"));
        for nothing in [json!({}), json!({"dns": {}}), json!({"dns": {"nameservers": ["here"], "search": ["a"]}})] {
            assert_eq!(resolv_conf(&nothing), None, "{nothing}");
        }
    }

    #[test]
    fn no_word_of_a_result_makes_a_line_of_its_own() {
        let hostile = json!({"dns": {"nameservers": ["10.0.0.53", "10.0.0.1\nnameserver 6.6.6.6"],
                             "search": ["a\nnameserver 6.6.6.6", "b c", "d"], "options": ["", "\u{1b}[2J"]}});
        assert_eq!(resolv_conf(&hostile).as_deref(), Some("nameserver 10.0.0.53\nsearch d\n"));
    }
}
