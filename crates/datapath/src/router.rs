//! The router's link: a veth pair whose first end has the router addresses (docs/design/datapath.md, "Objects of the
//! node"). A mark (`IFLA_IFALIAS`) identifies each end after a rename.

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
    ids::IfIndex,
    kernel::{KernelErrorKind, Result},
};
use wharf_crash as crash;

use crate::{
    ROUTER_IFNAME, ROUTER_PEER_IFNAME,
    bpf::clsact,
    error::fail,
    netlink::{
        Connection, address,
        link::{self, LinkSeen},
    },
};

const OPERATION: &str = "set up node";

/// Name and mark.
const ENDS: [(&str, &str); 2] = [(ROUTER_IFNAME, "wharf:router"), (ROUTER_PEER_IFNAME, "wharf:router-peer")];

pub(crate) struct End {
    pub(crate) name: &'static str,
    mark: &'static str,
    named: Option<LinkSeen>,
    marked: Option<LinkSeen>,
}

impl End {
    /// With the mark, else the veth with the name (older versions set no mark).
    pub(crate) fn link(&self) -> Option<&LinkSeen> {
        self.marked.as_ref().or(self.named.as_ref().filter(|l| l.veth))
    }

    pub(crate) fn is_taken(&self) -> bool {
        self.named.as_ref().is_some_and(|named| self.link().is_none_or(|link| link.ifindex != named.ifindex))
    }
}

pub(crate) fn addresses(connection: &mut Connection) -> Result<Vec<IpAddr>> {
    let Some(router) = Pair::find(connection)?.router() else { return Ok(Vec::new()) };
    let there = address::list(connection, router)?;
    Ok(there.into_iter().filter(|a| !a.link_local).map(|a| a.address).collect())
}

pub(crate) struct Pair([End; 2]);

impl Pair {
    /// Lists links only if a name does not lead to the end's mark.
    pub(crate) fn find(connection: &mut Connection) -> Result<Self> {
        let mut ends = ENDS.map(|(name, mark)| End { name, mark, named: None, marked: None });
        for end in &mut ends {
            end.named = link::look_up(connection, end.name)?;
            end.marked = end.named.clone().filter(|l| l.veth && l.alias.as_deref() == Some(end.mark));
        }
        if ends.iter().all(|end| end.marked.is_some()) {
            return Ok(Self(ends));
        }
        for message in link::pairs(connection)? {
            let RouteNetlinkMessage::NewLink(m) = message else { continue };
            let seen = link::read(&m);
            let is_it = |end: &&mut End| seen.veth && end.marked.is_none() && seen.alias.as_deref() == Some(end.mark);
            if let Some(end) = ends.iter_mut().find(is_it) {
                end.marked = Some(seen);
            }
        }
        Ok(Self(ends))
    }

    pub(crate) fn ends(&self) -> &[End; 2] {
        &self.0
    }

    pub(crate) fn router(&self) -> Option<IfIndex> {
        let [router, _] = &self.0;
        router.link().map(|l| l.ifindex)
    }

    pub(crate) fn links(&self) -> impl Iterator<Item = &LinkSeen> {
        self.0.iter().filter_map(End::link)
    }

    fn is_whole(&self) -> bool {
        let [router, peer] = &self.0;
        matches!((router.link(), peer.link()), (Some(r), Some(p)) if r.peer == p.ifindex && p.peer == r.ifindex)
    }

    /// Creates the pair, or restores names, marks and settings. A single end is removed first, with its peer in another
    /// namespace. Returns the index of the router's end.
    pub(crate) fn ensure(&self, connection: &mut Connection, mtu: u32) -> Result<IfIndex> {
        if let Some(end) = self.0.iter().find(|end| end.is_taken()) {
            let cause = "an interface of that name is there and is not Wharf's; rename or remove it";
            return Err(fail(OPERATION, end.name, KernelErrorKind::Conflict, cause));
        }
        if self.is_whole() {
            for end in &self.0 {
                end.rename_back(connection)?;
            }
        } else {
            self.remove_rest(connection)?;
            create(connection, mtu)?;
        }
        crash::point("datapath/node/after-pair");
        let mut steps = Vec::new();
        let mut found = Vec::new();
        for (name, mark) in ENDS {
            let Some(seen) = link::look_up(connection, name)? else {
                return Err(fail(OPERATION, name, KernelErrorKind::NotFound, "it went away as soon as it was made"));
            };
            let settings = LinkUnspec::new_with_index(seen.ifindex.0)
                .mtu(mtu)
                .append_extra_attribute(link::no_generated_addresses())
                .build();
            // Separate: a kernel without IPv6 refuses the next request.
            steps.push((name, false, link::set_mark(seen.ifindex, mark.to_owned())));
            steps.push((name, true, link::set(settings)));
            found.push((name, seen.ifindex));
        }
        steps.push(("lo", false, link::set(LinkUnspec::new_with_name("lo").up().build())));
        steps.extend(found.iter().map(|(name, ifindex)| (*name, false, link::up(*ifindex))));
        let (subjects, requests): (Vec<_>, Vec<_>) =
            steps.into_iter().map(|(subject, of_ipv6, request)| ((subject, of_ipv6), request)).unzip();
        for (answer, (subject, of_ipv6)) in connection.batch(requests)?.into_iter().zip(subjects) {
            match answer {
                Ok(_) => {}
                Err(refusal) if of_ipv6 && refusal.is(libc::EAFNOSUPPORT) => {}
                Err(refusal) => return Err(refusal.into_error(OPERATION, subject)),
            }
        }
        if let Some((name, peer)) = found.last()
            && let Some(Err(refusal)) = connection.batch(vec![clsact::keep_hooks(*peer)])?.pop()
        {
            // Only an optimisation.
            tracing::debug!(ifname = name, error = %refusal.errno, "the hooks are not kept in use");
        }
        match found.first() {
            Some((_, router)) => Ok(*router),
            None => Err(fail(OPERATION, ROUTER_IFNAME, KernelErrorKind::NotFound, "it was not made")),
        }
    }

    fn remove_rest(&self, connection: &mut Connection) -> Result<()> {
        for end in &self.0 {
            let Some(link) = end.link() else { continue };
            if end.marked.is_none() {
                let cause = format!(
                    "the other end of its pair ({ROUTER_IFNAME} and {ROUTER_PEER_IFNAME}) is not in this network \
                     namespace, and it has no mark of Wharf's; remove it (ip link del {}), then restart the agent",
                    link.name
                );
                return Err(fail(OPERATION, &link.name, KernelErrorKind::Conflict, cause));
            }
            remove(connection, link, OPERATION)?;
        }
        Ok(())
    }

    pub(crate) fn remove(&self, connection: &mut Connection) -> Result<()> {
        for link in self.links() {
            remove(connection, link, "remove node")?;
        }
        match self.0.iter().find(|end| end.is_taken()) {
            Some(end) => {
                let cause = "an interface of that name is there and is not Wharf's; it was left alone";
                Err(fail("remove node", end.name, KernelErrorKind::Conflict, cause))
            }
            None => Ok(()),
        }
    }
}

impl End {
    /// Kernels before 6.2 rename only links that are down.
    fn rename_back(&self, connection: &mut Connection) -> Result<()> {
        let Some(link) = self.link().filter(|l| l.name != self.name) else { return Ok(()) };
        let rename = || link::set(LinkUnspec::new_with_index(link.ifindex.0).name(self.name.to_owned()).build());
        let down = || link::set(LinkUnspec::new_with_index(link.ifindex.0).down().build());
        let subject = || format!("{} (now {})", self.name, link.name);
        tracing::warn!(from = link.name, to = self.name, "the router's link was renamed; renaming it back");
        match connection.batch(vec![rename()])?.pop() {
            Some(Err(refusal)) if refusal.is(libc::EBUSY) => {}
            Some(Err(refusal)) => return Err(refusal.into_error("rename link", subject())),
            _ => return Ok(()),
        }
        for answer in connection.batch(vec![down(), rename()])? {
            answer.map_err(|refusal| refusal.into_error("rename link", subject()))?;
        }
        Ok(())
    }
}

fn create(connection: &mut Connection, mtu: u32) -> Result<()> {
    let peer = LinkUnspec::new_with_name(ROUTER_PEER_IFNAME).mtu(mtu).arp(false).build();
    let create = LinkMessageBuilder::<LinkVeth>::new_with_info_kind(InfoKind::Veth)
        .name(ROUTER_IFNAME)
        .mtu(mtu)
        .arp(false)
        .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
        .build();
    match connection.one(RouteNetlinkMessage::NewLink(create), NLM_F_CREATE | NLM_F_EXCL)? {
        // A concurrent call created the pair.
        Err(refusal) if !refusal.is(libc::EEXIST) => Err(refusal.into_error(OPERATION, ROUTER_IFNAME)),
        _ => Ok(()),
    }
}

fn remove(connection: &mut Connection, link: &LinkSeen, operation: &'static str) -> Result<()> {
    match connection.batch(vec![link::delete(link.ifindex)])?.pop() {
        Some(Err(refusal)) if !refusal.is(libc::ENODEV) => Err(refusal.into_error(operation, &link.name)),
        _ => Ok(()),
    }
}
