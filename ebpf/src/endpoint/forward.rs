//! Where a packet of the container's goes: to a local endpoint, or into the node's stack.
//!
//! Between two endpoints the node is a router: the receiver's `deliver` takes one off the TTL, also so that no neighbour message
//! of one endpoint (valid only with a hop limit of 255) ever works on another. (This program writes to no packet: the kernel then
//! spares it a call that unshares the packet's head.) A packet whose last hop this would be goes into
//! the stack instead, which drops it and tells the sender (traceroute then shows the node), with the kernel's own rate
//! limit. One that arrives with nothing left should not exist and is dropped.
//!
//! A flow that began through the stack stays there: the node's program `flow` decides.
//!
//! An endpoint that sends to its own address through the link is delivered to like any other; its own stack, which would
//! never have sent such a packet, then judges it.

use wharf_common::DropReason;

use wharf_ebpf::{
    config::Config,
    endpoints::{endpoint, uses_stack},
    flow::Peer,
    parse::{Framed, Ipv4, Ipv6, Ipv6Address},
};

/// Where an IPv4 packet goes whose source is proven.
#[inline(always)]
pub fn ipv4(config: Config, packet: Framed<Ipv4>) -> Result<Peer, DropReason> {
    to(config, Ipv6Address::mapped(packet.destination()), packet.ttl(), packet.is_whole())
}

/// Where an IPv6 packet goes whose source is proven.
#[inline(always)]
pub fn ipv6(config: Config, packet: Framed<Ipv6>) -> Result<Peer, DropReason> {
    to(config, packet.destination(), packet.hop_limit(), packet.is_whole())
}

/// `hops`: those left.
#[inline(always)]
fn to(config: Config, destination: Ipv6Address, hops: u8, whole: u32) -> Result<Peer, DropReason> {
    if config.local_by_stack() {
        return Ok(Peer::stack(whole));
    }
    let Some(peer) = endpoint(destination) else { return Ok(Peer::stack(whole)) };
    match hops {
        0 => Err(DropReason::TtlExceeded),
        1 => Ok(Peer::stack(whole)),
        _ => {
            let certain = whole & (1 ^ uses_stack(config));
            Ok(Peer { endpoint_id: peer.endpoint_id, epoch: peer.epoch as u32, certain })
        }
    }
}
