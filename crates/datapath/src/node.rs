//! The router interface, the pools' unreachable routes, and the routes to other nodes.

use std::net::IpAddr;

use wharf_core::{
    finding::NodeProblem,
    kernel::{KernelErrorKind, MissingRoute, NodeSpec, Result},
};
use wharf_crash as crash;

use crate::{
    ROUTE_PROTOCOL, ROUTER_IFNAME,
    bpf::Bpf,
    error::fail,
    netlink::{
        Connection, Request, address, link,
        route::{self, Route},
    },
    overlay, peers, redirects,
    router::Pair,
    translated,
};

const OPERATION: &str = "set up node";

/// Makes the router interface with exactly the router addresses, and unreachable routes for exactly the pools' CIDRs. A
/// router address elsewhere is a conflict; a foreign route to the same destination stays. A refused route to another
/// node, or a failed overlay, is no error. Returns the missing routes.
pub(crate) fn ensure_node(spec: &NodeSpec, bpf: &Bpf) -> Result<Vec<MissingRoute>> {
    let mut connection = Connection::open()?;
    let wanted = spec.routers();
    let pair = Pair::find(&mut connection)?;
    refuse_twins(&mut connection, &wanted, &pair)?;
    let router = pair.ensure(&mut connection, spec.mtu)?;
    crash::point("datapath/node/after-router");
    let (old, new) = address::difference(&address::list(&mut connection, router)?, &wanted);
    let mut steps = Vec::new();
    for a in old {
        steps.push(Step::remove(a, address::remove(router, a), format!("address {a}")));
    }
    for a in new {
        steps.push(Step::add(a, address::add(router, a), format!("router address {a}")));
    }
    let cidrs: Vec<_> = spec.cidrs.iter().map(|c| Route::unreachable(*c)).collect();
    let ours = route::unreachable(&mut connection, ROUTE_PROTOCOL)?;
    for route in cidrs.iter().filter(|r| !ours.contains(r)) {
        let to = route.destination;
        steps.push(Step::add(to.addr(), route.add(), format!("unreachable route {to}")));
    }
    // Of removed pools or earlier versions.
    for old in ours.iter().filter(|r| !cidrs.contains(r)) {
        let to = old.destination;
        steps.push(Step::remove(to.addr(), old.remove(), format!("unreachable route {to}")));
    }
    run(&mut connection, steps)?;
    let _change = bpf.lock_overlay_change();
    let made = overlay::ensure(&mut connection, bpf, spec);
    let failure = made.as_ref().err().map(|e| e.cause.clone());
    bpf.note_overlay_failure(failure.clone());
    let overlay = match made {
        Ok(overlay) => overlay,
        // An earlier device keeps its routes.
        Err(_) => overlay::ours(&mut connection)?,
    };
    let missing = peers::ensure(&mut connection, spec, overlay, failure.as_deref())?;
    translated::ensure(&mut connection, bpf, spec, router)?;
    Ok(missing)
}

fn refuse_twins(connection: &mut Connection, wanted: &[IpAddr], pair: &Pair) -> Result<()> {
    let all = address::list_all(connection)?;
    let (router, overlay) = (pair.router(), overlay::ours(connection)?);
    for a in wanted {
        let others = all.iter().filter(|(ifindex, there)| there == a && Some(*ifindex) != overlay);
        let mut holders = others.map(|(ifindex, _)| *ifindex);
        if holders.clone().any(|holder| Some(holder) == router) {
            continue;
        }
        if let Some(holder) = holders.next() {
            let ifname = link::look_up_index(connection, holder)?.map_or_else(|| format!("index {holder}"), |l| l.name);
            let cause =
                format!("the node has it on {ifname}; choose another range for the default pool, or remove it there");
            return Err(fail(OPERATION, format!("router address {a}"), KernelErrorKind::Conflict, cause));
        }
    }
    Ok(())
}

struct Step {
    request: Request,
    subject: String,
    ipv6: bool,
    removal: bool,
}

impl Step {
    fn add(address: IpAddr, request: Request, subject: String) -> Self {
        Self { request, subject, ipv6: address.is_ipv6(), removal: false }
    }

    fn remove(address: IpAddr, request: Request, subject: String) -> Self {
        Self { request, subject, ipv6: address.is_ipv6(), removal: true }
    }
}

fn run(connection: &mut Connection, steps: Vec<Step>) -> Result<()> {
    let mut requests = Vec::with_capacity(steps.len());
    let mut purposes = Vec::with_capacity(steps.len());
    for Step { request, subject, ipv6, removal } in steps {
        requests.push(request);
        purposes.push((subject, ipv6, removal));
    }
    for (answer, (subject, ipv6, removal)) in connection.batch(requests)?.into_iter().zip(purposes) {
        let Err(refusal) = answer else { continue };
        if removal && (refusal.is(libc::ESRCH) || refusal.is(libc::EADDRNOTAVAIL)) {
            continue;
        }
        if ipv6 && (refusal.is(libc::EACCES) || refusal.is(libc::EAFNOSUPPORT) || refusal.is(libc::EOPNOTSUPP)) {
            let cause = "IPv6 is off on the node (net.ipv6.conf.all.disable_ipv6=1 or ipv6.disable=1); turn it on, or \
                         start with IPv4 alone (--ipv6-pool=)";
            return Err(fail(OPERATION, subject, KernelErrorKind::Unsupported, cause));
        }
        if !removal && refusal.is(libc::EEXIST) {
            let cause = "another of that destination and metric is there and is not Wharf's; remove it, or choose another \
                         pool";
            return Err(fail(OPERATION, subject, KernelErrorKind::Conflict, cause));
        }
        return Err(refusal.into_error(OPERATION, subject));
    }
    Ok(())
}

/// Ignores foreign additions.
pub(crate) fn observe(spec: &NodeSpec, bpf: &Bpf) -> Result<Vec<NodeProblem>> {
    let mut wrong = Vec::new();
    let mut connection = Connection::open()?;
    let pair = Pair::find(&mut connection)?;
    for end in pair.ends() {
        let name = end.name;
        if end.is_taken() {
            wrong.push(NodeProblem::LinkForeign { name: name.to_owned() });
            continue;
        }
        let Some(seen) = end.link() else {
            wrong.push(NodeProblem::LinkMissing { name: name.to_owned() });
            continue;
        };
        if seen.name != name {
            wrong.push(NodeProblem::LinkRenamed { name: name.to_owned(), found: seen.name.clone() });
        }
        if !seen.up {
            wrong.push(NodeProblem::LinkDown { name: name.to_owned() });
        }
        if seen.mtu != spec.mtu {
            wrong.push(NodeProblem::LinkMtu { name: name.to_owned(), expected: spec.mtu, found: seen.mtu });
        }
        if name != ROUTER_IFNAME {
            continue;
        }
        let there = address::list(&mut connection, seen.ifindex)?;
        wrong.extend(address::problems(&there, &spec.routers(), name));
    }
    let routes = route::list(&mut connection, Some(ROUTE_PROTOCOL))?;
    for cidr in spec.cidrs.iter().map(|c| c.trunc()) {
        match routes.iter().find(|r| r.destination == cidr) {
            Some(r) if r.ifindex.is_none() => {}
            other => {
                let ifindex = other.and_then(|r| r.ifindex);
                let found = ifindex.map(|ifindex| link::name_of(&mut connection, ifindex)).transpose()?;
                wrong.push(NodeProblem::PoolRoute { cidr, found });
            }
        }
    }
    wrong.extend(overlay::observe(&mut connection, bpf, spec)?);
    wrong.extend(peers::observe(&mut connection, spec)?);
    wrong.extend(translated::observe(&mut connection, bpf, spec)?);
    Ok(wrong)
}

/// Succeeds when already gone.
pub(crate) fn remove_node() -> Result<()> {
    let mut connection = Connection::open()?;
    let mut steps = Vec::new();
    for old in route::unreachable(&mut connection, ROUTE_PROTOCOL)? {
        let to = old.destination;
        steps.push(Step::remove(to.addr(), old.remove(), format!("unreachable route {to}")));
    }
    run(&mut connection, steps)?;
    peers::remove_all(&mut connection)?;
    if let Some(device) = overlay::ours(&mut connection)? {
        overlay::remove(&mut connection, device)?;
    }
    redirects::remove()?;
    translated::remove(&mut connection)?;
    Pair::find(&mut connection)?.remove(&mut connection)
}
