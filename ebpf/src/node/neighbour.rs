//! Answers the container's ARP and IPv6 neighbour requests for the gateway in place, past all hooks
//! (`bpf_redirect_peer`), and drops other messages. A request may come from the endpoint's source prefixes: Linux asks
//! so from its own addresses.
//!
//! A **chained** endpoint's messages pass if they are for it, or claim only its addresses and the link-local address of
//! its MAC.
//!
//! Checksums and options beyond the first are ignored: the answer depends only on the target and goes only to the
//! requester.

use core::{mem::offset_of, ptr};

use aya_ebpf::{
    bindings::{TC_ACT_OK, TC_ACT_REDIRECT, TC_ACT_SHOT},
    helpers::{bpf_csum_diff, bpf_skb_change_tail, bpf_skb_change_type},
    programs::TcContext,
};
use wharf_common::{Direction, DropReason};

use wharf_ebpf::{
    handoff::{FROM_STACK, Verdict, Words},
    neighbour::{Arp, IcmpHead, Message, MessageWithOption, joined},
    parse::{self, ETHERNET_BYTES, EtherType, Framed, ICMPV6, Ipv6, Ipv6Address},
    profile::Profile,
};

use crate::sources;

/// `linux/if_packet.h`: to this host.
const PACKET_HOST: u32 = 0;
const ARP_REQUEST: u16 = 1;
const ARP_REPLY: u16 = 2;
const SOURCE_LINK_LAYER: u8 = 1;
const TARGET_LINK_LAYER: u8 = 2;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// Router, solicited, override (RFC 4861, 4.4).
const ADVERTISED_FLAGS: u32 = 0xe000_0000;
const ADVERTISED_BYTES: u16 = (size_of::<MessageWithOption>() - size_of::<Ipv6>()) as u16;
/// Only neighbours' packets have it.
const NEIGHBOUR_HOP_LIMIT: u8 = 255;

#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let words = Words::of(ctx);
    let (endpoint, arrives) = (words.sender(), words.has(FROM_STACK));
    // Before an answer changes the length.
    let bytes = ctx.len();
    let (reason, action) = match judge(ctx, endpoint, arrives) {
        Ok(Outcome::Answered) => (DropReason::NeighbourAnswered, TC_ACT_REDIRECT),
        Ok(Outcome::Passes) => (DropReason::ForwardedStack, TC_ACT_OK),
        Err(reason) => (reason, TC_ACT_SHOT),
    };
    let direction = if arrives { Direction::Ingress } else { Direction::Egress };
    let mut verdict = Verdict::new(ctx, endpoint, direction, reason, action);
    verdict.bytes = bytes;
    verdict.hand_over(ctx)
}

enum Outcome {
    Answered,
    Passes,
}

/// `arrives`: for a chained endpoint's container.
#[inline(always)]
fn judge(ctx: &TcContext, endpoint: u32, arrives: bool) -> Result<Outcome, DropReason> {
    let asker = Profile::of(endpoint).ok_or(DropReason::NoConfig)?;
    match EtherType::of(ctx, parse::ethernet(ctx)?)? {
        EtherType::Arp => arp(ctx, asker, arrives),
        _ => discovery(ctx, asker, kind(ctx)?.ok_or(DropReason::Malformed)?, arrives),
    }
}

#[inline(always)]
fn arp(ctx: &TcContext, asker: Profile, arrives: bool) -> Result<Outcome, DropReason> {
    let packet: Framed<Arp> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
    // SAFETY: bounds checked; the packet does not move meanwhile.
    let arp = unsafe { &mut *packet.payload };
    let operation = u16::from_be(arp.operation);
    if arp.hardware != 1_u16.to_be()
        || arp.protocol != 0x0800_u16.to_be()
        || arp.hardware_bytes != 6
        || arp.protocol_bytes != 4
        || (operation != ARP_REQUEST && operation != ARP_REPLY)
    {
        return Err(DropReason::Malformed);
    }
    if arrives {
        return if asker.owns4(joined(arp.target)) { Ok(Outcome::Passes) } else { Err(DropReason::NeighbourUnknown) };
    }
    // `judge` proved it.
    let asker_mac = packet.source_mac();
    let is_for_gateway = operation == ARP_REQUEST && asker.has_gateway4(joined(arp.target));
    let sender = joined(arp.sender);
    // A zero sender probes for an address (RFC 5227).
    let may_claim = asker.owns4(sender)
        || sender == 0
        || is_for_gateway && sources::has_prefix_with(asker, Ipv6Address::mapped(sender));
    if !arp.sender_mac.equals(asker_mac) || !may_claim {
        return Err(DropReason::NeighbourSpoof);
    }
    if asker.chained() {
        return Ok(Outcome::Passes);
    }
    if !is_for_gateway {
        return Err(DropReason::NeighbourUnknown);
    }
    (arp.sender, arp.target) = (arp.target, arp.sender);
    arp.operation = ARP_REPLY.to_be();
    arp.sender_mac = asker.host_mac();
    arp.target_mac = asker_mac;
    packet.address(asker_mac, asker.host_mac());
    answer(ctx)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    RouterSolicitation,
    RouterAdvertisement,
    Solicitation,
    Advertisement,
    Redirect,
}

/// `None` for other ICMPv6.
#[inline(always)]
fn kind(ctx: &TcContext) -> Result<Option<Kind>, DropReason> {
    let packet: Framed<IcmpHead> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
    // SAFETY: bounds checked.
    Ok(match unsafe { (*packet.payload).kind } {
        133 => Some(Kind::RouterSolicitation),
        134 => Some(Kind::RouterAdvertisement),
        135 => Some(Kind::Solicitation),
        NEIGHBOUR_ADVERTISEMENT => Some(Kind::Advertisement),
        137 => Some(Kind::Redirect),
        _ => None,
    })
}

#[inline(always)]
fn discovery(ctx: &TcContext, asker: Profile, kind: Kind, arrives: bool) -> Result<Outcome, DropReason> {
    match kind {
        Kind::RouterSolicitation => {
            let packet: Framed<IcmpHead> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
            // SAFETY: bounds checked.
            let destination = unsafe { (*packet.payload).ip.destination };
            let group = destination.is_multicast();
            return Err(if group { DropReason::Multicast } else { DropReason::NeighbourUnknown });
        }
        // Either makes the container a router.
        Kind::RouterAdvertisement | Kind::Redirect => return Err(DropReason::NeighbourSpoof),
        Kind::Solicitation | Kind::Advertisement => {}
    }
    let packet: Framed<Message> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
    // SAFETY: bounds checked; the packet does not move meanwhile.
    let message = unsafe { &*packet.payload };
    let payload = u16::from_be(message.ip.payload_bytes);
    if payload < (size_of::<Message>() - size_of::<Ipv6>()) as u16
        || message.ip.hop_limit != NEIGHBOUR_HOP_LIMIT
        || message.code != 0
    {
        return Err(DropReason::Malformed);
    }
    let (source, target) = (message.ip.source, message.target);
    if arrives {
        // An advertisement can go to all nodes.
        let about = if kind == Kind::Solicitation { target } else { message.ip.destination };
        let for_all = kind == Kind::Advertisement && about.is_multicast();
        let passes = for_all || asker.owns6(about) || about.is_link_local();
        return if passes { Ok(Outcome::Passes) } else { Err(DropReason::NeighbourUnknown) };
    }
    if source.is_unspecified() {
        // Duplicate address detection: silence means a free address.
        return Err(DropReason::Multicast);
    }
    let is_for_gateway = kind == Kind::Solicitation && asker.has_gateway6(target);
    let may_claim = claims_own(asker, source) || is_for_gateway && sources::has_prefix_with(asker, source);
    if !may_claim || (kind == Kind::Advertisement && !claims_own(asker, target)) {
        return Err(DropReason::NeighbourSpoof);
    }
    if payload >= ADVERTISED_BYTES {
        let packet: Framed<MessageWithOption> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
        // SAFETY: bounds checked.
        let (option, mac) = unsafe { ((*packet.payload).option, (*packet.payload).mac) };
        if (option == SOURCE_LINK_LAYER || option == TARGET_LINK_LAYER) && !mac.equals(packet.source_mac()) {
            return Err(DropReason::NeighbourSpoof);
        }
    }
    if asker.chained() {
        return Ok(Outcome::Passes);
    }
    if !is_for_gateway {
        return Err(DropReason::NeighbourUnknown);
    }
    advertise(ctx, asker)?;
    answer(ctx)
}

/// Alone on its link, a container may claim any link-local address, unless chained.
#[inline(always)]
fn claims_own(asker: Profile, address: Ipv6Address) -> bool {
    let own_link_local =
        address.is_link_local() && (!asker.chained() || address.equals(asker.container_mac().link_local()));
    own_link_local || asker.owns6(address)
}

#[inline(always)]
fn advertise(ctx: &TcContext, asker: Profile) -> Result<(), DropReason> {
    let frame = parse::ethernet(ctx)?;
    let asker_mac = frame.source_mac();
    let bytes = (ETHERNET_BYTES + size_of::<MessageWithOption>()) as u32;
    if ctx.len() != bytes {
        // SAFETY: the context; packet pointers are read again below.
        if unsafe { bpf_skb_change_tail(ctx.skb.skb, bytes, 0) } != 0 {
            return Err(DropReason::PacketWrite);
        }
    }
    let packet: Framed<MessageWithOption> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
    // SAFETY: bounds checked; the packet does not move meanwhile.
    let answer = unsafe { &mut *packet.payload };
    let (source, target) = (answer.message.ip.source, answer.message.target);
    answer.message = Message {
        ip: Ipv6 {
            version_class_flow: 0x6000_0000_u32.to_be(),
            payload_bytes: ADVERTISED_BYTES.to_be(),
            next_header: ICMPV6,
            hop_limit: NEIGHBOUR_HOP_LIMIT,
            source: target,
            destination: source,
        },
        kind: NEIGHBOUR_ADVERTISEMENT,
        code: 0,
        checksum: 0,
        flags: ADVERTISED_FLAGS.to_be(),
        target,
    };
    answer.option = TARGET_LINK_LAYER;
    answer.option_words = 1;
    answer.mac = asker.host_mac();
    packet.address(asker_mac, asker.host_mac());
    answer.message.checksum = checksum(answer);
    Ok(())
}

/// ICMPv6 checksum (RFC 4443, 2.3). Addresses and message are adjacent; `REST` completes the pseudo-header.
#[inline(always)]
fn checksum(answer: &MessageWithOption) -> u16 {
    const SUMMED: u32 = (size_of::<MessageWithOption>() - offset_of!(Ipv6, source)) as u32;
    const REST: u32 = ADVERTISED_BYTES.to_be() as u32 + (ICMPV6 as u16).to_be() as u32;
    let begin = (&raw const answer.message.ip.source).cast_mut().cast();
    // SAFETY: reads inside `answer`.
    let mut sum = unsafe { bpf_csum_diff(ptr::null_mut(), 0, begin, SUMMED, REST) } as u64 & 0xffff_ffff;
    // 32 bits: two folds suffice.
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    !(sum as u16)
}

#[inline(always)]
fn answer(ctx: &TcContext) -> Result<Outcome, DropReason> {
    // A request is usually marked multicast. Older kernels do not reset the mark, which makes new ARP entries stale.
    // SAFETY: the context.
    match unsafe { bpf_skb_change_type(ctx.skb.skb, PACKET_HOST) } {
        0 => Ok(Outcome::Answered),
        _ => Err(DropReason::PacketWrite),
    }
}
