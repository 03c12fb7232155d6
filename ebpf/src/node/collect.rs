//! Removes rows of `FLOWS` whose flow is over or has lost an endpoint, and counts the rows of each endpoint. User space runs it
//! every few seconds; packets go on meanwhile.
//!
//! The kernel walks the table and calls [`row`] with each row's own memory, so that what decides is the row as it is at that moment,
//! not a copy of it. It is a raw tracepoint's program, attached to none: a test run of a classifier would keep this CPU's packets
//! waiting for as long as it lasts (Linux 6.10).

use core::{ffi::c_void, ptr};

use aya_ebpf::helpers::{bpf_for_each_map_elem, bpf_ktime_get_ns, bpf_map_delete_elem};
use wharf_common::{FlowKey, FlowRow, FlowTotals, FlowUse, flow::TICK_SHIFT};
use wharf_ebpf::{
    atomic,
    maps::{ENDPOINTS, FLOW_TOTALS, FLOW_USE, FLOWS},
};

/// Ticks without a packet after which the endpoints of a flow are looked up. One that is gone sends nothing.
const LOOKED_AT: u32 = 8;

/// Runs the program.
#[inline(always)]
pub fn run() {
    let Some(totals) = FLOW_TOTALS.get_ptr_mut(0) else { return };
    let uses = (&raw const FLOW_USE).cast_mut().cast();
    let flows = (&raw const FLOWS).cast_mut().cast();
    // The coarse clock, by which packets are dated, is not for programs of this kind; it is behind this one by a timer tick at most.
    // SAFETY: a helper without arguments.
    let now = (unsafe { bpf_ktime_get_ns() } >> TICK_SHIFT) as u32;
    let mut sweep = Sweep { now, rows: 0, expired: 0, orphaned: 0 };
    let sweep_ptr = (&raw mut sweep).cast();
    // SAFETY: the maps are of the kinds that the functions below expect, and the context is theirs.
    unsafe {
        bpf_for_each_map_elem(uses, begin as *mut c_void, sweep_ptr, 0);
        bpf_for_each_map_elem(flows, row as *mut c_void, sweep_ptr, 0);
        bpf_for_each_map_elem(uses, end as *mut c_void, sweep_ptr, 0);
    }
    // One collection runs at a time, and nobody else writes these.
    // SAFETY: a map value.
    unsafe {
        let Sweep { rows, expired, orphaned, .. } = ptr::read_volatile(&raw const sweep);
        let FlowTotals { expired: all_expired, orphaned: all_orphaned, .. } = *totals;
        (*totals).rows = rows;
        (*totals).expired = all_expired + expired;
        (*totals).orphaned = all_orphaned + orphaned;
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

unsafe extern "C" fn begin(_map: *mut c_void, _id: *const u32, used: *mut FlowUse, _: *mut Sweep) -> i64 {
    // SAFETY: a map value that the kernel walks over.
    unsafe { (*used).counted = 0 };
    0
}

unsafe extern "C" fn row(map: *mut c_void, key: *mut FlowKey, row: *mut FlowRow, sweep: *mut Sweep) -> i64 {
    // SAFETY: key and value of the map that the kernel walks over, and the context that `run` gave.
    unsafe {
        let protocol = (*key).protocol;
        let (over, idle) = ((*row).is_over(protocol, (*sweep).now), (*row).idle((*sweep).now));
        if over {
            (*sweep).expired += 1;
        } else if idle > LOOKED_AT
            && !(is_alive(&(*key).low, (*row).low_epoch) && is_alive(&(*key).high, (*row).high_epoch))
        {
            (*sweep).orphaned += 1;
        } else {
            (*sweep).rows += 1;
            if let Some(used) = FLOW_USE.get_ptr_mut(u32::from((*row).owner)) {
                atomic::increment(&raw mut (*used).counted);
            }
            return 0;
        }
        bpf_map_delete_elem(map, key.cast());
    }
    0
}

unsafe extern "C" fn end(_map: *mut c_void, _id: *const u32, used: *mut FlowUse, _: *mut Sweep) -> i64 {
    // A row that was added behind the walk is missing in the count until the next one.
    // SAFETY: a map value that the kernel walks over.
    unsafe { (*used).rows = (*used).counted };
    0
}

/// True when the endpoint is still there, or the end was none.
#[inline(always)]
fn is_alive(address: &wharf_common::EndpointKey, epoch: u32) -> bool {
    // SAFETY: the row outlives this run; user space replaces rows whole.
    epoch == 0 || unsafe { ENDPOINTS.get(address) }.is_some_and(|row| row.epoch as u32 == epoch)
}
