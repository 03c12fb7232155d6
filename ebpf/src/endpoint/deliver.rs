//! Tail-called at this endpoint's slot of `CALLS`, by the sender's `deliver`: what another local endpoint sends to the
//! container (this endpoint's ingress); and by a program of the node's, with its verdict about a packet at one of this endpoint's hooks.
//!
//! The sender decided who the packet is for; the receiver's own program, with the receiver's own maps, decides whether
//! it is let in. A slot or a row that a late sender still holds of an endpoint that is gone ends here, at the address.

use aya_ebpf::{
    bindings::{TC_ACT_REDIRECT, TC_ACT_SHOT},
    helpers::bpf_redirect_peer,
    programs::TcContext,
};
use wharf_common::{Direction, DropReason};

use wharf_ebpf::{
    config::Config,
    handoff::{Verdict, Words},
    metrics, test_packet,
    verdict::{self, Next},
};

use crate::receive::{self, Hop};

/// Runs the program.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    match Verdict::of(Words::of(ctx)) {
        Some(verdict) => conclude(ctx, verdict),
        None => accept(ctx),
    }
}

#[inline(always)]
fn accept(ctx: &TcContext) -> i32 {
    let bytes = ctx.len();
    let config = Config::load();
    let accepted = match config {
        Some(config) => receive::accept(ctx, config, Hop::IsHere).map(|_| redirect_peer(config.ifindex())),
        None => Err(DropReason::NoConfig),
    };
    match accepted {
        Ok(action) => {
            let (reason, next) = (DropReason::ForwardedLocal as u32, Next::Return(action));
            verdict::conclude(ctx, Direction::Ingress, bytes, reason, next, config)
        }
        Err(reason) => verdict::drop(ctx, Direction::Ingress, bytes, reason as u32),
    }
}

/// Records and carries out what a program of the node's decided.
#[inline(always)]
fn conclude(ctx: &TcContext, verdict: Verdict) -> i32 {
    let Verdict { receiver, bytes, direction, reason, action, counted, .. } = verdict;
    let config = Config::load();
    if let Some(counted) = counted
        && !test_packet::is_test(ctx)
    {
        metrics::take_back(direction, counted as u32, bytes);
    }
    let next = match (config, receiver) {
        _ if action == TC_ACT_SHOT as u32 => return verdict::drop(ctx, direction, bytes, reason),
        (Some(config), 0) if action == TC_ACT_REDIRECT as u32 => Next::Return(redirect_peer(config.ifindex())),
        (_, 0) => Next::Return(action as i32),
        _ => Next::Deliver(receiver),
    };
    verdict::conclude(ctx, direction, bytes, reason, next, config)
}

/// Hands the packet to the container's side of the veth whose host side is `ifindex`, as if it had just arrived there:
/// no queue, no second hook.
#[inline(always)]
fn redirect_peer(ifindex: u32) -> i32 {
    // SAFETY: a helper without pointers. It answers `TC_ACT_REDIRECT`, or `TC_ACT_SHOT` for flags it does not know.
    unsafe { bpf_redirect_peer(ifindex, 0) as i32 }
}
