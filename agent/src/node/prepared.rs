//! Loaded and verified program sets, for creates.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Mutex,
};

use tokio::sync::Notify;
use wharf_core::ids::{EndpointId, MacAddr};
use wharf_kit::sync::lock;

/// Pinned, without an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgramSet {
    /// Taken in the registry.
    pub id: EndpointId,
    /// A program constant.
    pub container_mac: MacAddr,
    /// A program constant.
    pub host_mac: MacAddr,
}

/// The controller loads up to `target`.
pub struct Prepared {
    ready: Mutex<VecDeque<ProgramSet>>,
    taken: Notify,
    target: usize,
}

impl Prepared {
    /// An empty table.
    #[must_use]
    pub fn new(target: usize) -> Self {
        Self { ready: Mutex::default(), taken: Notify::new(), target }
    }

    /// Takes a ready set.
    pub fn take(&self) -> Option<ProgramSet> {
        let set = lock(&self.ready).pop_front();
        self.taken.notify_one();
        set
    }

    /// Returns an unused set.
    pub fn give_back(&self, set: ProgramSet) {
        lock(&self.ready).push_front(set);
    }

    /// Adds a loaded set.
    pub fn add(&self, set: ProgramSet) {
        lock(&self.ready).push_back(set);
    }

    /// Of ready sets.
    #[must_use]
    pub fn ids(&self) -> BTreeSet<EndpointId> {
        lock(&self.ready).iter().map(|s| s.id).collect()
    }

    /// Ready sets, and the target.
    #[must_use]
    pub fn fill(&self) -> (usize, usize) {
        (lock(&self.ready).len(), self.target)
    }

    /// Waits until a set is taken.
    pub async fn taken(&self) {
        self.taken.notified().await;
    }
}

/// Random, locally administered, unicast (IEEE 802: bit 1 of the first octet set, bit 0 clear).
#[must_use]
pub fn random_macs() -> (MacAddr, MacAddr) {
    let one = || {
        let mut mac: [u8; 6] = rand::random();
        mac[0] = (mac[0] | 0x02) & 0xfe;
        MacAddr(mac)
    };
    (one(), one())
}
