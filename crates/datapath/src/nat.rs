//! The nftables table and the forwarding settings.

use std::{
    collections::{BTreeSet, HashSet},
    net::IpAddr,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use ipnet::IpNet;
use wharf_core::{
    endpoint::EndpointRecord,
    finding::{EndpointProblem, NodeProblem},
    kernel::{ForeignChain, KernelError, KernelErrorKind, NatView, NodeSpec, Result},
    nat::{Masquerade, Nat as Desired, NatEntry, PortMapping},
};

use crate::{
    forwarding::{Families, Forwarding, dotted, set},
    mtu,
    netlink::{
        Connection, address,
        conntrack::{self, Published},
        nft::{Ensured, Nft, Table},
    },
};

fn is_none_of_ours(error: &KernelError) -> bool {
    matches!(error.kind, KernelErrorKind::Unsupported | KernelErrorKind::Conflict)
}

pub(crate) struct Nat {
    nft: Nft,
    forwarding: Forwarding,
    /// Locked while the table changes, so that a rewrite neither misses a port nor keeps a withdrawn one. Only on
    /// threads that may block.
    ports: Mutex<Ports>,
}

#[derive(Default)]
struct Ports {
    masquerade: Option<Masquerade>,
    redirects: bool,
    /// Since this process began.
    published: BTreeSet<NatEntry>,
    /// Tracked flows may predate a change of the table.
    unlooked: bool,
}

impl Ports {
    fn desired(&self) -> Desired {
        let entries = Desired::with_entries(self.masquerade.clone(), self.published.iter().copied());
        Desired { redirects: self.redirects, ..entries }
    }
}

fn families(cidrs: &[IpNet]) -> Families {
    let has = |ipv4| cidrs.iter().any(|cidr| cidr.addr().is_ipv4() == ipv4);
    Families { ipv4: has(true), ipv6: has(false) }
}

fn absent_sources(masquerade: &Masquerade) -> Result<Vec<NodeProblem>> {
    let chosen = masquerade.source4.map(IpAddr::V4).into_iter().chain(masquerade.source6.map(IpAddr::V6));
    let chosen: Vec<IpAddr> = chosen.collect();
    if chosen.is_empty() {
        return Ok(Vec::new());
    }
    let there = address::list_all(&mut Connection::open()?)?;
    let absent = chosen.into_iter().filter(|ip| !there.iter().any(|(_, is)| is == ip));
    let problem = |ip| NodeProblem::Outbound {
        what: format!("address {ip} of --masquerade-source"),
        cause: "no interface of the node has it: answers to it do not come back".to_owned(),
        repairable: false,
    };
    Ok(absent.map(problem).collect())
}

fn forget_stale_flows(entries: impl IntoIterator<Item = NatEntry>, pools: &[IpNet]) -> Result<()> {
    let (mut mappings, mut own) = (Vec::new(), HashSet::new());
    for entry in entries {
        match entry {
            NatEntry::Port(mapping) => mappings.push(mapping),
            NatEntry::Own(ip) => drop(own.insert(ip)),
        }
    }
    if mappings.is_empty() && own.is_empty() {
        return Ok(());
    }
    let mut node: HashSet<_> = address::list_all(&mut Connection::open()?)?.into_iter().map(|(_, ip)| ip).collect();
    node.extend(mappings.iter().filter_map(|mapping: &PortMapping| mapping.host_ip));
    conntrack::remove_stale(&Published { mappings: &mappings, own: &own, node: &node, pools }).map(drop)
}

impl Nat {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { nft: Nft::default(), forwarding: Forwarding::new(run_dir), ports: Mutex::default() }
    }

    fn ports(&self) -> MutexGuard<'_, Ports> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn ensure_redirects(&self, wanted: bool) -> Result<()> {
        let mut ports = self.ports();
        ports.redirects = wanted;
        if !wanted && ports.masquerade.is_none() {
            return self.nft.remove().map(drop);
        }
        let ensured = self.nft.ensure_around(&ports.desired());
        ports.unlooked |= ensured.as_ref().is_ok_and(|done| *done != Ensured::Unchanged);
        ensured.map(drop)
    }

    /// Without masquerading the settings are restored, and the table stays only for redirects.
    pub(crate) fn ensure(&self, spec: &NodeSpec) -> Result<()> {
        let table = {
            let mut ports = self.ports();
            ports.masquerade.clone_from(&spec.masquerade);
            ports.redirects = spec.redirects;
            // Before forwarding: no packet may leave with a container's address.
            if ports.masquerade.is_some() || ports.redirects {
                let ensured = self.nft.ensure_around(&ports.desired());
                ports.unlooked |= ensured.as_ref().is_ok_and(|done| *done != Ensured::Unchanged);
                ensured.map(drop)
            } else {
                Ok(())
            }
        };
        self.look_for_stale_flows();
        let Some(masquerade) = &spec.masquerade else {
            return if spec.redirects { table.and(self.forwarding.take_back()) } else { self.remove() };
        };
        // Also without nf_tables: containers reach each other by the stack.
        self.forwarding.ensure(families(&masquerade.pools))?;
        table
    }

    pub(crate) fn publish(&self, record: &EndpointRecord) -> Result<()> {
        let entries = record.nat_entries();
        if entries.is_empty() {
            return Ok(());
        }
        let mut ports = self.ports();
        if ports.masquerade.is_none() {
            return Ok(());
        }
        let new: Vec<_> = entries.iter().copied().filter(|entry| ports.published.insert(*entry)).collect();
        let mut added = self.nft.add(&entries);
        if added.as_ref().is_err_and(|e| e.kind == KernelErrorKind::NotFound) {
            added = self.nft.ensure_around(&ports.desired()).map(drop);
        }
        if let Err(e) = added {
            ports.published.retain(|entry| !new.contains(entry));
            return Err(e);
        }
        // The controller scans a large table later, once for all endpoints.
        ports.unlooked = true;
        drop(ports);
        if conntrack::is_small() {
            self.look_for_stale_flows();
        }
        let by_loopback = |m: &PortMapping| m.container.is_ipv4() && m.host_ip.is_none_or(|ip| ip.is_loopback());
        if record.mappings().iter().any(by_loopback) {
            // The link's removal removes the setting.
            set(&format!("ipv4/conf/{}/route_localnet", record.host_ifname), "1")?;
        }
        Ok(())
    }

    fn look_for_stale_flows(&self) {
        let (entries, pools) = {
            let mut ports = self.ports();
            if !std::mem::take(&mut ports.unlooked) {
                return;
            }
            (ports.published.clone(), ports.masquerade.as_ref().map(|m| m.pools.clone()).unwrap_or_default())
        };
        // The controller retries.
        if let Err(e) = forget_stale_flows(entries, &pools) {
            self.ports().unlooked = true;
            tracing::warn!("flows of containers may go on to where they went before: {e}");
        }
    }

    pub(crate) fn unpublish(&self, record: &EndpointRecord) -> Result<()> {
        let entries = record.nat_entries();
        if entries.is_empty() {
            return Ok(());
        }
        let mut ports = self.ports();
        ports.published.retain(|entry| !entries.contains(entry));
        self.take_back(&entries)
    }

    pub(crate) fn forget(&self, wanted: impl Fn(&NatEntry) -> bool) -> Result<()> {
        let ports = self.ports();
        let all: Vec<_> = self.there()?.into_iter().flatten().filter(&wanted).collect();
        let strays: Vec<_> = all.into_iter().filter(|entry| !ports.published.contains(entry)).collect();
        if strays.is_empty() { Ok(()) } else { self.take_back(&strays) }
    }

    /// Entries of no endpoint. Empty if unreadable.
    pub(crate) fn strays(&self) -> Vec<NatEntry> {
        let ports = self.ports();
        let there = self.there().ok().flatten().unwrap_or_default();
        there.into_iter().filter(|entry| !ports.published.contains(entry)).collect()
    }

    pub(crate) fn missing(&self, records: &[EndpointRecord]) -> Result<Vec<Vec<EndpointProblem>>> {
        let wanted: Vec<_> = records.iter().map(EndpointRecord::nat_entries).collect();
        if wanted.iter().all(Vec::is_empty) {
            return Ok(wanted.iter().map(|_| Vec::new()).collect());
        }
        let ports = self.ports();
        let there = if ports.masquerade.is_some() { self.there()? } else { None };
        let lacks = |entry: &NatEntry| there.as_ref().is_some_and(|there| !there.contains(entry));
        let problems = |entries: Vec<NatEntry>| {
            entries.into_iter().filter(lacks).map(|entry| EndpointProblem::Nat { entry }).collect()
        };
        Ok(wanted.into_iter().map(problems).collect())
    }

    fn there(&self) -> Result<Option<BTreeSet<NatEntry>>> {
        match self.nft.look() {
            Ok(table) => Ok(table.map(|table| table.entries())),
            Err(e) if is_none_of_ours(&e) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn take_back(&self, entries: &[NatEntry]) -> Result<()> {
        match self.nft.take_back(entries) {
            Err(e) if !is_none_of_ours(&e) => Err(e),
            _ => Ok(()),
        }
    }

    pub(crate) fn observe(&self, spec: &NodeSpec) -> NatView {
        let mut view = NatView::default();
        let unseen = |e: KernelError| NodeProblem::Outbound { what: e.subject, cause: e.cause, repairable: false };
        match self.forwarding.changed() {
            Ok(changed) => view.changed.extend(changed.keys().map(|path| dotted(path))),
            Err(e) => view.problems.push(unseen(e)),
        }
        if spec.masquerade.is_some() || spec.redirects {
            view.problems.extend(self.table_problems(spec));
        }
        let Some(masquerade) = &spec.masquerade else {
            if spec.local_by_stack {
                let seen = self.forwarding.observe(families(&spec.cidrs), false);
                view.problems.extend(seen.unwrap_or_else(|e| vec![unseen(e)]));
                view.foreign = self.foreign(spec);
            }
            return view;
        };
        let seen = self.forwarding.observe(families(&masquerade.pools), true);
        view.problems.extend(seen.unwrap_or_else(|e| vec![unseen(e)]));
        view.problems.extend(absent_sources(masquerade).unwrap_or_else(|e| vec![unseen(e)]));
        view.tracked = conntrack::fill();
        view.foreign = self.foreign(spec);
        view
    }

    fn table_problems(&self, spec: &NodeSpec) -> Vec<NodeProblem> {
        let table = |cause, repairable| NodeProblem::Outbound {
            what: "nftables table inet wharf".to_owned(),
            cause,
            repairable,
        };
        let desired =
            |entries| Desired { redirects: spec.redirects, ..Desired::with_entries(spec.masquerade.clone(), entries) };
        let differences = |seen: Option<Table>| seen.map(|t| t.differences(&desired(t.entries()))).transpose();
        match self.nft.look().and_then(differences) {
            Ok(Some(differences)) => differences.into_iter().map(|cause| table(cause, true)).collect(),
            Ok(None) => {
                let lost = if spec.masquerade.is_some() {
                    "containers reach no other network"
                } else {
                    "redirected connections do not reach the proxy"
                };
                vec![table(format!("expected, is not there: {lost}"), true)]
            }
            Err(e) => vec![table(e.cause, false)],
        }
    }

    /// Empty if unreadable.
    fn foreign(&self, spec: &NodeSpec) -> Vec<ForeignChain> {
        let published = self.ports().published.iter().any(|entry| matches!(entry, NatEntry::Port(_)));
        let uplinks = mtu::uplinks().unwrap_or_default();
        let uplink = if let [one] = uplinks.as_slice() { Some(one.ifname.as_str()) } else { None };
        self.nft.refusing_forward_chains(&spec.cidrs, published, uplink).unwrap_or_default()
    }

    pub(crate) fn remove(&self) -> Result<()> {
        match self.nft.remove() {
            Err(e) if e.kind != KernelErrorKind::Unsupported => return Err(e),
            _ => {}
        }
        self.forwarding.take_back()
    }
}
