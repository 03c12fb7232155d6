//! Counters: one row for each direction and reason, on each CPU.

use wharf_common::{Direction, drop_reason::REASONS};

use crate::maps::METRICS;

/// Counts one packet of `bytes`; `reason` is a [`wharf_common::DropReason`] as a number.
#[inline(always)]
pub fn count(direction: Direction, reason: u32, bytes: u32) {
    add(direction, reason, 1, bytes);
}

/// Adds packets and bytes.
#[inline(always)]
pub fn add(direction: Direction, reason: u32, packets: u32, bytes: u32) {
    if let Some(row) = METRICS.get_ptr_mut(direction as u32 * REASONS + reason) {
        // SAFETY: this CPU's row of a per-CPU map, from a lookup. Programs at these hooks run with bottom halves off, so
        // no other run of them on this CPU comes between.
        unsafe {
            (*row).packets = (*row).packets.wrapping_add(u64::from(packets));
            (*row).bytes = (*row).bytes.wrapping_add(u64::from(bytes));
        }
    }
}

/// Takes back a packet that was counted in the same run.
#[inline(always)]
pub fn take_back(direction: Direction, reason: u32, bytes: u32) {
    take(direction, reason, 1, bytes);
}

/// Takes back what was added in the same run.
#[inline(always)]
pub fn take(direction: Direction, reason: u32, packets: u32, bytes: u32) {
    if let Some(row) = METRICS.get_ptr_mut(direction as u32 * REASONS + reason) {
        // SAFETY: as in `add`.
        unsafe {
            (*row).packets = (*row).packets.wrapping_sub(u64::from(packets));
            (*row).bytes = (*row).bytes.wrapping_sub(u64::from(bytes));
        }
    }
}
