//! The cluster's nodes.

use std::sync::Arc;

use wharf_api::{ComponentStatus, Health};

use super::{Source, of};
use crate::{cluster::InForce, node::part::Fill};

pub(super) fn source() -> Source {
    Source {
        name: "cluster",
        look: |node| {
            Box::pin(async move {
                let is_set = node.life.cluster.file().is_some();
                look(is_set.then(|| component(&node.life.cluster.in_force())))
            })
        },
        silent: |_| (Health::Degraded, "waits for the list of nodes".into()),
    }
}

fn look(component: Option<ComponentStatus>) -> Fill {
    Arc::new(move |status| status.components.extend(component.clone()))
}

fn component(cluster: &InForce) -> ComponentStatus {
    let problem = problem(cluster);
    let (nodes, routes) =
        (cluster.nodes.iter().count(), cluster.destinations.iter().filter(|to| to.via.is_ok()).count());
    let plural = |n: usize, what: &str| if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") };
    let mut message = format!("{}, {}", plural(nodes, "node"), plural(routes, "route"));
    if let Some(why) = &problem {
        message.push_str(&format!("; {why}"));
    }
    ComponentStatus::new("cluster", of(problem.is_some(), Health::Degraded), message)
}

/// The first of: a refused file, a text that is not kept, what other nodes do not reach, a destination without a route.
pub fn problem(cluster: &InForce) -> Option<String> {
    if let Some(why) = cluster.refused.as_ref().or(cluster.not_kept.as_ref()) {
        return Some(why.clone());
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
    use wharf_cluster::{
        file::parse,
        routes::{Destination, Unrouted},
    };

    use super::*;

    #[test]
    fn what_is_not_reached_is_told() {
        let nodes = parse("[[node]]\nname = \"a\"\naddresses = [\"192.0.2.1\"]\n").expect("nodes");
        let well = InForce { nodes, ..InForce::default() };
        let row = component(&well);
        assert_eq!((row.health, row.message.as_str()), (Health::Ok, "1 node, 0 routes"));
        let to = |via| Destination { node: "b".into(), cidr: "10.2.0.0/16".parse().expect("CIDR"), via };
        let routed = InForce { destinations: vec![to(Ok([192, 0, 2, 2].into()))], ..well.clone() };
        assert_eq!(component(&routed).message, "1 node, 1 route");
        let unrouted = InForce { destinations: vec![to(Err(Unrouted::NotNear))], ..well.clone() };
        let row = component(&unrouted);
        assert_eq!(row.health, Health::Degraded);
        assert!(row.message.contains("no route to 10.2.0.0/16 of node b: its node has no address"), "{}", row.message);
        let outside = InForce { outside: vec!["10.1.0.0/16".parse().expect("CIDR")], ..well.clone() };
        assert!(component(&outside).message.contains("pool 10.1.0.0/16 is in no pod CIDR"));
        let absent = InForce { absent: vec![[192, 0, 2, 9].into()], ..well.clone() };
        assert!(component(&absent).message.contains("192.0.2.9 of this node's row is no address of this node"));
        let refused = InForce { refused: Some("cluster file /x: line 3: no".into()), ..well };
        assert!(component(&refused).message.ends_with("line 3: no"));
    }
}
