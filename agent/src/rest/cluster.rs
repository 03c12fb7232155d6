//! `/v1/cluster`: the cluster's nodes.

use std::{collections::BTreeSet, sync::Arc};

use axum::{Json, extract::State};
use ipnet::IpNet;
use wharf_api::{ApiError, ClusterNode, ClusterView, PodCidr, PodCidrState};
use wharf_cluster::routes::Destination;
use wharf_core::finding::NodeProblem;

use crate::{cluster::InForce, node::Node, rest::error::Answer, status::cluster::problem};

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
    Ok(Json(view(
        &life.config.node_name,
        life.cluster.file().map(|path| path.display().to_string()),
        &cluster,
        &missing,
    )))
}

fn view(own: &str, file: Option<String>, cluster: &InForce, missing: &BTreeSet<IpNet>) -> ClusterView {
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
    ClusterView { node: own.to_owned(), file, problem: problem(cluster), nodes: nodes.collect() }
}
