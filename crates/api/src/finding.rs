//! Findings, and how well something is.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Overall or per-part health.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    /// As it should be.
    Ok,
    /// Not known yet, or not applicable now.
    Pending,
    /// Works in part.
    Degraded,
    /// Does not work.
    Failing,
}

/// Who mends a finding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MendedBy {
    /// The agent: its leak audit, when it has seen it twice, or `audit --repair` at once.
    Agent,
    /// `audit --repair`, when an operator asks for it: it takes something away from a container that may live.
    Removal,
    /// The container, whose own doing it is: its endpoint fails, the node is well.
    Container,
    /// Nobody: a notice, nothing is amiss.
    Nobody,
    /// An operator.
    #[default]
    Operator,
}

/// Something that is not as it should be.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// Kind of object: `link`, `route`, `pin`, `lease`, `endpoint`, `map-row`, `program`, `address`, ...
    pub object: String,
    /// Which one.
    pub subject: String,
    /// What is wrong, both sides named.
    pub problem: String,
    /// Whom it belongs or belonged to, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// True when `audit --repair` may mend it.
    #[serde(default)]
    pub repairable: bool,
    /// Who mends it.
    #[serde(default)]
    pub mended_by: MendedBy,
    /// What an operator should do.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
    /// What a repair did, or why it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repair: Option<String>,
}

/// Body of `GET|POST /v1/audit` (POST repairs).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditReport {
    /// What does not match; empty is healthy.
    pub findings: Vec<Finding>,
    /// How many objects were looked at, by kind.
    pub examined: BTreeMap<String, u64>,
}
