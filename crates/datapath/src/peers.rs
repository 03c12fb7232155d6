//! Routes to containers of other nodes. Only routes with [`crate::PEER_PROTOCOL`] and Wharf's metric are changed.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use wharf_core::{
    finding::NodeProblem,
    ids::IfIndex,
    kernel::{NextHop, NodeSpec, PeerRoute, Result},
};
use wharf_crash as crash;

use crate::{
    PEER_PROTOCOL,
    netlink::{
        Connection,
        route::{self, Route, Tunnel},
    },
    overlay,
};

pub(crate) fn list(connection: &mut Connection) -> Result<Vec<Route>> {
    let mut found = route::list(connection, Some(PEER_PROTOCOL))?;
    found.retain(Route::is_to_peer);
    Ok(found)
}

fn by_destination(connection: &mut Connection) -> Result<BTreeMap<IpNet, Route>> {
    Ok(list(connection)?.into_iter().map(|route| (route.destination, route)).collect())
}

/// `None` without the overlay that it needs.
fn wanted(spec: &NodeSpec, peer: &PeerRoute, overlay: Option<IfIndex>) -> Option<Route> {
    let (remote, local) = match peer.via {
        NextHop::Direct(via) => return Some(Route::to_peer(peer.to, via)),
        NextHop::Overlay { remote, local } => (remote, local),
    };
    let settings = spec.overlay.as_ref()?;
    let tunnel = Tunnel { vni: settings.vni, remote, local, mtu: settings.mtu };
    // An address of a container's network: answers take the overlay, too.
    let router = if peer.to.addr().is_ipv4() { spec.router4.map(IpAddr::V4) } else { spec.router6.map(IpAddr::V6) };
    Some(Route::by_overlay(peer.to, tunnel, overlay?, router))
}

/// A direct route's link is the kernel's choice, and so is its source.
fn is_the_same(there: &Route, wanted: &Route) -> bool {
    match wanted.tunnel {
        Some(_) => there == wanted,
        None => there.gateway == wanted.gateway && there.tunnel.is_none(),
    }
}

/// Exactly these routes. A destination that changes its next hop is replaced, so that no packet finds no route.
/// `overlay`: its interface.
pub(crate) fn ensure(connection: &mut Connection, spec: &NodeSpec, overlay: Option<IfIndex>) -> Result<()> {
    let mut there = by_destination(connection)?;
    let mut requests = Vec::new();
    for route in spec.peers.iter().filter_map(|peer| wanted(spec, peer, overlay)) {
        match there.remove(&route.destination) {
            Some(old) if is_the_same(&old, &route) => {}
            Some(_) => requests.push(route.replace()),
            None => requests.push(route.add()),
        }
    }
    let additions = requests.len();
    requests.extend(there.values().map(Route::remove));
    if requests.is_empty() {
        return Ok(());
    }
    crash::point("datapath/peers/before");
    for (i, answer) in connection.batch(requests)?.into_iter().enumerate() {
        match answer {
            // Not an error, because `observe` reports the missing route: the next hop's link is down, or another
            // program's route has this destination and metric.
            Err(refusal) if i < additions && is_of_the_network(&refusal) => {}
            Err(refusal) if i >= additions && refusal.is(libc::ESRCH) => {}
            Err(refusal) => return Err(refusal.into_error("set up node", "routes to other nodes")),
            Ok(_) => {}
        }
    }
    crash::point("datapath/peers/after");
    Ok(())
}

/// Without any. Succeeds when already gone.
pub(crate) fn remove_all(connection: &mut Connection) -> Result<()> {
    for route in list(connection)? {
        remove_route(connection, &route)?;
    }
    Ok(())
}

fn remove_route(connection: &mut Connection, route: &Route) -> Result<()> {
    match connection.batch(vec![route.remove()])?.pop() {
        Some(Err(refusal)) if !refusal.is(libc::ESRCH) => {
            Err(refusal.into_error("remove route", route.destination.to_string()))
        }
        _ => Ok(()),
    }
}

/// Succeeds when already gone.
pub(crate) fn remove(peer: &PeerRoute) -> Result<()> {
    let mut connection = Connection::open()?;
    let route = list(&mut connection)?.into_iter().find(|route| route.destination == peer.to.trunc());
    route.map_or(Ok(()), |route| remove_route(&mut connection, &route))
}

/// The state of the node's links and routes refuses the route, or the kernel has no IPv6 or no lightweight tunnels: not
/// a defect of the request.
fn is_of_the_network(refusal: &crate::netlink::Refusal) -> bool {
    let of_links = [libc::EEXIST, libc::ENETUNREACH, libc::EHOSTUNREACH, libc::ENETDOWN, libc::EINVAL, libc::ENODEV];
    let of_the_kernel = [libc::EACCES, libc::EOPNOTSUPP, libc::EAFNOSUPPORT];
    of_links.into_iter().chain(of_the_kernel).any(|errno| refusal.is(errno))
}

/// Missing routes, routes with another next hop, and leftovers.
pub(crate) fn observe(connection: &mut Connection, spec: &NodeSpec) -> Result<Vec<NodeProblem>> {
    let overlay = overlay::ours(connection)?;
    let mut there = by_destination(connection)?;
    let mut wrong = Vec::new();
    for peer in &spec.peers {
        let (to, expected) = (peer.to.trunc(), Some(peer.via));
        let found = there.remove(&to);
        let is_right = match (&found, wanted(spec, peer, overlay)) {
            (Some(found), Some(wanted)) => is_the_same(found, &wanted),
            _ => false,
        };
        if !is_right {
            wrong.push(NodeProblem::PeerRoute { to, expected, found: found.and_then(|route| route.next_hop()) });
        }
    }
    let leftover = there.into_values();
    wrong.extend(leftover.map(|route| NodeProblem::PeerRoute {
        to: route.destination,
        expected: None,
        found: route.next_hop(),
    }));
    Ok(wrong)
}
