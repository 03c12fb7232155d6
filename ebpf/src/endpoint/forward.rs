//! Where a packet of the container's goes: to a local endpoint, or into the node's stack.
//!
//! Between two endpoints the node is a router: the receiver's `deliver` takes one off the TTL, also so that no neighbour message
//! of one endpoint (valid only with a hop limit of 255) ever works on another. (This program writes to no packet: the kernel then
//! spares it a call that unshares the packet's head.) A packet whose last hop this would be goes into
//! the stack instead, which drops it and tells the sender (traceroute then shows the node), with the kernel's own rate
//! limit. One that arrives with nothing left should not exist and is dropped.
//!
//! A flow that began through the stack stays there, see [`stack_path`].
//!
//! An endpoint that sends to its own address through the link is delivered to like any other; its own stack, which would
//! never have sent such a packet, then judges it.

use aya_ebpf::programs::TcContext;
use wharf_common::DropReason;

use wharf_ebpf::{
    config::Config,
    parse::{Framed, Ipv4, Ipv6, Ipv6Address},
    stack_path,
    verdict::{Decision, Forward, Next},
};

/// Forwards an IPv4 packet whose source is proven.
#[inline(always)]
pub fn ipv4(ctx: &TcContext, config: Config, packet: Framed<Ipv4>, bytes: u32) -> Decision {
    let Some(endpoint) = local(config, Ipv6Address::mapped(packet.destination())) else {
        return Ok(Forward::STACK);
    };
    match packet.ttl() {
        0 => Err(DropReason::TtlExceeded),
        1 => Ok(Forward::STACK),
        _ => {
            stack_path::ask(ctx, config, endpoint, bytes);
            Ok(deliver(endpoint))
        }
    }
}

/// Forwards an IPv6 packet whose source is proven.
#[inline(always)]
pub fn ipv6(ctx: &TcContext, config: Config, packet: Framed<Ipv6>, bytes: u32) -> Decision {
    let Some(endpoint) = local(config, packet.destination()) else {
        return Ok(Forward::STACK);
    };
    match packet.hop_limit() {
        0 => Err(DropReason::TtlExceeded),
        1 => Ok(Forward::STACK),
        _ => {
            stack_path::ask(ctx, config, endpoint, bytes);
            Ok(deliver(endpoint))
        }
    }
}

/// Id of the local endpoint that has this address, unless all packets take the stack.
#[inline(always)]
fn local(config: Config, destination: Ipv6Address) -> Option<u32> {
    if config.local_by_stack() { None } else { Some(stack_path::endpoint(destination)?.endpoint_id) }
}

#[inline(always)]
const fn deliver(endpoint: u32) -> Forward {
    Forward { reason: DropReason::ForwardedLocal, next: Next::Deliver(endpoint) }
}
