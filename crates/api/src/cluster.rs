//! The cluster's nodes.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of `GET /v1/cluster`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterView {
    /// Name of this node.
    pub node: String,
    /// File of `--cluster-file`; absent without the setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Why the file is not in force as it is now, or what other nodes do not reach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// In the order of the file.
    pub nodes: Vec<ClusterNode>,
}

/// A node of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterNode {
    /// Name.
    #[schema(example = "b")]
    pub name: String,
    /// This node.
    pub own: bool,
    /// Where other nodes reach it.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// Networks of its containers.
    pub pod_cidrs: Vec<PodCidr>,
}

/// A network of a node's containers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PodCidr {
    /// The network.
    #[schema(example = "10.88.0.0/24")]
    pub cidr: String,
    /// Whether this node reaches it.
    pub state: PodCidrState,
    /// Next hop of this node's route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub via: Option<IpAddr>,
    /// Why there is no route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// Whether this node reaches a network of containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PodCidrState {
    /// This node's own containers.
    Own,
    /// The route is in the kernel.
    InForce,
    /// The kernel has no such route.
    Missing,
    /// No route is possible, or it would hide a network of this node.
    Refused,
}
