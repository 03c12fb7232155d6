//! Ingress hook (clsact or tcx) on the host side of the veth: what the container sends (the endpoint's egress).
//!
//! What leaves here is provably the endpoint's: its Ethernet source is the one MAC it was given, its IP source the one
//! address of that family. Link-local IPv6 sources pass only in neighbour messages, which go no further than the node's program `neighbour`.
//! An IPv6 destination that embeds an IPv4 address is refused here, in the sender's name: in `ENDPOINTS` it would find the
//! row of an IPv4 address.

use aya_ebpf::programs::TcContext;
use wharf_common::{Direction, DropReason};

use wharf_ebpf::{
    bandwidth,
    config::{self, Config},
    flow::Peer,
    neighbour::{self, MESSAGE_BYTES},
    parse::{self, EtherType, Framed, HEADERS_BYTES, Ipv4, Ipv6},
    verdict,
};

use crate::forward;

/// Runs the program.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    verdict::run(ctx, Direction::Egress, |config, bytes| decide(ctx, config, bytes))
}

#[inline(always)]
fn decide(ctx: &TcContext, config: Config, bytes: u32) -> Result<Peer, DropReason> {
    if !config.live() {
        return Err(DropReason::EndpointNotReady);
    }
    parse::gather(ctx, HEADERS_BYTES)?;
    let frame = parse::ethernet(ctx)?;
    if !frame.source_mac().equals(config::container_mac()) {
        return Err(DropReason::InvalidSourceMac);
    }
    match EtherType::of(ctx, frame)? {
        EtherType::Ipv4 => ipv4(ctx, config),
        EtherType::Ipv6 => ipv6(ctx, config, bytes),
        EtherType::Arp => Err(neighbour::judge(ctx, config, EtherType::Arp, bytes)),
    }
}

#[inline(always)]
fn ipv4(ctx: &TcContext, config: Config) -> Result<Peer, DropReason> {
    let packet: Framed<Ipv4> = parse::ipv4(ctx)?;
    if packet.destination_mac().is_group() || parse::is_group4(packet.destination()) {
        return Err(DropReason::Multicast);
    }
    if !config.owns4(packet.source()) {
        return Err(DropReason::InvalidSourceIp);
    }
    // A published port needs `route_localnet` on the host side, with which the node's stack would take such a packet.
    if parse::is_loopback4(packet.destination()) {
        return Err(DropReason::InvalidDestinationIp);
    }
    addressed_to_host(packet)?;
    bandwidth::charge(ctx, config, Direction::Egress)?;
    forward::ipv4(config, packet)
}

#[inline(always)]
fn ipv6(ctx: &TcContext, config: Config, bytes: u32) -> Result<Peer, DropReason> {
    // Before the multicast rule (solicitations are multicast) and the source rule (they come from link-local addresses).
    if parse::ipv6(ctx)?.is_icmp() {
        parse::gather(ctx, MESSAGE_BYTES)?;
        if neighbour::is_discovery(ctx)? {
            return Err(neighbour::judge(ctx, config, EtherType::Ipv6, bytes));
        }
    }
    let packet: Framed<Ipv6> = parse::ipv6(ctx)?;
    if packet.destination_mac().is_group() || packet.destination().is_multicast() {
        return Err(DropReason::Multicast);
    }
    if !config.owns6(packet.source()) {
        return Err(DropReason::InvalidSourceIp);
    }
    if packet.destination().is_host_internal() {
        return Err(DropReason::InvalidDestinationIp);
    }
    addressed_to_host(packet)?;
    bandwidth::charge(ctx, config, Direction::Egress)?;
    forward::ipv6(config, packet)
}

/// A frame to any other unicast MAC would be passed over by the stack it ends in, and be counted here as forwarded.
#[inline(always)]
fn addressed_to_host<T>(packet: Framed<T>) -> Result<(), DropReason> {
    if packet.destination_mac().equals(config::host_mac()) { Ok(()) } else { Err(DropReason::InvalidDestinationMac) }
}
