//! Admission of creates by measured cost ([`Admission`]).
//!
//! Creates pass a turnstile in order of arrival; the first waits there for room. Deletes never wait and reduce admitted
//! creates: they free resources.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::{Notify, Semaphore};
use wharf_api::AdmissionStatus;
use wharf_core::admission::{Admission, AdmissionConfig, Refusal, Ticket};

use crate::sync::lock;

/// Time check while deletes run.
const LOOK: Duration = Duration::from_millis(100);

/// A node's gate.
pub struct Gate {
    admission: Mutex<Admission>,
    /// A create or delete ended, or a place was dropped.
    changed: Notify,
    /// One waiter at a time; tokio's semaphores are FIFO.
    turnstile: Semaphore,
    /// Places given since start.
    pub offered: AtomicU64,
    refused: AtomicU64,
    started: std::time::Instant,
}

impl Default for Gate {
    fn default() -> Self {
        Self::new(AdmissionConfig::default())
    }
}

impl Gate {
    /// With these limits.
    #[must_use]
    pub fn new(config: AdmissionConfig) -> Self {
        Self {
            admission: Mutex::new(Admission::new(config)),
            changed: Notify::new(),
            turnstile: Semaphore::new(1),
            offered: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            started: std::time::Instant::now(),
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Offers a place to a create whose caller waits for `patience`.
    ///
    /// # Errors
    /// The predicted wait is too long; with a retry delay.
    pub fn offer(self: &Arc<Self>, patience: Duration) -> Result<Place, Refusal> {
        let patience_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        match lock(&self.admission).offer(patience_ms, self.now_ms()) {
            Ok(ticket) => {
                self.offered.fetch_add(1, Ordering::Relaxed);
                Ok(Place { gate: Arc::clone(self), ticket: Some(ticket) })
            }
            Err(refusal) => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                Err(refusal)
            }
        }
    }

    /// Fewer creates are admitted while the guard lives.
    #[must_use]
    pub fn deletes(self: &Arc<Self>, count: usize) -> Deletes {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        lock(&self.admission).delete_began(count, self.now_ms());
        Deletes { gate: Arc::clone(self), count }
    }

    /// No creates or deletes.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let view = lock(&self.admission).view(self.now_ms());
        view.waiting == 0 && view.running == 0 && view.deletes == 0
    }

    /// No create waits or runs.
    #[must_use]
    pub fn has_no_creates(&self) -> bool {
        let view = lock(&self.admission).view(self.now_ms());
        view.waiting == 0 && view.running == 0
    }

    /// For status and metrics.
    #[must_use]
    pub fn status(&self) -> AdmissionStatus {
        let view = lock(&self.admission).view(self.now_ms());
        AdmissionStatus {
            waiting: view.waiting.into(),
            running: view.running.into(),
            deletes: view.deletes.into(),
            cost_ms: view.cost_ms,
            refused: self.refused.load(Ordering::Relaxed),
        }
    }
}

/// Queue place; released on drop.
pub struct Place {
    gate: Arc<Gate>,
    ticket: Option<Ticket>,
}

impl Place {
    /// Waits for its turn.
    pub async fn start(mut self) -> Running {
        let gate = Arc::clone(&self.gate);
        // The semaphore is never closed.
        let _turn = gate.turnstile.acquire().await;
        loop {
            let changed = gate.changed.notified();
            tokio::pin!(changed);
            // Before the admission check, so no change is missed.
            changed.as_mut().enable();
            let now = gate.now_ms();
            {
                let mut admission = lock(&gate.admission);
                if admission.may_start(now)
                    && let Some(ticket) = self.ticket.take()
                {
                    let ticket = Some(admission.on_start(ticket, now));
                    drop(admission);
                    return Running { gate: Arc::clone(&gate), ticket };
                }
            }
            tokio::time::timeout(LOOK, changed).await.ok();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            lock(&self.gate.admission).on_abandon(ticket, self.gate.now_ms());
            self.gate.changed.notify_waiters();
        }
    }
}

/// Running create; ends on drop.
pub struct Running {
    gate: Arc<Gate>,
    ticket: Option<Ticket>,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            lock(&self.gate.admission).on_end(ticket, self.gate.now_ms());
            self.gate.changed.notify_waiters();
        }
    }
}

/// Running deletes.
pub struct Deletes {
    gate: Arc<Gate>,
    count: u32,
}

impl Drop for Deletes {
    fn drop(&mut self) {
        lock(&self.gate.admission).delete_ended(self.count, self.gate.now_ms());
        self.gate.changed.notify_waiters();
    }
}
