//! ARP and IPv6 neighbour discovery of the container: questions for the gateway are answered here, in place; all other
//! neighbour messages end here. Nothing of it reaches the node or another endpoint, so nothing needs broadcast, and no
//! one can be told a wrong address.
//!
//! The answer takes the way any local packet takes: `bpf_redirect_peer` puts it into the container's side of the veth. It
//! meets no other hook, so no program has to recognise it and let it through.
//!
//! Checksums and options beyond the first of a solicitation are not looked at: the answer depends on nothing but the
//! target, and goes to none but the one who asked.

use core::{
    mem::{self, offset_of},
    ptr,
};

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::{bpf_csum_diff, bpf_skb_change_tail, bpf_skb_change_type},
    programs::TcContext,
};
use wharf_common::DropReason;

use wharf_ebpf::{
    config::{self, Config},
    parse::{self, ETHERNET_BYTES, EtherType, Framed, HEADERS_BYTES, ICMPV6, Ipv6, Ipv6Address, Mac},
    verdict::{Decision, Forward},
};

use crate::deliver::redirect_peer;

/// ARP for IPv4 over Ethernet (RFC 826). Integers in network byte order; addresses in words, being two bytes off.
#[repr(C)]
struct Arp {
    hardware: u16,
    protocol: u16,
    hardware_bytes: u8,
    protocol_bytes: u8,
    operation: u16,
    sender_mac: Mac,
    sender: [u16; 2],
    target_mac: Mac,
    target: [u16; 2],
}

/// A neighbour solicitation or advertisement (RFC 4861, 4.3 and 4.4) without options.
#[repr(C)]
struct Message {
    ip: Ipv6,
    kind: u8,
    code: u8,
    checksum: u16,
    flags: u32,
    target: Ipv6Address,
}

/// The same with one option, a link-layer address (RFC 4861, 4.6.1).
#[repr(C)]
pub struct MessageWithOption {
    message: Message,
    option: u8,
    /// In units of eight bytes.
    option_words: u8,
    mac: Mac,
}

/// The part of an ICMPv6 message that all of them have.
#[repr(C)]
struct IcmpHead {
    ip: Ipv6,
    kind: u8,
    _code: u8,
    _checksum: u16,
    _body: u32,
}

const _: () = {
    assert!(size_of::<Arp>() == 28);
    assert!(size_of::<IcmpHead>() == 48);
    assert!(size_of::<Message>() == 64);
    assert!(ETHERNET_BYTES + size_of::<MessageWithOption>() == HEADERS_BYTES);
};

/// `linux/if_packet.h`: to this host.
const PACKET_HOST: u32 = 0;
const ARP_REQUEST: u16 = 1;
const ARP_REPLY: u16 = 2;
const SOURCE_LINK_LAYER: u8 = 1;
const TARGET_LINK_LAYER: u8 = 2;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// Router, solicited, override (RFC 4861, 4.4).
const ADVERTISED_FLAGS: u32 = 0xe000_0000;
/// Bytes of an answer's ICMPv6 part.
const ADVERTISED_BYTES: u16 = (size_of::<MessageWithOption>() - size_of::<Ipv6>()) as u16;
/// Only a neighbour can send a packet that arrives with this.
const NEIGHBOUR_HOP_LIMIT: u8 = 255;

/// Answers an ARP request or a neighbour solicitation for the gateway.
///
/// # Errors
///
/// The reason to drop any other ARP packet or neighbour discovery message.
#[inline(always)]
pub fn judge(ctx: &TcContext) -> Decision {
    // SAFETY: the context the program was called with.
    let judged = unsafe { wharf_neighbour(ctx.skb.skb) };
    // SAFETY: the low half is a reason's number, see `wharf_neighbour`.
    let reason = unsafe { mem::transmute::<u32, DropReason>(judged & 0xffff) };
    match judged >> 16 {
        0 => Err(reason),
        action => Ok(Forward { reason, action: action as i32 }),
    }
}

/// [`judge`], as a number: the reason, and above it what the hook is to return, or zero for a drop.
///
/// Its name is exported and it takes but the context, so that the verifier takes it for a global function and looks at it
/// once, not again for every path that leads here. The same holds for [`wharf_advertise`].
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_neighbour(skb: *mut __sk_buff) -> u32 {
    let ctx = &TcContext::new(skb);
    match decide(ctx) {
        Ok(forward) => (forward.action as u32) << 16 | forward.reason as u32,
        Err(reason) => reason as u32,
    }
}

#[inline(always)]
fn decide(ctx: &TcContext) -> Decision {
    let config = Config::load().ok_or(DropReason::NoConfig)?;
    match EtherType::of(ctx, parse::ethernet(ctx)?)? {
        EtherType::Arp => arp(ctx, config),
        _ => discovery(ctx, config, kind(ctx)?.ok_or(DropReason::Malformed)?),
    }
}

#[inline(always)]
fn arp(ctx: &TcContext, config: Config) -> Decision {
    let packet: Framed<Arp> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
    // SAFETY: bounds checked; nothing moves the packet while this reference lives.
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
    let sender = joined(arp.sender);
    // A sender of zero asks whether an address is taken (RFC 5227) and claims nothing.
    if !arp.sender_mac.equals(config::container_mac()) || !(config.owns4(sender) || sender == 0) {
        return Err(DropReason::NeighbourSpoof);
    }
    if operation != ARP_REQUEST || !config.is_gateway4(joined(arp.target)) {
        return Err(DropReason::NeighbourUnknown);
    }
    (arp.sender, arp.target) = (arp.target, arp.sender);
    arp.operation = ARP_REPLY.to_be();
    arp.sender_mac = config::host_mac();
    arp.target_mac = config::container_mac();
    packet.address(config::container_mac(), config::host_mac());
    answer(ctx, config)
}

#[inline(always)]
fn joined(address: [u16; 2]) -> u32 {
    u32::from(address[0]) | u32::from(address[1]) << 16
}

/// The neighbour discovery messages.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    RouterSolicitation,
    RouterAdvertisement,
    Solicitation,
    Advertisement,
    Redirect,
}

/// Which neighbour discovery message an ICMPv6 packet is, if one.
///
/// # Errors
///
/// `Malformed` when it is too short for any ICMPv6 message.
#[inline(always)]
pub fn kind(ctx: &TcContext) -> Result<Option<Kind>, DropReason> {
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
fn discovery(ctx: &TcContext, config: Config, kind: Kind) -> Decision {
    match kind {
        // Shorter than the messages below, so judged by what all of them have.
        Kind::RouterSolicitation => {
            let packet: Framed<IcmpHead> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
            // SAFETY: bounds checked.
            let destination = unsafe { (*packet.payload).ip.destination };
            let group = destination.is_multicast();
            return Err(if group { DropReason::Multicast } else { DropReason::NeighbourUnknown });
        }
        // Either would make the container a router.
        Kind::RouterAdvertisement | Kind::Redirect => return Err(DropReason::NeighbourSpoof),
        Kind::Solicitation | Kind::Advertisement => {}
    }
    let packet: Framed<Message> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
    // SAFETY: bounds checked; nothing moves the packet while this reference lives.
    let message = unsafe { &*packet.payload };
    let payload = u16::from_be(message.ip.payload_bytes);
    if payload < (size_of::<Message>() - size_of::<Ipv6>()) as u16
        || message.ip.hop_limit != NEIGHBOUR_HOP_LIMIT
        || message.code != 0
    {
        return Err(DropReason::Malformed);
    }
    let (source, target) = (message.ip.source, message.target);
    if source.is_unspecified() {
        // Duplicate address detection: a multicast question which, unanswered, is answered.
        return Err(DropReason::Multicast);
    }
    // Link-local addresses are the container's own affair: they are valid on its link only, where nobody else is.
    if !config.owns6(source) && !source.is_link_local() {
        return Err(DropReason::NeighbourSpoof);
    }
    if kind == Kind::Advertisement && !config.owns6(target) && !target.is_link_local() {
        return Err(DropReason::NeighbourSpoof);
    }
    if payload >= ADVERTISED_BYTES {
        let packet: Framed<MessageWithOption> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
        // SAFETY: bounds checked.
        let (option, mac) = unsafe { ((*packet.payload).option, (*packet.payload).mac) };
        if (option == SOURCE_LINK_LAYER || option == TARGET_LINK_LAYER) && !mac.equals(config::container_mac()) {
            return Err(DropReason::NeighbourSpoof);
        }
    }
    if kind == Kind::Advertisement || !config.is_gateway6(target) {
        return Err(DropReason::NeighbourUnknown);
    }
    // SAFETY: the context the program was called with.
    match unsafe { wharf_advertise(ctx.skb.skb) } {
        ADVERTISED => answer(ctx, config),
        // SAFETY: otherwise it is a reason's number.
        reason => Err(unsafe { mem::transmute::<u32, DropReason>(reason) }),
    }
}

/// What [`wharf_advertise`] returns when the packet is an advertisement now; no reason has this number.
const ADVERTISED: u32 = u32::MAX;

/// Makes a solicitation the advertisement that answers it; else the reason's number.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_advertise(skb: *mut __sk_buff) -> u32 {
    let ctx = &TcContext::new(skb);
    match advertise(ctx) {
        Ok(()) => ADVERTISED,
        Err(reason) => reason as u32,
    }
}

#[inline(always)]
fn advertise(ctx: &TcContext) -> Result<(), DropReason> {
    let bytes = (ETHERNET_BYTES + size_of::<MessageWithOption>()) as u32;
    // The question may carry no option, or more than one.
    if ctx.len() != bytes {
        // SAFETY: the context the program was called with; every pointer into the packet is taken anew below.
        if unsafe { bpf_skb_change_tail(ctx.skb.skb, bytes, 0) } != 0 {
            return Err(DropReason::PacketWrite);
        }
    }
    let packet: Framed<MessageWithOption> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
    // SAFETY: bounds checked; nothing moves the packet while this reference lives.
    let answer = unsafe { &mut *packet.payload };
    let (asker, target) = (answer.message.ip.source, answer.message.target);
    answer.message = Message {
        ip: Ipv6 {
            version_class_flow: 0x6000_0000_u32.to_be(),
            payload_bytes: ADVERTISED_BYTES.to_be(),
            next_header: ICMPV6,
            hop_limit: NEIGHBOUR_HOP_LIMIT,
            source: target,
            destination: asker,
        },
        kind: NEIGHBOUR_ADVERTISEMENT,
        code: 0,
        checksum: 0,
        flags: ADVERTISED_FLAGS.to_be(),
        target,
    };
    answer.option = TARGET_LINK_LAYER;
    answer.option_words = 1;
    answer.mac = config::host_mac();
    packet.address(config::container_mac(), config::host_mac());
    answer.message.checksum = checksum(answer);
    Ok(())
}

/// The ICMPv6 checksum of a message whose own is zero (RFC 4443, 2.3): over its pseudo-header and itself. Both addresses and
/// the message lie next to each other; length and next header are the rest of the pseudo-header.
#[inline(always)]
fn checksum(answer: &MessageWithOption) -> u16 {
    const SUMMED: u32 = (size_of::<MessageWithOption>() - offset_of!(Ipv6, source)) as u32;
    const REST: u32 = ADVERTISED_BYTES.to_be() as u32 + (ICMPV6 as u16).to_be() as u32;
    let begin = (&raw const answer.message.ip.source).cast_mut().cast();
    // SAFETY: the helper reads that many bytes of the packet, which are inside `answer`.
    let mut sum = unsafe { bpf_csum_diff(ptr::null_mut(), 0, begin, SUMMED, REST) } as u64 & 0xffff_ffff;
    // 32 bits, so two folds do.
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    !(sum as u16)
}

/// Sends the packet back to where it came from.
#[inline(always)]
fn answer(ctx: &TcContext, config: Config) -> Decision {
    // The question was probably multicast and is marked so; an answer marked so is believed less (ARP entries then start
    // out as stale). Recent kernels do this themselves for a packet that goes to the peer, older ones do not.
    // SAFETY: the context the program was called with.
    if unsafe { bpf_skb_change_type(ctx.skb.skb, PACKET_HOST) } != 0 {
        return Err(DropReason::PacketWrite);
    }
    Ok(Forward { reason: DropReason::NeighbourAnswered, action: redirect_peer(config.ifindex()) })
}
