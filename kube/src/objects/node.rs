//! Nodes.

use serde::{Deserialize, Serialize};

use super::Metadata;

/// Annotation with the addresses of the node's health endpoint, separated by commas.
pub const HEALTH: &str = "wharf.dev/health-addresses";
/// Annotation with the addresses that the node has as its containers' gateway, separated by commas.
pub const ROUTERS: &str = "wharf.dev/router-addresses";

/// A node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Node {
    /// Metadata.
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
    /// Networks of the node's containers; none until they are allocated.
    #[serde(default, rename = "podCIDRs")]
    pub pod_cidrs: Option<Vec<String>>,
    /// Taints.
    #[serde(default)]
    pub taints: Option<Vec<Taint>>,
}

/// A taint, with every field: a patch writes the whole list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taint {
    /// Key.
    pub key: String,
    /// `NoSchedule` and others.
    #[serde(default)]
    pub effect: String,
    /// All fields but these.
    #[serde(flatten)]
    pub rest: serde_json::Map<String, serde_json::Value>,
}

/// Found state of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Status {
    /// Addresses.
    #[serde(default)]
    pub addresses: Option<Vec<Address>>,
    /// Conditions.
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
