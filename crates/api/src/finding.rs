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
    /// Unknown or not applicable.
    Pending,
    /// Partly working.
    Degraded,
    /// Not working.
    Failing,
}

/// Repairer of a finding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MendedBy {
    /// The agent: its audit after two sightings, or `audit --repair` at once.
    Agent,
    /// `audit --repair` on an operator's request: the repair affects a container that may be alive.
    Removal,
    /// The container, as the cause; the node is healthy.
    Container,
    /// No repair needed.
    Nobody,
    /// An operator.
    #[default]
    Operator,
}

/// A mismatch between desired and observed state.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// Kind: `link`, `route`, `pin`, `lease`, `endpoint`, `map-row`, `program`, `address`, ...
    pub object: String,
    /// Which object.
    pub subject: String,
    /// Expected and found state.
    pub problem: String,
    /// Current or former owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Whether `audit --repair` may repair it.
    #[serde(default)]
    pub repairable: bool,
    /// Who repairs it.
    #[serde(default)]
    pub mended_by: MendedBy,
    /// Advice for an operator.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
    /// Result of a repair, or why it was omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repair: Option<String>,
}

/// Body of `GET|POST /v1/audit`; POST repairs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditReport {
    /// Mismatches; empty when healthy.
    pub findings: Vec<Finding>,
    /// Examined objects by kind.
    pub examined: BTreeMap<String, u64>,
}
