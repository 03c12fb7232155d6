//! The version of the layouts that this process uses.
//!
//! It is [`crate::ABI_VERSION`], except in the agent of the tests of upgrade and downgrade: that one loads programs of the next
//! version, whose [`crate::map::CONFIG`] has two rows of which they read the second. A program that found the map of the
//! other version would drop every packet of its endpoint.

use core::sync::atomic::{AtomicBool, Ordering};

static IS_NEXT: AtomicBool = AtomicBool::new(false);

/// From now on this process uses the next version. Only for tests, before anything asks.
pub fn use_next() {
    IS_NEXT.store(true, Ordering::Relaxed);
}

/// The version in use.
#[must_use]
pub fn version() -> u32 {
    crate::ABI_VERSION + u32::from(IS_NEXT.load(Ordering::Relaxed))
}

/// The row of [`crate::map::CONFIG`] that the programs read, which is its last one.
#[must_use]
pub fn config_row() -> u32 {
    u32::from(IS_NEXT.load(Ordering::Relaxed))
}
