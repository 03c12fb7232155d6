//! The deletion queue's waiting records and canary.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, Instant},
};

use wharf_api::{DeletionQueueStatus, Health};
use wharf_core::ids::Attachment;
use wharf_handover::queue::{BAD, Entry, Queue, QueueError};
use wharf_kit::{clock, sync::lock};

const CANARY_PATIENCE: Duration = Duration::from_secs(5);
/// Milliseconds until a record degrades the queue.
const OLD_MS: u64 = 60_000;

/// The queue.
pub struct Deletions {
    /// The directory.
    pub queue: Queue,
    /// Serializes drains. Held across deletes, which are bounded.
    turn: tokio::sync::Mutex<()>,
    seen: Mutex<Seen>,
    since: Instant,
}

#[derive(Default)]
struct Seen {
    waiting: BTreeMap<String, Waiting>,
    unusable: u64,
    aside: u64,
    drained: u64,
    canary: Canary,
}

/// A failed delete, whose age starts with the difference of wall clocks and follows the monotonic clock.
struct Waiting {
    age_ms: u64,
    met: Instant,
}

impl Waiting {
    fn meet(written_unix_ms: u64) -> Self {
        Self { age_ms: clock::unix_ms().saturating_sub(written_unix_ms), met: Instant::now() }
    }

    fn age_ms(&self) -> u64 {
        self.age_ms.saturating_add(millis(self.met))
    }
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

#[derive(Default)]
enum Canary {
    #[default]
    NotYet,
    Out {
        nonce: String,
        since: Instant,
    },
    Back {
        after_ms: u64,
        live: bool,
    },
    Failed(QueueFailure),
}

#[derive(Debug, thiserror::Error)]
pub enum QueueFailure {
    /// The queue refused.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// A panicked or cancelled task.
    #[error("deletion queue {queue}: {1}", queue = .0.display())]
    Task(PathBuf, #[source] tokio::task::JoinError),
}

/// Why a drain runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The agent's.
    Start,
    /// A record.
    Event,
    Tick,
}

impl Deletions {
    /// In a run directory.
    #[must_use]
    pub fn new(run_dir: &Path) -> Self {
        Self {
            queue: Queue::new(run_dir),
            turn: tokio::sync::Mutex::new(()),
            seen: Mutex::default(),
            since: Instant::now(),
        }
    }

    /// Age of an entry, milliseconds.
    #[must_use]
    pub fn age_ms(&self, entry: &Entry) -> u64 {
        let seen = lock(&self.seen);
        seen.waiting.get(&entry.name).map_or_else(|| Waiting::meet(entry.written_unix_ms).age_ms, Waiting::age_ms)
    }

    /// Waits for the turn to drain.
    pub async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// Records remaining files (name, write time), and files set aside now and in total.
    pub fn drained(&self, stay: &[(String, u64)], unusable: u64, aside: u64) {
        let mut seen = lock(&self.seen);
        let mut before = std::mem::take(&mut seen.waiting);
        seen.waiting.extend(
            stay.iter()
                .map(|(name, written)| (name.clone(), before.remove(name).unwrap_or_else(|| Waiting::meet(*written)))),
        );
        seen.unusable += unusable;
        seen.aside = aside;
    }

    /// Counts a served record.
    pub fn count_served(&self) {
        lock(&self.seen).drained += 1;
    }

    /// Records the canary, or why it was not sent.
    pub fn canary_sent(&self, sent: Result<String, QueueFailure>) {
        lock(&self.seen).canary = match sent {
            Ok(nonce) => Canary::Out { nonce, since: Instant::now() },
            Err(why) => Canary::Failed(why),
        };
    }

    /// Whether the canary could not be sent.
    pub fn canary_failed(&self) -> bool {
        matches!(lock(&self.seen).canary, Canary::Failed(_))
    }

    /// The queue delivered a canary.
    pub fn canary_came(&self, nonce: &str, cause: Cause) {
        let mut seen = lock(&self.seen);
        if let Canary::Out { nonce: ours, since } = &seen.canary
            && ours == nonce
        {
            let after_ms = millis(*since);
            seen.canary = Canary::Back { after_ms, live: cause == Cause::Event };
        }
    }

    /// Sets an unusable record aside.
    pub async fn discard(&self, name: &str) -> Result<(), QueueFailure> {
        let name = name.to_owned();
        let set_aside = self.blocking(move |queue| {
            let is_there = queue.list()?.iter().any(|entry| entry.name == name);
            queue.set_aside(&name).map(|()| is_there)
        });
        if set_aside.await? {
            let mut seen = lock(&self.seen);
            seen.unusable += 1;
            seen.aside += 1;
        }
        Ok(())
    }

    /// Removes records of deleted attachments.
    pub async fn served(&self, attachments: &[Attachment]) {
        let waiting = attachments.iter().filter(|a| {
            let (network, container, ifname) = (a.network.as_str(), a.container_id.as_str(), a.ifname.as_str());
            self.queue.contains(network, container, ifname)
        });
        for a in waiting {
            let name = Queue::file_name(a.network.as_str(), a.container_id.as_str(), a.ifname.as_str());
            if let Err(error) = self.blocking(move |queue| queue.remove(&name)).await {
                tracing::warn!(%a, "{error}; it is served again, which does no harm");
            }
        }
    }

    /// Runs on a blocking thread.
    ///
    /// # Errors
    /// The operation's error.
    pub async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Queue) -> Result<T, QueueError> + Send + 'static,
    ) -> Result<T, QueueFailure> {
        let queue = self.queue.clone();
        match tokio::task::spawn_blocking(move || work(&queue)).await {
            Ok(result) => Ok(result?),
            Err(error) => Err(QueueFailure::Task(self.queue.path().to_owned(), error)),
        }
    }

    /// For status and metrics.
    #[must_use]
    pub fn status(&self) -> (DeletionQueueStatus, Health, String) {
        let seen = lock(&self.seen);
        let oldest_age = seen.waiting.values().map(Waiting::age_ms).max();
        let records = seen.waiting.len();
        let (mut health, canary) = match &seen.canary {
            Canary::NotYet if self.since.elapsed() < CANARY_PATIENCE => (Health::Ok, "not sent yet".to_owned()),
            Canary::NotYet => {
                (Health::Degraded, format!("could not be sent: {} cannot be watched", self.queue.path().display()))
            }
            Canary::Out { since, .. } if since.elapsed() < CANARY_PATIENCE => (Health::Ok, "on its way".to_owned()),
            Canary::Out { since, .. } => {
                let age = since.elapsed().as_secs();
                (Health::Degraded, format!("has not come out for {age} s: records of deletes may not be taken up"))
            }
            Canary::Back { after_ms, live: true } => (Health::Ok, format!("came out after {after_ms} ms")),
            Canary::Back { live: false, .. } => {
                (Health::Degraded, "came out by the tick only: the directory's events do not arrive".to_owned())
            }
            Canary::Failed(why) => (Health::Degraded, format!("could not be sent: {why}")),
        };
        if seen.aside > 0 || oldest_age.is_some_and(|age_ms| age_ms > OLD_MS) {
            health = health.max(Health::Degraded);
        }
        let waiting = match oldest_age {
            None => "empty".to_owned(),
            Some(age_ms) => format!("{records} waiting, the oldest for {} s", age_ms / 1_000),
        };
        let unusable = match seen.aside {
            0 => String::new(),
            n => format!(", {n} put aside as unusable in {}", self.queue.path().join(BAD).display()),
        };
        let message = format!("{waiting}{unusable}; canary {canary}");
        let status = DeletionQueueStatus {
            records: u64::try_from(records).unwrap_or(u64::MAX),
            oldest_age_ms: oldest_age.unwrap_or(0),
            unusable: seen.unusable,
            drained: seen.drained,
            canary,
        };
        (status, health, message)
    }
}
