//! Packets that endpoint programs judge, to save two or three tail calls: whole, well-formed IP packets without IPv4
//! options, from or to the endpoint's address. Others go to the node program `judge`; nothing is refused here.
//!
//! Differing bits are gathered in one number and compared once: the verifier follows both ways of each branch, for each
//! endpoint.

use core::hint::black_box;

use aya_ebpf::programs::TcContext;
use wharf_common::map::{
    FLAG_CHAINED, FLAG_LIMIT_EGRESS, FLAG_LIMIT_INGRESS, FLAG_LIVE, FLAG_LOCAL_BY_STACK, FLAG_TRACE,
};

use crate::{
    config::{self, Config},
    endpoints::endpoint,
    event,
    flow::Peer,
    parse::{self, Framed, ICMPV6, Ipv4, Ipv6, Ipv6Address, TCP, UDP},
    test_packet,
};

/// Network byte order.
const IPV4: u32 = parse::PROTOCOL_IPV4;
const IPV6: u32 = parse::PROTOCOL_IPV6;

/// Destination of a packet that is certainly forwarded.
#[inline(always)]
pub fn sent(ctx: &TcContext, config: Config) -> Option<Peer> {
    if !applies(ctx, config, FLAG_CHAINED | FLAG_LOCAL_BY_STACK | FLAG_TRACE | FLAG_LIMIT_EGRESS) {
        return None;
    }
    let packet: Framed<Ipv4> = Framed::at_start(ctx)?;
    let ethernet = ethernet_difference(packet, from_container());
    let (different, own, destination, hops) = match packet.ethertype() {
        IPV4 => {
            let (source, own, destination) = (packet.source(), config.ipv4(), packet.destination());
            if parse::is_group4(destination) || parse::is_loopback4(destination) {
                return None;
            }
            let different = u64::from(shape4(ctx, packet)? | (source ^ own));
            (different, u64::from(own), Ipv6Address::mapped(destination), packet.ttl())
        }
        IPV6 => {
            let packet: Framed<Ipv6> = Framed::at_start(ctx)?;
            let (own, destination) = (config.ipv6(), packet.destination());
            // Neighbour messages are ICMPv6.
            if !matches!(packet.next_header(), TCP | UDP)
                || destination.is_multicast()
                || destination.is_host_internal()
            {
                return None;
            }
            let different = u64::from(shape6(ctx, packet)?) | packet.source().difference(own);
            (different, own.bits(), destination, packet.hop_limit())
        }
        _ => return None,
    };
    if black_box(u64::from(ethernet) | different) != 0 || own == 0 || hops <= 1 {
        return None;
    }
    Some(match endpoint(destination) {
        Some(peer) => Peer { endpoint_id: peer.direct, epoch: peer.epoch as u32 },
        None => Peer::STACK,
    })
}

/// True for a packet from the stack that is certainly for this container. Its Ethernet destination is set later.
#[inline(always)]
pub fn received(ctx: &TcContext, config: Config) -> bool {
    try_receive(ctx, config).is_some()
}

#[inline(always)]
fn try_receive(ctx: &TcContext, config: Config) -> Option<()> {
    // Word 0 of `cb`, here the MAC, would be a test packet's verdict.
    if test_packet::is_test(ctx) || !applies(ctx, config, FLAG_CHAINED | FLAG_TRACE | FLAG_LIMIT_INGRESS) {
        return None;
    }
    let packet: Framed<Ipv4> = Framed::at_start(ctx)?;
    let (different, own) = match packet.ethertype() {
        IPV4 => for_container4(ctx, config, packet)?,
        IPV6 => {
            let packet: Framed<Ipv6> = Framed::at_start(ctx)?;
            // Other headers can precede a fragment's.
            if !matches!(packet.next_header(), TCP | UDP | ICMPV6) {
                return None;
            }
            for_container6(ctx, config, packet)?
        }
        _ => return None,
    };
    let ([_, _, first, last], [_, _, host_first, host_last]) = (packet.words(), to_container());
    let different = different | u64::from((first ^ host_first) | (last ^ host_last));
    (black_box(different) == 0 && own != 0).then_some(())
}

/// True if a packet from another endpoint enters: sets its Ethernet addresses and decrements its TTL.
#[inline(always)]
pub fn delivered(ctx: &TcContext, config: Config) -> bool {
    try_deliver(ctx, config).is_some()
}

#[inline(always)]
fn try_deliver(ctx: &TcContext, config: Config) -> Option<()> {
    if !applies(ctx, config, FLAG_CHAINED | FLAG_TRACE | FLAG_LIMIT_INGRESS) {
        return None;
    }
    let packet: Framed<Ipv4> = Framed::at_start(ctx)?;
    match packet.ethertype() {
        IPV4 => {
            let (different, own) = for_container4(ctx, config, packet)?;
            if black_box(different) != 0 || own == 0 {
                return None;
            }
            packet.decrement_ttl();
        }
        IPV6 => {
            let packet: Framed<Ipv6> = Framed::at_start(ctx)?;
            let (different, own) = for_container6(ctx, config, packet)?;
            if black_box(different) != 0 || own == 0 {
                return None;
            }
            packet.decrement_hop_limit();
        }
        _ => return None,
    }
    packet.set_words(to_container());
    Some(())
}

/// Bits that differ from a packet for this container, and its address (zero for none).
#[inline(always)]
fn for_container4(ctx: &TcContext, config: Config, packet: Framed<Ipv4>) -> Option<(u64, u64)> {
    let own = config.ipv4();
    Some((u64::from(shape4(ctx, packet)? | (packet.destination() ^ own)), own.into()))
}

#[inline(always)]
fn for_container6(ctx: &TcContext, config: Config, packet: Framed<Ipv6>) -> Option<(u64, u64)> {
    let own = config.ipv6();
    Some((u64::from(shape6(ctx, packet)?) | packet.destination().difference(own), own.bits()))
}

/// An untagged frame of a live endpoint without flags `but`.
#[inline(always)]
fn applies(ctx: &TcContext, config: Config, but: u32) -> bool {
    // SAFETY: the context.
    let tagged = unsafe { (*ctx.skb.skb).vlan_present };
    let flags = config.flags() & (but | FLAG_LIVE) ^ FLAG_LIVE;
    black_box(flags | tagged) == 0 && !event::wants_log()
}

/// To the gateway, as [`Framed::words`].
#[inline(always)]
fn from_container() -> [u32; 4] {
    let [container, both, host] = [0, 1, 2].map(config::macs);
    [both >> 16, host, container, both & 0xffff]
}

/// From the gateway, as [`Framed::words`].
#[inline(always)]
fn to_container() -> [u32; 4] {
    let [container, both, host] = [0, 1, 2].map(config::macs);
    [container & 0xffff, container >> 16 | both << 16, both >> 16 | host << 16, host >> 16]
}

#[inline(always)]
fn ethernet_difference<T>(packet: Framed<T>, addresses: [u32; 4]) -> u32 {
    let is = packet.words();
    (is[0] ^ addresses[0]) | (is[1] ^ addresses[1]) | (is[2] ^ addresses[2]) | (is[3] ^ addresses[3])
}

/// Zero for a whole packet without options; `None` for an invalid length.
#[inline(always)]
fn shape4(ctx: &TcContext, packet: Framed<Ipv4>) -> Option<u32> {
    let (total, least) = (u32::from(packet.total_bytes()), size_of::<Ipv4>() as u32);
    let room = ctx.len() - parse::ETHERNET_BYTES as u32;
    (total.wrapping_sub(least) <= room.wrapping_sub(least)).then(|| packet.oddities())
}

/// Zero for version 6; `None` for an invalid length.
#[inline(always)]
fn shape6(ctx: &TcContext, packet: Framed<Ipv6>) -> Option<u32> {
    let room = ctx.len() - parse::HEADERS_BYTES as u32;
    (u32::from(packet.payload_bytes()) <= room).then(|| packet.oddities())
}
