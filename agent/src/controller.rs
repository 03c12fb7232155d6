//! Controllers: named things that run again and again, with what came of it.

use std::{
    collections::BTreeMap,
    future::Future,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio_util::sync::CancellationToken;
use wharf_api::ControllerStatus;
use wharf_core::state::retry_delay_ms;

use crate::{clock, sync::lock};

/// What is known of every controller. One lock, held for the copy of a row.
#[derive(Clone, Default)]
pub struct Controllers {
    rows: Arc<Mutex<BTreeMap<String, ControllerStatus>>>,
}

impl Controllers {
    /// Notes the outcome of a run.
    pub fn record(&self, name: &str, result: Result<(), String>) -> u64 {
        let mut rows = lock(&self.rows);
        let row = rows.entry(name.to_owned()).or_insert_with(|| ControllerStatus {
            name: name.to_owned(),
            successes: 0,
            failures: 0,
            consecutive_failures: 0,
            last_success_unix_ms: None,
            last_failure_unix_ms: None,
            last_error: None,
        });
        match result {
            Ok(()) => {
                row.successes += 1;
                row.consecutive_failures = 0;
                row.last_success_unix_ms = Some(clock::unix_ms());
            }
            Err(error) => {
                row.failures += 1;
                row.consecutive_failures += 1;
                row.last_failure_unix_ms = Some(clock::unix_ms());
                row.last_error = Some(error);
            }
        }
        row.consecutive_failures
    }

    /// Every row, by name.
    #[must_use]
    pub fn list(&self) -> Vec<ControllerStatus> {
        lock(&self.rows).values().cloned().collect()
    }

    /// Runs `work` every `interval` until told to stop; after a failure it comes again sooner, with growing delay.
    pub async fn run<F, Fut>(&self, name: &str, interval: Duration, stop: CancellationToken, mut work: F)
    where
        F: FnMut() -> Fut,
        Fut: Future<Output = Result<(), String>>,
    {
        loop {
            let result = work().await;
            if let Err(error) = &result {
                tracing::warn!(controller = name, "{error}");
            }
            let failed = self.record(name, result);
            let wait = match u32::try_from(failed).unwrap_or(u32::MAX) {
                0 => interval,
                n => Duration::from_millis(retry_delay_ms(n, rand::random())).min(interval),
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(wait) => {}
            }
        }
    }
}
