//! Events of the monitor.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A line of `GET /v1/monitor` (newline-delimited JSON).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "type")]
pub enum MonitorEvent {
    /// A packet was dropped.
    Drop(PacketEvent),
    /// A packet was forwarded (only for endpoints that trace).
    Trace(PacketEvent),
    /// The proxy let a request or a connection pass, or not.
    L7(RequestEvent),
    /// The agent did something.
    Agent(AgentEvent),
    /// This reader was too slow, or the ring buffer was full.
    Lost {
        /// How many events.
        count: u64,
    },
}

/// Every [`PacketEvent::reason`], by number. Of `wharf-common`'s reasons those that are verdicts; a test of the agent
/// compares the two.
pub const PACKET_REASONS: &[&str] = &[
    "forwarded-local",
    "forwarded-stack",
    "neighbour-answered",
    "redirected",
    "malformed",
    "unsupported-l2-protocol",
    "invalid-source-mac",
    "invalid-source-ip",
    "neighbour-spoof",
    "neighbour-unknown-target",
    "multicast-unsupported",
    "ttl-exceeded",
    "endpoint-not-ready",
    "destination-gone",
    "not-endpoint-address",
    "packet-write-failed",
    "no-config",
    "invalid-destination-mac",
    "invalid-destination-ip",
    "bandwidth-exceeded",
    "fragment-without-first",
    "node-program-gone",
    "policy-denied",
    "peer-policy-denied",
    "proxy-unavailable",
    "transport-header-not-found",
    "proxy-share-spent",
];

/// A packet seen by an endpoint's program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PacketEvent {
    /// Milliseconds since the Unix epoch.
    pub time_unix_ms: u64,
    /// Endpoint id.
    pub endpoint: u32,
    /// Epoch.
    pub epoch: u64,
    /// Identity.
    pub identity: u32,
    /// `ingress` or `egress`.
    pub direction: String,
    /// One of [`PACKET_REASONS`].
    pub reason: String,
    /// Of a packet that policy dropped: the rule that denies it, or that no rule allows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// `IPv4`, `IPv6`, `ARP` or the number in hex.
    pub ethertype: String,
    /// IP protocol: its name, or `protocol` and its number. Empty unless the packet is IP.
    pub protocol: String,
    /// What an ICMP, ICMPv6 or ARP packet says, for example `echo-request`, `neighbor-solicitation`, `request`;
    /// `type 200 code 3` or `operation 9` when it has no name here.
    pub message: Option<String>,
    /// Source address.
    #[schema(value_type = Option<String>)]
    pub source: Option<IpAddr>,
    /// Source port; 0 unless the packet is TCP or UDP.
    pub source_port: u16,
    /// Destination address.
    #[schema(value_type = Option<String>)]
    pub destination: Option<IpAddr>,
    /// Destination port; 0 unless the packet is TCP or UDP.
    pub destination_port: u16,
    /// Bytes, Ethernet header included.
    pub length: u32,
}

/// A request, a TLS connection, or a query of DNS that the proxy judged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RequestEvent {
    /// When it began, milliseconds since the Unix epoch.
    pub time_unix_ms: u64,
    /// Endpoint whose rules judged it.
    pub endpoint: u16,
    /// Its epoch.
    pub epoch: u64,
    /// `ingress` or `egress`, as that endpoint sees it.
    pub direction: String,
    /// `forwarded`, `denied`, or `failed` where the server was not reached or the request not understood.
    pub verdict: String,
    /// `HTTP/1.1`, `HTTP/2`, `HTTP/1.0`, `HTTP`, `TLS` or `DNS`.
    pub protocol: String,
    /// Method, or type of a query (`AAAA`); empty if it is not known.
    pub method: String,
    /// Path with its query, normalized; empty for TLS and DNS.
    pub path: String,
    /// Host of the request, name of the TLS handshake, name asked for.
    pub host: String,
    /// Status of the answer; 0 if there was none, and for TLS and DNS.
    pub status: u16,
    /// Response code of DNS (IANA's name of it); empty if there was no answer, and for everything else.
    #[serde(default)]
    pub response: String,
    /// Microseconds from its beginning to the end of the answer, or of the connection; `None` if the proxy does not say.
    pub latency_us: Option<u64>,
    /// Address and port of the client.
    #[schema(value_type = Option<String>)]
    pub source: Option<SocketAddr>,
    /// Address and port that the client asked for.
    #[schema(value_type = Option<String>)]
    pub destination: Option<SocketAddr>,
    /// Envoy's response flags, for example `UF` (no connection to the server), joined by commas; of DNS, what went wrong.
    pub flags: String,
}

/// Something the agent did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentEvent {
    /// Milliseconds since the Unix epoch.
    pub time_unix_ms: u64,
    /// Endpoint id, when it is about one.
    pub endpoint: Option<u16>,
    /// `endpoint-created`, `endpoint-regenerated`, `endpoint-deleted`, `agent-started`, ...
    pub event: String,
    /// In words.
    pub message: String,
}
