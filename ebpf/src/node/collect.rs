//! Removes rows of `FLOWS` that are over or lost an endpoint, counts each endpoint's rows, and frees unused places.
//! User space runs it every few seconds, while packets flow. A raw tracepoint: a classifier's test run would block this
//! CPU's packets (Linux 6.10).
//!
//! A packet could change a row between check and delete (by key). No living flow loses its row:
//!
//! - A row that is over is never refreshed: a packet replaces it (`FlowRow::is_over`). This program applies the same
//!   rule with [`MARGIN`] to spare.
//! - During a collection, a packet that replaces a row puts the new row into the LRU table (`recent::is_collecting`),
//!   and no flow moves from there to `FLOWS`.
//! - No flow begins in `FLOWS` with a key that is being removed. After another CPU removed a row, a packet does not
//!   know that it replaces one. So this program publishes the key's mark (`FlowUse::recent_counted` of row 0), looks
//!   the row up, checks it again, and deletes it. A packet that finds no row and sees the mark
//!   (`recent::is_being_removed`) begins its flow in the LRU table. If it does not see the mark, the second lookup is
//!   later: it finds no row, or a new one. The atomic addition orders these accesses (a full barrier on x86-64);
//!   elsewhere, the time between two helper calls remains. If all flows of that time began in the LRU table, a flood
//!   could evict them.
//! - Only the other end refreshes a row that lost an endpoint.

use core::{ffi::c_void, ptr};

use aya_ebpf::helpers::{bpf_for_each_map_elem, bpf_ktime_get_ns, bpf_map_delete_elem};
use wharf_common::{
    FlowKey, FlowRow, FlowTotals, FlowUse, FragmentSlot,
    flow::{FLOW_PREFIX, FLOW_RECENT, FRAGMENT_TICKS, TICK_SHIFT},
};
use wharf_ebpf::{
    atomic,
    maps::{ENDPOINTS, FLOW_TOTALS, FLOW_USE, FLOWS, FLOWS_RECENT, FRAGMENT_SLOTS, SOURCES},
    profile::Profile,
};

use crate::packet::Key;

/// Idle ticks before a flow's endpoints are looked up.
const LOOKED_AT: u32 = 8;

/// Ticks beyond the timeout.
const MARGIN: u32 = 1;
const NODE: u32 = 0;

#[inline(always)]
pub fn run() {
    let (Some(totals), Some(node)) = (FLOW_TOTALS.get_ptr_mut(0), FLOW_USE.get_ptr_mut(NODE)) else { return };
    let uses = (&raw const FLOW_USE).cast_mut().cast();
    let flows = (&raw const FLOWS).cast_mut().cast();
    let places = (&raw const FLOWS_RECENT).cast_mut().cast();
    let slots = (&raw const FRAGMENT_SLOTS).cast_mut().cast();
    // Packets use the coarse clock, which this program type cannot read; it lags by at most a timer tick.
    // SAFETY: a helper without arguments.
    let now = (unsafe { bpf_ktime_get_ns() } >> TICK_SHIFT) as u32;
    let mut sweep = Sweep { now, rows: 0, expired: 0, orphaned: 0 };
    let sweep_ptr = (&raw mut sweep).cast();
    // SAFETY: maps and context match the callbacks. The walk over `FLOW_USE` outlasts packets that began before
    // `counted` was set.
    unsafe {
        ptr::write_volatile(&raw mut (*node).counted, 1);
        ptr::write_volatile(&raw mut (*node).recent_counted, 0);
        bpf_for_each_map_elem(uses, begin as *mut c_void, sweep_ptr, 0);
        bpf_for_each_map_elem(flows, row as *mut c_void, sweep_ptr, 0);
        bpf_for_each_map_elem(places, place as *mut c_void, sweep_ptr, 0);
        bpf_for_each_map_elem(slots, slot as *mut c_void, sweep_ptr, 0);
        bpf_for_each_map_elem(uses, end as *mut c_void, sweep_ptr, 0);
    }
    // SAFETY: map values that no other program writes.
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

#[repr(C)]
struct Sweep {
    rows: u64,
    expired: u64,
    orphaned: u64,
    now: u32,
}

unsafe extern "C" fn begin(_map: *mut c_void, id: *const u32, used: *mut FlowUse, _: *mut Sweep) -> i64 {
    // SAFETY: key and value of the kernel's walk.
    unsafe {
        if *id != NODE {
            (*used).counted = 0;
            (*used).recent_counted = 0;
        }
    }
    0
}

unsafe extern "C" fn row(map: *mut c_void, key: *mut FlowKey, row: *mut FlowRow, sweep: *mut Sweep) -> i64 {
    // SAFETY: key, value and context of the kernel's walk.
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
        // A copy: the row's memory can be reused.
        let key = ptr::read(key.cast::<Key>());
        let key = key.as_shared();
        let removed = &raw mut (*node).recent_counted;
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

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Stays,
    Expired,
    Orphaned,
}

#[inline(always)]
unsafe fn fate(key: *const FlowKey, row: *const FlowRow, now: u32) -> Fate {
    // SAFETY: the caller's contract.
    unsafe {
        if (*row).is_over((*key).protocol, now.wrapping_sub(MARGIN)) {
            Fate::Expired
        } else if (*row).idle(now) > LOOKED_AT && !has_ends(&*key, &*row) {
            Fate::Orphaned
        } else {
            Fate::Stays
        }
    }
}

/// Frees places of flows that are not recent.
unsafe extern "C" fn place(map: *mut c_void, place: *mut u32, key: *mut FlowKey, _: *mut Sweep) -> i64 {
    // SAFETY: key and value of the kernel's walk; a row of `FLOWS` outlives this run.
    unsafe {
        if FLOWS.get(&*key).is_none_or(|row| row.flags & FLOW_RECENT == 0) {
            bpf_map_delete_elem(map, place.cast());
        }
    }
    0
}

/// Frees places of old fragments.
unsafe extern "C" fn slot(map: *mut c_void, place: *mut u32, slot: *mut FragmentSlot, sweep: *mut Sweep) -> i64 {
    // SAFETY: key, value and context of the kernel's walk. A packet that takes the place now loses it.
    unsafe {
        let age = (*sweep).now.wrapping_sub((*slot).row.seen);
        if age > FRAGMENT_TICKS + MARGIN && age < u32::MAX / 2 {
            bpf_map_delete_elem(map, place.cast());
        }
    }
    0
}

unsafe extern "C" fn end(_map: *mut c_void, id: *const u32, used: *mut FlowUse, _: *mut Sweep) -> i64 {
    // SAFETY: key and value of the kernel's walk.
    unsafe {
        if *id != NODE {
            (*used).rows = (*used).counted;
            (*used).recent = (*used).recent_counted;
        }
    }
    0
}

#[inline(always)]
fn has_ends(key: &FlowKey, row: &FlowRow) -> bool {
    if row.flags & FLOW_PREFIX == 0 {
        return is_alive(&key.low, row.low_epoch) && is_alive(&key.high, row.high_epoch);
    }
    // The prefix's endpoint is found only as the owner: the row lives as long.
    is_router(row) || is_owner(&key.low, row.low_epoch, row.owner) || is_owner(&key.high, row.high_epoch, row.owner)
}

/// The owner has source prefixes and an end of the flow.
#[inline(always)]
fn is_router(row: &FlowRow) -> bool {
    let Some(owner) = Profile::of(row.owner.into()) else { return false };
    let epoch = owner.epoch();
    // SAFETY: the row outlives this run.
    let sources = unsafe { SOURCES.get(owner.ifindex()) };
    (epoch == row.low_epoch || epoch == row.high_epoch) && sources.is_some_and(|row| row.epoch as u32 == epoch)
}

#[inline(always)]
fn is_owner(address: &wharf_common::EndpointKey, epoch: u32, owner: u16) -> bool {
    // SAFETY: the row outlives this run.
    unsafe { ENDPOINTS.get(address) }.is_some_and(|row| row.endpoint_id == owner && row.epoch as u32 == epoch)
}

#[inline(always)]
fn is_alive(address: &wharf_common::EndpointKey, epoch: u32) -> bool {
    // SAFETY: the row outlives this run.
    epoch == 0 || unsafe { ENDPOINTS.get(address) }.is_some_and(|row| row.epoch as u32 == epoch)
}
