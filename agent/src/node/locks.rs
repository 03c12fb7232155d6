//! A lock for each endpoint id.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, Weak},
};

use tokio::sync::OwnedMutexGuard;
use wharf_core::ids::EndpointId;
use wharf_kit::sync::lock;

type Turn = tokio::sync::Mutex<()>;

/// Locks by id, fair.
#[derive(Default)]
pub struct EndpointLocks(
    /// An entry lives while a task holds or awaits the lock.
    Mutex<BTreeMap<EndpointId, Weak<Turn>>>,
);

impl EndpointLocks {
    /// Waits for the id's lock.
    pub async fn acquire(&self, id: EndpointId) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = lock(&self.0);
            let there = turns.get(&id).and_then(Weak::upgrade);
            there.unwrap_or_else(|| {
                let turn = Arc::new(Turn::default());
                turns.retain(|_, turn| turn.strong_count() > 0);
                turns.insert(id, Arc::downgrade(&turn));
                turn
            })
        };
        turn.lock_owned().await
    }
}
