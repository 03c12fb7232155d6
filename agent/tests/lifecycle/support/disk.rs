//! A disk that can be full or slow, under the store's file.

use std::{
    fs::OpenOptions,
    io,
    path::Path,
    sync::{Arc, Condvar, Mutex},
};

use redb::{Database, DatabaseError, StorageBackend, backends::FileBackend};
use wharf_kit::sync::lock;

use super::eventually;

#[derive(Debug, Default)]
struct State {
    broken: Option<io::ErrorKind>,
    held: bool,
    /// Writes that still pass before one is held.
    passes: Option<u64>,
    waiting: u32,
}

/// The disk. Reads always work.
#[derive(Debug, Clone, Default)]
pub(crate) struct Disk {
    state: Arc<(Mutex<State>, Condvar)>,
    /// The one file's content, where it is not a file of the machine's.
    memory: Option<Arc<Mutex<Vec<u8>>>>,
}

impl Disk {
    /// A disk of memory: nothing is ever synced to a real one.
    pub(crate) fn in_memory() -> Self {
        Self { memory: Some(Arc::default()), ..Self::default() }
    }

    /// Opens a redb file on this disk, or makes it.
    pub(crate) fn open(&self, path: &Path) -> Result<Database, DatabaseError> {
        let is_new = !path.exists();
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let inner = match &self.memory {
            Some(memory) => {
                if is_new {
                    lock(memory).clear();
                }
                Inner::Memory(Arc::clone(memory))
            }
            None => Inner::File(FileBackend::new(file)?),
        };
        Database::builder().create_with_backend(Backend { inner, disk: self.clone() })
    }

    /// Every write fails from now on, until mended.
    pub(crate) fn fill(&self) {
        self.break_down(io::ErrorKind::StorageFull);
    }

    /// The same, for another reason.
    pub(crate) fn break_down(&self, kind: io::ErrorKind) {
        lock(&self.state.0).broken = Some(kind);
    }

    /// Writes work, and none is held.
    pub(crate) fn mend(&self) {
        lock(&self.state.0).broken = None;
        self.release();
    }

    /// No write is held any more.
    pub(crate) fn release(&self) {
        let mut state = lock(&self.state.0);
        (state.held, state.passes) = (false, None);
        self.state.1.notify_all();
    }

    /// Writes wait from now on, until mended.
    pub(crate) fn hold(&self) {
        lock(&self.state.0).held = true;
    }

    /// Writes wait once so many have passed, until mended.
    pub(crate) fn hold_after(&self, writes: u64) {
        lock(&self.state.0).passes = Some(writes);
    }

    /// Waits until a write is held.
    pub(crate) async fn reached(&self) {
        eventually("a write reaches the disk", || self.is_reached()).await;
    }

    /// True while a write is held.
    pub(crate) fn is_reached(&self) -> bool {
        let state = lock(&self.state.0);
        state.held && state.waiting > 0
    }

    fn write(&self) -> io::Result<()> {
        let mut state = lock(&self.state.0);
        match state.passes {
            Some(0) => state.held = true,
            Some(n) => state.passes = Some(n - 1),
            None => {}
        }
        state.waiting += 1;
        while state.held {
            state = self.state.1.wait(state).expect("the lock is never poisoned");
        }
        state.waiting -= 1;
        state.broken.map_or(Ok(()), |kind| Err(io::Error::from(kind)))
    }
}

/// Where the bytes are.
#[derive(Debug)]
enum Inner {
    File(FileBackend),
    Memory(Arc<Mutex<Vec<u8>>>),
}

impl Inner {
    /// The bytes of a range that lies within the file.
    fn range(offset: u64, length: usize) -> io::Result<std::ops::Range<usize>> {
        let start = usize::try_from(offset).map_err(io::Error::other)?;
        Ok(start..start.checked_add(length).ok_or(io::ErrorKind::InvalidInput)?)
    }
}

#[derive(Debug)]
struct Backend {
    inner: Inner,
    disk: Disk,
}

impl StorageBackend for Backend {
    fn len(&self) -> io::Result<u64> {
        match &self.inner {
            Inner::File(file) => file.len(),
            Inner::Memory(memory) => Ok(lock(memory).len() as u64),
        }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        match &self.inner {
            Inner::File(file) => file.read(offset, out),
            Inner::Memory(memory) => {
                let range = Inner::range(offset, out.len())?;
                out.copy_from_slice(lock(memory).get(range).ok_or(io::ErrorKind::UnexpectedEof)?);
                Ok(())
            }
        }
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.disk.write()?;
        match &self.inner {
            Inner::File(file) => file.set_len(len),
            Inner::Memory(memory) => {
                lock(memory).resize(usize::try_from(len).map_err(io::Error::other)?, 0);
                Ok(())
            }
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        self.disk.write()?;
        match &self.inner {
            Inner::File(file) => file.sync_data(),
            Inner::Memory(_) => Ok(()),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.disk.write()?;
        match &self.inner {
            Inner::File(file) => file.write(offset, data),
            Inner::Memory(memory) => {
                let range = Inner::range(offset, data.len())?;
                lock(memory).get_mut(range).ok_or(io::ErrorKind::UnexpectedEof)?.copy_from_slice(data);
                Ok(())
            }
        }
    }
}
