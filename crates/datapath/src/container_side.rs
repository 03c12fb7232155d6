//! Deletion of a pair by the container's side, when the node does not see the host side's namespace.

use std::{
    fs::File,
    os::fd::{AsRawFd, RawFd},
};

use rtnetlink::packet_route::{
    RouteNetlinkMessage,
    nsid::{NsidAttribute, NsidMessage},
};
use wharf_core::kernel::{ContainerSide, KernelErrorKind, Result};

use crate::{
    error::wrap,
    netlink::{Connection, link},
    netns::NetnsThread,
};

const OPERATION: &str = "remove link by the container's side";

/// Deletes the pair if namespace, index and MAC address are the recorded ones. Keeps a link whose peer is in the node's
/// namespace: its name and mark named another endpoint.
pub(crate) fn remove(thread: &NetnsThread, side: &ContainerSide) -> Result<()> {
    let subject = || format!("index {} in {}", side.ifindex, side.netns.path.display());
    let mut inside = match thread.connect(OPERATION, &side.netns) {
        Ok(inside) => inside,
        Err(e) if matches!(e.kind, KernelErrorKind::NotFound | KernelErrorKind::NotANetns) => return Ok(()),
        Err(e) => return Err(e),
    };
    let Some(seen) = link::look_up_index(&mut inside, side.ifindex)? else { return Ok(()) };
    if !seen.pair || seen.mac != Some(side.mac) {
        return Ok(());
    }
    let node = File::open("/proc/thread-self/ns/net").map_err(|e| wrap(OPERATION, subject(), &e))?;
    if seen.peer_netns.is_some() && seen.peer_netns == nsid(&mut inside, node.as_raw_fd())? {
        return Ok(());
    }
    tracing::warn!(link = seen.name, netns = %side.netns.path.display(), "the host side was moved to another network namespace");
    match inside.batch(vec![link::delete(side.ifindex)])?.pop() {
        Some(Err(refusal)) if !refusal.is(libc::ENODEV) => Err(refusal.into_error(OPERATION, subject())),
        _ => Ok(()),
    }
}

pub(crate) fn nsid(connection: &mut Connection, netns: RawFd) -> Result<Option<i32>> {
    let subject = "the node's network namespace";
    let fd = u32::try_from(netns).map_err(|e| wrap(OPERATION, subject, &e))?;
    let mut question = NsidMessage::default();
    question.attributes.push(NsidAttribute::Fd(fd));
    let messages = connection
        .one(RouteNetlinkMessage::GetNsId(question), 0)?
        .map_err(|refusal| refusal.into_error(OPERATION, subject))?;
    Ok(messages.iter().find_map(|m| match m {
        RouteNetlinkMessage::NewNsId(m) => m.attributes.iter().find_map(|a| match a {
            NsidAttribute::Id(id) if *id >= 0 => Some(*id),
            _ => None,
        }),
        _ => None,
    }))
}
