//! The open file: detects whether it is still at its path with the agent's own content, and rewrites it.
//!
//! An unlinked file keeps taking commits, and all of them are lost with the process. A second descriptor therefore
//! holds the file, and is compared with the file at the path. The agent is the only writer: if the size or the
//! modification time differs from what the last commit left, another process wrote to the file, and its content is
//! not trusted. Records are rewritten from the rows in memory. Only the timeline is copied, and only from an
//! unmodified file.

use std::{
    fmt, io,
    os::{
        fd::AsRawFd as _,
        unix::fs::{MetadataExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
};

use redb::{Database, DatabaseError};
use wharf_core::store::Change;

use super::{
    error::{Cause, StoreError},
    opening::{NEW, put_aside},
    tables::{Rows, apply, live_bytes, write_all},
};

/// Opens or creates a redb file.
pub(super) type Opener = Box<dyn Fn(&Path) -> Result<Database, DatabaseError> + Send>;

/// A file of up to this size is never compacted; an empty store takes slightly more than 1 MiB.
const SMALL: u64 = 2 << 20;
/// Changes between two checks of how much of the file is in use; a check reads the store's inner pages.
const LOOK_EVERY: u64 = 512;

/// The store's file.
pub(super) struct File {
    /// `None` after a failure. After an I/O error redb refuses everything until the file is reopened, and a briefly
    /// full disk must not cost the agent its store.
    database: Option<Database>,
    /// Descriptor of the same file, independent of its path.
    held: std::fs::File,
    path: PathBuf,
    opener: Opener,
    /// Content as of the last commit.
    rows: Rows,
    /// Size and modification time after the last write of this process.
    stamp: Stamp,
    /// Changes since the last check of how much of the file is in use.
    changes: u64,
}

/// Detects writes to the file. The inode change time is not used: a new hard link or mode changes it too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    length: u64,
    /// Modification time, seconds and nanoseconds.
    modified: (i64, i64),
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { length, modified: (seconds, nanoseconds) } = self;
        write!(f, "{length} bytes of {seconds}.{nanoseconds:09}")
    }
}

impl Stamp {
    fn of(file: &std::fs::File) -> Result<Self, Cause> {
        let meta = look_at(file)?;
        Ok(Self { length: meta.len(), modified: (meta.mtime(), meta.mtime_nsec()) })
    }
}

fn look_at(file: &std::fs::File) -> Result<std::fs::Metadata, Cause> {
    file.metadata().map_err(|e| Cause::at("the open file cannot be looked at", e))
}

impl File {
    pub(super) fn new(database: Database, path: &Path, opener: Opener) -> Result<Self, Cause> {
        let held = std::fs::File::open(path)?;
        let (rows, stamp) = (Rows::load(&database)?, Stamp::of(&held)?);
        Ok(Self { database: Some(database), held, path: path.to_owned(), opener, rows, stamp, changes: 0 })
    }

    /// Runs a read.
    pub(super) fn read<T>(&mut self, f: impl FnOnce(&Database) -> Result<T, Cause>) -> Result<T, StoreError> {
        self.try_read(f).map_err(|cause| self.error("read", cause))
    }

    fn try_read<T>(&mut self, f: impl FnOnce(&Database) -> Result<T, Cause>) -> Result<T, Cause> {
        let database = self.take()?;
        let result = f(&database);
        // A read may write: redb keeps pages of its own clean-up after a commit, and writes them when it needs their
        // space.
        self.keep(database, &result)?;
        self.written()?;
        result
    }

    /// Makes all changes in one transaction.
    pub(super) fn commit<'a>(&mut self, changes: impl Iterator<Item = &'a Change> + Clone) -> Result<(), StoreError> {
        let database = self.take().map_err(|cause| self.error("commit", cause))?;
        let result = apply(&database, &mut self.rows, changes);
        let kept = self.keep(database, &result).and_then(|()| self.written());
        result.and(kept).map_err(|cause| self.error("commit", cause))
    }

    /// Closes the file after a failed operation. Closing writes to the file.
    fn keep<T>(&mut self, database: Database, result: &Result<T, Cause>) -> Result<(), Cause> {
        if result.is_ok() {
            self.database = Some(database);
            return Ok(());
        }
        drop(database);
        self.written()
    }

    /// Records the file's state after a write of this process.
    fn written(&mut self) -> Result<(), Cause> {
        self.stamp = Stamp::of(&self.held)?;
        Ok(())
    }

    pub(super) fn error(&self, operation: &'static str, cause: Cause) -> StoreError {
        StoreError::new(operation, &self.path, cause)
    }

    fn take(&mut self) -> Result<Database, Cause> {
        self.check_content()?;
        if let Some(database) = self.database.take() {
            return Ok(database);
        }
        // The file is reopened by its descriptor: its path may name another file or none, and the opener would create
        // one.
        let path = format!("/proc/self/fd/{}", self.held.as_raw_fd());
        let again = |cause: Cause| Cause::at("open it again after a failure", cause);
        let database = (self.opener)(Path::new(&path)).map_err(|e| again(e.into()));
        // The open may repair the file, and may fail after writing to it.
        self.written()?;
        let database = database?;
        // The commit that failed may have become durable after all.
        self.rows = Rows::load(&database).map_err(again)?;
        self.written()?;
        Ok(database)
    }

    /// Fails when the file was lost: its path does not name it, or its content is not the agent's own.
    pub(super) fn check(&self) -> Result<(), Cause> {
        self.check_path().and_then(|()| self.check_content())
    }

    /// Fails when another process wrote to the file.
    fn check_content(&self) -> Result<(), Cause> {
        let now = Stamp::of(&self.held)?;
        if now == self.stamp { Ok(()) } else { Err(Cause::Overwritten(format!("{} then, {now} now", self.stamp))) }
    }

    /// Fails when the path no longer names this file.
    fn check_path(&self) -> Result<(), Cause> {
        let ours = look_at(&self.held)?;
        match std::fs::symlink_metadata(&self.path) {
            Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => Ok(()),
            Ok(_) => Err(Cause::Replaced),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(Cause::Removed),
            Err(e) => Err(Cause::at("the file cannot be looked at", e)),
        }
    }

    /// Writes everything into a new file, which replaces the store at its path. A foreign file at the path is set
    /// aside. If the process dies at any point, the directory holds the store or its complete copy. Returns whether
    /// the timeline was lost: it is not read from a file that another process modified.
    pub(super) fn write_anew(&mut self) -> Result<bool, Cause> {
        let directory = self.path.parent().ok_or_else(|| io::Error::other("its path has no directory"))?.to_owned();
        crate::make_directory(&directory).map_err(|e| io::Error::other(format!("{e:#}")))?;
        let (new, old) = (self.path.with_extension(NEW), self.check_path().is_err());
        let overwritten = self.check_content().is_err();
        if overwritten {
            // Closing the database reads and writes the file, and redb panics on pages that are not its own. The
            // database is leaked instead: each foreign write costs a descriptor and up to 1 MiB of pages.
            std::mem::forget(self.database.take());
        } else {
            self.database = Some(self.take()?);
        }
        let copied = self.copy_to(&new);
        if !overwritten {
            // Reading the old file may have written to it.
            self.written()?;
        }
        let replaced = copied.and_then(|copied| {
            if old {
                give_way(&self.path)?;
            }
            std::fs::rename(&new, &self.path).map_err(|e| Cause::at(format!("rename {}", new.display()), e))?;
            Ok(copied)
        });
        match replaced {
            Ok((database, held)) => {
                // The old file stays in use until the new one has replaced it.
                (self.database, self.held) = (Some(database), held);
                self.written()?;
                std::fs::File::open(&directory)
                    .and_then(|d| d.sync_all())
                    .map_err(|e| Cause::at(format!("sync directory {}", directory.display()), e))?;
                Ok(overwritten)
            }
            Err(cause) => {
                // The removal may fail: the next attempt removes the new file before it creates it again.
                std::fs::remove_file(&new).ok();
                Err(cause)
            }
        }
    }

    fn copy_to(&self, new: &Path) -> Result<(Database, std::fs::File), Cause> {
        match std::fs::remove_file(new) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(Cause::at(format!("remove {}, left by an earlier attempt", new.display()), e));
            }
            _ => {}
        }
        let database = (self.opener)(new).map_err(|e| Cause::at(format!("make {}", new.display()), e))?;
        let fail = |e: io::Error| Cause::at(format!("open {}", new.display()), e);
        let held = std::fs::File::open(new).map_err(fail)?;
        held.set_permissions(std::fs::Permissions::from_mode(0o600)).map_err(fail)?;
        write_all(&self.rows, self.database.as_ref(), &database)?;
        Ok((database, held))
    }

    /// Counts committed changes.
    pub(super) fn changed(&mut self, changes: u64) {
        self.changes = self.changes.saturating_add(changes);
    }

    /// Rewrites the file when most of it is unused. Call it only while no job waits.
    pub(super) fn compact(&mut self) {
        if self.changes < LOOK_EVERY || self.database.is_none() {
            return;
        }
        self.changes = 0;
        let result = self.wasted().and_then(|wasted| match wasted {
            Some((size, live)) => self.write_anew().map(|_| Some((size, live))),
            None => Ok(None),
        });
        match result {
            Ok(None) => {}
            Ok(Some((size, live))) => {
                let now = used(&self.held).unwrap_or(0);
                tracing::debug!(before = size, live, now, "compacted the store");
            }
            // A failed compaction leaves a valid store that is larger than needed.
            Err(cause) => tracing::warn!("compact the store {}: {cause}", self.path.display()),
        }
    }

    /// Size and live bytes of a file worth compacting: its size exceeds twice the live bytes plus `SMALL`.
    fn wasted(&mut self) -> Result<Option<(u64, u64)>, Cause> {
        let size = used(&self.held)?;
        if size <= SMALL {
            return Ok(None);
        }
        let live = self.try_read(live_bytes)?;
        Ok((size > live.saturating_mul(2).saturating_add(SMALL)).then_some((size, live)))
    }
}

/// Bytes allocated to the file. redb doubles the length of a small file when it grows, but pages that were never
/// written take no space.
fn used(file: &std::fs::File) -> io::Result<u64> {
    file.metadata().map(|m| m.blocks().saturating_mul(512))
}

/// Sets aside a foreign file at the store's path.
fn give_way(path: &Path) -> Result<(), Cause> {
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Cause::at(format!("look at {}", path.display()), e)),
        Ok(there) if there.is_file() => {
            let file = std::fs::File::open(path).map_err(|e| Cause::at(format!("open {}", path.display()), e))?;
            if let Err(std::fs::TryLockError::WouldBlock) = file.try_lock_shared() {
                return Err(Cause::PathHeld);
            }
        }
        Ok(_) => {}
    }
    let aside = put_aside(path, "foreign").map_err(|e| Cause::at("put aside the other file at its path", e))?;
    tracing::warn!("store {}: the other file at its path is now {aside}", path.display());
    Ok(())
}
