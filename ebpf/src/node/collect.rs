//! Removes rows of `FLOWS` whose flow is over or has lost an endpoint, counts the rows of each endpoint, and frees places of its shares
//! that are not in use. User space runs it
//! every few seconds; packets go on meanwhile.
//!
//! The kernel walks the table and calls [`row`] with each row's own memory, so that what decides is the row as it is at that moment,
//! not a copy of it. It is a raw tracepoint's program, attached to none: a test run of a classifier would keep this CPU's packets
//! waiting for as long as it lasts (Linux 6.10).
//!
//! The kernel deletes by key, so a packet could change the row between the check and the delete. No row of a living flow is lost:
//!
//! - **A row that is over is never refreshed.** A packet that finds a row over (`FlowRow::is_over`) replaces it. This program applies
//!   the same rule to the same row with [`MARGIN`] to spare, so only a packet that read its clock a second ago could disagree.
//! - **A row that replaces another is not in `FLOWS` during a collection.** A packet that replaces a row puts the new one into the
//!   LRU table while the collection runs (`recent::is_collecting`), and no flow moves from there to `FLOWS`. So the delete
//!   finds the row that was checked, or none.
//! - **No flow begins in `FLOWS` with the key that is being removed.** Only the CPU whose packet removed a row knows that it
//!   replaced one: a packet of the same flow on another CPU finds no row and begins the flow. So this program first publishes
//!   the key's mark (`FlowUse::recent_counted` of row 0), then looks the row up by its key and checks it once more, and
//!   deletes that row. A packet that finds no row looks at the mark before it adds one (`recent::is_being_removed`). If it sees
//!   the mark, its flow begins in the LRU table. If it does not, the mark is published after the packet found the key without a
//!   row, so the second lookup finds no row, or the new one, which is not over. This needs each CPU's accesses in their order:
//!   the addition that publishes the mark is a full barrier on x86-64. Where it is none, the second check still leaves but the
//!   time between two helper calls.
//!
//!   The mark is of one key at a time. If every flow that begins during a collection began in the LRU table instead, a flood
//!   could evict it there: the share of recent flows (`recent.rs`) would not hold for the time that a collection takes, some
//!   milliseconds in every few seconds with a full table.
//! - A row without its endpoint can be refreshed by the other end. Its flow leads nowhere, and the next packet begins another one.

use core::{ffi::c_void, ptr};

use aya_ebpf::helpers::{bpf_for_each_map_elem, bpf_ktime_get_ns, bpf_map_delete_elem};
use wharf_common::{
    FlowKey, FlowRow, FlowTotals, FlowUse, FragmentSlot,
    flow::{FLOW_RECENT, FRAGMENT_TICKS, TICK_SHIFT},
};
use wharf_ebpf::{
    atomic,
    maps::{ENDPOINTS, FLOW_TOTALS, FLOW_USE, FLOWS, FLOWS_RECENT, FRAGMENT_SLOTS},
};

use crate::packet::Key;

/// Ticks without a packet after which the endpoints of a flow are looked up. One that is gone sends nothing.
const LOOKED_AT: u32 = 8;

/// Ticks beyond a flow's timeout after which its row is removed (see above).
const MARGIN: u32 = 1;
/// The row of `FLOW_USE` for the whole node.
const NODE: u32 = 0;

/// Runs the program.
#[inline(always)]
pub fn run() {
    let (Some(totals), Some(node)) = (FLOW_TOTALS.get_ptr_mut(0), FLOW_USE.get_ptr_mut(NODE)) else { return };
    let uses = (&raw const FLOW_USE).cast_mut().cast();
    let flows = (&raw const FLOWS).cast_mut().cast();
    let places = (&raw const FLOWS_RECENT).cast_mut().cast();
    let slots = (&raw const FRAGMENT_SLOTS).cast_mut().cast();
    // The coarse clock, by which packets are dated, is not for programs of this kind; it is behind this one by a timer tick at most.
    // SAFETY: a helper without arguments.
    let now = (unsafe { bpf_ktime_get_ns() } >> TICK_SHIFT) as u32;
    let mut sweep = Sweep { now, rows: 0, expired: 0, orphaned: 0 };
    let sweep_ptr = (&raw mut sweep).cast();
    // SAFETY: the maps are of the kinds that the functions below expect, and the context is theirs. The walk over `FLOW_USE` takes
    // longer than a packet that was under way before the mark.
    unsafe {
        ptr::write_volatile(&raw mut (*node).counted, 1);
        ptr::write_volatile(&raw mut (*node).recent_counted, 0);
        bpf_for_each_map_elem(uses, begin as *mut c_void, sweep_ptr, 0);
        bpf_for_each_map_elem(flows, row as *mut c_void, sweep_ptr, 0);
        bpf_for_each_map_elem(places, place as *mut c_void, sweep_ptr, 0);
        bpf_for_each_map_elem(slots, slot as *mut c_void, sweep_ptr, 0);
        bpf_for_each_map_elem(uses, end as *mut c_void, sweep_ptr, 0);
    }
    // One collection runs at a time, and nobody else writes these.
    // SAFETY: map values.
    unsafe {
        let Sweep { rows, expired, orphaned, .. } = ptr::read_volatile(&raw const sweep);
        let FlowTotals { expired: all_expired, orphaned: all_orphaned, .. } = *totals;
        (*totals).rows = rows;
        (*totals).expired = all_expired + expired;
        (*totals).orphaned = all_orphaned + orphaned;
        ptr::write_volatile(&raw mut (*node).rows, rows as u32);
        ptr::write_volatile(&raw mut (*node).counted, 0);
    }
}

/// What one collection does.
#[repr(C)]
struct Sweep {
    rows: u64,
    expired: u64,
    orphaned: u64,
    now: u32,
}

unsafe extern "C" fn begin(_map: *mut c_void, id: *const u32, used: *mut FlowUse, _: *mut Sweep) -> i64 {
    // SAFETY: key and value of the map that the kernel walks over.
    unsafe {
        if *id != NODE {
            (*used).counted = 0;
            (*used).recent_counted = 0;
        }
    }
    0
}

unsafe extern "C" fn row(map: *mut c_void, key: *mut FlowKey, row: *mut FlowRow, sweep: *mut Sweep) -> i64 {
    // SAFETY: key and value of the map that the kernel walks over, and the context that `run` gave.
    unsafe {
        if fate(key, row, (*sweep).now) == Fate::Stays {
            let recent = (*row).flags & FLOW_RECENT != 0;
            (*sweep).rows += u64::from(!recent);
            if let Some(used) = FLOW_USE.get_ptr_mut(u32::from((*row).owner)) {
                atomic::add(&raw mut (*used).counted, u32::from(!recent));
                atomic::add(&raw mut (*used).recent_counted, u32::from(recent));
            }
            return 0;
        }
        let Some(node) = FLOW_USE.get_ptr_mut(NODE) else { return 0 };
        // A copy: a packet may remove the row now, and another flow may get its memory.
        let key = ptr::read(key.cast::<Key>());
        let key = key.as_shared();
        let removed = &raw mut (*node).recent_counted;
        // It is zero: one collection runs at a time.
        atomic::add(removed, key.mark());
        if let Some(row) = FLOWS.get_ptr(key) {
            let fate = fate(key, row, (*sweep).now);
            (*sweep).expired += u64::from(fate == Fate::Expired);
            (*sweep).orphaned += u64::from(fate == Fate::Orphaned);
            if fate != Fate::Stays {
                bpf_map_delete_elem(map, ptr::from_ref(key).cast_mut().cast());
            }
        }
        ptr::write_volatile(removed, 0);
    }
    0
}

/// What a collection does with a row.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Stays,
    /// Removed: the flow is over.
    Expired,
    /// Removed: an endpoint of the flow is gone.
    Orphaned,
}

/// # Safety
///
/// `key` and `row` are of the map of flows.
#[inline(always)]
unsafe fn fate(key: *const FlowKey, row: *const FlowRow, now: u32) -> Fate {
    // SAFETY: the caller's word.
    unsafe {
        if (*row).is_over((*key).protocol, now.wrapping_sub(MARGIN)) {
            Fate::Expired
        } else if (*row).idle(now) > LOOKED_AT
            && !(is_alive(&(*key).low, (*row).low_epoch) && is_alive(&(*key).high, (*row).high_epoch))
        {
            Fate::Orphaned
        } else {
            Fate::Stays
        }
    }
}

/// Frees the places of flows that are no longer recent: the memory of endpoints that are idle or gone.
unsafe extern "C" fn place(map: *mut c_void, place: *mut u32, key: *mut FlowKey, _: *mut Sweep) -> i64 {
    // SAFETY: key and value of the map that the kernel walks over; a row of the other map outlives this run.
    unsafe {
        if FLOWS.get(&*key).is_none_or(|row| row.flags & FLOW_RECENT == 0) {
            bpf_map_delete_elem(map, place.cast());
        }
    }
    0
}

/// Frees the places of fragmented packets that no later fragment belongs to.
unsafe extern "C" fn slot(map: *mut c_void, place: *mut u32, slot: *mut FragmentSlot, sweep: *mut Sweep) -> i64 {
    // SAFETY: key and value of the map that the kernel walks over, and the context that `run` gave. A packet that takes the place at
    // this moment loses it; its later fragments are dropped, as if the network had lost one.
    unsafe {
        let age = (*sweep).now.wrapping_sub((*slot).row.seen);
        if age > FRAGMENT_TICKS + MARGIN && age < u32::MAX / 2 {
            bpf_map_delete_elem(map, place.cast());
        }
    }
    0
}

unsafe extern "C" fn end(_map: *mut c_void, id: *const u32, used: *mut FlowUse, _: *mut Sweep) -> i64 {
    // A row that was added behind the walk is missing in the count until the next one.
    // SAFETY: key and value of the map that the kernel walks over.
    unsafe {
        if *id != NODE {
            (*used).rows = (*used).counted;
            (*used).recent = (*used).recent_counted;
        }
    }
    0
}

/// True when the endpoint is still there, or the end was none.
#[inline(always)]
fn is_alive(address: &wharf_common::EndpointKey, epoch: u32) -> bool {
    // SAFETY: the row outlives this run; user space replaces rows whole.
    epoch == 0 || unsafe { ENDPOINTS.get(address) }.is_some_and(|row| row.epoch as u32 == epoch)
}
