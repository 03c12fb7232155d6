//! What an observation or the audit finds amiss, as data. Three functions read it, and nothing else decides by words:
//! [`Problem::mender`] says who mends it, [`Problem::remedy`] what an operator should do, [`verdict`] how bad it is.
//! Status, audit, explain, the health of an endpoint and CHECK all take their verdict from here, so that they agree.

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

/// Something amiss.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Problem {
    /// With an endpoint that has a record.
    Endpoint(EndpointId, EndpointProblem),
    /// With the node's own part.
    Node(NodeProblem),
    /// Something that no record explains.
    Stray(Stray),
    /// Something in the store or in the deletion queue.
    Kept(Kept),
}

/// Who mends a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mender {
    /// A regeneration of the endpoint at this level. The leak audit asks for it.
    Regeneration(Level),
    /// The audit's own repair. The leak audit makes it.
    Repair,
    /// The audit's own repair, when an operator asks for it: it takes something away from a container that may live.
    Removal,
    /// The container, whose own doing it is. Where `regenerable`, a datapath regeneration that an operator asks for puts
    /// it back. The agent does not by itself: the container would do it again, and nobody else is harmed.
    Container {
        /// A datapath regeneration puts it back.
        regenerable: bool,
    },
    /// Nobody: it is a notice, nothing is amiss.
    Nobody,
    /// Only an operator.
    Operator,
}

/// How bad findings are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// Nothing is amiss; notices aside.
    Well,
    /// A container broke its own network. Its endpoint fails, the node is well.
    ContainersOwn,
    /// Something is amiss that is not a container's own doing.
    Amiss,
}

/// The worst of the findings.
#[must_use]
pub fn verdict<'a>(problems: impl IntoIterator<Item = &'a Problem>) -> Verdict {
    problems.into_iter().map(Problem::verdict).max().unwrap_or(Verdict::Well)
}

impl Problem {
    /// How bad this one is.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match self.mender() {
            Mender::Nobody => Verdict::Well,
            Mender::Container { .. } => Verdict::ContainersOwn,
            Mender::Regeneration(_) | Mender::Repair | Mender::Removal | Mender::Operator => Verdict::Amiss,
        }
    }

    /// Who mends it.
    #[must_use]
    pub fn mender(&self) -> Mender {
        match self {
            Self::Endpoint(_, problem) => problem.mender(),
            // Making the node's part again does not remove what is not Wharf's.
            Self::Node(
                NodeProblem::LinkForeign { .. }
                | NodeProblem::PoolOverlap(_)
                | NodeProblem::Bpffs { .. }
                | NodeProblem::Pin { .. },
            ) => Mender::Operator,
            Self::Node(_) => Mender::Repair,
            Self::Stray(stray) => match stray {
                Stray::Link { ours: true, .. }
                | Stray::Pins { .. }
                | Stray::Row { .. }
                | Stray::CallSlot { .. }
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
                | Kept::SharedAddress { .. }
                | Kept::RecordMissing { .. }
                | Kept::QueueAside { .. }
                | Kept::Queue { .. } => Mender::Operator,
            },
        }
    }

    /// True when the two tell of the same thing, whatever they found of it.
    #[must_use]
    pub fn is_about_the_same(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
            && self.object() == other.object()
            && self.subject() == other.subject()
    }
}
