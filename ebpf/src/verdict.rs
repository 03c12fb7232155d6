//! What a program decides about a packet, and the one place where a verdict is recorded.

use aya_ebpf::{
    bindings::{__sk_buff, TC_ACT_OK, TC_ACT_SHOT},
    programs::TcContext,
};
use wharf_common::{Direction, DropReason, EventKind};

use crate::{config::Config, event, handoff, metrics, stack_path, test_packet};

/// A packet that goes on: why, and where to.
#[derive(Clone, Copy)]
pub struct Forward {
    pub reason: DropReason,
    pub next: Next,
}

/// What is left to do with a packet whose verdict is recorded.
#[derive(Clone, Copy)]
pub enum Next {
    /// The hook returns this `TC_ACT_*`.
    Return(i32),
    /// To the `deliver` of the endpoint with this id.
    Deliver(u32),
    /// Its path through the stack is noted, and it goes on.
    Note,
}

impl Forward {
    /// On through the node's stack, or out of it.
    pub const STACK: Self = Self { reason: DropReason::ForwardedStack, next: Next::Return(TC_ACT_OK) };
}

/// Forward, or drop for the reason.
pub type Decision = Result<Forward, DropReason>;

/// Runs a program: decides about the packet, records the decision, and returns what the hook is to return. `decide` gets
/// the endpoint's configuration and the packet's length as it came in, bytes.
#[inline(always)]
pub fn run(ctx: &TcContext, direction: Direction, decide: impl FnOnce(Config, u32) -> Decision) -> i32 {
    let bytes = ctx.len();
    let config = Config::load();
    let decision = match config {
        Some(config) => decide(config, bytes),
        None => Err(DropReason::NoConfig),
    };
    match decision {
        Ok(forward) => conclude(ctx, direction, bytes, forward.reason as u32, forward.next, config),
        Err(reason) => drop(ctx, direction, bytes, reason as u32),
    }
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
        Next::Note => {
            if let Some(config) = config {
                stack_path::note(ctx, config);
            }
            TC_ACT_OK
        }
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
