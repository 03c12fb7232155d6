//! Findings as API objects.

use wharf_api::{Finding, Health, MendedBy};
use wharf_core::finding::{Mender, Problem, Verdict};

/// Remaining findings, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Left {
    /// Of the node.
    pub amiss: u64,
    /// Leases outside the pools, which work; part of `amiss`.
    pub outside: u64,
    /// Caused by containers.
    pub containers: u64,
}

/// A problem before a repair.
#[must_use]
pub fn finding(problem: &Problem, owner: Option<String>) -> Finding {
    let mender = problem.mender();
    Finding {
        object: problem.object().to_owned(),
        subject: problem.subject(),
        problem: problem.to_string(),
        owner,
        repairable: is_repairable(mender),
        mended_by: mended_by(mender),
        remedy: problem.remedy(),
        repair: None,
    }
}

const fn is_repairable(mender: Mender) -> bool {
    match mender {
        Mender::Regeneration(_) | Mender::Repair | Mender::Removal => true,
        Mender::Container { regenerable } => regenerable,
        Mender::Nobody | Mender::Operator => false,
    }
}

const fn mended_by(mender: Mender) -> MendedBy {
    match mender {
        Mender::Regeneration(_) | Mender::Repair => MendedBy::Agent,
        Mender::Removal => MendedBy::Removal,
        Mender::Container { .. } => MendedBy::Container,
        Mender::Nobody => MendedBy::Nobody,
        Mender::Operator => MendedBy::Operator,
    }
}

/// An endpoint's health.
#[must_use]
pub const fn endpoint_health(verdict: Verdict) -> Health {
    match verdict {
        Verdict::Well => Health::Ok,
        Verdict::ContainersOwn | Verdict::Amiss => Health::Failing,
    }
}

/// One line.
#[must_use]
pub fn in_words(problem: &Problem) -> String {
    format!("{} {}: {problem}", problem.object(), problem.subject())
}
