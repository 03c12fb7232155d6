//! Routes to other nodes' containers.

use std::{collections::BTreeMap, fmt, net::IpAddr};

use ipnet::IpNet;
use wharf_core::{
    ipam::PoolConfig,
    kernel::{NextHop, OverlayNode, PeerRoute},
    overlap::{NodeNetwork, Way, conflicts},
};

use crate::{
    nodes::{NodeRow, Nodes},
    paths::Detours,
};

/// Way of packets to other nodes' containers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Routing {
    /// Direct on this node's links, unless [`crate::paths`] refuses the path; else by the overlay.
    #[default]
    Auto,
    /// Direct, or not at all.
    Native,
    Overlay,
}

/// Why a pod CIDR has no route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unrouted {
    /// It overlaps a pool of this node.
    Pool(IpNet),
    /// It overlaps a range of services.
    Services(IpNet),
    /// The route would hide a network of this node.
    Network(NodeNetwork),
    /// This node has its node's address.
    OwnAddress(IpAddr),
    /// No address of the CIDR's family is on this node's links, and there is no overlay.
    NotNear,
}

impl Unrouted {
    /// Addresses in the CIDR are this node's or of hosts on its links. A route of others to the CIDR may lead to the
    /// same containers.
    #[must_use]
    pub const fn is_conflict(&self) -> bool {
        match self {
            Self::Pool(_) | Self::OwnAddress(_) => true,
            Self::Network(network) => matches!(network.way, Way::Address | Way::Local | Way::OnLink { .. }),
            Self::Services(_) | Self::NotNear => false,
        }
    }
}

impl fmt::Display for Unrouted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pool(pool) => write!(f, "it overlaps {pool}, a pool of this node"),
            Self::Services(net) => write!(f, "it overlaps {net}, a range of services (--service-cidr)"),
            Self::Network(network) => write!(f, "it overlaps {network}"),
            Self::OwnAddress(address) => write!(f, "its node has the address {address}, which is this node's"),
            Self::NotNear => f.write_str(
                "its node has no address of this family in a network of this node's links, and routing is native; a router between the nodes must know the way",
            ),
        }
    }
}

/// A pod CIDR of another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// The other node's name.
    pub node: String,
    pub cidr: IpNet,
    /// Where packets go.
    pub via: Result<NextHop, Unrouted>,
}

/// All addresses, and other nodes' pod CIDRs, to compare with this node's networks.
#[must_use]
pub fn watched(nodes: &Nodes, own: &str) -> Vec<IpNet> {
    let cidrs = nodes.iter().filter(|node| node.name != own).flat_map(|node| node.pod_cidrs.iter().copied());
    let addresses = nodes.iter().flat_map(|node| node.addresses.iter().copied().map(IpNet::from));
    cidrs.chain(addresses).collect()
}

/// Addresses of the row that the node lacks. `networks`: as in [`destinations`].
#[must_use]
pub fn absent(row: &NodeRow, networks: &[NodeNetwork]) -> Vec<IpAddr> {
    row.addresses.iter().copied().filter(|address| !is_own(*address, networks)).collect()
}

/// The way to each pod CIDR of other nodes. `networks`: this node's that share addresses with [`watched`]. `detours`:
/// nodes without a usable direct path. `services`: ranges of services.
#[must_use]
pub fn destinations(
    nodes: &Nodes,
    own: &str,
    routing: Routing,
    detours: &Detours,
    pools: &[PoolConfig],
    services: &[IpNet],
    networks: &[NodeNetwork],
) -> Vec<Destination> {
    let is_own = |address: &&IpAddr| is_own(**address, networks);
    let locals: Vec<IpAddr> =
        nodes.get(own).into_iter().flat_map(|row| &row.addresses).filter(is_own).copied().collect();
    let mut found = Vec::new();
    for node in nodes.iter().filter(|node| node.name != own) {
        let routing = if detours.contains_key(&node.name) { Routing::Overlay } else { routing };
        for cidr in &node.pod_cidrs {
            let via = match conflict(node, cidr, pools, services, networks) {
                Some(why) => Err(why),
                None => next_hop(node, cidr, routing, &locals, networks).ok_or(Unrouted::NotNear),
            };
            found.push(Destination { node: node.name.clone(), cidr: *cidr, via });
        }
    }
    found
}

fn is_own(address: IpAddr, networks: &[NodeNetwork]) -> bool {
    networks.iter().any(|n| n.way == Way::Address && n.net.addr() == address)
}

fn conflict(
    node: &NodeRow,
    cidr: &IpNet,
    pools: &[PoolConfig],
    services: &[IpNet],
    networks: &[NodeNetwork],
) -> Option<Unrouted> {
    let overlaps = |net: &&IpNet| net.contains(cidr) || cidr.contains(*net);
    if let Some(pool) = pools.iter().flat_map(|pool| &pool.cidrs).find(overlaps) {
        return Some(Unrouted::Pool(*pool));
    }
    if let Some(services) = services.iter().find(overlaps) {
        return Some(Unrouted::Services(*services));
    }
    if let Some(network) = networks.iter().find(|network| conflicts(cidr, network)) {
        return Some(Unrouted::Network(network.clone()));
    }
    node.addresses.iter().find(|address| is_own(**address, networks)).copied().map(Unrouted::OwnAddress)
}

/// `locals`: the row's addresses that this node has.
fn next_hop(
    node: &NodeRow,
    cidr: &IpNet,
    routing: Routing,
    locals: &[IpAddr],
    networks: &[NodeNetwork],
) -> Option<NextHop> {
    let share_a_link = |n: &NodeNetwork, all: &[&IpAddr]| {
        let on_link = matches!(n.way, Way::OnLink { by_kernel: true, .. }) && n.net.prefix_len() > 0;
        on_link && all.iter().all(|address| n.net.contains(*address))
    };
    let is_near = |address: &&IpAddr| networks.iter().any(|n| share_a_link(n, &[*address]));
    let of_family = |address: &&IpAddr| address.is_ipv4() == cidr.addr().is_ipv4();
    let near = node.addresses.iter().filter(of_family).find(is_near);
    if let Some(near) = near.filter(|_| routing != Routing::Overlay) {
        return Some(NextHop::Direct(*near));
    }
    if routing == Routing::Native {
        return None;
    }
    let local_to = |remote: &IpAddr| {
        let beside = |local: &&IpAddr| networks.iter().any(|n| share_a_link(n, &[*local, remote]));
        let of_family = |local: &&IpAddr| local.is_ipv4() == remote.is_ipv4();
        locals.iter().find(beside).or_else(|| locals.iter().find(of_family)).copied()
    };
    let common = node.addresses.iter().find_map(|remote| Some((*remote, Some(local_to(remote)?))));
    let (remote, local) = common.or_else(|| Some((*node.addresses.first()?, None)))?;
    Some(NextHop::Overlay { remote, local })
}

/// Nodes whose frames the overlay accepts; `None` if neither end uses it: with `auto`, the other end may refuse the
/// direct path first. A destination without a row belongs to the node with its address.
#[must_use]
pub fn overlay(nodes: &Nodes, own: &str, routing: Routing, destinations: &[Destination]) -> Option<Vec<OverlayNode>> {
    let is_used = |to: &&Destination| match to.via {
        Ok(NextHop::Overlay { .. }) => true,
        Ok(NextHop::Direct(_)) => routing == Routing::Auto,
        Err(_) => false,
    };
    destinations.iter().find(is_used)?;
    let others = nodes.iter().filter(|node| node.name != own);
    let node = |node: &NodeRow| (node.name.clone(), (node.addresses.clone(), Vec::new()));
    let mut known: BTreeMap<String, (Vec<IpAddr>, Vec<IpNet>)> = others.map(node).collect();
    for to in destinations {
        let Ok(via) = to.via else { continue };
        if let Some((_, cidrs)) = known.get_mut(&to.node) {
            cidrs.push(to.cidr);
        } else if let NextHop::Overlay { remote, .. } = via {
            let name = nodes.of_address(remote).map_or_else(|| remote.to_string(), |node| node.name.clone());
            known.entry(name).or_insert_with(|| (vec![remote], Vec::new())).1.push(to.cidr);
        }
    }
    let routed = known.into_iter().filter(|(_, (_, cidrs))| !cidrs.is_empty());
    Some(routed.map(|(name, (addresses, cidrs))| OverlayNode { name, addresses, cidrs }).collect())
}

/// Routes of the destinations with one.
#[must_use]
pub fn routes(destinations: &[Destination]) -> Vec<PeerRoute> {
    let route = |to: &Destination| to.via.as_ref().ok().map(|via| PeerRoute { to: to.cidr, via: *via });
    destinations.iter().filter_map(route).collect()
}

/// Other nodes' container networks, to which packets keep their source, including those that a router or another
/// program's route reaches.
#[must_use]
pub fn peers(destinations: &[Destination]) -> Vec<IpNet> {
    let is_peer = |to: &&Destination| !to.via.as_ref().is_err_and(Unrouted::is_conflict);
    destinations.iter().filter(is_peer).map(|to| to.cidr).collect()
}

/// Other nodes' networks with addresses that this node or a host on its links may have.
#[must_use]
pub fn refused(destinations: &[Destination]) -> Vec<IpNet> {
    let is_conflict = |to: &&Destination| to.via.as_ref().is_err_and(Unrouted::is_conflict);
    destinations.iter().filter(is_conflict).map(|to| to.cidr).collect()
}

/// Pools' CIDRs outside this node's row: other nodes have no route to them.
#[must_use]
pub fn pools_outside(row: &NodeRow, pools: &[PoolConfig]) -> Vec<IpNet> {
    let inside = |pool: &IpNet| row.pod_cidrs.iter().any(|cidr| cidr.contains(pool));
    pools.iter().flat_map(|pool| pool.cidrs.iter().copied()).filter(|pool| !inside(pool)).collect()
}

#[cfg(test)]
mod tests {
    use wharf_core::ids::PoolName;

    use super::*;
    use crate::paths::REFUSED;

    fn net(text: &str) -> IpNet {
        text.parse().expect("network")
    }

    fn nodes() -> Nodes {
        let row = |name: &str, addresses: &[&str], cidrs: &[&str]| NodeRow {
            name: name.to_owned(),
            addresses: addresses.iter().map(|a| a.parse().expect("address")).collect(),
            pod_cidrs: cidrs.iter().copied().map(net).collect(),
            health_addresses: Vec::new(),
            router_addresses: Vec::new(),
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
        told_by(Routing::Native, pool, networks)
    }

    fn told_by(routing: Routing, pool: &[&str], networks: &[NodeNetwork]) -> Vec<String> {
        let to = destinations(&nodes(), "a", routing, &Detours::new(), &pools(pool), &[], networks);
        to.iter()
            .map(|to| match &to.via {
                Ok(via) => format!("{} {via}", to.cidr),
                Err(why) => format!("{}: {why}", to.cidr),
            })
            .collect()
    }

    #[test]
    fn the_overlay_leads_where_no_link_does() {
        let far = [
            "10.3.0.0/16 overlay to 198.51.100.3 from 192.0.2.1",
            "fd00:3::/64 overlay to 198.51.100.3 from 192.0.2.1",
        ];
        let found = told_by(Routing::Auto, &["10.1.0.0/16"], &lan());
        assert_eq!(found[..2], ["10.2.0.0/16 via 192.0.2.2", "fd00:2::/64 via 2001:db8::2"]);
        assert_eq!(found[2..], far);
        let found = told_by(Routing::Overlay, &["10.1.0.0/16"], &lan());
        assert_eq!(found[0], "10.2.0.0/16 overlay to 192.0.2.2 from 192.0.2.1");
        // An address on the other node's link precedes the first.
        let mut networks = lan();
        networks.extend([network("192.0.2.1/32", Way::Address), network("203.0.113.1/32", Way::Address)]);
        let rows = Nodes::new(
            nodes()
                .iter()
                .map(|node| match node.name.as_str() {
                    "a" => NodeRow {
                        addresses: ["203.0.113.1", "192.0.2.1"].map(|a| a.parse().expect("address")).to_vec(),
                        ..node.clone()
                    },
                    _ => node.clone(),
                })
                .collect(),
        );
        let rows = rows.expect("nodes");
        let to = destinations(&rows, "a", Routing::Overlay, &Detours::new(), &pools(&[]), &[], &networks);
        let told: Vec<_> = to.iter().map(|to| to.via.as_ref().map(ToString::to_string).expect("a way")).collect();
        assert_eq!(
            [&told[0], &told[2]],
            ["overlay to 192.0.2.2 from 192.0.2.1", "overlay to 198.51.100.3 from 203.0.113.1"]
        );
        assert_eq!(found[1], "fd00:2::/64 overlay to 192.0.2.2 from 192.0.2.1", "one path for both families");
        assert_eq!(found[2..], far);
        // This node has no address of its row.
        assert_eq!(told_by(Routing::Auto, &[], &lan()[..2])[2], "10.3.0.0/16 overlay to 198.51.100.3");
        let detours = Detours::from([("b".to_owned(), REFUSED)]);
        let to = destinations(&nodes(), "a", Routing::Auto, &detours, &pools(&[]), &[], &lan());
        let all_by_overlay = to.iter().all(|to| matches!(to.via, Ok(NextHop::Overlay { .. })));
        assert!(all_by_overlay, "{to:?}");
        assert!(told_by(Routing::Overlay, &["10.3.0.0/16"], &lan())[2].contains("a pool of this node"));
        assert!(told_by(Routing::Overlay, &["10.3.0.0/16"], &lan())[3].contains("overlay to"));
    }

    #[test]
    fn an_address_of_the_other_family_serves_if_this_node_has_it() {
        let row = |name: &str, addresses: &[&str], cidr: &str| NodeRow {
            name: name.to_owned(),
            addresses: addresses.iter().map(|a| a.parse().expect("address")).collect(),
            pod_cidrs: vec![net(cidr)],
            health_addresses: Vec::new(),
            router_addresses: Vec::new(),
        };
        let of = |own: &[&str], other: &[&str]| {
            let nodes = Nodes::new(vec![row("a", own, "10.1.0.0/16"), row("b", other, "10.2.0.0/16")]).expect("nodes");
            let networks: Vec<_> = own
                .iter()
                .map(|a| network(&IpNet::from(a.parse::<IpAddr>().expect("address")).to_string(), Way::Address))
                .collect();
            let to = destinations(&nodes, "a", Routing::Auto, &Detours::new(), &[], &[], &networks);
            let [to] = to.try_into().expect("one");
            to.via.expect("a way").to_string()
        };
        let (v4, v6) = ("192.0.2.1", "2001:db8::1");
        assert_eq!(of(&[v6], &["198.51.100.3", "2001:db8:9::3"]), "overlay to 2001:db8:9::3 from 2001:db8::1");
        assert_eq!(of(&[v6, v4], &["198.51.100.3"]), "overlay to 198.51.100.3 from 192.0.2.1");
        assert_eq!(of(&[v4], &["2001:db8:9::3"]), "overlay to 2001:db8:9::3", "the kernel may know a way");
    }

    #[test]
    fn the_overlay_accepts_every_node_with_a_route() {
        let of = |routing, pool: &[&str]| {
            let to = destinations(&nodes(), "a", routing, &Detours::new(), &pools(pool), &[], &lan());
            overlay(&nodes(), "a", routing, &to)
        };
        assert_eq!(of(Routing::Native, &[]), None);
        let all = of(Routing::Auto, &[]).expect("far");
        assert_eq!(all.iter().map(|node| node.cidrs.len()).collect::<Vec<_>>(), [2, 2]);
        assert_eq!(all[0].addresses.len(), 2, "also a node with a direct route: it may use the overlay");
        let all = of(Routing::Auto, &["10.2.0.0/16", "fd00:2::/64"]).expect("far");
        assert_eq!(all.iter().map(|node| node.addresses.len()).collect::<Vec<_>>(), [1], "no node with a conflict");
        let near = of(Routing::Auto, &["10.3.0.0/16", "fd00:3::/64"]).expect("node b may refuse the direct path");
        assert_eq!(near.into_iter().map(|node| node.name).collect::<Vec<_>>(), ["b"]);
    }

    #[test]
    fn the_overlay_keeps_accepting_nodes_without_a_row() {
        let to = |cidr: &str, remote: &str| Destination {
            node: "of an earlier start".to_owned(),
            cidr: net(cidr),
            via: Ok(NextHop::Overlay { remote: remote.parse().expect("address"), local: None }),
        };
        let left = [to("10.8.0.0/16", "203.0.113.8"), to("fd00:8::/64", "203.0.113.8"), to("10.9.0.0/16", "192.0.2.2")];
        let told = |nodes: &Nodes| {
            let all = overlay(nodes, "a", Routing::Auto, &left).expect("overlay");
            all.into_iter().map(|node| (node.name, node.addresses.len(), node.cidrs.len())).collect::<Vec<_>>()
        };
        let of = |name: &str, addresses, cidrs| (name.to_owned(), addresses, cidrs);
        assert_eq!(told(&Nodes::default()), [of("192.0.2.2", 1, 1), of("203.0.113.8", 1, 2)]);
        assert_eq!(told(&nodes()), [of("203.0.113.8", 1, 2), of("b", 2, 1)], "no address twice");
    }

    #[test]
    fn a_neighbour_is_the_next_hop_of_each_family() {
        let found = told(&["10.1.0.0/16"], &lan());
        assert_eq!(found[..2], ["10.2.0.0/16 via 192.0.2.2", "fd00:2::/64 via 2001:db8::2"]);
        assert!(found[2].starts_with("10.3.0.0/16: its node has no address of this family"), "{}", found[2]);
        let to = destinations(&nodes(), "a", Routing::Native, &Detours::new(), &pools(&[]), &[], &lan());
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
            let to = destinations(&nodes(), "a", Routing::Native, &Detours::new(), &pools(&[pool]), &[], &networks);
            assert_eq!(peers(&to).contains(&net("10.2.0.0/16")), is_peer, "{why}");
        }
    }

    #[test]
    fn a_network_with_addresses_of_services_is_refused_alone() {
        let services = [net("10.2.128.0/17"), net("fd00::/16")];
        let to = destinations(&nodes(), "a", Routing::Overlay, &Detours::new(), &[], &services, &lan());
        let refused: Vec<_> = to.iter().filter_map(|to| Some((to.cidr, to.via.as_ref().err()?.to_string()))).collect();
        let why = |net: &str| format!("it overlaps {net}, a range of services (--service-cidr)");
        assert_eq!(refused[0], (net("10.2.0.0/16"), why("10.2.128.0/17")));
        assert_eq!(refused[1], (net("fd00:2::/64"), why("fd00::/16")));
        assert_eq!(
            (refused.len(), peers(&to)),
            (3, peers(&destinations(&nodes(), "a", Routing::Overlay, &Detours::new(), &[], &[], &lan())))
        );
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
