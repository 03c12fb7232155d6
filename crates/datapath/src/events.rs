//! The event ring buffer's reader.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use aya::maps::{MapData, RingBuf};
use tokio::io::{Interest, unix::AsyncFd};
use wharf_common::Event;
use wharf_core::kernel::{KernelErrorKind, Result};
use zerocopy::FromBytes as _;

use crate::error::{fail, wrap};

/// Maximum events per [`EventReader::next`].
pub const BATCH: usize = 256;

/// Reads the event ring buffer. All openers share the consumer position, so there can be one reader. A full buffer
/// loses new events.
pub struct EventReader {
    ring: AsyncFd<Ring>,
    malformed: u64,
    _turn: Turn,
}

/// Exclusive right to read events.
pub(crate) struct Turn(Arc<AtomicBool>);

impl Turn {
    pub(crate) fn take(taken: &Arc<AtomicBool>) -> Result<Self> {
        if taken.swap(true, Ordering::AcqRel) {
            return Err(fail(
                "read events",
                wharf_common::map::EVENTS,
                KernelErrorKind::Exhausted,
                "the event ring buffer has its one reader already",
            ));
        }
        Ok(Self(Arc::clone(taken)))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

struct Ring(RingBuf<MapData>);

impl AsRawFd for Ring {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl EventReader {
    pub(crate) fn new(ring: RingBuf<MapData>, turn: Turn) -> Result<Self> {
        // SAFETY: `Ring` owns the descriptor, never replaces it, and is not handed out by value.
        let ring = unsafe { AsyncFd::register_with_interest(Ring(ring), Interest::READABLE) }
            .map_err(|e| wrap("read events", wharf_common::map::EVENTS, &io::Error::from(e)))?;
        Ok(Self { ring, malformed: 0, _turn: turn })
    }

    /// Waits for events; at most [`BATCH`], oldest first. Cancel safe.
    ///
    /// # Errors
    /// A failed descriptor.
    pub async fn next(&mut self) -> Result<Vec<Event>> {
        loop {
            let mut guard =
                self.ring.readable_mut().await.map_err(|e| wrap("read events", wharf_common::map::EVENTS, &e))?;
            let mut events = Vec::new();
            let ring = &mut guard.get_inner_mut().0;
            while events.len() < BATCH {
                let Some(record) = ring.next() else { break };
                match Event::read_from_bytes(&record) {
                    Ok(event) => events.push(event),
                    Err(_) => self.malformed = self.malformed.saturating_add(1),
                }
            }
            if events.len() < BATCH {
                guard.clear_ready();
            }
            if !events.is_empty() {
                return Ok(events);
            }
        }
    }

    /// Records skipped for an unknown size.
    #[must_use]
    pub fn malformed(&self) -> u64 {
        self.malformed
    }
}
