//! Executes a CNI plugin with a time limit.

use std::{
    env,
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::{
            fs::{FileExt as _, PermissionsExt as _},
            process::CommandExt as _,
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{MemfdFlags, memfd_create},
    process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open},
};
use serde::Deserialize;
use serde_json::Value;

/// `wharf-cni` ends within 65 s.
pub(crate) const LIMIT: Duration = Duration::from_secs(90);
const MAX_ANSWER: u64 = 1 << 20;
const LOOK: Duration = Duration::from_millis(100);
const MAX_NEW: usize = 8 << 10;
/// Characters of a quoted line.
const MAX_TOLD: usize = 300;

/// Operation of a plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Attach.
    Add,
    /// Detach.
    Del,
    /// Compare.
    Check,
}

impl Verb {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
        }
    }
}

/// Failure of a plugin.
#[derive(Debug, thiserror::Error)]
#[error("{cause} ({} of plugin {plugin}, network {network}, interface {ifname}{})", verb.as_str(), code(cause))]
pub struct PluginError {
    /// Operation.
    pub verb: Verb,
    /// Type of the plugin.
    pub plugin: String,
    pub network: String,
    pub ifname: String,
    pub cause: Failure,
}

fn code(cause: &Failure) -> String {
    match cause {
        Failure::Answered { code, .. } => format!(", code {code}"),
        _ => String::new(),
    }
}

impl PluginError {
    pub(crate) fn hint(&self) -> Option<String> {
        match &self.cause {
            Failure::Answered { details, .. } => (!details.is_empty()).then(|| details.clone()),
            Failure::Missing { .. } => Some("install it, or name its directory by --cni-bin-dir".to_owned()),
            Failure::Late { .. } => Some("its process was killed; try again".to_owned()),
            Failure::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some("run it as root".to_owned())
            }
            Failure::Io { .. } | Failure::Ended { .. } | Failure::Answer { .. } => None,
        }
    }
}

/// Cause of a plugin's failure.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// No directory has it.
    #[error("no such program in {path}")]
    Missing {
        /// The directories.
        path: String,
    },
    /// Failed system call.
    #[error("{what}: {source}")]
    Io {
        /// Operation.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// Time limit exceeded.
    #[error("it had not ended after {} s", .limit.as_secs())]
    Late {
        /// The time limit.
        limit: Duration,
    },
    /// The plugin returned a CNI error.
    #[error("{msg}")]
    Answered {
        /// CNI's code.
        code: u64,
        msg: String,
        details: String,
    },
    /// Failure without a valid CNI error.
    #[error("it ended with {status}{said}")]
    Ended {
        status: ExitStatus,
        /// Last line of standard error.
        said: String,
    },
    /// Success with an invalid result.
    #[error("its answer is no result: {why}")]
    Answer { why: String },
}

#[derive(Deserialize)]
struct Answered {
    code: u64,
    #[serde(default)]
    msg: String,
    #[serde(default)]
    details: String,
}

#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) verb: Verb,
    pub(crate) container_id: &'a str,
    /// Empty when the namespace is gone.
    pub(crate) netns: &'a Path,
    pub(crate) ifname: &'a str,
    pub(crate) cni_args: &'a str,
    pub(crate) path: &'a [PathBuf],
    pub(crate) conf: &'a Value,
    /// The sandbox's lock. The plugin inherits it: until the plugin ends, no other process works on the sandbox, even
    /// if this process dies.
    pub(crate) lock: BorrowedFd<'a>,
    pub(crate) limit: Duration,
}

impl Call<'_> {
    /// Returns ADD's result. `told` receives lines of standard error.
    pub(crate) fn run(&self, told: &dyn Fn(&str)) -> Result<Option<Value>, Box<PluginError>> {
        let text = |key: &str| self.conf.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let plugin = text("type");
        self.execute(&plugin, told).map_err(|cause| {
            Box::new(PluginError {
                verb: self.verb,
                network: text("name"),
                ifname: self.ifname.to_owned(),
                plugin,
                cause,
            })
        })
    }

    fn execute(&self, plugin: &str, told: &dyn Fn(&str)) -> Result<Option<Value>, Failure> {
        let io = |what| move |source: io::Error| Failure::Io { what, source };
        let program = find(self.path, plugin)?;
        let mut input = memory().map_err(io("make its input"))?;
        let (mut out, mut err) = (memory().map_err(io("make its output"))?, memory().map_err(io("make its output"))?);
        input
            .write_all(self.conf.to_string().as_bytes())
            .and_then(|()| input.seek(SeekFrom::Start(0)))
            .map_err(io("write its input"))?;
        let mut command = Command::new(program);
        for (name, _) in env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("CNI_")) {
            command.env_remove(name);
        }
        command
            .env("CNI_COMMAND", self.verb.as_str())
            .env("CNI_CONTAINERID", self.container_id)
            .env("CNI_NETNS", self.netns)
            .env("CNI_IFNAME", self.ifname)
            .env("CNI_ARGS", self.cni_args)
            .env("CNI_PATH", env::join_paths(self.path).unwrap_or_default())
            .stdin(input)
            .stdout(Stdio::from(out.try_clone().map_err(io("make its output"))?))
            .stderr(Stdio::from(err.try_clone().map_err(io("make its output"))?))
            // Keeps terminal interrupts from the plugin, and allows killing its children.
            .process_group(0);
        let inherited = rustix::io::dup(self.lock).map_err(|e| io("hand on the lock")(e.into()))?;
        let mut child = command.spawn().map_err(io("execute it"))?;
        drop(inherited);
        let mut lines = Lines::of(&err);
        let said = || lines.new_lines().iter().for_each(|line| told(&format!("plugin {plugin}: {line}")));
        let Some(status) = wait(&mut child, self.limit, said).map_err(io("wait for it"))? else {
            return Err(Failure::Late { limit: self.limit });
        };
        let answer = read_back(&mut out).map_err(io("read its answer"))?;
        if !status.success() {
            return Err(match serde_json::from_slice::<Answered>(&answer) {
                Ok(Answered { code, msg, details }) => Failure::Answered { code, msg, details },
                Err(_) => Failure::Ended { status, said: last_words(&read_back(&mut err).unwrap_or_default()) },
            });
        }
        if self.verb != Verb::Add {
            return Ok(None);
        }
        let result: Value = serde_json::from_slice(&answer).map_err(|e| Failure::Answer { why: e.to_string() })?;
        if !result.is_object() {
            return Err(Failure::Answer { why: "it is no object".to_owned() });
        }
        Ok(Some(result))
    }
}

pub(crate) fn find(path: &[PathBuf], plugin: &str) -> Result<PathBuf, Failure> {
    // Stored records reach this function unchecked.
    let is_name = !plugin.contains('/');
    for program in path.iter().filter(|_| is_name).map(|directory| directory.join(plugin)) {
        match program.metadata() {
            Ok(found) if found.is_file() && found.permissions().mode() & 0o111 != 0 => return Ok(program),
            // Another user may see it.
            Err(source) if source.kind() == io::ErrorKind::PermissionDenied => {
                return Err(Failure::Io { what: "look for its program", source });
            }
            _ => {}
        }
    }
    Err(Failure::Missing { path: path.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(":") })
}

fn memory() -> io::Result<File> {
    Ok(memfd_create("wharf-cni-call", MemfdFlags::CLOEXEC)?.into())
}

fn read_back(file: &mut File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.take(MAX_ANSWER).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn last_words(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let line = text.lines().map(str::trim).rfind(|line| !line.is_empty());
    line.map(|line| format!(": {}", line.chars().take(MAX_TOLD).collect::<String>())).unwrap_or_default()
}

/// Complete lines of a growing file, read by position, because the writer shares the offset.
struct Lines<'a> {
    file: &'a File,
    read: u64,
}

impl<'a> Lines<'a> {
    fn of(file: &'a File) -> Self {
        Self { file, read: 0 }
    }

    /// Skips unreadable lines.
    fn new_lines(&mut self) -> Vec<String> {
        let mut bytes = vec![0; MAX_NEW];
        let read = self.file.read_at(&mut bytes, self.read).unwrap_or_default();
        bytes.truncate(read);
        let whole = match bytes.iter().rposition(|b| *b == b'\n') {
            Some(at) => at + 1,
            None if read == MAX_NEW => read,
            None => 0,
        };
        bytes.truncate(whole);
        self.read = self.read.saturating_add(u64::try_from(whole).unwrap_or_default());
        let text = String::from_utf8_lossy(&bytes);
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        lines.map(|line| line.chars().take(MAX_TOLD).collect()).collect()
    }
}

/// Calls `look` periodically. At the limit, kills the process group, and returns `None`.
fn wait(child: &mut Child, limit: Duration, mut look: impl FnMut()) -> io::Result<Option<ExitStatus>> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    let end = Instant::now() + limit;
    let mut has_ended = false;
    while !has_ended && Instant::now() < end {
        has_ended = await_end(pidfd.as_fd(), LOOK.min(end.saturating_duration_since(Instant::now())))?;
        if !has_ended {
            look();
        }
    }
    if !has_ended {
        // Not reaped yet, so the group id is valid. The child may have left the group.
        let _ = kill_process_group(pid, Signal::KILL);
        child.kill()?;
        child.wait()?;
        return Ok(None);
    }
    child.wait().map(Some)
}

fn await_end(pidfd: BorrowedFd<'_>, limit: Duration) -> io::Result<bool> {
    let end = Instant::now() + limit;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let time = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::from_borrowed_fd(pidfd, PollFlags::IN)], Some(&time)) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(ready) => return Ok(ready > 0),
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
#[path = "plugin_tests.rs"]
mod tests;
