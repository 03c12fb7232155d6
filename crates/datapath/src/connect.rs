//! Addresses and routes on both sides of an endpoint's link.

use std::{
    fs, io,
    net::{IpAddr, Ipv6Addr},
    time::{Duration, Instant},
};

use ipnet::IpNet;
use rtnetlink::{LinkUnspec, packet_route::RouteNetlinkMessage};
use wharf_core::{
    endpoint::{EndpointRecord, IpOwner},
    kernel::{KernelError, KernelErrorKind, MIN_MTU, Result},
};
use wharf_crash as crash;

use crate::{
    error::{fail, wrap},
    netlink::{
        Connection, Refusal, Request, address,
        link::{self, LinkSeen},
        route::{self, Route},
    },
    netns::NetnsThread,
    router,
    source_rule::{self, SECOND_METRIC},
};

const OPERATION: &str = "connect endpoint";

/// Usually well under a millisecond.
const KERNEL_WORK_TIMEOUT: Duration = Duration::from_secs(3);

struct Step {
    request: Request,
    subject: String,
    ipv6: bool,
    /// EEXIST is success.
    address: bool,
    /// Another route may be in its place.
    route: Option<Route>,
}

impl Step {
    fn link(request: Request, name: &str) -> Self {
        Self { request, subject: name.to_owned(), ipv6: false, address: false, route: None }
    }

    fn address(address: IpAddr, request: Request, subject: String) -> Self {
        Self { request, subject, ipv6: address.is_ipv6(), address: true, route: None }
    }

    fn route(address: IpAddr, route: Route, subject: String) -> Self {
        Self { request: route.add(), subject, ipv6: address.is_ipv6(), address: false, route: Some(route) }
    }
}

#[derive(Default)]
struct Outcome {
    ipv6_off: bool,
    in_the_way: Vec<Route>,
}

/// `write_rows`, for an endpoint without rows in the shared maps, is called before the node has a route to it. A flow
/// that came by the route first would keep the path through the node's stack (`STACK_PATHS`).
pub(crate) fn ensure_connected(
    thread: &NetnsThread,
    record: &EndpointRecord,
    write_rows: Option<impl FnOnce() -> Result<()>>,
) -> Result<()> {
    let mut inside = thread.connect(OPERATION, &record.netns)?;
    let name = record.attachment.ifname.as_str();
    let seen = match link::look_up(&mut inside, name)? {
        Some(seen) if seen.ifindex == record.container_ifindex => seen,
        other => {
            let found = other.map_or("nothing".to_owned(), |l| format!("index {}", l.ifindex));
            let cause = format!("expected index {} in the container, found {found}", record.container_ifindex);
            return Err(fail(OPERATION, about(record, name), KernelErrorKind::NotFound, cause));
        }
    };
    // With a worse metric, a route could be added twice.
    let there = match &record.routes {
        Some(_) => route::of_link(&mut inside, record.container_ifindex, None)?,
        None => Vec::new(),
    };
    crash::point("datapath/connect/before-container");
    let mut outcome = run(&mut inside, container_steps(record, &seen, &there), record)?;
    crash::point("datapath/connect/after-container");
    if outcome.ipv6_off {
        // Some runtimes start containers with IPv6 off.
        enable_ipv6(thread, record)?;
        crash::point("datapath/connect/after-ipv6-on");
        outcome = run(&mut inside, container_steps(record, &seen, &there), record)?;
        if outcome.ipv6_off {
            let cause = "IPv6 stays off in the container (net.ipv6.conf.*.disable_ipv6); use a pool without IPv6";
            return Err(fail(OPERATION, about(record, name), KernelErrorKind::Unsupported, cause));
        }
    }
    let main = stand_behind(&mut inside, outcome.in_the_way, record)?;
    let beside = source_rule::beside(&mut inside, &main, record)?;
    let ways = source_rule::ways(&main, &beside, record);
    crash::point("datapath/connect/after-behind");
    let mut host = Connection::open()?;
    let host_name = record.host_ifname.as_str();
    let seen = match link::look_up(&mut host, host_name)? {
        Some(seen) if seen.ifindex == record.host_ifindex => seen,
        other => {
            let found = other.map_or("nothing".to_owned(), |l| format!("index {}", l.ifindex));
            let cause = format!("expected index {} in the node, found {found}", record.host_ifindex);
            return Err(fail(OPERATION, about(record, host_name), KernelErrorKind::NotFound, cause));
        }
    };
    crash::point("datapath/connect/before-host");
    if let Some(write_rows) = write_rows {
        // With rows, programs would bring the container the packets to whom this route leads.
        for address in record.addresses() {
            if route::is_taken(&mut host, address)? {
                return Err(conflict(record, address));
            }
        }
        write_rows()?;
    }
    let sources = sources(&mut host, record)?;
    let mut outcome = run(&mut host, host_steps(record, &seen, &sources), record)?;
    if outcome.ipv6_off {
        let path = disable_ipv6(host_name);
        fs::write(&path, "0").map_err(|e| wrap(OPERATION, about(record, &path), &e))?;
        outcome = run(&mut host, host_steps(record, &seen, &sources), record)?;
        if outcome.ipv6_off {
            let cause = format!("IPv6 stays off on {host_name} (`sysctl net.ipv6`); turn it on or use no IPv6 pool");
            return Err(fail(OPERATION, about(record, host_name), KernelErrorKind::Unsupported, cause));
        }
    }
    for route in outcome.in_the_way {
        take_place(&mut host, &route, record)?;
    }
    crash::point("datapath/connect/after-host");
    await_running(&mut inside, record)?;
    if let Some(address) = record.ipv6 {
        await_local(&mut inside, address)?;
    }
    crash::point("datapath/connect/before-rules");
    // Last: an undo removes the rest with the link.
    source_rule::ensure(&mut inside, record, &ways)?;
    source_rule::ensure_others(&mut inside, record, &beside);
    crash::point("datapath/connect/after-rules");
    Ok(())
}

/// The kernel activates the container's side later than its peer, from a work queue, and loses packets until then.
/// Since Linux 6.8 a query activates it.
fn await_running(inside: &mut Connection, record: &EndpointRecord) -> Result<()> {
    let name = record.attachment.ifname.as_str();
    if link::look_up(inside, name)?.is_some_and(|l| l.running) {
        return Ok(());
    }
    inside.hear_links()?;
    if link::look_up(inside, name)?.is_some_and(|l| l.running) {
        return Ok(());
    }
    let until = Instant::now() + KERNEL_WORK_TIMEOUT;
    while Instant::now() < until {
        for message in inside.heard(until)? {
            match message {
                RouteNetlinkMessage::NewLink(m) => {
                    let seen = link::read(&m);
                    if seen.ifindex == record.container_ifindex && seen.running {
                        return Ok(());
                    }
                }
                RouteNetlinkMessage::DelLink(m) if m.header.index == record.container_ifindex.0 => {
                    let cause = "the interface went away while it came up";
                    return Err(fail(OPERATION, about(record, name), KernelErrorKind::NotFound, cause));
                }
                _ => {}
            }
        }
    }
    let cause = format!("the kernel did not let it carry packets within {KERNEL_WORK_TIMEOUT:?}");
    Err(fail(OPERATION, about(record, name), KernelErrorKind::Exhausted, cause))
}

/// The kernel adds the local route from a work queue, and loses packets until then.
fn await_local(inside: &mut Connection, address: Ipv6Addr) -> Result<()> {
    if route::is_local(inside, address)? {
        return Ok(());
    }
    inside.hear_ipv6_routes()?;
    if route::is_local(inside, address)? {
        return Ok(());
    }
    let until = Instant::now() + KERNEL_WORK_TIMEOUT;
    while !inside.heard(until)?.iter().any(|m| route::is_local_route_to(m, Some(address))) {
        if Instant::now() >= until {
            let cause = format!("the kernel did not put in its local route within {KERNEL_WORK_TIMEOUT:?}");
            return Err(fail(OPERATION, address.to_string(), KernelErrorKind::Exhausted, cause));
        }
    }
    Ok(())
}

fn about(record: &EndpointRecord, what: &str) -> String {
    format!("{what} (endpoint {}, epoch {})", record.id, record.epoch)
}

/// The container may choose a smaller MTU, down to [`MIN_MTU`].
fn container_steps(record: &EndpointRecord, seen: &LinkSeen, there: &[Route]) -> Vec<Step> {
    let (index, name) = (record.container_ifindex, record.attachment.ifname.as_str());
    let mut steps = vec![Step::link(link::set(LinkUnspec::new_with_name("lo").up().build()), "lo")];
    if seen.mac != Some(record.container_mac) {
        steps.push(Step::link(link::set_mac(index, record.container_mac), name));
    }
    if seen.mtu > record.mtu || seen.mtu < MIN_MTU {
        steps.push(Step::link(link::set_mtu(index, record.mtu), name));
    }
    if !seen.arp {
        steps.push(Step::link(link::enable_arp(index), name));
    }
    for a in record.addresses() {
        steps.push(Step::address(a, address::add(index, a), format!("address {a}")));
    }
    steps.push(Step::link(link::up(index), name));
    for (a, gateway) in record.addresses().filter_map(|a| Some((a, record.gateway_of(a)?))) {
        let is_there = |route: &Route| there.iter().any(|r| r.destination == route.destination);
        for route in source_rule::routes_by(record, gateway).into_iter().filter(|route| !is_there(route)) {
            let subject = match route.gateway {
                None => format!("route to gateway {gateway}"),
                Some(_) => format!("route to {} by {gateway}", route.destination),
            };
            steps.push(Step::route(a, route, subject));
        }
    }
    steps
}

fn sources(host: &mut Connection, record: &EndpointRecord) -> Result<Vec<IpAddr>> {
    match record.ip_owner {
        IpOwner::Endpoint | IpOwner::Caller => {
            Ok(record.addresses().filter_map(|address| record.gateway_of(address)).collect())
        }
        IpOwner::External => router::addresses(host),
    }
}

fn host_steps(record: &EndpointRecord, seen: &LinkSeen, sources: &[IpAddr]) -> Vec<Step> {
    let index = record.host_ifindex;
    let name = record.host_ifname.as_str();
    let mut steps = Vec::new();
    let mark = link::mark(record.id, record.epoch, &record.attachment);
    if seen.alias.as_ref() != Some(&mark) {
        steps.push(Step::link(link::set_mark(index, mark), name));
    }
    if seen.master.is_some() {
        // A link that leaves a VRF loses its routes.
        steps.push(Step::link(link::release_from_master(index), name));
    }
    let is_as_made = seen.mac == Some(record.host_mac) && seen.mtu == record.mtu && !seen.arp;
    let up = if is_as_made { link::up(index) } else { link::renew_host(index, record.host_mac, record.mtu) };
    steps.push(Step::link(up, name));
    for a in record.addresses() {
        let source = sources.iter().find(|source| source.is_ipv4() == a.is_ipv4());
        let to = Route::direct(IpNet::from(a), index, source.copied());
        steps.push(Step::route(a, to, format!("route to {a}")));
    }
    steps
}

fn conflict(record: &EndpointRecord, address: IpAddr) -> KernelError {
    let cause = "the node has a route to this address that is not Wharf's; remove it (`ip route show table main`), or \
                 take the address out of the pools";
    fail(OPERATION, about(record, &format!("route to {address}")), KernelErrorKind::Conflict, cause)
}

/// Replaces an older Wharf route.
fn take_place(host: &mut Connection, route: &Route, record: &EndpointRecord) -> Result<()> {
    let address = route.destination.addr();
    let conflict = || conflict(record, address);
    let old = match route::of_address(host, address)? {
        Some(there) if there.ifindex == route.ifindex && there.source == route.source => return Ok(()),
        Some(old) => old,
        None => return Err(conflict()),
    };
    for (request, fine) in [(old.remove(), libc::ESRCH), (route.add(), 0)] {
        match host.batch(vec![request])?.pop() {
            Some(Err(refusal)) if refusal.is(fine) => {}
            Some(Err(refusal)) if refusal.is(libc::EEXIST) => return Err(conflict()),
            Some(Err(refusal)) => {
                return Err(refusal.into_error(OPERATION, about(record, &format!("route to {address}"))));
            }
            _ => {}
        }
    }
    Ok(())
}

fn run(connection: &mut Connection, steps: Vec<Step>, record: &EndpointRecord) -> Result<Outcome> {
    let mut requests = Vec::with_capacity(steps.len());
    let mut purposes = Vec::with_capacity(steps.len());
    for Step { request, subject, ipv6, address, route } in steps {
        requests.push(request);
        purposes.push((subject, ipv6, address, route));
    }
    let mut outcome = Outcome::default();
    for (answer, (subject, ipv6, address, route)) in connection.batch(requests)?.into_iter().zip(purposes) {
        let Err(refusal) = answer else { continue };
        if address && refusal.is(libc::EEXIST) {
            continue;
        }
        if ipv6 && (outcome.ipv6_off || ipv6_is_off(&refusal)) {
            outcome.ipv6_off = true;
            continue;
        }
        match route {
            Some(route) if refusal.is(libc::EEXIST) => outcome.in_the_way.push(route),
            Some(route) if refusal.is(libc::ENETUNREACH) || refusal.is(libc::EHOSTUNREACH) => {
                outcome.in_the_way.push(route);
            }
            _ => return Err(refusal.into_error(OPERATION, about(record, &subject))),
        }
    }
    Ok(outcome)
}

/// Gives a worse metric to routes behind another interface's: a second interface must not take over the default route.
/// Returns the main table.
fn stand_behind(connection: &mut Connection, in_the_way: Vec<Route>, record: &EndpointRecord) -> Result<Vec<Route>> {
    let mut there = route::list(connection, None)?;
    for mut route in in_the_way {
        if there.iter().any(|r| r.destination == route.destination && r.ifindex == route.ifindex) {
            continue;
        }
        route.metric = Some(SECOND_METRIC.saturating_add(record.container_ifindex.0));
        if let Some(Err(refusal)) = connection.batch(vec![route.add()])?.pop() {
            return Err(refusal.into_error(OPERATION, about(record, &format!("route to {}", route.destination))));
        }
        there.push(route);
    }
    Ok(there)
}

/// EACCES: `disable_ipv6` is set.
fn ipv6_is_off(refusal: &Refusal) -> bool {
    refusal.is(libc::EACCES) || refusal.is(libc::EAFNOSUPPORT) || refusal.is(libc::EOPNOTSUPP)
}

/// `/proc/sys/net` shows the opening thread's network namespace.
fn disable_ipv6(ifname: &str) -> String {
    format!("/proc/sys/net/ipv6/conf/{ifname}/disable_ipv6")
}

fn enable_ipv6(thread: &NetnsThread, record: &EndpointRecord) -> Result<()> {
    let netns = thread.open(OPERATION, &record.netns)?;
    let name = record.attachment.ifname.to_string();
    let path = disable_ipv6(&name);
    let file = path.clone();
    let written: io::Result<()> =
        thread.visit(OPERATION, &about(record, &name), &netns, move || fs::write(&file, "0"))?;
    written.map_err(|e| wrap(OPERATION, about(record, &path), &e))
}
