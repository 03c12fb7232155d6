//! The store: a redb file and its writer thread.
//!
//! Commits block on fsync: queued ones are committed together, each caller's as a whole or not at all.
//!
//! Log lines have the agent's targets (`wharf_agent::store`), which operators' filters name.

pub mod check;
mod error;
mod file;
mod opening;
mod tables;

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use redb::{Database, DatabaseError};
use tokio::sync::{mpsc, oneshot};
use wharf_core::{
    ids::{EndpointId, Epoch},
    store::{Change, Snapshot},
    timeline::Life,
};
use wharf_kit::{clock::monotonic_ms, sync::lock};

pub use error::{Cause, StoreError};
use file::File;
use opening::CACHE_BYTES;
use tables::{read_lives, read_one_life, read_snapshot, write_meta};

/// Above the admission limit: a full channel means a stuck disk.
const QUEUE: usize = 256;
/// Reserved with one write: creates need no commit for their epoch.
const EPOCH_BLOCK: u64 = 4096;

const MAX_UNTOLD: usize = 256;

/// Interval of file checks while idle: bounds how long a kill loses a lost file's content.
pub const LOOK: std::time::Duration = std::time::Duration::from_secs(1);

/// How long the status shows failed commits and rewrites.
const RECENT: std::time::Duration = std::time::Duration::from_secs(30);
/// Longer commits are shown.
const SLOW: std::time::Duration = std::time::Duration::from_secs(3);

enum Job {
    Commit { changes: Vec<Change>, reply: oneshot::Sender<Result<(), StoreError>> },
    Read { reply: oneshot::Sender<Result<Snapshot, StoreError>> },
    Ping { reply: oneshot::Sender<Result<(), StoreError>> },
    Lives { reply: oneshot::Sender<Result<(Vec<Life>, u64), StoreError>> },
    Life { id: EndpointId, epoch: Epoch, reply: oneshot::Sender<Result<Option<Life>, StoreError>> },
}

/// Handle to the writer thread, which ends after the last clone.
#[derive(Clone)]
pub struct Store {
    jobs: mpsc::Sender<Job>,
    path: Arc<PathBuf>,
    boot_id: Arc<str>,
    epochs: Arc<Epochs>,
    stats: Arc<Stats>,
}

/// Counters.
#[derive(Debug, Default)]
pub struct Stats {
    /// Succeeded commits.
    pub commits: AtomicU64,
    /// Failed commits.
    pub failures: AtomicU64,
    /// Last commit succeeded.
    pub healthy: AtomicBool,
    /// Monotonic milliseconds; 0 for none.
    pub last_failure: AtomicU64,
    /// Start of work, monotonic milliseconds; 0: idle.
    pub busy_since: AtomicU64,
    /// Change sets without timeline.
    pub timeline_dropped: AtomicU64,
    timeline_lost: AtomicBool,
    last_cause: Mutex<String>,
    rewritten: Mutex<Option<(std::time::Instant, String)>>,
    untold: Mutex<VecDeque<Life>>,
}

impl Stats {
    /// Recent failed commit: on a full disk, small commits succeed in between.
    #[must_use]
    pub fn failed_recently(&self) -> Option<(std::time::Duration, String)> {
        let last = self.last_failure.load(Ordering::Relaxed);
        let ago = std::time::Duration::from_millis(monotonic_ms().saturating_sub(last));
        (last > 0 && ago < RECENT).then(|| (ago, lock(&self.last_cause).clone()))
    }

    /// Recent rewrite.
    #[must_use]
    pub fn rewritten_recently(&self) -> Option<(std::time::Duration, String)> {
        let rewritten = lock(&self.rewritten);
        let (ago, what) = rewritten.as_ref().map(|(at, what)| (at.elapsed(), what.clone()))?;
        (ago < RECENT).then_some((ago, what))
    }

    fn failed(&self, error: &StoreError) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        self.last_failure.store(monotonic_ms().max(1), Ordering::Relaxed);
        *lock(&self.last_cause) = error.cause.to_string();
    }

    fn keep_untold(&self, changes: Vec<Change>) {
        let mut untold = lock(&self.untold);
        for change in changes {
            if let Change::PutLife(life) = change
                && life.ended.is_some()
            {
                if untold.len() >= MAX_UNTOLD {
                    untold.pop_front();
                }
                untold.push_back(*life);
            }
        }
    }

    /// Busy time above `SLOW`.
    #[must_use]
    pub fn writing_for(&self) -> Option<std::time::Duration> {
        let since = self.busy_since.load(Ordering::Relaxed);
        let busy = std::time::Duration::from_millis(monotonic_ms().saturating_sub(since));
        (since > 0 && busy > SLOW).then_some(busy)
    }
}

struct Epochs {
    next: AtomicU64,
    reserved: tokio::sync::Mutex<u64>,
}

/// An opened store.
pub struct Opened {
    pub store: Store,
    /// Content at start.
    pub snapshot: Snapshot,
    /// Why a file was set aside.
    pub set_aside: Option<String>,
    /// Unknown endpoints may exist: this boot's records were lost, or no file existed.
    pub lost: bool,
    /// Ends after the last [`Store`].
    pub writer: std::thread::JoinHandle<()>,
}

impl Store {
    /// Opens or creates the file; sets aside a damaged one, and one of another boot, whose endpoints ended.
    ///
    /// # Errors
    /// Not openable, in use by another agent, or of a newer schema.
    pub fn open(path: &Path, boot_id: &str) -> Result<Opened, StoreError> {
        Self::open_with(path, boot_id, |path| Database::builder().set_cache_size(CACHE_BYTES).create(path))
    }

    /// [`Self::open`] with an opener, for tests.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(
        path: &Path,
        boot_id: &str,
        opener: impl Fn(&Path) -> Result<Database, DatabaseError> + Send + 'static,
    ) -> Result<Opened, StoreError> {
        let fail = |cause| StoreError::new("open", path, cause);
        let opening::Found { database, meta, snapshot, set_aside, lost } =
            opening::open(&opener, path, boot_id).map_err(fail)?;
        let first_epoch = meta.epoch_high + 1;
        let reserved = first_epoch + EPOCH_BLOCK;
        write_meta(&database, boot_id, reserved, lost).map_err(fail)?;
        let file = File::new(database, path, Box::new(opener)).map_err(fail)?;

        let (jobs, receiver) = mpsc::channel(QUEUE);
        let stats = Arc::new(Stats { healthy: AtomicBool::new(true), ..Stats::default() });
        let writer = {
            let stats = Arc::clone(&stats);
            std::thread::Builder::new()
                .name("wharf-store".into())
                .spawn(move || write_loop(file, receiver, &stats))
                .map_err(|e| fail(Cause::at("start its thread", e)))?
        };
        let epochs = Epochs { next: AtomicU64::new(first_epoch), reserved: tokio::sync::Mutex::new(reserved) };
        let path = Arc::new(path.to_owned());
        let store = Self { jobs, path, boot_id: boot_id.into(), epochs: Arc::new(epochs), stats };
        Ok(Opened { store, snapshot, set_aside, lost, writer })
    }

    /// Makes all changes durable, or none.
    ///
    /// # Errors
    /// Failed commit; the store is unchanged.
    pub async fn commit(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        if changes.is_empty() {
            return Ok(());
        }
        self.ask("commit", |reply| Job::Commit { changes, reply }).await
    }

    /// Reads the store, after all earlier jobs.
    ///
    /// # Errors
    /// Unreadable file.
    pub async fn snapshot(&self) -> Result<Snapshot, StoreError> {
        self.ask("read", |reply| Job::Read { reply }).await
    }

    /// All lives, and the number of unreadable rows.
    ///
    /// # Errors
    /// Unreadable file.
    pub async fn lives(&self) -> Result<(Vec<Life>, u64), StoreError> {
        self.ask("read", |reply| Job::Lives { reply }).await
    }

    /// `None` if absent or unreadable.
    ///
    /// # Errors
    /// Unreadable file.
    pub async fn life(&self, id: EndpointId, epoch: Epoch) -> Result<Option<Life>, StoreError> {
        self.ask("read", |reply| Job::Life { id, epoch, reply }).await
    }

    /// Ended lives dropped from their commits, which the caller must write.
    #[must_use]
    pub fn take_untold(&self) -> Vec<Life> {
        lock(&self.stats.untold).drain(..).collect()
    }

    /// The timeline was lost since the last call: the caller must rewrite it.
    #[must_use]
    pub fn take_timeline_lost(&self) -> bool {
        self.stats.timeline_lost.swap(false, Ordering::Relaxed)
    }

    /// As in [`Self::take_untold`].
    #[must_use]
    pub fn untold(&self, id: EndpointId, epoch: Epoch) -> Option<Life> {
        lock(&self.stats.untold).iter().find(|l| l.who.id == id && l.who.epoch == epoch).cloned()
    }

    async fn ask<T>(
        &self,
        operation: &'static str,
        job: impl FnOnce(oneshot::Sender<Result<T, StoreError>>) -> Job,
    ) -> Result<T, StoreError> {
        let ended = || StoreError::new(operation, &self.path, Cause::Ended);
        let (reply, answer) = oneshot::channel();
        self.jobs.send(job(reply)).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }

    /// Answers after earlier jobs. Reopens a file closed after a failure; rewrites a removed, replaced or modified one.
    ///
    /// # Errors
    /// Not reopenable, lost since the last check, or the thread has ended.
    pub async fn ping(&self) -> Result<(), StoreError> {
        self.ask("read", |reply| Job::Ping { reply }).await
    }

    /// The next epoch, reserved durably first: no crash reissues it.
    ///
    /// # Errors
    /// No block of epochs can be reserved.
    pub async fn next_epoch(&self) -> Result<Epoch, StoreError> {
        let epoch = self.epochs.next.fetch_add(1, Ordering::Relaxed);
        let mut reserved = self.epochs.reserved.lock().await;
        if epoch >= *reserved {
            let high = epoch + EPOCH_BLOCK;
            self.commit(vec![Change::ReserveEpochs(Epoch(high))]).await?;
            *reserved = high;
        }
        Ok(Epoch(epoch))
    }

    /// Skips epochs up to `up_to`, of a kernel object without a record.
    pub fn skip_epochs(&self, up_to: Epoch) {
        self.epochs.next.fetch_max(up_to.0.saturating_add(1), Ordering::Relaxed);
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Boot of all records.
    #[must_use]
    pub fn boot_id(&self) -> &str {
        &self.boot_id
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

enum Lives {
    All(oneshot::Sender<Result<(Vec<Life>, u64), StoreError>>),
    One(EndpointId, Epoch, oneshot::Sender<Result<Option<Life>, StoreError>>),
}

fn write_loop(mut file: File, mut jobs: mpsc::Receiver<Job>, stats: &Stats) {
    let mut queued = Vec::new();
    while jobs.blocking_recv_many(&mut queued, QUEUE) > 0 {
        stats.busy_since.store(monotonic_ms().max(1), Ordering::Relaxed);
        let (mut commits, mut reads, mut lives) = (Vec::new(), Vec::new(), Vec::new());
        let mut pings = Vec::new();
        for job in queued.drain(..) {
            match job {
                Job::Commit { changes, reply } => commits.push((changes, reply)),
                Job::Read { reply } => reads.push(reply),
                Job::Ping { reply } => pings.push(reply),
                Job::Lives { reply } => lives.push(Lives::All(reply)),
                Job::Life { id, epoch, reply } => lives.push(Lives::One(id, epoch, reply)),
            }
        }
        let lost = write_back(&mut file, stats);
        let committed = match &lost {
            Some(error) => refuse_all(commits, error, stats),
            None => commit_all(&mut file, commits, stats),
        };
        for reply in reads {
            reply.send(file.read(read_snapshot)).ok(); // a reader that went away needs no answer
        }
        for reply in pings {
            let answer = lost.clone().map_or_else(|| file.read(|_| Ok(())), Err);
            reply.send(answer).ok(); // the caller may have gone
        }
        for job in lives {
            match job {
                Lives::All(reply) => drop(reply.send(file.read(read_lives))),
                Lives::One(id, epoch, reply) => drop(reply.send(file.read(|d| read_one_life(d, id, epoch)))),
            }
        }
        file.changed(committed);
        if jobs.is_empty() {
            file.compact();
        }
        stats.busy_since.store(0, Ordering::Relaxed);
    }
    // Before closing, which writes to the file.
    write_back(&mut file, stats);
}

/// Rewrites a file that another process changed; refuses queued changes: it may interfere again.
fn write_back(file: &mut File, stats: &Stats) -> Option<StoreError> {
    let what = file.check().err()?;
    let cause = match file.write_anew() {
        Ok(timeline_lost) => {
            stats.timeline_lost.fetch_or(timeline_lost, Ordering::Relaxed);
            *lock(&stats.rewritten) = Some((std::time::Instant::now(), what.to_string()));
            Cause::WrittenAnew(Box::new(what))
        }
        Err(why) => Cause::at(format!("{what}, and cannot be written anew"), why),
    };
    let error = file.error("write", cause);
    tracing::error!(target: "wharf_agent::store", "{error}");
    Some(error)
}

fn refuse_all(commits: Vec<Commit>, error: &StoreError, stats: &Stats) -> u64 {
    for (_, reply) in commits {
        stats.failed(error);
        reply.send(Err(error.clone())).ok(); // a caller that went away has nothing to undo here
    }
    0
}

type Commit = (Vec<Change>, oneshot::Sender<Result<(), StoreError>>);

fn commit_all(file: &mut File, commits: Vec<Commit>, stats: &Stats) -> u64 {
    if commits.is_empty() {
        return 0;
    }
    let count = commits.iter().map(|(changes, _)| changes.len() as u64).sum();
    let all = file.commit(commits.iter().flat_map(|(changes, _)| changes));
    if all.is_ok() {
        stats.commits.fetch_add(1, Ordering::Relaxed);
        stats.healthy.store(true, Ordering::Relaxed);
        commits.into_iter().for_each(|(_, reply)| drop(reply.send(Ok(()))));
        return count;
    }
    // One may be at fault.
    for (changes, reply) in commits {
        let mut result = file.commit(changes.iter());
        // Timelines must not block creates or deletes.
        if result.is_err() && changes.iter().any(Change::is_of_timeline) {
            let needed = || changes.iter().filter(|c| !c.is_of_timeline());
            if needed().next().is_some() {
                result = file.commit(needed());
            }
            stats.timeline_dropped.fetch_add(1, Ordering::Relaxed);
            if result.is_ok() {
                stats.keep_untold(changes);
            }
        }
        stats.healthy.store(result.is_ok(), Ordering::Relaxed);
        match &result {
            Ok(()) => drop(stats.commits.fetch_add(1, Ordering::Relaxed)),
            Err(error) => stats.failed(error),
        }
        drop(reply.send(result));
    }
    count
}
