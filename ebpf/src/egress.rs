//! Judges packets that a container sends, and decides where they go (node program `judge`). Packets judged by
//! [`crate::shortcut`] come only for their flow.
//!
//! Packets leave with the container's MAC and an IP of the endpoint as sources. Link-local IPv6 sources pass only in
//! neighbour messages (node program `neighbour`). An IPv6 destination with an embedded IPv4 address is refused: it
//! would match an IPv4 row of `ENDPOINTS`.
//!
//! Between endpoints the node is a router: the receiver's side decrements the TTL. On its last hop, a packet goes to
//! the stack, which informs the sender.
//!
//! Packets from **source prefixes** take the stack: their answers take it anyway, because `ENDPOINTS` lacks the
//! address.
//!
//! A **chained** endpoint's link may be a bridge port: any Ethernet destination passes, but a redirected flow drops,
//! because a bridge would forward it past the proxy.

use aya_ebpf::{
    bindings::{TC_ACT_OK, TC_ACT_REDIRECT, TC_ACT_SHOT},
    programs::TcContext,
};
use wharf_common::{Direction, DropReason, map::NodeCall};

use crate::{
    endpoints::endpoint,
    flow::{Asked, Peer, Way},
    handoff::{self, RECORDED, Verdict, Words},
    neighbour::{MESSAGE_BYTES, is_discovery},
    parse::{self, EtherType, Framed, HEADERS_BYTES, Ipv4, Ipv6, Ipv6Address},
    profile::Profile,
    test_packet,
};

/// `may_send`: a source prefix of the endpoint contains the source. Untracked test packets take the direct way; those
/// that ask policy end here.
#[inline(always)]
pub fn run(
    ctx: &TcContext,
    track: impl FnOnce(&TcContext, Asked) -> Result<Way, DropReason>,
    may_send: impl Fn(&TcContext, u32) -> bool + Copy,
) -> i32 {
    let words = Words::of(ctx);
    let own = words.sender();
    if words.has(RECORDED) {
        return go_on(ctx, own, words.asked(), track);
    }
    let (receiver, reason, action) = match way(ctx, own, track, may_send) {
        Ok(0) => (0, DropReason::ForwardedStack, TC_ACT_OK),
        Ok(TO_PROXY) => (0, DropReason::Redirected, TC_ACT_OK),
        Ok(receiver) => (receiver, DropReason::ForwardedLocal, TC_ACT_REDIRECT),
        Err(reason) => (0, reason, TC_ACT_SHOT),
    };
    Verdict::new(ctx, own, Direction::Egress, reason, action).to(receiver).hand_over(ctx)
}

#[inline(always)]
fn go_on(
    ctx: &TcContext,
    own: u32,
    asked: Asked,
    track: impl FnOnce(&TcContext, Asked) -> Result<Way, DropReason>,
) -> i32 {
    let (reason, action) = match track(ctx, asked) {
        Ok(Way::Proxy) => (DropReason::Redirected, TC_ACT_OK),
        Ok(_) if asked.peer.endpoint_id == 0 => return TC_ACT_OK,
        Ok(Way::Direct) => {
            handoff::deliver(ctx, asked.peer.endpoint_id);
            (DropReason::NoTailCallTarget, TC_ACT_SHOT)
        }
        Ok(Way::Stack) => (DropReason::ForwardedStack, TC_ACT_OK),
        Err(reason) => (reason, TC_ACT_SHOT),
    };
    Verdict::new(ctx, own, Direction::Egress, reason, action).after(asked.peer.forwarded()).hand_over(ctx)
}

/// Result of [`way`].
const TO_PROXY: u32 = u32::MAX;

/// Endpoint for direct delivery; zero for the stack.
#[inline(always)]
fn way(
    ctx: &TcContext,
    own: u32,
    track: impl FnOnce(&TcContext, Asked) -> Result<Way, DropReason>,
    may_send: impl Fn(&TcContext, u32) -> bool + Copy,
) -> Result<u32, DropReason> {
    let profile = Profile::of(own).ok_or(DropReason::NoConfig)?;
    let asked = Asked::new(own, profile, judge(ctx, own, profile, may_send)?, Direction::Egress);
    let receiver = asked.peer.endpoint_id;
    if test_packet::is_untracked(ctx) {
        return Ok(receiver);
    }
    match track(ctx, asked)? {
        Way::Direct if !test_packet::asks_policy(ctx) => Ok(receiver),
        Way::Proxy if profile.chained() => Err(DropReason::ProxyUnavailable),
        Way::Proxy => Ok(TO_PROXY),
        _ => Ok(0),
    }
}

#[inline(always)]
fn judge(
    ctx: &TcContext,
    own: u32,
    profile: Profile,
    may_send: impl Fn(&TcContext, u32) -> bool + Copy,
) -> Result<Peer, DropReason> {
    parse::gather(ctx, HEADERS_BYTES)?;
    let frame = parse::ethernet(ctx)?;
    if !frame.source_mac().equals(profile.container_mac()) {
        return Err(DropReason::InvalidSourceMac);
    }
    match EtherType::of(ctx, frame)? {
        EtherType::Ipv4 => ipv4(ctx, own, profile, may_send),
        EtherType::Ipv6 => ipv6(ctx, own, profile, may_send),
        EtherType::Arp => Err(to_neighbour(ctx, own)),
    }
}

#[inline(always)]
fn to_neighbour(ctx: &TcContext, own: u32) -> DropReason {
    handoff::call(ctx, NodeCall::Neighbour, own);
    DropReason::NoNodeProgram
}

#[inline(always)]
fn ipv4(
    ctx: &TcContext,
    own: u32,
    profile: Profile,
    may_send: impl Fn(&TcContext, u32) -> bool,
) -> Result<Peer, DropReason> {
    let packet: Framed<Ipv4> = parse::ipv4(ctx)?;
    if packet.destination_mac().is_group() || parse::is_group4(packet.destination()) {
        return Err(DropReason::Multicast);
    }
    let by_prefix = !profile.owns4(packet.source());
    if by_prefix && !may_send(ctx, own) {
        return Err(DropReason::InvalidSourceIp);
    }
    // A published port's `route_localnet` makes the stack accept this.
    if parse::is_loopback4(packet.destination()) {
        return Err(DropReason::InvalidDestinationIp);
    }
    addressed_to_host(profile, packet)?;
    to(profile, by_prefix, Ipv6Address::mapped(packet.destination()), packet.ttl())
}

#[inline(always)]
fn ipv6(
    ctx: &TcContext,
    own: u32,
    profile: Profile,
    may_send: impl Fn(&TcContext, u32) -> bool,
) -> Result<Peer, DropReason> {
    // First: solicitations are multicast from link-local sources.
    if parse::ipv6(ctx)?.is_icmp() {
        parse::gather(ctx, MESSAGE_BYTES)?;
        if is_discovery(ctx)? {
            return Err(to_neighbour(ctx, own));
        }
    }
    let packet: Framed<Ipv6> = parse::ipv6(ctx)?;
    if packet.destination_mac().is_group() || packet.destination().is_multicast() {
        return Err(DropReason::Multicast);
    }
    let by_prefix = !profile.owns6(packet.source());
    if by_prefix && !may_send(ctx, own) {
        return Err(DropReason::InvalidSourceIp);
    }
    if packet.destination().is_host_internal() {
        return Err(DropReason::InvalidDestinationIp);
    }
    addressed_to_host(profile, packet)?;
    to(profile, by_prefix, packet.destination(), packet.hop_limit())
}

/// The stack ignores a frame to another unicast MAC, which would count as forwarded. Chained endpoints can have other
/// neighbours.
#[inline(always)]
fn addressed_to_host<T>(profile: Profile, packet: Framed<T>) -> Result<(), DropReason> {
    if packet.destination_mac().equals(profile.host_mac()) || profile.chained() {
        Ok(())
    } else {
        Err(DropReason::InvalidDestinationMac)
    }
}

#[inline(always)]
fn to(profile: Profile, by_prefix: bool, destination: Ipv6Address, hops: u8) -> Result<Peer, DropReason> {
    let Some(peer) = endpoint(destination) else { return Ok(Peer::STACK) };
    if hops == 0 {
        return Err(DropReason::TtlExceeded);
    }
    let by_stack = by_prefix || profile.local_by_stack() || hops == 1;
    Ok(Peer { endpoint_id: if by_stack { 0 } else { peer.direct }, epoch: peer.epoch as u32 })
}
