//! Body of `GET /v1/health`: health endpoints of the nodes, and their probes by this node.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::IpFamily;

/// State of a health endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HealthState {
    /// Every probe of the last round was answered.
    Ok,
    /// Not launched or not probed yet.
    #[default]
    Starting,
    /// Turned off by an interval of 0.
    Off,
    /// Some probes of the last round failed, or too few rounds in a row did.
    Degraded,
    /// Something else answers at its address.
    WrongAnswer,
    /// The launch failed, or many rounds in a row failed.
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
    /// ICMP echo; the kernel of the namespace answers.
    Icmp,
    /// A TCP connection to port 4240; the kernel answers while a process listens.
    Tcp,
    /// `GET /hello` on that connection; the process answers.
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
    /// The right answer in time.
    Answered,
    /// No answer in time, or an error.
    NoAnswer,
    /// An answer, but not the health endpoint's.
    WrongAnswer,
    /// Not sent; not counted.
    NotTried,
}

/// Recent results of one kind of probe to one address.
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
    /// Why the last probe failed; empty when it was answered.
    pub error: String,
    /// Round-trip time of the last answer, microseconds; absent without an answer in the window.
    pub last_us: Option<u64>,
    /// Minimum in the window, microseconds.
    pub min_us: Option<u64>,
    /// Mean in the window, microseconds.
    pub mean_us: Option<u64>,
    /// Maximum in the window, microseconds.
    pub max_us: Option<u64>,
    /// Probes in the window: the last 60 since the launch.
    pub sent: u64,
    /// Probes in the window without the right answer.
    pub lost: u64,
}

/// A relaunch of the health endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Relaunch {
    /// Time, milliseconds since the Unix epoch.
    pub unix_ms: u64,
    /// Reason: the failed probe, or the missing part.
    pub reason: String,
}

/// The health endpoint of one node. Of other nodes, their own addresses are probed, too.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeHealth {
    /// Node name.
    pub node: String,
    /// True for the node of the answering agent.
    pub local: bool,
    /// State.
    pub state: HealthState,
    /// Description of the state: what failed, and the next step.
    pub message: String,
    /// Start of the state, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// IPv4 address.
    #[schema(value_type = Option<String>)]
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address.
    #[schema(value_type = Option<String>)]
    pub ipv6: Option<Ipv6Addr>,
    /// Problem with the kept addresses, if any.
    pub address_note: Option<String>,
    /// Endpoint id; of the local node.
    pub endpoint: Option<u16>,
    /// Process id; of the local node.
    pub pid: Option<u32>,
    /// Milliseconds between rounds; 0 when turned off.
    pub interval_ms: u64,
    /// End of the last round, milliseconds since the Unix epoch.
    pub last_round_unix_ms: Option<u64>,
    /// Rounds since the agent started.
    pub rounds: u64,
    /// Consecutive failed rounds.
    pub failed_rounds: u64,
    /// Launches since the agent started; of the local node.
    pub launches: u64,
    /// Launches that failed since the agent started.
    pub failed_launches: u64,
    /// The last deletion for a relaunch.
    pub last_relaunch: Option<Relaunch>,
    /// Probes of the last round, ICMP of a node's own addresses first.
    pub probes: Vec<ProbeStatus>,
}

/// Body of `GET /v1/health`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HealthReport {
    /// The local node, then the other nodes of the cluster by name.
    pub nodes: Vec<NodeHealth>,
}
