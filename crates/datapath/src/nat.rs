//! What the node does for packets that leave it: its nftables table, and forwarding.

use std::{net::IpAddr, path::Path};

use ipnet::IpNet;
use wharf_core::{
    finding::NodeProblem,
    kernel::{KernelError, KernelErrorKind, NatView, NodeSpec, Result},
    nat::{Masquerade, Nat as Desired},
};

use crate::{
    forwarding::{Families, Forwarding, dotted},
    netlink::{Connection, address, nft::Nft},
};

/// The table and the settings.
pub(crate) struct Nat {
    nft: Nft,
    forwarding: Forwarding,
}

fn desired(spec: &NodeSpec) -> Desired {
    Desired { masquerade: spec.masquerade.clone(), mappings: Vec::new() }
}

fn families(cidrs: &[IpNet]) -> Families {
    let has = |ipv4| cidrs.iter().any(|cidr| cidr.addr().is_ipv4() == ipv4);
    Families { ipv4: has(true), ipv6: has(false) }
}

/// Chosen sources that no interface of the node has: answers to them go elsewhere.
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

impl Nat {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { nft: Nft::default(), forwarding: Forwarding::new(run_dir) }
    }

    /// Makes both as the specification says; without masquerading both go back.
    pub(crate) fn ensure(&self, spec: &NodeSpec) -> Result<()> {
        let Some(masquerade) = &spec.masquerade else { return self.remove() };
        // The table first: nothing leaves with a container's own address. A node without nf_tables forwards all the same,
        // for what takes the stack between containers.
        let table = self.nft.ensure(&desired(spec));
        self.forwarding.ensure(families(&masquerade.pools))?;
        table.map(drop)
    }

    /// Compares both with the specification. What cannot be looked at is a problem too.
    pub(crate) fn observe(&self, spec: &NodeSpec) -> NatView {
        let mut view = NatView::default();
        let unseen = |e: KernelError| NodeProblem::Outbound { what: e.subject, cause: e.cause, repairable: false };
        match self.forwarding.changed() {
            Ok(changed) => view.changed.extend(changed.keys().map(|path| dotted(path))),
            Err(e) => view.problems.push(unseen(e)),
        }
        let Some(masquerade) = &spec.masquerade else {
            if spec.local_by_stack {
                let seen = self.forwarding.observe(families(&spec.cidrs), false);
                view.problems.extend(seen.unwrap_or_else(|e| vec![unseen(e)]));
            }
            return view;
        };
        let table = |cause, repairable| NodeProblem::Outbound {
            what: "nftables table inet wharf".to_owned(),
            cause,
            repairable,
        };
        match self.nft.look().and_then(|seen| seen.map(|seen| seen.differences(&desired(spec))).transpose()) {
            Ok(Some(differences)) => view.problems.extend(differences.into_iter().map(|cause| table(cause, true))),
            Ok(None) => {
                view.problems.push(table("expected, is not there: containers reach no other network".to_owned(), true));
            }
            Err(e) => view.problems.push(table(e.cause, false)),
        }
        let seen = self.forwarding.observe(families(&masquerade.pools), true);
        view.problems.extend(seen.unwrap_or_else(|e| vec![unseen(e)]));
        view.problems.extend(absent_sources(masquerade).unwrap_or_else(|e| vec![unseen(e)]));
        // A failure was told with the table already.
        view.dropping = self.nft.dropping_forward_chains().unwrap_or_default();
        view
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
