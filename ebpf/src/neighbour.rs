//! ARP and IPv6 neighbour discovery: layouts and recognition.

use aya_ebpf::programs::TcContext;
use wharf_common::DropReason;

use crate::parse::{ETHERNET_BYTES, Framed, HEADERS_BYTES, Ipv6, Ipv6Address, Mac};

/// RFC 826, IPv4 over Ethernet. Network byte order; `u16` words for the alignment.
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

/// Neighbour solicitation or advertisement (RFC 4861, 4.3 and 4.4).
#[repr(C)]
pub struct Message {
    pub ip: Ipv6,
    pub kind: u8,
    pub code: u8,
    pub checksum: u16,
    pub flags: u32,
    pub target: Ipv6Address,
}

/// [`Message`] with a link-layer address (RFC 4861, 4.6.1).
#[repr(C)]
pub struct MessageWithOption {
    pub message: Message,
    pub option: u8,
    /// Units of eight bytes.
    pub option_words: u8,
    pub mac: Mac,
}

/// Start of ICMPv6 messages.
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

/// Longest message, with Ethernet header.
pub const MESSAGE_BYTES: usize = ETHERNET_BYTES + size_of::<MessageWithOption>();

#[inline(always)]
pub fn joined(address: [u16; 2]) -> u32 {
    u32::from(address[0]) | u32::from(address[1]) << 16
}

/// ICMPv6 types 133 to 137 (RFC 4861, 4).
///
/// Error: `Malformed` if too short for ICMPv6.
#[inline(always)]
pub fn is_discovery(ctx: &TcContext) -> Result<bool, DropReason> {
    let packet: Framed<IcmpHead> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
    // SAFETY: bounds checked.
    Ok(unsafe { (*packet.payload).kind }.wrapping_sub(133) < 5)
}
