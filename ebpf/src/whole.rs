//! The key of a longest-prefix search.

use aya_ebpf::btf_maps::lpm_trie::Key;

/// A key with all bits of `data`, aligned to 8 bytes: for the packed [`Key`], the compiler writes unaligned to the
/// stack, which the verifier refuses.
#[repr(C, align(8))]
pub struct Whole<T> {
    _pad: u32,
    prefix_len: u32,
    data: T,
}

impl<T> Whole<T> {
    #[inline(always)]
    pub fn new(data: T) -> Self {
        const { assert!(size_of::<Self>() == 2 * size_of::<u32>() + size_of::<T>()) };
        Self { _pad: 0, prefix_len: 8 * size_of::<T>() as u32, data }
    }

    #[inline(always)]
    pub fn as_shared(&self) -> &Key<T> {
        // SAFETY: fields behind the first are placed as in the packed key (asserted above).
        unsafe { &*(&raw const *self).byte_add(size_of::<u32>()).cast() }
    }
}
