//! Body of `GET /v1/health`: health endpoints of the nodes, and their probes by this node.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::IpFamily;

/// State of a health endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HealthState {
    /// All probes of the last round were answered.
    Ok,
    /// Not launched or probed yet.
    #[default]
    Starting,
    /// Turned off (interval 0).
    Off,
    /// Some probes of the last round, or a few consecutive rounds, failed.
    Degraded,
    /// Another process answers at its address.
    WrongAnswer,
    /// The launch or many consecutive rounds failed.
    Down,
}

impl HealthState {
    /// The name in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Starting => "starting",
            Self::Off => "off",
            Self::Degraded => "degraded",
            Self::WrongAnswer => "wrong-answer",
            Self::Down => "down",
        }
    }
}

/// Kind of probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeKind {
    /// ICMP echo, answered by the namespace's kernel.
    Icmp,
    /// TCP connection to port 4240, answered by the kernel for a listener.
    Tcp,
    /// `GET /hello` on that connection, answered by the process.
    Http,
}

impl ProbeKind {
    /// The name for people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Icmp => "ICMP",
            Self::Tcp => "TCP",
            Self::Http => "HTTP",
        }
    }
}

/// Result of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeOutcome {
    /// Correct answer in time.
    Answered,
    /// No answer in time, or an error.
    NoAnswer,
    /// An answer that is not from the health endpoint.
    WrongAnswer,
    /// Not sent or counted.
    NotTried,
}

/// Recent results of one probe kind and address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProbeStatus {
    /// Family of the address.
    pub family: IpFamily,
    /// Address.
    #[schema(value_type = String)]
    pub address: IpAddr,
    /// Kind of probe.
    pub probe: ProbeKind,
    /// Last result.
    pub outcome: ProbeOutcome,
    /// Error of the last probe, if any.
    pub error: String,
    /// Last round-trip time in the window, microseconds.
    pub last_us: Option<u64>,
    /// Minimum in the window, microseconds.
    pub min_us: Option<u64>,
    /// Mean in the window, microseconds.
    pub mean_us: Option<u64>,
    /// Maximum in the window, microseconds.
    pub max_us: Option<u64>,
    /// Probes in the window (60 at most) since the launch.
    pub sent: u64,
    /// Probes in the window without a correct answer.
    pub lost: u64,
}

/// A relaunch of the health endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Relaunch {
    /// Time, milliseconds since the Unix epoch.
    pub unix_ms: u64,
    /// Failed probe or missing part.
    pub reason: String,
}

/// Health endpoint of a node; for other nodes, also probes of their own addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeHealth {
    /// Node name.
    pub node: String,
    /// Whether it is the answering agent's node.
    pub local: bool,
    /// State.
    pub state: HealthState,
    /// Failure and next step.
    pub message: String,
    /// Start of the state, Unix ms.
    pub since_unix_ms: u64,
    /// IPv4 address.
    #[schema(value_type = Option<String>)]
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address.
    #[schema(value_type = Option<String>)]
    pub ipv6: Option<Ipv6Addr>,
    /// Problem with the kept addresses.
    pub address_note: Option<String>,
    /// Endpoint id (local node).
    pub endpoint: Option<u16>,
    /// Process id (local node).
    pub pid: Option<u32>,
    /// Milliseconds between rounds; 0 for off.
    pub interval_ms: u64,
    /// End of the last round, Unix ms.
    pub last_round_unix_ms: Option<u64>,
    /// Rounds since agent start.
    pub rounds: u64,
    /// Consecutive failed rounds.
    pub failed_rounds: u64,
    /// Launches since agent start (local node).
    pub launches: u64,
    /// Launches that failed since the agent started.
    pub failed_launches: u64,
    /// The last deletion for a relaunch.
    pub last_relaunch: Option<Relaunch>,
    /// Probes of the last round, ICMP of node addresses first.
    pub probes: Vec<ProbeStatus>,
}

/// Body of `GET /v1/health`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HealthReport {
    /// The local node, then other nodes by name.
    pub nodes: Vec<NodeHealth>,
}
