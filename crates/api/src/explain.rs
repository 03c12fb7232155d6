//! What `GET /v1/explain/{subject}` and `GET /v1/log` tell.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Endpoint, Finding, Health, LogStatus, MetricRow};

/// What the words that were asked about turned out to name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SubjectKind {
    /// An endpoint that is there.
    Endpoint,
    /// One that was there, or whose create failed.
    PastEndpoint,
    /// One whose record was lost with a damaged store; its container lives.
    Orphan,
    /// A record out of service.
    Quarantined,
    /// An address that belongs to no endpoint.
    Address,
    /// A container of which nothing is left but its deletion record.
    DeletionRecord,
    /// Several things; choose one of `candidates`.
    Several,
    /// Nothing that this agent knows.
    Unknown,
}

/// Body of `GET /v1/explain/{subject}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// What was asked about, as it was understood.
    pub subject: String,
    /// What that is.
    pub kind: SubjectKind,
    /// How it is with it.
    pub health: Health,
    /// The conclusion, in one sentence.
    pub summary: String,
    /// The endpoint, when it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<Endpoint>,
    /// Who it is or was, and what else is known: names and values, in an order to read.
    pub facts: Vec<Fact>,
    /// What it waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<Wait>,
    /// What went wrong, the last first; at most eight.
    pub errors: Vec<TimelineEntry>,
    /// What happened, oldest first.
    pub timeline: Vec<TimelineEntry>,
    /// Entries of the timeline that were pushed out by later ones.
    pub left_out: u64,
    /// What its programs did with packets.
    pub verdicts: Vec<MetricRow>,
    /// What the kernel holds for it, held against what should be there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<KernelLook>,
    /// Who had the address or the id before, the last first.
    pub before: Vec<PastOwner>,
    /// Things that the words could mean, or that are near.
    pub candidates: Vec<Candidate>,
    /// Where was looked.
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

/// What something waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Wait {
    /// For what.
    pub waits_for: String,
    /// Since when, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// What ends the wait.
    pub ends_when: String,
}

/// One thing that happened to an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TimelineEntry {
    /// When it ended, milliseconds since the Unix epoch.
    pub time_unix_ms: u64,
    /// `create`, `undo`, `regenerate`, `relabel`, `restore`, `delete`, `notice`.
    pub operation: String,
    /// Step or event.
    pub phase: String,
    /// How long it took, microseconds; none for what has no length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub took_us: Option<u64>,
    /// How it went.
    pub outcome: LogStatus,
    /// In words; may be empty.
    pub text: String,
}

/// A look at the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KernelLook {
    /// Why nobody could look; none when somebody did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub could_not_look: Option<String>,
    /// What does not match.
    pub findings: Vec<Finding>,
}

/// Who had an address or an id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PastOwner {
    /// Endpoint id it had.
    pub endpoint: u16,
    /// Epoch.
    pub epoch: u64,
    /// Attachment.
    pub attachment: String,
    /// Addresses it had.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// When it was created, milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
    /// When it ended, milliseconds since the Unix epoch.
    pub ended_unix_ms: u64,
    /// How it ended, in words.
    pub end: String,
}

/// Something that can be asked about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Candidate {
    /// What to ask for.
    pub subject: String,
    /// What it is, in words.
    pub what: String,
}

/// Body of `GET /v1/log`: the last lines of the agent's log.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentLog {
    /// The lines, oldest first.
    pub lines: Vec<String>,
    /// Lines since start that are not kept any more.
    pub left_out: u64,
}
