//! The log records of programs loaded with `ProgramSpec::debug`.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use aya_log::EbpfLogger;
use tokio::io::{Interest, unix::AsyncFd};
use wharf_core::kernel::{KernelErrorKind, Result};

use crate::{
    bpf::pins::LOGS,
    error::{fail, wrap},
};

const OPERATION: &str = "read program log";

/// Passes log records to the `log` crate. All programs share one ring buffer and one reader.
pub struct ProgramLog {
    ring: AsyncFd<OwnedFd>,
    flush: Flush,
    taken: Arc<AtomicBool>,
}

type Flush = Box<dyn FnMut() + Send>;

impl ProgramLog {
    /// Blocks while it searches the node's programs.
    pub(crate) fn find(program_id: u32) -> Result<(OwnedFd, Flush)> {
        let subject = || format!("program {program_id}");
        let mut logger = EbpfLogger::init_from_id(program_id).map_err(|e| {
            let mut told = wrap(OPERATION, subject(), &e);
            if matches!(e, aya_log::Error::ProgramNotFound | aya_log::Error::MapNotFound) {
                told.kind = KernelErrorKind::NotFound;
                told.cause += "; was it loaded with debug on?";
            }
            told
        })?;
        let ring = logger.as_fd().try_clone_to_owned().map_err(|e| wrap(OPERATION, subject(), &e))?;
        Ok((ring, Box::new(move || logger.flush())))
    }

    pub(crate) fn new((ring, flush): (OwnedFd, Flush), taken: &Arc<AtomicBool>) -> Result<Self> {
        if taken.swap(true, Ordering::AcqRel) {
            return Err(fail(OPERATION, LOGS, KernelErrorKind::Exhausted, "the log has its one reader already"));
        }
        // SAFETY: the descriptor is owned, never replaced, and not handed out by value.
        match unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) } {
            Ok(ring) => Ok(Self { ring, flush, taken: Arc::clone(taken) }),
            Err(e) => {
                taken.store(false, Ordering::Release);
                Err(wrap(OPERATION, LOGS, &io::Error::from(e)))
            }
        }
    }

    /// Waits for records and logs them. Cancel safe.
    ///
    /// # Errors
    /// A failed descriptor.
    pub async fn next(&mut self) -> Result<()> {
        let mut guard = self.ring.readable().await.map_err(|e| wrap(OPERATION, LOGS, &e))?;
        (self.flush)();
        guard.clear_ready();
        Ok(())
    }
}

impl Drop for ProgramLog {
    fn drop(&mut self) {
        self.taken.store(false, Ordering::Release);
    }
}
