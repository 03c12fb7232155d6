//! Short critical sections.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks; never held across an await (clippy's `await_holding_lock` denies it). A panic ends the process in release
/// builds, so a poisoned lock is only ever seen by a test that is failing already.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
