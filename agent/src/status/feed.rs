//! The node, for the producer of the cluster feed.

use std::{net::IpAddr, sync::Arc};

use wharf_api::{AgentStatus, Health, Verdict};
use wharf_feed::v1::{Condition, Report};

use super::{cluster, status};
use crate::node::Node;

/// Problems of a report.
const MAX_PROBLEMS: usize = 64;

/// Takes as long as [`status`].
pub async fn report(node: &Arc<Node>) -> Report {
    let status = status(node).await;
    let routes = cluster::without_route(&node.life.cluster.in_force());
    let health = node.health.view();
    let health_addresses = health.ipv4.map(IpAddr::V4).into_iter().chain(health.ipv6.map(IpAddr::V6));
    let problems = problems(&status);
    Report {
        conditions: vec![ready(&status, node.life.cluster.without_pools()), condition("RoutesInForce", routes)],
        problems: problems.into_iter().take(MAX_PROBLEMS).collect(),
        router_addresses: node.life.routers().iter().map(ToString::to_string).collect(),
        health_addresses: health_addresses.map(|address| address.to_string()).collect(),
    }
}

fn ready(status: &AgentStatus, without_pools: Option<String>) -> Condition {
    let is_down = status.readiness() == Verdict::Down;
    let failing = status.components.iter().find(|component| component.health == Health::Failing);
    let why = failing.map_or_else(
        || "the agent does not serve yet, or stops".to_owned(),
        |component| format!("{}: {}", component.name, component.message),
    );
    condition("Ready", is_down.then_some(why).or(without_pools))
}

fn condition(name: &str, problem: Option<String>) -> Condition {
    Condition { name: name.to_owned(), holds: problem.is_none(), message: problem.unwrap_or_default() }
}

/// Of components that are not well.
fn problems(status: &AgentStatus) -> Vec<String> {
    let ill = status.components.iter().filter(|component| component.health >= Health::Degraded);
    ill.map(|component| format!("{}: {}", component.name, component.message)).collect()
}
