//! Errors of the health endpoint.

use std::{borrow::Cow, io, path::PathBuf, process::ExitStatus};

use wharf_core::{ids::EndpointId, ipam::IpamError};
use wharf_store::StoreError;

use crate::endpoint::error::CreateError;

/// Why the health endpoint is degraded or down.
#[derive(Debug, thiserror::Error)]
pub enum HealthError {
    /// The store refused a lease or release.
    #[error("{0}: {1}")]
    Store(&'static str, #[source] StoreError),
    /// No address can be leased.
    #[error("lease its addresses: {0}")]
    Lease(#[from] IpamError),
    /// The lease has no address.
    #[error("lease its addresses: none was given")]
    NoAddress,
    /// Process or thread cannot be started or read.
    #[error("{0}: {1}")]
    Io(&'static str, #[source] io::Error),
    /// The start message was not sent; result of the kill.
    #[error("start its process: {0} ({1:?})")]
    Hello(#[source] io::Error, io::Result<ExitStatus>),
    /// Process not ready, and why.
    #[error("start its process: {0}")]
    NotReady(Cow<'static, str>),
    /// Unreadable namespace.
    #[error("look at its namespace {path}: {1}", path = .0.display())]
    Namespace(PathBuf, #[source] io::Error),
    /// The previous endpoint still exists.
    #[error("the one before, endpoint {0}, cannot be deleted yet")]
    Before(EndpointId),
    /// Failed create.
    #[error(transparent)]
    Create(Box<CreateError>),
    /// Deleted right after its create.
    #[error("its endpoint was deleted at once")]
    Deleted,
    /// Its pid was reused by another process.
    #[error("its process ended, and its number became another's")]
    AnotherProcess,
    /// The agent stops.
    #[error("the agent is stopping")]
    Stopping,
    /// A failed round or a backoff.
    #[error("{0}")]
    Down(String),
}
