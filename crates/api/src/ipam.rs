//! Addresses.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of `POST /v1/ipam`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct IpamAllocate {
    /// The default pool when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length = 253, example = "default")]
    pub pool: Option<String>,
    /// `ipv4`, `ipv6`, or both when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<IpFamily>,
    /// Owner of the lease.
    #[schema(pattern = r"^[^\x00-\x1f\x7f-\x9f]+$", max_length = 253, example = "me")]
    pub owner: String,
}

/// Address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum IpFamily {
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
}

/// Answer of `POST /v1/ipam`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IpamAllocation {
    /// None, or one of each family.
    pub leases: Vec<IpamLease>,
}

/// A lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IpamLease {
    /// Address.
    #[schema(value_type = String)]
    pub ip: IpAddr,
    /// Pool.
    pub pool: String,
    /// Attachment, caller's name, or `node`.
    pub owner: String,
    /// Milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
}

/// Body of `GET /v1/ipam`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IpamView {
    /// Pools with their fill.
    pub pools: Vec<PoolView>,
    /// Every lease, by address.
    pub leases: Vec<IpamLease>,
    /// Resting addresses, by address.
    #[serde(default)]
    pub resting: Vec<crate::RestingAddress>,
}

/// Fill of a pool for one family.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolView {
    /// Pool.
    pub name: String,
    /// Family.
    pub family: IpFamily,
    /// CIDRs.
    pub cidrs: Vec<String>,
    /// Leased addresses.
    pub used: u64,
    /// Released addresses that rest.
    #[serde(default)]
    pub resting: u64,
    /// Leasable addresses (at most `u64::MAX`).
    pub total: u64,
    /// Whether traffic to other networks is masqueraded; absent from older agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<bool>,
}
