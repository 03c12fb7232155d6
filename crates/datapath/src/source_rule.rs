//! Source routing in a container with more than one interface. The main table has one best route to each destination; a
//! reply that leaves by another interface than its source's is dropped as forged. So an interface gets a table with a
//! default route, and a rule for packets from its address, if the container has another Wharf interface, the interface
//! has configured routes, or one of its routes ranks behind another interface's.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use wharf_core::{
    endpoint::EndpointRecord,
    finding::EndpointProblem,
    ids::IfIndex,
    kernel::{KernelErrorKind, Result},
};

use crate::{
    ROUTE_PROTOCOL,
    netlink::{
        Connection, Request, address,
        route::{self, Route},
        rule::{self, Rule},
    },
    netns::NetnsThread,
};

const ENSURE: &str = "route by source address";
const REMOVE: &str = "remove rules";

/// Base metric (plus the interface index) of a route behind another interface's. Worse than IPv6's 1024.
pub(crate) const SECOND_METRIC: u32 = 2048;

/// `LOOPBACK_IFINDEX`, include/net/flow.h. Its route to ::1 is in the main table.
const LOOPBACK: IfIndex = IfIndex(1);

/// First table number; the interface index is added.
const TABLE_BASE: u32 = 0x7768_0000;

const fn table_of(index: IfIndex) -> u32 {
    TABLE_BASE.saturating_add(index.0)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Way {
    address: IpAddr,
    gateway: IpAddr,
    index: IfIndex,
}

impl Way {
    /// Replies must reach any peer.
    fn routes(self) -> [Route; 2] {
        let everything =
            if self.gateway.is_ipv4() { IpNet::V4(Ipv4Net::default()) } else { IpNet::V6(Ipv6Net::default()) };
        let on_link = Route::direct(IpNet::from(self.gateway), self.index, None);
        [on_link, Route::via(everything, self.gateway, self.index)].map(|route| route.in_table(table_of(self.index)))
    }

    fn rule(self) -> Rule {
        Rule { source: self.address, table: table_of(self.index) }
    }
}

pub(crate) fn routes_by(record: &EndpointRecord, gateway: IpAddr) -> Vec<Route> {
    let index = record.container_ifindex;
    let on_link = Route::direct(IpNet::from(gateway), index, None);
    let by_gateway = record.destinations(gateway.is_ipv4()).into_iter().map(|to| Route::via(to, gateway, index));
    [on_link].into_iter().chain(by_gateway).collect()
}

/// Wharf's routes over the container's other interfaces. `main`: the container's main table.
pub(crate) fn beside(inside: &mut Connection, main: &[Route], record: &EndpointRecord) -> Result<Vec<Route>> {
    let is_other =
        |route: &Route| route.ifindex.is_some_and(|index| index != record.container_ifindex && index != LOOPBACK);
    if !main.iter().any(is_other) {
        return Ok(Vec::new());
    }
    Ok(route::list(inside, Some(ROUTE_PROTOCOL))?.into_iter().filter(is_other).collect())
}

pub(crate) fn ways(main: &[Route], beside: &[Route], record: &EndpointRecord) -> Vec<Way> {
    let stands_behind = |address: &IpAddr| {
        record.destinations(address.is_ipv4()).iter().any(|to| {
            let own = main.iter().filter(|r| r.ifindex == Some(record.container_ifindex) && r.destination == *to);
            own.map(|r| r.metric.unwrap_or(0)).min().is_some_and(|best| best >= SECOND_METRIC)
        })
    };
    let all = !beside.is_empty() || record.routes.is_some();
    let needing = record.addresses().filter(|address| all || stands_behind(address));
    let way = |address| Some(Way { address, gateway: record.gateway_of(address)?, index: record.container_ifindex });
    needing.filter_map(way).collect()
}

/// A failure leaves no rules of the endpoint.
pub(crate) fn ensure(inside: &mut Connection, record: &EndpointRecord, ways: &[Way]) -> Result<()> {
    let done = try_ensure(inside, record, ways);
    if done.is_err()
        && let Err(error) = remove_in(inside, record)
    {
        tracing::warn!(endpoint = %record.id, %error, "rules are left in the container after a failure");
    }
    done
}

/// Only logs failures: an interface that is down has no routes.
pub(crate) fn ensure_others(inside: &mut Connection, record: &EndpointRecord, beside: &[Route]) {
    let done = ways_of_others(inside, beside).and_then(|ways| try_ensure(inside, record, &ways));
    if let Err(error) = done {
        tracing::warn!(endpoint = %record.id, %error, "answers of another interface of the container may take this one's way");
    }
}

fn ways_of_others(inside: &mut Connection, beside: &[Route]) -> Result<Vec<Way>> {
    let mut ways = Vec::new();
    for route in
        beside.iter().filter(|r| r.gateway.is_none() && r.destination.prefix_len() == r.destination.max_prefix_len())
    {
        let (Some(index), gateway) = (route.ifindex, route.destination.addr()) else { continue };
        let own = address::list(inside, index)?.into_iter().filter(|a| !a.link_local).map(|a| a.address);
        ways.extend(own.filter(|a| a.is_ipv4() == gateway.is_ipv4()).map(|address| Way { address, gateway, index }));
    }
    Ok(ways)
}

fn try_ensure(inside: &mut Connection, record: &EndpointRecord, ways: &[Way]) -> Result<()> {
    if ways.is_empty() {
        return Ok(());
    }
    let there = rule::list(inside)?;
    // Request, subject, errno that means "already as wanted".
    let mut steps: Vec<(Request, String, i32)> = Vec::new();
    for way in ways {
        let (address, table) = (way.address, table_of(way.index));
        for route in way.routes() {
            let subject = format!("route to {} in table {table}", route.destination);
            steps.push((route.add(), subject, libc::EEXIST));
        }
        // Of an earlier interface with the address.
        for old in there.iter().filter(|r| r.source == address && r.table != table) {
            steps.push((old.remove(), format!("old rule from {address}"), libc::ENOENT));
        }
        steps.push((way.rule().add(), format!("rule from {address} lookup {table}"), libc::EEXIST));
    }
    let (requests, about): (Vec<_>, Vec<_>) = steps.into_iter().map(|(r, s, fine)| (r, (s, fine))).unzip();
    for (answer, (subject, fine)) in inside.batch(requests)?.into_iter().zip(about) {
        if let Err(refusal) = answer
            && !refusal.is(fine)
        {
            return Err(refusal.into_error(ENSURE, format!("{subject} (endpoint {})", record.id)));
        }
    }
    Ok(())
}

/// Succeeds when already gone.
pub(crate) fn remove(thread: &NetnsThread, record: &EndpointRecord) -> Result<()> {
    match thread.connect(REMOVE, &record.netns) {
        Ok(mut inside) => remove_in(&mut inside, record),
        Err(e) if matches!(e.kind, KernelErrorKind::NotFound | KernelErrorKind::NotANetns) => Ok(()),
        Err(e) => Err(e),
    }
}

fn remove_in(inside: &mut Connection, record: &EndpointRecord) -> Result<()> {
    let table = table_of(record.container_ifindex);
    let ours = |r: &Rule| r.table == table && record.addresses().any(|a| a == r.source);
    let rules: Vec<Rule> = rule::list(inside)?.into_iter().filter(ours).collect();
    if rules.is_empty() {
        return Ok(());
    }
    let answers = inside.batch(rules.iter().map(Rule::remove).collect())?;
    for (answer, rule) in answers.into_iter().zip(rules) {
        if let Err(refusal) = answer
            && !refusal.is(libc::ENOENT)
        {
            return Err(refusal.into_error(REMOVE, format!("rule from {} (endpoint {})", rule.source, record.id)));
        }
    }
    Ok(())
}

pub(crate) fn missing(inside: &mut Connection, record: &EndpointRecord, ways: &[Way]) -> Result<Vec<EndpointProblem>> {
    if ways.is_empty() {
        return Ok(Vec::new());
    }
    let table = table_of(record.container_ifindex);
    let there = route::list_table(inside, Some(table), Some(ROUTE_PROTOCOL))?;
    let rules = rule::list(inside)?;
    let mut missing = Vec::new();
    for way in ways {
        for wanted in way.routes() {
            if !there.iter().any(|r| r.destination == wanted.destination && r.ifindex == wanted.ifindex) {
                let (to, gateway) = (wanted.destination, way.gateway);
                missing.push(EndpointProblem::ContainerRoute { to, gateway, table: Some(table) });
            }
        }
        if !rules.contains(&way.rule()) {
            missing.push(EndpointProblem::ContainerRule { from: way.address, table });
        }
    }
    Ok(missing)
}
