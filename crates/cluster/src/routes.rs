//! Routes to the containers of other nodes.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;
use wharf_core::{
    ipam::PoolConfig,
    kernel::PeerRoute,
    overlap::{NodeNetwork, Way, conflicts},
};

use crate::nodes::{NodeRow, Nodes};

/// Why a pod CIDR has no route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unrouted {
    /// A container of this node could have the address of another node's.
    Pool(IpNet),
    /// The route would hide a network of this node.
    Network(NodeNetwork),
    /// The node's address is this node's.
    OwnAddress(IpAddr),
    /// No address of the CIDR's family is in a network of this node's links.
    NotNear,
}

impl Unrouted {
    /// Addresses in the CIDR are this node's, or of hosts on its links. A route of others to the CIDR may lead to the
    /// same containers.
    #[must_use]
    pub const fn is_conflict(&self) -> bool {
        match self {
            Self::Pool(_) | Self::OwnAddress(_) => true,
            Self::Network(network) => matches!(network.way, Way::Address | Way::Local | Way::OnLink { .. }),
            Self::NotNear => false,
        }
    }
}

impl fmt::Display for Unrouted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pool(pool) => write!(f, "it overlaps {pool}, a pool of this node"),
            Self::Network(network) => write!(f, "it overlaps {network}"),
            Self::OwnAddress(address) => write!(f, "its node has the address {address}, which is this node's"),
            Self::NotNear => f.write_str(
                "its node has no address of this family in a network of this node's links; a router between the nodes must know the way",
            ),
        }
    }
}

/// A pod CIDR of another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// Of the other node.
    pub node: String,
    /// CIDR.
    pub cidr: IpNet,
    /// The address of the other node that packets go to.
    pub via: Result<IpAddr, Unrouted>,
}

/// All addresses, and the pod CIDRs of the other nodes: what this node's networks are compared with.
#[must_use]
pub fn watched(nodes: &Nodes, own: &str) -> Vec<IpNet> {
    let cidrs = nodes.iter().filter(|node| node.name != own).flat_map(|node| node.pod_cidrs.iter().copied());
    let addresses = nodes.iter().flat_map(|node| node.addresses.iter().copied().map(IpNet::from));
    cidrs.chain(addresses).collect()
}

/// Addresses of this node's row that this node does not have. `networks`: as in [`destinations`].
#[must_use]
pub fn absent(row: &NodeRow, networks: &[NodeNetwork]) -> Vec<IpAddr> {
    let is_own = |address: &IpAddr| networks.iter().any(|n| n.way == Way::Address && n.net.addr() == *address);
    row.addresses.iter().copied().filter(|address| !is_own(address)).collect()
}

/// The way to each pod CIDR of the other nodes. `networks`: this node's, as far as they share addresses with
/// [`watched`].
#[must_use]
pub fn destinations(nodes: &Nodes, own: &str, pools: &[PoolConfig], networks: &[NodeNetwork]) -> Vec<Destination> {
    let mut found = Vec::new();
    for node in nodes.iter().filter(|node| node.name != own) {
        for cidr in &node.pod_cidrs {
            let via = way(node, cidr, pools, networks);
            found.push(Destination { node: node.name.clone(), cidr: *cidr, via });
        }
    }
    found
}

fn way(node: &NodeRow, cidr: &IpNet, pools: &[PoolConfig], networks: &[NodeNetwork]) -> Result<IpAddr, Unrouted> {
    let mut own = pools.iter().flat_map(|pool| &pool.cidrs);
    if let Some(pool) = own.find(|pool| pool.contains(cidr) || cidr.contains(*pool)) {
        return Err(Unrouted::Pool(*pool));
    }
    if let Some(network) = networks.iter().find(|network| conflicts(cidr, network)) {
        return Err(Unrouted::Network(network.clone()));
    }
    let is_own = |address: &&IpAddr| networks.iter().any(|n| n.way == Way::Address && n.net.addr() == **address);
    if let Some(address) = node.addresses.iter().find(is_own) {
        return Err(Unrouted::OwnAddress(*address));
    }
    let is_near = |address: &&IpAddr| {
        let on_link = |n: &NodeNetwork| matches!(n.way, Way::OnLink { by_kernel: true, .. });
        networks.iter().any(|n| on_link(n) && n.net.prefix_len() > 0 && n.net.contains(*address))
    };
    let of_family = |address: &&IpAddr| address.is_ipv4() == cidr.addr().is_ipv4();
    node.addresses.iter().filter(of_family).find(is_near).copied().ok_or(Unrouted::NotNear)
}

/// Routes of the destinations that have one.
#[must_use]
pub fn routes(destinations: &[Destination]) -> Vec<PeerRoute> {
    let route = |to: &Destination| to.via.as_ref().ok().map(|via| PeerRoute { to: to.cidr, via: *via });
    destinations.iter().filter_map(route).collect()
}

/// Networks of containers of other nodes, to which packets keep their source. Includes networks that a router or
/// another program's route reaches instead of Wharf's.
#[must_use]
pub fn peers(destinations: &[Destination]) -> Vec<IpNet> {
    let is_peer = |to: &&Destination| !to.via.as_ref().is_err_and(Unrouted::is_conflict);
    destinations.iter().filter(is_peer).map(|to| to.cidr).collect()
}

/// CIDRs of pools that this node's row does not contain: other nodes have no route to their containers.
#[must_use]
pub fn pools_outside(row: &NodeRow, pools: &[PoolConfig]) -> Vec<IpNet> {
    let inside = |pool: &IpNet| row.pod_cidrs.iter().any(|cidr| cidr.contains(pool));
    pools.iter().flat_map(|pool| pool.cidrs.iter().copied()).filter(|pool| !inside(pool)).collect()
}

#[cfg(test)]
mod tests {
    use wharf_core::ids::PoolName;

    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().expect("network")
    }

    fn nodes() -> Nodes {
        let row = |name: &str, addresses: &[&str], cidrs: &[&str]| NodeRow {
            name: name.to_owned(),
            addresses: addresses.iter().map(|a| a.parse().expect("address")).collect(),
            pod_cidrs: cidrs.iter().copied().map(net).collect(),
        };
        Nodes::new(vec![
            row("a", &["192.0.2.1", "2001:db8::1"], &["10.1.0.0/16", "fd00:1::/64"]),
            row("b", &["192.0.2.2", "2001:db8::2"], &["10.2.0.0/16", "fd00:2::/64"]),
            row("far", &["198.51.100.3"], &["10.3.0.0/16", "fd00:3::/64"]),
        ])
        .expect("nodes")
    }

    fn network(text: &str, way: Way) -> NodeNetwork {
        NodeNetwork { net: net(text), way, ifname: Some("lan0".into()) }
    }

    const LAN: Way = Way::OnLink { by_kernel: true, point_to_point: false };

    fn lan() -> Vec<NodeNetwork> {
        vec![
            network("192.0.2.0/24", LAN),
            network("2001:db8::/64", LAN),
            network("192.0.2.1/32", Way::Address),
            network("0.0.0.0/0", Way::Gateway("192.0.2.254".parse().ok())),
        ]
    }

    fn pools(cidrs: &[&str]) -> Vec<PoolConfig> {
        vec![PoolConfig {
            name: PoolName::parse("default").expect("name"),
            cidrs: cidrs.iter().copied().map(net).collect(),
        }]
    }

    fn told(pool: &[&str], networks: &[NodeNetwork]) -> Vec<String> {
        let to = destinations(&nodes(), "a", &pools(pool), networks);
        to.iter()
            .map(|to| match &to.via {
                Ok(via) => format!("{} via {via}", to.cidr),
                Err(why) => format!("{}: {why}", to.cidr),
            })
            .collect()
    }

    #[test]
    fn a_neighbour_is_the_next_hop_of_each_family() {
        let found = told(&["10.1.0.0/16"], &lan());
        assert_eq!(found[..2], ["10.2.0.0/16 via 192.0.2.2", "fd00:2::/64 via 2001:db8::2"]);
        assert!(found[2].starts_with("10.3.0.0/16: its node has no address of this family"), "{}", found[2]);
        let to = destinations(&nodes(), "a", &pools(&[]), &lan());
        assert_eq!(routes(&to).len(), 2);
        assert_eq!(peers(&to).len(), 4, "a router may know the way to far");
        // Without IPv6 on the link.
        assert!(told(&[], &lan()[..1])[1].starts_with("fd00:2::/64: its node has no address"));
        // The default route's gateway is no neighbour.
        assert!(told(&[], &lan()[3..])[0].starts_with("10.2.0.0/16: its node has no address"));
    }

    #[test]
    fn a_route_that_would_hide_something_of_this_node_is_refused() {
        for (pool, extra, is_peer, why) in [
            ("10.0.0.0/8", None, false, "10.2.0.0/16: it overlaps 10.0.0.0/8, a pool of this node"),
            ("10.2.7.0/24", None, false, "10.2.0.0/16: it overlaps 10.2.7.0/24, a pool of this node"),
            (
                "10.1.0.0/16",
                Some(network("10.2.0.0/16", Way::Gateway("192.0.2.9".parse().ok()))),
                true,
                "10.2.0.0/16: it overlaps the node's route 10.2.0.0/16 via 192.0.2.9 dev lan0",
            ),
            (
                "10.1.0.0/16",
                Some(network("10.2.3.4/32", Way::Address)),
                false,
                "10.2.0.0/16: it overlaps the node's address 10.2.3.4 on lan0",
            ),
            (
                "10.1.0.0/16",
                Some(network("192.0.2.2/32", Way::Address)),
                false,
                "10.2.0.0/16: its node has the address 192.0.2.2, which is this node's",
            ),
        ] {
            let mut networks = lan();
            networks.extend(extra);
            assert_eq!(told(&[pool], &networks)[0], why);
            let to = destinations(&nodes(), "a", &pools(&[pool]), &networks);
            assert_eq!(peers(&to).contains(&net("10.2.0.0/16")), is_peer, "{why}");
        }
    }

    #[test]
    fn pools_that_other_nodes_do_not_reach_are_named() {
        let nodes = nodes();
        let own = nodes.get("a").expect("own row");
        assert_eq!(pools_outside(own, &pools(&["10.1.8.0/24", "fd00:1::/64"])), [] as [IpNet; 0]);
        assert_eq!(pools_outside(own, &pools(&["10.1.8.0/24", "10.9.0.0/24"])), [net("10.9.0.0/24")]);
    }

    #[test]
    fn what_is_watched_are_the_others_addresses_and_networks() {
        let found = watched(&nodes(), "a");
        assert!(found.contains(&net("192.0.2.2/32")) && found.contains(&net("fd00:3::/64")));
        assert!(!found.contains(&net("10.1.0.0/16")) && found.len() == 9);
        let row = nodes();
        let absent = absent(row.get("a").expect("own row"), &lan());
        assert_eq!(absent, ["2001:db8::1".parse::<IpAddr>().expect("address")]);
    }
}
