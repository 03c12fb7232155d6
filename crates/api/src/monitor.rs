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
    /// Forwarded packet of an endpoint with tracing.
    Trace(PacketEvent),
    /// Request or connection that the proxy accepted or denied.
    L7(RequestEvent),
    /// An agent event.
    Agent(AgentEvent),
    /// Lost events: slow reader, or full ring buffer.
    Lost {
        /// Number of events.
        count: u64,
    },
}

/// All values of [`PacketEvent::reason`], by number; a test of the agent compares them with `wharf-common`.
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

/// A packet at an endpoint's program.
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
    /// For a policy drop: the denying rule, or that no rule allows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// `IPv4`, `IPv6`, `ARP`, or hex number.
    pub ethertype: String,
    /// IP protocol: name, or `protocol` with the number; empty for other packets.
    pub protocol: String,
    /// ICMP, ICMPv6 or ARP message: `echo-request`, `neighbor-solicitation`, `request`; without a name
    /// `type 200 code 3` or `operation 9`.
    pub message: Option<String>,
    /// Source address.
    #[schema(value_type = Option<String>)]
    pub source: Option<IpAddr>,
    /// TCP or UDP port, or 0.
    pub source_port: u16,
    /// Destination address.
    #[schema(value_type = Option<String>)]
    pub destination: Option<IpAddr>,
    /// TCP or UDP port, or 0.
    pub destination_port: u16,
    /// Bytes, with the Ethernet header.
    pub length: u32,
}

/// A request, TLS connection or DNS query with the proxy's verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RequestEvent {
    /// Start, Unix ms.
    pub time_unix_ms: u64,
    /// Endpoint whose rules decided.
    pub endpoint: u16,
    /// Epoch of the endpoint.
    pub epoch: u64,
    /// `ingress` or `egress` of the endpoint.
    pub direction: String,
    /// `forwarded`, `denied`, or `failed` (server not reached, or request not understood).
    pub verdict: String,
    /// `HTTP/1.1`, `HTTP/2`, `HTTP/1.0`, `HTTP`, `TLS` or `DNS`.
    pub protocol: String,
    /// Method or DNS query type; empty if unknown.
    pub method: String,
    /// Normalized path with query; empty for TLS and DNS.
    pub path: String,
    /// HTTP host, TLS server name, or DNS name.
    pub host: String,
    /// HTTP status, or 0.
    pub status: u16,
    /// DNS response code (IANA name), or empty.
    #[serde(default)]
    pub response: String,
    /// Microseconds to the end of the answer or connection; absent if unreported.
    pub latency_us: Option<u64>,
    /// Client's address and port.
    #[schema(value_type = Option<String>)]
    pub source: Option<SocketAddr>,
    /// Address and port that the client connected to.
    #[schema(value_type = Option<String>)]
    pub destination: Option<SocketAddr>,
    /// Envoy's response flags joined by commas, such as `UF`; for DNS, the problem.
    pub flags: String,
}

/// An agent event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentEvent {
    /// Milliseconds since the Unix epoch.
    pub time_unix_ms: u64,
    /// Endpoint id, if any.
    pub endpoint: Option<u16>,
    /// `endpoint-created`, `endpoint-regenerated`, `endpoint-deleted`, `agent-started`, ...
    pub event: String,
    /// Description.
    pub message: String,
}
