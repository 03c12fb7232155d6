//! How an endpoint's own programs begin, and nearly all that they do: what only they can, having the endpoint's maps.
//!
//! Packets that nearly all are like they judge themselves ([`shortcut`]). Those are recorded as what is nearly certain to be the verdict,
//! and go to the node's programs for their flow alone; any other verdict comes back to the endpoint's `deliver` ([`handoff::Verdict`]).
//!
//! All other packets go to the endpoint's `deliver`, from there to the program of the node's that judges them, and come back to `deliver`
//! with the verdict. `deliver` alone has the code for that, because the verifier walks each program of each endpoint.
//!
//! A packet whose headers are not judged is not recorded: counters must not go backward while somebody reads them. They do so for a
//! packet between endpoints whose flow takes the node's stack, which only the flow's row tells, and for one of a flow that policy denies.

use aya_ebpf::{bindings::TC_ACT_SHOT, programs::TcContext};
use wharf_common::{Direction, DropReason, drop_reason::metrics_index};

use crate::{
    config::{self, Config},
    flow::Peer,
    handoff::{self, FROM_STACK, Verdict, Words},
    metrics, profile, shortcut, test_packet, verdict,
};

/// What the container sends. Returns what the hook is to return.
#[inline(always)]
pub fn send(ctx: &TcContext) -> i32 {
    if let Some(config) = Config::load()
        && let Some(peer) = shortcut::sent(ctx, config)
    {
        return track(ctx, Direction::Egress, config, peer);
    }
    handoff::judge(ctx, Direction::Egress, 0)
}

/// What the node's stack sends to the container. Returns what the hook is to return.
#[inline(always)]
pub fn receive(ctx: &TcContext) -> i32 {
    if let Some(config) = Config::load()
        && shortcut::received(ctx, config)
    {
        return track(ctx, Direction::Ingress, config, Peer::STACK);
    }
    handoff::judge(ctx, Direction::Ingress, FROM_STACK)
}

/// Records the packet as forwarded, and continues with its flow.
#[inline(always)]
fn track(ctx: &TcContext, direction: Direction, config: Config, peer: Peer) -> i32 {
    let forwarded = peer.forwarded();
    let row = metrics_index(direction, forwarded);
    // A test packet that the stack sends is not among these.
    if matches!(direction, Direction::Egress) && test_packet::is_test(ctx) {
        test_packet::report(ctx, row);
    } else {
        metrics::count(row, ctx.len());
    }
    handoff::track(ctx, direction, config, peer);
    dropped(ctx, direction, DropReason::NoNodeProgram).after(forwarded).hand_over(ctx)
}

/// In `deliver`: what another endpoint sends to the container, or a packet at one of the endpoint's hooks that is not judged yet.
///
/// # Errors
/// A drop.
#[inline(always)]
pub fn deliver(ctx: &TcContext, words: Words) -> Result<i32, Verdict> {
    let (direction, program, flags) = words.judged_by();
    let dropped = |reason| Err(dropped(ctx, direction, reason));
    let Some(config) = Config::load() else { return dropped(DropReason::NoConfig) };
    if words.is_from_endpoint() && shortcut::delivered(ctx, config) {
        let row = metrics_index(Direction::Ingress, DropReason::ForwardedLocal);
        if test_packet::is_test(ctx) {
            verdict::record(ctx, row, ctx.len());
        } else {
            // Not by that function: the call alone would take 8 ns.
            metrics::count(row, ctx.len());
        }
        return Ok(handoff::redirect_peer(config.ifindex()));
    }
    if !config.live() {
        return dropped(DropReason::EndpointNotReady);
    }
    profile::publish(config);
    handoff::call(ctx, program, config::endpoint_id() | flags);
    dropped(DropReason::NoNodeProgram)
}

#[inline(always)]
fn dropped(ctx: &TcContext, direction: Direction, reason: DropReason) -> Verdict {
    Verdict::new(ctx, config::endpoint_id(), direction, reason, TC_ACT_SHOT)
}
