//! Why the health endpoint is not up, or not well.

use std::{borrow::Cow, io, path::PathBuf, process::ExitStatus};

use wharf_core::{ids::EndpointId, ipam::IpamError};

use crate::{endpoint::error::CreateError, store::StoreError};

/// Why the health endpoint is not up, or not well.
#[derive(Debug, thiserror::Error)]
pub enum HealthError {
    /// The store refuses to lease its addresses, or to give them back.
    #[error("{0}: {1}")]
    Store(&'static str, #[source] StoreError),
    /// No address can be leased.
    #[error("lease its addresses: {0}")]
    Lease(#[from] IpamError),
    /// A lease without an address.
    #[error("lease its addresses: none was given")]
    NoAddress,
    /// The thread or the process cannot be started, or read from.
    #[error("{0}: {1}")]
    Io(&'static str, #[source] io::Error),
    /// The process cannot be told its name and nonce. It was killed, with this result.
    #[error("start its process: {0} ({1:?})")]
    Hello(#[source] io::Error, io::Result<ExitStatus>),
    /// The process does not get ready: it ended, gave this reason, or takes too long.
    #[error("start its process: {0}")]
    NotReady(Cow<'static, str>),
    /// The namespace of the process cannot be read.
    #[error("look at its namespace {path}: {1}", path = .0.display())]
    Namespace(PathBuf, #[source] io::Error),
    /// The endpoint of the launch before still exists.
    #[error("the one before, endpoint {0}, cannot be deleted yet")]
    Before(EndpointId),
    /// The endpoint cannot be created.
    #[error(transparent)]
    Create(Box<CreateError>),
    /// Somebody deleted the endpoint right after its create.
    #[error("its endpoint was deleted at once")]
    Deleted,
    /// The endpoint is attached to the namespace of another process.
    #[error("its process ended, and its number became another's")]
    AnotherProcess,
    /// No launch while the agent stops.
    #[error("the agent is stopping")]
    Stopping,
    /// The message of the status: of a failed round, or of the failure whose backoff has not ended.
    #[error("{0}")]
    Down(String),
}
