//! Links of another CNI plugin, behind which Wharf is chained. Read only.

use std::{fs::File, os::fd::AsRawFd as _};

use rtnetlink::packet_route::RouteNetlinkMessage;
use wharf_core::{
    endpoint::{EndpointRecord, HooksFound, LinkOwner, NetnsRef, parse_host_ifname},
    finding::{EndpointProblem, Side},
    ids::{EndpointId, IfName},
    kernel::{KernelError, KernelErrorKind, Link, LinkRef, PluginLink, Result},
};
use wharf_names::mark::Mark;

use crate::{
    bpf::{Bpf, Opened, clsact},
    container_side::nsid,
    error::{fail, wrap},
    netlink::{
        Connection, address,
        link::{self, LinkSeen},
    },
    netns::NetnsThread,
};

const FIND: &str = "look at the link of another plugin";

pub(crate) fn find(thread: &NetnsThread, netns: &NetnsRef, ifname: &IfName) -> Result<PluginLink> {
    let subject = || format!("{ifname} in {}", netns.path.display());
    let mut inside = thread.connect(FIND, netns)?;
    let Some(own) = link::look_up(&mut inside, ifname.as_str())? else {
        let cause = "the container has no such interface; the plugin before this one is to make it";
        return Err(fail(FIND, subject(), KernelErrorKind::NotFound, cause));
    };
    let unsuited = |cause: &str| fail(FIND, subject(), KernelErrorKind::Unsupported, cause);
    let node = File::open("/proc/thread-self/ns/net").map_err(|e| wrap(FIND, subject(), &e))?;
    if !own.veth || own.peer_netns.is_none() || own.peer_netns != nsid(&mut inside, node.as_raw_fd())? {
        return Err(unsuited(
            "it is no veth whose other end is in the node's network namespace; only behind a plugin that makes such a link (ptp, bridge) \
             can programs be attached",
        ));
    }
    let mut host = Connection::open()?;
    let other = link::look_up_index(&mut host, own.peer)?.filter(|other| other.veth && other.peer == own.ifindex);
    let Some(other) = other else { return Err(unsuited("its other end is not to be found on the node")) };
    if parse_host_ifname(&other.name).is_some() || other.alias.as_deref().and_then(Mark::parse).is_some() {
        let cause = format!("its other end {} is Wharf's own; name wharf-cni once in the list of plugins", other.name);
        return Err(fail(FIND, subject(), KernelErrorKind::Conflict, cause));
    }
    let host_ifname = IfName::parse(&other.name).map_err(|e| unsuited(&format!("its other end: {e}")))?;
    let (Some(container_mac), Some(host_mac)) = (own.mac, other.mac) else {
        return Err(unsuited("it has no MAC address"));
    };
    Ok(PluginLink {
        link: Link { host_ifindex: other.ifindex, container_ifindex: own.ifindex },
        host_ifname,
        host_mac,
        container_mac,
        mtu: own.mtu,
        addresses: address::list(&mut inside, own.ifindex)?.into_iter().map(|a| a.address).collect(),
        hooks: clsact::found(&mut host, other.ifindex)?,
    })
}

pub(crate) fn taken() -> Result<Vec<LinkRef>> {
    let mut host = Connection::open()?;
    let mut taken = Vec::new();
    for message in link::pairs(&mut host)? {
        let RouteNetlinkMessage::NewLink(message) = message else { continue };
        let seen = link::read(&message);
        let is_ours = parse_host_ifname(&seen.name).is_some() || seen.alias.as_deref().and_then(Mark::parse).is_some();
        if !seen.veth || is_ours {
            continue;
        }
        let Some((id, epoch)) = clsact::owner_on(&mut host, seen.ifindex)? else { continue };
        let (Ok(id), Ok(host_ifname)) = (EndpointId::try_from(id), IfName::parse(&seen.name)) else { continue };
        let owner = LinkOwner::Plugin { hooks: HooksFound::Closed };
        taken.push(LinkRef { id, epoch, host_ifname, host_ifindex: Some(seen.ifindex), container: None, owner });
    }
    Ok(taken)
}

pub(crate) fn is_same(thread: &NetnsThread, record: &EndpointRecord) -> Result<()> {
    let seen = find(thread, &record.netns, &record.attachment.ifname)?;
    let same = seen.link.host_ifindex == record.host_ifindex && seen.link.container_ifindex == record.container_ifindex;
    if same { Ok(()) } else { Err(replaced(record, &seen)) }
}

fn replaced(record: &EndpointRecord, seen: &PluginLink) -> KernelError {
    let (id, ifname) = (record.id, &record.attachment.ifname);
    let cause = format!(
        "expected index {} and the other end {} (index {}), found index {} and {} (index {})",
        record.container_ifindex,
        record.host_ifname,
        record.host_ifindex,
        seen.link.container_ifindex,
        seen.host_ifname,
        seen.link.host_ifindex
    );
    fail(FIND, format!("{ifname} (endpoint {id}, epoch {})", record.epoch), KernelErrorKind::NotFound, cause)
}

fn observe_up(seen: &LinkSeen, side: Side, problems: &mut Vec<EndpointProblem>) {
    if !seen.up {
        let what = "expected up, is down".to_owned();
        problems.push(EndpointProblem::PluginLink { side, name: seen.name.clone(), what });
    }
}

pub(crate) fn observe_host(
    host: &mut Connection,
    record: &EndpointRecord,
    bpf: &Bpf,
    opened: &Opened,
    problems: &mut Vec<EndpointProblem>,
) -> Result<()> {
    let (side, name) = (Side::Node, record.host_ifname.to_string());
    // By index: the plugin may rename it.
    let Some(seen) = link::look_up_index(host, record.host_ifindex)? else {
        let expected = record.host_ifindex;
        problems.push(match link::look_up(host, &name)? {
            Some(other) => EndpointProblem::LinkReplaced { side, name, expected, found: other.ifindex },
            None => EndpointProblem::LinkMissing { side, name },
        });
        return Ok(());
    };
    observe_up(&seen, side, problems);
    bpf.observe_hooks(host, seen.ifindex, record, opened, problems)
}

pub(crate) fn observe_container(
    mut inside: Connection,
    seen: &LinkSeen,
    record: &EndpointRecord,
    problems: &mut Vec<EndpointProblem>,
) -> Result<()> {
    let (side, name) = (Side::Container, record.attachment.ifname.to_string());
    if seen.ifindex != record.container_ifindex {
        let (expected, found) = (record.container_ifindex, seen.ifindex);
        problems.push(EndpointProblem::LinkReplaced { side, name, expected, found });
        return Ok(());
    }
    observe_up(seen, side, problems);
    if seen.mac != Some(record.container_mac) {
        let found = seen.mac.map_or_else(|| "none".to_owned(), |mac| mac.to_string());
        let what = format!("MAC: expected {}, found {found}, from which everything is dropped", record.container_mac);
        problems.push(EndpointProblem::PluginLink { side, name: name.clone(), what });
    }
    let addresses = address::list(&mut inside, seen.ifindex)?;
    for address in record.addresses().filter(|wanted| addresses.iter().all(|a| a.address != *wanted)) {
        let what = format!("address {address}: expected, is not there");
        problems.push(EndpointProblem::PluginLink { side, name: name.clone(), what });
    }
    Ok(())
}
