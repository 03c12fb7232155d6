//! What the node's program `egress` does with what a container sends: proves whose it is, and finds where it goes. Packets that the
//! endpoint's own program has judged ([`crate::shortcut`], which asks the same) come here for their flow alone.
//!
//! What leaves here is provably the endpoint's: its Ethernet source is the one MAC it was given, its IP source the one
//! address of that family. Link-local IPv6 sources pass only in neighbour messages, which go no further than the node's program `neighbour`.
//! An IPv6 destination that embeds an IPv4 address is refused here, in the sender's name: in `ENDPOINTS` it would find the
//! row of an IPv4 address.
//!
//! Between two endpoints the node is a router: the receiver's side takes one off the TTL, also so that no neighbour message
//! of one endpoint (valid only with a hop limit of 255) ever works on another. (This program writes to no packet: the kernel then
//! spares it a call that unshares the packet's head.) A packet whose last hop this would be goes into
//! the stack instead, which drops it and tells the sender (traceroute then shows the node), with the kernel's own rate
//! limit. One that arrives with nothing left should not exist and is dropped.
//!
//! A flow that began through the stack stays there: its row says so.
//!
//! A **chained** endpoint's link is another plugin's, perhaps the port of a bridge: what is proven goes on to whatever Ethernet address it is for. A
//! flow that the rules hand to the proxy is dropped, because a bridge would forward its packets past the node's stack.
//!
//! An endpoint that sends to its own address through the link is delivered to like any other; its own stack, which would
//! never have sent such a packet, then judges it.

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

/// Runs the program; `track` finds the packet's way. A test packet is not tracked, and takes the direct way, which is what the desired
/// state says; one that asks policy goes no further.
#[inline(always)]
pub fn run(ctx: &TcContext, track: impl FnOnce(&TcContext, Asked) -> Result<Way, DropReason>) -> i32 {
    let words = Words::of(ctx);
    let own = words.sender();
    if words.has(RECORDED) {
        return go_on(ctx, own, words.asked(), track);
    }
    let (receiver, reason, action) = match way(ctx, own, track) {
        Ok(0) => (0, DropReason::ForwardedStack, TC_ACT_OK),
        Ok(TO_PROXY) => (0, DropReason::Redirected, TC_ACT_OK),
        Ok(receiver) => (receiver, DropReason::ForwardedLocal, TC_ACT_REDIRECT),
        Err(reason) => (0, reason, TC_ACT_SHOT),
    };
    Verdict::new(ctx, own, Direction::Egress, reason, action).to(receiver).hand_over(ctx)
}

/// What becomes of a packet that the endpoint's own program has judged and counted.
#[inline(always)]
fn go_on(
    ctx: &TcContext,
    own: u32,
    asked: Asked,
    track: impl FnOnce(&TcContext, Asked) -> Result<Way, DropReason>,
) -> i32 {
    let way = if test_packet::is_untracked(ctx) { Ok(Way::Direct) } else { track(ctx, asked) };
    let (reason, action) = match way {
        Ok(Way::Proxy) => (DropReason::Redirected, TC_ACT_OK),
        Ok(_) if asked.peer.endpoint_id == 0 || test_packet::asks_policy(ctx) => return TC_ACT_OK,
        Ok(Way::Direct) => {
            handoff::deliver(ctx, asked.peer.endpoint_id);
            (DropReason::NoTailCallTarget, TC_ACT_SHOT)
        }
        Ok(Way::Stack) => (DropReason::ForwardedStack, TC_ACT_OK),
        Err(reason) => (reason, TC_ACT_SHOT),
    };
    Verdict::new(ctx, own, Direction::Egress, reason, action).after(asked.peer.forwarded()).hand_over(ctx)
}

/// In what [`way`] answers: the packet goes to the proxy. No endpoint's id.
const TO_PROXY: u32 = u32::MAX;

/// The endpoint that the packet goes to directly; zero: it goes into the node's stack.
#[inline(always)]
fn way(
    ctx: &TcContext,
    own: u32,
    track: impl FnOnce(&TcContext, Asked) -> Result<Way, DropReason>,
) -> Result<u32, DropReason> {
    let profile = Profile::of(own).ok_or(DropReason::NoConfig)?;
    let peer = judge(ctx, own, profile)?;
    if test_packet::is_untracked(ctx) {
        return Ok(peer.endpoint_id);
    }
    match track(ctx, Asked::new(own, profile, peer, Direction::Egress))? {
        Way::Direct if !test_packet::asks_policy(ctx) => Ok(peer.endpoint_id),
        Way::Proxy if profile.chained() => Err(DropReason::ProxyUnavailable),
        Way::Proxy => Ok(TO_PROXY),
        _ => Ok(0),
    }
}

/// Where the packet goes, if its source is proven. Hands neighbour messages to the program that judges them.
#[inline(always)]
fn judge(ctx: &TcContext, own: u32, profile: Profile) -> Result<Peer, DropReason> {
    parse::gather(ctx, HEADERS_BYTES)?;
    let frame = parse::ethernet(ctx)?;
    if !frame.source_mac().equals(profile.container_mac()) {
        return Err(DropReason::InvalidSourceMac);
    }
    match EtherType::of(ctx, frame)? {
        EtherType::Ipv4 => ipv4(ctx, profile),
        EtherType::Ipv6 => ipv6(ctx, own, profile),
        EtherType::Arp => Err(to_neighbour(ctx, own)),
    }
}

/// Continues in the program `neighbour`. Comes back only where there is none.
#[inline(always)]
fn to_neighbour(ctx: &TcContext, own: u32) -> DropReason {
    handoff::call(ctx, NodeCall::Neighbour as u32, own);
    DropReason::NoNodeProgram
}

#[inline(always)]
fn ipv4(ctx: &TcContext, profile: Profile) -> Result<Peer, DropReason> {
    let packet: Framed<Ipv4> = parse::ipv4(ctx)?;
    if packet.destination_mac().is_group() || parse::is_group4(packet.destination()) {
        return Err(DropReason::Multicast);
    }
    if !profile.owns4(packet.source()) {
        return Err(DropReason::InvalidSourceIp);
    }
    // A published port needs `route_localnet` on the host side, with which the node's stack would take such a packet.
    if parse::is_loopback4(packet.destination()) {
        return Err(DropReason::InvalidDestinationIp);
    }
    addressed_to_host(profile, packet)?;
    to(profile, Ipv6Address::mapped(packet.destination()), packet.ttl())
}

#[inline(always)]
fn ipv6(ctx: &TcContext, own: u32, profile: Profile) -> Result<Peer, DropReason> {
    // Before the multicast rule (solicitations are multicast) and the source rule (they come from link-local addresses).
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
    if !profile.owns6(packet.source()) {
        return Err(DropReason::InvalidSourceIp);
    }
    if packet.destination().is_host_internal() {
        return Err(DropReason::InvalidDestinationIp);
    }
    addressed_to_host(profile, packet)?;
    to(profile, packet.destination(), packet.hop_limit())
}

/// A frame to any other unicast MAC would be passed over by the stack it ends in, and be counted here as forwarded. A chained endpoint may
/// have other neighbours.
#[inline(always)]
fn addressed_to_host<T>(profile: Profile, packet: Framed<T>) -> Result<(), DropReason> {
    if packet.destination_mac().equals(profile.host_mac()) || profile.chained() {
        Ok(())
    } else {
        Err(DropReason::InvalidDestinationMac)
    }
}

/// Where a packet goes whose source is proven; `hops`: those left.
#[inline(always)]
fn to(profile: Profile, destination: Ipv6Address, hops: u8) -> Result<Peer, DropReason> {
    let Some(peer) = endpoint(destination) else { return Ok(Peer::STACK) };
    if hops == 0 {
        return Err(DropReason::TtlExceeded);
    }
    let by_stack = profile.local_by_stack() || hops == 1;
    Ok(Peer { endpoint_id: if by_stack { 0 } else { peer.direct }, epoch: peer.epoch as u32 })
}
