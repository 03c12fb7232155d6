//! Interface to the allocator of identities: this node, or a store of several nodes.

use std::{
    collections::BTreeSet,
    future::{Future, ready},
    pin::Pin,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{
    identity::{Identity, Label},
    identity_allocator::{IdentityAllocator, IdentityError, IdentityRow},
};

/// A pending answer.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Reference-counted identities of security-relevant labels. Reserved identities are not counted.
pub trait Identities: Send + Sync + 'static {
    /// Identity of these labels, with a reference. A dropped future adds none.
    ///
    /// # Errors
    /// [`IdentityError::Exhausted`], [`IdentityError::Reserved`].
    fn acquire<'a>(&'a self, labels: &'a BTreeSet<Label>) -> Pending<'a, Result<Identity, IdentityError>>;

    /// Adds a reference for a restored endpoint. Immediate: every endpoint waits for it at start.
    ///
    /// # Errors
    /// [`IdentityError::Conflict`]: acquire another identity.
    fn claim(&self, identity: Identity, labels: &BTreeSet<Label>) -> Result<(), IdentityError>;

    /// Drops a reference.
    fn release(&self, identity: Identity) -> Pending<'_, ()>;
}

/// Identities local to this node.
#[derive(Debug, Default)]
pub struct LocalIdentities(Mutex<IdentityAllocator>);

impl LocalIdentities {
    /// By number, without reserved ones.
    #[must_use]
    pub fn list(&self) -> Vec<IdentityRow> {
        self.allocator().list()
    }

    fn allocator(&self) -> MutexGuard<'_, IdentityAllocator> {
        // A panic leaves the allocator consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Identities for LocalIdentities {
    fn acquire<'a>(&'a self, labels: &'a BTreeSet<Label>) -> Pending<'a, Result<Identity, IdentityError>> {
        // Without a poll it acquires nothing.
        Box::pin(async { self.allocator().acquire(labels) })
    }

    fn claim(&self, identity: Identity, labels: &BTreeSet<Label>) -> Result<(), IdentityError> {
        self.allocator().claim(identity, labels)
    }

    fn release(&self, identity: Identity) -> Pending<'_, ()> {
        self.allocator().release(identity);
        Box::pin(ready(()))
    }
}
