//! Explains addresses of other nodes.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use ipnet::IpNet;
use wharf_api::{Fact, Health};
use wharf_cluster::{
    feed::{Conflict, FeedPod, Kind},
    nodes::NodeRow,
    routes::{Destination, Unrouted},
};
use wharf_common::{PeerRow, policy::PEER_SERVICE};
use wharf_core::{identity::Identity, kernel::NextHop};

use super::{MAX_LISTED, Unknown, fact, named};
use crate::{
    cluster::{Cluster, InForce},
    config::AgentConfig,
};

const LISTS: &str = "`wharf cluster feed` lists the conflict";

/// What the rows of the cluster say about an address.
pub(super) struct Rows<'a> {
    pub(super) ip: IpAddr,
    /// This node's name.
    pub(super) own: &'a str,
    pub(super) in_force: Arc<InForce>,
    /// The pod of another node with the address, and whether its namespace has a row.
    pub(super) pod: Option<(FeedPod, bool)>,
    /// Claims of nodes and of pods that other rows prevent.
    pub(super) conflicts: [Vec<Conflict>; 2],
}

/// An address outside this node's pools that a row claims.
pub(super) struct Elsewhere {
    pub(super) health: Health,
    pub(super) summary: String,
    pub(super) facts: Vec<Fact>,
}

impl<'a> Rows<'a> {
    pub(super) fn of(cluster: &Cluster, config: &'a AgentConfig, ip: IpAddr) -> Self {
        let feed = cluster.feed();
        let pod = feed.and_then(|feed| feed.owner_of(ip)).filter(|(pod, _)| !pod.is_of(&config.node_name));
        let conflicts = |kind| feed.map(|feed| feed.conflicts_at(kind, ip)).unwrap_or_default();
        Self {
            ip,
            own: &config.node_name,
            in_force: cluster.in_force(),
            pod,
            conflicts: [Kind::Node, Kind::Pod].map(conflicts),
        }
    }

    /// `None` if no row claims the address.
    pub(super) fn elsewhere(&self) -> Option<Elsewhere> {
        let (pods, networks) = (self.conflict(Kind::Pod), self.conflict(Kind::Node));
        let node = self.node();
        let is_of_node = node.is_some_and(|node| node.addresses.contains(&self.ip));
        let no_route = |claims: &String| format!("{claims}, and this node has no route to it; {LISTS}");
        let mut way = self.destination().map(in_words).or_else(|| networks.as_ref().map(no_route));
        let mut health = if pods.is_some() || networks.is_some() { Health::Degraded } else { Health::Ok };
        let summary = match (pods, &self.pod, node) {
            (Some(claims), ..) => format!("{claims}; {LISTS}"),
            (None, Some((pod, has_namespace)), _) => {
                let unknown = if *has_namespace {
                    ""
                } else {
                    "; its namespace has no row: rules by labels of it accept nothing"
                };
                format!("an address of {} of the cluster{unknown}", pod_in_words(pod))
            }
            (None, None, Some(node)) if is_of_node => {
                health = Health::Ok;
                format!("an address of node {} of the cluster", node.name)
            }
            (None, None, _) => way.take()?,
        };
        let mut facts = Vec::new();
        if let Some((pod, _)) = &self.pod {
            facts.push(fact("pod", format!("{}/{}", pod.namespace, pod.name)));
        }
        let on = self.pod.as_ref().map(|(pod, _)| &*pod.node).or(node.map(|node| node.name.as_str()));
        facts.extend(on.map(|name| fact("node", name)));
        facts.extend(node.and_then(|node| role(node, self.ip)).map(|role| fact("role", role)));
        facts.extend(way.map(|way| fact("route", way)));
        if let Some((pod, _)) = &self.pod {
            let labels: Vec<String> = pod.labels.iter().map(|(key, value)| format!("k8s:{key}={value}")).collect();
            facts.push(fact("labels", if labels.is_empty() { "none".to_owned() } else { labels.join(", ") }));
        }
        Some(Elsewhere { health, summary, facts })
    }

    /// Rows that claim an address of this node's pools.
    pub(super) fn claims(&self) -> Vec<String> {
        let conflicts = [Kind::Node, Kind::Pod].into_iter().filter_map(|kind| self.conflict(kind));
        let pod = self.pod.iter().map(|(pod, _)| format!("an address of {}", pod_in_words(pod)));
        let conflicts = conflicts.map(|claims| format!("{claims}; {LISTS}"));
        self.destination().map(in_words).into_iter().chain(pod).chain(conflicts).collect()
    }

    /// Other nodes' networks that overlap the pool but do not contain the address.
    pub(super) fn overlaps(&self, pool: IpNet) -> Vec<String> {
        let overlaps = |to: &&Destination| to.via == Err(Unrouted::Pool(pool)) && !to.cidr.contains(&self.ip);
        let all = self.in_force.destinations.iter().filter(overlaps).take(MAX_LISTED);
        all.map(|to| format!("with {} of node {}, to which this node has no route", to.cidr, to.node)).collect()
    }

    fn node(&self) -> Option<&NodeRow> {
        self.in_force.nodes.of_address(self.ip)
    }

    /// Without routes of an earlier start, whose node is unknown.
    fn destination(&self) -> Option<&Destination> {
        let node = self.node()?;
        self.in_force.destinations.iter().find(|to| to.node == node.name && to.cidr.contains(&self.ip))
    }

    /// Rows of a kind that claim the address, if there are several.
    fn conflict(&self, kind: Kind) -> Option<String> {
        let mut claims: BTreeSet<(IpNet, String)> = BTreeSet::new();
        let [of_nodes, of_pods] = &self.conflicts;
        for Conflict { row, net, owner, other } in if kind == Kind::Node { of_nodes } else { of_pods } {
            claims.extend([(*net, row.clone()), (*other, owner.clone())]);
        }
        let (first, row) = claims.first()?;
        let shown = |net: &IpNet| {
            if net.prefix_len() == net.max_prefix_len() { net.addr().to_string() } else { net.to_string() }
        };
        let name = |name: &String| {
            let is_own = kind == Kind::Node && name == self.own;
            if is_own { format!("{name} (this node)") } else { name.clone() }
        };
        let (neither, both) = if claims.len() == 2 { ("neither", "both") } else { ("none", "all") };
        Some(if claims.len() == 1 {
            format!("several rows of {kind} {row} claim {}, so none of them has it", shown(first))
        } else if claims.iter().all(|(net, _)| net == first) {
            let names = list(claims.iter().map(|(_, row)| name(row)));
            format!("{kind}s {names} {both} claim {}, so {neither} of them has it", shown(first))
        } else {
            let claimed = list(claims.iter().map(|(net, row)| format!("{kind} {} claims {}", name(row), shown(net))));
            format!("{claimed}, which overlap, so {neither} of them has its claim")
        })
    }
}

/// By the kernel's row, which policy decides.
pub(super) fn identity(row: Result<Option<PeerRow>, Unknown>) -> String {
    match row {
        Ok(Some(row)) => named(Identity(row.identity & !PEER_SERVICE)),
        Ok(None) => "none until a policy is in force".to_owned(),
        Err(why) => format!("unknown: {why}"),
    }
}

fn pod_in_words(pod: &FeedPod) -> String {
    let FeedPod { namespace, name, node, .. } = pod;
    format!("pod {namespace}/{name} on node {node}")
}

fn in_words(to: &Destination) -> String {
    let Destination { node, cidr, via } = to;
    match via {
        Ok(via) => {
            let by = if matches!(via, NextHop::Overlay { .. }) { "by " } else { "" };
            format!("in {cidr} of node {node}: packets to it go {by}{via}")
        }
        Err(why) => format!("in {cidr} of node {node}, to which this node has no route: {why}"),
    }
}

fn role(node: &NodeRow, ip: IpAddr) -> Option<&'static str> {
    if node.health_addresses.contains(&ip) {
        return Some("address of the node's health endpoint");
    }
    node.router_addresses.contains(&ip).then_some("router address of the node, its containers' gateway")
}

/// At most [`MAX_LISTED`], with `and`.
fn list(all: impl Iterator<Item = String>) -> String {
    let mut all: Vec<String> = all.collect();
    let more = all.len().saturating_sub(MAX_LISTED);
    if more > 0 {
        all.truncate(MAX_LISTED);
        all.push(format!("{more} more"));
    }
    match all.as_slice() {
        [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        _ => all.concat(),
    }
}
