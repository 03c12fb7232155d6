//! Pools that overlap the node's networks: a container cannot have an address of the node or of a host on its links.
//! Routes of larger ranges to a gateway do not conflict: the pool's routes are longer.

use std::{fmt, net::IpAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{
    ids::PoolName,
    ipam::{PoolConfig, Withheld},
};

/// How the node reaches a network.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// An address of the node.
    Address,
    /// Without a gateway: hosts on the link.
    OnLink {
        /// For an address on the link or an advertised prefix.
        by_kernel: bool,
        /// The link has a single peer (a tunnel, PPP).
        point_to_point: bool,
    },
    /// By gateways; the address of a single, known one.
    Gateway(Option<IpAddr>),
    /// Packets end on the node.
    Local,
    /// Unreachable, blackhole, prohibit or throw.
    Nowhere,
}

/// A foreign address or route of the node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeNetwork {
    /// The address, or the route's destination.
    pub net: IpNet,
    /// How it is reached.
    pub way: Way,
    /// If any.
    pub ifname: Option<String>,
}

impl fmt::Display for NodeNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { net, way, ifname } = self;
        match way {
            Way::Address => write!(f, "the node's address {}", net.addr())?,
            Way::OnLink { .. } => write!(f, "the node's route {net}")?,
            Way::Gateway(Some(gateway)) => write!(f, "the node's route {net} via {gateway}")?,
            Way::Gateway(None) => write!(f, "the node's route {net} via a gateway")?,
            Way::Local => write!(f, "the node's local route {net}")?,
            Way::Nowhere => write!(f, "the node's unreachable or blackhole route {net}")?,
        }
        match (ifname, way) {
            (Some(ifname), Way::Address) => write!(f, " on {ifname}"),
            (Some(ifname), _) => write!(f, " dev {ifname}"),
            (None, _) => Ok(()),
        }
    }
}

/// The node's networks that overlap the pools.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeNetworks {
    /// Foreign ones.
    pub foreign: Vec<NodeNetwork>,
    /// With Wharf's route over an endpoint's link.
    pub endpoints: Vec<IpAddr>,
    /// With Wharf's unreachable route: served since the boot.
    pub pools: Vec<IpNet>,
}

/// A pool's CIDR and a network of the node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Overlap {
    pub pool: PoolName,
    pub cidr: IpNet,
    pub network: NodeNetwork,
}

impl Overlap {
    /// Shared addresses.
    #[must_use]
    pub fn withheld(&self) -> Withheld {
        let net = if self.cidr.contains(&self.network.net) { self.network.net } else { self.cidr };
        Withheld { net: net.trunc(), why: self.network.to_string() }
    }
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of pool {} overlaps {}", self.cidr, self.pool, self.network)
    }
}

/// Containers in the CIDR would take addresses of the network.
#[must_use]
pub fn conflicts(cidr: &IpNet, network: &NodeNetwork) -> bool {
    if cidr.contains(&network.net) {
        return true;
    }
    if !network.net.contains(cidr) || network.net.prefix_len() == 0 {
        return false;
    }
    match &network.way {
        // The pool would hide hosts of that network.
        Way::OnLink { by_kernel, point_to_point } => *by_kernel || !*point_to_point,
        Way::Address | Way::Local => true,
        Way::Gateway(_) | Way::Nowhere => false,
    }
}

/// The node can announce the CIDR: it is in the network of a link with neighbours.
#[must_use]
pub fn can_be_announced(cidr: &IpNet, network: &NodeNetwork) -> bool {
    let has_neighbours = matches!(network.way, Way::OnLink { by_kernel: true, point_to_point: false });
    has_neighbours && network.net != *cidr && network.net.contains(cidr)
}

/// Addresses before routes.
#[must_use]
pub fn overlaps(pools: &[PoolConfig], networks: &[NodeNetwork], announce: bool) -> Vec<Overlap> {
    let mut found = Vec::new();
    for pool in pools {
        for cidr in &pool.cidrs {
            let amiss = |n: &&NodeNetwork| conflicts(cidr, n) && !(announce && can_be_announced(cidr, n));
            let mut here: Vec<&NodeNetwork> = networks.iter().filter(amiss).collect();
            here.sort_by_key(|n| (&n.way, n.net));
            found.extend(here.into_iter().map(|n| Overlap {
                pool: pool.name.clone(),
                cidr: *cidr,
                network: n.clone(),
            }));
        }
    }
    found
}

/// In an error text.
const TOLD: usize = 4;

/// Pools that are unusable on this node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("start with these pools: {}; choose another range (--ipv4-pool, --ipv6-pool or `cidrs` of the pool)", told(.0))]
pub struct Refused(pub Vec<Overlap>);

fn told(overlaps: &[Overlap]) -> String {
    let mut text = overlaps.iter().take(TOLD).map(ToString::to_string).collect::<Vec<_>>().join("; ");
    if overlaps.len() > TOLD {
        text.push_str(&format!("; and {} more", overlaps.len() - TOLD));
    }
    text
}

/// Overlaps newer than the pool: of CIDRs that were served since the boot or that have endpoints. A refusal would leave
/// running containers without an agent.
///
/// # Errors
/// Other overlaps.
pub fn at_start(pools: &[PoolConfig], seen: &NodeNetworks, announce: bool) -> Result<Vec<Overlap>, Refused> {
    let in_use = |overlap: &Overlap| {
        seen.pools.contains(&overlap.cidr) || seen.endpoints.iter().any(|ip| overlap.cidr.contains(ip))
    };
    let (later, refused): (Vec<_>, Vec<_>) = overlaps(pools, &seen.foreign, announce).into_iter().partition(in_use);
    if refused.is_empty() { Ok(later) } else { Err(Refused(refused)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().expect("network")
    }

    fn network(text: &str, way: Way) -> NodeNetwork {
        NodeNetwork { net: net(text), way, ifname: Some("lan0".into()) }
    }

    const LAN: Way = Way::OnLink { by_kernel: true, point_to_point: false };

    fn pool(cidrs: &[&str]) -> PoolConfig {
        PoolConfig { name: PoolName::parse("default").expect("name"), cidrs: cidrs.iter().map(|c| net(c)).collect() }
    }

    #[test]
    fn what_shares_addresses_with_a_pool_is_a_conflict_unless_it_only_leads_past_it() {
        let by_hand = |point_to_point| Way::OnLink { by_kernel: false, point_to_point };
        let tunnel_of_kernel = Way::OnLink { by_kernel: true, point_to_point: true };
        for (v4, v6, way, conflict) in [
            ("10.87.0.0/16", "fd57::/64", LAN, true),
            ("10.87.0.0/16", "fd57::/64", by_hand(true), true),
            ("10.87.0.0/16", "fd57::/64", Way::Gateway(None), true),
            ("10.87.0.0/16", "fd57::/64", Way::Nowhere, true),
            ("10.87.0.0/16", "fd57::/64", Way::Local, true),
            ("10.87.9.0/24", "fd57::900/120", LAN, true),
            ("10.87.9.0/24", "fd57::900/120", Way::Gateway(None), true),
            ("10.87.9.1/32", "fd57::901/128", Way::Address, true),
            ("10.87.9.1/32", "fd57::901/128", Way::Nowhere, true),
            ("10.0.0.0/8", "fd57::/48", LAN, true),
            ("10.0.0.0/8", "fd57::/48", tunnel_of_kernel, true),
            ("10.0.0.0/8", "fd57::/48", by_hand(false), true),
            ("10.0.0.0/8", "fd57::/48", by_hand(true), false),
            ("10.0.0.0/8", "fd57::/48", Way::Gateway(None), false),
            ("10.0.0.0/8", "fd57::/48", Way::Nowhere, false),
            ("10.0.0.0/8", "fd57::/48", Way::Local, true),
            ("0.0.0.0/0", "::/0", LAN, false),
            ("0.0.0.0/0", "::/0", Way::Gateway(None), false),
            ("10.88.0.0/16", "fd58::/64", LAN, false),
            ("192.0.2.1/32", "2001:db8::1/128", Way::Address, false),
        ] {
            assert_eq!(conflicts(&net("10.87.0.0/16"), &network(v4, way.clone())), conflict, "{v4} {way:?}");
            assert_eq!(conflicts(&net("fd57::/64"), &network(v6, way.clone())), conflict, "{v6} {way:?}");
        }
        assert!(!conflicts(&net("10.87.0.0/16"), &network("fd57::/64", LAN)), "another family");
    }

    #[test]
    fn a_part_of_a_links_network_is_no_conflict_where_it_is_announced() {
        let tunnel = Way::OnLink { by_kernel: true, point_to_point: true };
        for (text, way, conflict) in [
            ("10.0.0.0/8", LAN, false),
            ("10.87.0.0/16", LAN, true),
            ("10.87.9.0/24", LAN, true),
            ("10.87.0.7/32", Way::Address, true),
            ("10.0.0.0/8", tunnel, true),
            ("10.0.0.0/8", Way::OnLink { by_kernel: false, point_to_point: false }, true),
            ("10.0.0.0/8", Way::Local, true),
        ] {
            let found = overlaps(&[pool(&["10.87.0.0/16"])], &[network(text, way.clone())], true);
            assert_eq!(!found.is_empty(), conflict, "{text} {way:?}");
        }
    }

    #[test]
    fn an_overlap_names_both_sides_and_what_to_do() {
        let seen = NodeNetworks {
            foreign: vec![
                network("10.87.0.0/16", Way::Gateway("192.0.2.7".parse().ok())),
                network("10.87.0.1/32", Way::Address),
            ],
            ..NodeNetworks::default()
        };
        let refused = at_start(&[pool(&["10.87.0.0/16", "fd57::/64"])], &seen, false).expect_err("overlaps");
        assert_eq!(
            refused.to_string(),
            "start with these pools: 10.87.0.0/16 of pool default overlaps the node's address 10.87.0.1 on lan0; \
             10.87.0.0/16 of pool default overlaps the node's route 10.87.0.0/16 via 192.0.2.7 dev lan0; choose another \
             range (--ipv4-pool, --ipv6-pool or `cidrs` of the pool)"
        );
    }

    #[test]
    fn an_overlap_that_came_after_the_endpoints_is_told_and_not_refused() {
        let pools = [pool(&["10.87.0.0/16", "fd57::/64"])];
        let foreign = vec![network("10.87.9.0/24", LAN)];
        let endpoints = vec!["10.87.0.2".parse().expect("ip")];
        let seen = |foreign, endpoints, pools| NodeNetworks { foreign, endpoints, pools };
        let later = at_start(&pools, &seen(foreign, endpoints.clone(), Vec::new()), false).expect("endpoints live");
        assert_eq!(later.iter().map(|o| o.withheld().net).collect::<Vec<_>>(), [net("10.87.9.0/24")]);
        let foreign = vec![network("fd57::/64", LAN)];
        assert!(at_start(&pools, &seen(foreign.clone(), endpoints.clone(), vec![net("10.87.0.0/16")]), false).is_err());
        assert!(at_start(&pools, &seen(foreign, endpoints, vec![net("fd57::/64")]), false).is_ok(), "served before");
    }

    #[test]
    fn what_is_withheld_is_what_both_have() {
        let withheld = |network: NodeNetwork| {
            let found = overlaps(&[pool(&["10.87.0.0/16"])], &[network], false);
            found.first().map(|o| o.withheld().net)
        };
        assert_eq!(withheld(network("10.0.0.0/8", LAN)), Some(net("10.87.0.0/16")));
        assert_eq!(withheld(network("10.87.3.0/24", LAN)), Some(net("10.87.3.0/24")));
        assert_eq!(withheld(network("10.87.3.1/32", Way::Address)), Some(net("10.87.3.1/32")));
        assert_eq!(withheld(network("0.0.0.0/0", LAN)), None);
    }
}
