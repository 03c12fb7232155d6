//! Errors of the audit and of its repairs.

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

/// Why an audit could not be made.
#[derive(Debug, Clone, thiserror::Error)]
pub enum AuditError {
    /// The kernel cannot be read.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The store cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Endpoints whose link is gone cannot be forgotten.
    #[error(transparent)]
    Orphan(#[from] RemoveError),
}

/// Why a finding was not repaired.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RepairError {
    /// The kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A kernel call for an endpoint.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The endpoint's own regeneration.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// Parts of a leftover could not be removed.
    #[error(transparent)]
    Remove(#[from] RemoveError),
    /// The deletion queue; shared, because the error cannot be cloned.
    #[error("{0}")]
    Queue(Arc<QueueFailure>),
    /// Deletion records that could not be served.
    #[error("{0} deletes could not be finished yet")]
    Unserved(usize),
    /// The endpoint was deleted meanwhile.
    #[error("the endpoint is gone")]
    Gone,
    /// The build did not end in time.
    #[error("the build is still waiting for {0} after {1:?}")]
    Waits(&'static str, Duration),
    /// The build changed nothing.
    #[error("a regeneration does not change it")]
    Unchanged,
    /// The intent explains something that may still exist.
    #[error("what it tells of may still be there")]
    Explains,
    /// The id belongs to something else by now.
    #[error("id {0} is in use again")]
    InUse(EndpointId),
    /// The kernel did not answer.
    #[error("no answer within {0:?}")]
    NoAnswer(Duration),
}

impl From<QueueFailure> for RepairError {
    fn from(e: QueueFailure) -> Self {
        Self::Queue(Arc::new(e))
    }
}
