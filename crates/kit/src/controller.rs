//! Controllers: named periodic tasks, their outcomes and current runs.

use std::{
    collections::BTreeMap,
    fmt::Display,
    future::Future,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use wharf_api::ControllerStatus;
use wharf_core::{
    ids::{EndpointId, MAX_ENDPOINT_ID},
    state::retry_delay_ms,
};

use crate::{clock, sync::lock};

/// Normal runs take seconds.
pub const OVERDUE: Duration = Duration::from_secs(60);
/// Two per possible endpoint; the node's controllers are few.
const MAX_ENDPOINT_ROWS: usize = 2 * MAX_ENDPOINT_ID as usize;
/// Bytes of an error: it may quote foreign text.
const MAX_ERROR: usize = 1024;

type Key = (Option<EndpointId>, String);

/// Successes and failures since start, by name.
pub type Runs = BTreeMap<String, (u64, u64)>;

/// Controllers; clones share them.
#[derive(Clone, Default)]
pub struct Controllers {
    rows: Arc<Mutex<BTreeMap<Key, Row>>>,
    /// Outlives endpoints' rows: counts must not decrease.
    runs: Arc<Mutex<Runs>>,
    omitted: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct Row {
    status: ControllerStatus,
    /// Monotonic, unlike `running_since_unix_ms`.
    running: Option<Instant>,
}

impl Controllers {
    /// Records an outcome; returns consecutive failures.
    pub fn record(&self, name: &str, result: Result<(), impl Display>) -> u64 {
        self.ended(&(None, name.to_owned()), result)
    }

    pub fn begin(&self, name: &str) -> Run {
        self.began((None, name.to_owned()))
    }

    pub fn begin_for(&self, endpoint: EndpointId, name: &str) -> Run {
        self.began((Some(endpoint), name.to_owned()))
    }

    /// Plans without [`Self::run`].
    pub fn plan(&self, name: &str, interval: Duration, wait: Duration) {
        if let Some(row) = lock(&self.rows).get_mut(&(None, name.to_owned())) {
            row.status.interval_ms = Some(millis(interval));
            row.status.next_run_unix_ms = Some(clock::unix_ms().saturating_add(millis(wait)));
        }
    }

    /// Plans an endpoint's next run.
    pub fn plan_for(&self, endpoint: EndpointId, name: &str, wait: Duration) {
        if let Some(row) = lock(&self.rows).get_mut(&(Some(endpoint), name.to_owned())) {
            row.status.next_run_unix_ms = Some(clock::unix_ms().saturating_add(millis(wait)));
        }
    }

    /// Removes an endpoint's rows; later ends add none.
    pub fn forget(&self, endpoint: EndpointId) {
        lock(&self.rows).retain(|(of, _), _| *of != Some(endpoint));
    }

    /// By endpoint and name.
    #[must_use]
    pub fn list(&self) -> Vec<ControllerStatus> {
        let now = Instant::now();
        lock(&self.rows)
            .values()
            .map(|row| ControllerStatus {
                overdue: row.running.is_some_and(|began| now.saturating_duration_since(began) > OVERDUE),
                ..row.status.clone()
            })
            .collect()
    }

    /// Runs that ended since start.
    #[must_use]
    pub fn runs(&self) -> Runs {
        lock(&self.runs).clone()
    }

    /// Updates refused by the full table.
    #[must_use]
    pub fn omitted(&self) -> u64 {
        self.omitted.load(Ordering::Relaxed)
    }

    /// First overdue controller of `names`, and its run's age.
    #[must_use]
    pub fn overdue(&self, names: &[&str]) -> Option<(String, Duration)> {
        let rows = lock(&self.rows);
        names.iter().find_map(|name| {
            let ran = rows.get(&(None, (*name).to_owned()))?.running?.elapsed();
            (ran > OVERDUE).then(|| ((*name).to_owned(), ran))
        })
    }

    /// Runs `work` every `interval` until `stop`, sooner after a failure. The current run ends first.
    pub async fn run<F, Fut, E>(&self, name: &str, interval: Duration, stop: CancellationToken, mut work: F)
    where
        F: FnMut() -> Fut,
        Fut: Future<Output = Result<(), E>>,
        E: Display,
    {
        let key = (None, name.to_owned());
        self.change(&key, |row| row.status.interval_ms = Some(millis(interval)));
        // For the backoff without a row.
        let mut failed = 0;
        loop {
            let run = self.began(key.clone());
            let result = work().await;
            if let Err(error) = &result {
                tracing::warn!(target: "wharf_agent::controller", controller = name, "{error}");
            }
            failed = if result.is_ok() { 0 } else { failed + 1 };
            run.end(result);
            let wait = match failed {
                0 => interval,
                n => Duration::from_millis(retry_delay_ms(n, rand::random())).min(interval),
            };
            self.change(&key, |row| {
                row.status.next_run_unix_ms = Some(clock::unix_ms().saturating_add(millis(wait)));
            });
            tokio::select! {
                () = stop.cancelled() => break,
                () = tokio::time::sleep(wait) => {}
            }
        }
        self.change(&key, |row| (row.status.stopped, row.status.next_run_unix_ms) = (true, None));
    }

    fn began(&self, key: Key) -> Run {
        let began = Instant::now();
        self.change(&key, |row| {
            row.running = Some(began);
            row.status.running_since_unix_ms = Some(clock::unix_ms());
            row.status.next_run_unix_ms = None;
        });
        Run { controllers: self.clone(), key, began, open: true }
    }

    fn ended(&self, key: &Key, result: Result<(), impl Display>) -> u64 {
        {
            let mut runs = lock(&self.runs);
            let counts = runs.entry(key.1.clone()).or_default();
            if result.is_ok() { counts.0 += 1 } else { counts.1 += 1 }
        }
        self.change(key, |row| {
            let status = &mut row.status;
            if let Some(began) = row.running.take() {
                status.last_duration_ms = Some(millis(began.elapsed()));
            }
            status.running_since_unix_ms = None;
            match result {
                Ok(()) => {
                    status.successes += 1;
                    status.consecutive_failures = 0;
                    status.last_success_unix_ms = Some(clock::unix_ms());
                }
                Err(error) => {
                    status.failures += 1;
                    status.consecutive_failures += 1;
                    status.last_failure_unix_ms = Some(clock::unix_ms());
                    status.last_error = Some(cut(error.to_string()));
                }
            }
            status.consecutive_failures
        })
        .unwrap_or(0)
    }

    fn change<T>(&self, key: &Key, change: impl FnOnce(&mut Row) -> T) -> Option<T> {
        let mut rows = lock(&self.rows);
        if !rows.contains_key(key) {
            if key.0.is_some() && rows.len() >= MAX_ENDPOINT_ROWS {
                self.omitted.fetch_add(1, Ordering::Relaxed);
                return None;
            }
            let status =
                ControllerStatus { name: key.1.clone(), endpoint: key.0.map(EndpointId::get), ..Default::default() };
            rows.insert(key.clone(), Row { status, running: None });
        }
        rows.get_mut(key).map(change)
    }
}

/// A controller's current run.
#[must_use = "a run that is dropped was given up"]
pub struct Run {
    controllers: Controllers,
    key: Key,
    began: Instant,
    open: bool,
}

impl Run {
    /// Records the outcome; returns consecutive failures.
    pub fn end(mut self, result: Result<(), impl Display>) -> u64 {
        self.open = false;
        if self.key.0.is_some() && !lock(&self.controllers.rows).contains_key(&self.key) {
            return 0;
        }
        self.controllers.ended(&self.key, result)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        let mut rows = lock(&self.controllers.rows);
        if let Some(row) = rows.get_mut(&self.key).filter(|row| row.running == Some(self.began)) {
            row.running = None;
            row.status.running_since_unix_ms = None;
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn cut(mut text: String) -> String {
    if text.len() > MAX_ERROR {
        text.truncate(text.floor_char_boundary(MAX_ERROR));
        text.push_str("...");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const OK: Result<(), &str> = Ok(());

    fn id(n: u16) -> EndpointId {
        EndpointId::try_from(n).expect("an id")
    }

    fn row(controllers: &Controllers, name: &str) -> ControllerStatus {
        controllers.list().into_iter().find(|c| c.name == name).expect("a row")
    }

    #[test]
    fn outcomes_are_counted_and_the_last_error_stays() {
        let all = Controllers::default();
        assert_eq!(all.record("a", Err("no")), 1);
        assert_eq!(all.record("a", Err("still no")), 2);
        assert_eq!(all.record("a", OK), 0);
        let row = row(&all, "a");
        assert_eq!((row.successes, row.failures, row.consecutive_failures), (1, 2, 0));
        assert_eq!(row.last_error.as_deref(), Some("still no"));
        assert!(!row.is_unwell());
    }

    #[test]
    fn a_run_under_way_is_seen_and_one_given_up_is_not() {
        let all = Controllers::default();
        let run = all.begin("a");
        assert!(row(&all, "a").running_since_unix_ms.is_some());
        drop(run);
        let given_up = row(&all, "a");
        assert_eq!((given_up.running_since_unix_ms, given_up.successes, given_up.failures), (None, 0, 0));
        assert_eq!(all.begin("a").end(OK), 0);
        let ended = row(&all, "a");
        assert!(ended.running_since_unix_ms.is_none() && ended.last_duration_ms.is_some());
    }

    #[test]
    fn rows_of_an_endpoint_go_with_it_and_a_late_end_brings_none_back() {
        let all = Controllers::default();
        let late = all.begin_for(id(7), "regeneration");
        all.begin_for(id(7), "other").end(OK);
        all.begin_for(id(8), "regeneration").end(OK);
        all.record("node", OK);
        all.forget(id(7));
        assert_eq!(all.runs().get("other"), Some(&(1, 0)), "counts of the node stay");
        late.end(Err("too late"));
        let left: Vec<_> = all.list().into_iter().map(|c| (c.name, c.endpoint)).collect();
        assert_eq!(left, [("node".to_owned(), None), ("regeneration".to_owned(), Some(8))]);
    }

    #[test]
    fn rows_of_endpoints_are_bounded_and_say_when_they_are_full() {
        let all = Controllers::default();
        for n in 0..=MAX_ENDPOINT_ROWS {
            all.begin_for(id(1), &n.to_string()).end(OK);
        }
        assert_eq!((all.list().len(), all.omitted()), (MAX_ENDPOINT_ROWS, 1));
        all.record("node", OK);
        assert_eq!(all.list().len(), MAX_ENDPOINT_ROWS + 1, "the node's own always have a place");
    }

    #[test]
    fn an_error_of_any_length_is_cut() {
        let all = Controllers::default();
        all.record("a", Err("ä".repeat(MAX_ERROR)));
        assert!(row(&all, "a").last_error.expect("an error").len() <= MAX_ERROR + 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_comes_again_sooner_and_a_stop_is_marked() {
        let (all, stop) = (Controllers::default(), CancellationToken::new());
        let runs = AtomicU64::new(0);
        let work = || async {
            match runs.fetch_add(1, Ordering::Relaxed) {
                0 => Err("not yet".to_owned()),
                _ => Ok(()),
            }
        };
        let start = tokio::time::Instant::now();
        let look = async {
            while row(&all, "a").successes == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert!(start.elapsed() < Duration::from_secs(1), "the retry waited for the interval");
            let row = row(&all, "a");
            assert_eq!(row.interval_ms, Some(3_600_000));
            assert!(row.next_run_unix_ms.is_some());
            stop.cancel();
        };
        tokio::join!(all.run("a", Duration::from_secs(3600), stop.clone(), work), look);
        let row = row(&all, "a");
        assert!(row.stopped && row.next_run_unix_ms.is_none());
        assert_eq!((row.successes, row.failures), (1, 1));
    }
}
