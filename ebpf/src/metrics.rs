//! Counters: one row for each direction and reason, on each CPU.

use wharf_common::{Counter, Direction, DropReason, drop_reason::metrics_index};

use crate::maps::METRICS;

/// A counted packet, for a caller that may have to take it back.
#[derive(Clone, Copy)]
pub struct Counted(Option<*mut Counter>);

/// Of a packet that was not counted.
pub const NOT_COUNTED: Counted = Counted(None);

/// Counts one packet of `bytes`.
#[inline(always)]
pub fn count(direction: Direction, reason: DropReason, bytes: u32) -> Counted {
    let row = METRICS.get_ptr_mut(metrics_index(direction, reason));
    if let Some(row) = row {
        // SAFETY: this CPU's row of a per-CPU map, from a lookup. Programs at these hooks run with bottom halves off, so
        // no other run of them on this CPU comes between.
        unsafe {
            (*row).packets = (*row).packets.wrapping_add(1);
            (*row).bytes = (*row).bytes.wrapping_add(u64::from(bytes));
        }
    }
    Counted(row)
}

impl Counted {
    /// Takes the packet back, in the same run that counted it.
    #[inline(always)]
    pub fn undo(self, bytes: u32) {
        if let Some(row) = self.0 {
            // SAFETY: as in `count`.
            unsafe {
                (*row).packets = (*row).packets.wrapping_sub(1);
                (*row).bytes = (*row).bytes.wrapping_sub(u64::from(bytes));
            }
        }
    }
}
