//! The cluster's nodes, and the cluster feed.

use std::{collections::BTreeMap, net::IpAddr};

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
    /// The feed of `--cluster-feed`; absent without the setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub feed: Option<ClusterFeed>,
    /// Why the nodes or this node's pod CIDRs are not in force as they are, or what other nodes do not reach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// In the order of the file, or by name.
    pub nodes: Vec<ClusterNode>,
}

/// The cluster feed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterFeed {
    /// Socket of the agent.
    #[schema(example = "/run/wharf/feed/feed.sock")]
    pub socket: String,
    /// Name of the producer that is or was connected; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "wharf-kube")]
    pub producer: Option<String>,
    /// Id of the cluster of the rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// Begin of the producer's stream; absent while none is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connected_since_unix_ms: Option<u64>,
    /// For each kind.
    pub rows: Vec<FeedRows>,
    /// Number of the stream's last message that is processed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processed: Option<u64>,
    /// Number of the stream's last message whose rows are in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_force: Option<u64>,
    /// Watches of the connected producer, as it reports them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub watches: Vec<FeedWatch>,
    /// Rows that are not in force as they were sent.
    pub refused_total: u64,
    /// The first 64 of them.
    pub refused: Vec<RefusedRow>,
    /// What does not work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Numbers of rows of a kind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FeedRows {
    /// `node`, `pod`, `namespace` or `policy`.
    #[schema(example = "pod")]
    pub kind: String,
    /// Rows in force.
    pub in_force: u64,
    /// The producer's snapshot is complete.
    pub complete: bool,
    /// Refused rows.
    pub refused: u64,
    /// Refused rows in whose place an earlier row is in force.
    pub stale: u64,
    /// Rows that claim an address or a network that another row claims, too.
    pub conflicts: u64,
}

/// A watch of the producer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FeedWatch {
    /// What it watches.
    #[schema(example = "NetworkPolicy")]
    pub name: String,
    /// `listing`, `watching`, `failing` or `absent`; later producers may have others.
    #[schema(example = "watching")]
    pub state: String,
    /// When the state began.
    pub since_unix_ms: u64,
    /// Last failure, while it fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A row that is not in force as it was sent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefusedRow {
    /// `node`, `pod`, `namespace` or `policy`.
    #[schema(example = "pod")]
    pub kind: String,
    /// Key.
    pub key: String,
    /// Name.
    #[schema(example = "shop/web-0")]
    pub name: String,
    /// Cause.
    pub reason: String,
    /// An earlier row is in force in its place.
    pub stale: bool,
    /// It ends when another row no longer claims the same address or network.
    pub conflict: bool,
}

/// Default limit of `GET /v1/cluster/pods`.
pub const PODS_DEFAULT: u32 = 1_000;
/// Largest limit of `GET /v1/cluster/pods`.
pub const PODS_MOST: u32 = 10_000;

/// Query of `GET /v1/cluster/pods`; all filters must match.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ClusterPodsQuery {
    /// Of this namespace.
    #[param(pattern = r"^[^\x00-\x1f\x7f-\x9f]+$", max_length = 253, example = "shop")]
    pub namespace: Option<String>,
    /// Of this node.
    #[param(pattern = r"^[^\x00-\x1f\x7f-\x9f]+$", max_length = 253, example = "b")]
    pub node: Option<String>,
    /// Maximum number of pods, 1,000 by default.
    #[param(minimum = 1, maximum = 10000, example = 100)]
    pub limit: Option<u32>,
}

/// Body of `GET /v1/cluster/pods`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterPods {
    /// Number of pods that match.
    pub total: u64,
    /// The first of them, by uid.
    pub pods: Vec<ClusterPod>,
}

/// A pod of the cluster feed that is in force.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterPod {
    /// Unique.
    pub uid: String,
    /// Namespace.
    #[schema(example = "shop")]
    pub namespace: String,
    /// Name.
    #[schema(example = "web-0")]
    pub name: String,
    /// Name of its node.
    #[schema(example = "b")]
    pub node: String,
    /// Without those that another row claims, too.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
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
    /// Address of the other node to which this node's route goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub via: Option<IpAddr>,
    /// Packets are encapsulated (VXLAN).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overlay: bool,
    /// Why there is no route, or why a route to a near node is by the overlay.
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
