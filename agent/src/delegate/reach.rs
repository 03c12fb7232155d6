//! Whether the service is reached.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use wharf_api::{DelegateRefusal, DelegateStatus};
use wharf_kit::{clock, sync::lock};

use crate::delegate::{
    Delegation,
    service::{CallError, Service},
};

const STATUS_LIMIT: Duration = Duration::from_secs(1);

/// State from the last call.
#[derive(Debug, Default)]
pub struct Reach {
    known: Mutex<Known>,
    in_flight: AtomicU64,
    /// One Status at a time; held for at most [`STATUS_LIMIT`].
    asking: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Known {
    reachable: Option<bool>,
    since_unix_ms: u64,
    last_error: Option<String>,
    service: String,
    refusal: Option<DelegateRefusal>,
    asked: Option<Instant>,
}

impl Known {
    fn problem(&self) -> Result<(), String> {
        match &self.last_error {
            Some(error) if self.reachable == Some(false) => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

/// A waiting call.
#[derive(Debug)]
pub struct InFlight<'a>(&'a Reach);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Reach {
    /// Counts a call in flight.
    pub fn call(&self) -> InFlight<'_> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(self)
    }

    /// Updates the state. Timeouts do not count: Status measures the reach.
    pub fn note<T>(&self, result: &Result<T, CallError>) {
        match result {
            Ok(_) | Err(CallError::Failed(_)) => self.set(true, None),
            Err(
                error @ (CallError::Unreachable { .. } | CallError::Broken { .. } | CallError::Unimplemented { .. }),
            ) => {
                self.set(false, Some(error.to_string()));
            }
            Err(_) => {}
        }
    }

    fn set(&self, reachable: bool, error: Option<String>) {
        let mut known = lock(&self.known);
        let changed = known.reachable != Some(reachable);
        if changed {
            known.reachable = Some(reachable);
            known.since_unix_ms = clock::unix_ms();
        }
        if let Some(error) = error {
            known.last_error = Some(error);
        }
        let error = known.last_error.clone().filter(|_| !reachable);
        drop(known);
        match (changed, error) {
            (false, _) => {}
            (true, None) => tracing::info!("the service is reached"),
            (true, Some(error)) => tracing::warn!("{error}"),
        }
    }

    /// For status and metrics.
    #[must_use]
    pub fn status(&self, service: &Service, unfinished: u64) -> DelegateStatus {
        let known = lock(&self.known);
        DelegateStatus {
            socket: service.socket().display().to_string(),
            service: known.service.clone(),
            reachable: known.reachable,
            since_unix_ms: known.since_unix_ms,
            last_error: known.last_error.clone(),
            refusal: known.refusal.clone(),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            unfinished,
        }
    }
}

impl Delegation {
    /// Polls directory and service, or shares a poll begun after the call.
    ///
    /// # Errors
    /// An unreached service or invalid answer; a refusal of ADDs is none.
    pub async fn look(&self) -> Result<(), String> {
        let began = Instant::now();
        let _asking = self.reach.asking.lock().await;
        if lock(&self.reach.known).asked.is_some_and(|asked| asked >= began) {
            return lock(&self.reach.known).problem();
        }
        let asked = Instant::now();
        self.records.probe().await;
        let result = self.ask(self.service.status(STATUS_LIMIT)).await;
        if let Err(error @ (CallError::TimedOut { .. } | CallError::Status { .. } | CallError::Unusable { .. })) =
            &result
        {
            self.reach.set(false, Some(error.to_string()));
        }
        let mut known = lock(&self.reach.known);
        known.asked = Some(asked);
        match result {
            Ok(service) => {
                known.service = service;
                known.refusal = None;
            }
            Err(CallError::Failed(failed)) => {
                known.refusal =
                    Some(DelegateRefusal { code: failed.code, message: failed.message, details: failed.details });
            }
            Err(_) => known.refusal = None,
        }
        known.problem()
    }
}
