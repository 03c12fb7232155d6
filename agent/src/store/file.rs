//! The open file: whether it is still the one at its path, and how it is written anew.
//!
//! An unlinked file keeps taking commits, and all of them are lost with the process. So the file is held by a descriptor
//! beside redb's: compared with what is at the path, it tells whether the store is still there; opened again through
//! /proc/self/fd, it gives back everything that was committed, whatever became of its name.

use std::{
    os::{
        fd::AsRawFd as _,
        unix::fs::{MetadataExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
};

use redb::{Database, DatabaseError};

use super::{
    StoreError,
    opening::put_aside,
    tables::{copy, live_bytes, words},
};

/// Opens a redb file, or makes it.
pub(super) type Opener = Box<dyn Fn(&Path) -> Result<Database, DatabaseError> + Send>;

/// Name of the file that is to take the store's place, beside it.
const NEW: &str = "redb.new";
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
    /// Changes since the last look at how much of it is in use.
    changes: u64,
}

impl File {
    pub(super) fn new(database: Database, path: &Path, opener: Opener) -> std::io::Result<Self> {
        let held = std::fs::File::open(path)?;
        Ok(Self { database: Some(database), held, path: path.to_owned(), opener, changes: 0 })
    }

    pub(super) fn with<T>(
        &mut self,
        operation: &'static str,
        f: impl FnOnce(&Database) -> Result<T, String>,
    ) -> Result<T, StoreError> {
        let database = self.take().map_err(|cause| self.error(operation, cause))?;
        let value = f(&database).map_err(|cause| self.error(operation, cause))?;
        self.database = Some(database);
        Ok(value)
    }

    pub(super) fn error(&self, operation: &'static str, cause: String) -> StoreError {
        StoreError { operation, path: self.path.clone(), cause }
    }

    fn take(&mut self) -> Result<Database, String> {
        if let Some(database) = self.database.take() {
            return Ok(database);
        }
        // By its descriptor: what is at the path may be another file, or none, and a new one would be made.
        let path = format!("/proc/self/fd/{}", self.held.as_raw_fd());
        (self.opener)(Path::new(&path)).map_err(|e| format!("open it again after a failure: {e}"))
    }

    /// What happened to the path, when it no longer names this file.
    pub(super) fn displaced(&self) -> Option<String> {
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

    /// Copies everything into a new file at the path, which then is the store. A file that is there and is not ours is
    /// put aside. Whenever the process dies, the store or its whole copy is in the directory.
    pub(super) fn write_anew(&mut self) -> Result<(), String> {
        let directory = self.path.parent().ok_or("its path has no directory")?.to_owned();
        crate::make_directory(&directory).map_err(|e| format!("{e:#}"))?;
        let database = self.take()?;
        let (new, old) = (self.path.with_extension(NEW), self.displaced().is_some());
        let copied = self.copy_to(&new, &database);
        // The old one stays in use until the new one has its place.
        self.database = Some(database);
        let replaced = copied.and_then(|copied| {
            if old {
                give_way(&self.path)?;
            }
            std::fs::rename(&new, &self.path).map_err(|e| format!("rename {}: {e}", new.display()))?;
            Ok(copied)
        });
        match replaced {
            Ok((database, held)) => {
                (self.database, self.held) = (Some(database), held);
                std::fs::File::open(&directory)
                    .and_then(|d| d.sync_all())
                    .map_err(|e| format!("sync directory {}: {e}", directory.display()))
            }
            Err(cause) => {
                // Nothing is at stake: it is made again from the start, and one that stays is removed by the next attempt.
                std::fs::remove_file(&new).ok();
                Err(cause)
            }
        }
    }

    fn copy_to(&self, new: &Path, from: &Database) -> Result<(Database, std::fs::File), String> {
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
        copy(from, &database)?;
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
            Some((size, live)) => self.write_anew().map(|()| Some((size, live))),
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

/// At an open: the copy that was to take the store's place, when the agent died between the two.
pub(super) fn finish_writing_anew(path: &Path) -> std::io::Result<()> {
    let new = path.with_extension(NEW);
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => match std::fs::rename(&new, path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            done => done,
        },
        _ => match std::fs::remove_file(&new) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            done => done,
        },
    }
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
