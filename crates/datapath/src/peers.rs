//! Routes to containers of other nodes, and behind each an unreachable route: while the first one's link is missing, no
//! packet takes another route of the node. Only routes with [`crate::PEER_PROTOCOL`] and Wharf's metrics are changed.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;
use wharf_core::{
    finding::NodeProblem,
    ids::IfIndex,
    kernel::{MissingRoute, NextHop, NodeSpec, PeerRoute, Result},
};
use wharf_crash as crash;

use crate::{
    PEER_PROTOCOL,
    netlink::{
        Connection, Request,
        route::{self, Route, Tunnel},
    },
    overlay,
};

fn by_destination(connection: &mut Connection) -> Result<BTreeMap<IpNet, Route>> {
    Ok(route::to_peers(connection)?.into_iter().map(|route| (route.destination, route)).collect())
}

pub(crate) fn list(connection: &mut Connection) -> Result<Vec<PeerRoute>> {
    let route = |route: Route| Some(PeerRoute { to: route.destination, via: route.next_hop()? });
    Ok(route::to_peers(connection)?.into_iter().filter_map(route).collect())
}

pub(crate) fn unreachable_to(connection: &mut Connection) -> Result<BTreeSet<IpNet>> {
    let found = route::unreachable(connection, PEER_PROTOCOL)?;
    Ok(found.into_iter().filter(Route::is_unreachable_peer).map(|route| route.destination).collect())
}

/// `None` without the needed overlay.
fn wanted(spec: &NodeSpec, peer: &PeerRoute, overlay: Option<IfIndex>) -> Option<Route> {
    let (remote, local) = match peer.via {
        NextHop::Direct(via) => return Some(Route::to_peer(peer.to, via)),
        NextHop::Overlay { remote, local } => (remote, local),
    };
    let settings = spec.overlay.as_ref()?;
    let tunnel = Tunnel { vni: settings.vni, remote, local };
    // Answers take the overlay, too.
    let router = if peer.to.addr().is_ipv4() { spec.router4.map(IpAddr::V4) } else { spec.router6.map(IpAddr::V6) };
    Some(Route::by_overlay(peer.to, tunnel, settings.mtu, overlay?, router))
}

/// The kernel chooses a direct route's link and source.
fn is_the_same(there: &Route, wanted: &Route) -> bool {
    match wanted.tunnel {
        Some(_) => there == wanted,
        None => there.gateway == wanted.gateway && there.tunnel.is_none(),
    }
}

/// Makes exactly these routes. An unreachable route is made before its route, and removed after it. A refused request
/// does not stop the others. `failure`: why the overlay is incomplete. Returns the missing routes.
pub(crate) fn ensure(
    connection: &mut Connection,
    spec: &NodeSpec,
    overlay: Option<IfIndex>,
    failure: Option<&str>,
) -> Result<Vec<MissingRoute>> {
    let (mut there, mut behind) = (by_destination(connection)?, unreachable_to(connection)?);
    let unknown = spec.peers.iter().map(|peer| peer.to.trunc()).filter(|to| !behind.remove(to));
    let unreachable: Vec<Request> = unknown.map(|to| Route::unreachable_peer(to).add()).collect();
    let no_overlay: Arc<str> = failure.map_or("no overlay".into(), |why| format!("no overlay: {why}").into());
    let (mut routes, mut asked, mut missing) = (Vec::new(), Vec::new(), Vec::new());
    for peer in &spec.peers {
        let to = peer.to.trunc();
        let Some(route) = wanted(spec, peer, overlay) else {
            missing.push(MissingRoute { to, why: Arc::clone(&no_overlay) });
            continue;
        };
        match there.remove(&route.destination) {
            Some(old) if is_the_same(&old, &route) => continue,
            Some(_) => routes.push(route.replace()),
            None => routes.push(route.add()),
        }
        asked.push((to, route.tunnel.is_some()));
    }
    let left: Vec<Request> = there.values().map(Route::remove).collect();
    let left_behind: Vec<Request> = behind.into_iter().map(|to| Route::unreachable_peer(to).remove()).collect();
    let none: &[(IpNet, bool)] = &[];
    let groups = [
        (unreachable, none, false, "datapath/peers/after-unreachable"),
        (routes, asked.as_slice(), false, "datapath/peers/after-routes"),
        (left, none, true, "datapath/peers/after-left"),
        (left_behind, none, true, "datapath/peers/after-left-unreachable"),
    ];
    if groups.iter().all(|(requests, ..)| requests.is_empty()) {
        return Ok(missing);
    }
    crash::point("datapath/peers/before");
    let mut failed = None;
    for (requests, asked, is_removal, point) in groups.into_iter().filter(|(requests, ..)| !requests.is_empty()) {
        for (n, answer) in connection.batch(requests)?.into_iter().enumerate() {
            match answer {
                // The caller reports the missing route: the next hop's link is down, or a foreign route has this
                // destination and metric.
                Err(refusal) if !is_removal && is_of_the_network(&refusal) => {
                    if let Some((to, by_overlay)) = asked.get(n) {
                        let why = match failure {
                            Some(_) if *by_overlay => Arc::clone(&no_overlay),
                            _ => refusal.into_error("set up node", "route to another node").cause.into(),
                        };
                        missing.push(MissingRoute { to: *to, why });
                    }
                }
                Err(refusal) if is_removal && refusal.is(libc::ESRCH) => {}
                Err(refusal) if failed.is_none() => {
                    failed = Some(refusal.into_error("set up node", "routes to other nodes"));
                }
                Err(_) | Ok(_) => {}
            }
        }
        crash::point(point);
    }
    crash::point("datapath/peers/after");
    failed.map_or(Ok(missing), Err)
}

pub(crate) fn remove_all(connection: &mut Connection) -> Result<()> {
    for route in route::to_peers(connection)? {
        remove_route(connection, &route)?;
    }
    for to in unreachable_to(connection)? {
        remove_route(connection, &Route::unreachable_peer(to))?;
    }
    Ok(())
}

fn remove_route(connection: &mut Connection, route: &Route) -> Result<()> {
    match connection.batch(vec![route.remove()])?.pop() {
        Some(Err(refusal)) if !refusal.is(libc::ESRCH) => {
            return Err(refusal.into_error("remove route", route.destination.to_string()));
        }
        _ => {}
    }
    crash::point("datapath/peers/after-removal");
    Ok(())
}

pub(crate) fn remove(peer: &PeerRoute) -> Result<()> {
    let mut connection = Connection::open()?;
    let route = route::to_peers(&mut connection)?.into_iter().find(|route| route.destination == peer.to.trunc());
    route.map_or(Ok(()), |route| remove_route(&mut connection, &route))
}

pub(crate) fn remove_unreachable(to: IpNet) -> Result<()> {
    remove_route(&mut Connection::open()?, &Route::unreachable_peer(to))
}

/// The state of the node's links and routes refuses the route, or the kernel has no IPv6 or no lightweight tunnels: not
/// a defect of the request.
fn is_of_the_network(refusal: &crate::netlink::Refusal) -> bool {
    let of_links = [libc::EEXIST, libc::ENETUNREACH, libc::EHOSTUNREACH, libc::ENETDOWN, libc::EINVAL, libc::ENODEV];
    let of_the_kernel = [libc::EACCES, libc::EOPNOTSUPP, libc::EAFNOSUPPORT];
    of_links.into_iter().chain(of_the_kernel).any(|errno| refusal.is(errno))
}

pub(crate) fn observe(connection: &mut Connection, spec: &NodeSpec) -> Result<Vec<NodeProblem>> {
    let overlay = overlay::ours(connection)?;
    let (mut there, mut behind) = (by_destination(connection)?, unreachable_to(connection)?);
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
        if !behind.remove(&to) {
            wrong.push(NodeProblem::PeerUnreachable { to, expected: true });
        }
    }
    let leftover = there.into_values();
    wrong.extend(leftover.map(|route| NodeProblem::PeerRoute {
        to: route.destination,
        expected: None,
        found: route.next_hop(),
    }));
    wrong.extend(behind.into_iter().map(|to| NodeProblem::PeerUnreachable { to, expected: false }));
    Ok(wrong)
}
