//! What the node does for packets that leave it: its nftables table, and forwarding.

use std::path::Path;

use wharf_core::{
    finding::NodeProblem,
    kernel::{KernelError, KernelErrorKind, NatView, NodeSpec, Result},
    nat::{Masquerade, Nat as Desired},
};

use crate::{
    forwarding::{Families, Forwarding, dotted},
    netlink::nft::Nft,
};

/// The table and the settings.
pub(crate) struct Nat {
    nft: Nft,
    forwarding: Forwarding,
}

fn desired(spec: &NodeSpec) -> Desired {
    Desired { masquerade: spec.masquerade.clone(), mappings: Vec::new() }
}

fn families(masquerade: &Masquerade) -> Families {
    let has = |ipv4| masquerade.pools.iter().any(|pool| pool.addr().is_ipv4() == ipv4);
    Families { ipv4: has(true), ipv6: has(false) }
}

impl Nat {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { nft: Nft::default(), forwarding: Forwarding::new(run_dir) }
    }

    /// Makes both as the specification says; without masquerading both go back.
    pub(crate) fn ensure(&self, spec: &NodeSpec) -> Result<()> {
        let Some(masquerade) = &spec.masquerade else { return self.remove() };
        // The table first: nothing leaves with a container's own address.
        self.nft.ensure(&desired(spec))?;
        self.forwarding.ensure(families(masquerade))
    }

    /// Compares both with the specification. What cannot be looked at is a problem too.
    pub(crate) fn observe(&self, spec: &NodeSpec) -> NatView {
        let mut view = NatView::default();
        let unseen = |e: KernelError| NodeProblem::Outbound { what: e.subject, cause: e.cause };
        match self.forwarding.changed() {
            Ok(changed) => view.changed.extend(changed.keys().map(|path| dotted(path))),
            Err(e) => view.problems.push(unseen(e)),
        }
        let Some(masquerade) = &spec.masquerade else { return view };
        let table = |cause| NodeProblem::Outbound { what: "nftables table inet wharf".to_owned(), cause };
        match self.nft.look().and_then(|seen| seen.map(|seen| seen.differences(&desired(spec))).transpose()) {
            Ok(Some(differences)) => view.problems.extend(differences.into_iter().map(table)),
            Ok(None) => {
                view.problems.push(table("expected, is not there: containers reach no other network".to_owned()))
            }
            Err(e) => view.problems.push(table(e.cause)),
        }
        match self.forwarding.observe(families(masquerade)) {
            Ok(problems) => view.problems.extend(problems),
            Err(e) => view.problems.push(unseen(e)),
        }
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
