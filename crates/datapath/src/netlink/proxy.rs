//! Proxy neighbours: other links' addresses for which the kernel answers.

use std::net::IpAddr;

use rtnetlink::{
    packet_core::{NLM_F_CREATE, NLM_F_EXCL},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage},
        route::RouteProtocol,
    },
};
use wharf_core::{ids::IfIndex, kernel::Result};

use super::{Connection, Request};
use crate::ROUTE_PROTOCOL;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Proxy {
    pub(crate) address: IpAddr,
    pub(crate) ifindex: IfIndex,
}

impl Proxy {
    fn message(self) -> NeighbourMessage {
        let mut m = of_family(if self.address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 });
        m.header.ifindex = self.ifindex.0;
        m.attributes.push(NeighbourAttribute::Destination(match self.address {
            IpAddr::V4(a) => NeighbourAddress::Inet(a),
            IpAddr::V6(a) => NeighbourAddress::Inet6(a),
        }));
        m
    }

    /// Look for a foreign entry first: the kernel does not refuse duplicates.
    pub(crate) fn add(self) -> Request {
        let mut m = self.message();
        m.attributes.push(NeighbourAttribute::Protocol(RouteProtocol::from(ROUTE_PROTOCOL)));
        Request::new(RouteNetlinkMessage::NewNeighbour(m), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Also removes a foreign entry.
    pub(crate) fn remove(self) -> Request {
        Request::new(RouteNetlinkMessage::DelNeighbour(self.message()), 0)
    }

    /// True if it is Wharf's.
    pub(crate) fn look_up(self, connection: &mut Connection) -> Result<Option<bool>> {
        let answer = connection.one(RouteNetlinkMessage::GetNeighbour(self.message()), 0)?;
        let messages = answer.unwrap_or_default();
        Ok(messages.iter().filter_map(read).find(|(there, _)| *there == self).map(|(_, ours)| ours))
    }
}

fn of_family(family: AddressFamily) -> NeighbourMessage {
    let mut m = NeighbourMessage::default();
    m.header.family = family;
    m.header.flags = NeighbourFlags::Proxy;
    m
}

pub(crate) fn list(connection: &mut Connection) -> Result<Vec<(Proxy, bool)>> {
    let mut found = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let Ok(messages) = connection.dump(&RouteNetlinkMessage::GetNeighbour(of_family(family)))? else { continue };
        found.extend(messages.iter().filter_map(read));
    }
    Ok(found)
}

fn read(message: &RouteNetlinkMessage) -> Option<(Proxy, bool)> {
    let RouteNetlinkMessage::NewNeighbour(m) = message else { return None };
    if !m.header.flags.contains(NeighbourFlags::Proxy) {
        return None;
    }
    let (mut address, mut ours) = (None, false);
    for attribute in &m.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(a)) => address = Some(IpAddr::V4(*a)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(a)) => address = Some(IpAddr::V6(*a)),
            NeighbourAttribute::Protocol(protocol) => ours = u8::from(*protocol) == ROUTE_PROTOCOL,
            _ => {}
        }
    }
    Some((Proxy { address: address?, ifindex: IfIndex(m.header.ifindex) }, ours))
}
