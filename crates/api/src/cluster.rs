//! Nodes of the cluster, and the cluster feed.

use std::{collections::BTreeMap, net::IpAddr};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of `GET /v1/cluster`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterView {
    /// Name of this node.
    pub node: String,
    /// File of `--cluster-file`, if set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Feed of `--cluster-feed`, if set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub feed: Option<ClusterFeed>,
    /// Why nodes or own pod CIDRs are not in force as configured, or what other nodes do not reach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// By file order or by name.
    pub nodes: Vec<ClusterNode>,
}

/// The cluster feed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterFeed {
    /// The agent's socket.
    #[schema(example = "/run/wharf/feed/feed.sock")]
    pub socket: String,
    /// Name of the last producer, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "wharf-kube")]
    pub producer: Option<String>,
    /// Cluster id of the rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// Start of the connection, Unix ms; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connected_since_unix_ms: Option<u64>,
    /// Row counts by kind.
    pub rows: Vec<FeedRows>,
    /// Number of the last processed message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processed: Option<u64>,
    /// Number of the last message whose rows are in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_force: Option<u64>,
    /// Watches of the connected producer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub watches: Vec<FeedWatch>,
    /// Rows not in force as sent.
    pub refused_total: u64,
    /// The first 64.
    pub refused: Vec<RefusedRow>,
    /// Problem of the feed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Row counts of a kind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FeedRows {
    /// `node`, `pod`, `namespace` or `policy`.
    #[schema(example = "pod")]
    pub kind: String,
    /// Rows in force.
    pub in_force: u64,
    /// Whether the producer's snapshot is complete.
    pub complete: bool,
    /// Refused rows.
    pub refused: u64,
    /// Refused rows replaced by an earlier row.
    pub stale: u64,
    /// Rows whose address or network another row claims.
    pub conflicts: u64,
}

/// A watch of the producer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FeedWatch {
    /// What it watches.
    #[schema(example = "NetworkPolicy")]
    pub name: String,
    /// `listing`, `watching`, `failing`, `absent`, or a later producer's state.
    #[schema(example = "watching")]
    pub state: String,
    /// Start of the state, Unix ms.
    pub since_unix_ms: u64,
    /// Last failure, while it fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A row that is not in force as sent.
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
    /// Whether an earlier row is in force instead.
    pub stale: bool,
    /// Whether another row claims the same address or network.
    pub conflict: bool,
}

/// Default limit of `GET /v1/cluster/pods`.
pub const PODS_DEFAULT: u32 = 1_000;
/// Largest limit of `GET /v1/cluster/pods`.
pub const PODS_MOST: u32 = 10_000;

/// Filters of `GET /v1/cluster/pods`; all must match.
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
    /// Maximum number of pods; default 1,000.
    #[param(minimum = 1, maximum = 10000, example = 100)]
    pub limit: Option<u32>,
}

/// Body of `GET /v1/cluster/pods`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterPods {
    /// Number of pods that match.
    pub total: u64,
    /// The first, by uid.
    pub pods: Vec<ClusterPod>,
}

/// A pod in force.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterPod {
    /// Unique id.
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
    /// Addresses without conflicts.
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
    /// Whether it is this node.
    pub own: bool,
    /// Addresses at which other nodes reach it.
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
    /// Reachability from this node.
    pub state: PodCidrState,
    /// Address of the other node in this node's route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub via: Option<IpAddr>,
    /// Packets are encapsulated (VXLAN).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overlay: bool,
    /// Why there is no route, or an overlay route to a near node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// Reachability of a container network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PodCidrState {
    /// This node's own containers.
    Own,
    /// The kernel has the route.
    InForce,
    /// The kernel has no route.
    Missing,
    /// No route is possible, or it would hide a network of this node.
    Refused,
}
