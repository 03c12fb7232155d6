//! The interface to what gives sets of labels their numbers: this node alone, or a store that nodes share.

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

/// An answer that may take its time.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Numbers of sets of labels, counted by reference. Labels that are not security-relevant are ignored; reserved identities
/// are not counted.
pub trait Identities: Send + Sync + 'static {
    /// The identity of these labels, which has one reference more. A future that is dropped before it ends leaves none.
    ///
    /// # Errors
    /// [`IdentityError::Exhausted`], [`IdentityError::Reserved`].
    fn acquire<'a>(&'a self, labels: &'a BTreeSet<Label>) -> Pending<'a, Result<Identity, IdentityError>>;

    /// Counts a reference to the identity that a restored endpoint had. Asks nobody else, because every endpoint of a start waits
    /// for it.
    ///
    /// # Errors
    /// [`IdentityError::Conflict`] when the number cannot stand for these labels; acquire another one then.
    fn claim(&self, identity: Identity, labels: &BTreeSet<Label>) -> Result<(), IdentityError>;

    /// Gives one reference back.
    fn release(&self, identity: Identity) -> Pending<'_, ()>;
}

/// Identities of this node alone.
#[derive(Debug, Default)]
pub struct LocalIdentities(Mutex<IdentityAllocator>);

impl LocalIdentities {
    /// Every identity in use, by number; reserved ones are not listed.
    #[must_use]
    pub fn list(&self) -> Vec<IdentityRow> {
        self.allocator().list()
    }

    fn allocator(&self) -> MutexGuard<'_, IdentityAllocator> {
        // Each call of the allocator leaves it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Identities for LocalIdentities {
    fn acquire<'a>(&'a self, labels: &'a BTreeSet<Label>) -> Pending<'a, Result<Identity, IdentityError>> {
        // Within the future: one that nobody awaits acquires nothing.
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
