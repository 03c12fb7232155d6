//! The node's own part: the router interface, its addresses, and the routes that keep unknown endpoint addresses from
//! leaving the node.

use std::net::IpAddr;

use rtnetlink::{
    LinkMessageBuilder, LinkUnspec, LinkVeth,
    packet_core::{NLM_F_CREATE, NLM_F_EXCL},
    packet_route::{
        RouteNetlinkMessage,
        link::{InfoData, InfoKind, InfoVeth},
    },
};
use wharf_core::{
    finding::NodeProblem,
    ids::IfIndex,
    kernel::{KernelErrorKind, NodeSpec, Result},
};
use wharf_crash as crash;

use crate::{
    ROUTE_PROTOCOL, ROUTER_IFNAME, ROUTER_PEER_IFNAME,
    error::fail,
    netlink::{
        Connection, Request, address, link,
        route::{self, Route},
    },
};

const OPERATION: &str = "set up node";

fn routers(spec: &NodeSpec) -> Vec<IpAddr> {
    spec.router4.map(IpAddr::V4).into_iter().chain(spec.router6.map(IpAddr::V6)).collect()
}

/// Makes the router interface (a veth pair, as not every kernel has dummy), gives it exactly the router addresses, and
/// routes exactly the pools' CIDRs to nowhere.
pub(crate) fn ensure_node(spec: &NodeSpec) -> Result<()> {
    let mut connection = Connection::open()?;
    let router = ensure_router(&mut connection, spec.mtu)?;
    crash::point("datapath/node/after-router");
    let wanted = routers(spec);
    let mut steps = Vec::new();
    for old in address::list(&mut connection, router)? {
        if !old.link_local && !wanted.contains(&old.address) {
            steps.push(Step::remove(
                old.address,
                address::remove(router, old.address),
                format!("address {}", old.address),
            ));
        }
    }
    for a in &wanted {
        steps.push(Step::ensure(*a, address::ensure(router, *a), format!("router address {a}")));
    }
    let cidrs: Vec<_> = spec.cidrs.iter().map(|c| c.trunc()).collect();
    for old in route::list(&mut connection, Some(ROUTE_PROTOCOL))? {
        if old.ifindex.is_none() && !cidrs.contains(&old.destination) {
            let to = old.destination;
            steps.push(Step::remove(to.addr(), Route::unreachable(to).remove(), format!("unreachable route {to}")));
        }
    }
    for cidr in cidrs {
        steps.push(Step::ensure(cidr.addr(), Route::unreachable(cidr).ensure(), format!("unreachable route {cidr}")));
    }
    run(&mut connection, steps)
}

/// A request, what it is about, and what may be wrong with it.
struct Step {
    request: Request,
    subject: String,
    ipv6: bool,
    /// It is a removal: gone already is as wanted.
    removal: bool,
}

impl Step {
    fn ensure(address: IpAddr, request: Request, subject: String) -> Self {
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
                         configure no IPv6 pool";
            return Err(fail(OPERATION, subject, KernelErrorKind::Unsupported, cause));
        }
        return Err(refusal.into_error(OPERATION, subject));
    }
    Ok(())
}

fn ensure_router(connection: &mut Connection, mtu: u32) -> Result<IfIndex> {
    let peer = LinkUnspec::new_with_name(ROUTER_PEER_IFNAME).mtu(mtu).arp(false).build();
    let create = LinkMessageBuilder::<LinkVeth>::new_with_info_kind(InfoKind::Veth)
        .name(ROUTER_IFNAME)
        .mtu(mtu)
        .arp(false)
        .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
        .build();
    let quiet = |name: &str| {
        link::set(
            LinkUnspec::new_with_name(name).mtu(mtu).append_extra_attribute(link::no_generated_addresses()).build(),
        )
    };
    let up = |name: &str| link::set(LinkUnspec::new_with_name(name).up().build());
    let made = connection.one(RouteNetlinkMessage::NewLink(create), NLM_F_CREATE | NLM_F_EXCL)?;
    if let Err(refusal) = made
        && !refusal.is(libc::EEXIST)
    {
        return Err(refusal.into_error(OPERATION, ROUTER_IFNAME));
    }
    crash::point("datapath/node/after-pair");
    for name in [ROUTER_IFNAME, ROUTER_PEER_IFNAME] {
        match link::look_up(connection, name)? {
            Some(seen) if seen.veth => {}
            Some(_) => {
                let cause = "an interface of that name is there and is not ours (not a veth); rename or remove it";
                return Err(fail(OPERATION, name, KernelErrorKind::Conflict, cause));
            }
            None => {
                let cause = format!(
                    "expected the pair {ROUTER_IFNAME} and {ROUTER_PEER_IFNAME}, one of them is missing; remove the \
                     other (ip link del) and start again"
                );
                return Err(fail(OPERATION, name, KernelErrorKind::Conflict, cause));
            }
        }
    }
    let subjects = [ROUTER_IFNAME, ROUTER_PEER_IFNAME, "lo", ROUTER_IFNAME, ROUTER_PEER_IFNAME];
    let steps =
        vec![quiet(ROUTER_IFNAME), quiet(ROUTER_PEER_IFNAME), up("lo"), up(ROUTER_IFNAME), up(ROUTER_PEER_IFNAME)];
    for ((at, answer), subject) in connection.batch(steps)?.into_iter().enumerate().zip(subjects) {
        match answer {
            Ok(_) => {}
            // A kernel without IPv6 refuses its settings and needs none.
            Err(refusal) if at < 2 && refusal.is(libc::EAFNOSUPPORT) => {}
            Err(refusal) => return Err(refusal.into_error(OPERATION, subject)),
        }
    }
    match link::look_up(connection, ROUTER_IFNAME)? {
        Some(seen) => Ok(seen.ifindex),
        None => Err(fail(OPERATION, ROUTER_IFNAME, KernelErrorKind::NotFound, "it went away as soon as it was made")),
    }
}

/// Compares the router interface, its addresses and the pools' routes with what [`ensure_node`] makes. What others added
/// is ignored.
pub(crate) fn observe(spec: &NodeSpec) -> Result<Vec<NodeProblem>> {
    let mut wrong = Vec::new();
    let mut connection = Connection::open()?;
    for name in [ROUTER_IFNAME, ROUTER_PEER_IFNAME] {
        let Some(seen) = link::look_up(&mut connection, name)? else {
            wrong.push(NodeProblem::LinkMissing { name: name.to_owned() });
            continue;
        };
        if !seen.veth {
            wrong.push(NodeProblem::LinkForeign { name: name.to_owned() });
            continue;
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
        for wanted in routers(spec) {
            let single = if wanted.is_ipv4() { 32 } else { 128 };
            let found = there.iter().find(|a| a.address == wanted).map(|a| a.prefix_len);
            if found != Some(single) {
                wrong.push(NodeProblem::Address { address: wanted, ifname: name.to_owned(), found });
            }
        }
    }
    let routes = route::list(&mut connection, Some(ROUTE_PROTOCOL))?;
    for cidr in spec.cidrs.iter().map(|c| c.trunc()) {
        match routes.iter().find(|r| r.destination == cidr) {
            Some(r) if r.ifindex.is_none() => {}
            other => wrong.push(NodeProblem::PoolRoute { cidr, found: other.and_then(|r| r.ifindex) }),
        }
    }
    Ok(wrong)
}

/// Removes the router interface and the unreachable routes; what is gone already is as wanted.
pub(crate) fn remove_node() -> Result<()> {
    let mut connection = Connection::open()?;
    let mut steps = Vec::new();
    for old in route::list(&mut connection, Some(ROUTE_PROTOCOL))? {
        if old.ifindex.is_none() {
            let to = old.destination;
            steps.push(Step::remove(to.addr(), Route::unreachable(to).remove(), format!("unreachable route {to}")));
        }
    }
    run(&mut connection, steps)?;
    match link::look_up(&mut connection, ROUTER_IFNAME)? {
        Some(seen) if seen.veth => match connection.batch(vec![link::delete(seen.ifindex)])?.pop() {
            Some(Err(refusal)) if !refusal.is(libc::ENODEV) => Err(refusal.into_error("remove node", ROUTER_IFNAME)),
            _ => Ok(()),
        },
        Some(_) => {
            let cause = "an interface of that name is there and is not ours (not a veth); it was left alone";
            Err(fail("remove node", ROUTER_IFNAME, KernelErrorKind::Conflict, cause))
        }
        None => Ok(()),
    }
}
