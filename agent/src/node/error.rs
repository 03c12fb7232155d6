//! Errors of work on one endpoint.

use std::time::Duration;

use ipnet::IpNet;
use wharf_core::{
    identity_allocator::IdentityError, kernel::KernelError, plan::CreateStep, policy::MAX_NAMED_PORTS, state::State,
};
use wharf_store::StoreError;

use crate::policy::error::PolicyError;

/// Why this node refuses source prefixes.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SourcesRefusal {
    /// Another plugin made the link.
    #[error("source prefixes are refused: another plugin made the interface, and its link may be a bridge")]
    Chained,
    /// Others have addresses in the prefix.
    #[error("source prefix {prefix} overlaps {with}")]
    Taken {
        prefix: IpNet,
        /// Owner of the addresses.
        with: String,
    },
    /// The node's addresses are unknown.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Failure of a bounded kernel call.
#[derive(Debug, Clone, thiserror::Error)]
pub enum JobError {
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Another call for this id runs.
    #[error("not begun within {bound:?}: it waits for {}", call(*.running))]
    NotBegun {
        /// Time waited.
        bound: Duration,
        /// Step and age, if known.
        running: Option<(&'static str, Duration)>,
    },
    /// No answer within the bound; the call continues.
    #[error("no answer within {0:?}")]
    NoAnswer(Duration),
}

fn call(running: Option<(&'static str, Duration)>) -> String {
    let known = running.map(|(step, since)| format!("{step} of the same endpoint, which runs for {since:?}"));
    known.unwrap_or_else(|| "another step".to_owned())
}

/// A failed build; the last good state is in force.
#[derive(Debug, Clone, thiserror::Error)]
pub enum BuildError {
    /// A delete came before this step.
    #[error("{0}: not begun, a delete came")]
    Cancelled(CreateStep),
    /// A step failed.
    #[error("{0}: {1}")]
    Step(CreateStep, JobError),
    /// The policy rows.
    #[error(transparent)]
    Policy(#[from] PolicyError),
}

/// A refused or failed command.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommandError {
    /// Not allowed in this state.
    #[error("{command} refused: the endpoint is {state}")]
    Refused { command: &'static str, state: State },
    /// A delete came first.
    #[error("the endpoint is being deleted")]
    Deleted,
    /// The create failed.
    #[error("the endpoint's create failed")]
    NotCreated,
    /// The build failed.
    #[error("{0}; the last good state stays in force, and it is retried")]
    Build(#[from] BuildError),
    /// The labels' identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// A timeout.
    #[error("no identity for the labels within {0:?}; the endpoint keeps its labels")]
    NoIdentity(Duration),
    /// Too many named ports.
    #[error("{0} named ports, at most {MAX_NAMED_PORTS} are taken; remove some")]
    NamedPorts(usize),
    /// Source prefixes.
    #[error("{0}; the endpoint keeps its source prefixes")]
    Sources(#[from] SourcesRefusal),
    /// The policy rows.
    #[error("{}; the endpoint has the rules of before", refusal(.0))]
    Policy(#[from] PolicyError),
    /// The commit.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Without the retry that [`PolicyError::Kernel`] announces.
fn refusal(why: &PolicyError) -> String {
    match why {
        PolicyError::Kernel(kernel) => format!("put policy into the kernel: {kernel}"),
        other => other.to_string(),
    }
}
