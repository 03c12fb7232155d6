//! Errors of audits and repairs.

use std::{sync::Arc, time::Duration};

use wharf_core::{ids::EndpointId, kernel::KernelError};

use crate::{
    endpoint::error::RemoveError,
    node::{
        error::{CommandError, JobError},
        queue::QueueFailure,
    },
    store::StoreError,
};

/// Failure of an audit.
#[derive(Debug, Clone, thiserror::Error)]
pub enum AuditError {
    /// The kernel cannot be read.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The store cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Orphans whose link is gone cannot be removed.
    #[error(transparent)]
    Orphan(#[from] RemoveError),
}

/// Failure of a repair.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RepairError {
    /// The kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A kernel call for an endpoint failed.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The regeneration failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// Leftovers remain.
    #[error(transparent)]
    Remove(#[from] RemoveError),
    /// The deletion queue; shared, because the error cannot be cloned.
    #[error("{0}")]
    Queue(Arc<QueueFailure>),
    /// Deletion records remain.
    #[error("{0} deletes could not be finished yet")]
    Unserved(usize),
    /// The endpoint was deleted.
    #[error("the endpoint is gone")]
    Gone,
    /// The build took too long.
    #[error("the build is still waiting for {0} after {1:?}")]
    Waits(&'static str, Duration),
    /// The build did not change it.
    #[error("a regeneration does not change it")]
    Unchanged,
    /// The intent explains objects that may exist.
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
