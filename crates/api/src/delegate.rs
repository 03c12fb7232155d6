//! Delegated mode: status of the service that makes the network instead of the agent.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Additional data of a delegated attachment's endpoint. Its endpoint id, epoch, identity and link index are 0: the
/// agent has none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DelegatedEndpoint {
    /// Prefix length of the IPv4 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 32)]
    pub prefix4: Option<u8>,
    /// Prefix length of the IPv6 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 128)]
    pub prefix6: Option<u8>,
    /// Resolver configuration from the service.
    #[serde(default)]
    pub dns: EndpointDns,
}

/// Resolver configuration of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointDns {
    /// Addresses of DNS servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub nameservers: Vec<IpAddr>,
    /// Local domain; empty for none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// Search list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Resolver options.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

/// The service that makes the containers' network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DelegateStatus {
    /// The service's socket.
    pub socket: String,
    /// The service's name; empty before the first contact.
    pub service: String,
    /// Whether the last call reached the service; absent before the first call.
    pub reachable: Option<bool>,
    /// Time of the last change of `reachable`, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// Error of the last call that did not reach the service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Why an ADD would fail, as the service reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<DelegateRefusal>,
    /// Calls that wait for an answer.
    pub in_flight: u64,
    /// ADDs that were abandoned, or whose outcome is unknown, and that are not rolled back yet.
    pub unfinished: u64,
}

/// A failure as the service reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DelegateRefusal {
    /// CNI error code.
    pub code: u32,
    /// Message.
    pub message: String,
    /// Advice; may be empty.
    pub details: String,
}
