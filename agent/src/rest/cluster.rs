//! `/v1/cluster`: the cluster's nodes and the cluster feed.

use std::{collections::BTreeSet, sync::Arc};

use axum::{Json, extract::State};
use ipnet::IpNet;
use wharf_api::{
    ApiError, ClusterNode, ClusterPods, ClusterPodsQuery, ClusterView, PODS_DEFAULT, PODS_MOST, PodCidr, PodCidrState,
};
use wharf_cluster::routes::Destination;
use wharf_core::finding::NodeProblem;

use crate::{
    cluster::InForce,
    node::Node,
    rest::error::{Answer, Query, invalid},
    status::cluster::problem,
};

/// The cluster's nodes, and this node's routes to their containers.
#[utoipa::path(get, path = "/v1/cluster", tag = "cluster",
    responses((status = 200, body = ClusterView), (status = 500, body = ApiError)))]
pub async fn get(State(node): State<Arc<Node>>) -> Answer<Json<ClusterView>> {
    let (life, cluster) = (&node.life, node.life.cluster.in_force());
    let missing: BTreeSet<IpNet> = if cluster.destinations.is_empty() {
        BTreeSet::new()
    } else {
        let problems = life.kernel.observe_node(&life.spec()).await?;
        let route = |problem: NodeProblem| match problem {
            NodeProblem::PeerRoute { to, .. } => Some(to),
            _ => None,
        };
        problems.into_iter().filter_map(route).collect()
    };
    let file = life.cluster.file().map(|path| path.display().to_string());
    let feed = life.cluster.feed().map(|feed| feed.view());
    let problem = problem(&cluster, None);
    let nodes = nodes(&life.config.node_name, &cluster, &missing);
    Ok(Json(ClusterView { node: life.config.node_name.clone(), file, feed, problem, nodes }))
}

/// The pods of the cluster feed that match every filter.
#[utoipa::path(get, path = "/v1/cluster/pods", tag = "cluster", params(ClusterPodsQuery),
    responses((status = 200, body = ClusterPods), (status = 400, body = ApiError)))]
pub async fn pods(State(node): State<Arc<Node>>, Query(query): Query<ClusterPodsQuery>) -> Answer<Json<ClusterPods>> {
    let limit = query.limit.unwrap_or(PODS_DEFAULT);
    if !(1..=PODS_MOST).contains(&limit) {
        return Err(invalid(format!("limit {limit}: it is 1 to {PODS_MOST}")));
    }
    for (filter, text) in [("namespace", &query.namespace), ("node", &query.node)] {
        let is_name = |text: &String| (1..=253).contains(&text.chars().count()) && !text.chars().any(char::is_control);
        if !text.as_ref().is_none_or(is_name) {
            return Err(invalid(format!("{filter}: it has 1 to 253 characters without control characters")));
        }
    }
    let most = usize::try_from(limit).unwrap_or(usize::MAX);
    Ok(Json(node.life.cluster.feed().map(|feed| feed.pods(&query, most)).unwrap_or_default()))
}

fn nodes(own: &str, cluster: &InForce, missing: &BTreeSet<IpNet>) -> Vec<ClusterNode> {
    let state = |cidr: &IpNet| {
        let plain = |state| PodCidr { cidr: cidr.to_string(), state, via: None, why: None };
        let to = cluster.destinations.iter().find(|to: &&Destination| to.cidr == *cidr);
        match to.map(|to| &to.via) {
            None => plain(PodCidrState::Own),
            Some(Ok(via)) => {
                let is_there = !missing.contains(cidr);
                let state = if is_there { PodCidrState::InForce } else { PodCidrState::Missing };
                PodCidr { via: Some(*via), ..plain(state) }
            }
            Some(Err(why)) => PodCidr { why: Some(why.to_string()), ..plain(PodCidrState::Refused) },
        }
    };
    let nodes = cluster.nodes.iter().map(|node| ClusterNode {
        name: node.name.clone(),
        own: node.name == own,
        addresses: node.addresses.clone(),
        pod_cidrs: node.pod_cidrs.iter().map(state).collect(),
    });
    nodes.collect()
}
