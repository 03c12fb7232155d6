//! Files of a sandbox: `NAME.json` (record), `NAME.lock`, and `NAME.new` (the next record). A rename replaces the
//! record by a synced file, so readers without a lock see a complete record or none.

use std::{
    fs::{self, DirBuilder, File, FileType, OpenOptions, TryLockError},
    io::{self, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use crate::{
    error::{SandboxError, io},
    name::SandboxName,
    record::Record,
};

/// Bytes of a record; eight networks need about 20 KiB.
const MAX_BYTES: u64 = 4 << 20;
pub(crate) const LOCK_PATIENCE: Duration = Duration::from_secs(30);
const LOCK_PAUSE: Duration = Duration::from_millis(20);

#[derive(Debug, Clone)]
pub(crate) struct Store {
    directory: PathBuf,
}

/// Held until this process and all its plugins have ended.
#[derive(Debug)]
pub(crate) struct Lock {
    pub(crate) file: File,
    path: PathBuf,
}

impl Store {
    pub(crate) fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    fn path(&self, name: &SandboxName, suffix: &str) -> PathBuf {
        self.directory.join(format!("{name}.{suffix}"))
    }

    /// Network configurations may contain secrets. An existing directory keeps its mode.
    pub(crate) fn ensure(&self) -> Result<(), SandboxError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.directory);
        made.map_err(io("create state directory", &self.directory))
    }

    /// Records name programs to execute and paths to unmount, so other users must not write them.
    fn check(&self) -> Result<(), SandboxError> {
        let there = fs::metadata(&self.directory).map_err(io("look at state directory", &self.directory))?;
        let unsafe_for = |why| Err(SandboxError::UnsafeDirectory { path: self.directory.clone(), why });
        let is_ours = [0, nix::unistd::geteuid().as_raw()].contains(&there.uid());
        if !is_ours {
            return unsafe_for(format!("user {} owns it and could put records there", there.uid()));
        }
        if there.mode() & 0o022 != 0 {
            return unsafe_for(format!(
                "by its mode {:04o} other users could put records there",
                there.mode() & 0o7777
            ));
        }
        Ok(())
    }

    /// Calls `told` once if another process holds the lock.
    pub(crate) fn lock(&self, name: &SandboxName, told: impl FnMut(&str)) -> Result<Lock, SandboxError> {
        self.check()?;
        self.lock_within(LOCK_PATIENCE, name, told)
    }

    fn lock_within(
        &self,
        patience: Duration,
        name: &SandboxName,
        mut told: impl FnMut(&str),
    ) -> Result<Lock, SandboxError> {
        let path = self.path(name, "lock");
        let end = Instant::now() + patience;
        let mut waits = false;
        loop {
            let file = open_lock(&path)?;
            match file.try_lock() {
                // The previous holder may have removed the file.
                Ok(()) if !is_at(&file, &path) => continue,
                Ok(()) => {
                    let mut lock = Lock { file, path };
                    lock.sign()?;
                    return Ok(lock);
                }
                Err(TryLockError::WouldBlock) if Instant::now() >= end => {
                    return Err(SandboxError::Busy { name: name.clone(), holder: holder(&path) });
                }
                Err(TryLockError::WouldBlock) => {
                    if !std::mem::replace(&mut waits, true) {
                        told(&format!("waiting for process {}, which works on sandbox {name}", holder(&path)));
                    }
                    thread::sleep(LOCK_PAUSE);
                }
                Err(TryLockError::Error(e)) => return Err(io("lock", &path)(e)),
            }
        }
    }

    pub(crate) fn is_locked(&self, name: &SandboxName) -> bool {
        // Shared, so that readers do not block each other.
        let Ok(file) = File::open(self.path(name, "lock")) else { return false };
        matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock))
    }

    /// The sandbox has a file.
    pub(crate) fn is_known(&self, name: &SandboxName) -> Result<bool, SandboxError> {
        for suffix in ["json", "lock", "new"] {
            let path = self.path(name, suffix);
            match fs::symlink_metadata(&path) {
                Ok(_) => return Ok(true),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(io("look for", &path)(e)),
            }
        }
        Ok(false)
    }

    /// `None` if it does not exist.
    pub(crate) fn load(&self, name: &SandboxName) -> Result<Option<Record>, SandboxError> {
        let path = self.path(name, "json");
        let damaged = |why: String| SandboxError::Damaged { name: name.clone(), path: path.clone(), why };
        // Opening a FIFO may block, and opening a device may have side effects.
        match fs::symlink_metadata(&path) {
            Ok(there) if there.is_file() => {}
            Ok(there) => return Err(damaged(format!("it is {}", kind(there.file_type())))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(io("read record", &path)(e)),
        }
        // It may have been replaced since the check.
        let open = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&path);
        let file = match open {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(io("read record", &path)(e)),
        };
        let mut text = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut text).map_err(io("read record", &path))?;
        if text.is_empty() {
            return Err(damaged("it is empty".to_owned()));
        }
        if u64::try_from(text.len()).is_ok_and(|length| length > MAX_BYTES) {
            return Err(damaged(format!("it is longer than {MAX_BYTES} bytes")));
        }
        let record = Record::parse(&text).map_err(damaged)?;
        if record.name != *name {
            return Err(damaged(format!("it is the record of {}", record.name)));
        }
        // A stop unlinks this path, so a damaged record must not name another file.
        let netns = &record.netns.path;
        if !netns.is_absolute() || netns.file_name() != Some(AsRef::<Path>::as_ref(name).as_os_str()) {
            return Err(damaged(format!("its namespace is at {}, which has not the sandbox's name", netns.display())));
        }
        Ok(Some(record))
    }

    /// Durable. The caller must hold the lock.
    pub(crate) fn save(&self, record: &Record) -> Result<(), SandboxError> {
        let (new, path) = (self.path(&record.name, "new"), self.path(&record.name, "json"));
        let failed = |operation| io(operation, &path);
        let mut text = serde_json::to_vec_pretty(record).map_err(|e| failed("write record")(e.into()))?;
        text.push(b'\n');
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&new)
            .map_err(failed("write record"))?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(failed("write record"))?;
        wharf_crash::point("sandbox-record/after-write");
        fs::rename(&new, &path).map_err(failed("put in place record"))?;
        wharf_crash::point("sandbox-record/after-rename");
        self.sync()
    }

    /// Sorted.
    pub(crate) fn names(&self) -> Result<Vec<SandboxName>, SandboxError> {
        let listing = match fs::read_dir(&self.directory) {
            Ok(listing) => listing,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(io("list state directory", &self.directory)(e)),
        };
        let mut names = Vec::new();
        for item in listing {
            let item = item.map_err(io("list state directory", &self.directory))?;
            let file = item.file_name();
            names.extend(file.to_str().and_then(|f| f.strip_suffix(".json")?.parse::<SandboxName>().ok()));
        }
        names.sort();
        Ok(names)
    }

    /// Removes the lock last.
    pub(crate) fn remove(&self, name: &SandboxName, lock: Lock) -> Result<(), SandboxError> {
        for suffix in ["new", "json"] {
            remove_file(&self.path(name, suffix))?;
            wharf_crash::point("sandbox-remove/after-file");
        }
        self.sync()?;
        // A waiting process detects the removal and creates a new file.
        remove_file(&lock.path)?;
        wharf_crash::point("sandbox-remove/after-lock");
        drop(lock);
        Ok(())
    }

    fn sync(&self) -> Result<(), SandboxError> {
        let directory = File::open(&self.directory).and_then(|d| d.sync_all());
        directory.map_err(io("sync state directory", &self.directory))
    }
}

impl Lock {
    /// For waiting processes.
    fn sign(&mut self) -> Result<(), SandboxError> {
        let text = format!("{}\n", std::process::id());
        let written = self.file.set_len(0).and_then(|()| self.file.write_all(text.as_bytes()));
        written.map_err(io("write", &self.path))
    }
}

fn open_lock(path: &Path) -> Result<File, SandboxError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    options.open(path).map_err(io("open lock", path))
}

fn is_at(file: &File, path: &Path) -> bool {
    let (held, there) = (file.metadata(), fs::symlink_metadata(path));
    matches!((held, there), (Ok(a), Ok(b)) if (a.dev(), a.ino()) == (b.dev(), b.ino()))
}

/// For messages only: the process may have ended and left the lock to a plugin.
fn holder(path: &Path) -> String {
    let mut text = String::new();
    let read = File::open(path).and_then(|f| f.take(16).read_to_string(&mut text));
    match read.ok().and_then(|_| text.trim().parse::<u32>().ok()) {
        Some(pid) => pid.to_string(),
        None => "of unknown number".to_owned(),
    }
}

fn kind(file: FileType) -> &'static str {
    match file {
        f if f.is_symlink() => "a link",
        f if f.is_dir() => "a directory",
        f if f.is_fifo() => "a FIFO",
        f if f.is_socket() => "a socket",
        _ => "a device",
    }
}

fn remove_file(path: &Path) -> Result<(), SandboxError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::IsADirectory => Err(SandboxError::Directory { path: path.to_owned() }),
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(io("remove", path)(e)),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
