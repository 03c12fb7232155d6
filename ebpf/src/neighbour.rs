//! ARP and IPv6 neighbour discovery of the container: the messages, and how one is told from other packets. The program of the node's
//! that judges and answers them is `neighbour`.

use aya_ebpf::programs::TcContext;
use wharf_common::DropReason;

use crate::parse::{ETHERNET_BYTES, Framed, HEADERS_BYTES, Ipv6, Ipv6Address, Mac};

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
