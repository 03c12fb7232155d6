//! A disk that can be full or slow, under the store's file.

use std::{
    fs::OpenOptions,
    io,
    path::Path,
    sync::{Arc, Condvar, Mutex},
};

use redb::{Database, DatabaseError, StorageBackend, backends::FileBackend};
use wharf_agent::sync::lock;

use super::eventually;

#[derive(Debug, Default)]
struct State {
    full: bool,
    held: bool,
    waiting: u32,
}

/// The disk. Reads always work.
#[derive(Debug, Clone, Default)]
pub(crate) struct Disk(Arc<(Mutex<State>, Condvar)>);

impl Disk {
    /// Opens a redb file on this disk, or makes it.
    pub(crate) fn open(&self, path: &Path) -> Result<Database, DatabaseError> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        Database::builder().create_with_backend(Backend { inner: FileBackend::new(file)?, disk: self.clone() })
    }

    /// Every write fails from now on, until mended.
    pub(crate) fn fill(&self) {
        lock(&self.0.0).full = true;
    }

    /// Writes work, and none is held.
    pub(crate) fn mend(&self) {
        let mut state = lock(&self.0.0);
        (state.full, state.held) = (false, false);
        self.0.1.notify_all();
    }

    /// Writes wait from now on, until mended.
    pub(crate) fn hold(&self) {
        lock(&self.0.0).held = true;
    }

    /// Waits until a write is held.
    pub(crate) async fn reached(&self) {
        eventually("a write reaches the disk", || lock(&self.0.0).waiting > 0).await;
    }

    fn write(&self) -> io::Result<()> {
        let mut state = lock(&self.0.0);
        state.waiting += 1;
        while state.held {
            state = self.0.1.wait(state).expect("the lock is never poisoned");
        }
        state.waiting -= 1;
        if state.full { Err(io::Error::from(io::ErrorKind::StorageFull)) } else { Ok(()) }
    }
}

#[derive(Debug)]
struct Backend {
    inner: FileBackend,
    disk: Disk,
}

impl StorageBackend for Backend {
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.inner.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.disk.write()?;
        self.inner.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.disk.write()?;
        self.inner.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.disk.write()?;
        self.inner.write(offset, data)
    }
}
