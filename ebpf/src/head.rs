//! Entry of the endpoint programs.
//!
//! - Ordinary packets are judged here ([`shortcut`]) and counted optimistically as forwarded. If the flow cache does
//!   not know their flow, they continue in the node program that finds it. A different verdict returns to `deliver`,
//!   which corrects the counters.
//! - Other packets go through `deliver` to the node program that judges them, and back. Only `deliver` has the code for
//!   that, because the verifier walks each program of each endpoint.
//!
//! Counters thus decrease only for a denied flow, and for a local packet whose flow takes the node's stack.

use aya_ebpf::{
    bindings::{TC_ACT_OK, TC_ACT_SHOT},
    programs::TcContext,
};
use wharf_common::{Direction, DropReason, drop_reason::metrics_index, map::NodeCall};

use crate::{
    config::{self, Config},
    handoff::{self, FROM_STACK, Verdict, Words},
    metrics, profile,
    shortcut::{self, Forwarded},
    test_packet, verdict,
};

#[inline(always)]
pub fn send(ctx: &TcContext) -> i32 {
    if let Some(config) = Config::load()
        && let Some(forwarded) = shortcut::sent(ctx, config)
    {
        return go_on(ctx, Direction::Egress, config, forwarded);
    }
    handoff::deliver_unjudged(ctx, Direction::Egress, 0)
}

#[inline(always)]
pub fn receive(ctx: &TcContext) -> i32 {
    if let Some(config) = Config::load()
        && let Some(forwarded) = shortcut::received(ctx, config)
    {
        return go_on(ctx, Direction::Ingress, config, forwarded);
    }
    handoff::deliver_unjudged(ctx, Direction::Ingress, FROM_STACK)
}

/// Counts the packet, then sends it on if the cache knows its flow, else finds the flow.
#[inline(always)]
fn go_on(ctx: &TcContext, direction: Direction, config: Config, forwarded: Forwarded) -> i32 {
    let Forwarded { peer, is_known, generation } = forwarded;
    let counted = peer.forwarded();
    let row = metrics_index(direction, counted);
    metrics::count(row, ctx.len());
    let absent = if is_known {
        if peer.endpoint_id == 0 {
            return TC_ACT_OK;
        }
        handoff::deliver(ctx, peer.endpoint_id);
        DropReason::NoTailCallTarget
    } else {
        handoff::call_established(ctx, direction, config, peer, generation);
        DropReason::NoNodeProgram
    };
    dropped(ctx, direction, absent).after(counted).hand_over(ctx)
}

/// Handles a packet from another endpoint, or an unjudged packet, in `deliver`. Error: a drop.
#[inline(always)]
pub fn deliver(ctx: &TcContext, words: Words) -> Result<i32, Verdict> {
    let (direction, flags) = words.to_judge();
    let dropped = |reason| Err(dropped(ctx, direction, reason));
    let Some(config) = Config::load() else { return dropped(DropReason::NoConfig) };
    if words.is_from_endpoint() && shortcut::delivered(ctx, config) {
        let row = metrics_index(Direction::Ingress, DropReason::ForwardedLocal);
        if test_packet::is_test(ctx) {
            verdict::record(ctx, row, ctx.len());
        } else {
            // Not `verdict::record`, which costs 8 ns.
            metrics::count(row, ctx.len());
        }
        return Ok(handoff::redirect_peer(config.ifindex()));
    }
    if !config.live() {
        return dropped(DropReason::EndpointNotReady);
    }
    profile::publish(config);
    handoff::call(ctx, NodeCall::Judge, config::endpoint_id() | flags);
    dropped(DropReason::NoNodeProgram)
}

#[inline(always)]
fn dropped(ctx: &TcContext, direction: Direction, reason: DropReason) -> Verdict {
    Verdict::new(ctx, config::endpoint_id(), direction, reason, TC_ACT_SHOT)
}
