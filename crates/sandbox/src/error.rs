//! Errors of sandboxes.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::{conf::ConfError, name::SandboxName, plugin::PluginError, store::LOCK_PATIENCE, view::State};

/// Failure of an operation.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The sandbox exists.
    #[error("create sandbox {name}: it exists, and is {state}")]
    Exists { name: SandboxName, state: State },
    /// Another file has the namespace's path.
    #[error("create sandbox {name}: {} is there and belongs to no sandbox", path.display())]
    NamespaceTaken { name: SandboxName, path: PathBuf },
    /// No sandbox has the name.
    #[error("{operation} sandbox {name}: no sandbox has this name")]
    Unknown { operation: &'static str, name: SandboxName },
    /// The state forbids the operation.
    #[error("{operation} sandbox {name}: it is {state}")]
    NotReady { operation: &'static str, name: SandboxName, state: State },
    /// Another process holds the lock.
    #[error("sandbox {name}: process {holder}, or a plugin that it started, still works on it after {} s", LOCK_PATIENCE.as_secs())]
    Busy {
        name: SandboxName,
        /// The process.
        holder: String,
    },
    /// The record is unusable.
    #[error("sandbox {name}: its record {} cannot be used: {why}", path.display())]
    Damaged {
        name: SandboxName,
        /// Path of the record.
        path: PathBuf,
        why: String,
    },
    /// Other users could change records.
    #[error("use state directory {}: {why}", path.display())]
    UnsafeDirectory { path: PathBuf, why: String },
    /// A directory has the path of a sandbox's file.
    #[error("remove {}: it is a directory, which no sandbox made", path.display())]
    Directory { path: PathBuf },
    /// Unusable network configuration.
    #[error("{0}")]
    Conf(#[from] ConfError),
    /// A plugin failed.
    #[error("{0}")]
    Plugin(#[from] Box<PluginError>),
    /// Failed system call.
    #[error("{operation} {}: {source}", path.display())]
    Io {
        operation: &'static str,
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Another object has the namespace's path, and stays.
    #[error("remove network namespace {}: {what} is there, which this sandbox did not make", path.display())]
    Foreign {
        path: PathBuf,
        /// The object.
        what: &'static str,
    },
    /// Processes did not end.
    #[error("stop sandbox {name}: processes have not ended after SIGKILL: {pids}")]
    Unkillable {
        name: SandboxName,
        /// Their process ids.
        pids: String,
    },
    /// The command runs inside the sandbox.
    #[error("stop sandbox {name}: this command runs inside its network namespace")]
    Inside { name: SandboxName },
    /// The command cannot be started.
    #[error("run {program} in sandbox {name}: {source}")]
    Start {
        name: SandboxName,
        /// The command.
        program: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// A create or start and its rollback failed.
    #[error("{cause}; what was made could not be taken back: {undo}")]
    Undo {
        name: SandboxName,
        /// Command that resumes the rollback.
        verb: &'static str,
        /// The first failure.
        cause: Box<SandboxError>,
        /// The rollback's failure.
        undo: Box<SandboxError>,
    },
    /// Several steps failed.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Several(Vec<SandboxError>),
}

impl SandboxError {
    /// Advice for the operator.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Exists { name, state: State::Ready } => {
                format!("use it (`wharf sandbox exec {name} -- COMMAND`), or `wharf sandbox rm {name}` first")
            }
            Self::Exists { name, state } | Self::NotReady { name, state, .. } => to_ready(name, *state),
            Self::NamespaceTaken { path, .. } => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                format!(
                    "take another name; `ip netns list` shows it, `ip netns del {name}` removes it if nobody needs it"
                )
            }
            Self::Unknown { .. } => "`wharf sandbox list` shows all of them".to_owned(),
            Self::Busy { .. } => "try again when that process has ended".to_owned(),
            Self::Damaged { name, .. } => format!(
                "`wharf sandbox rm --force {name}` removes the record alone; see \"Troubleshooting\" in the page \"Sandboxes without a container runtime\" of the documentation (/usr/share/doc/wharf)"
            ),
            Self::UnsafeDirectory { path, .. } => {
                let path = path.display();
                format!(
                    "`chown root {path}` and `chmod go-w {path}` if all in it is yours, or choose another `--state-dir`"
                )
            }
            Self::Directory { path } => {
                let path = path.display();
                format!("look into it, move it away or remove it (`rm -r {path}`), then try again")
            }
            Self::Conf(error) => return error.hint(),
            Self::Plugin(error) => return error.hint(),
            Self::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => "run it as root".to_owned(),
            Self::Io { .. } | Self::Start { .. } => return None,
            Self::Foreign { path, .. } => format!("look at {} and remove it, then try again", path.display()),
            Self::Unkillable { .. } => {
                "they wait in the kernel; `cat /proc/PID/stack` shows for what; try again later".to_owned()
            }
            Self::Inside { .. } => "run it from the node's own network namespace".to_owned(),
            Self::Undo { name, verb, cause, undo } => {
                let more = cause.hint().or_else(|| undo.hint()).map(|hint| format!("; {hint}")).unwrap_or_default();
                format!("`wharf sandbox {verb} {name}` resumes the undo{more}")
            }
            Self::Several(all) => return all.iter().find_map(Self::hint),
        })
    }

    pub(crate) fn all(mut errors: Vec<Self>) -> Result<(), Self> {
        match errors.len() {
            0 => Ok(()),
            1 => errors.pop().map_or(Ok(()), Err),
            _ => Err(Self::Several(errors)),
        }
    }
}

fn to_ready(name: &SandboxName, state: State) -> String {
    match state {
        State::Stopped | State::Gone => {
            format!("`wharf sandbox start {name}` starts it; `wharf sandbox rm {name}` frees the name")
        }
        State::Detached | State::StopUnfinished => format!(
            "`wharf sandbox stop {name}`, then `wharf sandbox start {name}` attaches it again; `wharf sandbox rm {name}` frees the name"
        ),
        State::Creating | State::Stopping | State::Ready => "try again when that command has ended".to_owned(),
        State::Interrupted | State::Broken | State::Damaged => format!("`wharf sandbox rm {name}`, then make it again"),
    }
}

pub(crate) fn io(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SandboxError {
    let path = path.to_owned();
    move |source| SandboxError::Io { operation, path, source }
}

/// As [`io()`], for errors of nix.
pub(crate) fn errno(operation: &'static str, path: &Path) -> impl FnOnce(nix::errno::Errno) -> SandboxError {
    let wrap = io(operation, path);
    move |e| wrap(e.into())
}
