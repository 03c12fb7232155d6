//! The deletion queue: durable records of DELs without an agent, one file each in `<run-dir>/deletions`.
//!
//! A shim [puts](Queue::put) a record and succeeds once it is on disk. The agent runs the deletes of the
//! [list](Queue::list), and [removes](Queue::remove) each record after its delete succeeded. A rename creates the
//! record, so a reader sees a complete record or none; the agent [sweeps](Queue::sweep) temporary files of killed
//! writers. The file name is a hash of the attachment: a second DEL replaces the first record.
//!
//! No lock: concurrent records of one attachment differ only in time, and each concurrent writer may exceed the cap by
//! one. Files are untrusted until parsed.

mod error;
pub(crate) mod record;
#[cfg(test)]
mod tests;

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    hash::{BuildHasher as _, RandomState},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use self::{error::io, record::Found};
pub use self::{
    error::{QueueError, Unusable},
    record::{Deletion, EndpointRef, VERSION},
};

/// In the run directory.
pub const DIRECTORY: &str = "deletions";
/// Directory of an agent in delegated mode: unfinished ADDs, each of which needs a DEL.
pub const UNFINISHED: &str = "unfinished-adds";
/// Maximum: a retrying runtime must not fill the disk.
pub const MAX_RECORDS: usize = 4096;
/// Bytes; written records stay below 1 KiB.
pub const MAX_RECORD_BYTES: u64 = 8192;
/// Directory of unusable files in the queue.
pub const BAD: &str = "bad";
/// Most unusable files; the oldest are removed.
pub const MAX_BAD: usize = 64;

const TEMPORARY: &str = ".tmp-";
/// Bounds the delay of a restart.
const MAX_LOOKED_AT: usize = 2 * MAX_RECORDS;
/// Characters, at most four bytes each: the whole name stays below 255 bytes.
const MAX_BAD_NAME_CHARS: usize = 48;

/// A queue file.
#[derive(Debug, PartialEq)]
pub struct Entry {
    /// File name.
    pub name: String,
    /// Unix milliseconds of the first delete request, or of an unusable file's modification.
    pub written_unix_ms: u64,
    /// Record, or its defect.
    pub content: Result<Deletion, Unusable>,
}

impl Entry {
    /// The agent's self-test, which requests no delete.
    #[must_use]
    pub fn is_canary(&self) -> bool {
        self.content.as_ref().is_ok_and(|deletion| deletion.canary.is_some())
    }
}

/// A run directory's queue.
#[derive(Debug, Clone)]
pub struct Queue {
    path: PathBuf,
}

impl Queue {
    /// Without file access.
    #[must_use]
    pub fn new(run_dir: &Path) -> Self {
        Self { path: run_dir.join(DIRECTORY) }
    }

    /// The [`UNFINISHED`] records.
    #[must_use]
    pub fn unfinished(run_dir: &Path) -> Self {
        Self { path: run_dir.join(UNFINISHED) }
    }

    /// In the directory of the agent's socket.
    #[must_use]
    pub fn of_socket(socket: &Path) -> Self {
        Self::new(socket.parent().unwrap_or(Path::new("/")))
    }

    /// The queue's directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Parent of the queue's directory.
    #[must_use]
    pub fn run_dir(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// Creates the directory (0700), and the run directory (0755) if missing.
    ///
    /// # Errors
    /// A file system error, or the path is not a directory.
    pub fn ensure_directory(&self) -> Result<(), QueueError> {
        let run_dir = self.run_dir();
        if !run_dir.exists() {
            make(run_dir, 0o755)?;
            wharf_crash::point("queue/after-run-directory");
        }
        match fs::symlink_metadata(&self.path) {
            Ok(there) if !there.is_dir() => Err(QueueError::NotADirectory { directory: self.path.clone() }),
            Ok(there) if there.permissions().mode() & 0o7777 != 0o700 => {
                let operation = "set permissions of deletion queue";
                fs::set_permissions(&self.path, Permissions::from_mode(0o700)).map_err(io(operation, &self.path))
            }
            Ok(_) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                make(&self.path, 0o700)?;
                wharf_crash::point("queue/after-directory");
                sync_directory(run_dir)
            }
            Err(e) => Err(io("look at deletion queue", &self.path)(e)),
        }
    }

    /// Writes a record durably; returns its file name. Keeps a replaced record's older time.
    ///
    /// # Errors
    /// The record is invalid, the queue is full, or a file system error.
    pub fn put(&self, deletion: &Deletion) -> Result<String, QueueError> {
        deletion.check().map_err(|why| QueueError::Invalid { why })?;
        self.ensure_directory()?;
        let name = deletion.file_name();
        let path = self.path.join(&name);
        let mut record = deletion.clone();
        match record::read_deletion(&path, &name) {
            Found::Record(before) if before.boot_id == record.boot_id => {
                record.written_unix_ms = record.written_unix_ms.min(before.written_unix_ms);
            }
            Found::Record(_) => {}
            Found::Nothing if self.is_full()? => return Err(QueueError::Full { directory: self.path.clone() }),
            Found::Nothing => {}
            // The rename would replace a file, but not a directory.
            Found::Unusable { .. } => self.set_aside(&name)?,
        }
        let bytes = serde_json::to_vec(&record)
            .map_err(|e| QueueError::Invalid { why: Unusable::Json("it cannot be written as JSON", e) })?;
        let temporary = self.path.join(format!("{TEMPORARY}{}", token()));
        let placed = write(&temporary, &bytes).and_then(|()| {
            fs::rename(&temporary, &path).map_err(io("rename deletion record to", &path))?;
            wharf_crash::point("queue/after-rename");
            Ok(())
        });
        if let Err(error) = placed {
            // The sweep removes a leftover.
            let _ = fs::remove_file(&temporary);
            return Err(error);
        }
        sync_directory(&self.path)?;
        wharf_crash::point("queue/after-directory-sync");
        Ok(name)
    }

    /// Tests writing with a temporary file.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub fn probe(&self) -> Result<(), QueueError> {
        self.ensure_directory()?;
        if self.is_full()? {
            return Err(QueueError::Full { directory: self.path.clone() });
        }
        let temporary = self.path.join(format!("{TEMPORARY}{}", token()));
        let written = write(&temporary, b"{}");
        let _ = fs::remove_file(&temporary);
        written
    }

    /// Name of an attachment's record.
    #[must_use]
    pub fn file_name(network: &str, container_id: &str, ifname: &str) -> String {
        record::file_name(network, container_id, ifname)
    }

    /// The attachment has a record. An unreadable directory counts as empty: its records cannot be processed.
    #[must_use]
    pub fn contains(&self, network: &str, container_id: &str, ifname: &str) -> bool {
        let path = self.path.join(Self::file_name(network, container_id, ifname));
        fs::symlink_metadata(path).is_ok_and(|there| there.is_file())
    }

    /// The queue's files, oldest first; empty without a directory. At most twice [`MAX_RECORDS`].
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Vec<Entry>, QueueError> {
        let mut entries = Vec::new();
        for name in self.names()?.into_iter().filter_map(|name| name.into_string().ok()) {
            if name == BAD || name.starts_with(TEMPORARY) {
                continue;
            }
            let (written_unix_ms, content) = match record::read_deletion(&self.path.join(&name), &name) {
                Found::Nothing => continue,
                Found::Unusable { why, modified_unix_ms } => (modified_unix_ms, Err(why)),
                Found::Record(deletion) => (deletion.written_unix_ms, Ok(deletion)),
            };
            entries.push(Entry { name, written_unix_ms, content });
        }
        entries.sort_by(|a, b| (a.written_unix_ms, &a.name).cmp(&(b.written_unix_ms, &b.name)));
        Ok(entries)
    }

    /// Removes a record; a missing record is no error.
    ///
    /// # Errors
    /// The name is not a record's, or a file system error.
    pub fn remove(&self, name: &str) -> Result<(), QueueError> {
        let path = self.path_of("remove deletion record", name)?;
        wharf_crash::point("queue/before-remove");
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(e) if is_gone(&e) => return Ok(()),
            Err(e) => return Err(io("remove deletion record", path)(e)),
        }
        wharf_crash::point("queue/after-remove");
        sync_directory(&self.path)?;
        wharf_crash::point("queue/after-remove-sync");
        Ok(())
    }

    /// Moves an unusable file to [`BAD`]; a missing file is no error.
    ///
    /// # Errors
    /// The name is not valid in the queue, or a file system error.
    pub fn set_aside(&self, name: &str) -> Result<(), QueueError> {
        let path = self.path_of("set aside deletion record", name)?;
        self.move_to_bad(&path, name)
    }

    /// Files in [`BAD`], oldest first; at most [`MAX_BAD`].
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn aside(&self) -> Result<Vec<PathBuf>, QueueError> {
        let bad = self.path.join(BAD);
        let failed = |e| io("read", &bad)(e);
        let mut paths = Vec::new();
        let listing = match fs::read_dir(&bad) {
            // The next [`Self::set_aside`] moves a file of that name away.
            Err(e) if is_gone(&e) || e.kind() == io::ErrorKind::NotADirectory => return Ok(paths),
            other => other.map_err(failed)?,
        };
        for item in listing.take(MAX_BAD) {
            paths.push(item.map_err(failed)?.path());
        }
        paths.sort();
        Ok(paths)
    }

    /// Removes temporary files of killed writers that are older than `older_than`, and sets aside files whose names are
    /// not UTF-8. Returns their number.
    ///
    /// # Errors
    /// The directory cannot be read, or a file cannot be removed; the others are still tried.
    pub fn sweep(&self, older_than: Duration) -> Result<usize, QueueError> {
        let (mut swept, mut problem) = (0, None);
        for name in self.names()? {
            let path = self.path.join(&name);
            let text = name.to_string_lossy();
            let done = if name.to_str().is_none() {
                self.move_to_bad(&path, &text)
            } else if text.starts_with(TEMPORARY) && is_older(&path, older_than) {
                remove_any(&path)
            } else {
                continue;
            };
            match done {
                Ok(()) => swept += 1,
                Err(error) => problem = problem.or(Some(error)),
            }
        }
        problem.map_or(Ok(swept), Err)
    }

    fn names(&self) -> Result<Vec<std::ffi::OsString>, QueueError> {
        let failed = |e| io("read deletion queue", &self.path)(e);
        match fs::symlink_metadata(&self.path) {
            Err(e) if is_gone(&e) => return Ok(Vec::new()),
            Err(e) => return Err(failed(e)),
            Ok(there) if !there.is_dir() => return Err(QueueError::NotADirectory { directory: self.path.clone() }),
            Ok(_) => {}
        }
        let mut names = Vec::new();
        let listing = match fs::read_dir(&self.path) {
            Err(e) if is_gone(&e) => return Ok(names),
            other => other.map_err(failed)?,
        };
        for item in listing.take(MAX_LOOKED_AT) {
            names.push(item.map_err(failed)?.file_name());
        }
        Ok(names)
    }

    fn is_full(&self) -> Result<bool, QueueError> {
        let is_record =
            |name: &std::ffi::OsString| name != BAD && !name.to_str().is_some_and(|name| name.starts_with(TEMPORARY));
        Ok(self.names()?.iter().filter(|name| is_record(name)).count() >= MAX_RECORDS)
    }

    fn path_of(&self, operation: &'static str, name: &str) -> Result<PathBuf, QueueError> {
        let impossible = name.is_empty() || name == "." || name == ".." || name == BAD || name.contains(['/', '\0']);
        if impossible {
            return Err(QueueError::Name { operation, name: name.chars().take(80).collect() });
        }
        Ok(self.path.join(name))
    }

    fn move_to_bad(&self, path: &Path, name: &str) -> Result<(), QueueError> {
        let bad = self.path.join(BAD);
        match fs::symlink_metadata(&bad) {
            Ok(there) if there.is_dir() => {}
            // Set aside, too; after a crash, like any file.
            Ok(_) => {
                let other = self.path.join(format!("{BAD}-{}", token()));
                fs::rename(&bad, &other).map_err(io("set aside", &bad))?;
                make(&bad, 0o700)?;
                self.move_to_bad(&other, BAD)?;
            }
            Err(e) if is_gone(&e) => make(&bad, 0o700)?,
            Err(e) => return Err(io("look at", bad)(e)),
        }
        wharf_crash::point("queue/before-set-aside");
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let name: String = name.chars().take(MAX_BAD_NAME_CHARS).collect();
        // Names sort by age.
        match fs::rename(path, bad.join(format!("{now:016}-{}-{name}", token()))) {
            Ok(()) => {}
            Err(e) if is_gone(&e) => return Ok(()),
            Err(e) => return Err(io("set aside", path)(e)),
        }
        wharf_crash::point("queue/after-set-aside");
        let mut kept = Vec::new();
        for item in fs::read_dir(&bad).map_err(io("read", &bad))? {
            kept.push(item.map_err(io("read", &bad))?.file_name());
        }
        kept.sort();
        let too_many = kept.len().saturating_sub(MAX_BAD);
        kept.iter().take(too_many).try_for_each(|name| remove_any(&bad.join(name)))
    }
}

fn make(path: &Path, mode: u32) -> Result<(), QueueError> {
    let failed = |e| io("make directory", path)(e);
    DirBuilder::new().recursive(true).mode(mode).create(path).map_err(failed)?;
    // The umask may have removed mode bits.
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), QueueError> {
    let failed = |e| io("write deletion record", path)(e);
    wharf_crash::point("queue/before-write");
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
    wharf_crash::point("queue/after-create");
    file.write_all(bytes).map_err(failed)?;
    wharf_crash::point("queue/after-write");
    file.sync_all().map_err(failed)?;
    wharf_crash::point("queue/after-sync");
    Ok(())
}

fn sync_directory(path: &Path) -> Result<(), QueueError> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(io("sync directory", path))
}

/// Does not follow links.
fn remove_any(path: &Path) -> Result<(), QueueError> {
    let removed = match fs::symlink_metadata(path) {
        Ok(there) if there.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    match removed {
        Err(e) if !is_gone(&e) => Err(io("remove", path)(e)),
        _ => Ok(()),
    }
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}

/// False for unknown age.
pub(crate) fn is_older(path: &Path, age: Duration) -> bool {
    let modified = fs::symlink_metadata(path).and_then(|there| there.modified());
    modified.ok().and_then(|time| time.elapsed().ok()).is_some_and(|elapsed| elapsed > age)
}

/// Standard hashers have random seeds.
pub(crate) fn token() -> String {
    format!("{:08x}-{:016x}", std::process::id(), RandomState::new().hash_one(0_u8))
}
