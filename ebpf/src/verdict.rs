//! What a program decides about a packet, and the one place where a verdict is recorded.

use aya_ebpf::{
    bindings::{__sk_buff, TC_ACT_SHOT},
    programs::TcContext,
};
use wharf_common::{Direction, DropReason, EventKind};

use crate::{
    config::Config,
    event,
    flow::{self, Peer},
    handoff, metrics, test_packet,
};

/// What is left to do with a packet whose verdict is recorded.
#[derive(Clone, Copy)]
pub enum Next {
    /// The hook returns this `TC_ACT_*`.
    Return(i32),
    /// To the `deliver` of the endpoint with this id.
    Deliver(u32),
}

/// Runs a program of a hook: decides whether the packet may go on to the `Peer`, and leaves the rest to the node's program `flow`. The
/// packet is recorded as what is expected; `deliver` records any other verdict, and all of them where an endpoint is watched. `decide`
/// gets the endpoint's configuration and the packet's length as it came in,
/// bytes. Returns what the hook is to return.
#[inline(always)]
pub fn run(ctx: &TcContext, direction: Direction, decide: impl FnOnce(Config, u32) -> Result<Peer, DropReason>) -> i32 {
    let bytes = ctx.len();
    let reason = match Config::load() {
        Some(config) => match decide(config, bytes) {
            Ok(peer) => {
                let expected = peer.expected() as u32;
                let (unwatched, test) = (1 ^ event::is_watched(config), test_packet::bit(ctx));
                if test != 0 {
                    test_packet::report(ctx, direction, expected);
                }
                // Numbers and not branches: the verifier follows both ways of each.
                let recorded = unwatched & (peer.certain | test);
                let counted = recorded & (1 ^ test);
                metrics::add(direction, expected, counted, counted * bytes);
                flow::hand_over(ctx, config, direction, peer, recorded);
                metrics::take(direction, expected, counted, counted * bytes);
                DropReason::NoNodeProgram
            }
            Err(reason) => reason,
        },
        None => DropReason::NoConfig,
    };
    drop(ctx, direction, bytes, reason as u32)
}

/// Records that the packet is dropped, for a [`DropReason`] as a number: counts it and sends the event; of a test packet it
/// reports the verdict, and no more. Returns what the hook is to return.
#[inline(always)]
pub fn drop(ctx: &TcContext, direction: Direction, bytes: u32, reason: u32) -> i32 {
    // SAFETY: the context the program was called with.
    unsafe { wharf_drop(ctx.skb.skb, direction as u32, bytes, reason) as i32 }
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
pub unsafe extern "C" fn wharf_drop(skb: *mut __sk_buff, direction: u32, bytes: u32, reason: u32) -> u32 {
    let ctx = &TcContext::new(skb);
    let direction = if direction == Direction::Ingress as u32 { Direction::Ingress } else { Direction::Egress };
    event::debug(ctx, direction, reason);
    if test_packet::is_test(ctx) {
        test_packet::report(ctx, direction, reason);
    } else {
        metrics::count(direction, reason, bytes);
        // Without an event the packet is dropped all the same.
        let _ = event::emit(ctx, EventKind::Drop, direction, reason, Next::Return(TC_ACT_SHOT));
    }
    TC_ACT_SHOT as u32
}

/// Records that the packet goes on, and lets it go on: counts it, and sends the event if there is to be one; of a test packet
/// it reports the verdict, and no more. All that a program writes to maps is written from here, from [`drop`] or behind them,
/// so that a test packet leaves no trace in any.
///
/// `reason` is a [`DropReason`] as a number.
#[inline(always)]
pub fn conclude(
    ctx: &TcContext,
    direction: Direction,
    bytes: u32,
    reason: u32,
    next: Next,
    config: Option<Config>,
) -> i32 {
    event::debug(ctx, direction, reason);
    let is_test = test_packet::is_test(ctx);
    if is_test {
        test_packet::report(ctx, direction, reason);
    } else {
        metrics::count(direction, reason, bytes);
        if config.is_some_and(Config::trace)
            && let Some(action) = event::emit(ctx, EventKind::Trace, direction, reason, next)
        {
            return action;
        }
    }
    match next {
        Next::Return(action) => action,
        Next::Deliver(receiver) => {
            handoff::deliver(ctx, receiver);
            // There is none: the packet is a drop, and not a forwarded one.
            if !is_test {
                metrics::take_back(direction, reason, bytes);
            }
            drop(ctx, direction, bytes, DropReason::NoTailCallTarget as u32)
        }
    }
}
