//! What an agent in delegated mode tells of the service that makes the network in its place.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What only the endpoint of a delegated attachment has. Its number, epoch, identity and link index are 0, because this agent
/// has none of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DelegatedEndpoint {
    /// Prefix length of its IPv4 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 32)]
    pub prefix4: Option<u8>,
    /// Prefix length of its IPv6 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 128)]
    pub prefix6: Option<u8>,
    /// What the service tells the container's resolver.
    #[serde(default)]
    pub dns: EndpointDns,
}

/// What a container's resolver is told.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointDns {
    /// Addresses of servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub nameservers: Vec<IpAddr>,
    /// Local domain; empty for none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// Search list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Options.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

/// The service that makes the network of the node's containers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DelegateStatus {
    /// Its socket.
    pub socket: String,
    /// Its name, as it tells it; empty before it was reached.
    pub service: String,
    /// Whether the last call reached it; none before the first.
    pub reachable: Option<bool>,
    /// Since when, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// Why it was not reached the last time that it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Why an ADD would fail, in its words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<DelegateRefusal>,
    /// Calls that wait for its answer.
    pub in_flight: u64,
    /// ADDs that were given up, or whose end is not known, and that are not undone yet.
    pub unfinished: u64,
}

/// A failure in the service's own words.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DelegateRefusal {
    /// CNI error code.
    pub code: u32,
    /// Why.
    pub message: String,
    /// What may help; empty if nothing does.
    pub details: String,
}
