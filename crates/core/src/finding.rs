//! Findings of observations and of the audit, as data. [`Problem::mender`] returns who repairs a problem,
//! [`Problem::remedy`] what an operator should do, [`verdict`] how severe problems are; no code decides by a
//! problem's text. Status, audit, explain, the health of an endpoint and CHECK all use these functions, so that they
//! agree.

use crate::{ids::EndpointId, state::Level};

mod endpoint;
mod node;
mod remedy;
mod stray;
#[cfg(test)]
mod tests;
mod words;

pub use endpoint::{EndpointProblem, Lookup, RouteSeen, Side, joined};
pub use node::NodeProblem;
pub use stray::{Kept, Stray};

/// A problem.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Problem {
    /// A problem of an endpoint that has a record.
    Endpoint(EndpointId, EndpointProblem),
    /// A problem of the node's own objects.
    Node(NodeProblem),
    /// An orphan.
    Stray(Stray),
    /// A problem of the store or of the deletion queue.
    Kept(Kept),
}

/// Who repairs a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mender {
    /// A regeneration of the endpoint at this level. The leak audit requests it.
    Regeneration(Level),
    /// The audit's own repair. The leak audit makes it.
    Repair,
    /// The audit's own repair, when an operator requests it: the repair removes objects of a container that may still
    /// run.
    Removal,
    /// The container, which caused the problem. Where `regenerable`, an operator can request a datapath regeneration
    /// that repairs it. The agent does not start one by itself: the container would cause the problem again, and no
    /// other endpoint is harmed.
    Container {
        /// A datapath regeneration repairs it.
        regenerable: bool,
    },
    /// Nobody: the finding is a notice.
    Nobody,
    /// Only an operator.
    Operator,
}

/// Severity of findings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// No problem, except notices.
    Well,
    /// A container broke its own network. Its endpoint fails, the node is healthy.
    ContainersOwn,
    /// A problem that no container caused itself.
    Amiss,
}

/// The highest severity of the findings.
#[must_use]
pub fn verdict<'a>(problems: impl IntoIterator<Item = &'a Problem>) -> Verdict {
    problems.into_iter().map(Problem::verdict).max().unwrap_or(Verdict::Well)
}

impl Problem {
    /// Severity of this problem.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match self.mender() {
            Mender::Nobody => Verdict::Well,
            Mender::Container { .. } => Verdict::ContainersOwn,
            Mender::Regeneration(_) | Mender::Repair | Mender::Removal | Mender::Operator => Verdict::Amiss,
        }
    }

    /// Who repairs this problem.
    #[must_use]
    pub fn mender(&self) -> Mender {
        match self {
            Self::Endpoint(_, problem) => problem.mender(),
            // Creating the node's objects again does not remove foreign objects.
            Self::Node(
                NodeProblem::LinkForeign { .. }
                | NodeProblem::Outbound { repairable: false, .. }
                | NodeProblem::Setting { repairable: false, .. }
                | NodeProblem::PoolOverlap(_)
                | NodeProblem::Bpffs { .. }
                | NodeProblem::Pin { repairable: false, .. },
            ) => Mender::Operator,
            Self::Node(_) => Mender::Repair,
            Self::Stray(stray) => match stray {
                Stray::Link { ours: true, .. }
                | Stray::Pins { .. }
                | Stray::Row { .. }
                | Stray::CallSlot { .. }
                | Stray::Nat { .. }
                | Stray::Route { ours: true, .. }
                | Stray::Lease { .. }
                | Stray::NodeLease { .. }
                | Stray::UnstoredLease { nobodys: true, .. }
                | Stray::Intent { .. } => Mender::Repair,
                Stray::Link { ours: false, .. }
                | Stray::MarkedLink { .. }
                | Stray::ForeignPin { .. }
                | Stray::Route { ours: false, .. }
                | Stray::UnstoredLease { nobodys: false, .. }
                | Stray::Delete { .. } => Mender::Operator,
            },
            Self::Kept(kept) => match kept {
                Kept::RestLeased { .. }
                | Kept::RestOutside { .. }
                | Kept::QueueFile { .. }
                | Kept::QueuedDelete { .. } => Mender::Repair,
                Kept::RecordAside { .. } | Kept::RecordUnreadable { .. } => Mender::Removal,
                Kept::LeaseMissing { .. }
                | Kept::LeaseHeld { .. }
                | Kept::LeaseOutside { .. }
                | Kept::SharedAddress { .. }
                | Kept::RecordMissing { .. }
                | Kept::QueueAside { .. }
                | Kept::Queue { .. } => Mender::Operator,
            },
        }
    }

    /// True when both problems are about the same object, whatever values they found.
    #[must_use]
    pub fn is_about_the_same(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
            && self.object() == other.object()
            && self.subject() == other.subject()
    }
}
