//! Envoy's process: start, supervision, restart, takeover.

mod check;
pub(crate) mod directory;
mod launch;
mod mark;
mod output;
mod reach;
mod socket;
mod supervise;

use std::{io, path::PathBuf};

pub(crate) use self::socket::Connection;
pub use self::socket::Socket;

/// How to run Envoy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envoy {
    /// Path, or a name to search in `PATH`.
    pub program: PathBuf,
    /// Exclusive directory, path at most 90 bytes; created with mode 0750.
    pub directory: PathBuf,
    /// User, with only CAP_NET_ADMIN and CAP_NET_RAW; `None` for the agent's.
    pub user: Option<User>,
    /// Worker threads, at least 1.
    pub threads: u16,
    /// Envoy ends with the thread that starts it; otherwise, the next agent takes it over.
    pub ends_with_agent: bool,
}

/// Numeric user and group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Group id, the only group.
    pub gid: u32,
}

/// Error of process management.
#[derive(Debug, thiserror::Error)]
pub enum EnvoyError {
    /// File access in Envoy's directory failed.
    #[error("{operation} {path}: {source}")]
    File {
        /// Failed operation.
        operation: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The program did not start.
    #[error("start Envoy ({program}): {source}; {hint}")]
    Start {
        program: PathBuf,
        source: io::Error,
        /// Advice for the user.
        hint: String,
    },
    /// A system call failed.
    #[error("{operation} Envoy (process {pid}): {source}")]
    Process {
        /// Failed operation.
        operation: &'static str,
        /// Process number.
        pid: i32,
        source: io::Error,
    },
}
