//! Delegated mode: a service makes the network instead of the agent.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Additional data of a delegated endpoint. Endpoint id, epoch, identity and link index are 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DelegatedEndpoint {
    /// IPv4 prefix length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 32)]
    pub prefix4: Option<u8>,
    /// IPv6 prefix length.
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
    /// Local domain, or empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// Search list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Resolver options.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

/// The network service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DelegateStatus {
    /// The service's socket.
    pub socket: String,
    /// Name; empty before first contact.
    pub service: String,
    /// Whether the last call reached the service; absent before the first.
    pub reachable: Option<bool>,
    /// Last change of `reachable`, Unix ms.
    pub since_unix_ms: u64,
    /// Error of the last call, if unreachable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Why an ADD would fail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<DelegateRefusal>,
    /// Calls in progress.
    pub in_flight: u64,
    /// ADDs, abandoned or with unknown outcome, that await rollback.
    pub unfinished: u64,
}

/// A failure from the service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DelegateRefusal {
    /// CNI error code.
    pub code: u32,
    /// Message.
    pub message: String,
    /// Advice; may be empty.
    pub details: String,
}
