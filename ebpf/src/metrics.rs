//! Counters: one row for each direction and reason, on each CPU.

use wharf_common::{DropReason, drop_reason::REASONS};

use crate::maps::METRICS;

const _: () = assert!(REASONS.is_power_of_two(), "masks for rows");

/// First row of the direction that a row is of.
#[inline(always)]
pub fn direction_of(row: u32) -> u32 {
    row & !(REASONS - 1)
}

/// The row of the same direction and another reason.
#[inline(always)]
pub fn beside(row: u32, reason: DropReason) -> u32 {
    direction_of(row) | reason as u32
}

/// Counts one packet of `bytes`.
#[inline(always)]
pub fn count(row: u32, bytes: u32) {
    if let Some(row) = METRICS.get_ptr_mut(row) {
        // SAFETY: this CPU's row of a per-CPU map, from a lookup. Programs at these hooks run with bottom halves off, so
        // no other run of them on this CPU comes between.
        unsafe {
            (*row).packets = (*row).packets.wrapping_add(1);
            (*row).bytes = (*row).bytes.wrapping_add(u64::from(bytes));
        }
    }
}

/// Takes back a packet that was counted in the same run.
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
