//! Nodes.

use serde::{Deserialize, Serialize};

use super::Metadata;

/// Annotation: comma-separated addresses of the node's health endpoint.
pub const HEALTH: &str = "wharf.dev/health-addresses";
/// Annotation: comma-separated gateway addresses of the node's containers.
pub const ROUTERS: &str = "wharf.dev/router-addresses";

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Node {
    pub metadata: Metadata,
    /// Wanted.
    #[serde(default)]
    pub spec: Spec,
    /// Found.
    #[serde(default)]
    pub status: Status,
}

/// Wanted state of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// Container networks; absent until allocated.
    #[serde(default, rename = "podCIDRs")]
    pub pod_cidrs: Option<Vec<String>>,
    #[serde(default)]
    pub taints: Option<Vec<Taint>>,
}

/// A taint with all fields, because a patch writes the whole list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taint {
    pub key: String,
    /// `NoSchedule` and others.
    #[serde(default)]
    pub effect: String,
    /// All other fields.
    #[serde(flatten)]
    pub rest: serde_json::Map<String, serde_json::Value>,
}

/// Found state of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Status {
    #[serde(default)]
    pub addresses: Option<Vec<Address>>,
    #[serde(default)]
    pub conditions: Option<Vec<Condition>>,
}

/// An address of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Address {
    /// `InternalIP` and others.
    #[serde(rename = "type")]
    pub kind: String,
    /// Address, or a host name.
    pub address: String,
}

/// A condition of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// `NetworkUnavailable` and others.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    #[serde(default)]
    pub status: String,
    /// Word for programs.
    #[serde(default)]
    pub reason: Option<String>,
    /// For people.
    #[serde(default)]
    pub message: Option<String>,
}
