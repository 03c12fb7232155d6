//! Envoy as a process: started, watched, started again; taken over from an agent that ended before it.

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

/// How Envoy is run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envoy {
    /// The program.
    pub program: PathBuf,
    /// Directory of its own: its settings, its process number, the socket of the xDS server. Made if it is not there, mode 0750.
    /// Its path has at most 90 bytes, because sockets are in it.
    pub directory: PathBuf,
    /// Whom it runs as, with CAP_NET_ADMIN and CAP_NET_RAW alone (transparent sockets, marks). `None`: as the agent does, with
    /// what the agent may.
    pub user: Option<User>,
    /// Threads that serve connections, at least 1.
    pub threads: u16,
    /// Whether it ends with the agent (more exactly: with the thread that started it, and the workers of a runtime live as long as it). Else it outlives the agent, so that connections do, and the next agent takes it over.
    pub ends_with_agent: bool,
}

/// Numbers of a user and a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    /// User.
    pub uid: u32,
    /// Group; the only one.
    pub gid: u32,
}

/// What of Envoy's life failed.
#[derive(Debug, thiserror::Error)]
pub enum EnvoyError {
    /// A file in its directory.
    #[error("{operation} {path}: {source}")]
    File {
        /// What was to be done.
        operation: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The program.
    #[error("start Envoy ({program}): {source}; {hint}")]
    Start {
        /// The program.
        program: PathBuf,
        /// Why it failed.
        source: io::Error,
        /// What the user can do.
        hint: String,
    },
    /// The process.
    #[error("{operation} Envoy (process {pid}): {source}")]
    Process {
        /// What was to be done.
        operation: &'static str,
        /// The process.
        pid: i32,
        /// Why it failed.
        source: io::Error,
    },
}
