//! Packets that endpoint programs judge, to save two or three tail calls: whole, well-formed IP packets without IPv4
//! options, from or to the endpoint's address. Others go to the node program `judge`; nothing is refused here.
//!
//! Differing bits are gathered in one number and compared once: the verifier follows both ways of each branch, for each
//! endpoint.

use aya_ebpf::programs::TcContext;
use wharf_common::{
    Direction,
    map::{FLAG_CHAINED, FLAG_LIMIT_EGRESS, FLAG_LIMIT_INGRESS, FLAG_LIVE, FLAG_LOCAL_BY_STACK, FLAG_TRACE},
};

use crate::{
    cache::{self, Flow, Transport},
    config::{self, Config},
    endpoints::endpoint,
    event,
    flow::Peer,
    opaque::opaque,
    parse::{self, Framed, ICMPV6, Ipv4, Ipv6, Ipv6Address, TCP, UDP},
    test_packet,
};

/// Network byte order.
const IPV4: u32 = parse::PROTOCOL_IPV4;
const IPV6: u32 = parse::PROTOCOL_IPV6;

/// A packet that is certainly forwarded, as far as its flow allows it.
pub struct Forwarded {
    pub peer: Peer,
    /// The flow cache allows it.
    pub is_known: bool,
    /// [`cache::generation_of`].
    pub generation: u32,
}

#[inline(always)]
pub fn sent(ctx: &TcContext, config: Config) -> Option<Forwarded> {
    const BUT: u32 = FLAG_CHAINED | FLAG_LOCAL_BY_STACK | FLAG_TRACE | FLAG_LIMIT_EGRESS;
    if test_packet::is_test(ctx) || !applies(ctx, config, BUT) {
        return None;
    }
    let packet: Framed<Ipv4> = Framed::at_start(ctx)?;
    let ethernet = ethernet_difference(packet, from_container());
    let (different, own_bits, own, destination, hops, transport) = match packet.ethertype() {
        IPV4 => {
            let (source, own, destination) = (packet.source(), config.ipv4(), packet.destination());
            if parse::is_group4(destination) || parse::is_loopback4(destination) {
                return None;
            }
            let different = u64::from(shape4(ctx, packet)? | (source ^ own));
            let (own_bits, own) = (u64::from(own), Ipv6Address::mapped(own));
            (
                different,
                own_bits,
                own,
                Ipv6Address::mapped(destination),
                packet.ttl(),
                (packet.protocol(), packet.payload_bytes()),
            )
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
            (
                different,
                own.bits(),
                own,
                destination,
                packet.hop_limit(),
                (packet.next_header(), packet.payload_bytes()),
            )
        }
        _ => return None,
    };
    if opaque(u64::from(ethernet) | different) != 0 || own_bits == 0 || hops <= 1 {
        return None;
    }
    let (generation, cached) = cached(ctx, Direction::Egress, config, [own, destination], transport)?;
    if let Some(endpoint_id) = cached {
        return Some(Forwarded { peer: Peer { endpoint_id, epoch: 0 }, is_known: true, generation });
    }
    let peer = match endpoint(destination) {
        Some(peer) => Peer { endpoint_id: peer.direct, epoch: peer.epoch as u32 },
        None => Peer::STACK,
    };
    Some(Forwarded { peer, is_known: false, generation })
}

/// A packet from the stack that is certainly for this container. If the cache knows its flow, its Ethernet destination
/// is set here, else with its flow.
#[inline(always)]
pub fn received(ctx: &TcContext, config: Config) -> Option<Forwarded> {
    if test_packet::is_test(ctx) || !applies(ctx, config, FLAG_CHAINED | FLAG_TRACE | FLAG_LIMIT_INGRESS) {
        return None;
    }
    let packet: Framed<Ipv4> = Framed::at_start(ctx)?;
    let ((different, own_bits), own, source, transport) = match packet.ethertype() {
        IPV4 => {
            let (own, source) = (Ipv6Address::mapped(config.ipv4()), Ipv6Address::mapped(packet.source()));
            (for_container4(ctx, config, packet)?, own, source, (packet.protocol(), packet.payload_bytes()))
        }
        IPV6 => {
            let packet: Framed<Ipv6> = Framed::at_start(ctx)?;
            // Other headers can precede a fragment's.
            if !matches!(packet.next_header(), TCP | UDP | ICMPV6) {
                return None;
            }
            (
                for_container6(ctx, config, packet)?,
                config.ipv6(),
                packet.source(),
                (packet.next_header(), packet.payload_bytes()),
            )
        }
        _ => return None,
    };
    let (host, [_, _, first, last]) = (to_container(), packet.words());
    let different = different | u64::from((first ^ host[2]) | (last ^ host[3]));
    if opaque(different) != 0 || own_bits == 0 {
        return None;
    }
    let (generation, cached) = cached(ctx, Direction::Ingress, config, [own, source], transport)?;
    let is_known = cached.is_some();
    if is_known {
        Framed::<()>::at_start(ctx)?.set_destination_words(host);
    }
    Some(Forwarded { peer: Peer::STACK, is_known, generation })
}

/// Generation, and the receiver if the flow is in the cache.
#[inline(always)]
fn cached(
    ctx: &TcContext,
    direction: Direction,
    config: Config,
    [own, peer]: [Ipv6Address; 2],
    (protocol, bytes): (u8, u16),
) -> Option<(u32, Option<u32>)> {
    let generation = cache::generation_of(config::endpoint_id(), own, peer)?;
    let Some(transport) = Transport::linear(ctx, protocol, bytes) else { return Some((generation, None)) };
    let flow = Flow::new(direction, config.epoch() as u32, peer, transport, generation);
    Some((generation, flow.find(ctx)))
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
            if opaque(different) != 0 || own == 0 {
                return None;
            }
            packet.decrement_ttl();
        }
        IPV6 => {
            let packet: Framed<Ipv6> = Framed::at_start(ctx)?;
            let (different, own) = for_container6(ctx, config, packet)?;
            if opaque(different) != 0 || own == 0 {
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
    opaque(u64::from(flags | tagged)) == 0 && !event::wants_log()
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
