//! Observations of the fake's state.

use std::net::IpAddr;

use wharf_core::{
    endpoint::EndpointRecord,
    finding::{EndpointProblem, NodeProblem, RouteSeen, Side},
    kernel::{AttachMode, EndpointTableRow, NatView, NodeSpec},
    nat::NatEntry,
};

use super::state::{Hook, State, host_net};
use crate::{ROUTER_IFNAME, netlink::link, speakers};

pub(super) fn table_row(record: &EndpointRecord, address: IpAddr) -> EndpointTableRow {
    EndpointTableRow {
        address,
        endpoint_id: u32::from(record.id.get()),
        direct: if record.link_owner.is_wharf() { u32::from(record.id.get()) } else { 0 },
        epoch: record.epoch,
        ifindex: record.host_ifindex,
        identity: record.identity.0,
        mac: record.container_mac,
    }
}

/// Missing pins are reported separately.
fn hook_problem(
    attached: Option<Hook>,
    expected: Option<u32>,
    ifname: &str,
    mode: AttachMode,
) -> Option<EndpointProblem> {
    let expected = expected.filter(|expected| attached != Some(Hook::Programs(*expected)))?;
    let (program, ifname) = ("from_container".to_owned(), ifname.to_owned());
    let found = match attached {
        Some(Hook::Programs(id)) => vec![id],
        Some(Hook::Sink) | None => vec![],
    };
    Some(EndpointProblem::Program { program, ifname, mode, expected, found })
}

pub(super) fn endpoint_problems(s: &State, record: &EndpointRecord) -> Vec<EndpointProblem> {
    let mut found = Vec::new();
    let pinned = s.pins.get(&record.id);
    let (side, name) = (Side::Node, record.host_ifname.to_string());
    match s.links.get(&name) {
        None => found.push(EndpointProblem::LinkMissing { side, name }),
        Some(l) if !record.link_owner.is_wharf() => {
            if !l.up {
                let what = "expected up, is down".to_owned();
                found.push(EndpointProblem::PluginLink { side, name: name.clone(), what });
            }
            found.extend(hook_problem(l.attached, pinned.map(|p| p.program_ids[0]), &name, AttachMode::Clsact));
        }
        Some(l) => {
            if !l.up {
                found.push(EndpointProblem::LinkDown { side, name: name.clone() });
            }
            if l.mtu != record.mtu {
                let (expected, found_mtu) = (record.mtu, l.mtu);
                found.push(EndpointProblem::LinkMtu { side, name: name.clone(), expected, found: found_mtu });
            }
            if l.host_mac != record.host_mac {
                let (expected, is) = (record.host_mac, Some(l.host_mac));
                found.push(EndpointProblem::LinkMac { side, name: name.clone(), expected, found: is });
            }
            if l.arp {
                found.push(EndpointProblem::LinkArp { side: Side::Node, name: name.clone() });
            }
            found.extend(hook_problem(l.attached, pinned.map(|p| p.program_ids[0]), &name, AttachMode::Tcx));
            let mark = link::mark(record.id, record.epoch, &record.attachment);
            if l.alias.as_ref() != Some(&mark) && !link::has_short_mark(l.alias.as_deref(), record.id, record.epoch) {
                found.push(EndpointProblem::LinkAlias { name, expected: mark, found: l.alias.clone() });
            }
        }
    }
    let (side, name) = (Side::Container, record.attachment.ifname.to_string());
    let ns = s.netns(&record.netns);
    let renamed = ns.and_then(|ns| ns.interfaces.iter().find(|(_, i)| i.host.as_ref() == Some(&record.host_ifname)));
    match (ns.and_then(|ns| ns.interfaces.get(&name)), renamed) {
        (None, Some((is, _))) => found.push(EndpointProblem::LinkRenamed { side, name, found: is.clone() }),
        (None, None) if ns.is_none() => {
            let (path, cause) = (record.netns.path.display().to_string(), "no such network namespace".to_owned());
            found.push(EndpointProblem::Netns { path, cause });
        }
        (None, None) => found.push(EndpointProblem::LinkMissing { side, name }),
        (Some(inside), _) if !record.link_owner.is_wharf() => {
            let mut amiss = |what: String| {
                found.push(EndpointProblem::PluginLink { side, name: name.clone(), what });
            };
            if !inside.up {
                amiss("expected up, is down".to_owned());
            }
            for address in record.addresses().filter(|a| !inside.addresses.contains(a)) {
                amiss(format!("address {address}: expected, is not there"));
            }
        }
        (Some(inside), _) => {
            if let Some(l) = s.links.get(record.host_ifname.as_str()) {
                if l.container_mac != record.container_mac {
                    let (expected, is) = (record.container_mac, Some(l.container_mac));
                    found.push(EndpointProblem::LinkMac { side, name: name.clone(), expected, found: is });
                }
                if l.container_mtu != record.mtu {
                    let (expected, is) = (record.mtu, l.container_mtu);
                    found.push(EndpointProblem::LinkMtu { side, name: name.clone(), expected, found: is });
                }
            }
            for address in record.addresses().filter(|a| !inside.addresses.contains(a)) {
                found.push(EndpointProblem::Address { address, found: None });
            }
            if !inside.up {
                found.push(EndpointProblem::LinkDown { side, name });
            }
        }
    }
    if pinned.is_none() {
        found.push(EndpointProblem::PinsMissing);
    } else if s.config_epoch(record.id) != Some(record.epoch) {
        let is = s.config_epoch(record.id).map_or_else(|| "none".to_owned(), |e| e.to_string());
        found.push(EndpointProblem::Config { field: "epoch", expected: record.epoch.to_string(), found: is });
    }
    if let Some(config) = pinned.and_then(|p| p.config.as_ref())
        && config.bandwidth != record.bandwidth
    {
        let (expected, is) = (format!("{:?}", record.bandwidth), format!("{:?}", config.bandwidth));
        found.push(EndpointProblem::Config { field: "limits", expected, found: is });
    }
    if let Some(config) = pinned.and_then(|p| p.config.as_ref())
        && config.sources != record.sources
    {
        let (expected, is) = (format!("{:?}", record.sources), format!("{:?}", config.sources));
        found.push(EndpointProblem::Config { field: "sources", expected, found: is });
    }
    for address in record.addresses() {
        let (to, expected) = (host_net(address), record.host_ifindex);
        let via = s.routes.get(&to);
        if record.link_owner.is_wharf() && via != Some(&Some(expected)) {
            let seen = via.map(|via| RouteSeen::Ours(via.map(|ifindex| format!("index {ifindex}"))));
            let expected = record.host_ifname.to_string();
            found.push(EndpointProblem::NodeRoute { to, expected, found: seen });
        }
        let row = s.rows.get(&address);
        if row != Some(&table_row(record, address)) {
            found.push(EndpointProblem::Row { address, found: row.map(|r| format!("{r:?}")) });
        }
    }
    let (expected, is) = (pinned.map(|p| p.program_ids[2]), s.calls.get(&record.id).copied());
    if is != expected {
        found.push(EndpointProblem::CallSlot { expected, found: is });
    }
    let missing = |entry: &NatEntry| s.masquerade.is_some() && !s.nat.contains(entry);
    found.extend(record.nat_entries().into_iter().filter(missing).map(|entry| EndpointProblem::Nat { entry }));
    found
}

pub(super) fn nat(s: &State, spec: &NodeSpec) -> NatView {
    let mut view = NatView::default();
    if s.masquerade != spec.masquerade {
        view.problems.push(NodeProblem::Outbound {
            what: "masquerading".to_owned(),
            cause: "expected, is not there".to_owned(),
            repairable: true,
        });
    }
    view
}

pub(super) fn node_problems(s: &State, spec: &NodeSpec) -> Vec<NodeProblem> {
    let mut found = s.broken.clone();
    let name = || ROUTER_IFNAME.to_owned();
    match &s.node {
        None => found.push(NodeProblem::LinkMissing { name: name() }),
        Some(is) => {
            if is.mtu != spec.mtu {
                found.push(NodeProblem::LinkMtu { name: name(), expected: spec.mtu, found: is.mtu });
            }
            let there = is.routers();
            for address in spec.routers().into_iter().filter(|a| !there.contains(a)) {
                found.push(NodeProblem::Address { address, ifname: name(), found: None });
            }
        }
    }
    found.extend(s.peers.problems(spec));
    for cidr in spec.cidrs.iter().map(|c| c.trunc()) {
        match s.routes.get(&cidr) {
            Some(None) => {}
            other => found.push(NodeProblem::PoolRoute {
                cidr,
                found: other.copied().flatten().map(|ifindex| format!("index {ifindex}")),
            }),
        }
    }
    found.extend(nat(s, spec).problems);
    found
}

pub(super) fn speakers_of(s: &State, ip: IpAddr) -> Vec<String> {
    let row = s.rows.get(&ip).map(speakers::row);
    let route = s.routes.get(&host_net(ip)).map(|via| speakers::route(ip, *via));
    row.into_iter().chain(route).collect()
}
