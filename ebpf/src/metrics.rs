//! Counters per direction and reason, per CPU.

use wharf_common::{DropReason, drop_reason::REASONS};

use crate::maps::METRICS;

const _: () = assert!(REASONS.is_power_of_two(), "masks for rows");

#[inline(always)]
pub fn direction_of(row: u32) -> u32 {
    row & !(REASONS - 1)
}

/// Same direction, another reason.
#[inline(always)]
pub fn beside(row: u32, reason: DropReason) -> u32 {
    direction_of(row) | reason as u32
}

#[inline(always)]
pub fn count(row: u32, bytes: u32) {
    if let Some(row) = METRICS.get_ptr_mut(row) {
        // SAFETY: this CPU's row, a map value. Bottom halves are off at these hooks, so no other run interleaves,
        // except on PREEMPT_RT since Linux 6.18: a packet can then be missing in the counters.
        unsafe {
            (*row).packets = (*row).packets.wrapping_add(1);
            (*row).bytes = (*row).bytes.wrapping_add(u64::from(bytes));
        }
    }
}

/// Subtracts a packet of the same run.
#[inline(always)]
pub fn take_back(row: u32, bytes: u32) {
    if let Some(row) = METRICS.get_ptr_mut(row) {
        // SAFETY: as in `count`.
        unsafe {
            (*row).packets = (*row).packets.wrapping_sub(1);
            (*row).bytes = (*row).bytes.wrapping_sub(u64::from(bytes));
        }
    }
}
