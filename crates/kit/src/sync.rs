//! Short critical sections.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, never across an await (clippy's `await_holding_lock`). Release builds abort on panic: no lock is poisoned.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
