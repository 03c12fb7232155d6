//! The cluster's nodes and the cluster feed.

use std::{net::IpAddr, sync::Arc};

use wharf_api::{ClusterFeed, ComponentStatus, Health};
use wharf_cluster::{nodes::NodeRow, paths::REFUSED, routes::Destination};
use wharf_core::kernel::NextHop;

use super::{Source, of};
use crate::{cluster::InForce, node::part::Fill};

pub(super) fn source() -> Source {
    Source {
        name: "cluster",
        look: |node| {
            Box::pin(async move {
                let cluster = &node.life.network.cluster;
                let feed = cluster.feed().map(|feed| feed.view());
                let is_set = cluster.file().is_some() || feed.is_some();
                if !is_set {
                    return look(None);
                }
                let overlay = match node.life.kernel.observe_overlay().await {
                    Ok(view) => view.failure,
                    Err(why) => Some(why.to_string()),
                };
                let in_force = cluster.in_force();
                let row = in_force.nodes.get(&node.life.config.node_name);
                let health = node.health.view();
                let health = health.ipv4.map(IpAddr::V4).into_iter().chain(health.ipv6.map(IpAddr::V6));
                let differs = || {
                    row.and_then(|row| other_addresses(row, &health.collect::<Vec<_>>(), &node.life.network.routers()))
                };
                let mut component = component(&in_force, feed.as_ref(), overlay, differs());
                // Without a feed, no labels are known.
                let unknown = if feed.is_some() { node.life.telemetry.metrics.unknown_pod_drops() } else { 0 };
                if unknown > 0 {
                    component.message.push_str(&format!("; policy dropped {unknown} packets of unknown pods"));
                }
                look(Some(component))
            })
        },
        silent: |_| (Health::Degraded, "waits for the list of nodes".into()),
    }
}

fn look(component: Option<ComponentStatus>) -> Fill {
    Arc::new(move |status| status.components.extend(component.clone()))
}

fn other_addresses(row: &NodeRow, health: &[IpAddr], routers: &[IpAddr]) -> Option<String> {
    let absent = |listed: &[IpAddr], there: &[IpAddr]| listed.iter().find(|ip| !there.contains(ip)).copied();
    let of_health = absent(&row.health_addresses, health)
        .map(|ip| format!("health address {ip} of this node's row is not its health endpoint's: other nodes probe it"));
    let of_router = || {
        let ip = absent(&row.router_addresses, routers)?;
        Some(format!("router address {ip} of this node's row is not its router's: other nodes take it for this node"))
    };
    of_health.or_else(of_router)
}

fn component(
    cluster: &InForce,
    feed: Option<&ClusterFeed>,
    overlay: Option<String>,
    row: Option<String>,
) -> ComponentStatus {
    // Any user of the cluster can cause refused rows, and only other nodes need this node's row: neither makes the node
    // unready.
    let of_nodes = of(overlay.is_some() || problem(cluster, None, None).is_some(), Health::Degraded);
    let why = overlay.map(|why| format!("no overlay: {why}")).or(row).or_else(|| problem(cluster, feed, None));
    let (nodes, routes) =
        (cluster.nodes.iter().count(), cluster.destinations.iter().filter(|to| to.via.is_ok()).count());
    let plural = |n: usize, what: &str| if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") };
    let mut message = format!("{}, {}", plural(nodes, "node"), plural(routes, "route"));
    let by_overlay = |to: &&Destination| matches!(to.via, Ok(NextHop::Overlay { .. }));
    match cluster.destinations.iter().filter(by_overlay).count() {
        0 => {}
        routes => message.push_str(&format!(", {routes} by the overlay")),
    }
    match cluster.detours.values().filter(|why| **why == REFUSED).count() {
        0 => {}
        nodes => message.push_str(&format!(", to {} because {REFUSED}", plural(nodes, "near node"))),
    }
    if let Some(feed) = feed {
        // The feed has no number of a kind while it reads the file.
        let of = |kind: &str| feed.rows.iter().find(|rows| rows.kind == kind).map(|rows| rows.in_force);
        let kinds = [("pods", "pod"), ("namespaces", "namespace"), ("policies", "policy")];
        let counts: Vec<String> =
            kinds.into_iter().filter_map(|(name, kind)| Some(format!("{name} {}", of(kind)?))).collect();
        if !counts.is_empty() {
            message.push_str(&format!("; {}", counts.join(", ")));
        }
    }
    if let Some(why) = &why {
        message.push_str(&format!("; {why}"));
    }
    ComponentStatus::new("cluster", of(why.is_some(), Health::Degraded), message).by_containers(of_nodes)
}

/// The first of: refused nodes, a text that is not kept, a problem of the feed, refused pod CIDRs of this node
/// (`pools`), what other nodes do not reach, a destination without a route.
pub fn problem(cluster: &InForce, feed: Option<&ClusterFeed>, pools: Option<String>) -> Option<String> {
    let of_feed = || feed.and_then(|feed| feed.problem.as_ref());
    let of_nodes = cluster.refused.as_ref().or(cluster.not_kept.as_ref()).or_else(of_feed).cloned();
    if let Some(why) = of_nodes.or(pools) {
        return Some(why);
    }
    if let Some(address) = cluster.absent.first() {
        return Some(format!(
            "{address} of this node's row is no address of this node: other nodes do not reach it there"
        ));
    }
    if let Some(pool) = cluster.outside.first() {
        return Some(format!(
            "pool {pool} is in no pod CIDR of this node's row: other nodes have no route to its containers"
        ));
    }
    without_route(cluster)
}

pub(super) fn without_route(cluster: &InForce) -> Option<String> {
    let mut without = cluster.destinations.iter().filter_map(|to| Some((to, to.via.as_ref().err()?)));
    let (to, why) = without.next()?;
    let more = match without.count() {
        0 => String::new(),
        more => format!("; and {more} more (`wharf cluster nodes`)"),
    };
    Some(format!("no route to {} of node {}: {why}{more}", to.cidr, to.node))
}

#[cfg(test)]
mod tests {
    use wharf_cluster::{file::parse, routes::Unrouted};

    use super::*;

    #[test]
    fn what_is_not_reached_is_told() {
        let nodes = parse("[[node]]\nname = \"a\"\naddresses = [\"192.0.2.1\"]\n").expect("nodes");
        let well = InForce { nodes, ..InForce::default() };
        let row = component(&well, None, None, None);
        assert_eq!((row.health, row.message.as_str()), (Health::Ok, "1 node, 0 routes"));
        let to = |via| Destination { node: "b".into(), cidr: "10.2.0.0/16".parse().expect("CIDR"), via };
        let direct = NextHop::Direct([192, 0, 2, 2].into());
        let routed = InForce { destinations: vec![to(Ok(direct))], ..well.clone() };
        assert_eq!(component(&routed, None, None, None).message, "1 node, 1 route");
        let far = NextHop::Overlay { remote: [198, 51, 100, 3].into(), local: None };
        let both = InForce { destinations: vec![to(Ok(direct)), to(Ok(far))], ..well.clone() };
        assert_eq!(component(&both, None, None, None).message, "1 node, 2 routes, 1 by the overlay");
        let detour = InForce { detours: [("b".to_owned(), REFUSED)].into(), ..both.clone() };
        let row = component(&detour, None, None, None);
        let message = format!("1 node, 2 routes, 1 by the overlay, to 1 near node because {REFUSED}");
        assert_eq!((row.health, row.message), (Health::Ok, message));
        let row = component(&both, None, Some("its port is in use".into()), None);
        assert_eq!(row.health, Health::Degraded);
        assert!(row.message.ends_with("; no overlay: its port is in use"), "{}", row.message);
        let unrouted = InForce { destinations: vec![to(Err(Unrouted::NotNear))], ..well.clone() };
        let row = component(&unrouted, None, None, None);
        assert_eq!(row.health, Health::Degraded);
        assert!(row.message.contains("no route to 10.2.0.0/16 of node b: its node has no address"), "{}", row.message);
        let outside = InForce { outside: vec!["10.1.0.0/16".parse().expect("CIDR")], ..well.clone() };
        assert!(component(&outside, None, None, None).message.contains("pool 10.1.0.0/16 is in no pod CIDR"));
        let pools = || Some("its pod CIDRs cannot be the pools".to_owned());
        assert_eq!(problem(&outside, None, pools()), pools(), "the cause");
        let absent = InForce { absent: vec![[192, 0, 2, 9].into()], ..well.clone() };
        assert!(
            component(&absent, None, None, None)
                .message
                .contains("192.0.2.9 of this node's row is no address of this node")
        );
        let refused = InForce { refused: Some("cluster file /x: line 3: no".into()), ..well };
        assert_eq!(problem(&refused, None, pools()), refused.refused);
        assert!(component(&refused, None, None, None).message.ends_with("line 3: no"));
    }

    #[test]
    fn addresses_of_the_row_that_are_not_this_nodes_are_told() {
        let [health, router, other] = [2, 1, 9].map(|n| IpAddr::from([10, 1, 0, n]));
        let row = |health: &[IpAddr], routers: &[IpAddr]| NodeRow {
            name: "a".into(),
            addresses: Vec::new(),
            pod_cidrs: Vec::new(),
            health_addresses: health.to_vec(),
            router_addresses: routers.to_vec(),
        };
        let told = |row: NodeRow| other_addresses(&row, &[health], &[router]).unwrap_or_default();
        assert_eq!(told(row(&[], &[])), "");
        assert_eq!(told(row(&[health], &[router])), "");
        assert!(told(row(&[health, other], &[])).starts_with("health address 10.1.0.9 of this node's row"));
        assert!(told(row(&[health], &[health])).starts_with("router address 10.1.0.2 of this node's row"));
    }

    #[test]
    fn the_feed_and_its_problem_are_told() {
        let rows = |kind: &str, in_force| wharf_api::FeedRows { kind: kind.into(), in_force, ..Default::default() };
        let rows = [("node", 2), ("pod", 3), ("namespace", 0), ("policy", 0)].map(|(kind, n)| rows(kind, n));
        let feed = ClusterFeed { rows: rows[..1].to_vec(), ..ClusterFeed::default() };
        let row = component(&InForce::default(), Some(&feed), None, None);
        assert_eq!(row.message, "0 nodes, 0 routes", "the other kinds are being read");
        let feed = ClusterFeed { rows: rows.into(), ..ClusterFeed::default() };
        let row = component(&InForce::default(), Some(&feed), None, None);
        assert_eq!(
            (row.health, row.message.as_str()),
            (Health::Ok, "0 nodes, 0 routes; pods 3, namespaces 0, policies 0")
        );
        let away = ClusterFeed { problem: Some("no producer is connected".into()), ..feed };
        let row = component(&InForce::default(), Some(&away), None, None);
        assert_eq!((row.health, row.readiness()), (Health::Degraded, Health::Ok));
        assert!(row.message.ends_with("; no producer is connected"), "{}", row.message);
    }
}
