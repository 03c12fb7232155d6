//! What a program decides about a packet, and the one place where a decision is counted and told.

use aya_ebpf::{
    bindings::{TC_ACT_OK, TC_ACT_SHOT},
    programs::TcContext,
};
use wharf_common::{Direction, DropReason, EventKind};

use crate::{config::Config, event, metrics};

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

/// Counts the decision, tells of it where it is to be told, and returns what the hook is to return. `bytes` is the
/// packet's length as it came in.
#[inline(always)]
pub fn conclude(ctx: &TcContext, config: Option<Config>, direction: Direction, bytes: u32, decision: Decision) -> i32 {
    match decision {
        Ok(forward) => {
            metrics::count(direction, forward.reason, bytes);
            if config.is_some_and(Config::trace) {
                event::emit(ctx, EventKind::Trace, direction, forward.reason);
            }
            event::debug(ctx, direction, forward.reason);
            forward.action
        }
        Err(reason) => {
            metrics::count(direction, reason, bytes);
            event::emit(ctx, EventKind::Drop, direction, reason);
            event::debug(ctx, direction, reason);
            TC_ACT_SHOT
        }
    }
}
