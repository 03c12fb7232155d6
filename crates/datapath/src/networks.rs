//! The node's addresses and routes that overlap with pools.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use rtnetlink::packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteType},
};
use wharf_core::{
    finding::Lookup,
    ids::IfIndex,
    kernel::Result,
    overlap::{NodeNetwork, NodeNetworks, Way},
};

use crate::{
    PEER_PROTOCOL, ROUTE_PROTOCOL,
    netlink::{Answer, Connection, Request, address, link, route, rule},
    overlay,
    router::Pair,
};

/// Networks that overlap with a CIDR: addresses, routes of the tables main and local, and, if rules lead to other
/// tables with routes, lookups of each CIDR's first and last address, and of each network of these tables that overlaps
/// with one.
///
/// # Errors
/// A refusal.
pub fn observe(cidrs: &[IpNet]) -> Result<NodeNetworks> {
    let mut connection = Connection::open()?;
    let shares = |net: &IpNet| cidrs.iter().any(|cidr| cidr.contains(net) || net.contains(cidr));
    let mut links = Links::new(&mut connection)?;
    let mut seen = NodeNetworks::default();
    let mut foreign = BTreeSet::new();
    // Has copies of the router addresses.
    let overlay = overlay::ours(&mut connection)?;
    for (ifindex, there) in address::list_all(&mut connection)? {
        let net = IpNet::from(there);
        if shares(&net) && !links.is_router(ifindex) && Some(ifindex) != overlay {
            let (ifname, _) = links.name(&mut connection, ifindex)?;
            foreign.insert(NodeNetwork { net, way: Way::Address, ifname });
        }
    }
    for message in tables(&mut connection)? {
        let Some(found) = Found::read(&message) else { continue };
        if !shares(&found.net) {
            continue;
        }
        if found.is_ours() {
            match found.ifindex {
                None => seen.pools.push(found.net),
                Some(_) if found.net.prefix_len() == found.net.max_prefix_len() => {
                    seen.endpoints.push(found.net.addr())
                }
                Some(_) => {}
            }
        } else if !found.is_made_for_an_address() {
            foreign.extend(links.network(&mut connection, found)?);
        }
    }
    let mut asks = rule::lead_to_other_tables(&mut connection)?;
    for family in FAMILIES {
        asks |= !table(&mut connection, family, DEFAULT)?.is_empty();
    }
    let others = if asks { in_other_tables(&mut connection)? } else { Vec::new() };
    let others: Vec<Found> = others.into_iter().filter(|found| shares(&found.net)).collect();
    let ends = cidrs.iter().filter(|_| asks).flat_map(|cidr| [cidr.network(), cidr.broadcast()]);
    let ends: BTreeSet<IpAddr> = ends.chain(others.iter().map(|found| found.net.network())).collect();
    for ends in ends.into_iter().collect::<Vec<_>>().chunks(LOOKUPS) {
        let questions = ends.iter().map(|ip| Request::new(RouteNetlinkMessage::GetRoute(route::question(*ip)), 0));
        for (ip, answer) in ends.iter().zip(connection.batch(questions.collect())?) {
            let has_no_route = answer.as_ref().is_err_and(|refusal| refusal.is(libc::ENETUNREACH));
            match found(&mut connection, *ip, answer)? {
                Some(found) if found.table != u32::from(LOCAL) => {
                    foreign.extend(links.network(&mut connection, found)?);
                }
                Some(_) => {}
                None if has_no_route => {}
                // The look-up fails for a blackhole.
                None => {
                    for found in
                        others.iter().filter(|found| found.net.contains(ip) && found.way(false) == Way::Nowhere)
                    {
                        foreign.extend(links.network(&mut connection, found.clone())?);
                    }
                }
            }
        }
    }
    seen.foreign = foreign.into_iter().collect();
    Ok(seen)
}

/// `None` without a route, or for a Wharf route.
pub(crate) fn of_addresses(ips: &[IpAddr]) -> Result<Vec<Option<NodeNetwork>>> {
    let mut connection = Connection::open()?;
    let mut networks = Vec::with_capacity(ips.len());
    for ip in ips {
        networks.push(match look_up(&mut connection, *ip)? {
            Some(found) => Links::new(&mut connection)?.network(&mut connection, found)?,
            None => None,
        });
    }
    Ok(networks)
}

const FAMILIES: [AddressFamily; 2] = [AddressFamily::Inet, AddressFamily::Inet6];
const LOOKUPS: usize = 256;
const DEFAULT: u8 = 253;
const LOCAL: u8 = 255;

#[derive(Clone)]
pub(crate) struct Found {
    net: IpNet,
    kind: RouteType,
    protocol: RouteProtocol,
    table: u32,
    ifindex: Option<IfIndex>,
    by_gateway: bool,
    gateway: Option<IpAddr>,
    pub(crate) source: Option<IpAddr>,
}

impl Found {
    fn read(message: &RouteNetlinkMessage) -> Option<Self> {
        let RouteNetlinkMessage::NewRoute(m) = message else { return None };
        let mut found = Self {
            net: route::destination_of(m)?,
            kind: m.header.kind,
            protocol: m.header.protocol,
            table: u32::from(m.header.table),
            ifindex: None,
            by_gateway: false,
            gateway: None,
            source: None,
        };
        for attribute in &m.attributes {
            match attribute {
                RouteAttribute::Table(table) => found.table = *table,
                RouteAttribute::Oif(index) => found.ifindex = Some(IfIndex(*index)),
                RouteAttribute::PrefSource(a) => found.source = route::ip(a),
                RouteAttribute::Gateway(a) => (found.by_gateway, found.gateway) = (true, route::ip(a)),
                RouteAttribute::Via(_) | RouteAttribute::MultiPath(_) => found.by_gateway = true,
                _ => {}
            }
        }
        Some(found)
    }

    pub(crate) fn is_ours_to(&self, to: IpNet, ifindex: IfIndex) -> bool {
        self.is_ours() && self.net == to && self.ifindex == Some(ifindex)
    }

    fn is_ours(&self) -> bool {
        matches!(u8::from(self.protocol), ROUTE_PROTOCOL | PEER_PROTOCOL)
    }

    /// Routes for an address, which is reported itself.
    fn is_made_for_an_address(&self) -> bool {
        self.table == u32::from(LOCAL) && self.protocol == RouteProtocol::Kernel
    }

    fn way(&self, point_to_point: bool) -> Way {
        match self.kind {
            RouteType::Local | RouteType::Anycast if self.is_made_for_an_address() => Way::Address,
            RouteType::Local | RouteType::Anycast => Way::Local,
            RouteType::BlackHole | RouteType::Unreachable | RouteType::Prohibit | RouteType::Throw => Way::Nowhere,
            _ if self.by_gateway => Way::Gateway(self.gateway),
            _ => {
                let by_kernel = matches!(self.protocol, RouteProtocol::Kernel | RouteProtocol::Ra);
                Way::OnLink { by_kernel, point_to_point }
            }
        }
    }
}

impl Found {
    pub(crate) fn into_lookup(self, connection: &mut Connection) -> Result<Lookup> {
        let ifname = self.ifindex.map(|ifindex| link::name_of(connection, ifindex)).transpose()?;
        Ok(Lookup { destination: self.net, table: self.table, ifname, gateway: self.gateway })
    }
}

struct Links {
    routers: Vec<IfIndex>,
    names: BTreeMap<IfIndex, (Option<String>, bool)>,
}

impl Links {
    fn new(connection: &mut Connection) -> Result<Self> {
        let routers = Pair::find(connection)?.links().map(|l| l.ifindex).collect();
        Ok(Self { routers, names: BTreeMap::new() })
    }

    fn is_router(&self, ifindex: IfIndex) -> bool {
        self.routers.contains(&ifindex)
    }

    fn name(&mut self, connection: &mut Connection, ifindex: IfIndex) -> Result<(Option<String>, bool)> {
        if let Some(known) = self.names.get(&ifindex) {
            return Ok(known.clone());
        }
        let seen = link::look_up_index(connection, ifindex)?;
        let found = seen.map_or((None, false), |l| (Some(l.name), l.point_to_point));
        self.names.insert(ifindex, found.clone());
        Ok(found)
    }

    /// `None` for a Wharf route.
    fn network(&mut self, connection: &mut Connection, found: Found) -> Result<Option<NodeNetwork>> {
        if found.is_ours() || found.ifindex.is_some_and(|i| self.is_router(i)) {
            return Ok(None);
        }
        let (ifname, point_to_point) = match found.ifindex {
            Some(ifindex) => self.name(connection, ifindex)?,
            None => (None, false),
        };
        Ok(Some(NodeNetwork { net: found.net, way: found.way(point_to_point), ifname }))
    }
}

/// `None` without a route, or for an unreachable one.
pub(crate) fn look_up(connection: &mut Connection, ip: IpAddr) -> Result<Option<Found>> {
    let answer = connection.one(RouteNetlinkMessage::GetRoute(route::question(ip)), 0)?;
    found(connection, ip, answer)
}

fn found(connection: &mut Connection, ip: IpAddr, answer: Answer) -> Result<Option<Found>> {
    let Some(mut found) = answer.ok().and_then(|messages| messages.iter().find_map(Found::read)) else {
        return Ok(None);
    };
    // Without added rules, IPv4's main and local share one table, reported as "main".
    let is_of_both = ip.is_ipv4() && found.table == u32::from(RouteHeader::RT_TABLE_MAIN);
    if is_of_both && matches!(found.kind, RouteType::Local | RouteType::Broadcast | RouteType::Anycast) {
        let same = |f: &Found| f.net == found.net && f.kind == found.kind;
        if table(connection, AddressFamily::Inet, LOCAL)?.iter().filter_map(Found::read).any(|f| same(&f)) {
            found.table = LOCAL.into();
        }
    }
    Ok(Some(found))
}

/// Foreign routes. Whether a packet takes them depends on the rules.
fn in_other_tables(connection: &mut Connection) -> Result<Vec<Found>> {
    let mut routes = Vec::new();
    for family in FAMILIES {
        routes.extend(table(connection, family, RouteHeader::RT_TABLE_UNSPEC)?);
    }
    let known = [RouteHeader::RT_TABLE_MAIN, LOCAL].map(u32::from);
    Ok(routes
        .iter()
        .filter_map(Found::read)
        .filter(|found| !known.contains(&found.table) && !found.is_ours())
        .collect())
}

fn tables(connection: &mut Connection) -> Result<Vec<RouteNetlinkMessage>> {
    let mut found = main_table(connection)?;
    for family in FAMILIES {
        found.extend(table(connection, family, LOCAL)?);
    }
    Ok(found)
}

pub(crate) fn main_table(connection: &mut Connection) -> Result<Vec<RouteNetlinkMessage>> {
    let mut found = table(connection, AddressFamily::Inet, RouteHeader::RT_TABLE_MAIN)?;
    found.extend(table(connection, AddressFamily::Inet6, RouteHeader::RT_TABLE_MAIN)?);
    Ok(found)
}

/// Without routes to other nodes, of which there can be thousands. Empty if the kernel lacks the family.
fn table(connection: &mut Connection, family: AddressFamily, number: u8) -> Result<Vec<RouteNetlinkMessage>> {
    let mut request = RouteMessage::default();
    request.header.address_family = family;
    request.header.table = number;
    let request = RouteNetlinkMessage::GetRoute(request);
    Ok(connection.dump_without(&request, route::is_of_peers)?.unwrap_or_default())
}
