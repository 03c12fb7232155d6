//! What the fake tells of its state.

use std::net::IpAddr;

use wharf_core::{
    endpoint::EndpointRecord,
    kernel::{EndpointTableRow, Mismatch, NodeSpec},
};

use super::{
    kernel::endpoint,
    state::{Hook, State, host_net},
};
use crate::{ROUTER_IFNAME, netlink::link, speakers};

fn mismatch(found: &mut Vec<Mismatch>, object: &str, subject: impl Into<String>, problem: impl Into<String>) {
    found.push(Mismatch { object: object.to_owned(), subject: subject.into(), problem: problem.into() });
}

/// The row a record is to have for one of its addresses.
pub(super) fn table_row(record: &EndpointRecord, address: IpAddr) -> EndpointTableRow {
    EndpointTableRow {
        address,
        endpoint_id: u32::from(record.id.get()),
        epoch: record.epoch,
        ifindex: record.host_ifindex,
        identity: record.identity.0,
        mac: record.container_mac,
    }
}

/// What is not as the record says.
pub(super) fn endpoint_mismatches(s: &State, record: &EndpointRecord) -> Vec<Mismatch> {
    let mut found = Vec::new();
    let host = record.host_ifname.as_str();
    let pinned = s.pins.get(&record.id);
    match s.links.get(host) {
        None => mismatch(&mut found, "link", host, "expected to be there, is gone"),
        Some(l) => {
            if !l.up {
                mismatch(&mut found, "link", host, "expected up, is down");
            }
            let mark = link::mark(record.id, record.epoch, &record.attachment);
            if l.alias.as_ref() != Some(&mark) && !link::is_unowned(l.alias.as_deref(), record.id, record.epoch) {
                mismatch(&mut found, "link", host, format!("expected alias {mark}, is {:?}", l.alias));
            }
            if l.mtu != record.mtu {
                mismatch(&mut found, "mtu", host, format!("expected {}, is {}", record.mtu, l.mtu));
            }
            if l.attached != pinned.map(|p| Hook::Programs(p.program_ids[0])) {
                mismatch(&mut found, "program", host, "what is attached is not what is pinned");
            }
        }
    }
    let ifname = record.attachment.ifname.as_str();
    match s.netns(&record.netns).and_then(|ns| ns.interfaces.get(ifname)) {
        None => mismatch(&mut found, "link", ifname, "expected in the container, is not there"),
        Some(inside) => {
            for address in record.addresses().filter(|a| !inside.addresses.contains(a)) {
                mismatch(&mut found, "address", address.to_string(), "expected in the container, is not there");
            }
            if !inside.up {
                mismatch(&mut found, "link", ifname, "expected up, is down");
            }
        }
    }
    if pinned.is_none() {
        mismatch(&mut found, "pin", endpoint(record.id), "expected programs and maps, there are none");
    } else if s.config_epoch(record.id) != Some(record.epoch) {
        mismatch(&mut found, "map", format!("{}/CONFIG", record.id), format!("expected epoch {}", record.epoch));
    }
    for address in record.addresses() {
        if s.routes.get(&host_net(address)) != Some(&Some(record.host_ifindex)) {
            mismatch(&mut found, "route", address.to_string(), format!("expected through {host}, is not"));
        }
        if s.rows.get(&address) != Some(&table_row(record, address)) {
            mismatch(&mut found, "endpoint-row", address.to_string(), "differs from the record or is missing");
        }
    }
    if s.calls.get(&record.id).copied() != pinned.map(|p| p.program_ids[2]) {
        mismatch(&mut found, "map", format!("CALLS[{}]", record.id), "does not hold the pinned deliver program");
    }
    found
}

/// What of the node's part is not as the spec says.
pub(super) fn node_mismatches(s: &State, spec: &NodeSpec) -> Vec<Mismatch> {
    let mut found = s.broken.clone();
    match &s.node {
        None => mismatch(&mut found, "link", ROUTER_IFNAME, "expected on the node, is not there"),
        Some(is) => {
            if is.mtu != spec.mtu {
                mismatch(&mut found, "mtu", ROUTER_IFNAME, format!("expected {}, is {}", spec.mtu, is.mtu));
            }
            let wanted = spec.router4.map(IpAddr::V4).into_iter().chain(spec.router6.map(IpAddr::V6));
            for address in
                wanted.filter(|a| ![is.router4.map(IpAddr::V4), is.router6.map(IpAddr::V6)].contains(&Some(*a)))
            {
                mismatch(
                    &mut found,
                    "address",
                    address.to_string(),
                    format!("expected on {ROUTER_IFNAME}, is not there"),
                );
            }
        }
    }
    for cidr in spec.cidrs.iter().map(|c| c.trunc()) {
        if s.routes.get(&cidr) != Some(&None) {
            mismatch(&mut found, "route", cidr.to_string(), "expected unreachable, is not there");
        }
    }
    found
}

/// What can still speak for an address.
pub(super) fn speakers_of(s: &State, ip: IpAddr) -> Vec<String> {
    let row = s.rows.get(&ip).map(speakers::row);
    let route = s.routes.get(&host_net(ip)).map(|via| speakers::route(ip, *via));
    row.into_iter().chain(route).collect()
}
