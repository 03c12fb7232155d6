//! Stored timelines of endpoints, for `wharf explain`.
//!
//! A transaction of an endpoint also writes its timeline. A slow batch ([`write()`]) writes the rest and removes old
//! lives; a killed agent loses only entries since the last batch.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    fmt::Display,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use wharf_core::{
    ids::{Attachment, EndpointId, Epoch},
    store::{Change, Snapshot},
    timeline::{End, Ended, Entries, Life, MAX_PAST, Operation, Outcome, Past, PastLife, Who},
};
use wharf_kit::{clock, sync::lock};
use wharf_store::{Store, StoreError};

use crate::{
    metrics::Metrics,
    node::{
        endpoint::{Shared, entry},
        registry::Registry,
    },
};

/// Interval of [`write()`].
pub const INTERVAL: Duration = Duration::from_secs(5);
/// Small, to not delay other commits.
const BATCH: usize = 512;
/// Failed creates while the store refuses writes.
const MAX_LATER: usize = 1_024;

/// Timelines without an endpoint in memory: ended, or loaded before restore.
#[derive(Default)]
pub struct Timelines {
    inner: Mutex<Inner>,
    dropped: AtomicU64,
}

#[derive(Default)]
struct Inner {
    /// As JSON: one allocation each.
    past: Past<Box<[u8]>>,
    later: VecDeque<Life>,
    loaded: HashMap<(EndpointId, Epoch), Entries>,
}

impl Timelines {
    /// Adds a stored life.
    pub fn ended(&self, life: &Life) {
        if let Some(ended) = life.ended {
            let past = PastLife { who: life.who.clone(), ended };
            let packed = serde_json::to_vec(&past).unwrap_or_default().into_boxed_slice();
            lock(&self.inner).past.insert(&past, packed);
        }
    }

    /// At the limit, removes the oldest ended life; for the transaction that ends another.
    #[must_use]
    pub fn make_room(&self) -> Option<Change> {
        lock(&self.inner).past.make_room(MAX_PAST).map(|(id, epoch)| Change::RemoveLife(id, epoch))
    }

    /// Adds a life for the next batch.
    pub fn later(&self, life: Life) {
        self.ended(&life);
        let mut inner = lock(&self.inner);
        if inner.later.len() >= MAX_LATER {
            inner.later.pop_front();
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        inner.later.push_back(life);
    }

    /// A restored endpoint's entries.
    #[must_use]
    pub fn take(&self, id: EndpointId, epoch: Epoch) -> Option<Entries> {
        lock(&self.inner).loaded.remove(&(id, epoch))
    }

    /// Matching lives, latest first.
    #[must_use]
    pub fn past(&self, fits: impl Fn(&PastLife) -> bool) -> Vec<PastLife> {
        let inner = lock(&self.inner);
        inner.past.iter().filter_map(|packed| serde_json::from_slice(packed).ok()).filter(fits).collect()
    }

    /// Number of ended lives.
    #[must_use]
    pub fn ended_count(&self) -> usize {
        lock(&self.inner).past.len()
    }

    /// An unstored life.
    #[must_use]
    pub fn unwritten(&self, id: EndpointId, epoch: Epoch) -> Option<Life> {
        lock(&self.inner).later.iter().find(|l| l.who.id == id && l.who.epoch == epoch).cloned()
    }

    /// Lives dropped unwritten.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

/// A phase's end, in metrics and timeline.
pub fn phase(
    metrics: &Metrics,
    shared: &Shared,
    operation: Operation,
    phase: &'static str,
    took: Duration,
    result: &Result<(), impl Display>,
) {
    metrics.phase(operation.name(), phase, took);
    let (outcome, text) = match result {
        Ok(()) => (Outcome::Ok, String::new()),
        Err(why) => (Outcome::Failed, why.to_string()),
    };
    shared.note(operation, phase, Some(took), outcome, &text);
}

/// A deleted endpoint's life, for the transaction that removes the record.
#[must_use]
pub fn deleted(shared: &Shared, took: Duration) -> Life {
    let text = "nothing of it is left; time of the whole delete";
    let mut life = shared.life(Some(Ended { at_unix_ms: clock::unix_ms(), how: End::Deleted }));
    // Not the endpoint's entry: the transaction may fail.
    life.entries.push(entry(Operation::Delete, "remove-record", Some(took), Outcome::Ok, text));
    life.trim();
    life
}

/// A failed create's life.
#[must_use]
pub fn create_failed(shared: &Shared) -> Life {
    let mut life = shared.life(Some(Ended { at_unix_ms: clock::unix_ms(), how: End::CreateFailed }));
    life.trim();
    life
}

/// Life of a create that the agent's end interrupted and restore undid.
#[must_use]
pub fn interrupted(id: EndpointId, epoch: Epoch, attachment: &Attachment) -> Life {
    let now = clock::unix_ms();
    let mut entries = Entries::default();
    let text = "the agent ended while it was being created; this start took back what there was of it";
    entries.push(entry(Operation::Undo, "restore", None, Outcome::Warning, text));
    let who = Who {
        id,
        epoch,
        attachment: attachment.clone(),
        addresses: Vec::new(),
        identity: None,
        host_ifname: None,
        pod_name: None,
        pod_namespace: None,
        created_unix_ms: now,
    };
    Life { who, ended: Some(Ended { at_unix_ms: now, how: End::CreateFailed }), entries }
}

/// Loads timelines before restore; a failed load gives none.
pub async fn load(timelines: &Timelines, store: &Store, snapshot: &Snapshot) {
    let (lives, unreadable) = match store.lives().await {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!("read the timeline: {error}; `wharf explain` knows nothing of before this start");
            return;
        }
    };
    if unreadable > 0 {
        tracing::warn!(unreadable, "read the timeline: rows that cannot be read are left out");
    }
    let living: BTreeSet<(EndpointId, Epoch)> = snapshot.endpoints.iter().map(|r| (r.id, r.epoch)).collect();
    let out_of_service: BTreeSet<EndpointId> = snapshot.out_of_service.iter().map(|q| q.id).collect();
    for mut life in lives {
        let key = (life.who.id, life.who.epoch);
        if life.ended.is_some() {
            timelines.ended(&life);
        } else if living.contains(&key) {
            lock(&timelines.inner).loaded.insert(key, life.entries);
        } else if !out_of_service.contains(&key.0) {
            let text = "its record was gone when the agent started; whoever removed it did not note how";
            life.entries.push(entry(Operation::Restore, "gone", None, Outcome::Warning, text));
            life.ended = Some(Ended { at_unix_ms: clock::unix_ms(), how: End::Unnoted });
            life.trim();
            timelines.later(life);
        }
    }
}

/// In one transaction, writes new entries and removes lives that ended longer than `keep` before `now_ms` (Unix epoch).
/// After an error, the next batch retries.
pub async fn write(
    timelines: &Timelines,
    store: &Store,
    registry: &Registry,
    now_ms: u64,
    keep: Duration,
) -> Result<(), StoreError> {
    if store.take_timeline_lost() {
        registry.list().iter().for_each(|handle| handle.shared.set_unwritten());
    }
    store.take_untold().into_iter().for_each(|life| timelines.later(life));
    let keep_ms = u64::try_from(keep.as_millis()).unwrap_or(u64::MAX);
    let (later, old) = {
        let inner = lock(&timelines.inner);
        let later: Vec<Life> = inner.later.iter().take(BATCH).cloned().collect();
        (later, inner.past.outdated(now_ms, keep_ms, MAX_PAST, BATCH))
    };
    let written: BTreeSet<_> = later.iter().map(|life| (life.who.id, life.who.epoch)).collect();
    let mut changes: Vec<Change> = later.into_iter().map(|life| Change::PutLife(Box::new(life))).collect();
    let mut noted = Vec::new();
    for handle in registry.list() {
        if changes.len() >= BATCH {
            break;
        }
        if handle.shared.read(|v| v.committed) && handle.shared.take_unwritten() {
            changes.push(Change::PutLife(Box::new(handle.shared.life(None))));
            noted.push(handle);
        }
    }
    changes.extend(old.iter().map(|(id, epoch)| Change::RemoveLife(*id, *epoch)));
    match store.commit(changes).await {
        Ok(()) => {
            let mut inner = lock(&timelines.inner);
            inner.past.forget(&old);
            inner.later.retain(|life| !written.contains(&(life.who.id, life.who.epoch)));
            Ok(())
        }
        Err(error) => {
            noted.iter().for_each(|handle| handle.shared.set_unwritten());
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use wharf_core::ids::{ContainerId, IfName, NetworkName};

    use super::*;

    #[test]
    fn however_fast_lives_end_the_oldest_makes_room() {
        let timelines = Timelines::default();
        let attachment = Attachment {
            network: NetworkName::parse("net").expect("network"),
            container_id: ContainerId::parse("c").expect("container"),
            ifname: IfName::parse("eth0").expect("interface"),
        };
        let id = EndpointId::try_from(1).expect("id");
        let mut removed = Vec::new();
        for n in 0..MAX_PAST as u64 + 3 {
            removed.extend(timelines.make_room());
            let mut life = interrupted(id, Epoch(n), &attachment);
            life.ended = Some(Ended { at_unix_ms: n, how: End::Deleted });
            timelines.ended(&life);
        }
        assert_eq!(removed, [0, 1, 2].map(|n| Change::RemoveLife(id, Epoch(n))));
        assert_eq!((timelines.past(|_| true).len(), timelines.ended_count()), (MAX_PAST, MAX_PAST));
        assert_eq!(timelines.dropped(), 0);
    }
}
