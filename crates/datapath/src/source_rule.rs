//! A container's further interfaces.
//!
//! The main table has one best default route, that of the container's first interface. Replies from another
//! interface's address would leave by the first interface, whose programs drop them as forged. So an interface of whose
//! routes one ranks behind another's gets a table with its own routes, and a rule that routes packets from
//! its address by that table. The routes are removed with the interface. The rule is not; it is removed when the
//! endpoint is made unreachable.

use std::net::IpAddr;

use ipnet::IpNet;
use wharf_core::{
    endpoint::EndpointRecord,
    finding::EndpointProblem,
    kernel::{KernelErrorKind, Result},
};

use crate::{
    ROUTE_PROTOCOL,
    netlink::{
        Connection, Request,
        route::{self, Route},
        rule::{self, Rule},
    },
    netns::NetnsThread,
};

const ENSURE: &str = "route by source address";
const REMOVE: &str = "remove rules";

/// Metric of the routes of an interface that finds another's in its place, before its index is added. Worse than IPv6's
/// default of 1024.
pub(crate) const SECOND_METRIC: u32 = 2048;

/// Number of a further interface's table, before its index is added: far from those that people choose.
const TABLE_BASE: u32 = 0x7768_0000;

fn table_of(record: &EndpointRecord) -> u32 {
    TABLE_BASE.saturating_add(record.container_ifindex.0)
}

/// The routes of the container's side of one family: the gateway on the link, and what is reached by it.
pub(crate) fn routes_by(record: &EndpointRecord, gateway: IpAddr) -> Vec<Route> {
    let index = record.container_ifindex;
    let on_link = Route::direct(IpNet::from(gateway), index, None);
    let by_gateway = record.destinations(gateway.is_ipv4()).into_iter().map(|to| Route::via(to, gateway, index));
    [on_link].into_iter().chain(by_gateway).collect()
}

/// The endpoint's addresses, each with its gateway, of whose routes by the gateway one stands behind another interface's in
/// the container's main table.
pub(crate) fn behind(main: &[Route], record: &EndpointRecord) -> Vec<(IpAddr, IpAddr)> {
    let stands_behind = |address: &IpAddr| {
        record.destinations(address.is_ipv4()).iter().any(|to| {
            let own = main.iter().filter(|r| r.ifindex == Some(record.container_ifindex) && r.destination == *to);
            own.map(|r| r.metric.unwrap_or(0)).min().is_some_and(|best| best >= SECOND_METRIC)
        })
    };
    record.addresses().filter(stands_behind).filter_map(|a| Some((a, record.gateway_of(a)?))).collect()
}

fn routes(record: &EndpointRecord, gateway: IpAddr) -> Vec<Route> {
    routes_by(record, gateway).into_iter().map(|r| r.in_table(table_of(record))).collect()
}

/// Gives each of the addresses its table and its rule. After a failure none of the endpoint's rules is left.
pub(crate) fn ensure(inside: &mut Connection, record: &EndpointRecord, behind: &[(IpAddr, IpAddr)]) -> Result<()> {
    if behind.is_empty() {
        return Ok(());
    }
    let done = try_ensure(inside, record, behind);
    if done.is_err()
        && let Err(error) = remove_in(inside, record)
    {
        tracing::warn!(endpoint = %record.id, %error, "rules are left in the container after a failure");
    }
    done
}

fn try_ensure(inside: &mut Connection, record: &EndpointRecord, behind: &[(IpAddr, IpAddr)]) -> Result<()> {
    let table = table_of(record);
    let there = rule::list(inside)?;
    // Each with what it is about and the refusal that means "as wanted already".
    let mut steps: Vec<(Request, String, i32)> = Vec::new();
    for (address, gateway) in behind {
        for route in routes(record, *gateway) {
            let subject = format!("route to {} in table {table}", route.destination);
            steps.push((route.add(), subject, libc::EEXIST));
        }
        // Rules of an interface that had the address before.
        for old in there.iter().filter(|r| r.source == *address && r.table != table) {
            steps.push((old.remove(), format!("old rule from {address}"), libc::ENOENT));
        }
        let rule = Rule { source: *address, table };
        steps.push((rule.add(), format!("rule from {address} lookup {table}"), libc::EEXIST));
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

/// Removes the endpoint's rules from its container; gone already, with the container or without it, is success.
pub(crate) fn remove(thread: &NetnsThread, record: &EndpointRecord) -> Result<()> {
    match thread.connect(REMOVE, &record.netns) {
        Ok(mut inside) => remove_in(&mut inside, record),
        Err(e) if matches!(e.kind, KernelErrorKind::NotFound | KernelErrorKind::NotANetns) => Ok(()),
        Err(e) => Err(e),
    }
}

fn remove_in(inside: &mut Connection, record: &EndpointRecord) -> Result<()> {
    let table = table_of(record);
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

/// What is missing of the tables and rules of the addresses.
pub(crate) fn missing(
    inside: &mut Connection,
    record: &EndpointRecord,
    behind: &[(IpAddr, IpAddr)],
) -> Result<Vec<EndpointProblem>> {
    if behind.is_empty() {
        return Ok(Vec::new());
    }
    let table = table_of(record);
    let there = route::list_table(inside, Some(table), Some(ROUTE_PROTOCOL))?;
    let rules = rule::list(inside)?;
    let mut missing = Vec::new();
    for (address, gateway) in behind {
        for wanted in routes(record, *gateway) {
            if !there.iter().any(|r| r.destination == wanted.destination && r.ifindex == wanted.ifindex) {
                let (to, gateway) = (wanted.destination, *gateway);
                missing.push(EndpointProblem::ContainerRoute { to, gateway, table: Some(table) });
            }
        }
        if !rules.contains(&Rule { source: *address, table }) {
            missing.push(EndpointProblem::ContainerRule { from: *address, table });
        }
    }
    Ok(missing)
}
