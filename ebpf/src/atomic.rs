//! Atomic operations (compare-exchange: since Linux 5.12).

use core::intrinsics::{AtomicOrdering::Relaxed, atomic_cxchg, atomic_xadd};

pub trait Word: Copy {
    const ONE: Self;

    /// Adds `value`.
    ///
    /// # Safety
    ///
    /// `word` is in a map value.
    unsafe fn add(word: *mut Self, value: Self);
}

macro_rules! word {
    ($($t:ty),+) => { $(
        impl Word for $t {
            const ONE: Self = 1;

            #[inline(always)]
            unsafe fn add(word: *mut Self, value: Self) {
                // SAFETY: the function's contract.
                unsafe { atomic_xadd::<$t, $t, { Relaxed }>(word, value) };
            }
        }
    )+ };
}

word!(u32, u64);

/// Adds one to a word that CPUs share.
///
/// # Safety
///
/// As [`Word::add`].
#[inline(always)]
pub unsafe fn increment<T: Word>(word: *mut T) {
    // SAFETY: the function's contract.
    unsafe { T::add(word, T::ONE) };
}

/// Adds to a word that CPUs share.
///
/// # Safety
///
/// As [`Word::add`].
#[inline(always)]
pub unsafe fn add<T: Word>(word: *mut T, value: T) {
    // SAFETY: the function's contract.
    unsafe { T::add(word, value) };
}

/// Writes `after` in place of `before`. False if the word has another value.
///
/// # Safety
///
/// As [`Word::add`].
#[inline(always)]
pub unsafe fn exchange(word: *mut u32, before: u32, after: u32) -> bool {
    // SAFETY: the function's contract.
    unsafe { atomic_cxchg::<u32, { Relaxed }, { Relaxed }>(word, before, after).1 }
}
