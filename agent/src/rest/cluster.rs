//! `/v1/cluster`: the cluster's nodes and the cluster feed.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use axum::{Json, extract::State};
use ipnet::IpNet;
use wharf_api::{
    ApiError, ClusterNode, ClusterPods, ClusterPodsQuery, ClusterView, PODS_DEFAULT, PODS_MOST, PodCidr, PodCidrState,
};
use wharf_cluster::routes::Destination;
use wharf_core::{finding::NodeProblem, kernel::NextHop};

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
    let (life, cluster) = (&node.life, node.life.network.cluster.in_force());
    let missing: BTreeSet<IpNet> = if cluster.destinations.is_empty() {
        BTreeSet::new()
    } else {
        without_route(&cluster, &life.kernel.observe_node(&life.network.spec()).await?)
    };
    let file = life.network.cluster.file().map(|path| path.display().to_string());
    let feed = life.network.cluster.feed().map(|feed| feed.view());
    let pools = life.network.cluster.own_pools().and_then(|own| own.view().refused);
    let problem = problem(&cluster, None, pools);
    let nodes = nodes(&life.config.node_name, &cluster, &missing);
    Ok(Json(ClusterView { node: life.config.node_name.clone(), file, feed, problem, nodes }))
}

/// Pods of the cluster feed that match every filter.
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
    let Some(feed) = node.life.network.cluster.feed() else { return Ok(Json(ClusterPods::default())) };
    feed.restored().await;
    Ok(Json(feed.pods(&query, most)))
}

fn without_route(cluster: &InForce, problems: &[NodeProblem]) -> BTreeSet<IpNet> {
    let route = |problem: &NodeProblem| match problem {
        NodeProblem::PeerRoute { to, .. } => Some(*to),
        _ => None,
    };
    let mut missing: BTreeSet<IpNet> = problems.iter().filter_map(route).collect();
    if problems.iter().any(|problem| matches!(problem, NodeProblem::Overlay { .. })) {
        let by_overlay = |to: &&Destination| matches!(to.via, Ok(NextHop::Overlay { .. }));
        missing.extend(cluster.destinations.iter().filter(by_overlay).map(|to| to.cidr));
    }
    missing
}

fn nodes(own: &str, cluster: &InForce, missing: &BTreeSet<IpNet>) -> Vec<ClusterNode> {
    let ways: BTreeMap<IpNet, &Destination> = cluster.destinations.iter().map(|to| (to.cidr, to)).collect();
    let state = |cidr: &IpNet| {
        let plain = |state| PodCidr { cidr: cidr.to_string(), state, via: None, overlay: false, why: None };
        let to = ways.get(cidr);
        match to.map(|to| &to.via) {
            None => plain(PodCidrState::Own),
            Some(Ok(via)) => {
                let is_there = !missing.contains(cidr);
                let state = if is_there { PodCidrState::InForce } else { PodCidrState::Missing };
                let (via, overlay) = match *via {
                    NextHop::Direct(address) => (address, false),
                    NextHop::Overlay { remote, .. } => (remote, true),
                };
                let why = to.filter(|_| overlay).and_then(|to| cluster.detours.get(&to.node));
                PodCidr { via: Some(via), overlay, why: why.map(|why| (*why).to_owned()), ..plain(state) }
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

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use wharf_cluster::{file, paths::REFUSED};

    use super::*;

    const NODES: &str = r#"
[[node]]
name = "a"
addresses = ["192.0.2.1"]

[[node]]
name = "b"
addresses = ["192.0.2.2"]
pod-cidrs = ["10.2.0.0/16", "fd00:2::/64"]
"#;

    #[test]
    fn networks_of_the_overlay_are_missing_with_its_device() {
        let remote = IpAddr::from([192, 0, 2, 2]);
        let to = |cidr: &str, via| Destination { node: "b".into(), cidr: cidr.parse().expect("CIDR"), via: Ok(via) };
        let cluster = InForce {
            nodes: file::parse(NODES).expect("nodes"),
            destinations: vec![
                to("10.2.0.0/16", NextHop::Direct(remote)),
                to("fd00:2::/64", NextHop::Overlay { remote, local: None }),
            ],
            ..InForce::default()
        };
        let states = |problems: &[NodeProblem]| {
            let nodes = nodes("a", &cluster, &without_route(&cluster, problems));
            nodes[1].pod_cidrs.iter().map(|cidr| (cidr.state, cidr.via, cidr.overlay)).collect::<Vec<_>>()
        };
        let (well, missing) = (PodCidrState::InForce, PodCidrState::Missing);
        assert_eq!(states(&[]), [(well, Some(remote), false), (well, Some(remote), true)]);
        let why = |detours: &[&str]| {
            let detours = detours.iter().map(|name| ((*name).to_owned(), REFUSED)).collect();
            let nodes = nodes("a", &InForce { detours, ..cluster.clone() }, &BTreeSet::new());
            nodes[1].pod_cidrs.iter().map(|cidr| cidr.why.clone()).collect::<Vec<_>>()
        };
        assert_eq!((why(&[]), why(&["b"])), (vec![None, None], vec![None, Some(REFUSED.to_owned())]));
        let other = NodeProblem::LinkDown { name: "wharf0".into() };
        assert_eq!(states(&[other]), states(&[]));
        let device = NodeProblem::Overlay { cause: "it is down".into(), repairable: true };
        assert_eq!(states(&[device]), [(well, Some(remote), false), (missing, Some(remote), true)]);
        let route = NodeProblem::PeerRoute {
            to: "10.2.0.0/16".parse().expect("CIDR"),
            expected: Some(NextHop::Direct(remote)),
            found: None,
        };
        assert_eq!(states(&[route]), [(missing, Some(remote), false), (well, Some(remote), true)]);
    }
}
