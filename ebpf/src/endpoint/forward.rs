//! Where a packet of the container's goes: to a local endpoint, or into the node's stack.
//!
//! Between two endpoints the node is a router: the TTL goes down by one, also so that no neighbour message of one
//! endpoint (valid only with a hop limit of 255) ever works on another. A packet whose last hop this would be goes into
//! the stack instead, which drops it and tells the sender (traceroute then shows the node), with the kernel's own rate
//! limit. One that arrives with nothing left should not exist and is dropped.
//!
//! A flow that began through the stack stays there, see [`stack_path`].
//!
//! An endpoint that sends to its own address through the link is delivered to like any other; its own stack, which would
//! never have sent such a packet, then judges it.

use aya_ebpf::programs::TcContext;
use wharf_common::{Direction, DropReason, EventKind};

use wharf_ebpf::{
    config::Config,
    maps::CALLS,
    parse::{Framed, Ipv4, Ipv6, Ipv6Address},
    stack_path,
    verdict::{self, Decision, Forward},
};

/// Forwards an IPv4 packet whose source is proven.
#[inline(always)]
pub fn ipv4(ctx: &TcContext, config: Config, packet: Framed<Ipv4>, bytes: u32) -> Decision {
    let Some(endpoint) = local(ctx, config, Ipv6Address::mapped(packet.destination())) else {
        return Ok(Forward::STACK);
    };
    match packet.ttl() {
        0 => Err(DropReason::TtlExceeded),
        1 => Ok(Forward::STACK),
        _ => {
            packet.decrement_ttl();
            deliver(ctx, config, endpoint, bytes)
        }
    }
}

/// Forwards an IPv6 packet whose source is proven.
#[inline(always)]
pub fn ipv6(ctx: &TcContext, config: Config, packet: Framed<Ipv6>, bytes: u32) -> Decision {
    let Some(endpoint) = local(ctx, config, packet.destination()) else {
        return Ok(Forward::STACK);
    };
    match packet.hop_limit() {
        0 => Err(DropReason::TtlExceeded),
        1 => Ok(Forward::STACK),
        _ => {
            packet.decrement_hop_limit();
            deliver(ctx, config, endpoint, bytes)
        }
    }
}

/// Id of the local endpoint that has this address, unless packets to it take the stack.
#[inline(always)]
fn local(ctx: &TcContext, config: Config, destination: Ipv6Address) -> Option<u32> {
    if config.local_by_stack() {
        return None;
    }
    let endpoint = stack_path::endpoint(destination)?.endpoint_id;
    if stack_path::may_be_taken(ctx, config) && stack_path::is_taken(ctx) { None } else { Some(endpoint) }
}

/// Gives the packet to the receiver's `deliver`. Comes back only when there is none; the packet is then a drop, and not
/// a forwarded one.
#[inline(always)]
fn deliver(ctx: &TcContext, config: Config, endpoint: u32, bytes: u32) -> Decision {
    let event = config.trace().then_some(EventKind::Trace);
    let counted = verdict::record(ctx, event, Direction::Egress, bytes, DropReason::ForwardedLocal);
    // SAFETY: everything this run holds is on its stack; the call does not come back when it succeeds.
    unsafe { CALLS.tail_call(ctx, endpoint) };
    counted.undo(bytes);
    Err(DropReason::NoTailCallTarget)
}
