//! Admission of creates by measured cost.
//!
//! A node below its limit starts a create at once, whatever it measured before. At the limit, a create waits in a
//! FIFO queue if the predicted wait is within the caller's patience; else it is refused with a retry delay. The
//! prediction uses the measured time between the ends of two creates at the limit, because this, and not the duration
//! of one create, is the rate at which the queue moves. Deletes are never refused and never wait; while deletes run,
//! fewer creates run.
//!
//! Pure: the agent calls it under a short lock and passes the time, in milliseconds of a monotonic clock.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

mod pace;

use pace::Pace;

/// Range of the retry delay of a refused request, milliseconds: a shorter delay makes a storm, a longer one loses
/// time.
const RETRY_AFTER_MS: std::ops::RangeInclusive<u64> = 50..=5_000;

/// Bounds of admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdmissionConfig {
    /// Creates that run at once; 0 counts as 1.
    pub parallel: u32,
    /// Creates that run at once while a delete runs; 0 counts as 1, and more than `parallel` as `parallel`.
    pub parallel_while_deleting: u32,
    /// Longest time a create waits for its turn, milliseconds, whatever patience its caller has.
    pub longest_wait_ms: u64,
    /// Most creates that wait: bounds memory.
    pub most_waiting: u32,
    /// A create that has waited this long, milliseconds, starts as if no delete ran.
    pub starved_ms: u64,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        Self {
            parallel: 8,
            parallel_while_deleting: 2,
            longest_wait_ms: 10_000,
            most_waiting: 1_024,
            starved_ms: 2_000,
        }
    }
}

/// A place in the queue of creates and then among the running creates. Unique, and consumed by the call that ends it.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

/// A refused create: its predicted wait is too long, or the queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{waiting} creates wait and one ends every {cost_ms} ms: its turn would come in {predicted_wait_ms} ms; ask again \
     in {retry_after_ms} ms"
)]
pub struct Refusal {
    /// Predicted wait, milliseconds.
    pub predicted_wait_ms: u64,
    /// Delay until the caller should ask again, milliseconds: 50 to 5,000.
    pub retry_after_ms: u64,
    /// Creates that wait.
    pub waiting: u32,
    /// Time between the ends of two creates, milliseconds, rounded up.
    pub cost_ms: u64,
}

/// State of admission, for status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdmissionView {
    /// Creates that wait.
    pub waiting: u32,
    /// Creates that run.
    pub running: u32,
    /// Deletes that run.
    pub deletes: u32,
    /// Time between the ends of two creates at the limit, milliseconds, rounded up.
    pub cost_ms: u64,
    /// Time between the ends of two deletes, milliseconds, rounded up.
    pub delete_cost_ms: u64,
    /// How long the first in the queue has waited, milliseconds; 0 when none waits.
    pub longest_waiting_ms: u64,
    /// How long the create that runs longest has run, milliseconds; 0 when none runs.
    pub longest_running_ms: u64,
}

/// Waiting and running creates, running deletes, and their measured pace.
#[derive(Debug, Clone)]
pub struct Admission {
    config: AdmissionConfig,
    tickets: u64,
    /// Start of the wait of each waiting create, by ticket: the oldest first.
    waiting: BTreeMap<u64, u64>,
    /// Start of each running create, by ticket.
    running: BTreeMap<u64, u64>,
    deletes: u32,
    creates_pace: Pace,
    deletes_pace: Pace,
}

impl Admission {
    /// An idle node without measurements.
    #[must_use]
    pub fn new(config: AdmissionConfig) -> Self {
        Self {
            config: AdmissionConfig { parallel: config.parallel.max(1), ..config },
            tickets: 0,
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            deletes: 0,
            creates_pace: Pace::default(),
            deletes_pace: Pace::default(),
        }
    }

    /// Queues a create for a caller that can wait for `patience_ms`. A ticket ends with [`Self::on_end`] or
    /// [`Self::on_abandon`], the latter also when the wait was longer than predicted and the caller's patience is
    /// over.
    ///
    /// # Errors
    /// When the predicted wait is longer than the caller's patience or the configured maximum, or the queue is full;
    /// never on an idle node.
    pub fn offer(&mut self, patience_ms: u64, now_ms: u64) -> Result<Ticket, Refusal> {
        // 0 below the limit. A node without creates is below the limit, whatever was measured.
        let wait_ms = self.predicted_wait_ms(now_ms);
        let allowed_ms = patience_ms.min(self.config.longest_wait_ms);
        if wait_ms > allowed_ms || (wait_ms > 0 && count(&self.waiting) >= self.config.most_waiting) {
            return Err(self.refusal(patience_ms, now_ms));
        }
        self.tickets += 1;
        self.waiting.insert(self.tickets, now_ms);
        Ok(Ticket(self.tickets))
    }

    /// The figures of a refusal, also for an admitted create whose turn did not come in time.
    #[must_use]
    pub fn refusal(&self, patience_ms: u64, now_ms: u64) -> Refusal {
        let predicted_wait_ms = self.predicted_wait_ms(now_ms);
        let cost_us = self.creates_pace.cost_us(now_ms, count(&self.running));
        let allowed_ms = patience_ms.min(self.config.longest_wait_ms);
        // The retry delay covers the part of the wait beyond the caller's patience, and at least one end of a create,
        // so that a full queue has a place.
        let room_ms = predicted_wait_ms.saturating_sub(allowed_ms).max(cost_us.div_ceil(1_000));
        Refusal {
            predicted_wait_ms,
            retry_after_ms: room_ms.clamp(*RETRY_AFTER_MS.start(), *RETRY_AFTER_MS.end()),
            waiting: count(&self.waiting),
            cost_ms: cost_us.div_ceil(1_000),
        }
    }

    /// True when the first create in the queue may start. Call it after each change and periodically, because a
    /// starved create may start beside deletes.
    #[must_use]
    pub fn may_start(&self, now_ms: u64) -> bool {
        let Some((_, since_ms)) = self.waiting.first_key_value() else { return false };
        let starved = now_ms.saturating_sub(*since_ms) >= self.config.starved_ms;
        let limit = if starved { self.config.parallel } else { self.limit() };
        count(&self.running) < limit
    }

    /// Starts the first create in the queue, after [`Self::may_start`] returned true.
    #[must_use = "the ticket gives the place back"]
    pub fn on_start(&mut self, ticket: Ticket, now_ms: u64) -> Ticket {
        self.waiting.remove(&ticket.0);
        self.running.insert(ticket.0, now_ms);
        self.watch_pace(now_ms);
        ticket
    }

    /// A running create has succeeded or failed.
    pub fn on_end(&mut self, ticket: Ticket, now_ms: u64) {
        let at_once = count(&self.running);
        if self.running.remove(&ticket.0).is_some() {
            self.creates_pace.on_end(now_ms, at_once);
        }
        self.watch_pace(now_ms);
    }

    /// The caller disconnected or its patience is over. A create that runs already frees its place and is not
    /// measured.
    pub fn on_abandon(&mut self, ticket: Ticket, now_ms: u64) {
        self.waiting.remove(&ticket.0);
        self.running.remove(&ticket.0);
        self.watch_pace(now_ms);
    }

    /// `n` deletes begin.
    pub fn delete_began(&mut self, n: u32, now_ms: u64) {
        self.deletes = self.deletes.saturating_add(n);
        self.deletes_pace.watch(self.deletes > 0, now_ms);
        self.watch_pace(now_ms);
    }

    /// `n` deletes have ended.
    pub fn delete_ended(&mut self, n: u32, now_ms: u64) {
        for _ in 0..n.min(self.deletes) {
            self.deletes_pace.on_end(now_ms, self.deletes);
            self.deletes -= 1;
        }
        self.deletes_pace.watch(self.deletes > 0, now_ms);
        self.watch_pace(now_ms);
    }

    /// For status.
    #[must_use]
    pub fn view(&self, now_ms: u64) -> AdmissionView {
        let since = |all: &BTreeMap<u64, u64>| all.values().min().map_or(0, |since| now_ms.saturating_sub(*since));
        AdmissionView {
            waiting: count(&self.waiting),
            running: count(&self.running),
            deletes: self.deletes,
            cost_ms: self.creates_pace.cost_us(now_ms, count(&self.running)).div_ceil(1_000),
            delete_cost_ms: self.deletes_pace.cost_us(now_ms, self.deletes).div_ceil(1_000),
            longest_waiting_ms: since(&self.waiting),
            longest_running_ms: since(&self.running),
        }
    }

    /// Predicted wait of a new create, milliseconds: first the running deletes, then the creates before it.
    #[must_use]
    pub fn predicted_wait_ms(&self, now_ms: u64) -> u64 {
        let (waiting, running) = (count(&self.waiting), count(&self.running));
        let ends_before = u64::from(waiting.saturating_add(running).saturating_add(1).saturating_sub(self.limit()));
        if ends_before == 0 {
            return 0;
        }
        let deletes_us = self.deletes_pace.cost_us(now_ms, self.deletes).saturating_mul(u64::from(self.deletes));
        // Deletes delay the queue for at most `starved_ms`.
        let deletes_us = deletes_us.min(self.config.starved_ms.saturating_mul(1_000));
        let creates_us = self.creates_pace.cost_us(now_ms, running).saturating_mul(ends_before);
        deletes_us.saturating_add(creates_us).div_ceil(1_000)
    }

    /// Creates that may run now.
    fn limit(&self) -> u32 {
        if self.deletes == 0 {
            return self.config.parallel;
        }
        self.config.parallel_while_deleting.clamp(1, self.config.parallel)
    }

    /// The pace is measured only at the limit. Below it, the time between two ends depends on the callers.
    fn watch_pace(&mut self, now_ms: u64) {
        let no_room = count(&self.running) >= self.limit();
        self.creates_pace.watch(no_room, now_ms);
    }
}

fn count(all: &BTreeMap<u64, u64>) -> u32 {
    u32::try_from(all.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
