//! What the node does for packets that leave it: its nftables table, and forwarding.

use std::path::Path;

use wharf_core::{
    finding::NodeProblem,
    kernel::{KernelErrorKind, NatView, NodeSpec, Result},
    nat::Nat as Desired,
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

impl Nat {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { nft: Nft::default(), forwarding: Forwarding::new(run_dir) }
    }

    /// Makes both as the specification says; without masquerading both go back.
    pub(crate) fn ensure(&self, spec: &NodeSpec) -> Result<()> {
        let Some(masquerade) = &spec.masquerade else { return self.remove() };
        let has = |ipv4| masquerade.pools.iter().any(|pool| pool.addr().is_ipv4() == ipv4);
        // The table first: nothing leaves with a container's own address.
        self.nft.ensure(&desired(spec))?;
        self.forwarding.ensure(Families { ipv4: has(true), ipv6: has(false) })
    }

    /// Compares both with the specification.
    pub(crate) fn observe(&self, spec: &NodeSpec) -> Result<NatView> {
        let changed = self.forwarding.changed()?;
        let mut view = NatView { changed: changed.keys().map(|path| dotted(path)).collect(), ..NatView::default() };
        let Some(masquerade) = &spec.masquerade else { return Ok(view) };
        let wrong = |cause: String| NodeProblem::Table { cause };
        match self.nft.look() {
            Ok(Some(table)) => view.problems.extend(table.differences(&desired(spec))?.into_iter().map(wrong)),
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
