//! The store: one redb file, one writer thread, one transaction for an endpoint and its leases.
//!
//! redb's commits block (they sync the file), so a thread of its own owns the database. Callers queue changes over a
//! bounded channel and await their commit; changes that are queued together are committed together, each caller's
//! whole or not at all (a redb transaction is atomic), which makes sixteen creates at once cost two commits and not
//! thirty-two.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition, TableError};
use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::{mpsc, oneshot};
use wharf_core::{
    ids::{EndpointId, Epoch},
    store::{Change, Intent, Snapshot},
};

/// Version of the tables' content; a store of a newer one is refused and left as it is.
pub const SCHEMA_VERSION: u64 = 1;
/// Changes that may wait for the writer: more than the admission limit lets through at once, so a full channel means
/// the disk is stuck, and callers then wait (bounded by their own deadlines).
const QUEUE: usize = 256;
/// Epochs reserved with one write, so that a create need not commit just to get its number.
const EPOCH_BLOCK: u64 = 4096;

const META: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");
const ENDPOINTS: TableDefinition<u16, &[u8]> = TableDefinition::new("endpoints");
const LEASES: TableDefinition<&str, &[u8]> = TableDefinition::new("leases");
const INTENTS: TableDefinition<(u16, u64), &[u8]> = TableDefinition::new("intents");

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
}

/// Handle to the writer thread. Clones share it; when the last is dropped, the thread commits what is queued and ends.
#[derive(Clone)]
pub struct Store {
    jobs: mpsc::Sender<Job>,
    path: Arc<PathBuf>,
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
        let aside = |why: &str| put_aside(path, why).map_err(|e| fail(format!("put it aside ({why}): {e}")));
        let mut set_aside = None;
        let (database, found, snapshot) = match load(&opener, path, boot_id) {
            Ok(loaded) => loaded,
            Err(Unusable::Refused(cause)) => return Err(fail(cause)),
            Err(Unusable::OtherBoot(found)) => {
                set_aside = Some(format!("{}: it is of another boot", aside("other-boot")?));
                (opener(path).map_err(|e| fail(e.to_string()))?, found, Snapshot::default())
            }
            Err(Unusable::Damaged(what, found)) => {
                set_aside = Some(format!("{}: {what}", aside("damaged")?));
                (opener(path).map_err(|e| fail(e.to_string()))?, found, Snapshot::default())
            }
        };
        let first_epoch = found.epoch_high + 1;
        let reserved = first_epoch + EPOCH_BLOCK;
        write_meta(&database, boot_id, reserved).map_err(fail)?;
        restrict_mode(path).map_err(|e| fail(format!("set its mode to 0600: {e}")))?;

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
        let store = Self { jobs, path: Arc::new(path.to_owned()), epochs: Arc::new(epochs), stats };
        Ok(Opened { store, snapshot, set_aside, writer })
    }

    /// Makes all changes durable, together or not at all.
    ///
    /// # Errors
    /// When the commit failed; then none of the changes is in the store.
    pub async fn commit(&self, changes: Vec<Change>) -> Result<(), StoreError> {
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

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
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

fn write_loop(mut file: File, mut jobs: mpsc::Receiver<Job>, stats: &Stats) {
    let mut queued = Vec::new();
    while jobs.blocking_recv_many(&mut queued, QUEUE) > 0 {
        let (mut commits, mut reads) = (Vec::new(), Vec::new());
        for job in queued.drain(..) {
            match job {
                Job::Commit { changes, reply } => commits.push((changes, reply)),
                Job::Read { reply } => reads.push(reply),
            }
        }
        commit_all(&mut file, commits, stats);
        for reply in reads {
            let result = file.with("read", |database| read_snapshot(database).map_err(|e| e.cause().to_owned()));
            reply.send(result).ok(); // a reader that went away needs no answer
        }
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
        let result = file.with("commit", |database| apply(database, changes.iter()));
        stats.healthy.store(result.is_ok(), Ordering::Relaxed);
        let counter = if result.is_ok() { &stats.commits } else { &stats.failures };
        counter.fetch_add(1, Ordering::Relaxed);
        drop(reply.send(result));
    }
}

fn apply<'a>(database: &Database, changes: impl Iterator<Item = &'a Change>) -> Result<(), String> {
    let txn = database.begin_write().map_err(words)?;
    {
        let mut meta = txn.open_table(META).map_err(words)?;
        let mut endpoints = txn.open_table(ENDPOINTS).map_err(words)?;
        let mut leases = txn.open_table(LEASES).map_err(words)?;
        let mut intents = txn.open_table(INTENTS).map_err(words)?;
        for change in changes {
            match change {
                Change::PutEndpoint(r) => endpoints.insert(r.id.get(), encode(r)?.as_slice()).map(drop),
                Change::RemoveEndpoint(id, epoch) => {
                    let same = endpoints.get(id.get()).map_err(words)?.is_some_and(|v| {
                        decode::<wharf_core::endpoint::EndpointRecord>(v.value()).is_ok_and(|r| r.epoch == *epoch)
                    });
                    if same { endpoints.remove(id.get()).map(drop) } else { Ok(()) }
                }
                Change::PutLease(l) => leases.insert(l.ip.to_string().as_str(), encode(l)?.as_slice()).map(drop),
                Change::RemoveLease(ip) => leases.remove(ip.to_string().as_str()).map(drop),
                Change::PutIntent(id, epoch, intent) => {
                    intents.insert((id.get(), epoch.0), encode(intent)?.as_slice()).map(drop)
                }
                Change::RemoveIntent(id, epoch) => intents.remove((id.get(), epoch.0)).map(drop),
                Change::ReserveEpochs(high) => meta.insert("epoch-high", high.0.to_le_bytes().as_slice()).map(drop),
            }
            .map_err(words)?;
        }
    }
    txn.commit().map_err(words)
}

/// Why a file that is there cannot be used.
enum Unusable {
    /// It stays where it is, and the agent does not start.
    Refused(String),
    /// What it tells died with that boot.
    OtherBoot(Meta),
    /// What is wrong with it, and what could be read all the same.
    Damaged(String, Meta),
}

fn load(
    opener: &impl Fn(&Path) -> Result<Database, DatabaseError>,
    path: &Path,
    boot_id: &str,
) -> Result<(Database, Meta, Snapshot), Unusable> {
    let database = opener(path).map_err(|error| match error {
        DatabaseError::DatabaseAlreadyOpen => {
            Unusable::Refused("another agent has it open; stop that one, or use another --run-dir".into())
        }
        DatabaseError::RepairAborted | DatabaseError::Storage(redb::StorageError::Corrupted(_)) => {
            Unusable::Damaged(error.to_string(), Meta::default())
        }
        error if is_not_a_database(&error) => Unusable::Damaged(error.to_string(), Meta::default()),
        error => Unusable::Refused(error.to_string()),
    })?;
    let found = read_meta(&database).map_err(|e| match e {
        ReadError::Store(cause) => Unusable::Refused(cause),
        ReadError::Damaged(what) => Unusable::Damaged(what, Meta::default()),
    })?;
    if let Some(schema) = found.schema
        && schema != SCHEMA_VERSION
    {
        return Err(Unusable::Refused(format!(
            "its schema is version {schema}, this agent knows {SCHEMA_VERSION}; run the agent that wrote it, or move the file away"
        )));
    }
    if found.boot_id.as_deref().is_some_and(|b| b != boot_id) {
        return Err(Unusable::OtherBoot(found));
    }
    match read_snapshot(&database) {
        Ok(snapshot) => Ok((database, found, snapshot)),
        Err(ReadError::Store(cause)) => Err(Unusable::Refused(cause)),
        Err(ReadError::Damaged(what)) => Err(Unusable::Damaged(what, found)),
    }
}

#[derive(Default)]
struct Meta {
    schema: Option<u64>,
    boot_id: Option<String>,
    epoch_high: u64,
}

fn read_meta(database: &Database) -> Result<Meta, ReadError> {
    let txn = database.begin_read()?;
    let table = match txn.open_table(META) {
        Ok(table) => table,
        Err(TableError::TableDoesNotExist(_)) => return Ok(Meta::default()),
        Err(e) => return Err(e.into()),
    };
    let number = |key: &str| -> Result<Option<u64>, ReadError> {
        let Some(value) = table.get(key)? else { return Ok(None) };
        let bytes = value.value().try_into();
        bytes
            .map(|b| Some(u64::from_le_bytes(b)))
            .map_err(|_| ReadError::Damaged(format!("meta row {key}: not a number")))
    };
    let boot_id = table.get("boot-id")?;
    Ok(Meta {
        schema: number("schema")?,
        boot_id: boot_id.map(|v| String::from_utf8_lossy(v.value()).into_owned()),
        epoch_high: number("epoch-high")?.unwrap_or(0),
    })
}

fn write_meta(database: &Database, boot_id: &str, epoch_high: u64) -> Result<(), String> {
    let txn = database.begin_write().map_err(words)?;
    {
        let mut meta = txn.open_table(META).map_err(words)?;
        for (key, value) in [
            ("schema", SCHEMA_VERSION.to_le_bytes().as_slice()),
            ("boot-id", boot_id.as_bytes()),
            ("epoch-high", epoch_high.to_le_bytes().as_slice()),
        ] {
            meta.insert(key, value).map_err(words)?;
        }
        for open in
            [txn.open_table(ENDPOINTS).map(drop), txn.open_table(LEASES).map(drop), txn.open_table(INTENTS).map(drop)]
        {
            open.map_err(words)?;
        }
    }
    txn.commit().map_err(words)
}

/// Why reading failed.
enum ReadError {
    /// The disk, or the like: it may pass.
    Store(String),
    /// What is stored is not what this agent stores.
    Damaged(String),
}

impl ReadError {
    fn cause(&self) -> &str {
        let (Self::Store(cause) | Self::Damaged(cause)) = self;
        cause
    }
}

impl<E: Into<redb::Error>> From<E> for ReadError {
    fn from(error: E) -> Self {
        let error: redb::Error = error.into();
        match error {
            redb::Error::Io(_) | redb::Error::PreviousIo => Self::Store(error.to_string()),
            _ => Self::Damaged(error.to_string()),
        }
    }
}

fn read_snapshot(database: &Database) -> Result<Snapshot, ReadError> {
    let txn = database.begin_read()?;
    let mut snapshot = Snapshot::default();
    let bad = |table: &str, key: String, e: serde_json::Error| ReadError::Damaged(format!("{table} row {key}: {e}"));
    match txn.open_table(ENDPOINTS) {
        Ok(table) => {
            for row in table.iter()? {
                let (key, value) = row?;
                snapshot
                    .endpoints
                    .push(decode(value.value()).map_err(|e| bad("endpoints", key.value().to_string(), e))?);
            }
        }
        Err(TableError::TableDoesNotExist(_)) => return Ok(snapshot),
        Err(e) => return Err(e.into()),
    }
    let leases = txn.open_table(LEASES)?;
    for row in leases.iter()? {
        let (key, value) = row?;
        snapshot.leases.push(decode(value.value()).map_err(|e| bad("leases", key.value().to_owned(), e))?);
    }
    let intents = txn.open_table(INTENTS)?;
    for row in intents.iter()? {
        let (key, value) = row?;
        let (id, epoch) = key.value();
        let intent: Intent = decode(value.value()).map_err(|e| bad("intents", format!("{id}@{epoch}"), e))?;
        let id = EndpointId::try_from(id).map_err(|e| ReadError::Damaged(format!("intents row: {e}")))?;
        snapshot.intents.push((id, Epoch(epoch), intent));
    }
    Ok(snapshot)
}

/// JSON: a record can be read by a person with any redb tool, and fields can be added without a migration.
fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, String> {
    serde_json::to_vec(value).map_err(words)
}

fn words(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, serde_json::Error> {
    serde_json::from_slice(bytes)
}

/// redb answers an I/O error of kind InvalidData for a file that is not one of its own.
fn is_not_a_database(error: &DatabaseError) -> bool {
    matches!(error, DatabaseError::Storage(redb::StorageError::Io(e)) if e.kind() == std::io::ErrorKind::InvalidData)
}

fn put_aside(path: &Path, why: &str) -> std::io::Result<String> {
    let stamp = crate::clock::unix_ms();
    let aside = path.with_extension(format!("redb.{why}-{stamp}"));
    std::fs::rename(path, &aside)?;
    Ok(aside.display().to_string())
}

fn restrict_mode(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
}
