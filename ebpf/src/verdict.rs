//! What a program decides about a packet, and the one place where a verdict is recorded.

use aya_ebpf::{
    bindings::{TC_ACT_OK, TC_ACT_SHOT},
    programs::TcContext,
};
use wharf_common::{Direction, DropReason, EventKind};

use crate::{
    config::Config,
    event,
    metrics::{self, Counted, NOT_COUNTED},
    test_packet,
};

/// A packet that goes on: why, and what the hook is to return.
#[derive(Clone, Copy)]
pub struct Forward {
    pub reason: DropReason,
    /// `TC_ACT_*`.
    pub action: i32,
}

impl Forward {
    /// On through the node's stack, or out of it.
    pub const STACK: Self = Self { reason: DropReason::ForwardedStack, action: TC_ACT_OK };
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
    let (event, reason, action) = match decision {
        Ok(forward) => (config.is_some_and(Config::trace).then_some(EventKind::Trace), forward.reason, forward.action),
        Err(reason) => (Some(EventKind::Drop), reason, TC_ACT_SHOT),
    };
    record(ctx, event, direction, bytes, reason);
    action
}

/// Counts the verdict and sends the event, if there is to be one; reports the verdict of a test packet, and no more.
/// All that a program writes to maps is written from here, so that a test packet leaves no trace in any.
#[inline(always)]
pub fn record(
    ctx: &TcContext,
    event: Option<EventKind>,
    direction: Direction,
    bytes: u32,
    reason: DropReason,
) -> Counted {
    if test_packet::is_test(ctx) {
        test_packet::report(ctx, direction, reason);
        return NOT_COUNTED;
    }
    let counted = metrics::count(direction, reason, bytes);
    if let Some(kind) = event {
        event::emit(ctx, kind, direction, reason);
    }
    event::debug(ctx, direction, reason);
    counted
}
