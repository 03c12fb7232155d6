//! The open file: whether it is still the one at its path with the content that the agent gave it, and how it is written
//! anew.
//!
//! An unlinked file keeps taking commits, and all of them are lost with the process. So the file is held by a descriptor
//! beside redb's, which is compared with what is at the path. The agent is the only writer: a file whose size or time of
//! change is not what the last commit left was written to by somebody else, and nothing in it is believed. The file is
//! written anew from the rows in memory, never from its own content.

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

/// Opens a redb file, or makes it.
pub(super) type Opener = Box<dyn Fn(&Path) -> Result<Database, DatabaseError> + Send>;

/// A file of up to this size is never compacted: an empty store has 1 MiB and a little.
const SMALL: u64 = 2 << 20;
/// Changes between two looks at how much of the file is in use: a look reads the store's inner pages.
const LOOK_EVERY: u64 = 512;

/// The store's file.
pub(super) struct File {
    /// `None` after a failure: an I/O error leaves redb refusing everything until the file is opened again, and a disk
    /// that was full for a second must not cost the agent its store.
    database: Option<Database>,
    /// The same file, whatever its name is by now.
    held: std::fs::File,
    path: PathBuf,
    opener: Opener,
    /// Content as of the last commit.
    rows: Rows,
    /// What the last write of this process left.
    stamp: Stamp,
    /// Changes since the last look at how much of it is in use.
    changes: u64,
}

/// What tells that a file was written to. Not its change time: a new hard link or mode changes that one too.
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

    /// Reads.
    pub(super) fn with<T>(
        &mut self,
        operation: &'static str,
        f: impl FnOnce(&Database) -> Result<T, String>,
    ) -> Result<T, StoreError> {
        let database = self.take().map_err(|cause| self.error(operation, cause))?;
        let result = f(&database);
        // A read may write: after a commit redb keeps pages of its own clean-up, and writes them when it needs their room.
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

    /// Closes the file after a failure, which writes to it.
    fn keep<T>(&mut self, database: Database, result: &Result<T, String>) -> Result<(), String> {
        if result.is_ok() {
            self.database = Some(database);
            return Ok(());
        }
        drop(database);
        self.written()
    }

    /// This process has written to the file.
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
        // By its descriptor: what is at the path may be another file, or none, and a new one would be made.
        let path = format!("/proc/self/fd/{}", self.held.as_raw_fd());
        let again = |e: String| format!("open it again after a failure: {e}");
        let database = (self.opener)(Path::new(&path)).map_err(|e| again(e.to_string()));
        // Opening repairs, and may fail after it has written.
        self.written()?;
        let database = database?;
        // The commit that failed may have become durable after all.
        self.rows = Rows::load(&database).map_err(again)?;
        self.written()?;
        Ok(database)
    }

    /// What happened to the file, when its path does not name it or its content is not the agent's own.
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

    /// Writes everything into a new file at the path, which then is the store. A file that is there and is not ours is put
    /// aside. Whenever the process dies, the store or its whole copy is in the directory. Returns whether the timeline was
    /// lost: of a file that somebody else wrote to, not even that is read.
    pub(super) fn write_anew(&mut self) -> Result<bool, String> {
        let directory = self.path.parent().ok_or("its path has no directory")?.to_owned();
        crate::make_directory(&directory).map_err(|e| format!("{e:#}"))?;
        let (new, old) = (self.path.with_extension(NEW), self.displaced().is_some());
        let overwritten = self.overwritten().is_some();
        if overwritten {
            // redb reads and writes the file when it is closed, and panics over pages that are not its own. The file stays
            // open: its descriptor and up to 1 MiB of pages for each time that somebody writes to the store.
            std::mem::forget(self.database.take());
        } else {
            self.database = Some(self.take()?);
        }
        let copied = self.copy_to(&new);
        if !overwritten {
            // Reading the old one may have written to it.
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
                // The old one stays in use until the new one has its place.
                (self.database, self.held) = (Some(database), held);
                self.written()?;
                std::fs::File::open(&directory)
                    .and_then(|d| d.sync_all())
                    .map_err(|e| format!("sync directory {}: {e}", directory.display()))?;
                Ok(overwritten)
            }
            Err(cause) => {
                // Nothing is at stake: it is made again from the start, and one that stays is removed by the next attempt.
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

    /// So many changes were committed.
    pub(super) fn changed(&mut self, changes: u64) {
        self.changes = self.changes.saturating_add(changes);
    }

    /// Compacts the file by writing it anew when most of it is not in use. To be called where nobody waits.
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
            // The store is as good as before, only larger.
            Err(cause) => tracing::warn!("compact the store {}: {cause}", self.path.display()),
        }
    }

    /// Size and bytes in use of a file that is worth compacting: more than half of what is beyond a small one is not used.
    fn wasted(&mut self) -> Result<Option<(u64, u64)>, String> {
        let size = used(&self.held).map_err(words)?;
        if size <= SMALL {
            return Ok(None);
        }
        let live = self.with("read", live_bytes).map_err(|e| e.cause)?;
        Ok((size > live.saturating_mul(2).saturating_add(SMALL)).then_some((size, live)))
    }
}

/// Bytes that the file takes. redb doubles the length of a small file when it grows, but what was never written to takes
/// nothing.
fn used(file: &std::fs::File) -> std::io::Result<u64> {
    file.metadata().map(|m| m.blocks().saturating_mul(512))
}

/// Puts aside what is at the store's path and is not the store.
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
