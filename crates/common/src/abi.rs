//! The layout version of this process: [`crate::ABI_VERSION`], or the next one in upgrade tests, whose programs read
//! the second row of [`crate::map::CONFIG`].

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
