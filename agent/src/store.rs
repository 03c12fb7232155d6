//! The store: one redb file, one writer thread, one transaction for an endpoint and its leases.
//!
//! redb's commits block (they sync the file), so a thread of its own owns the database. Callers queue changes over a
//! bounded channel and await their commit; changes that are queued together are committed together, each caller's
//! whole or not at all (a redb transaction is atomic), which makes sixteen creates at once cost two commits and not
//! thirty-two.

mod opening;
mod tables;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use redb::{Database, DatabaseError};
use tokio::sync::{mpsc, oneshot};
use wharf_core::{
    ids::{EndpointId, Epoch},
    store::{Change, Snapshot},
    timeline::Life,
};

use crate::clock::monotonic_ms;
use tables::{apply, read_lives, read_one_life, read_snapshot, write_meta};

/// Version of the tables' content. A store of a newer one is refused and left as it is; one of the version before is
/// migrated when it is opened (1 -> 2: the tables of rests, restore failures and quarantine are new and begin empty).
pub const SCHEMA_VERSION: u64 = 2;
/// The oldest version that is migrated.
const OLDEST_SCHEMA: u64 = 1;
/// Changes that may wait for the writer: more than the admission limit lets through at once, so a full channel means
/// the disk is stuck, and callers then wait (bounded by their own deadlines).
const QUEUE: usize = 256;
/// Epochs reserved with one write, so that a create need not commit just to get its number.
const EPOCH_BLOCK: u64 = 4096;

/// For how long a failed commit is shown in status, unless it is overtaken by a restart.
const RECENT: std::time::Duration = std::time::Duration::from_secs(30);
/// A commit that takes longer than this is shown in status.
const SLOW: std::time::Duration = std::time::Duration::from_secs(3);

/// Why the store refused.
#[derive(Debug, Clone, thiserror::Error)]
#[error("store {operation} {}: {cause}", path.display())]
pub struct StoreError {
    /// `open`, `commit`, `read`.
    pub operation: &'static str,
    /// The file.
    pub path: PathBuf,
    /// Cause, with what to do where that is known.
    pub cause: String,
}

enum Job {
    Commit { changes: Vec<Change>, reply: oneshot::Sender<Result<(), StoreError>> },
    Read { reply: oneshot::Sender<Result<Snapshot, StoreError>> },
    Ping { reply: oneshot::Sender<Result<(), StoreError>> },
    Lives { reply: oneshot::Sender<Result<(Vec<Life>, u64), StoreError>> },
    Life { id: EndpointId, epoch: Epoch, reply: oneshot::Sender<Result<Option<Life>, StoreError>> },
}

/// Handle to the writer thread. Clones share it; when the last is dropped, the thread commits what is queued and ends.
#[derive(Clone)]
pub struct Store {
    jobs: mpsc::Sender<Job>,
    path: Arc<PathBuf>,
    boot_id: Arc<str>,
    epochs: Arc<Epochs>,
    stats: Arc<Stats>,
}

/// Counters for status and metrics.
#[derive(Debug, Default)]
pub struct Stats {
    /// Commits that succeeded.
    pub commits: AtomicU64,
    /// Commits that failed.
    pub failures: AtomicU64,
    /// The last commit succeeded.
    pub healthy: AtomicBool,
    /// When a commit failed last, monotonic milliseconds; 0 when none has.
    pub last_failure: AtomicU64,
    /// When the work that the disk is at now began, monotonic milliseconds; 0 when it rests.
    pub busy_since: AtomicU64,
    /// Change sets that were committed without their part of the timeline, because with it there was no room.
    pub timeline_dropped: AtomicU64,
}

impl Stats {
    /// How long ago a commit failed, while that is recent: with a disk that is nearly full, small commits succeed between
    /// those that fail.
    #[must_use]
    pub fn failed_recently(&self) -> Option<std::time::Duration> {
        let last = self.last_failure.load(Ordering::Relaxed);
        let ago = std::time::Duration::from_millis(monotonic_ms().saturating_sub(last));
        (last > 0 && ago < RECENT).then_some(ago)
    }

    /// For how long the disk has been at one piece of work, when that is too long.
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

/// What opening found.
pub struct Opened {
    /// The store.
    pub store: Store,
    /// What it held.
    pub snapshot: Snapshot,
    /// Set when a file was put aside, with the reason.
    pub set_aside: Option<String>,
    /// The file that was put aside told of this boot, or there was none: endpoints may live that the store does not know.
    pub lost: bool,
    /// The writer thread; joined at shutdown after every [`Store`] is dropped.
    pub writer: std::thread::JoinHandle<()>,
}

impl Store {
    /// Opens the file, or makes it. A file of another boot is put aside (what it tells died with that boot); so is a
    /// damaged one, with a message; one of a newer schema is refused.
    ///
    /// # Errors
    /// When the file cannot be opened or made, is held by another agent, or is of a newer schema.
    pub fn open(path: &Path, boot_id: &str) -> Result<Opened, StoreError> {
        Self::open_with(path, boot_id, |path| Database::create(path))
    }

    /// [`Self::open`], with another way to open a redb file, or make it: for tests whose disk is full or slow.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(
        path: &Path,
        boot_id: &str,
        opener: impl Fn(&Path) -> Result<Database, DatabaseError> + Send + 'static,
    ) -> Result<Opened, StoreError> {
        let fail = |cause: String| StoreError { operation: "open", path: path.to_owned(), cause };
        let opening::Found { database, meta, snapshot, set_aside, lost } =
            opening::open(&opener, path, boot_id).map_err(fail)?;
        let first_epoch = meta.epoch_high + 1;
        let reserved = first_epoch + EPOCH_BLOCK;
        write_meta(&database, boot_id, reserved).map_err(fail)?;

        let (jobs, receiver) = mpsc::channel(QUEUE);
        let stats = Arc::new(Stats { healthy: AtomicBool::new(true), ..Stats::default() });
        let writer = {
            let stats = Arc::clone(&stats);
            let file = File { database: Some(database), path: path.to_owned(), opener: Box::new(opener) };
            std::thread::Builder::new()
                .name("wharf-store".into())
                .spawn(move || write_loop(file, receiver, &stats))
                .map_err(|e| fail(format!("start its thread: {e}")))?
        };
        let epochs = Epochs { next: AtomicU64::new(first_epoch), reserved: tokio::sync::Mutex::new(reserved) };
        let path = Arc::new(path.to_owned());
        let store = Self { jobs, path, boot_id: boot_id.into(), epochs: Arc::new(epochs), stats };
        Ok(Opened { store, snapshot, set_aside, lost, writer })
    }

    /// Makes all changes durable, together or not at all.
    ///
    /// # Errors
    /// When the commit failed; then none of the changes is in the store.
    pub async fn commit(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        if changes.is_empty() {
            return Ok(());
        }
        let (reply, answer) = oneshot::channel();
        let gone = || StoreError {
            operation: "commit",
            path: (*self.path).clone(),
            cause: "the writer thread has ended; restart the agent".into(),
        };
        self.jobs.send(Job::Commit { changes, reply }).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Reads everything, after what was queued before; for the audit.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub async fn snapshot(&self) -> Result<Snapshot, StoreError> {
        let (reply, answer) = oneshot::channel();
        let gone = || StoreError {
            operation: "read",
            path: (*self.path).clone(),
            cause: "the writer thread has ended; restart the agent".into(),
        };
        self.jobs.send(Job::Read { reply }).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Every life in the timeline, and how many rows of it cannot be read.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub async fn lives(&self) -> Result<(Vec<Life>, u64), StoreError> {
        let (reply, answer) = oneshot::channel();
        self.jobs.send(Job::Lives { reply }).await.map_err(|_| self.ended("read"))?;
        answer.await.map_err(|_| self.ended("read"))?
    }

    /// One life in the timeline; none when it is not there, or cannot be read.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub async fn life(&self, id: EndpointId, epoch: Epoch) -> Result<Option<Life>, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.jobs.send(Job::Life { id, epoch, reply }).await.map_err(|_| self.ended("read"))?;
        answer.await.map_err(|_| self.ended("read"))?
    }

    fn ended(&self, operation: &'static str) -> StoreError {
        let cause = "the writer thread has ended; restart the agent".into();
        StoreError { operation, path: (*self.path).clone(), cause }
    }

    /// Answers when the writer thread has done what was queued before: it lives, and its disk answers. Nothing is read or
    /// written, but a file that was closed after a failure is opened again.
    ///
    /// # Errors
    /// When the file cannot be opened again, or the thread has ended.
    pub async fn ping(&self) -> Result<(), StoreError> {
        let (reply, answer) = oneshot::channel();
        let gone = || StoreError {
            operation: "read",
            path: (*self.path).clone(),
            cause: "the writer thread has ended; restart the agent".into(),
        };
        self.jobs.send(Job::Ping { reply }).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// The next epoch; durable before it is used, so that a crash never brings one back.
    ///
    /// # Errors
    /// When a new block of epochs cannot be reserved.
    pub async fn next_epoch(&self) -> Result<Epoch, StoreError> {
        let epoch = self.epochs.next.fetch_add(1, Ordering::Relaxed);
        // Taken by every caller, but held across the commit only once in EPOCH_BLOCK creates.
        let mut reserved = self.epochs.reserved.lock().await;
        if epoch >= *reserved {
            let high = epoch + EPOCH_BLOCK;
            self.commit(vec![Change::ReserveEpochs(Epoch(high))]).await?;
            *reserved = high;
        }
        Ok(Epoch(epoch))
    }

    /// No epoch up to this one is given out from here on: something in the kernel carries it, and the store that knew
    /// was lost.
    pub fn skip_epochs(&self, up_to: Epoch) {
        self.epochs.next.fetch_max(up_to.0.saturating_add(1), Ordering::Relaxed);
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The boot that everything in it belongs to.
    #[must_use]
    pub fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Opens a redb file, or makes it.
type Opener = Box<dyn Fn(&Path) -> Result<Database, DatabaseError> + Send>;

/// The open file.
struct File {
    /// `None` after a failure: an I/O error leaves redb refusing everything until the file is opened anew, and a disk
    /// that was full for a second must not cost the agent its store.
    database: Option<Database>,
    path: PathBuf,
    opener: Opener,
}

impl File {
    fn with<T>(
        &mut self,
        operation: &'static str,
        f: impl FnOnce(&Database) -> Result<T, String>,
    ) -> Result<T, StoreError> {
        let fail = |cause| StoreError { operation, path: self.path.clone(), cause };
        let database = match self.database.take() {
            Some(database) => database,
            // Opening would make a new, empty one, and the agent would think that it has no endpoints.
            None if !self.path.exists() => return Err(fail("the file is gone; restart the agent".into())),
            None => (self.opener)(&self.path).map_err(|e| fail(format!("open it again after a failure: {e}")))?,
        };
        let value = f(&database).map_err(fail)?;
        self.database = Some(database);
        Ok(value)
    }
}

/// Who asks for lives.
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
        commit_all(&mut file, commits, stats);
        for reply in reads {
            let result = file.with("read", |database| read_snapshot(database).map_err(|e| e.cause().to_owned()));
            reply.send(result).ok(); // a reader that went away needs no answer
        }
        for reply in pings {
            reply.send(file.with("read", |_| Ok(()))).ok(); // as above
        }
        for job in lives {
            match job {
                // As above.
                Lives::All(reply) => drop(reply.send(file.with("read", read_lives))),
                Lives::One(id, epoch, reply) => drop(reply.send(file.with("read", |d| read_one_life(d, id, epoch)))),
            }
        }
        stats.busy_since.store(0, Ordering::Relaxed);
    }
}

/// A change set and who awaits its commit.
type Commit = (Vec<Change>, oneshot::Sender<Result<(), StoreError>>);

fn commit_all(file: &mut File, commits: Vec<Commit>, stats: &Stats) {
    if commits.is_empty() {
        return;
    }
    // A caller that went away has its change durable all the same; its task will look again.
    let all = file.with("commit", |database| apply(database, commits.iter().flat_map(|(changes, _)| changes)));
    if all.is_ok() {
        stats.commits.fetch_add(1, Ordering::Relaxed);
        stats.healthy.store(true, Ordering::Relaxed);
        commits.into_iter().for_each(|(_, reply)| drop(reply.send(Ok(()))));
        return;
    }
    // One caller's change may be what cannot be stored: try each alone, so that only that one fails.
    for (changes, reply) in commits {
        let mut result = file.with("commit", |database| apply(database, changes.iter()));
        // What is only told later must not keep an endpoint from coming or going.
        if result.is_err() && changes.iter().any(Change::is_of_timeline) {
            let needed = || changes.iter().filter(|c| !c.is_of_timeline());
            if needed().next().is_some() {
                result = file.with("commit", |database| apply(database, needed()));
            }
            stats.timeline_dropped.fetch_add(1, Ordering::Relaxed);
        }
        stats.healthy.store(result.is_ok(), Ordering::Relaxed);
        let counter = if result.is_ok() { &stats.commits } else { &stats.failures };
        counter.fetch_add(1, Ordering::Relaxed);
        if result.is_err() {
            stats.last_failure.store(monotonic_ms().max(1), Ordering::Relaxed);
        }
        drop(reply.send(result));
    }
}
