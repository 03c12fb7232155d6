//! The one atomic operation that every kernel's BPF has: an addition whose result is not read.

use core::intrinsics::{AtomicOrdering::Relaxed, atomic_xadd};

/// A word that is added to.
pub trait Word: Copy {
    /// Adds one.
    ///
    /// # Safety
    ///
    /// The word is a map value's, or part of one.
    unsafe fn increment(word: *mut Self);
}

macro_rules! word {
    ($($t:ty),+) => { $(
        impl Word for $t {
            #[inline(always)]
            unsafe fn increment(word: *mut Self) {
                // SAFETY: as the function's own contract.
                unsafe { atomic_xadd::<$t, $t, { Relaxed }>(word, 1) };
            }
        }
    )+ };
}

word!(u32, u64);

/// Adds one to a word that several CPUs share.
///
/// # Safety
///
/// As [`Word::increment`].
#[inline(always)]
pub unsafe fn increment<T: Word>(word: *mut T) {
    // SAFETY: as the function's own contract.
    unsafe { T::increment(word) };
}
