//! Errors of work on one endpoint.

use std::time::Duration;

use wharf_core::{
    identity_allocator::IdentityError, kernel::KernelError, plan::CreateStep, policy::MAX_NAMED_PORTS, state::State,
};

use crate::{policy::error::PolicyError, store::StoreError};

/// Why a bounded kernel call gave no result.
#[derive(Debug, Clone, thiserror::Error)]
pub enum JobError {
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Another call for the same endpoint id did not end.
    #[error("not begun within {bound:?}: it waits for {}", call(*.running))]
    NotBegun {
        /// How long it was waited for.
        bound: Duration,
        /// Step and age of the other call, while it is known.
        running: Option<(&'static str, Duration)>,
    },
    /// The call did not end; it continues.
    #[error("no answer within {0:?}")]
    NoAnswer(Duration),
}

fn call(running: Option<(&'static str, Duration)>) -> String {
    let known = running.map(|(step, since)| format!("{step} of the same endpoint, which runs for {since:?}"));
    known.unwrap_or_else(|| "another step".to_owned())
}

/// Why a build failed; the last good state is in force.
#[derive(Debug, Clone, thiserror::Error)]
pub enum BuildError {
    /// A delete ended it before this step.
    #[error("{0}: not begun, a delete came")]
    Cancelled(CreateStep),
    /// A step failed.
    #[error("{0}: {1}")]
    Step(CreateStep, JobError),
    /// The rows of its policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
}

/// Why a command to an endpoint was not carried out.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommandError {
    /// The endpoint's state does not allow it.
    #[error("{command} refused: the endpoint is {state}")]
    Refused {
        /// The command.
        command: &'static str,
        /// The state.
        state: State,
    },
    /// A delete came first.
    #[error("the endpoint is being deleted")]
    Deleted,
    /// The endpoint never was ready.
    #[error("the endpoint's create failed")]
    NotCreated,
    /// The build that realizes it failed.
    #[error("{0}; the last good state stays in force, and it is retried")]
    Build(#[from] BuildError),
    /// The labels have no identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// What gives identities did not answer in time.
    #[error("no identity for the labels within {0:?}; the endpoint keeps its labels")]
    NoIdentity(Duration),
    /// More named ports than are taken.
    #[error("{0} named ports, at most {MAX_NAMED_PORTS} are taken; remove some")]
    NamedPorts(usize),
    /// The rows of its policy.
    #[error("{}; the endpoint has the rules of before", refusal(.0))]
    Policy(#[from] PolicyError),
    /// The change was not committed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why policy refused the change of an endpoint, which is not tried again.
fn refusal(why: &PolicyError) -> String {
    match why {
        PolicyError::Kernel(kernel) => format!("put policy into the kernel: {kernel}"),
        other => other.to_string(),
    }
}
