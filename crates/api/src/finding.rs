//! Findings and health.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Health of a part or of the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    /// Healthy.
    Ok,
    /// Unknown, or not applicable now.
    Pending,
    /// Partly working.
    Degraded,
    /// Not working.
    Failing,
}

/// Who repairs a finding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MendedBy {
    /// The agent: its leak audit after it has found it twice, or `audit --repair` at once.
    Agent,
    /// `audit --repair` on an operator's request: the repair removes something from a container that may be alive.
    Removal,
    /// The container, which caused it: its endpoint is unhealthy, the node is healthy.
    Container,
    /// A notice that needs no repair.
    Nobody,
    /// An operator.
    #[default]
    Operator,
}

/// A mismatch between desired and observed state.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// Kind of object: `link`, `route`, `pin`, `lease`, `endpoint`, `map-row`, `program`, `address`, ...
    pub object: String,
    /// Which object.
    pub subject: String,
    /// The mismatch: expected and found.
    pub problem: String,
    /// Current or former owner, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// True when `audit --repair` may repair it.
    #[serde(default)]
    pub repairable: bool,
    /// Who repairs it.
    #[serde(default)]
    pub mended_by: MendedBy,
    /// What an operator should do.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
    /// Result of a repair, or why there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repair: Option<String>,
}

/// Body of `GET|POST /v1/audit`; POST repairs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditReport {
    /// Mismatches; empty when healthy.
    pub findings: Vec<Finding>,
    /// Number of examined objects by kind.
    pub examined: BTreeMap<String, u64>,
}
