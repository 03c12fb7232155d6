//! Errors of audits and repairs.

use std::{sync::Arc, time::Duration};

use wharf_core::{ids::EndpointId, kernel::KernelError};
use wharf_store::StoreError;

use crate::{
    endpoint::error::RemoveError,
    node::{
        error::{CommandError, JobError},
        queue::QueueFailure,
    },
};

/// Audit failure.
#[derive(Debug, Clone, thiserror::Error)]
pub enum AuditError {
    /// Kernel unreadable.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Store unreadable.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Orphans without a link remain.
    #[error(transparent)]
    Orphan(#[from] RemoveError),
}

/// Repair failure.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RepairError {
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Endpoint's kernel call.
    #[error(transparent)]
    Job(#[from] JobError),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Regeneration.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// Leftovers remain.
    #[error(transparent)]
    Remove(#[from] RemoveError),
    /// Deletion queue; `Arc` because it is not `Clone`.
    #[error("{0}")]
    Queue(Arc<QueueFailure>),
    /// Deletion records remain.
    #[error("{0} deletes could not be finished yet")]
    Unserved(usize),
    /// The endpoint was deleted.
    #[error("the endpoint is gone")]
    Gone,
    /// Build timeout.
    #[error("the build is still waiting for {0} after {1:?}")]
    Waits(&'static str, Duration),
    /// The build had no effect.
    #[error("a regeneration does not change it")]
    Unchanged,
    /// The record explains objects that may exist.
    #[error("what it tells of may still be there")]
    Explains,
    /// The id is in use again.
    #[error("id {0} is in use again")]
    InUse(EndpointId),
    /// No answer in time.
    #[error("no answer within {0:?}")]
    NoAnswer(Duration),
}

impl From<QueueFailure> for RepairError {
    fn from(e: QueueFailure) -> Self {
        Self::Queue(Arc::new(e))
    }
}
