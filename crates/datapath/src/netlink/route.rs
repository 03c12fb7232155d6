//! Routes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use rtnetlink::{
    RouteMessageBuilder,
    packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        route::{
            RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteIp6Tunnel, RouteIp6TunnelFlags, RouteIpTunnel,
            RouteLwEnCapType, RouteLwTunnelEncap, RouteMessage, RouteMetric, RouteProtocol, RouteScope, RouteType,
        },
    },
};
use wharf_core::{
    ids::IfIndex,
    kernel::{NextHop, Result, RouteRow},
};

use super::{Connection, Request};
use crate::{PEER_PROTOCOL, ROUTE_PROTOCOL};

/// The metric of an IPv6 route without one (`linux/ipv6_route.h`).
const IP6_RT_PRIO_USER: u32 = 1024;
/// Any other route takes precedence.
const LAST_METRIC: u32 = 0x7768_0000;
/// Before an unreachable route.
const PEER_METRIC: u32 = LAST_METRIC - 1;
/// Not a pool's: while two nodes exchange networks, both unreachable routes may have one destination.
const PEER_LAST_METRIC: u32 = LAST_METRIC + 1;

/// On the overlay's and the router's interface; one neighbour of each family serves all routes.
const OVERLAY_HOP4: Ipv4Addr = Ipv4Addr::new(169, 254, 88, 1);
const OVERLAY_HOP6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0x58);

/// Ends of a lightweight tunnel (`linux/lwtunnel.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tunnel {
    pub(crate) vni: u32,
    pub(crate) remote: IpAddr,
    /// `None`: the kernel's choice.
    pub(crate) local: Option<IpAddr>,
}

impl Tunnel {
    fn attributes(&self) -> [RouteAttribute; 2] {
        let id = u64::from(self.vni);
        let (kind, encap) = match self.remote {
            IpAddr::V4(remote) => {
                let local =
                    if let Some(IpAddr::V4(local)) = self.local { Some(RouteIpTunnel::Source(local)) } else { None };
                let ends = [RouteIpTunnel::Id(id), RouteIpTunnel::Destination(remote)].into_iter().chain(local);
                (RouteLwEnCapType::Ip, ends.map(RouteLwTunnelEncap::Ip).collect())
            }
            IpAddr::V6(remote) => {
                let local =
                    if let Some(IpAddr::V6(local)) = self.local { Some(RouteIp6Tunnel::Source(local)) } else { None };
                // UDP over IPv6 needs a checksum (RFC 8200, section 8.1).
                let flags = RouteIp6Tunnel::Flags(RouteIp6TunnelFlags::Checksum);
                let ends =
                    [RouteIp6Tunnel::Id(id), RouteIp6Tunnel::Destination(remote), flags].into_iter().chain(local);
                (RouteLwEnCapType::Ip6, ends.map(RouteLwTunnelEncap::Ip6).collect())
            }
        };
        [RouteAttribute::EncapType(kind), RouteAttribute::Encap(encap)]
    }

    fn read(message: &RouteMessage) -> Option<Self> {
        let (mut vni, mut remote, mut local) = (None, None, None);
        let parts =
            message.attributes.iter().filter_map(|a| if let RouteAttribute::Encap(p) = a { Some(p) } else { None });
        for part in parts.flatten() {
            match part {
                RouteLwTunnelEncap::Ip(RouteIpTunnel::Id(id)) | RouteLwTunnelEncap::Ip6(RouteIp6Tunnel::Id(id)) => {
                    vni = u32::try_from(*id).ok();
                }
                RouteLwTunnelEncap::Ip(RouteIpTunnel::Destination(a)) => remote = Some(IpAddr::V4(*a)),
                RouteLwTunnelEncap::Ip6(RouteIp6Tunnel::Destination(a)) => remote = Some(IpAddr::V6(*a)),
                RouteLwTunnelEncap::Ip(RouteIpTunnel::Source(a)) => local = Some(IpAddr::V4(*a)),
                RouteLwTunnelEncap::Ip6(RouteIp6Tunnel::Source(a)) => local = Some(IpAddr::V6(*a)),
                _ => {}
            }
        }
        Some(Self { vni: vni?, remote: remote?, local: local.filter(|a: &IpAddr| !a.is_unspecified()) })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Route {
    protocol: u8,
    /// `None`: the main table.
    pub(crate) table: Option<u32>,
    pub(crate) destination: IpNet,
    pub(crate) ifindex: Option<IfIndex>,
    pub(crate) gateway: Option<IpAddr>,
    pub(crate) source: Option<IpAddr>,
    /// The lowest wins. `None`: the family's default, 0 or 1024.
    pub(crate) metric: Option<u32>,
    pub(crate) tunnel: Option<Tunnel>,
    /// Bytes; `None`: the interface's. In the main table, only read for tunnels.
    pub(crate) mtu: Option<u32>,
}

fn destination(net: IpNet) -> RouteMessage {
    match net {
        IpNet::V4(n) => RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix(n.network(), n.prefix_len()).build(),
        IpNet::V6(n) => RouteMessageBuilder::<Ipv6Addr>::new().destination_prefix(n.network(), n.prefix_len()).build(),
    }
}

impl Route {
    pub(crate) fn direct(to: IpNet, ifindex: IfIndex, source: Option<IpAddr>) -> Self {
        Self { ifindex: Some(ifindex), source, ..Self::to(to) }
    }

    pub(crate) fn via(to: IpNet, gateway: IpAddr, ifindex: IfIndex) -> Self {
        Self { ifindex: Some(ifindex), gateway: Some(gateway), ..Self::to(to) }
    }

    /// Sends an ICMP error, unless there is another route.
    pub(crate) fn unreachable(to: IpNet) -> Self {
        Self { metric: Some(LAST_METRIC), ..Self::to(to.trunc()) }
    }

    /// The kernel selects the link whose network contains the gateway.
    pub(crate) fn to_peer(to: IpNet, gateway: IpAddr) -> Self {
        Self { protocol: PEER_PROTOCOL, gateway: Some(gateway), metric: Some(PEER_METRIC), ..Self::to(to.trunc()) }
    }

    /// As [`Self::unreachable`], behind a route to another node.
    pub(crate) fn unreachable_peer(to: IpNet) -> Self {
        Self { protocol: PEER_PROTOCOL, metric: Some(PEER_LAST_METRIC), ..Self::to(to.trunc()) }
    }

    pub(crate) fn by_overlay(to: IpNet, tunnel: Tunnel, mtu: u32, ifindex: IfIndex, source: Option<IpAddr>) -> Self {
        let hop = if to.addr().is_ipv4() { OVERLAY_HOP4.into() } else { OVERLAY_HOP6.into() };
        Self { ifindex: Some(ifindex), source, tunnel: Some(tunnel), mtu: Some(mtu), ..Self::to_peer(to, hop) }
    }

    /// For packets that the router's link judges.
    pub(crate) fn translated(to: IpNet, router: IfIndex, table: u32, mtu: Option<u32>) -> Self {
        let hop = if to.addr().is_ipv4() { OVERLAY_HOP4.into() } else { OVERLAY_HOP6.into() };
        let metric = Some(PEER_METRIC);
        Self { table: Some(table), ifindex: Some(router), gateway: Some(hop), metric, mtu, ..Self::to(to.trunc()) }
    }

    pub(crate) fn next_hop(&self) -> Option<NextHop> {
        match self.tunnel {
            Some(Tunnel { remote, local, .. }) => Some(NextHop::Overlay { remote, local }),
            None => self.gateway.map(NextHop::Direct),
        }
    }

    pub(crate) fn is_to_peer(&self) -> bool {
        self.protocol == PEER_PROTOCOL && self.metric == Some(PEER_METRIC) && self.gateway.is_some()
    }

    pub(crate) fn is_unreachable_peer(&self) -> bool {
        *self == Self::unreachable_peer(self.destination)
    }

    fn to(destination: IpNet) -> Self {
        Self {
            protocol: ROUTE_PROTOCOL,
            table: None,
            destination,
            ifindex: None,
            gateway: None,
            source: None,
            metric: None,
            tunnel: None,
            mtu: None,
        }
    }

    pub(crate) fn in_table(self, table: u32) -> Self {
        Self { table: Some(table), ..self }
    }

    fn message(&self) -> RouteMessage {
        let mut m = destination(self.destination);
        m.header.protocol = RouteProtocol::from(self.protocol);
        if self.destination.prefix_len() == 0 {
            m.attributes.clear();
        }
        match self.ifindex {
            Some(ifindex) => m.attributes.push(RouteAttribute::Oif(ifindex.0)),
            None if self.gateway.is_none() => m.header.kind = RouteType::Unreachable,
            None => {}
        }
        match self.gateway {
            Some(gateway) => m.attributes.push(RouteAttribute::Gateway(RouteAddress::from(gateway))),
            None if self.ifindex.is_some() && self.destination.addr().is_ipv4() => m.header.scope = RouteScope::Link,
            None => {}
        }
        if let Some(table) = self.table {
            m.header.table = RouteHeader::RT_TABLE_UNSPEC;
            m.attributes.push(RouteAttribute::Table(table));
        }
        if let Some(metric) = self.metric {
            m.attributes.push(RouteAttribute::Priority(metric));
        }
        if let Some(source) = self.source {
            m.attributes.push(RouteAttribute::PrefSource(RouteAddress::from(source)));
        }
        if [Some(OVERLAY_HOP4.into()), Some(OVERLAY_HOP6.into())].contains(&self.gateway) {
            m.header.flags |= RouteFlags::Onlink;
        }
        if let Some(tunnel) = &self.tunnel {
            m.attributes.extend(tunnel.attributes());
        }
        if let Some(mtu) = self.mtu {
            m.attributes.push(RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)]));
        }
        m
    }

    /// Refused with EEXIST if any route has the destination and metric.
    pub(crate) fn add(&self) -> Request {
        Request::new(RouteNetlinkMessage::NewRoute(self.message()), NLM_F_CREATE | NLM_F_EXCL)
    }

    pub(crate) fn replace(&self) -> Request {
        Request::new(RouteNetlinkMessage::NewRoute(self.message()), NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Destination, metric and next hop identify the route.
    pub(crate) fn remove(&self) -> Request {
        let bare = Self { tunnel: None, source: None, mtu: None, ..self.clone() };
        Request::new(RouteNetlinkMessage::DelRoute(bare.message()), 0)
    }
}

/// Of the main table; `protocol` is `None` for all.
pub(crate) fn list(connection: &mut Connection, protocol: Option<u8>) -> Result<Vec<Route>> {
    list_table(connection, None, protocol)
}

pub(crate) fn of_link(connection: &mut Connection, ifindex: IfIndex, protocol: Option<u8>) -> Result<Vec<Route>> {
    ask(connection, None, protocol, Only::Over(ifindex))
}

pub(crate) fn list_table(connection: &mut Connection, table: Option<u32>, protocol: Option<u8>) -> Result<Vec<Route>> {
    ask(connection, table, protocol, Only::All)
}

pub(crate) fn unreachable(connection: &mut Connection, protocol: u8) -> Result<Vec<Route>> {
    let mut found = ask(connection, None, Some(protocol), Only::Unreachable)?;
    // Callers may remove these routes, so never an endpoint's.
    found.retain(|route| route.ifindex.is_none());
    Ok(found)
}

pub(crate) fn to_peers(connection: &mut Connection) -> Result<Vec<Route>> {
    let mut found = ask(connection, None, Some(PEER_PROTOCOL), Only::Unicast)?;
    found.retain(Route::is_to_peer);
    Ok(found)
}

/// Whether a message of a dump is a route with [`PEER_PROTOCOL`]: `rtm_protocol` after the header
/// (`linux/rtnetlink.h`).
pub(crate) fn is_of_peers(message: &[u8]) -> bool {
    message.get(16 + 5) == Some(&PEER_PROTOCOL)
}

/// From addresses and advertised prefixes.
pub(crate) fn of_networks(connection: &mut Connection) -> Result<Vec<Route>> {
    let mut found = Vec::new();
    for protocol in [RouteProtocol::Kernel, RouteProtocol::Ra] {
        found.extend(ask(connection, None, Some(protocol.into()), Only::Unicast)?);
    }
    found.retain(|route| route.gateway.is_none() && route.destination.prefix_len() > 0);
    Ok(found)
}

#[derive(Clone, Copy)]
enum Only {
    All,
    Over(IfIndex),
    Unreachable,
    Unicast,
}

fn ask(connection: &mut Connection, table: Option<u32>, protocol: Option<u8>, only: Only) -> Result<Vec<Route>> {
    let mut found = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        match table {
            Some(table) => request.attributes.push(RouteAttribute::Table(table)),
            None => request.header.table = RouteHeader::RT_TABLE_MAIN,
        }
        request.header.protocol = RouteProtocol::from(protocol.unwrap_or(0));
        match only {
            Only::All => {}
            Only::Over(ifindex) => request.attributes.push(RouteAttribute::Oif(ifindex.0)),
            Only::Unreachable => request.header.kind = RouteType::Unreachable,
            Only::Unicast => request.header.kind = RouteType::Unicast,
        }
        // The family, table or link may not exist.
        let Ok(messages) = connection.dump(&RouteNetlinkMessage::GetRoute(request))? else { continue };
        found.extend(messages.iter().filter_map(|m| read(m, table, protocol)));
    }
    Ok(found)
}

pub(crate) fn is_local(connection: &mut Connection, address: Ipv6Addr) -> Result<bool> {
    let mut question = RouteMessage::default();
    question.header.address_family = AddressFamily::Inet6;
    question.header.destination_prefix_length = 128;
    question.attributes.push(RouteAttribute::Destination(RouteAddress::Inet6(address)));
    let answer = connection.one(RouteNetlinkMessage::GetRoute(question), 0)?;
    Ok(answer.is_ok_and(|messages| messages.iter().any(|m| is_local_route_to(m, None))))
}

/// Whether the node has the address or a local route to it.
pub(crate) fn ends_here(connection: &mut Connection, address: IpAddr) -> Result<bool> {
    let answer = connection.one(RouteNetlinkMessage::GetRoute(question(address)), 0)?;
    Ok(answer.is_ok_and(|messages| messages.iter().any(|m| is_local_route_to(m, None))))
}

pub(crate) fn is_local_route_to(message: &RouteNetlinkMessage, address: Option<Ipv6Addr>) -> bool {
    let RouteNetlinkMessage::NewRoute(m) = message else { return false };
    let to = |a: Ipv6Addr| m.attributes.contains(&RouteAttribute::Destination(RouteAddress::Inet6(a)));
    m.header.kind == RouteType::Local && address.is_none_or(to)
}

/// For the matching FIB entry, not the resolved route.
pub(crate) fn question(address: IpAddr) -> RouteMessage {
    let mut question = RouteMessage::default();
    (question.header.address_family, question.header.flags) = match address {
        // Without `LookupTable` the answer always names the main table. IPv6 refuses it.
        IpAddr::V4(_) => (AddressFamily::Inet, RouteFlags::FibMatch | RouteFlags::LookupTable),
        IpAddr::V6(_) => (AddressFamily::Inet6, RouteFlags::FibMatch),
    };
    question.header.destination_prefix_length = IpNet::from(address).prefix_len();
    question.attributes.push(RouteAttribute::Destination(RouteAddress::from(address)));
    question
}

/// Whether another program has a unicast route to the address, with the metric of Wharf's. Local and unreachable routes
/// lead to no other host.
pub(crate) fn is_taken(connection: &mut Connection, address: IpAddr) -> Result<bool> {
    let (to, default) = (IpNet::from(address), if address.is_ipv4() { 0 } else { IP6_RT_PRIO_USER });
    let answer = connection.one(RouteNetlinkMessage::GetRoute(question(address)), 0)?;
    let is_same = |r: &Route| r.destination == to && r.metric.unwrap_or(default) == default;
    // Only unicast routes have an interface here.
    let is_foreign = |r: &Route| r.protocol != ROUTE_PROTOCOL && r.ifindex.is_some();
    let found =
        answer.is_ok_and(|all| all.iter().filter_map(|m| read(m, None, None)).any(|r| is_same(&r) && is_foreign(&r)));
    Ok(found)
}

/// Reads the table only if the lookup matches another table's route.
pub(crate) fn of_address(connection: &mut Connection, address: IpAddr) -> Result<Option<Route>> {
    let to = IpNet::from(address);
    let answer = connection.one(RouteNetlinkMessage::GetRoute(question(address)), 0)?;
    let Ok(messages) = answer else { return Ok(None) };
    let main = messages.iter().find_map(|m| read(m, None, None));
    let ours = messages.iter().find_map(|m| read(m, None, Some(ROUTE_PROTOCOL)));
    match (main, ours) {
        (_, Some(route)) if route.destination == to => Ok(Some(route)),
        (Some(_), _) => Ok(None),
        (None, _) => Ok(list(connection, Some(ROUTE_PROTOCOL))?.into_iter().find(|r| r.destination == to)),
    }
}

/// Only with Wharf's protocol number. Succeeds when already gone.
pub(crate) fn remove_row(row: &RouteRow) -> Result<()> {
    let route = Route { ifindex: row.ifindex, ..Route::to(row.destination) };
    let mut connection = Connection::open()?;
    match connection.batch(vec![route.remove()])?.pop() {
        Some(Err(refusal)) if !refusal.is(libc::ESRCH) && !refusal.is(libc::ENODEV) => {
            Err(refusal.into_error("remove route", row.destination.to_string()))
        }
        _ => Ok(()),
    }
}

fn read(message: &RouteNetlinkMessage, wanted: Option<u32>, protocol: Option<u8>) -> Option<Route> {
    let RouteNetlinkMessage::NewRoute(m) = message else { return None };
    let mut table = u32::from(m.header.table);
    let (mut ifindex, mut gateway, mut source, mut metric, mut mtu) = (None, None, None, None, None);
    for attribute in &m.attributes {
        match attribute {
            RouteAttribute::Table(t) => table = *t,
            RouteAttribute::Oif(i) => ifindex = Some(IfIndex(*i)),
            RouteAttribute::Gateway(a) => gateway = ip(a),
            RouteAttribute::PrefSource(a) => source = ip(a),
            RouteAttribute::Priority(m) => metric = Some(*m),
            RouteAttribute::Metrics(all) => {
                mtu = all.iter().find_map(|m| if let RouteMetric::Mtu(mtu) = m { Some(*mtu) } else { None });
            }
            _ => {}
        }
    }
    let here = wanted.unwrap_or(u32::from(RouteHeader::RT_TABLE_MAIN));
    if table != here || protocol.is_some_and(|p| u8::from(m.header.protocol) != p) {
        return None;
    }
    let destination = destination_of(m)?;
    // IPv6 unreachable routes have the interface `lo`.
    let ifindex = ifindex.filter(|_| m.header.kind == RouteType::Unicast);
    let protocol = u8::from(m.header.protocol);
    let tunnel = Tunnel::read(m);
    // On other routes, an operator's choice.
    let mtu = mtu.filter(|_| tunnel.is_some() || wanted.is_some());
    Some(Route { protocol, table: wanted, destination, ifindex, gateway, source, metric, tunnel, mtu })
}

pub(crate) fn destination_of(m: &RouteMessage) -> Option<IpNet> {
    let nowhere = match m.header.address_family {
        AddressFamily::Inet => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        AddressFamily::Inet6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => return None,
    };
    let to = m.attributes.iter().find_map(|a| match a {
        RouteAttribute::Destination(a) => ip(a),
        _ => None,
    });
    IpNet::new(to.unwrap_or(nowhere), m.header.destination_prefix_length).ok()
}

pub(crate) fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(a) => Some(IpAddr::V4(*a)),
        RouteAddress::Inet6(a) => Some(IpAddr::V6(*a)),
        _ => None,
    }
}
