//! Findings of observations and the audit, as data: code decides by their variants and fields, never by their text.

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

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Problem {
    /// Endpoint with a record.
    Endpoint(EndpointId, EndpointProblem),
    /// Object of the node.
    Node(NodeProblem),
    /// An orphan.
    Stray(Stray),
    /// Store or deletion queue.
    Kept(Kept),
}

/// Repairer of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mender {
    /// A regeneration, which the leak audit requests.
    Regeneration(Level),
    /// The audit's repair, which the leak audit makes.
    Repair,
    /// The audit's repair, on request: the container may still run.
    Removal,
    /// The container. A regeneration is not automatic: the container would cause the problem again.
    Container {
        /// A datapath regeneration on request repairs it.
        regenerable: bool,
    },
    /// None: the finding is a notice.
    Nobody,
    Operator,
}

/// Severity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// No problem, or only notices.
    Well,
    /// A container broke its network; the node is healthy.
    ContainersOwn,
    /// No container caused it.
    Amiss,
}

/// Highest severity.
#[must_use]
pub fn verdict<'a>(problems: impl IntoIterator<Item = &'a Problem>) -> Verdict {
    problems.into_iter().map(Problem::verdict).max().unwrap_or(Verdict::Well)
}

impl Problem {
    /// Severity.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match self.mender() {
            Mender::Nobody => Verdict::Well,
            Mender::Container { .. } => Verdict::ContainersOwn,
            Mender::Regeneration(_) | Mender::Repair | Mender::Removal | Mender::Operator => Verdict::Amiss,
        }
    }

    /// Repairer.
    #[must_use]
    pub fn mender(&self) -> Mender {
        match self {
            Self::Endpoint(_, problem) => problem.mender(),
            // Recreating the node's objects does not remove foreign objects.
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

    /// Same kind and object, regardless of the values found.
    #[must_use]
    pub fn is_about_the_same(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
            && self.object() == other.object()
            && self.subject() == other.subject()
    }
}
