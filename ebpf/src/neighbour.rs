//! ARP and IPv6 neighbour discovery of the container: the messages, and what an endpoint's own program does with one. The
//! program of the node's that judges and answers them is `neighbour`.

use aya_ebpf::programs::TcContext;
use wharf_common::{DropReason, map::NodeCall};

use crate::{
    config::{self, Config},
    handoff::{self, Words},
    parse::{ETHERNET_BYTES, EtherType, Framed, HEADERS_BYTES, Ipv6, Ipv6Address, Mac, is_zero},
};

/// ARP for IPv4 over Ethernet (RFC 826). Integers in network byte order; addresses in words, being two bytes off.
#[repr(C)]
pub struct Arp {
    pub hardware: u16,
    pub protocol: u16,
    pub hardware_bytes: u8,
    pub protocol_bytes: u8,
    pub operation: u16,
    pub sender_mac: Mac,
    pub sender: [u16; 2],
    pub target_mac: Mac,
    pub target: [u16; 2],
}

/// A neighbour solicitation or advertisement (RFC 4861, 4.3 and 4.4) without options.
#[repr(C)]
pub struct Message {
    pub ip: Ipv6,
    pub kind: u8,
    pub code: u8,
    pub checksum: u16,
    pub flags: u32,
    pub target: Ipv6Address,
}

/// The same with one option, a link-layer address (RFC 4861, 4.6.1).
#[repr(C)]
pub struct MessageWithOption {
    pub message: Message,
    pub option: u8,
    /// In units of eight bytes.
    pub option_words: u8,
    pub mac: Mac,
}

/// The part of an ICMPv6 message that all of them have.
#[repr(C)]
pub struct IcmpHead {
    pub ip: Ipv6,
    pub kind: u8,
    _code: u8,
    _checksum: u16,
    _body: u32,
}

const _: () = {
    assert!(size_of::<Arp>() == 28);
    assert!(size_of::<IcmpHead>() == 48);
    assert!(size_of::<Message>() == 64);
    assert!(ETHERNET_BYTES + size_of::<Arp>() <= HEADERS_BYTES);
};

/// Bytes of the longest message that is read in place, with its Ethernet header: one of neighbour discovery with one option.
pub const MESSAGE_BYTES: usize = ETHERNET_BYTES + size_of::<MessageWithOption>();

/// Of the claims: the message comes from the endpoint's own address.
pub const FROM_OWN: u32 = 1 << 16;
/// Of the claims: the message is about the gateway.
pub const ABOUT_GATEWAY: u32 = 1 << 17;
/// Of the claims: the message is about the endpoint's own address.
pub const ABOUT_OWN: u32 = 1 << 18;

/// An address of ARP's as a word.
#[inline(always)]
pub fn joined(address: [u16; 2]) -> u32 {
    u32::from(address[0]) | u32::from(address[1]) << 16
}

/// True for an ICMPv6 packet that is a message of neighbour discovery (RFC 4861, 4): types 133 to 137.
///
/// # Errors
///
/// `Malformed` when it is too short for any ICMPv6 message.
#[inline(always)]
pub fn is_discovery(ctx: &TcContext) -> Result<bool, DropReason> {
    let packet: Framed<IcmpHead> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
    // SAFETY: bounds checked.
    Ok(unsafe { (*packet.payload).kind }.wrapping_sub(133) < 5)
}

/// Lets the node's program `neighbour` judge a message of ARP or neighbour discovery, and tells it what only this endpoint knows.
/// Comes back only where there is no such program: with the reason to drop the message.
#[inline(always)]
pub fn judge(ctx: &TcContext, config: Config, ethertype: EtherType, bytes: u32) -> DropReason {
    let claims = match ethertype {
        EtherType::Arp => arp_claims(ctx, config),
        _ => discovery_claims(ctx, config),
    };
    let mac = config::host_mac().words();
    handoff::call(ctx, NodeCall::Neighbour, Words([mac[0], mac[1] | claims, handoff::pair(0), bytes, 0]));
    DropReason::NoNodeProgram
}

/// None of a message that is too short to have addresses.
#[inline(always)]
fn arp_claims(ctx: &TcContext, config: Config) -> u32 {
    let Some(packet) = Framed::<Arp>::at_start(ctx) else { return 0 };
    // SAFETY: bounds checked.
    let (sender, target) = unsafe { (joined((*packet.payload).sender), joined((*packet.payload).target)) };
    let claim =
        |flag: u32, address: u32, own: u32| flag * (is_zero(u64::from(address ^ own)) & (1 ^ is_zero(u64::from(own))));
    claim(FROM_OWN, sender, config.ipv4()) | claim(ABOUT_GATEWAY, target, config.gateway4())
}

/// None of a message that is too short to have addresses.
#[inline(always)]
fn discovery_claims(ctx: &TcContext, config: Config) -> u32 {
    let Some(packet) = Framed::<Message>::at_start(ctx) else { return 0 };
    // SAFETY: bounds checked.
    let (source, target) = unsafe { ((*packet.payload).ip.source, (*packet.payload).target) };
    let claim = |flag: u32, address: Ipv6Address, own: Ipv6Address| {
        flag * (is_zero(address.difference(own)) & (1 ^ is_zero(own.bits())))
    };
    claim(FROM_OWN, source, config.ipv6())
        | claim(ABOUT_GATEWAY, target, config.gateway6())
        | claim(ABOUT_OWN, target, config.ipv6())
}
