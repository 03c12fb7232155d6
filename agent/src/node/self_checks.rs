//! Endpoints' self-checks.

use std::{collections::BTreeMap, sync::Mutex, time::Duration};

use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::Instant,
};
use wharf_api::SelfCheck;
use wharf_core::ids::{EndpointId, Epoch};
use wharf_kit::sync::lock;

use crate::node::endpoint::Handle;

/// Between background batches of about 1 ms.
pub const PACE: Duration = Duration::from_millis(20);

/// Per lane. A check blocks a thread for about 1 ms.
pub const AT_ONCE: usize = 4;

/// Source of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// The agent, every [`PACE`].
    Background,
    /// A CHECK, unpaced.
    Check,
    /// A client, with separate permits.
    Client,
}

/// Last results.
#[derive(Debug)]
pub struct SelfChecks {
    rows: Mutex<BTreeMap<EndpointId, Row>>,
    /// Last batch's start. Held during the wait, so that batches are [`PACE`] apart.
    turn: tokio::sync::Mutex<Option<Instant>>,
    checks: Semaphore,
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
    /// The id may be reused.
    epoch: Epoch,
    pub(crate) seen: SelfCheck,
    pub(crate) asked: bool,
}

impl SelfChecks {
    /// Last result.
    #[must_use]
    pub fn last(&self, id: EndpointId, epoch: Epoch) -> SelfCheck {
        let rows = lock(&self.rows);
        rows.get(&id).filter(|row| row.epoch == epoch).map(|row| row.seen.clone()).unwrap_or_default()
    }

    /// Endpoints with an alarm.
    #[must_use]
    pub fn failing(&self) -> u64 {
        lock(&self.rows).values().filter(|row| row.seen.alarm.is_some()).count() as u64
    }

    pub(crate) fn keep(&self, live: &BTreeMap<EndpointId, Epoch>) {
        lock(&self.rows).retain(|id, row| live.get(id) == Some(&row.epoch));
    }

    pub(crate) fn update<T>(&self, handle: &Handle, change: impl FnOnce(&mut Row) -> T) -> T {
        let mut rows = lock(&self.rows);
        let new = || Row { epoch: handle.epoch, seen: SelfCheck::default(), asked: false };
        let row = rows.entry(handle.id).or_insert_with(new);
        if row.epoch != handle.epoch {
            *row = new();
        }
        change(row)
    }

    /// Endpoints with an alarm, number checked, oldest check (milliseconds since the Unix epoch).
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

    /// Waits for the lane; a permit is held during the batch.
    pub(crate) async fn turn(&self, lane: Lane) -> Option<SemaphorePermit<'_>> {
        match lane {
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
