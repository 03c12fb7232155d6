//! The fake's endpoints.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use async_trait::async_trait;
use wharf_core::{
    endpoint::{EndpointRecord, HooksFound, LinkOwner, NetnsRef},
    finding::EndpointProblem,
    ids::{EndpointId, IfIndex, IfName},
    kernel::{
        Attached, ConfigSpec, CounterRow, EndpointKernel, KernelError, KernelErrorKind, Link, LinkRef, LinkRelease,
        LinkSpec, MIN_MTU, PluginLink, ProgramSpec, Programs, Result,
    },
    selfcheck::{Case, CaseResult},
};

use super::{
    FakeKernel, Operation,
    kernel::{endpoint, not_found},
    observe, selfcheck,
    state::{Hook, HostSide, Inside, Pinned, State, host_net},
};
use crate::{error::fail, netlink::link};

/// The name suffices only for Wharf's links.
fn is_of(seen: &HostSide, link: &LinkRef) -> bool {
    link.host_ifindex.map_or(link.owner.is_wharf(), |wanted| wanted == seen.ifindex)
}

fn write_rows(state: &mut State, operation: Operation, record: &EndpointRecord) -> Result<()> {
    let Some(pinned) = state.pins.get(&record.id) else {
        return Err(not_found(operation, endpoint(record.id), "its programs are not pinned"));
    };
    state.calls.insert(record.id, pinned.program_ids[2]);
    state.rows.extend(record.addresses().map(|address| (address, observe::table_row(record, address))));
    Ok(())
}

#[async_trait]
impl EndpointKernel for FakeKernel {
    async fn observe_netns(&self, path: &Path) -> Result<NetnsRef> {
        self.call(Operation::ObserveNetns, path.display().to_string(), |s| {
            if let Some(ns) = s.namespaces.get(path) {
                return Ok(ns.identity.clone());
            }
            let subject = path.display().to_string();
            if s.plain_files.contains(path) {
                let cause = "not a network namespace";
                return Err(fail("open network namespace", subject, KernelErrorKind::NotANetns, cause));
            }
            Err(not_found(Operation::ObserveNetns, subject, "no such file"))
        })
        .await
    }

    async fn ensure_programs(&self, spec: &ProgramSpec) -> Result<Programs> {
        let spec = spec.clone();
        self.change(Operation::EnsurePrograms, endpoint(spec.id), move |s| {
            if let Some(old) = s.pins.get(&spec.id).filter(|p| spec.keep && p.is_of(&spec)) {
                return Ok(Programs { program_ids: old.program_ids, map_ids: old.map_ids });
            }
            let program_ids = [s.fresh(), s.fresh(), s.fresh()];
            let map_ids = match s.pins.get(&spec.id) {
                Some(old) => old.map_ids,
                None => [s.fresh(), s.fresh(), s.fresh()],
            };
            match s.pins.get_mut(&spec.id) {
                Some(old) => (old.program_ids, old.spec) = (program_ids, spec.clone()),
                None => {
                    let counters = Vec::new();
                    let new = Pinned { spec: spec.clone(), program_ids, map_ids, config: None, counters, links: false };
                    s.pins.insert(spec.id, new);
                }
            }
            Ok(Programs { program_ids, map_ids })
        })
        .await
    }

    async fn ensure_link(&self, spec: &LinkSpec) -> Result<Link> {
        let spec = spec.clone();
        self.change(Operation::EnsureLink, endpoint(spec.id), move |s| {
            let host = spec.host_ifname.as_str();
            let name = spec.ifname.as_str();
            let mark = link::mark(spec.id, spec.epoch, &spec.attachment);
            let same = |l: &HostSide| {
                l.inode == spec.netns.inode
                    && l.container_ifname == spec.ifname
                    && l.container_mac == spec.container_mac
                    && l.host_mac == spec.host_mac
                    && l.mtu == spec.mtu
                    && (l.alias.as_ref() == Some(&mark)
                        || link::has_short_mark(l.alias.as_deref(), spec.id, spec.epoch))
            };
            let container_lives = s.netns(&spec.netns).is_some();
            if let Some(l) = s.links.get_mut(host)
                && same(l)
                && container_lives
            {
                l.alias = Some(mark);
                return Ok(Link { host_ifindex: l.ifindex, container_ifindex: l.container_ifindex });
            }
            s.remove_link_named(host);
            let (host_ifindex, container_ifindex) = (IfIndex(s.fresh()), IfIndex(s.fresh()));
            let Some(ns) = s.netns_mut(&spec.netns) else {
                let subject = spec.netns.path.display().to_string();
                return Err(not_found(Operation::EnsureLink, subject, "the namespace is gone"));
            };
            if ns.interfaces.contains_key(name) {
                let cause = format!("the container already has an interface {name}");
                return Err(fail("create link", endpoint(spec.id), KernelErrorKind::Exists, cause));
            }
            let inside = Inside {
                ifindex: container_ifindex,
                host: Some(spec.host_ifname.clone()),
                up: false,
                addresses: BTreeSet::new(),
            };
            ns.interfaces.insert(name.to_owned(), inside);
            s.links.insert(
                host.to_owned(),
                HostSide {
                    ifindex: host_ifindex,
                    container_ifindex,
                    container_ifname: spec.ifname.clone(),
                    inode: spec.netns.inode,
                    container_mac: spec.container_mac,
                    host_mac: spec.host_mac,
                    mtu: spec.mtu,
                    alias: Some(mark),
                    up: false,
                    arp: false,
                    container_mtu: spec.mtu,
                    attached: None,
                    attached_by: None,
                    plugin: false,
                },
            );
            Ok(Link { host_ifindex, container_ifindex })
        })
        .await
    }

    async fn observe_plugin_link(&self, netns: &NetnsRef, ifname: &IfName) -> Result<PluginLink> {
        let (netns, ifname) = (netns.clone(), ifname.clone());
        self.call(Operation::ObservePluginLink, netns.path.display().to_string(), |s| {
            let subject = || format!("{ifname} in {}", netns.path.display());
            let missing = || not_found(Operation::ObservePluginLink, subject(), "no such interface");
            let inside = s.netns(&netns).and_then(|ns| ns.interfaces.get(ifname.as_str())).ok_or_else(missing)?;
            let host = inside.host.as_ref().and_then(|host| Some((host, s.links.get(host.as_str())?)));
            let Some((host_ifname, host)) = host.filter(|(_, l)| l.plugin) else {
                return Err(fail(
                    "look at link",
                    subject(),
                    KernelErrorKind::Unsupported,
                    "it is no veth of a plugin's",
                ));
            };
            Ok(PluginLink {
                link: Link { host_ifindex: host.ifindex, container_ifindex: host.container_ifindex },
                host_ifname: host_ifname.clone(),
                host_mac: host.host_mac,
                container_mac: host.container_mac,
                mtu: host.container_mtu,
                addresses: inside.addresses.iter().copied().collect(),
                hooks: if host.attached.is_some() { HooksFound::Closed } else { HooksFound::None },
            })
        })
        .await
    }

    async fn observe_plugin_links(&self) -> Result<Vec<LinkRef>> {
        self.call(Operation::ObservePluginLinks, "node".to_owned(), |s| {
            let taken = |(name, l): (&String, &HostSide)| {
                let (id, epoch) = l.attached_by.filter(|_| l.plugin && l.attached.is_some())?;
                let owner = LinkOwner::Plugin { hooks: HooksFound::Closed };
                let (host_ifname, host_ifindex) = (IfName::parse(name).ok()?, Some(l.ifindex));
                Some(LinkRef { id, epoch, host_ifname, host_ifindex, container: None, owner })
            };
            Ok(s.links.iter().filter_map(taken).collect())
        })
        .await
    }

    async fn remove_from_plugin_link(&self, link: &LinkRef) -> Result<()> {
        let link = link.clone();
        self.change(Operation::RemoveFromPluginLink, endpoint(link.id), move |s| {
            let owner = Some((link.id, link.epoch));
            let known = s.links.get_mut(link.host_ifname.as_str());
            if let Some(host) = known.filter(|l| link.host_ifindex == Some(l.ifindex) && l.attached_by == owner) {
                let is_closed = link.owner == LinkOwner::Plugin { hooks: HooksFound::Closed };
                host.attached = is_closed.then_some(Hook::Sink);
            }
            Ok(())
        })
        .await
    }

    async fn ensure_config(&self, id: EndpointId, spec: &ConfigSpec) -> Result<()> {
        let spec = spec.clone();
        self.change(Operation::EnsureConfig, endpoint(id), move |s| match s.pins.get_mut(&id) {
            Some(pinned) => {
                pinned.config = Some(spec.clone());
                Ok(())
            }
            None => Err(not_found(Operation::EnsureConfig, endpoint(id), "its maps are not pinned")),
        })
        .await
    }

    async fn ensure_attached(&self, link: &LinkRef) -> Result<Attached> {
        let link = link.clone();
        self.change(Operation::EnsureAttached, endpoint(link.id), move |s| {
            let Some(pinned) = s.pins.get_mut(&link.id) else {
                return Err(not_found(Operation::EnsureAttached, endpoint(link.id), "its programs are not pinned"));
            };
            let Some(host) = s.links.get_mut(link.host_ifname.as_str()).filter(|l| is_of(l, &link)) else {
                return Err(not_found(Operation::EnsureAttached, link.host_ifname.to_string(), "the link is gone"));
            };
            let before = host.attached.replace(Hook::Programs(pinned.program_ids[0]));
            host.attached_by = Some((link.id, link.epoch));
            pinned.links = link.owner.is_wharf();
            if let Some(slot) = s.calls.get_mut(&link.id) {
                *slot = pinned.program_ids[2];
            }
            Ok(if before.is_some() { Attached::Replaced } else { Attached::New })
        })
        .await
    }

    async fn ensure_connected(&self, record: &EndpointRecord) -> Result<()> {
        let record = record.clone();
        self.change(Operation::EnsureConnected, endpoint(record.id), move |s| {
            let gone = |what: &str| Err(not_found(Operation::EnsureConnected, endpoint(record.id), what));
            if s.links.get(record.host_ifname.as_str()).is_none_or(|l| l.ifindex != record.host_ifindex) {
                return gone("the link is gone");
            }
            let Some(ns) = s.netns_mut(&record.netns) else { return gone("the namespace is gone") };
            let Some(inside) = ns
                .interfaces
                .get_mut(record.attachment.ifname.as_str())
                .filter(|i| i.host.as_ref() == Some(&record.host_ifname))
            else {
                return gone("the container's side of the link is gone");
            };
            if !record.link_owner.is_wharf() {
                return Ok(());
            }
            inside.up = true;
            inside.addresses.extend(record.addresses());
            let has_row = |address| s.rows.get(&address) == Some(&observe::table_row(&record, address));
            if !record.addresses().all(has_row) {
                let other = |e| KernelError { kind: KernelErrorKind::Other, ..e };
                write_rows(s, Operation::EnsureConnected, &record).map_err(other)?;
            }
            if let Some(host) = s.links.get_mut(record.host_ifname.as_str()) {
                host.up = true;
                (host.host_mac, host.mtu, host.arp) = (record.host_mac, record.mtu, false);
                host.container_mac = record.container_mac;
                if !(MIN_MTU..=record.mtu).contains(&host.container_mtu) {
                    host.container_mtu = record.mtu;
                }
                host.alias = Some(link::mark(record.id, record.epoch, &record.attachment));
            }
            for address in record.addresses() {
                s.routes.insert(host_net(address), Some(record.host_ifindex));
            }
            Ok(())
        })
        .await
    }

    async fn ensure_mtu(&self, record: &EndpointRecord, mtu: u32) -> Result<Option<u32>> {
        let record = record.clone();
        self.change(Operation::EnsureMtu, endpoint(record.id), move |s| {
            let Some(link) = s.links.get_mut(record.host_ifname.as_str()) else { return Ok(record.container_mtu) };
            let own;
            link.mtu = mtu;
            (link.container_mtu, own) = record.container_mtu_of(link.container_mtu, mtu);
            Ok(own)
        })
        .await
    }

    async fn ensure_reachable(&self, record: &EndpointRecord) -> Result<()> {
        let record = record.clone();
        self.change(Operation::EnsureReachable, endpoint(record.id), move |s| {
            write_rows(s, Operation::EnsureReachable, &record)?;
            if s.masquerade.is_some() {
                s.nat.extend(record.nat_entries());
                s.published.extend(record.nat_entries());
            }
            Ok(())
        })
        .await
    }

    async fn remove_reachable(&self, record: &EndpointRecord) -> Result<()> {
        let record = record.clone();
        self.change(Operation::RemoveReachable, endpoint(record.id), move |s| {
            for entry in record.nat_entries() {
                s.nat.remove(&entry);
                s.published.remove(&entry);
            }
            for address in record.addresses() {
                if s.rows.get(&address).is_some_and(|r| r.epoch == record.epoch) {
                    s.rows.remove(&address);
                }
            }
            if s.config_epoch(record.id).is_none_or(|e| e <= record.epoch) {
                s.calls.remove(&record.id);
            }
            Ok(())
        })
        .await
    }

    async fn remove_attached(&self, link: &LinkRef) -> Result<()> {
        let link = link.clone();
        self.change(Operation::RemoveAttached, endpoint(link.id), move |s| {
            let known = s.links.get_mut(link.host_ifname.as_str());
            if let Some(host) = known.filter(|l| is_of(l, &link)) {
                host.attached = Some(Hook::Sink);
                host.attached_by = Some((link.id, link.epoch));
                if let Some(pinned) = s.pins.get_mut(&link.id) {
                    pinned.links = false;
                }
            }
            Ok(())
        })
        .await
    }

    async fn remove_programs(&self, id: EndpointId) -> Result<Vec<CounterRow>> {
        self.change(Operation::RemovePrograms, endpoint(id), move |s| {
            Ok(s.pins.remove(&id).map(|p| p.counters).unwrap_or_default())
        })
        .await
    }

    async fn unlist_link(&self, link: &LinkRef) -> Result<LinkRelease> {
        let (kernel, link) = (self.clone(), link.clone());
        let subject = endpoint(link.id);
        self.change(Operation::RemoveLink, subject.clone(), move |s| {
            if link.owner.is_wharf() {
                s.remove_link_named(link.host_ifname.as_str());
            }
            Ok(())
        })
        .await?;
        Ok(Box::pin(async move { kernel.change(Operation::ReleaseLink, subject, |_| Ok(())).await }))
    }

    async fn observe_endpoints(&self, records: &[EndpointRecord]) -> Result<Vec<Vec<EndpointProblem>>> {
        let mut found = Vec::with_capacity(records.len());
        for record in records {
            let look = |s: &mut _| Ok(observe::endpoint_problems(s, record));
            found.push(self.call(Operation::ObserveEndpoint, endpoint(record.id), look).await?);
        }
        Ok(found)
    }

    async fn observe_missing(&self, links: &[LinkRef]) -> Result<Vec<EndpointId>> {
        self.call(Operation::ObserveMissing, format!("{} links", links.len()), |s| {
            let is_there = |link: &LinkRef| {
                let seen = s.links.get(link.host_ifname.as_str());
                seen.is_some_and(|seen| is_of(seen, link))
            };
            Ok(links.iter().filter(|link| !is_there(link)).map(|link| link.id).collect())
        })
        .await
    }

    async fn observe_counters(&self, id: EndpointId) -> Result<Vec<CounterRow>> {
        self.call(Operation::ObserveCounters, endpoint(id), |s| match s.pins.get(&id) {
            Some(pinned) => Ok(pinned.counters.clone()),
            None => Err(not_found(Operation::ObserveCounters, endpoint(id), "its maps are not pinned")),
        })
        .await
    }

    async fn observe_verdicts(&self, checks: &[(EndpointId, Arc<[Case]>)]) -> Result<Vec<Result<Vec<CaseResult>>>> {
        let mut results = Vec::with_capacity(checks.len());
        for (id, cases) in checks {
            let gone = || not_found(Operation::ObserveVerdicts, endpoint(*id), "its maps are not pinned");
            let look = |s: &mut _| selfcheck::verdicts(s, *id, cases).ok_or_else(gone);
            results.push(self.call(Operation::ObserveVerdicts, endpoint(*id), look).await);
        }
        Ok(results)
    }
}
