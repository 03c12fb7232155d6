//! What the endpoints' self-checks found.

use std::{collections::BTreeMap, sync::Mutex, time::Duration};

use tokio::time::Instant;
use wharf_api::SelfCheck;
use wharf_core::ids::{EndpointId, Epoch};

use crate::{node::endpoint::Handle, sync::lock};

/// Between two batches of test packets at least, whoever asks: a batch takes the kernel about a millisecond.
pub const PACE: Duration = Duration::from_millis(20);

/// What is known of every endpoint's self-check.
#[derive(Debug, Default)]
pub struct SelfChecks {
    rows: Mutex<BTreeMap<EndpointId, Row>>,
    /// When the last batch began. Held while one waits for its turn, so that batches keep their distance.
    turn: tokio::sync::Mutex<Option<Instant>>,
}

#[derive(Debug)]
pub(crate) struct Row {
    /// An id may have a new owner.
    epoch: Epoch,
    pub(crate) seen: SelfCheck,
    /// A regeneration was asked for in this alarm.
    pub(crate) asked: bool,
}

impl SelfChecks {
    /// What was found out last about an endpoint.
    #[must_use]
    pub fn last(&self, id: EndpointId, epoch: Epoch) -> SelfCheck {
        let rows = lock(&self.rows);
        rows.get(&id).filter(|row| row.epoch == epoch).map(|row| row.seen.clone()).unwrap_or_default()
    }

    /// Alarms that last.
    #[must_use]
    pub fn failing(&self) -> u64 {
        lock(&self.rows).values().filter(|row| row.seen.alarm.is_some()).count() as u64
    }

    /// Forgets endpoints that are gone.
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

    /// Endpoints whose alarm lasts; how many were checked, and when the one that waits longest was, milliseconds since the
    /// Unix epoch.
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

    /// Waits until the next batch may run.
    pub(crate) async fn turn(&self) {
        let mut last = self.turn.lock().await;
        if let Some(last) = *last {
            tokio::time::sleep_until(last + PACE).await;
        }
        *last = Some(Instant::now());
    }
}
