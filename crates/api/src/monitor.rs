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
    /// A packet was forwarded (only endpoints with tracing).
    Trace(PacketEvent),
    /// The proxy accepted or denied a request or connection.
    L7(RequestEvent),
    /// An agent event.
    Agent(AgentEvent),
    /// Events were lost: this reader was too slow, or the ring buffer was full.
    Lost {
        /// Number of events.
        count: u64,
    },
}

/// Every [`PacketEvent::reason`], by number: the verdicts among `wharf-common`'s reasons. A test of the agent
/// compares them.
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
    /// Of a packet that policy dropped: the denying rule, or that no rule allows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// `IPv4`, `IPv6`, `ARP`, or the number in hex.
    pub ethertype: String,
    /// IP protocol: its name, or `protocol` and its number. Empty unless the packet is IP.
    pub protocol: String,
    /// Message of an ICMP, ICMPv6 or ARP packet, for example `echo-request`, `neighbor-solicitation`, `request`;
    /// `type 200 code 3` or `operation 9` for one without a name.
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
    /// Length, bytes, with the Ethernet header.
    pub length: u32,
}

/// A request, TLS connection or DNS query that the proxy decided about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RequestEvent {
    /// Start, milliseconds since the Unix epoch.
    pub time_unix_ms: u64,
    /// Endpoint whose rules decided.
    pub endpoint: u16,
    /// Epoch of the endpoint.
    pub epoch: u64,
    /// `ingress` or `egress`, seen from the endpoint.
    pub direction: String,
    /// `forwarded`, `denied`, or `failed` (the server was not reached, or the request was not understood).
    pub verdict: String,
    /// `HTTP/1.1`, `HTTP/2`, `HTTP/1.0`, `HTTP`, `TLS` or `DNS`.
    pub protocol: String,
    /// Method, or DNS query type (`AAAA`); empty if unknown.
    pub method: String,
    /// Path with query, normalized; empty for TLS and DNS.
    pub path: String,
    /// Host of the request, server name of the TLS handshake, or DNS name.
    pub host: String,
    /// HTTP status; 0 without an answer, and for TLS and DNS.
    pub status: u16,
    /// DNS response code (IANA name); empty without an answer, and for other protocols.
    #[serde(default)]
    pub response: String,
    /// Microseconds from the start to the end of the answer or connection; `None` if the proxy does not report it.
    pub latency_us: Option<u64>,
    /// Address and port of the client.
    #[schema(value_type = Option<String>)]
    pub source: Option<SocketAddr>,
    /// Address and port that the client connected to.
    #[schema(value_type = Option<String>)]
    pub destination: Option<SocketAddr>,
    /// Envoy's response flags joined by commas, for example `UF` (no connection to the server); for DNS, the problem.
    pub flags: String,
}

/// An agent event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentEvent {
    /// Milliseconds since the Unix epoch.
    pub time_unix_ms: u64,
    /// Endpoint id, if the event is about an endpoint.
    pub endpoint: Option<u16>,
    /// `endpoint-created`, `endpoint-regenerated`, `endpoint-deleted`, `agent-started`, ...
    pub event: String,
    /// Description.
    pub message: String,
}
