//! Tells user space of a packet: a record on the `EVENTS` ring, within the endpoint's budget. The record is written by a
//! program of the node's, which few packets need.

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
/// `BPF_RB_AVAIL_DATA` of linux/bpf.h: bytes that the reader has not taken yet.
const UNREAD: u64 = 0;
/// `BPF_RB_RING_SIZE` of linux/bpf.h: bytes of the ring.
const SIZE: u64 = 1;

/// Sends an event about the packet, with direction and reason of this row of counters. The packet then goes on to the endpoint
/// `receiver`, or, when that is zero, the hook returns `action`. Returns what the hook is to return; `None` when there was no
/// event, which is counted, or the packet is a test packet.
#[inline(always)]
pub fn emit(ctx: &TcContext, kind: EventKind, row: u32, receiver: u32, action: i32) -> Option<i32> {
    let told = kind as u32 | row << 8 | (action as u32) << 16;
    // SAFETY: the context the program was called with.
    match unsafe { wharf_event(ctx.skb.skb, told, receiver) } {
        NOT_SENT => None,
        action => Some(action as i32),
    }
}

/// What [`wharf_event`] returns when there is no event; no `TC_ACT_*` has this number.
const NOT_SENT: u32 = u32::MAX;

/// [`emit`], with a [`Told`] as numbers.
///
/// Its name is exported and it takes but the context and numbers, so that the verifier takes it for a global function and
/// looks at it once, not again for every verdict that leads here; it looks up the configuration itself for the same reason.
/// A tail call in a function ends the function: its caller gets what the called program returns.
///
/// # Safety
///
/// `skb` is the context of the running program.
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
    // SAFETY: the helper takes the map itself and looks at its positions.
    let query = |what| unsafe { bpf_ringbuf_query((&raw const EVENTS).cast_mut().cast(), what) };
    let size = query(SIZE);
    // It counts as full with a sixteenth left: room for the record of each CPU that has looked and not yet written, so that no
    // record is lost without being counted.
    if query(UNREAD) + (size >> 4) <= size {
        let Some(config) = Config::load() else { return not_sent() };
        let words = handoff::with_epoch(config, receiver, [config.identity(), told]);
        handoff::call_event(ctx, words);
    }
    metrics::count(metrics::beside(row, DropReason::EventLost), 0);
    not_sent()
}

/// [`NOT_SENT`], read so that the compiler does not know it: it would take that for what every call returns.
#[inline(always)]
fn not_sent() -> u32 {
    let value = NOT_SENT;
    // SAFETY: a local.
    unsafe { ptr::read_volatile(&raw const value) }
}

/// What [`emit`] handed over.
pub struct Told {
    pub words: Words,
    /// [`EventKind`] as a number.
    pub kind: u32,
    /// [`Direction`] as a number.
    pub direction: u32,
    /// [`DropReason`] as a number.
    pub reason: u32,
    /// Endpoint that the packet goes to, or zero.
    pub receiver: u32,
    /// What the hook returns, without a receiver.
    pub action: i32,
}

impl Told {
    /// From the words of the packet.
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

/// Takes a place in this second's budget. The window is not exact to the packet: CPUs that meet at its end may each give
/// a place too many.
#[inline(always)]
fn within_budget(now: u64) -> bool {
    let Some(budget) = EVENT_BUDGET.get_ptr_mut(0) else { return false };
    // SAFETY: a map value from a lookup. It is shared by all CPUs: the words are read and written whole, and added to
    // atomically.
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

/// True when each packet of the endpoint is to be logged.
#[cfg(feature = "debug-log")]
#[inline(always)]
pub fn wants_log() -> bool {
    crate::config::debug()
}

/// Never, in an object built without log records.
#[cfg(not(feature = "debug-log"))]
#[inline(always)]
pub fn wants_log() -> bool {
    false
}

/// A log record of the verdict, for an endpoint that asks for them and in an object built with them.
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

/// Nothing, in an object built without log records.
#[cfg(not(feature = "debug-log"))]
#[inline(always)]
pub fn debug(_ctx: &TcContext, _row: u32) {}
