//! MTUs of the node's uplinks and of endpoints.

use std::collections::BTreeSet;

use rtnetlink::packet_route::{
    RouteNetlinkMessage,
    route::{RouteAttribute, RouteHeader, RouteMessage, RouteType},
};
use wharf_core::{
    endpoint::EndpointRecord,
    kernel::{KernelErrorKind, Result},
    mtu::Uplink,
};

use crate::{
    ROUTE_PROTOCOL,
    netlink::{Connection, link, nexthop, route},
    netns::NetnsThread,
    networks,
};

const OPERATION: &str = "change MTU";

pub(crate) fn uplinks() -> Result<Vec<Uplink>> {
    let mut connection = Connection::open()?;
    let mut indexes = BTreeSet::new();
    for message in networks::main_table(&mut connection)? {
        let RouteNetlinkMessage::NewRoute(m) = message else { continue };
        match default_over(&m) {
            // The route may also have the interfaces (`net.ipv4.nexthop_compat_mode`).
            Some((over, Some(id))) if over.is_empty() => indexes.extend(nexthop::interfaces(&mut connection, id)?),
            Some((over, _)) => indexes.extend(over),
            None => {}
        }
    }
    let mut found = Vec::new();
    for index in indexes {
        if let Some(seen) = link::look_up_index(&mut connection, wharf_core::ids::IfIndex(index))? {
            found.push(Uplink { ifname: seen.name, mtu: seen.mtu });
        }
    }
    Ok(found)
}

fn default_over(m: &RouteMessage) -> Option<(Vec<u32>, Option<u32>)> {
    let is_default = route::destination_of(m).is_some_and(|to| to.prefix_len() == 0);
    let table = m.attributes.iter().find_map(|a| if let RouteAttribute::Table(t) = a { Some(*t) } else { None });
    let is_main = table.unwrap_or(m.header.table.into()) == u32::from(RouteHeader::RT_TABLE_MAIN);
    let is_ours = u8::from(m.header.protocol) == ROUTE_PROTOCOL;
    if !is_default || !is_main || is_ours || m.header.kind != RouteType::Unicast {
        return None;
    }
    let over = |attribute: &RouteAttribute| match attribute {
        RouteAttribute::Oif(index) => vec![*index],
        RouteAttribute::MultiPath(hops) => hops.iter().map(|hop| hop.interface_index).collect(),
        _ => Vec::new(),
    };
    let object = m.attributes.iter().find_map(|a| if let RouteAttribute::NhId(id) = a { Some(*id) } else { None });
    Some((m.attributes.iter().flat_map(over).collect(), object))
}

/// A side may accept more than its peer sends: the host side grows first and shrinks last.
pub(crate) fn ensure(thread: &NetnsThread, record: &EndpointRecord, mtu: u32) -> Result<Option<u32>> {
    if mtu >= record.mtu {
        host_side(record, mtu)?;
        container_side(thread, record, mtu)
    } else {
        let own = container_side(thread, record, mtu)?;
        host_side(record, mtu)?;
        Ok(own)
    }
}

fn host_side(record: &EndpointRecord, mtu: u32) -> Result<()> {
    let mut host = Connection::open()?;
    let name = record.host_ifname.as_str();
    match link::look_up(&mut host, name)? {
        Some(seen) if seen.ifindex == record.host_ifindex && seen.mtu != mtu => {
            set(&mut host, record, name, &seen, mtu)
        }
        _ => Ok(()),
    }
}

fn container_side(thread: &NetnsThread, record: &EndpointRecord, mtu: u32) -> Result<Option<u32>> {
    let mut inside = match thread.connect(OPERATION, &record.netns) {
        Ok(inside) => inside,
        Err(e) if matches!(e.kind, KernelErrorKind::NotFound | KernelErrorKind::NotANetns) => {
            return Ok(record.container_mtu);
        }
        Err(e) => return Err(e),
    };
    let name = record.attachment.ifname.as_str();
    let seen = link::look_up(&mut inside, name)?.filter(|seen| seen.ifindex == record.container_ifindex);
    let Some(seen) = seen else { return Ok(record.container_mtu) };
    let (wanted, own) = record.container_mtu_of(seen.mtu, mtu);
    if seen.mtu != wanted {
        set(&mut inside, record, name, &seen, wanted)?;
    }
    Ok(own)
}

fn set(
    connection: &mut Connection,
    record: &EndpointRecord,
    name: &str,
    seen: &link::LinkSeen,
    mtu: u32,
) -> Result<()> {
    match connection.batch(vec![link::set_mtu(seen.ifindex, mtu)])?.pop() {
        Some(Err(refusal)) if !refusal.is(libc::ENODEV) => {
            let subject = format!("of {name} (endpoint {}, epoch {}) to {mtu}", record.id, record.epoch);
            Err(refusal.into_error(OPERATION, subject))
        }
        _ => Ok(()),
    }
}
