//! Errors of the health endpoint.

use std::{borrow::Cow, io, path::PathBuf, process::ExitStatus};

use wharf_core::{ids::EndpointId, ipam::IpamError};

use crate::{endpoint::error::CreateError, store::StoreError};

/// Why the health endpoint is down or degraded.
#[derive(Debug, thiserror::Error)]
pub enum HealthError {
    /// The store refuses to lease or release its addresses.
    #[error("{0}: {1}")]
    Store(&'static str, #[source] StoreError),
    /// No address can be leased.
    #[error("lease its addresses: {0}")]
    Lease(#[from] IpamError),
    /// A lease has no address.
    #[error("lease its addresses: none was given")]
    NoAddress,
    /// The thread or the process cannot be started, or read from.
    #[error("{0}: {1}")]
    Io(&'static str, #[source] io::Error),
    /// The start message cannot be sent. The process was killed, with this result.
    #[error("start its process: {0} ({1:?})")]
    Hello(#[source] io::Error, io::Result<ExitStatus>),
    /// Not ready: it ended, reported this reason, or takes too long.
    #[error("start its process: {0}")]
    NotReady(Cow<'static, str>),
    /// The process's namespace cannot be read.
    #[error("look at its namespace {path}: {1}", path = .0.display())]
    Namespace(PathBuf, #[source] io::Error),
    /// The previous launch's endpoint still exists.
    #[error("the one before, endpoint {0}, cannot be deleted yet")]
    Before(EndpointId),
    /// The endpoint cannot be created.
    #[error(transparent)]
    Create(Box<CreateError>),
    /// Deleted by a client right after its create.
    #[error("its endpoint was deleted at once")]
    Deleted,
    /// Attached to another process's namespace.
    #[error("its process ended, and its number became another's")]
    AnotherProcess,
    /// No launch while the agent stops.
    #[error("the agent is stopping")]
    Stopping,
    /// The status message of a failed round or a backoff.
    #[error("{0}")]
    Down(String),
}
