//! The node's masquerading and published ports. Pure: `wharf-datapath` writes the nftables table.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::NonZeroU16,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
pub use wharf_names::port::{Protocol, PublishedPort};

/// Multicast and IPv6 link-local. IPv4 link-local is masqueraded: cloud providers serve DNS and metadata there.
const NEVER_MASQUERADED: [IpNet; 3] = [
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(224, 0, 0, 0), 4)),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10)),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8)),
];

/// The node's NAT. Writing it fails for two mappings with one key and different targets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nat {
    /// Of packets that leave the pools; `None` keeps sources.
    pub masquerade: Option<Masquerade>,
    /// Published ports.
    pub mappings: Vec<PortMapping>,
    /// Containers without masquerading, in both directions.
    pub own: Vec<IpAddr>,
    /// Marked packets are delivered to the proxy.
    #[serde(default)]
    pub redirects: bool,
}

/// A table entry of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NatEntry {
    /// A published port.
    Port(PortMapping),
    /// The container's packets, and other containers' packets to it, keep their source.
    Own(IpAddr),
}

impl NatEntry {
    #[must_use]
    pub const fn container(&self) -> IpAddr {
        match self {
            Self::Port(mapping) => mapping.container,
            Self::Own(ip) => *ip,
        }
    }

    /// For operators.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Port(_) => "port",
            Self::Own(_) => "own-address",
        }
    }
}

impl fmt::Display for NatEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(mapping) => mapping.fmt(f),
            Self::Own(ip) => write!(f, "own address {ip}"),
        }
    }
}

impl Nat {
    /// Masquerading with these entries.
    #[must_use]
    pub fn with_entries(masquerade: Option<Masquerade>, entries: impl IntoIterator<Item = NatEntry>) -> Self {
        let mut nat = Self { masquerade, ..Self::default() };
        for entry in entries {
            match entry {
                NatEntry::Port(mapping) => nat.mappings.push(mapping),
                NatEntry::Own(ip) => nat.own.push(ip),
            }
        }
        nat
    }

    /// Of endpoints.
    pub fn entries(&self) -> impl Iterator<Item = NatEntry> + '_ {
        self.mappings.iter().copied().map(NatEntry::Port).chain(self.own.iter().copied().map(NatEntry::Own))
    }
}

/// Gives packets a node address as source.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Masquerade {
    /// Sources; may overlap.
    pub pools: Vec<IpNet>,
    /// Destinations, in addition to pools and multicast.
    pub excluded: Vec<IpNet>,
    /// `None` for the outgoing interface's address.
    pub source4: Option<Ipv4Addr>,
    /// `None` for the outgoing interface's address.
    pub source6: Option<Ipv6Addr>,
    /// Packets without a policy decision reach no other network.
    #[serde(default)]
    pub services: bool,
    /// Addresses of containers in no pool: masqueraded sources, as those of the pools.
    #[serde(skip)]
    pub former: Vec<IpAddr>,
    /// `None` without an overlay.
    #[serde(skip)]
    pub overlay: Option<OverlayPort>,
}

/// Where other nodes accept frames of this node: translated, a container's datagram would come from the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlayPort {
    /// UDP.
    pub port: u16,
    /// Addresses of the other nodes.
    pub nodes: BTreeSet<IpAddr>,
}

impl Masquerade {
    /// Every CIDR of this pool is masqueraded.
    #[must_use]
    pub fn covers(&self, pool: &[IpNet]) -> bool {
        pool.iter().all(|cidr| self.pools.contains(cidr))
    }

    /// Merged.
    #[must_use]
    pub fn sources(&self) -> Vec<Span> {
        merge(self.pools.iter().copied().chain(self.former.iter().copied().map(IpNet::from)))
    }

    /// Merged destinations without masquerading.
    #[must_use]
    pub fn spared(&self) -> Vec<Span> {
        merge(self.pools.iter().chain(&self.excluded).chain(&NEVER_MASQUERADED).copied())
    }
}

/// Command that accepts the pools' packets in a chain (`family table chain`); `None` for shell characters.
#[must_use]
pub fn accepting(chain: &str, pools: &[IpNet]) -> Option<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./ ".contains(c);
    let rule = |pool: &IpNet| {
        let of = if pool.addr().is_ipv4() { "ip" } else { "ip6" };
        ["saddr", "daddr"].map(|way| format!("insert rule {chain} {of} {way} {pool} accept"))
    };
    let rules: Vec<_> = pools.iter().flat_map(rule).collect();
    chain.chars().all(plain).then(|| format!("nft '{}'", rules.join("; ")))
}

/// Inclusive address range of one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// Lowest address.
    pub first: IpAddr,
    /// Highest address.
    pub last: IpAddr,
}

impl Span {
    /// `None` at the family's end.
    #[must_use]
    pub fn after(&self) -> Option<IpAddr> {
        match self.last {
            IpAddr::V4(ip) => ip.to_bits().checked_add(1).map(|bits| Ipv4Addr::from_bits(bits).into()),
            IpAddr::V6(ip) => ip.to_bits().checked_add(1).map(|bits| Ipv6Addr::from_bits(bits).into()),
        }
    }

    /// In or right after the span. Requires `ip >= first`.
    fn reaches(&self, ip: IpAddr) -> bool {
        self.first.is_ipv4() == ip.is_ipv4() && self.after().is_none_or(|after| ip <= after)
    }
}

/// Fewest spans, sorted, IPv4 first; disjoint. Ignores host bits.
#[must_use]
pub fn merge(cidrs: impl IntoIterator<Item = IpNet>) -> Vec<Span> {
    let mut all: Vec<_> = cidrs.into_iter().map(|c| Span { first: c.network(), last: c.broadcast() }).collect();
    all.sort_unstable();
    let mut merged: Vec<Span> = Vec::with_capacity(all.len());
    for span in all {
        match merged.last_mut() {
            Some(before) if before.reaches(span.first) => before.last = before.last.max(span.last),
            _ => merged.push(span),
        }
    }
    merged
}

/// A published port of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PortMapping {
    pub protocol: Protocol,
    /// `None` for all of the container's family.
    pub host_ip: Option<IpAddr>,
    /// Node port.
    pub host_port: NonZeroU16,
    pub container: IpAddr,
    pub container_port: NonZeroU16,
}

/// Host IP and container differ in family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "host IP {host_ip} and container {container} are of different families; publish an IPv4 address for an IPv4 \
         address of the container, and an IPv6 address for an IPv6 one"
)]
pub struct FamilyMismatch {
    /// Node address.
    pub host_ip: IpAddr,
    pub container: IpAddr,
}

impl PortMapping {
    /// A published port of a container with this address; `None` if the host IP has the other family.
    #[must_use]
    pub fn of(port: &PublishedPort, container: IpAddr) -> Option<Self> {
        let PublishedPort { protocol, host_ip, host_port, container_port } = *port;
        Self { protocol, host_ip, host_port, container, container_port }.checked().ok()
    }

    /// Normalizes an unspecified host IP (`0.0.0.0`, `::`) to `None`.
    ///
    /// # Errors
    /// The families differ.
    pub fn checked(self) -> Result<Self, FamilyMismatch> {
        match self.host_ip {
            Some(host_ip) if host_ip.is_ipv4() != self.container.is_ipv4() => {
                Err(FamilyMismatch { host_ip, container: self.container })
            }
            Some(host_ip) if host_ip.is_unspecified() => Ok(Self { host_ip: None, ..self }),
            _ => Ok(self),
        }
    }

    /// Both claim a port of one node address.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let one_address = match (self.host_ip, other.host_ip) {
            (Some(a), Some(b)) => a == b,
            _ => self.container.is_ipv4() == other.container.is_ipv4(),
        };
        one_address && (self.protocol, self.host_port) == (other.protocol, other.host_port)
    }

    /// As `tcp port 8080 of 192.0.2.1`.
    #[must_use]
    pub fn host_side(&self) -> String {
        let Self { protocol, host_port, host_ip, container, .. } = self;
        match host_ip {
            Some(ip) => format!("{protocol} port {host_port} of {ip}"),
            None => {
                let family = if container.is_ipv4() { "IPv4" } else { "IPv6" };
                format!("{protocol} port {host_port} of every {family} address")
            }
        }
    }
}

impl fmt::Display for PortMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let target = SocketAddr::new(self.container, self.container_port.get());
        write!(f, "{} to {target}", self.host_side())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn spans(cidrs: &[&str]) -> Vec<(String, String)> {
        let merged = merge(cidrs.iter().map(|c| c.parse().unwrap()));
        merged.iter().map(|s| (s.first.to_string(), s.last.to_string())).collect()
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
    }

    #[test]
    fn cidrs_that_overlap_or_touch_become_one_span() {
        let inside = spans(&["10.1.0.0/16", "10.0.0.0/8", "10.255.0.0/16"]);
        assert_eq!(inside, pairs(&[("10.0.0.0", "10.255.255.255")]));
        let touching = spans(&["10.0.2.0/24", "10.0.1.0/24", "10.0.4.0/24"]);
        assert_eq!(touching, pairs(&[("10.0.1.0", "10.0.2.255"), ("10.0.4.0", "10.0.4.255")]));
        assert_eq!(spans(&["10.9.8.7/8"]), pairs(&[("10.0.0.0", "10.255.255.255")]), "host bits");
        assert_eq!(spans(&[]), []);
    }

    #[test]
    fn families_never_merge_and_the_last_address_of_each_ends_it() {
        let all = spans(&["::/0", "255.0.0.0/8", "0.0.0.0/0", "fd00::/8"]);
        let last6 = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff";
        assert_eq!(all, pairs(&[("0.0.0.0", "255.255.255.255"), ("::", last6)]));
        let ends = merge(["255.0.0.0/8", "ff00::/8", "10.0.0.0/8"].map(|c| c.parse().unwrap()));
        let after: Vec<_> = ends.iter().map(|s| s.after().map(|ip| ip.to_string())).collect();
        assert_eq!(after, [Some("11.0.0.0".to_owned()), None, None]);
    }

    #[test]
    fn pools_and_multicast_are_always_spared() {
        let pools = vec!["10.77.0.0/16".parse().unwrap(), "fd77::/64".parse().unwrap()];
        let masquerade = Masquerade { pools, excluded: vec!["10.78.0.0/16".parse().unwrap()], ..Masquerade::default() };
        let spared: Vec<_> = masquerade.spared().iter().map(|s| s.first.to_string()).collect();
        assert_eq!(spared, ["10.77.0.0", "224.0.0.0", "fd77::", "fe80::", "ff00::"]);
        assert_eq!(masquerade.sources().len(), 2);
    }

    fn mapping(host_ip: Option<&str>, port: u16, container: &str) -> PortMapping {
        PortMapping {
            protocol: Protocol::Tcp,
            host_ip: host_ip.map(|ip| ip.parse().unwrap()),
            host_port: port.try_into().unwrap(),
            container: container.parse().unwrap(),
            container_port: 80.try_into().unwrap(),
        }
    }

    #[test]
    fn a_chain_that_refuses_is_mended_by_rules_for_the_pools() {
        let pools = ["10.77.0.0/16", "fd77::/64"].map(|cidr| cidr.parse().unwrap());
        let four = "insert rule ip filter FORWARD ip saddr 10.77.0.0/16 accept; \
                    insert rule ip filter FORWARD ip daddr 10.77.0.0/16 accept";
        assert_eq!(accepting("ip filter FORWARD", &pools[..1]), Some(format!("nft '{four}'")));
        let both = accepting("inet firewalld filter_FORWARD", &pools).unwrap();
        assert_eq!(both.matches("insert rule inet firewalld filter_FORWARD ip").count(), 4, "{both}");
        assert!(both.contains(" ip6 daddr fd77::/64 accept"), "{both}");
        assert_eq!(accepting("ip filter '; reboot #", &pools), None);
    }

    #[test]
    fn entries_make_the_table_and_the_table_says_its_entries() {
        let entries = [
            NatEntry::Port(mapping(None, 8080, "10.77.0.2")),
            NatEntry::Own("10.77.0.2".parse().unwrap()),
            NatEntry::Own("fd77::2".parse().unwrap()),
        ];
        let nat = Nat::with_entries(None, entries);
        assert_eq!(nat.entries().collect::<Vec<_>>(), entries);
        assert_eq!(entries.map(|e| e.container().to_string()), ["10.77.0.2", "10.77.0.2", "fd77::2"]);
        assert_eq!(entries.map(|e| e.kind()), ["port", "own-address", "own-address"]);
    }

    #[test]
    fn a_pool_is_covered_when_each_of_its_cidrs_is_masqueraded() {
        let cidrs = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>();
        let masquerade = Masquerade { pools: cidrs(&["10.77.0.0/16", "fd77::/64"]), ..Masquerade::default() };
        assert!(masquerade.covers(&cidrs(&["fd77::/64"])) && masquerade.covers(&masquerade.pools));
        assert!(!masquerade.covers(&cidrs(&["10.77.0.0/16", "10.78.0.0/16"])));
    }

    #[test]
    fn a_host_ip_is_of_the_containers_family_and_unspecified_means_every_address() {
        let four = mapping(Some("0.0.0.0"), 8080, "10.77.0.2");
        assert_eq!(four.checked().map(|m| m.host_ip), Ok(None));
        let mixed = mapping(Some("0.0.0.0"), 8080, "fd77::2");
        assert!(mixed.checked().is_err_and(|e| e.to_string().contains("host IP 0.0.0.0 and container fd77::2")));
        assert_eq!(mapping(Some("::1"), 1, "fd77::2").to_string(), "tcp port 1 of ::1 to [fd77::2]:80");
    }

    #[test]
    fn what_is_asked_for_overlaps_by_address_port_and_protocol() {
        let ask = |host_ip: Option<&str>, port: u16| PublishedPort {
            protocol: Protocol::Udp,
            host_ip: host_ip.map(|ip| ip.parse().unwrap()),
            host_port: port.try_into().unwrap(),
            container_port: 53.try_into().unwrap(),
        };
        for (a, b, expected) in [
            (None, None, true),
            (None, Some("::1"), true),
            (Some("0.0.0.0"), Some("192.0.2.1"), true),
            (Some("0.0.0.0"), Some("::"), false),
            (Some("192.0.2.1"), Some("192.0.2.2"), false),
        ] {
            assert_eq!(ask(a, 53).overlaps(&ask(b, 53)), expected, "{a:?} {b:?}");
            assert_eq!(ask(b, 53).overlaps(&ask(a, 53)), expected, "{b:?} {a:?}");
            assert!(!ask(a, 53).overlaps(&ask(b, 54)), "{a:?} {b:?}");
        }
        assert!(!ask(None, 53).overlaps(&PublishedPort { protocol: Protocol::Tcp, ..ask(None, 53) }));
        assert_eq!(
            PortMapping::of(&ask(Some("0.0.0.0"), 53), "10.77.0.2".parse().unwrap()).map(|m| m.host_ip),
            Some(None)
        );
        assert_eq!(PortMapping::of(&ask(Some("0.0.0.0"), 53), "fd77::2".parse().unwrap()), None);
        assert_eq!(ask(Some("::1"), 53).to_string(), "[::1]:53/udp");
    }

    #[test]
    fn a_mapping_of_every_address_overlaps_those_of_one_in_its_family_alone() {
        let every = mapping(None, 8080, "10.77.0.2");
        assert!(every.overlaps(&mapping(Some("192.0.2.1"), 8080, "10.77.0.3")));
        assert!(!every.overlaps(&mapping(None, 8080, "fd77::2")));
        assert!(!every.overlaps(&mapping(None, 8081, "10.77.0.3")));
        assert!(!mapping(Some("192.0.2.1"), 80, "10.77.0.3").overlaps(&mapping(Some("192.0.2.2"), 80, "10.77.0.3")));
        assert!(!every.overlaps(&PortMapping { protocol: Protocol::Udp, ..every }));
    }

    proptest! {
        #[test]
        fn merging_keeps_every_address_and_adds_none(
            cidrs in proptest::collection::vec((any::<u32>(), 0u8..=32), 0..20),
            probes in proptest::collection::vec(any::<u32>(), 20),
        ) {
            let nets: Vec<IpNet> =
                cidrs.iter().map(|(a, l)| IpNet::new(Ipv4Addr::from_bits(*a).into(), *l).unwrap()).collect();
            let merged = merge(nets.iter().copied());
            let edges = nets.iter().flat_map(|n| [n.network(), n.broadcast()]);
            let outside = merged.iter().filter_map(Span::after);
            for ip in probes.into_iter().map(|p| Ipv4Addr::from_bits(p).into()).chain(edges).chain(outside) {
                let held = merged.iter().any(|s| s.first <= ip && ip <= s.last);
                prop_assert_eq!(held, nets.iter().any(|n| n.contains(&ip)), "{}", ip);
            }
            prop_assert!(merged.windows(2).all(|w| w[0].after().is_some_and(|after| after < w[1].first)));
        }
    }
}
