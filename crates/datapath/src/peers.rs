//! Routes to containers of other nodes. Only routes with [`crate::PEER_PROTOCOL`] and Wharf's metric are changed.

use std::collections::BTreeMap;

use ipnet::IpNet;
use wharf_core::{
    finding::NodeProblem,
    kernel::{PeerRoute, Result},
};
use wharf_crash as crash;

use crate::{
    PEER_PROTOCOL,
    netlink::{
        Connection,
        route::{self, Route},
    },
};

pub(crate) fn list(connection: &mut Connection) -> Result<Vec<Route>> {
    let mut found = route::list(connection, Some(PEER_PROTOCOL))?;
    found.retain(Route::is_to_peer);
    Ok(found)
}

/// Next hops, by destination.
fn next_hops(connection: &mut Connection) -> Result<BTreeMap<IpNet, Route>> {
    Ok(list(connection)?.into_iter().map(|route| (route.destination, route)).collect())
}

/// Exactly these routes. A destination that changes its next hop is replaced, so that no packet finds no route.
pub(crate) fn ensure(connection: &mut Connection, wanted: &[PeerRoute]) -> Result<()> {
    let mut there = next_hops(connection)?;
    let mut requests = Vec::new();
    for peer in wanted {
        let route = Route::to_peer(peer.to, peer.via);
        match there.remove(&peer.to.trunc()) {
            Some(old) if old.gateway == Some(peer.via) => {}
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

/// Succeeds when already gone.
pub(crate) fn remove(peer: &PeerRoute) -> Result<()> {
    let mut connection = Connection::open()?;
    match connection.batch(vec![Route::to_peer(peer.to, peer.via).remove()])?.pop() {
        Some(Err(refusal)) if !refusal.is(libc::ESRCH) => Err(refusal.into_error("remove route", peer.to.to_string())),
        _ => Ok(()),
    }
}

/// The state of the node's links and routes refuses the route, not a defect of the request.
fn is_of_the_network(refusal: &crate::netlink::Refusal) -> bool {
    [libc::EEXIST, libc::ENETUNREACH, libc::EHOSTUNREACH, libc::ENETDOWN, libc::EINVAL, libc::ENODEV, libc::EACCES]
        .into_iter()
        .any(|errno| refusal.is(errno))
}

/// Missing routes, routes with another next hop, and leftovers.
pub(crate) fn observe(connection: &mut Connection, wanted: &[PeerRoute]) -> Result<Vec<NodeProblem>> {
    let mut there = next_hops(connection)?;
    let mut wrong = Vec::new();
    for peer in wanted {
        let (to, expected) = (peer.to.trunc(), Some(peer.via));
        let found = there.remove(&to).and_then(|route| route.gateway);
        if found != expected {
            wrong.push(NodeProblem::PeerRoute { to, expected, found });
        }
    }
    let leftover = there.into_values();
    wrong.extend(leftover.map(|route| NodeProblem::PeerRoute {
        to: route.destination,
        expected: None,
        found: route.gateway,
    }));
    Ok(wrong)
}
