//! The one place where what was decided about a packet is recorded, in the endpoint's `deliver`.

use aya_ebpf::{
    bindings::{__sk_buff, TC_ACT_SHOT},
    programs::TcContext,
};
use wharf_common::{DropReason, EventKind};

use crate::{
    bandwidth,
    config::Config,
    event,
    handoff::{self, Verdict},
    metrics, test_packet,
};

/// Records that the packet is dropped, for the reason of this row: counts it and sends the event; of a test packet it
/// reports the verdict, and no more. Returns what the hook is to return.
#[inline(always)]
fn drop(ctx: &TcContext, row: u32, bytes: u32) -> i32 {
    // SAFETY: the context the program was called with.
    unsafe { wharf_drop(ctx.skb.skb, row, bytes) as i32 }
}

/// [`drop`], once for all reasons.
///
/// Its name is exported and it takes but the context and numbers, so that the verifier takes it for a global function and
/// looks at it once, not again for every reason that leads here.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_drop(skb: *mut __sk_buff, row: u32, bytes: u32) -> u32 {
    let ctx = &TcContext::new(skb);
    event::debug(ctx, row);
    // SAFETY: the caller's word.
    unsafe { wharf_record(skb, row, bytes) };
    // Without an event the packet is dropped all the same.
    let _ = event::emit(ctx, EventKind::Drop, row, 0, TC_ACT_SHOT);
    TC_ACT_SHOT as u32
}

/// Counts the packet in this row, or reports it, of a test packet.
#[inline(always)]
pub fn record(ctx: &TcContext, row: u32, bytes: u32) {
    // SAFETY: the context the program was called with.
    unsafe { wharf_record(ctx.skb.skb, row, bytes) };
}

/// [`record`], once for all verdicts. A global function, as [`wharf_drop`].
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_record(skb: *mut __sk_buff, row: u32, bytes: u32) -> u32 {
    let ctx = &TcContext::new(skb);
    if test_packet::is_test(ctx) {
        test_packet::report(ctx, row);
    } else {
        metrics::count(row, bytes);
    }
    0
}

/// Takes back that the packet was counted in this row; a test packet was not. A global function, as [`wharf_drop`].
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_take_back(skb: *mut __sk_buff, row: u32, bytes: u32) -> u32 {
    if !test_packet::is_test(&TcContext::new(skb)) {
        metrics::take_back(row, bytes);
    }
    0
}

/// Takes back what the packet was counted as before.
#[inline(always)]
fn correct(ctx: &TcContext, verdict: Verdict) {
    if let Some(counted) = verdict.counted() {
        // SAFETY: the context the program was called with.
        unsafe { wharf_take_back(ctx.skb.skb, counted, verdict.bytes) };
    }
}

/// Records a verdict that is a drop. Returns what the hook is to return.
#[inline(always)]
pub fn refuse(ctx: &TcContext, verdict: Verdict) -> i32 {
    correct(ctx, verdict);
    drop(ctx, verdict.row(), verdict.bytes)
}

/// Records a verdict and carries it out: counts the packet, and sends the event if there is to be one; of a test packet it reports the
/// verdict, and no more. All that a program of the endpoint's writes to maps about a packet is written from here, from [`refuse`] or
/// behind them, or is a count of [`crate::head`], so that a test packet leaves no trace in any. Returns what the hook is to
/// return.
///
/// What is forwarded is charged to the limit of its direction here, after all else is decided: what is dropped for another
/// reason is not, nor are neighbour messages.
#[inline(always)]
pub fn conclude(ctx: &TcContext, verdict: Verdict) -> i32 {
    let (row, bytes, action, receiver) = (verdict.row(), verdict.bytes, verdict.action(), verdict.receiver());
    if action == TC_ACT_SHOT {
        return refuse(ctx, verdict);
    }
    correct(ctx, verdict);
    let Some(config) = Config::load() else { return drop(ctx, metrics::beside(row, DropReason::NoConfig), bytes) };
    if bandwidth::exceeds(ctx, config, row) {
        return drop(ctx, metrics::beside(row, DropReason::BandwidthExceeded), bytes);
    }
    event::debug(ctx, row);
    record(ctx, row, bytes);
    if verdict.is_for_container() {
        // What it answers is that same action.
        handoff::redirect_peer(config.ifindex());
    }
    if config.trace()
        && let Some(action) = event::emit(ctx, EventKind::Trace, row, receiver, action)
    {
        return action;
    }
    if receiver == 0 {
        return action;
    }
    handoff::deliver(ctx, receiver);
    // There is none: the packet is a drop, and not a forwarded one.
    // SAFETY: the context the program was called with.
    unsafe { wharf_take_back(ctx.skb.skb, row, bytes) };
    drop(ctx, metrics::beside(row, DropReason::NoTailCallTarget), bytes)
}
