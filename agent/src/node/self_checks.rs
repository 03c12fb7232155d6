//! Results of the self-checks of endpoints.

use std::{collections::BTreeMap, sync::Mutex, time::Duration};

use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::Instant,
};
use wharf_api::SelfCheck;
use wharf_core::ids::{EndpointId, Epoch};

use crate::{node::endpoint::Handle, sync::lock};

/// Minimum time between two batches of test packets in the background: a batch takes the kernel about a millisecond.
pub const PACE: Duration = Duration::from_millis(20);

/// Checks of one lane that run at the same time: each occupies a blocking thread for about a millisecond, so that a hundred CHECKs
/// need about 25 ms of the kernel.
pub const AT_ONCE: usize = 4;

/// Who waits for a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// The agent's own round: one batch every [`PACE`].
    Background,
    /// A CHECK of the CNI plugin: without a pace, [`AT_ONCE`] at a time.
    Check,
    /// Another client, such as `wharf endpoint health`: the same, with permits of its own.
    Client,
}

/// The last self-check of every endpoint.
#[derive(Debug)]
pub struct SelfChecks {
    rows: Mutex<BTreeMap<EndpointId, Row>>,
    /// When the last background batch began. Held while a task waits for its turn, so that batches are at least [`PACE`]
    /// apart.
    turn: tokio::sync::Mutex<Option<Instant>>,
    /// Permits of [`Lane::Check`].
    checks: Semaphore,
    /// Permits of [`Lane::Client`].
    clients: Semaphore,
}

impl Default for SelfChecks {
    fn default() -> Self {
        let [checks, clients] = [(); 2].map(|()| Semaphore::new(AT_ONCE));
        Self { rows: Mutex::default(), turn: tokio::sync::Mutex::default(), checks, clients }
    }
}

#[derive(Debug)]
pub(crate) struct Row {
    /// Epoch of the checked endpoint: its id may be reused.
    epoch: Epoch,
    pub(crate) seen: SelfCheck,
    /// A regeneration was asked for in this alarm.
    pub(crate) asked: bool,
}

impl SelfChecks {
    /// The last result for an endpoint.
    #[must_use]
    pub fn last(&self, id: EndpointId, epoch: Epoch) -> SelfCheck {
        let rows = lock(&self.rows);
        rows.get(&id).filter(|row| row.epoch == epoch).map(|row| row.seen.clone()).unwrap_or_default()
    }

    /// Number of active alarms.
    #[must_use]
    pub fn failing(&self) -> u64 {
        lock(&self.rows).values().filter(|row| row.seen.alarm.is_some()).count() as u64
    }

    /// Removes the rows of deleted endpoints.
    pub(crate) fn keep(&self, live: &BTreeMap<EndpointId, Epoch>) {
        lock(&self.rows).retain(|id, row| live.get(id) == Some(&row.epoch));
    }

    /// Changes an endpoint's row.
    pub(crate) fn update<T>(&self, handle: &Handle, change: impl FnOnce(&mut Row) -> T) -> T {
        let mut rows = lock(&self.rows);
        let new = || Row { epoch: handle.epoch, seen: SelfCheck::default(), asked: false };
        let row = rows.entry(handle.id).or_insert_with(new);
        if row.epoch != handle.epoch {
            *row = new();
        }
        change(row)
    }

    /// Endpoints with an active alarm, the number of checked endpoints, and the time of the oldest check in
    /// milliseconds since the Unix epoch.
    pub(crate) fn summary(&self) -> (Vec<EndpointId>, u64, u64) {
        let (mut failing, mut checked, mut oldest) = (Vec::new(), 0_u64, u64::MAX);
        for (id, row) in lock(&self.rows).iter() {
            checked += u64::from(row.seen.checked_unix_ms.is_some());
            oldest = oldest.min(row.seen.checked_unix_ms.unwrap_or(u64::MAX));
            if row.seen.alarm.is_some() {
                failing.push(*id);
            }
        }
        (failing, checked, oldest)
    }

    /// Waits until the next batch of the lane may run. The permit, where the lane has permits, is held during the batch.
    pub(crate) async fn turn(&self, lane: Lane) -> Option<SemaphorePermit<'_>> {
        match lane {
            // The semaphores are never closed.
            Lane::Check => self.checks.acquire().await.ok(),
            Lane::Client => self.clients.acquire().await.ok(),
            Lane::Background => {
                let mut last = self.turn.lock().await;
                if let Some(last) = *last {
                    tokio::time::sleep_until(last + PACE).await;
                }
                *last = Some(Instant::now());
                None
            }
        }
    }
}
