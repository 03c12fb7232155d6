//! How an endpoint's own programs begin, and nearly all that they do: what only they can, having the endpoint's maps. They ask whether
//! the endpoint is live, record what is nearly certain to be the verdict, and call a program of the node's, which decides.
//!
//! Any other verdict, and every verdict of an endpoint that is watched or limited, comes back to the endpoint's `deliver`
//! ([`handoff::Verdict`]). What a container sends is never recorded before: whether it is forwarded, and where to, is only known when
//! its headers are, and counters must not go backward while somebody reads them.

use aya_ebpf::{bindings::TC_ACT_SHOT, programs::TcContext};
use wharf_common::{Direction, DropReason, drop_reason::metrics_index, map::NodeCall};

use crate::{
    config::{self, Config},
    handoff::{self, FROM_STACK, RECORDED, Verdict},
    metrics, profile, test_packet,
};

/// What the container sends. Comes back only with a drop.
#[inline(always)]
pub fn send(ctx: &TcContext) -> Verdict {
    let refused = match Config::load() {
        None => DropReason::NoConfig,
        Some(config) if !config.live() => DropReason::EndpointNotReady,
        Some(config) => {
            profile::publish(config);
            handoff::call(ctx, NodeCall::Egress, config::endpoint_id());
            DropReason::NoNodeProgram
        }
    };
    dropped(ctx, Direction::Egress, refused)
}

/// What reaches the container. If it is `certain` to be forwarded, or nearly, it is counted as such: as `expected`,
/// [`DropReason::ForwardedLocal`] from another endpoint, [`DropReason::ForwardedStack`] from the node's stack. Comes back only with a drop.
#[inline(always)]
pub fn receive(ctx: &TcContext, expected: DropReason, certain: impl FnOnce() -> bool) -> Verdict {
    let refused = match Config::load() {
        None => DropReason::NoConfig,
        Some(config) if !config.live() => DropReason::EndpointNotReady,
        Some(config) => {
            profile::publish(config);
            let from = if expected as u32 == DropReason::ForwardedStack as u32 { FROM_STACK } else { 0 };
            let ids = config::endpoint_id() | from;
            if config.is_watched_or_limited() || test_packet::is_test(ctx) || !certain() {
                handoff::call(ctx, NodeCall::Ingress, ids);
                DropReason::NoNodeProgram
            } else {
                metrics::count(metrics_index(Direction::Ingress, expected), ctx.len());
                handoff::call(ctx, NodeCall::Ingress, ids | RECORDED);
                return dropped(ctx, Direction::Ingress, DropReason::NoNodeProgram).after(expected);
            }
        }
    };
    dropped(ctx, Direction::Ingress, refused)
}

#[inline(always)]
fn dropped(ctx: &TcContext, direction: Direction, reason: DropReason) -> Verdict {
    Verdict::new(ctx, config::endpoint_id(), direction, reason, TC_ACT_SHOT)
}
