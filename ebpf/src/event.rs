//! Reports a packet through the `EVENTS` ring, within the endpoint's budget.

use core::ptr;

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::{bpf_ktime_get_ns, bpf_ringbuf_query},
    programs::TcContext,
};
use wharf_common::{DropReason, EventKind, drop_reason::REASONS, map::EVENTS_PER_SECOND};

use crate::{
    atomic,
    config::Config,
    handoff::{self, Words},
    maps::{EVENT_BUDGET, EVENTS},
    metrics, test_packet,
};

const WINDOW_NS: u64 = 1_000_000_000;
/// `BPF_RB_AVAIL_DATA` of linux/bpf.h.
const UNREAD: u64 = 0;
/// `BPF_RB_RING_SIZE` of linux/bpf.h, bytes.
const SIZE: u64 = 1;

/// Sends an event with this counter row's direction and reason; then the packet goes to endpoint `receiver`, or if zero
/// the hook returns `action`. Returns the hook's return value; `None` if no event is sent.
#[inline(always)]
pub fn emit(ctx: &TcContext, kind: EventKind, row: u32, receiver: u32, action: i32) -> Option<i32> {
    let told = kind as u32 | row << 8 | (action as u32) << 16;
    // SAFETY: the context.
    match unsafe { wharf_event(ctx.skb.skb, told, receiver) } {
        NOT_SENT => None,
        action => Some(action as i32),
    }
}

/// Not a `TC_ACT_*`.
const NOT_SENT: u32 = u32::MAX;

/// A tail call ends it, with the called program's result.
///
/// # Safety
///
/// `skb`: the context.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_event(skb: *mut __sk_buff, told: u32, receiver: u32) -> u32 {
    let ctx = &TcContext::new(skb);
    if test_packet::is_test(ctx) {
        return not_sent();
    }
    let row = told >> 8 & 0xff;
    // SAFETY: a helper without arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    if !within_budget(now) {
        metrics::count(metrics::beside(row, DropReason::EventSuppressed), 0);
        return not_sent();
    }
    // SAFETY: the helper takes the map and reads its positions.
    let query = |what| unsafe { bpf_ringbuf_query((&raw const EVENTS).cast_mut().cast(), what) };
    let size = query(SIZE);
    // The last sixteenth is for racing CPUs, a record each.
    if query(UNREAD) + (size >> 4) <= size {
        let Some(config) = Config::load() else { return not_sent() };
        let words = handoff::with_epoch(config, receiver, [config.identity(), told]);
        handoff::call_event(ctx, words);
    }
    metrics::count(metrics::beside(row, DropReason::EventLost), 0);
    not_sent()
}

/// Volatile: a known value becomes the result of every call.
#[inline(always)]
fn not_sent() -> u32 {
    let value = NOT_SENT;
    // SAFETY: a local.
    unsafe { ptr::read_volatile(&raw const value) }
}

/// [`emit`]'s arguments for the node program.
pub struct Told {
    pub words: Words,
    pub kind: u32,
    pub direction: u32,
    pub reason: u32,
    /// Endpoint, or zero.
    pub receiver: u32,
    /// The hook's result without a receiver.
    pub action: i32,
}

impl Told {
    #[inline(always)]
    pub fn of(words: Words) -> Self {
        let last = words.0[4];
        let row = last >> 8 & 0xff;
        Self {
            words,
            kind: last & 0xff,
            direction: row / REASONS,
            reason: row % REASONS,
            receiver: words.receiver(),
            action: (last >> 16 & 0xff) as i32,
        }
    }
}

/// Takes one event of this second's budget.
#[inline(always)]
fn within_budget(now: u64) -> bool {
    let Some(budget) = EVENT_BUDGET.get_ptr_mut(0) else { return false };
    // SAFETY: a map value: words are accessed whole, or atomically.
    unsafe {
        if now.wrapping_sub(ptr::read_volatile(&raw const (*budget).window_ns)) >= WINDOW_NS {
            ptr::write_volatile(&raw mut (*budget).window_ns, now);
            ptr::write_volatile(&raw mut (*budget).used, 0);
        }
        if ptr::read_volatile(&raw const (*budget).used) >= EVENTS_PER_SECOND as u64 {
            return false;
        }
        atomic::increment(&raw mut (*budget).used);
    }
    true
}

#[cfg(feature = "debug-log")]
#[inline(always)]
pub fn wants_log() -> bool {
    crate::config::debug()
}

#[cfg(not(feature = "debug-log"))]
#[inline(always)]
pub fn wants_log() -> bool {
    false
}

#[cfg(feature = "debug-log")]
#[inline(always)]
pub fn debug(ctx: &TcContext, row: u32) {
    if wants_log() {
        aya_log_ebpf::debug!(
            ctx,
            "endpoint {} direction {} reason {} bytes {}",
            crate::config::endpoint_id(),
            row / REASONS,
            row % REASONS,
            ctx.len()
        );
    }
}

#[cfg(not(feature = "debug-log"))]
#[inline(always)]
pub fn debug(_ctx: &TcContext, _row: u32) {}
