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
    /// The program.
    pub program: PathBuf,
    /// Exclusive directory for settings, process number and sockets. Made if missing, mode 0750; path at most 90
    /// bytes.
    pub directory: PathBuf,
    /// User with only CAP_NET_ADMIN and CAP_NET_RAW (transparent sockets, marks). `None`: like the agent.
    pub user: Option<User>,
    /// Worker threads, at least 1.
    pub threads: u16,
    /// Envoy ends with the agent (exactly: with the thread that starts it; runtime workers live as long). Otherwise
    /// Envoy and its connections outlive the agent, and the next agent takes Envoy over.
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

/// Error of Envoy's process management.
#[derive(Debug, thiserror::Error)]
pub enum EnvoyError {
    /// A file in Envoy's directory.
    #[error("{operation} {path}: {source}")]
    File {
        /// Failed operation.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The program did not start.
    #[error("start Envoy ({program}): {source}; {hint}")]
    Start {
        /// The program.
        program: PathBuf,
        /// Cause.
        source: io::Error,
        /// Advice for the user.
        hint: String,
    },
    /// The process.
    #[error("{operation} Envoy (process {pid}): {source}")]
    Process {
        /// Failed operation.
        operation: &'static str,
        /// Process number.
        pid: i32,
        /// Cause.
        source: io::Error,
    },
}
