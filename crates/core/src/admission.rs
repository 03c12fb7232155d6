//! Admission of creates by measured cost. At the limit, a create waits in a FIFO queue if the predicted wait is within
//! the caller's patience, else it is refused. Deletes never wait; running deletes lower the limit.
//!
//! Pure: the agent calls it under a short lock, with a monotonic clock.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

mod pace;

use pace::Pace;

/// Milliseconds: shorter causes a retry storm, longer wastes time.
const RETRY_AFTER_MS: std::ops::RangeInclusive<u64> = 50..=5_000;

/// Bounds of admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdmissionConfig {
    /// Most concurrent creates; 0 counts as 1.
    pub parallel: u32,
    /// Most concurrent creates while a delete runs; clamped to `1..=parallel`.
    pub parallel_while_deleting: u32,
    /// Longest queue wait, milliseconds.
    pub longest_wait_ms: u64,
    /// Most waiting creates: bounds memory.
    pub most_waiting: u32,
    /// After this wait, milliseconds, a create ignores running deletes.
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

/// A queued or running create.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

/// A refused create.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{waiting} creates wait and one ends every {cost_ms} ms: its turn would come in {predicted_wait_ms} ms; ask again \
     in {retry_after_ms} ms"
)]
pub struct Refusal {
    pub predicted_wait_ms: u64,
    /// Milliseconds, 50 to 5,000.
    pub retry_after_ms: u64,
    /// Waiting creates.
    pub waiting: u32,
    /// Time between two create ends, milliseconds, rounded up.
    pub cost_ms: u64,
}

/// Admission state for status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdmissionView {
    /// Waiting creates.
    pub waiting: u32,
    /// Running creates.
    pub running: u32,
    /// Running deletes.
    pub deletes: u32,
    /// As [`Refusal::cost_ms`], at the limit.
    pub cost_ms: u64,
    pub delete_cost_ms: u64,
    /// Milliseconds; 0 when the queue is empty.
    pub longest_waiting_ms: u64,
    /// Milliseconds; 0 when no create runs.
    pub longest_running_ms: u64,
}

/// Creates, deletes, and their pace.
#[derive(Debug, Clone)]
pub struct Admission {
    config: AdmissionConfig,
    tickets: u64,
    /// By ticket, in order; milliseconds when it was given.
    waiting: BTreeMap<u64, u64>,
    /// By ticket; milliseconds of the start.
    running: BTreeMap<u64, u64>,
    deletes: u32,
    creates_pace: Pace,
    deletes_pace: Pace,
}

impl Admission {
    /// Of an idle node.
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

    /// Queues a create for at most `patience_ms`. End the ticket with [`Self::on_end`] or [`Self::on_abandon`].
    ///
    /// # Errors
    /// The predicted wait exceeds the patience or the maximum, or the queue is full; never on an idle node.
    pub fn offer(&mut self, patience_ms: u64, now_ms: u64) -> Result<Ticket, Refusal> {
        let wait_ms = self.predicted_wait_ms(now_ms);
        let allowed_ms = patience_ms.min(self.config.longest_wait_ms);
        if wait_ms > allowed_ms || (wait_ms > 0 && count(&self.waiting) >= self.config.most_waiting) {
            return Err(self.refusal(patience_ms, now_ms));
        }
        self.tickets += 1;
        self.waiting.insert(self.tickets, now_ms);
        Ok(Ticket(self.tickets))
    }

    /// For a create that gets no turn, or that was admitted and timed out.
    #[must_use]
    pub fn refusal(&self, patience_ms: u64, now_ms: u64) -> Refusal {
        let predicted_wait_ms = self.predicted_wait_ms(now_ms);
        let cost_us = self.creates_pace.cost_us(now_ms, count(&self.running));
        let allowed_ms = patience_ms.min(self.config.longest_wait_ms);
        // At least one create end, which frees a place in a full queue.
        let room_ms = predicted_wait_ms.saturating_sub(allowed_ms).max(cost_us.div_ceil(1_000));
        Refusal {
            predicted_wait_ms,
            retry_after_ms: room_ms.clamp(*RETRY_AFTER_MS.start(), *RETRY_AFTER_MS.end()),
            waiting: count(&self.waiting),
            cost_ms: cost_us.div_ceil(1_000),
        }
    }

    /// The first create may start. Call it periodically: a starved create starts despite deletes.
    #[must_use]
    pub fn may_start(&self, now_ms: u64) -> bool {
        let Some((_, since_ms)) = self.waiting.first_key_value() else { return false };
        let starved = now_ms.saturating_sub(*since_ms) >= self.config.starved_ms;
        let limit = if starved { self.config.parallel } else { self.limit() };
        count(&self.running) < limit
    }

    /// Starts the first create, after [`Self::may_start`].
    #[must_use = "the ticket gives the place back"]
    pub fn on_start(&mut self, ticket: Ticket, now_ms: u64) -> Ticket {
        self.waiting.remove(&ticket.0);
        self.running.insert(ticket.0, now_ms);
        self.watch_pace(now_ms);
        ticket
    }

    /// Ends a running create, also a failed one.
    pub fn on_end(&mut self, ticket: Ticket, now_ms: u64) {
        let at_once = count(&self.running);
        if self.running.remove(&ticket.0).is_some() {
            self.creates_pace.on_end(now_ms, at_once);
        }
        self.watch_pace(now_ms);
    }

    /// The caller left or lost patience; not measured.
    pub fn on_abandon(&mut self, ticket: Ticket, now_ms: u64) {
        self.waiting.remove(&ticket.0);
        self.running.remove(&ticket.0);
        self.watch_pace(now_ms);
    }

    /// Counts new deletes.
    pub fn delete_began(&mut self, n: u32, now_ms: u64) {
        self.deletes = self.deletes.saturating_add(n);
        self.deletes_pace.watch(self.deletes > 0, now_ms);
        self.watch_pace(now_ms);
    }

    /// Removes ended deletes.
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

    /// Milliseconds: running deletes, then earlier creates.
    #[must_use]
    pub fn predicted_wait_ms(&self, now_ms: u64) -> u64 {
        let (waiting, running) = (count(&self.waiting), count(&self.running));
        let ends_before = u64::from(waiting.saturating_add(running).saturating_add(1).saturating_sub(self.limit()));
        if ends_before == 0 {
            return 0;
        }
        let deletes_us = self.deletes_pace.cost_us(now_ms, self.deletes).saturating_mul(u64::from(self.deletes));
        let deletes_us = deletes_us.min(self.config.starved_ms.saturating_mul(1_000));
        let creates_us = self.creates_pace.cost_us(now_ms, running).saturating_mul(ends_before);
        deletes_us.saturating_add(creates_us).div_ceil(1_000)
    }

    fn limit(&self) -> u32 {
        if self.deletes == 0 {
            return self.config.parallel;
        }
        self.config.parallel_while_deleting.clamp(1, self.config.parallel)
    }

    /// Measures only while all places are taken: else it would be the rate of the callers.
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
