//! Addresses.

use std::net::IpAddr;

use rtnetlink::{
    AddressMessageBuilder,
    packet_core::{NLM_F_CREATE, NLM_F_EXCL},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        address::{AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope},
    },
};
use wharf_core::{ids::IfIndex, kernel::Result};

use super::{Connection, Request};

fn message(ifindex: IfIndex, address: IpAddr) -> AddressMessage {
    match address {
        // No other address is on-link.
        IpAddr::V4(a) => AddressMessageBuilder::<std::net::Ipv4Addr>::new().index(ifindex.0).address(a, 32).build(),
        IpAddr::V6(a) => {
            let mut m = AddressMessageBuilder::<std::net::Ipv6Addr>::new().index(ifindex.0).address(a, 128).build();
            // Duplicate detection would take a second.
            m.header.flags = AddressHeaderFlags::Nodad;
            m.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
            m
        }
    }
}

/// Refused with EEXIST when it exists.
pub(crate) fn add(ifindex: IfIndex, address: IpAddr) -> Request {
    Request::new(RouteNetlinkMessage::NewAddress(message(ifindex, address)), NLM_F_CREATE | NLM_F_EXCL)
}

pub(crate) fn remove(ifindex: IfIndex, address: IpAddr) -> Request {
    Request::new(RouteNetlinkMessage::DelAddress(message(ifindex, address)), 0)
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) address: IpAddr,
    pub(crate) prefix_len: u8,
    pub(crate) link_local: bool,
}

pub(crate) fn list(connection: &mut Connection, ifindex: IfIndex) -> Result<Vec<Address>> {
    let found = dump(connection, Some(ifindex))?;
    Ok(found.into_iter().filter(|(index, _)| *index == ifindex).map(|(_, address)| address).collect())
}

pub(crate) fn list_all(connection: &mut Connection) -> Result<Vec<(IfIndex, IpAddr)>> {
    Ok(dump(connection, None)?.into_iter().map(|(index, found)| (index, found.address)).collect())
}

fn dump(connection: &mut Connection, ifindex: Option<IfIndex>) -> Result<Vec<(IfIndex, Address)>> {
    let mut found = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut request = AddressMessage::default();
        request.header.family = family;
        request.header.index = ifindex.map_or(0, |index| index.0);
        let answer = connection.dump(&RouteNetlinkMessage::GetAddress(request))?;
        // The interface is gone, or the kernel lacks the family.
        let Ok(messages) = answer else { continue };
        for message in messages {
            let RouteNetlinkMessage::NewAddress(m) = message else { continue };
            let own = m.attributes.iter().find_map(|a| match a {
                AddressAttribute::Local(a) => Some(*a),
                _ => None,
            });
            let any = m.attributes.iter().find_map(|a| match a {
                AddressAttribute::Address(a) => Some(*a),
                _ => None,
            });
            if let Some(address) = own.or(any) {
                let link_local = m.header.scope == AddressScope::Link;
                let seen = Address { address, prefix_len: m.header.prefix_len, link_local };
                found.push((IfIndex(m.header.index), seen));
            }
        }
    }
    Ok(found)
}
