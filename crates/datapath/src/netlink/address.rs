//! Addresses.

use std::net::IpAddr;

use ipnet::IpNet;
use rtnetlink::{
    AddressMessageBuilder,
    packet_core::{NLM_F_CREATE, NLM_F_EXCL},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        address::{AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope},
    },
};
use wharf_core::{finding::NodeProblem, ids::IfIndex, kernel::Result};

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

pub(crate) fn add(ifindex: IfIndex, address: IpAddr) -> Request {
    Request::new(RouteNetlinkMessage::NewAddress(message(ifindex, address)), NLM_F_CREATE | NLM_F_EXCL)
}

/// For an address that another link has, too: no second route in the main table.
pub(crate) fn add_again(ifindex: IfIndex, address: IpAddr) -> Request {
    let mut message = message(ifindex, address);
    for attribute in &mut message.attributes {
        if let AddressAttribute::Flags(flags) = attribute {
            *flags |= AddressFlags::Noprefixroute;
        }
    }
    Request::new(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL)
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

/// Addresses to remove and to add. Ignores link-local ones.
pub(crate) fn difference(there: &[Address], wanted: &[IpAddr]) -> (Vec<IpAddr>, Vec<IpAddr>) {
    let old = there.iter().filter(|a| !a.link_local && !wanted.contains(&a.address)).map(|a| a.address);
    let new = wanted.iter().filter(|a| !there.iter().any(|t| t.address == **a)).copied();
    (old.collect(), new.collect())
}

pub(crate) fn problems(there: &[Address], wanted: &[IpAddr], ifname: &str) -> Vec<NodeProblem> {
    let problem = |address: &IpAddr| {
        let found = there.iter().find(|a| a.address == *address).map(|a| a.prefix_len);
        let is_right = found == Some(IpNet::from(*address).prefix_len());
        (!is_right).then(|| NodeProblem::Address { address: *address, ifname: ifname.to_owned(), found })
    };
    wanted.iter().filter_map(problem).collect()
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
