//! What gives identities, which answers when a test lets it: as a store that nodes share, and that does not answer.

use std::collections::BTreeSet;

use tokio::sync::watch;
use wharf_core::{
    identities::{Identities, LocalIdentities, Pending},
    identity::{Identity, Label},
    identity_allocator::{IdentityError, IdentityRow},
};

#[derive(Debug, Default)]
pub(crate) struct Slow {
    local: LocalIdentities,
    held: watch::Sender<bool>,
}

impl Slow {
    /// From now on nobody gets an identity, until [`Slow::release_all`].
    pub(crate) fn hold(&self) {
        self.held.send_replace(true);
    }

    pub(crate) fn release_all(&self) {
        self.held.send_replace(false);
    }

    pub(crate) fn list(&self) -> Vec<IdentityRow> {
        self.local.list()
    }
}

impl Identities for Slow {
    fn acquire<'a>(&'a self, labels: &'a BTreeSet<Label>) -> Pending<'a, Result<Identity, IdentityError>> {
        Box::pin(async {
            let mut held = self.held.subscribe();
            held.wait_for(|held| !held).await.expect("its sender lives");
            self.local.acquire(labels).await
        })
    }

    fn claim(&self, identity: Identity, labels: &BTreeSet<Label>) -> Result<(), IdentityError> {
        self.local.claim(identity, labels)
    }

    fn release(&self, identity: Identity) -> Pending<'_, ()> {
        self.local.release(identity)
    }
}
