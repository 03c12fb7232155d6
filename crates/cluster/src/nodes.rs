//! Rows of nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Nodes of a list.
pub const MAX_NODES: usize = 8_192;
/// Items of each list of a node.
pub const MAX_OF_NODE: usize = 8;
/// Bytes, as of a DNS name.
pub(crate) const MAX_NAME: usize = 253;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRow {
    /// Unique.
    pub name: String,
    /// Where other nodes reach it; at least one.
    pub addresses: Vec<IpAddr>,
    /// Contain its containers' addresses.
    pub pod_cidrs: Vec<IpNet>,
    /// In the node's pod CIDRs.
    pub health_addresses: Vec<IpAddr>,
    /// Gateways of its containers, in its pod CIDRs. The node itself sends from them over the overlay.
    pub router_addresses: Vec<IpAddr>,
}

/// Nodes with unique names and addresses, and CIDRs that do not overlap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Nodes(Vec<NodeRow>);

/// The refused part of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Name,
    /// Address, by index.
    Address(usize),
    /// CIDR, by index.
    Cidr(usize),
    /// Health address, by index.
    Health(usize),
    /// Router address, by index.
    Router(usize),
}

/// Why a list is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NodesError {
    /// Too many rows.
    #[error("{0} nodes; at most {MAX_NODES} fit")]
    TooMany(usize),
    /// A part of a row.
    #[error("{why}")]
    Row {
        /// Index.
        row: usize,
        part: Part,
        why: String,
    },
}

impl Nodes {
    /// Checks the rows.
    ///
    /// # Errors
    /// The first broken rule.
    pub fn new(rows: Vec<NodeRow>) -> Result<Self, NodesError> {
        if rows.len() > MAX_NODES {
            return Err(NodesError::TooMany(rows.len()));
        }
        let mut names: BTreeMap<&str, usize> = BTreeMap::new();
        let mut addresses: BTreeMap<IpAddr, &str> = BTreeMap::new();
        let mut cidrs: BTreeMap<IpNet, &str> = BTreeMap::new();
        for (row, node) in rows.iter().enumerate() {
            let refuse = |part, why: String| Err(NodesError::Row { row, part, why });
            if let Some(why) = name_problem("a node's name", &node.name) {
                return refuse(Part::Name, why);
            }
            if names.insert(&node.name, row).is_some() {
                return refuse(Part::Name, format!("two nodes have the name {}", node.name));
            }
            if node.addresses.is_empty() {
                return refuse(Part::Name, format!("node {} has no address", node.name));
            }
            for (what, count) in [
                ("addresses", node.addresses.len()),
                ("pod CIDRs", node.pod_cidrs.len()),
                ("health addresses", node.health_addresses.len()),
                ("router addresses", node.router_addresses.len()),
            ] {
                if count > MAX_OF_NODE {
                    return refuse(
                        Part::Name,
                        format!("node {} has {count} {what}; at most {MAX_OF_NODE} fit", node.name),
                    );
                }
            }
            for (i, address) in node.addresses.iter().enumerate() {
                if let Some(why) = address_problem(*address) {
                    return refuse(Part::Address(i), why);
                }
                if let Some(other) = addresses.insert(*address, &node.name) {
                    return refuse(Part::Address(i), format!("{address} is an address of node {other} already"));
                }
            }
            for (i, cidr) in node.pod_cidrs.iter().enumerate() {
                if let Some(why) = cidr_problem(cidr) {
                    return refuse(Part::Cidr(i), why);
                }
                if let Some((other, owner)) = sharing(&cidrs, *cidr) {
                    return refuse(Part::Cidr(i), format!("{cidr} overlaps {other} of node {owner}"));
                }
                cidrs.insert(*cidr, &node.name);
            }
            if let Some((part, why)) = inner_problem(node) {
                return refuse(part, why);
            }
        }
        for (row, node) in rows.iter().enumerate() {
            for (i, address) in node.addresses.iter().enumerate() {
                if let Some((cidr, owner)) = sharing(&cidrs, IpNet::from(*address)) {
                    let why = format!("{address} is in the pod CIDR {cidr} of node {owner}");
                    return Err(NodesError::Row { row, part: Part::Address(i), why });
                }
            }
        }
        Ok(Self(rows))
    }

    /// In list order.
    pub fn iter(&self) -> impl Iterator<Item = &NodeRow> {
        self.0.iter()
    }

    #[must_use]
    pub fn get(&self, name: &str) -> Option<&NodeRow> {
        self.0.iter().find(|node| node.name == name)
    }

    /// The node with this address, or with its pod CIDR.
    #[must_use]
    pub fn of_address(&self, address: IpAddr) -> Option<&NodeRow> {
        let has = |node: &&NodeRow| node.addresses.contains(&address) || is_in(&node.pod_cidrs, address);
        self.0.iter().find(has)
    }
}

/// Checks addresses in the node's pod CIDRs. No other node has them, because pod CIDRs do not overlap.
fn inner_problem(node: &NodeRow) -> Option<(Part, String)> {
    let health = node.health_addresses.iter().enumerate().map(|(i, address)| (Part::Health(i), *address));
    let routers = node.router_addresses.iter().enumerate().map(|(i, address)| (Part::Router(i), *address));
    let mut seen = BTreeSet::new();
    health.chain(routers).find_map(|(part, address)| {
        let why = if let Some(why) = address_problem(address) {
            why
        } else if !is_in(&node.pod_cidrs, address) {
            format!("{address} is in no pod CIDR of node {}", node.name)
        } else if !seen.insert(address) {
            format!("{address} is listed twice")
        } else {
            return None;
        };
        Some((part, why))
    })
}

/// The CIDR that overlaps `net`: directly before or after it, because `cidrs` do not overlap.
fn sharing<'a>(cidrs: &BTreeMap<IpNet, &'a str>, net: IpNet) -> Option<(IpNet, &'a str)> {
    let around = cidrs.range(..=net).next_back().into_iter().chain(cidrs.range(net..).next());
    around.map(|(other, owner)| (*other, *owner)).find(|(other, _)| overlap(other, &net))
}

pub(crate) fn name_problem(what: &str, name: &str) -> Option<String> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    let bad = name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(allowed);
    bad.then(|| format!("{what} has 1 to {MAX_NAME} letters, digits, '.', '-' and '_'"))
}

pub(crate) fn address_problem(address: IpAddr) -> Option<String> {
    (!is_of_a_host(address)).then(|| format!("{address} is no address that other nodes can reach"))
}

pub(crate) fn cidr_problem(cidr: &IpNet) -> Option<String> {
    if *cidr != cidr.trunc() {
        return Some(format!("{cidr} has host bits; write {}", cidr.trunc()));
    }
    let bad = cidr.prefix_len() == 0 || !is_of_a_host(cidr.addr());
    bad.then(|| format!("{cidr} is no range for containers"))
}

fn is_of_a_host(address: IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(a) => a.is_link_local() || a.is_broadcast(),
        IpAddr::V6(a) => a.is_unicast_link_local() || a.to_ipv4_mapped().is_some(),
    };
    !(address.is_unspecified() || address.is_loopback() || address.is_multicast() || link_local)
}

pub(crate) fn is_in(cidrs: &[IpNet], address: IpAddr) -> bool {
    cidrs.iter().any(|cidr| cidr.contains(&address))
}

pub(crate) fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn row(name: &str, addresses: &[&str], cidrs: &[&str]) -> NodeRow {
        NodeRow {
            name: name.to_owned(),
            addresses: addresses.iter().map(|a| a.parse().expect("address")).collect(),
            pod_cidrs: cidrs.iter().map(|c| c.parse().expect("CIDR")).collect(),
            health_addresses: Vec::new(),
            router_addresses: Vec::new(),
        }
    }

    #[test]
    fn what_two_nodes_would_both_own_is_refused_and_named() {
        let a = || row("a", &["192.0.2.1"], &["10.1.0.0/16", "fd00:1::/64"]);
        for (second, part, why) in [
            (row("a", &["192.0.2.2"], &[]), Part::Name, "two nodes have the name a"),
            (row("b", &["192.0.2.2", "192.0.2.1"], &[]), Part::Address(1), "192.0.2.1 is an address of node a already"),
            (row("b", &["192.0.2.2"], &["10.1.9.0/24"]), Part::Cidr(0), "10.1.9.0/24 overlaps 10.1.0.0/16 of node a"),
            (row("b", &["192.0.2.2"], &["10.0.0.0/8"]), Part::Cidr(0), "10.0.0.0/8 overlaps 10.1.0.0/16 of node a"),
            (row("b", &["10.1.0.9"], &[]), Part::Address(0), "10.1.0.9 is in the pod CIDR 10.1.0.0/16 of node a"),
            (row("b", &["192.0.2.2"], &["10.2.0.1/16"]), Part::Cidr(0), "10.2.0.1/16 has host bits; write 10.2.0.0/16"),
            (row("b", &["192.0.2.2"], &["::/0"]), Part::Cidr(0), "::/0 is no range for containers"),
            (row("b", &[], &[]), Part::Name, "node b has no address"),
            (row("b", &["127.0.0.1"], &[]), Part::Address(0), "127.0.0.1 is no address that other nodes can reach"),
            (row("b", &["fe80::1"], &[]), Part::Address(0), "fe80::1 is no address that other nodes can reach"),
        ] {
            let refused = Nodes::new(vec![a(), second]).expect_err(why);
            assert_eq!(refused, NodesError::Row { row: 1, part, why: why.to_owned() });
        }
        for name in ["", "a b", "a\n", &"x".repeat(254)] {
            assert!(Nodes::new(vec![row(name, &["192.0.2.1"], &[])]).is_err(), "{name:?}");
        }
    }

    #[test]
    fn health_and_router_addresses_are_in_the_pod_cidrs_of_their_node() {
        let a = || row("a", &["192.0.2.1"], &["10.1.0.0/16"]);
        let b = |health: &[&str], routers: &[&str]| {
            let parse =
                |texts: &[&str]| -> Vec<IpAddr> { texts.iter().map(|text| text.parse().expect("address")).collect() };
            let (health_addresses, router_addresses) = (parse(health), parse(routers));
            NodeRow { health_addresses, router_addresses, ..row("b", &["192.0.2.2"], &["10.2.0.0/16", "fd00:2::/64"]) }
        };
        assert!(Nodes::new(vec![a(), b(&["10.2.0.2", "fd00:2::2"], &["10.2.0.1", "fd00:2::1"])]).is_ok());
        let nine: Vec<String> = (1..10).map(|i| format!("10.2.0.{i}")).collect();
        let nine: Vec<&str> = nine.iter().map(String::as_str).collect();
        for (row, part, why) in [
            (b(&["10.2.0.2", "10.1.0.2"], &[]), Part::Health(1), "10.1.0.2 is in no pod CIDR of node b"),
            (b(&[], &["192.0.2.2"]), Part::Router(0), "192.0.2.2 is in no pod CIDR of node b"),
            (b(&[], &["10.2.0.1", "10.2.0.1"]), Part::Router(1), "10.2.0.1 is listed twice"),
            (b(&["10.2.0.1"], &["fd00:2::1", "10.2.0.1"]), Part::Router(1), "10.2.0.1 is listed twice"),
            (b(&["127.0.0.1"], &[]), Part::Health(0), "127.0.0.1 is no address that other nodes can reach"),
            (b(&nine, &[]), Part::Name, "node b has 9 health addresses; at most 8 fit"),
            (b(&[], &nine), Part::Name, "node b has 9 router addresses; at most 8 fit"),
        ] {
            let refused = Nodes::new(vec![a(), row]).expect_err(why);
            assert_eq!(refused, NodesError::Row { row: 1, part, why: why.to_owned() });
        }
    }

    #[test]
    fn an_overlap_is_found_among_many() {
        let many = || {
            (0..1_000).map(|n| {
                let (high, low) = (n / 250, n % 250);
                row(
                    &format!("n{n}"),
                    &[&format!("192.0.{high}.{low}")],
                    &[&format!("10.{high}.{low}.0/24"), &format!("fd00:{high}:{low}::/64")],
                )
            })
        };
        assert!(Nodes::new(many().collect()).is_ok());
        for (cidr, other) in [
            ("10.0.0.0/8", "10.0.0.0/24 of node n0"),
            ("10.2.128.0/17", "10.2.128.0/24 of node n628"),
            ("10.3.249.128/25", "10.3.249.0/24 of node n999"),
            ("fd00:1::/32", "fd00:1::/64 of node n250"),
        ] {
            let refused = Nodes::new(many().chain([row("x", &["192.0.9.1"], &[cidr])]).collect()).expect_err(cidr);
            assert!(refused.to_string().ends_with(&format!("{cidr} overlaps {other}")), "{refused}");
        }
        assert!(
            Nodes::new(many().chain([row("x", &["192.0.9.1"], &["10.3.250.0/24", "fd00:3:250::/64"])]).collect())
                .is_ok()
        );
    }

    #[test]
    fn an_address_finds_its_node() {
        let nodes = Nodes::new(vec![
            row("a", &["192.0.2.1"], &["10.1.0.0/16"]),
            row("b", &["192.0.2.2", "2001:db8::2"], &["fd00:2::/64"]),
        ]);
        let nodes = nodes.expect("nodes");
        let of = |text: &str| nodes.of_address(text.parse().expect("address")).map(|node| node.name.as_str());
        assert_eq!(of("10.1.200.3"), Some("a"));
        assert_eq!(of("fd00:2::7"), Some("b"));
        assert_eq!(of("2001:db8::2"), Some("b"));
        assert_eq!(of("10.2.0.1"), None);
    }
}
