//! What the node does for packets that leave it: its nftables table, and forwarding.

use std::{
    collections::BTreeSet,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use wharf_core::{
    endpoint::EndpointRecord,
    finding::{EndpointProblem, NodeProblem},
    kernel::{KernelError, KernelErrorKind, NatView, NodeSpec, Result},
    nat::{Masquerade, Nat as Desired, PortMapping},
};

use crate::{
    forwarding::{Families, Forwarding, dotted, set},
    netlink::nft::Nft,
};

/// A kernel without nf_tables, or a table that is somebody else's: neither has a port of ours.
fn is_none_of_ours(error: &KernelError) -> bool {
    matches!(error.kind, KernelErrorKind::Unsupported | KernelErrorKind::Conflict)
}

/// The table and the settings.
pub(crate) struct Nat {
    nft: Nft,
    forwarding: Forwarding,
    /// Held while the table is changed for it, so that a table that is written anew neither misses a port nor has one that
    /// was just taken back. Locked on threads that may block, and there alone.
    ports: Mutex<Ports>,
}

/// What is published.
#[derive(Default)]
struct Ports {
    /// As the node's specification has it; `None` before the first one, too.
    masquerade: Option<Masquerade>,
    /// The mappings of endpoints, since this process began.
    published: BTreeSet<PortMapping>,
}

impl Ports {
    fn desired(&self) -> Desired {
        Desired { masquerade: self.masquerade.clone(), mappings: self.published.iter().copied().collect() }
    }
}

impl Nat {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { nft: Nft::default(), forwarding: Forwarding::new(run_dir), ports: Mutex::default() }
    }

    fn ports(&self) -> MutexGuard<'_, Ports> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes both as the specification says; without masquerading both go back.
    pub(crate) fn ensure(&self, spec: &NodeSpec) -> Result<()> {
        {
            let mut ports = self.ports();
            ports.masquerade.clone_from(&spec.masquerade);
            if ports.masquerade.is_some() {
                // The table first: nothing leaves with a container's own address.
                self.nft.ensure_around(&ports.desired())?;
            }
        }
        let Some(masquerade) = &spec.masquerade else { return self.remove() };
        let has = |ipv4| masquerade.pools.iter().any(|pool| pool.addr().is_ipv4() == ipv4);
        self.forwarding.ensure(Families { ipv4: has(true), ipv6: has(false) })
    }

    /// Publishes an endpoint's ports. A node that does not masquerade has no table, and publishes nothing.
    pub(crate) fn publish(&self, record: &EndpointRecord) -> Result<()> {
        let mappings = record.mappings();
        let mut ports = self.ports();
        if mappings.is_empty() || ports.masquerade.is_none() {
            return Ok(());
        }
        let new: Vec<_> = mappings.iter().copied().filter(|mapping| ports.published.insert(*mapping)).collect();
        let mut added = self.nft.add_mappings(&mappings);
        if added.as_ref().is_err_and(|e| e.kind == KernelErrorKind::NotFound) {
            // Somebody removed the table.
            added = self.nft.ensure_around(&ports.desired()).map(drop);
        }
        if let Err(e) = added {
            ports.published.retain(|mapping| !new.contains(mapping));
            return Err(e);
        }
        drop(ports);
        let by_loopback = |m: &PortMapping| m.container.is_ipv4() && m.host_ip.is_none_or(|ip| ip.is_loopback());
        if mappings.iter().any(by_loopback) {
            // The setting dies with the link.
            set(&format!("ipv4/conf/{}/route_localnet", record.host_ifname), "1")?;
        }
        Ok(())
    }

    /// Takes an endpoint's ports back.
    pub(crate) fn unpublish(&self, record: &EndpointRecord) -> Result<()> {
        let mappings = record.mappings();
        if mappings.is_empty() {
            return Ok(());
        }
        let mut ports = self.ports();
        ports.published.retain(|mapping| !mappings.contains(mapping));
        self.take_back(&mappings)
    }

    /// Takes those ports of the table back that no endpoint has published.
    pub(crate) fn forget(&self, wanted: impl Fn(&PortMapping) -> bool) -> Result<()> {
        let ports = self.ports();
        let all: Vec<_> = self.there()?.into_iter().flatten().filter(&wanted).collect();
        let strays: Vec<_> = all.into_iter().filter(|mapping| !ports.published.contains(mapping)).collect();
        if strays.is_empty() { Ok(()) } else { self.take_back(&strays) }
    }

    /// Ports of the table that no endpoint has published. None where there is no table of ours, or none that can be read:
    /// [`Self::observe`] tells that.
    pub(crate) fn strays(&self) -> Vec<PortMapping> {
        let ports = self.ports();
        let there = self.there().ok().flatten().unwrap_or_default();
        there.into_iter().filter(|mapping| !ports.published.contains(mapping)).collect()
    }

    /// The ports of each endpoint that a table lacks.
    pub(crate) fn missing(&self, records: &[EndpointRecord]) -> Result<Vec<Vec<EndpointProblem>>> {
        let wanted: Vec<_> = records.iter().map(EndpointRecord::mappings).collect();
        let ports = self.ports();
        let there = match wanted.iter().all(Vec::is_empty) || ports.masquerade.is_none() {
            true => None,
            false => self.there()?,
        };
        let lacks = |mapping: &PortMapping| there.as_ref().is_some_and(|there| !there.contains(mapping));
        let problems = |mappings: Vec<PortMapping>| {
            mappings.into_iter().filter(lacks).map(|mapping| EndpointProblem::Port { mapping }).collect()
        };
        Ok(wanted.into_iter().map(problems).collect())
    }

    /// The ports of the table; `None` where there is no table of ours.
    fn there(&self) -> Result<Option<BTreeSet<PortMapping>>> {
        match self.nft.look() {
            Ok(table) => Ok(table.map(|table| table.mappings())),
            Err(e) if is_none_of_ours(&e) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn take_back(&self, mappings: &[PortMapping]) -> Result<()> {
        match self.nft.remove_mappings(mappings) {
            Err(e) if !is_none_of_ours(&e) => Err(e),
            _ => Ok(()),
        }
    }

    /// Compares both with the specification.
    pub(crate) fn observe(&self, spec: &NodeSpec) -> Result<NatView> {
        let changed = self.forwarding.changed()?;
        let mut view = NatView { changed: changed.keys().map(|path| dotted(path)).collect(), ..NatView::default() };
        let Some(masquerade) = &spec.masquerade else { return Ok(view) };
        let wrong = |cause: String| NodeProblem::Table { cause };
        match self.nft.look() {
            Ok(Some(table)) => {
                // The ports are compared with the endpoints that have them.
                let mappings = table.mappings().into_iter().collect();
                let desired = Desired { masquerade: spec.masquerade.clone(), mappings };
                view.problems.extend(table.differences(&desired)?.into_iter().map(wrong));
            }
            Ok(None) => {
                view.problems.push(wrong("expected, is not there: containers reach no other network".to_owned()))
            }
            Err(e) => view.problems.push(wrong(e.cause)),
        }
        let has = |ipv4| masquerade.pools.iter().any(|pool| pool.addr().is_ipv4() == ipv4);
        view.problems.extend(self.forwarding.observe(Families { ipv4: has(true), ipv6: has(false) })?);
        view.dropping = match self.nft.dropping_forward_chains() {
            Ok(chains) => chains,
            // Told by the table already.
            Err(e) if e.kind == KernelErrorKind::Unsupported => Vec::new(),
            Err(e) => return Err(e),
        };
        Ok(view)
    }

    /// Deletes the table and takes the settings back. A kernel without nf_tables has no table.
    pub(crate) fn remove(&self) -> Result<()> {
        match self.nft.remove() {
            Err(e) if e.kind != KernelErrorKind::Unsupported => return Err(e),
            _ => {}
        }
        self.forwarding.take_back()
    }
}
