//! Gives each endpoint a share of `FLOWS` for its latest flows: a ring. Each place is a row of `FLOWS_RECENT` with the
//! key of a flow, whose row in `FLOWS` has [`FLOW_RECENT`]. A new flow displaces the oldest to the LRU table
//! `FLOWS_NEW`. Flows from outside have a separate ring, so an outside flood displaces no other flows.
//!
//! If two CPUs take a place, the losing row stays in `FLOWS` until its flow is over.

use core::ptr;

use aya_ebpf::bindings::BPF_NOEXIST;
use wharf_common::{
    FlowKey, FlowRow, FlowUse,
    flow::FLOW_RECENT,
    map::{FLOWS_KEPT_MAX, FLOWS_QUOTA, FLOWS_SHARE},
};
use wharf_ebpf::{
    atomic,
    maps::{FLOW_USE, FLOWS, FLOWS_NEW, FLOWS_RECENT},
};

use crate::{
    flow::{EEXIST, total},
    packet::Key,
};

/// Both rings, and as many rows without a place.
const RECENT_MOST: i32 = 4 * FLOWS_SHARE as i32;
const NO_PLACE: u32 = u32::MAX;

/// False: begin in the LRU table. `outside`: the flow began outside the node.
#[inline(always)]
pub fn enter(key: &Key, mut row: FlowRow, outside: bool) -> bool {
    let owner = u32::from(row.owner);
    // As in [`crate::flow::way`].
    let place = core::hint::black_box(wharf_vacate(owner, outside.into()));
    if place == NO_PLACE {
        return false;
    }
    match FLOWS_RECENT.get_ptr_mut(place) {
        // SAFETY: a map value of the same size and alignment. A torn key finds no row.
        Some(held) => unsafe { ptr::write(held.cast::<Key>(), *key) },
        None if FLOWS_RECENT.insert(place, key.as_shared(), 0).is_ok() => {}
        None => return false,
    }
    row.flags |= FLOW_RECENT;
    match FLOWS.insert(key.as_shared(), row, u64::from(BPF_NOEXIST)) {
        Ok(()) => {
            if let Some(used) = FLOW_USE.get_ptr_mut(owner) {
                // SAFETY: a map value, added to atomically.
                unsafe { atomic::increment(&raw mut (*used).recent) };
            }
            true
        }
        // Another CPU inserted the flow.
        Err(EEXIST) => true,
        Err(_) => false,
    }
}

/// Takes the ring's next place and moves its flow to the LRU table.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wharf_vacate(owner: u32, outside: u32) -> u32 {
    let Some(used) = FLOW_USE.get_ptr_mut(owner) else { return NO_PLACE };
    let outside = outside & 1;
    // SAFETY: map values: words are read whole, or atomically.
    unsafe {
        let next = if outside != 0 { &raw mut (*used).next_outside } else { &raw mut (*used).next };
        let number = ptr::read_volatile(next);
        atomic::increment(next);
        let place = (owner * 2 + outside) * FLOWS_SHARE + number % FLOWS_SHARE;
        if let Some(held) = FLOWS_RECENT.get_ptr(place) {
            retire(held, owner, used);
        }
        if ptr::read_volatile(&raw const (*used).recent) as i32 >= RECENT_MOST { NO_PLACE } else { place }
    }
}

#[inline(always)]
unsafe fn retire(key: *const FlowKey, owner: u32, used: *mut FlowUse) {
    // SAFETY: map values outlive this run. If another CPU keeps the flow, its next packet moves it again.
    unsafe {
        let Some(row) = FLOWS.get_ptr_mut(&*key) else { return };
        let flags = ptr::read_volatile(&raw const (*row).flags);
        if flags & FLOW_RECENT == 0 || u32::from((*row).owner) != owner {
            return;
        }
        ptr::write_volatile(&raw mut (*row).flags, flags & !FLOW_RECENT);
        let _ = FLOWS_NEW.insert(&*key, &*row, 0); // fails only without memory
        let _ = FLOWS.remove(&*key);
        leave(used);
    }
}

#[inline(always)]
pub unsafe fn leave(used: *mut FlowUse) {
    // SAFETY: a map value, added to atomically.
    unsafe { atomic::add(&raw mut (*used).recent, u32::MAX) };
}

#[inline(always)]
pub fn left(owner: u16) {
    if let Some(used) = FLOW_USE.get_ptr_mut(u32::from(owner)) {
        // SAFETY: a map value.
        unsafe { leave(used) };
    }
}

/// Row of the node ([`FlowUse`]).
const NODE: u32 = 0;

/// Counters of the endpoint and the node, if one more flow may be kept.
#[inline(always)]
pub fn room(owner: u16) -> Option<[*mut FlowUse; 2]> {
    let (used, node) = (FLOW_USE.get_ptr_mut(u32::from(owner))?, FLOW_USE.get_ptr_mut(NODE)?);
    // SAFETY: map values, read whole; racing CPUs can each take the last place.
    let (own, all) =
        unsafe { (ptr::read_volatile(&raw const (*used).rows), ptr::read_volatile(&raw const (*node).rows)) };
    if own >= FLOWS_QUOTA {
        total(|totals| &raw mut totals.over_quota);
        return None;
    }
    if all >= FLOWS_KEPT_MAX {
        total(|totals| &raw mut totals.no_room);
        return None;
    }
    Some([used, node])
}

#[inline(always)]
pub fn count_kept(counters: [*mut FlowUse; 2]) {
    for used in counters {
        // SAFETY: map values ([`room`]), added to atomically.
        unsafe { atomic::increment(&raw mut (*used).rows) };
    }
}

#[inline(always)]
pub fn is_collecting() -> bool {
    // SAFETY: a map value, read whole.
    FLOW_USE.get_ptr(NODE).is_some_and(|node| unsafe { ptr::read_volatile(&raw const (*node).counted) } != 0)
}

/// A collection is removing the row (`collect.rs`).
#[inline(always)]
pub fn is_being_removed(key: &FlowKey) -> bool {
    // SAFETY: a map value, read whole.
    FLOW_USE
        .get_ptr(NODE)
        .is_some_and(|node| unsafe { ptr::read_volatile(&raw const (*node).recent_counted) } == key.mark())
}
