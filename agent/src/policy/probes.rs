//! Test packets for the self-check of an endpoint's rules.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use wharf_core::{endpoint::EndpointRecord, selfcheck::Probe};
use wharf_enforce::rows::key;
use wharf_policy::{
    compile::{L4, SetId, Tables},
    model::{Direction, Protocol},
    oracle::Destination,
};

use super::{Inner, Policy};

/// A check takes up to a millisecond.
const NETWORKS: usize = 256;
const PEERS: usize = 12;
const PORTS: usize = 8;
const EVERY_FAMILY: [bool; 2] = [true, false];
/// Addresses without a host (RFC 5737, RFC 3849).
const NOBODY: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))];
/// Discard (RFC 863); rules rarely name it.
const PORT: u16 = 9;

/// Result of [`Policy::probes`].
#[derive(Debug, Default)]
pub struct Probes {
    /// For each enforced direction and family, a packet that passes and one that does not.
    pub probes: Vec<Probe>,
    /// Changes when the rules change.
    pub stamp: u64,
}

impl Policy {
    /// Test packets, with verdicts of the kernel's rules.
    pub async fn probes(&self, record: &EndpointRecord) -> Probes {
        let inner = self.lock().await;
        let mut probes = Vec::new();
        if let (Some(tables), None) = (inner.state.tables(), inner.state.problem()) {
            let peers = self.peers(&inner, tables);
            for own in record.addresses() {
                let peers: Vec<IpAddr> = peers
                    .iter()
                    .copied()
                    .filter(|peer| peer.is_ipv4() == own.is_ipv4() && *peer != own)
                    .take(PEERS)
                    .collect();
                for direction in [Direction::Egress, Direction::Ingress] {
                    probes.extend(tried(tables, record, direction, &peers));
                }
            }
            probes.retain(|probe| probe.accept || !self.mode.audits);
        }
        Probes { probes, stamp: inner.state.writes() }
    }

    /// Grows with each change of rules.
    pub async fn stamp(&self) -> u64 {
        self.lock().await.state.writes()
    }

    /// Two per class and family: one may be the endpoint. Without the node's addresses, which always pass, and
    /// services, decided elsewhere.
    fn peers(&self, inner: &Inner, tables: &Tables) -> Vec<IpAddr> {
        let mut taken = BTreeMap::new();
        let mut is_new = |ipv4: bool, class| {
            let of_class = taken.entry((ipv4, class)).or_insert(0);
            *of_class += 1;
            *of_class <= 2
        };
        let nets = EVERY_FAMILY.into_iter().flat_map(|ipv4| {
            let nets =
                tables.ipcache.iter().filter(move |(net, _)| net.addr().is_ipv4() == ipv4 && net.prefix_len() > 0);
            nets.take(NETWORKS)
        });
        let firsts = nets.filter(|(net, known)| is_new(net.addr().is_ipv4(), known.class)).map(|(net, _)| first(net));
        let is_asked = |ip: &IpAddr| {
            let unusual = ip.is_multicast() || ip.is_loopback() || ip.is_unspecified() || is_bound_to_a_link(*ip);
            !unusual
                && !inner.state.inputs().node.contains(ip)
                && !self.settings.services.iter().any(|net| net.contains(ip))
        };
        NOBODY.into_iter().chain(firsts).filter(is_asked).collect()
    }
}

fn first(net: &IpNet) -> IpAddr {
    net.hosts().next().unwrap_or_else(|| net.addr())
}

fn is_bound_to_a_link(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_broadcast(),
        // And addresses that embed an IPv4 address.
        IpAddr::V6(ip) => ip.is_unicast_link_local() || ip.to_ipv4_mapped().is_some(),
    }
}

fn tried(tables: &Tables, record: &EndpointRecord, direction: Direction, peers: &[IpAddr]) -> Vec<Probe> {
    let key = key(record.id);
    let Some(set) = tables.sets.get(&key).map(|sets| sets.of(direction)).filter(|set| *set != SetId::NONE) else {
        return Vec::new();
    };
    let of_rules = tables.rules.get(&set).into_iter().flat_map(|rows| rows.ports.keys());
    let of_rules = of_rules.filter_map(|prefix| match prefix.l4 {
        L4::Tcp => Some((Protocol::Tcp, prefix.first)),
        L4::Udp => Some((Protocol::Udp, prefix.first)),
        L4::Sctp | L4::Icmp | L4::Icmp6 => None,
    });
    let ports: Vec<(Protocol, u16)> = [(Protocol::Tcp, PORT)].into_iter().chain(of_rules).take(PORTS).collect();
    let mut found: Vec<Probe> = Vec::new();
    for (peer, (protocol, port)) in peers.iter().flat_map(|peer| ports.iter().map(move |port| (*peer, *port))) {
        let Some(decision) = tables.decide(key, direction, peer, Destination::Ports { protocol, port }) else {
            continue;
        };
        let accept = decision.accept;
        if found.iter().all(|probe| probe.accept != accept) {
            found.push(Probe { egress: direction == Direction::Egress, peer, protocol, port, accept });
        }
        if found.len() == 2 {
            break;
        }
    }
    found
}
