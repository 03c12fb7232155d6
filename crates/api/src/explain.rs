//! Bodies of `GET /v1/explain/{subject}` and `GET /v1/log`.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Endpoint, Finding, Health, LogStatus, MetricRow};

/// Kind of the explained subject.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SubjectKind {
    /// An existing endpoint.
    Endpoint,
    /// A deleted endpoint or failed create.
    PastEndpoint,
    /// A live container whose endpoint record was lost with a damaged store.
    Orphan,
    /// A quarantined record.
    Quarantined,
    /// An address without an endpoint.
    Address,
    /// A container known only from its deletion record.
    DeletionRecord,
    /// Several matches: see `candidates`.
    Several,
    /// Unknown to the agent.
    Unknown,
}

/// Body of `GET /v1/explain/{subject}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// The subject as understood.
    pub subject: String,
    /// Kind of the subject.
    pub kind: SubjectKind,
    /// Health of the subject.
    pub health: Health,
    /// The conclusion in one sentence.
    pub summary: String,
    /// The endpoint, if it exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<Endpoint>,
    /// Further facts in reading order.
    pub facts: Vec<Fact>,
    /// The current wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<Wait>,
    /// Errors, newest first, at most eight.
    pub errors: Vec<TimelineEntry>,
    /// Timeline, oldest first.
    pub timeline: Vec<TimelineEntry>,
    /// Displaced timeline entries.
    pub left_out: u64,
    /// The programs' packet counters.
    pub verdicts: Vec<MetricRow>,
    /// Mismatches in the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<KernelLook>,
    /// Earlier owners of the address or id, newest first.
    pub before: Vec<PastOwner>,
    /// Possible meanings and close matches.
    pub candidates: Vec<Candidate>,
    /// Places that were searched.
    pub searched: Vec<String>,
}

/// A name and a value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Fact {
    /// Name.
    pub name: String,
    /// Value, in words.
    pub value: String,
}

/// A wait of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Wait {
    /// Condition that it waits for.
    pub waits_for: String,
    /// Start, Unix ms.
    pub since_unix_ms: u64,
    /// What ends the wait.
    pub ends_when: String,
}

/// An event of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TimelineEntry {
    /// End time, milliseconds since the Unix epoch.
    pub time_unix_ms: u64,
    /// `create`, `undo`, `regenerate`, `relabel`, `restore`, `delete`, `notice`.
    pub operation: String,
    /// Step or event.
    pub phase: String,
    /// Microseconds, if the event has a duration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub took_us: Option<u64>,
    /// Result.
    pub outcome: LogStatus,
    /// Description; may be empty.
    pub text: String,
}

/// Result of an inspection of the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KernelLook {
    /// Error of the inspection, if it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub could_not_look: Option<String>,
    /// Mismatches.
    pub findings: Vec<Finding>,
}

/// An earlier owner of an address or an id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PastOwner {
    /// Endpoint id.
    pub endpoint: u16,
    /// Epoch.
    pub epoch: u64,
    /// Attachment.
    pub attachment: String,
    /// Addresses.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// Time of creation, milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
    /// End time, milliseconds since the Unix epoch.
    pub ended_unix_ms: u64,
    /// How it ended.
    pub end: String,
}

/// A suggested subject.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Candidate {
    /// Subject for a new request.
    pub subject: String,
    /// Description.
    pub what: String,
}

/// Body of `GET /v1/log`: the last lines of the agent's log.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentLog {
    /// Lines, oldest first.
    pub lines: Vec<String>,
    /// Displaced lines since start.
    pub left_out: u64,
}
