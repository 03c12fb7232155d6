//! The open file: detects its loss, and rewrites it.
//!
//! Commits to an unlinked file succeed and are lost with the process: a second descriptor is compared with the path.
//! The agent is the only writer: a size or modification time other than the last commit's means a foreign write. Then
//! records are rewritten from memory, without the timeline.

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

pub(super) type Opener = Box<dyn Fn(&Path) -> Result<Database, DatabaseError> + Send>;

const TARGET: &str = "wharf_agent::store::file";
/// Smaller files are not compacted; an empty store takes slightly more than 1 MiB.
const SMALL: u64 = 2 << 20;
/// Changes between checks.
const LOOK_EVERY: u64 = 512;

pub(super) struct File {
    /// `None` after a failure: redb refuses everything after an I/O error until a reopen.
    database: Option<Database>,
    /// The same file by a second descriptor, whatever the path names.
    held: std::fs::File,
    path: PathBuf,
    opener: Opener,
    /// As of the last commit.
    rows: Rows,
    /// After this process's last write.
    stamp: Stamp,
    changes: u64,
}

/// Not the inode change time, which links and modes change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    length: u64,
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

    pub(super) fn read<T>(&mut self, f: impl FnOnce(&Database) -> Result<T, Cause>) -> Result<T, StoreError> {
        self.try_read(f).map_err(|cause| self.error("read", cause))
    }

    fn try_read<T>(&mut self, f: impl FnOnce(&Database) -> Result<T, Cause>) -> Result<T, Cause> {
        let database = self.take()?;
        let result = f(&database);
        // Reads may write: redb writes pages of a deferred clean-up when it needs space.
        self.keep(database, &result)?;
        self.written()?;
        result
    }

    pub(super) fn commit<'a>(&mut self, changes: impl Iterator<Item = &'a Change> + Clone) -> Result<(), StoreError> {
        let database = self.take().map_err(|cause| self.error("commit", cause))?;
        let result = apply(&database, &mut self.rows, changes);
        let kept = self.keep(database, &result).and_then(|()| self.written());
        result.and(kept).map_err(|cause| self.error("commit", cause))
    }

    /// After a failure, closes the file. Closing writes.
    fn keep<T>(&mut self, database: Database, result: &Result<T, Cause>) -> Result<(), Cause> {
        if result.is_ok() {
            self.database = Some(database);
            return Ok(());
        }
        drop(database);
        self.written()
    }

    /// Notes the file's size and time; called after each own write.
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
        // By descriptor: the path may name another file, or none, which the opener would create.
        let path = format!("/proc/self/fd/{}", self.held.as_raw_fd());
        let again = |cause: Cause| Cause::at("open it again after a failure", cause);
        let database = (self.opener)(Path::new(&path)).map_err(|e| again(e.into()));
        // The open may repair the file, also when it fails.
        self.written()?;
        let database = database?;
        // The failed commit may be durable.
        self.rows = Rows::load(&database).map_err(again)?;
        self.written()?;
        Ok(database)
    }

    pub(super) fn check(&self) -> Result<(), Cause> {
        self.check_path().and_then(|()| self.check_content())
    }

    fn check_content(&self) -> Result<(), Cause> {
        let now = Stamp::of(&self.held)?;
        if now == self.stamp { Ok(()) } else { Err(Cause::Overwritten(format!("{} then, {now} now", self.stamp))) }
    }

    fn check_path(&self) -> Result<(), Cause> {
        let ours = look_at(&self.held)?;
        match std::fs::symlink_metadata(&self.path) {
            Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => Ok(()),
            Ok(_) => Err(Cause::Replaced),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(Cause::Removed),
            Err(e) => Err(Cause::at("the file cannot be looked at", e)),
        }
    }

    /// Replaces the store by a new file; sets aside a foreign file at its path. The directory always holds the store or
    /// its complete copy. Returns whether the timeline was lost.
    pub(super) fn write_anew(&mut self) -> Result<bool, Cause> {
        let directory = self.path.parent().ok_or_else(|| io::Error::other("its path has no directory"))?.to_owned();
        wharf_kit::kept::make_directory(&directory).map_err(|e| io::Error::other(format!("{e:#}")))?;
        let (new, old) = (self.path.with_extension(NEW), self.check_path().is_err());
        let overwritten = self.check_content().is_err();
        if overwritten {
            // Closing accesses the file, and redb panics on foreign pages. The leak costs a descriptor and up to 1 MiB
            // per foreign write.
            std::mem::forget(self.database.take());
        } else {
            self.database = Some(self.take()?);
        }
        let copied = self.copy_to(&new);
        if !overwritten {
            self.written()?;
        }
        let replaced = copied.and_then(|copied| {
            if old {
                set_foreign_file_aside(&self.path)?;
            }
            std::fs::rename(&new, &self.path).map_err(|e| Cause::at(format!("rename {}", new.display()), e))?;
            Ok(copied)
        });
        match replaced {
            Ok((database, held)) => {
                // The old file stays in use until here.
                (self.database, self.held) = (Some(database), held);
                self.written()?;
                std::fs::File::open(&directory)
                    .and_then(|d| d.sync_all())
                    .map_err(|e| Cause::at(format!("sync directory {}", directory.display()), e))?;
                Ok(overwritten)
            }
            Err(cause) => {
                // The next attempt removes what stays.
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

    pub(super) fn changed(&mut self, changes: u64) {
        self.changes = self.changes.saturating_add(changes);
    }

    /// Rewrites a mostly unused file, only while no job waits.
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
                tracing::debug!(target: TARGET, before = size, live, now, "compacted the store");
            }
            Err(cause) => tracing::warn!(target: TARGET, "compact the store {}: {cause}", self.path.display()),
        }
    }

    /// Size and live bytes, if mostly wasted.
    fn wasted(&mut self) -> Result<Option<(u64, u64)>, Cause> {
        let size = used(&self.held)?;
        if size <= SMALL {
            return Ok(None);
        }
        let live = self.try_read(live_bytes)?;
        Ok((size > live.saturating_mul(2).saturating_add(SMALL)).then_some((size, live)))
    }
}

/// redb doubles a small file's length, but unwritten pages take no space.
fn used(file: &std::fs::File) -> io::Result<u64> {
    file.metadata().map(|m| m.blocks().saturating_mul(512))
}

fn set_foreign_file_aside(path: &Path) -> Result<(), Cause> {
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
    tracing::warn!(target: TARGET, "store {}: the other file at its path is now {aside}", path.display());
    Ok(())
}
