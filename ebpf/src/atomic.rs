//! The one atomic operation that every kernel's BPF has: an addition whose result is not read.

use core::intrinsics::{AtomicOrdering::Relaxed, atomic_xadd};

/// A word that is added to.
pub trait Word: Copy {
    /// One.
    const ONE: Self;

    /// Adds `value`.
    ///
    /// # Safety
    ///
    /// The word is a map value's, or part of one.
    unsafe fn add(word: *mut Self, value: Self);
}

macro_rules! word {
    ($($t:ty),+) => { $(
        impl Word for $t {
            const ONE: Self = 1;

            #[inline(always)]
            unsafe fn add(word: *mut Self, value: Self) {
                // SAFETY: as the function's own contract.
                unsafe { atomic_xadd::<$t, $t, { Relaxed }>(word, value) };
            }
        }
    )+ };
}

word!(u32, u64);

/// Adds one to a word that several CPUs share.
///
/// # Safety
///
/// As [`Word::add`].
#[inline(always)]
pub unsafe fn increment<T: Word>(word: *mut T) {
    // SAFETY: as the function's own contract.
    unsafe { T::add(word, T::ONE) };
}

/// Adds to a word that several CPUs share.
///
/// # Safety
///
/// As [`Word::add`].
#[inline(always)]
pub unsafe fn add<T: Word>(word: *mut T, value: T) {
    // SAFETY: as the function's own contract.
    unsafe { T::add(word, value) };
}
