//! Records decisions, in the endpoint's `deliver`.

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

/// Counts a drop and sends its event.
#[inline(always)]
fn drop(ctx: &TcContext, row: u32, bytes: u32) -> i32 {
    // SAFETY: the context.
    unsafe { wharf_drop(ctx.skb.skb, row, bytes) as i32 }
}

/// A global function: verified once, not per reason.
///
/// # Safety
///
/// `skb`: the context.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_drop(skb: *mut __sk_buff, row: u32, bytes: u32) -> u32 {
    let ctx = &TcContext::new(skb);
    event::debug(ctx, row);
    // SAFETY: the caller's contract.
    unsafe { wharf_record(skb, row, bytes) };
    let _ = event::emit(ctx, EventKind::Drop, row, 0, TC_ACT_SHOT);
    TC_ACT_SHOT as u32
}

/// Counts the packet, or reports a test packet's verdict.
#[inline(always)]
pub fn record(ctx: &TcContext, row: u32, bytes: u32) {
    // SAFETY: the context.
    unsafe { wharf_record(ctx.skb.skb, row, bytes) };
}

/// [`record`] as a global function.
///
/// # Safety
///
/// `skb`: the context.
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

/// Subtracts a packet, except test packets.
///
/// # Safety
///
/// `skb`: the context.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_take_back(skb: *mut __sk_buff, row: u32, bytes: u32) -> u32 {
    if !test_packet::is_test(&TcContext::new(skb)) {
        metrics::take_back(row, bytes);
    }
    0
}

#[inline(always)]
fn correct(ctx: &TcContext, verdict: Verdict) {
    if let Some(counted) = verdict.counted() {
        // SAFETY: the context.
        unsafe { wharf_take_back(ctx.skb.skb, counted, verdict.bytes) };
    }
}

/// Records a drop; returns the hook's return value.
#[inline(always)]
pub fn refuse(ctx: &TcContext, verdict: Verdict) -> i32 {
    correct(ctx, verdict);
    drop(ctx, verdict.row(), verdict.bytes)
}

/// Applies a verdict: counts the packet, sends a due event, charges bandwidth last. Returns the hook's return value.
///
/// Except for [`crate::head`]'s counts, endpoint programs write to maps about a packet only here, in [`refuse`] and in
/// their callees: a test packet leaves no trace.
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
        // Its result equals `action`.
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
    // The receiver has no program.
    // SAFETY: the context.
    unsafe { wharf_take_back(ctx.skb.skb, row, bytes) };
    drop(ctx, metrics::beside(row, DropReason::NoTailCallTarget), bytes)
}
