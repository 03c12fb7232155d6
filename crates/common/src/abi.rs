//! The layout version of this process: [`crate::ABI_VERSION`], except in the agent of the upgrade tests.
//!
//! That agent loads programs of the next version, which read the second row of [`crate::map::CONFIG`]: with the other
//! version's map they would drop every packet.

use core::sync::atomic::{AtomicBool, Ordering};

static IS_NEXT: AtomicBool = AtomicBool::new(false);

/// Only for tests, before any other use.
pub fn use_next() {
    IS_NEXT.store(true, Ordering::Relaxed);
}

/// The version in use.
#[must_use]
pub fn version() -> u32 {
    crate::ABI_VERSION + u32::from(IS_NEXT.load(Ordering::Relaxed))
}

/// The row of [`crate::map::CONFIG`] that the programs read.
#[must_use]
pub fn config_row() -> u32 {
    u32::from(IS_NEXT.load(Ordering::Relaxed))
}
