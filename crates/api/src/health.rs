//! What `GET /v1/health` tells: the health endpoints of the nodes, and what probing them gave.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::IpFamily;

/// How a health endpoint is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HealthState {
    /// Every probe of the last round was answered.
    Ok,
    /// Not launched or not probed yet.
    #[default]
    Starting,
    /// Turned off by its interval of 0.
    Off,
    /// The last round failed, but not often enough in a row to conclude anything.
    Degraded,
    /// Something else answers at its address.
    WrongAnswer,
    /// It cannot be launched, or round after round has failed.
    Down,
}

impl HealthState {
    /// Its word, as JSON has it.
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

/// A way to ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeKind {
    /// ICMP echo; the kernel of the namespace answers.
    Icmp,
    /// A TCP connection to port 4240; the kernel answers as long as somebody listens.
    Tcp,
    /// `GET /hello` on that connection; the process itself answers.
    Http,
}

impl ProbeKind {
    /// Its name for people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Icmp => "ICMP",
            Self::Tcp => "TCP",
            Self::Http => "HTTP",
        }
    }
}

/// What came of one probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeOutcome {
    /// The right answer, in time.
    Answered,
    /// None in time, or an error instead.
    NoAnswer,
    /// An answer, but not the health endpoint's.
    WrongAnswer,
    /// It could not be tried; counts for nothing.
    NotTried,
}

/// One way to ask one address, and what it gave lately.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProbeStatus {
    /// Family of the address.
    pub family: IpFamily,
    /// Address.
    #[schema(value_type = String)]
    pub address: IpAddr,
    /// How it was asked.
    pub probe: ProbeKind,
    /// What came of the last try.
    pub outcome: ProbeOutcome,
    /// Why it was not answered; empty when it was.
    pub error: String,
    /// Round-trip time of the last answer, microseconds; none without one in the window.
    pub last_us: Option<u64>,
    /// Shortest in the window, microseconds.
    pub min_us: Option<u64>,
    /// Mean over the window, microseconds.
    pub mean_us: Option<u64>,
    /// Longest in the window, microseconds.
    pub max_us: Option<u64>,
    /// Tries in the window: the last 60 since the endpoint was launched.
    pub sent: u64,
    /// Those without the right answer.
    pub lost: u64,
}

/// A relaunch of the health endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Relaunch {
    /// When, milliseconds since the Unix epoch.
    pub unix_ms: u64,
    /// Why: which probe failed how, or what was gone.
    pub reason: String,
}

/// The health endpoint of one node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeHealth {
    /// Node name.
    pub node: String,
    /// It is the node of the agent that answers.
    pub local: bool,
    /// How it is.
    pub state: HealthState,
    /// The state in words: what failed, and what is done about it.
    pub message: String,
    /// Since when it is in this state, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// IPv4 address.
    #[schema(value_type = Option<String>)]
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address.
    #[schema(value_type = Option<String>)]
    pub ipv6: Option<Ipv6Addr>,
    /// What was amiss with the addresses that were kept, if anything was.
    pub address_note: Option<String>,
    /// Id of its endpoint.
    pub endpoint: Option<u16>,
    /// Process id.
    pub pid: Option<u32>,
    /// Milliseconds between two rounds; 0 when it is turned off.
    pub interval_ms: u64,
    /// When the last round ended, milliseconds since the Unix epoch.
    pub last_round_unix_ms: Option<u64>,
    /// Rounds since the agent started.
    pub rounds: u64,
    /// Rounds that failed, since the last that did not.
    pub failed_rounds: u64,
    /// Launches since the agent started.
    pub launches: u64,
    /// Launches that failed since the agent started.
    pub failed_launches: u64,
    /// The last time it was deleted to be launched anew.
    pub last_relaunch: Option<Relaunch>,
    /// The last round.
    pub probes: Vec<ProbeStatus>,
}

/// Body of `GET /v1/health`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HealthReport {
    /// Every node that is probed; this one is the first.
    pub nodes: Vec<NodeHealth>,
}
