//! Short critical sections.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, never across an await (clippy's `await_holding_lock` denies it). A panic ends the process in
/// release builds, so only a failing test sees a poisoned lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
