//! Compares an endpoint's kernel state with its record. Ignores foreign additions.

use ipnet::IpNet;
use wharf_core::{
    endpoint::{EndpointRecord, IpOwner},
    finding::{EndpointProblem, RouteSeen, Side},
    ids::{IfIndex, MacAddr},
    kernel::{KernelErrorKind, Result},
};

use crate::{
    ROUTE_PROTOCOL,
    bpf::{Bpf, Opened},
    netlink::{
        Connection, address,
        link::{self, LinkSeen},
        route::{self, Route},
    },
    netns::NetnsThread,
    networks, plugin_link, source_rule,
};

const OPERATION: &str = "observe endpoint";

pub(crate) fn observe_endpoints(
    thread: &NetnsThread,
    bpf: &Bpf,
    records: &[EndpointRecord],
) -> Result<Vec<Vec<EndpointProblem>>> {
    let mut host = Connection::open()?;
    let inside = thread.connect_each(OPERATION, records.iter().map(|record| &record.netns))?;
    let look = |(record, inside): (&EndpointRecord, Result<Connection>)| {
        let mut found = Vec::new();
        let opened = bpf.opened(record.id)?;
        let is_own = record.link_owner.is_wharf();
        match is_own {
            true => observe_host(&mut host, record, bpf, &opened, &mut found)?,
            false => plugin_link::observe_host(&mut host, record, bpf, &opened, &mut found)?,
        }
        match container_link(inside, record, &mut found)? {
            Some((inside, seen)) if is_own => observe_container(inside, &seen, record, &mut found)?,
            Some((inside, seen)) => plugin_link::observe_container(inside, &seen, record, &mut found)?,
            None => {}
        }
        bpf.observe_maps(record, &opened, &mut found)?;
        Ok(found)
    };
    records.iter().zip(inside).map(look).collect()
}

struct Wanted {
    side: Side,
    ifindex: IfIndex,
    mac: MacAddr,
    mtu: u32,
}

fn observe_link(seen: &LinkSeen, wanted: &Wanted, problems: &mut Vec<EndpointProblem>) {
    let (side, name) = (wanted.side, || seen.name.clone());
    if seen.ifindex != wanted.ifindex {
        let (expected, found) = (wanted.ifindex, seen.ifindex);
        problems.push(EndpointProblem::LinkReplaced { side, name: name(), expected, found });
    }
    if !seen.up {
        problems.push(EndpointProblem::LinkDown { side, name: name() });
    }
    if seen.mtu != wanted.mtu {
        problems.push(EndpointProblem::LinkMtu { side, name: name(), expected: wanted.mtu, found: seen.mtu });
    }
    if seen.arp != (side == Side::Container) {
        problems.push(EndpointProblem::LinkArp { side, name: name() });
    }
    if seen.mac != Some(wanted.mac) {
        problems.push(EndpointProblem::LinkMac { side, name: name(), expected: wanted.mac, found: seen.mac });
    }
}

fn observe_host(
    host: &mut Connection,
    record: &EndpointRecord,
    bpf: &Bpf,
    opened: &Opened,
    problems: &mut Vec<EndpointProblem>,
) -> Result<()> {
    let (side, name) = (Side::Node, record.host_ifname.to_string());
    let Some(seen) = link::look_up(host, &name)? else {
        let there = link::look_up_index(host, record.host_ifindex)?;
        let renamed = there.filter(|l| link::has_mark(l.alias.as_deref(), record.id, record.epoch));
        problems.push(match renamed {
            Some(link) => EndpointProblem::LinkRenamed { side, name, found: link.name },
            None => EndpointProblem::LinkMissing { side, name },
        });
        return Ok(());
    };
    let wanted = Wanted { side, ifindex: record.host_ifindex, mac: record.host_mac, mtu: record.mtu };
    observe_link(&seen, &wanted, problems);
    if let Some(master) = seen.master {
        let master = link::name_of(host, master)?;
        problems.push(EndpointProblem::LinkEnslaved { name: name.clone(), master });
    }
    // From CNI's `bandwidth` plugin.
    if let Some(kind) = seen.queue.filter(|kind| kind == "tbf") {
        problems.push(EndpointProblem::LinkQueue { name: name.clone(), kind });
    }
    // The next connect updates a mark without an owner.
    let mark = link::mark(record.id, record.epoch, &record.attachment);
    if seen.alias.as_ref() != Some(&mark) && !link::has_short_mark(seen.alias.as_deref(), record.id, record.epoch) {
        problems.push(EndpointProblem::LinkAlias { name, expected: mark, found: seen.alias });
    }
    bpf.observe_hooks(host, seen.ifindex, record, opened, problems)?;
    for address in record.addresses() {
        let (to, expected) = (IpNet::from(address), record.host_ifindex);
        // Reading the whole table costs more.
        let look_up = networks::look_up(host, address)?;
        if let Some(found) = look_up.as_ref().filter(|found| found.is_ours_to(to, expected)) {
            // Routes of another IPAM's endpoints have the router's current address.
            let source = record.gateway_of(address).filter(|_| record.ip_owner != IpOwner::External);
            if let Some(wanted) = source.filter(|wanted| found.source != Some(*wanted)) {
                let found = Some(RouteSeen::OtherSource { expected: wanted, found: found.source });
                problems.push(EndpointProblem::NodeRoute { to, expected: record.host_ifname.to_string(), found });
            }
            continue;
        }
        if route::of_link(host, expected, Some(ROUTE_PROTOCOL))?.iter().any(|r| r.destination == to) {
            // `ignore_routes_with_linkdown` hides routes without carrier.
            if seen.running {
                let found = look_up.map(|found| found.into_lookup(host)).transpose()?;
                let expected = record.host_ifname.to_string();
                problems.push(EndpointProblem::NodeRouteShadowed { to, expected, found });
            }
            continue;
        }
        let there = |routes: Vec<Route>| routes.into_iter().find(|r| r.destination == to);
        let (ours, seen) = match there(route::list(host, Some(ROUTE_PROTOCOL))?) {
            Some(route) => (true, Some(route)),
            None => (false, there(route::list(host, None)?)),
        };
        let found = match seen {
            Some(route) => {
                let over = route.ifindex.map(|ifindex| link::name_of(host, ifindex)).transpose()?;
                Some(if ours { RouteSeen::Ours(over) } else { RouteSeen::Foreign(over) })
            }
            None => None,
        };
        let expected = record.host_ifname.to_string();
        problems.push(EndpointProblem::NodeRoute { to, expected, found });
    }
    Ok(())
}

fn container_link(
    inside: Result<Connection>,
    record: &EndpointRecord,
    problems: &mut Vec<EndpointProblem>,
) -> Result<Option<(Connection, LinkSeen)>> {
    let mut inside = match inside {
        Ok(inside) => inside,
        Err(e) if matches!(e.kind, KernelErrorKind::NotFound | KernelErrorKind::NotANetns) => {
            problems.push(EndpointProblem::Netns { path: e.subject, cause: e.cause });
            return Ok(None);
        }
        Err(e) => return Err(e),
    };
    let (side, name) = (Side::Container, record.attachment.ifname.to_string());
    let Some(seen) = link::look_up(&mut inside, &name)? else {
        let there = link::look_up_index(&mut inside, record.container_ifindex)?;
        let renamed = there.filter(|l| l.pair && l.peer == record.host_ifindex);
        problems.push(match renamed {
            Some(link) => EndpointProblem::LinkRenamed { side, name, found: link.name },
            None => EndpointProblem::LinkMissing { side, name },
        });
        return Ok(None);
    };
    Ok(Some((inside, seen)))
}

fn observe_container(
    mut inside: Connection,
    seen: &LinkSeen,
    record: &EndpointRecord,
    problems: &mut Vec<EndpointProblem>,
) -> Result<()> {
    let side = Side::Container;
    let wanted = Wanted { side, ifindex: record.container_ifindex, mac: record.container_mac, mtu: record.mtu };
    observe_link(seen, &wanted, problems);
    let addresses = address::list(&mut inside, seen.ifindex)?;
    for address in record.addresses() {
        let length = if address.is_ipv4() { 32 } else { 128 };
        let found = addresses.iter().find(|a| a.address == address).map(|a| a.prefix_len);
        if found != Some(length) {
            problems.push(EndpointProblem::Address { address, found });
        }
    }
    let main = route::list(&mut inside, None)?;
    let routes: Vec<_> = main.iter().filter(|route| route.ifindex == Some(seen.ifindex)).collect();
    for address in record.addresses() {
        let Some(gateway) = record.gateway_of(address) else { continue };
        for wanted in source_rule::routes_by(record, gateway) {
            if !routes.iter().any(|r| r.destination == wanted.destination) {
                problems.push(EndpointProblem::ContainerRoute { to: wanted.destination, gateway, table: None });
            }
        }
    }
    let beside = source_rule::beside(&mut inside, &main, record)?;
    let ways = source_rule::ways(&main, &beside, record);
    problems.extend(source_rule::missing(&mut inside, record, &ways)?);
    Ok(())
}
