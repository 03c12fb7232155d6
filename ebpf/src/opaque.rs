//! Numbers that the compiler knows nothing about.

use core::arch::asm;

/// As `core::hint::black_box`, which however stores the number and loads it again.
#[inline(always)]
pub fn opaque(mut number: u64) -> u64 {
    // SAFETY: an instruction without effect. Without one, the kernel refuses the line's debug information.
    unsafe { asm!("{0} = {0}", inout(reg) number, options(pure, nomem, nostack, preserves_flags)) };
    number
}
