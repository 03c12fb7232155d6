//! The open file: detects whether it is still at its path with the agent's own content, and rewrites it.
//!
//! An unlinked file keeps taking commits, and all of them are lost with the process. A second descriptor therefore
//! holds the file, and is compared with the file at the path. The agent is the only writer: if the size or the
//! modification time differs from what the last commit left, another process wrote to the file, and its content is
//! not trusted. Records are rewritten from the rows in memory. Only the timeline is copied, and only from an
//! unmodified file.

use std::{
    fmt,
    os::{
        fd::AsRawFd as _,
        unix::fs::{MetadataExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
};

use redb::{Database, DatabaseError};
use wharf_core::store::Change;

use super::{
    error::StoreError,
    opening::{NEW, put_aside},
    tables::{Rows, apply, live_bytes, words, write_all},
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
    fn of(file: &std::fs::File) -> Result<Self, String> {
        let meta = file.metadata().map_err(|e| format!("the open file cannot be looked at: {e}"))?;
        Ok(Self { length: meta.len(), modified: (meta.mtime(), meta.mtime_nsec()) })
    }
}

impl File {
    pub(super) fn new(database: Database, path: &Path, opener: Opener) -> Result<Self, String> {
        let held = std::fs::File::open(path).map_err(words)?;
        let (rows, stamp) = (Rows::load(&database)?, Stamp::of(&held)?);
        Ok(Self { database: Some(database), held, path: path.to_owned(), opener, rows, stamp, changes: 0 })
    }

    /// Runs a read.
    pub(super) fn with<T>(
        &mut self,
        operation: &'static str,
        f: impl FnOnce(&Database) -> Result<T, String>,
    ) -> Result<T, StoreError> {
        let database = self.take().map_err(|cause| self.error(operation, cause))?;
        let result = f(&database);
        // A read may write: redb keeps pages of its own clean-up after a commit, and writes them when it needs their
        // space.
        let kept = self.keep(database, &result).and_then(|()| self.written());
        kept.map_err(|cause| self.error(operation, cause))?;
        result.map_err(|cause| self.error(operation, cause))
    }

    /// Makes all changes in one transaction.
    pub(super) fn commit<'a>(&mut self, changes: impl Iterator<Item = &'a Change> + Clone) -> Result<(), StoreError> {
        let database = self.take().map_err(|cause| self.error("commit", cause))?;
        let result = apply(&database, &mut self.rows, changes);
        let kept = self.keep(database, &result).and_then(|()| self.written());
        result.and(kept).map_err(|cause| self.error("commit", cause))
    }

    /// Closes the file after a failed operation. Closing writes to the file.
    fn keep<T>(&mut self, database: Database, result: &Result<T, String>) -> Result<(), String> {
        if result.is_ok() {
            self.database = Some(database);
            return Ok(());
        }
        drop(database);
        self.written()
    }

    /// Records the file's state after a write of this process.
    fn written(&mut self) -> Result<(), String> {
        self.stamp = Stamp::of(&self.held)?;
        Ok(())
    }

    pub(super) fn error(&self, operation: &'static str, cause: String) -> StoreError {
        StoreError { operation, path: self.path.clone(), cause }
    }

    fn take(&mut self) -> Result<Database, String> {
        if let Some(what) = self.overwritten() {
            return Err(what);
        }
        if let Some(database) = self.database.take() {
            return Ok(database);
        }
        // The file is reopened by its descriptor: its path may name another file or none, and the opener would create
        // one.
        let path = format!("/proc/self/fd/{}", self.held.as_raw_fd());
        let again = |e: String| format!("open it again after a failure: {e}");
        let database = (self.opener)(Path::new(&path)).map_err(|e| again(e.to_string()));
        // The open may repair the file, and may fail after writing to it.
        self.written()?;
        let database = database?;
        // The commit that failed may have become durable after all.
        self.rows = Rows::load(&database).map_err(again)?;
        self.written()?;
        Ok(database)
    }

    /// How the file was lost, when its path does not name it or its content is not the agent's own.
    pub(super) fn lost(&self) -> Option<String> {
        self.displaced().or_else(|| self.overwritten())
    }

    fn overwritten(&self) -> Option<String> {
        match Stamp::of(&self.held) {
            Ok(now) if now == self.stamp => None,
            Ok(now) => Some(format!(
                "somebody else wrote to the file while the agent used it ({} then, {now} now)",
                self.stamp
            )),
            Err(why) => Some(why),
        }
    }

    /// What happened to the path, when it no longer names this file.
    fn displaced(&self) -> Option<String> {
        let ours = match self.held.metadata() {
            Ok(ours) => ours,
            Err(e) => return Some(format!("the open file cannot be looked at: {e}")),
        };
        match std::fs::symlink_metadata(&self.path) {
            Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => None,
            Ok(_) => Some("the file was replaced by another while the agent used it".into()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                Some("the file was removed while the agent used it".into())
            }
            Err(e) => Some(format!("the file cannot be looked at: {e}")),
        }
    }

    /// Writes everything into a new file, which replaces the store at its path. A foreign file at the path is set
    /// aside. If the process dies at any point, the directory holds the store or its complete copy. Returns whether
    /// the timeline was lost: it is not read from a file that another process modified.
    pub(super) fn write_anew(&mut self) -> Result<bool, String> {
        let directory = self.path.parent().ok_or("its path has no directory")?.to_owned();
        crate::make_directory(&directory).map_err(|e| format!("{e:#}"))?;
        let (new, old) = (self.path.with_extension(NEW), self.displaced().is_some());
        let overwritten = self.overwritten().is_some();
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
            std::fs::rename(&new, &self.path).map_err(|e| format!("rename {}: {e}", new.display()))?;
            Ok(copied)
        });
        match replaced {
            Ok((database, held)) => {
                // The old file stays in use until the new one has replaced it.
                (self.database, self.held) = (Some(database), held);
                self.written()?;
                std::fs::File::open(&directory)
                    .and_then(|d| d.sync_all())
                    .map_err(|e| format!("sync directory {}: {e}", directory.display()))?;
                Ok(overwritten)
            }
            Err(cause) => {
                // The removal may fail: the next attempt removes the new file before it creates it again.
                std::fs::remove_file(&new).ok();
                Err(cause)
            }
        }
    }

    fn copy_to(&self, new: &Path) -> Result<(Database, std::fs::File), String> {
        match std::fs::remove_file(new) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(format!("remove {}, left by an earlier attempt: {e}", new.display()));
            }
            _ => {}
        }
        let database = (self.opener)(new).map_err(|e| format!("make {}: {e}", new.display()))?;
        let fail = |e: std::io::Error| format!("open {}: {e}", new.display());
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
    fn wasted(&mut self) -> Result<Option<(u64, u64)>, String> {
        let size = used(&self.held).map_err(words)?;
        if size <= SMALL {
            return Ok(None);
        }
        let live = self.with("read", live_bytes).map_err(|e| e.cause)?;
        Ok((size > live.saturating_mul(2).saturating_add(SMALL)).then_some((size, live)))
    }
}

/// Bytes allocated to the file. redb doubles the length of a small file when it grows, but pages that were never
/// written take no space.
fn used(file: &std::fs::File) -> std::io::Result<u64> {
    file.metadata().map(|m| m.blocks().saturating_mul(512))
}

/// Sets aside a foreign file at the store's path.
fn give_way(path: &Path) -> Result<(), String> {
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(format!("look at {}: {e}", path.display())),
        Ok(there) if there.is_file() => {
            let file = std::fs::File::open(path).map_err(|e| format!("open {}: {e}", path.display()))?;
            if let Err(std::fs::TryLockError::WouldBlock) = file.try_lock_shared() {
                return Err("another process has the file at its path in use; stop that one".into());
            }
        }
        Ok(_) => {}
    }
    let aside = put_aside(path, "foreign").map_err(|e| format!("put aside the other file at its path: {e}"))?;
    tracing::warn!("store {}: the other file at its path is now {aside}", path.display());
    Ok(())
}
