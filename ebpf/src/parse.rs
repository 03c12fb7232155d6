//! Packet headers: bounds, shapes and the few rules that make a header believable. Nothing is read past what a decision
//! needs.
//!
//! Headers are read in place. Their fields are declared with the alignment they have when a frame starts two bytes past
//! a multiple of four (`NET_IP_ALIGN`), which is the kernel's own assumption for its own structs, so that the compiler
//! emits whole loads; BPF on the machines Wharf runs on loads from any address.

use core::ptr;

use aya_ebpf::programs::TcContext;
use wharf_common::{DropReason, EndpointKey};

/// Bytes of the Ethernet header.
pub const ETHERNET_BYTES: usize = size_of::<Ethernet>();

/// A MAC address, in words as it stands in a frame.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Mac([u16; 3]);

impl Mac {
    #[inline(always)]
    pub fn equals(self, other: Self) -> bool {
        // One comparison, not three: the verifier follows both ways of each.
        self.whole() == other.whole()
    }

    #[inline(always)]
    fn whole(self) -> u64 {
        u64::from(self.0[0]) | u64::from(self.0[1]) << 16 | u64::from(self.0[2]) << 32
    }

    /// In two words, the high half of the second zero.
    #[inline(always)]
    pub fn words(self) -> [u32; 2] {
        [self.whole() as u32, (self.whole() >> 32) as u32]
    }

    /// From two words, whatever the high half of the second.
    #[inline(always)]
    pub fn from_words(first: u32, second: u32) -> Self {
        Self([first as u16, (first >> 16) as u16, second as u16])
    }

    /// Multicast or broadcast.
    #[inline(always)]
    pub fn is_group(self) -> bool {
        self.0[0] & 0x0100_u16.to_be() != 0
    }
}

/// Ethernet header.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Ethernet {
    pub destination: Mac,
    pub source: Mac,
    /// Network byte order.
    pub ethertype: u16,
}

/// The protocols above Ethernet that are spoken here.
#[derive(Clone, Copy)]
pub enum EtherType {
    Ipv4,
    Ipv6,
    Arp,
}

impl EtherType {
    /// The frame's protocol. A VLAN tag that the kernel has already taken off the frame (it does before this hook) counts
    /// as one that is still on it: the packet below it is meant for another network.
    #[inline(always)]
    pub fn of<T>(ctx: &TcContext, frame: Framed<T>) -> Result<Self, DropReason> {
        // SAFETY: the context the program was called with.
        if unsafe { (*ctx.skb.skb).vlan_present } != 0 {
            return Err(DropReason::UnsupportedL2);
        }
        // SAFETY: bounds checked when made.
        match u16::from_be(unsafe { (*frame.ethernet).ethertype }) {
            0x0800 => Ok(Self::Ipv4),
            0x86dd => Ok(Self::Ipv6),
            0x0806 => Ok(Self::Arp),
            _ => Err(DropReason::UnsupportedL2),
        }
    }
}

/// IPv4 header without options.
#[repr(C)]
pub struct Ipv4 {
    version_and_words: u8,
    _service: u8,
    total_bytes: u16,
    /// As it stands in the header.
    pub identification: u16,
    fragment: u16,
    ttl: u8,
    pub protocol: u8,
    checksum: u16,
    /// Network byte order.
    pub source: u32,
    /// Network byte order.
    pub destination: u32,
}

impl Ipv4 {
    /// Flags and offset (RFC 791, 3.1), host byte order: zero but for "don't fragment" in a packet that is whole.
    #[inline(always)]
    pub fn fragment(&self) -> u16 {
        u16::from_be(self.fragment)
    }

    /// Bytes of the header, options included.
    #[inline(always)]
    pub fn header_bytes(&self) -> usize {
        usize::from(self.version_and_words & 0x0f) * 4
    }
}

/// An IPv6 address as two words in memory order.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Ipv6Address([u64; 2]);

impl Ipv6Address {
    /// The IPv4-mapped form (`::ffff:a.b.c.d`) of an IPv4 address in network byte order.
    #[inline(always)]
    pub fn mapped(address: u32) -> Self {
        Self([0, u64::from(0xffff_u32.to_be()) | u64::from(address) << 32])
    }

    /// In two words, as they stand in the packet.
    #[inline(always)]
    pub fn words(self) -> [u64; 2] {
        self.0
    }

    /// Zero when both are the same.
    #[inline(always)]
    pub fn difference(self, other: Self) -> u64 {
        (self.0[0] ^ other.0[0]) | (self.0[1] ^ other.0[1])
    }

    /// As the maps have it.
    #[inline(always)]
    pub fn as_shared(&self) -> &EndpointKey {
        // SAFETY: same size, and a byte array asks for no alignment.
        unsafe { &*(&raw const *self).cast() }
    }

    /// Below, at or above zero as the address is below, the same as or above the other, in the order of
    /// [`wharf_common::FlowKey`].
    #[inline(always)]
    pub fn order(self, other: Self) -> i32 {
        let compare = |a: u64, b: u64| i32::from(a > b) - i32::from(a < b);
        match compare(self.0[0], other.0[0]) {
            0 => compare(self.0[1], other.0[1]),
            order => order,
        }
    }

    /// Zero for the unspecified address.
    #[inline(always)]
    pub fn bits(self) -> u64 {
        self.0[0] | self.0[1]
    }

    #[inline(always)]
    pub fn equals(self, other: Self) -> bool {
        self.difference(other) == 0
    }

    #[inline(always)]
    pub fn is_unspecified(self) -> bool {
        self.bits() == 0
    }

    /// `::/96` or `::ffff:0:0/96`: unspecified, loopback, IPv4-compatible and IPv4-mapped addresses (RFC 4291, 2.5.2 to
    /// 2.5.5). No packet on a link may be addressed to one; the last are the IPv4 keys of `ENDPOINTS`.
    #[inline(always)]
    pub fn is_host_internal(self) -> bool {
        let third = self.0[1] as u32;
        self.0[0] == 0 && (third == 0 || third == 0x0000_ffff_u32.to_be())
    }

    /// `ff00::/8`.
    #[inline(always)]
    pub fn is_multicast(self) -> bool {
        self.0[0] & 0xff == 0xff
    }

    /// `fe80::/10`.
    #[inline(always)]
    pub fn is_link_local(self) -> bool {
        self.0[0] & u64::from(0xffc0_u16.to_be()) == u64::from(0xfe80_u16.to_be())
    }
}

// The shifts and masks above take the first byte in memory for the lowest.
const _: () = assert!(cfg!(target_endian = "little"), "the programs are built for little-endian BPF");

/// IPv6 header.
#[repr(C)]
pub struct Ipv6 {
    pub version_class_flow: u32,
    /// Network byte order.
    pub payload_bytes: u16,
    pub next_header: u8,
    pub hop_limit: u8,
    pub source: Ipv6Address,
    pub destination: Ipv6Address,
}

pub use wharf_common::flow::{ICMPV6, TCP, UDP};

const _: () = {
    assert!(size_of::<Ethernet>() == 14);
    assert!(size_of::<Ipv4>() == 20);
    assert!(size_of::<Ipv6>() == 40);
};

/// An Ethernet header and what follows it, both within the packet's bounds. Stale after anything that may move the
/// packet (the verifier then refuses its use).
pub struct Framed<T> {
    pub ethernet: *mut Ethernet,
    pub payload: *mut T,
}

impl<T> Clone for Framed<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Framed<T> {}

impl<T> Framed<T> {
    /// The Ethernet header and a `T` after it; `None` when the packet is shorter. After [`gather`], that is all it means.
    #[inline(always)]
    pub fn at_start(ctx: &TcContext) -> Option<Self> {
        let (start, end) = bounds(ctx);
        if start + ETHERNET_BYTES + size_of::<T>() > end {
            return None;
        }
        Some(Self { ethernet: start as *mut Ethernet, payload: (start + ETHERNET_BYTES) as *mut T })
    }
}

impl<T> Framed<T> {
    #[inline(always)]
    pub fn source_mac(self) -> Mac {
        // SAFETY: bounds checked when made.
        unsafe { (*self.ethernet).source }
    }

    #[inline(always)]
    pub fn destination_mac(self) -> Mac {
        // SAFETY: bounds checked when made.
        unsafe { (*self.ethernet).destination }
    }

    /// Readdresses the frame.
    #[inline(always)]
    pub fn address(self, destination: Mac, source: Mac) {
        // SAFETY: bounds checked when made.
        unsafe {
            (*self.ethernet).destination = destination;
            (*self.ethernet).source = source;
        }
    }
}

/// Where the packet's first piece begins and ends.
#[inline(always)]
fn bounds(ctx: &TcContext) -> (usize, usize) {
    let context = ctx.skb.skb;
    // Volatile: a bound that the compiler keeps from an earlier check passes through a 32-bit register on its way, and
    // the verifier then no longer knows it for the packet's end.
    // SAFETY: the context the program was called with.
    unsafe {
        (
            ptr::read_volatile(&raw const (*context).data) as usize,
            ptr::read_volatile(&raw const (*context).data_end) as usize,
        )
    }
}

/// 1 for zero, else 0, without a branch: the verifier follows both ways of each, to the end of the program.
#[inline(always)]
pub fn is_zero(word: u64) -> u32 {
    1 ^ ((word | word.wrapping_neg()) >> 63) as u32
}

/// Reads what stands at `offset` of the packet: in place where it lies in the packet's first piece, which is much faster, else by the
/// helper that fetches it from wherever it lies. `None` when the packet is shorter.
///
/// Not for a single byte: the compiler then compares with `<`, of which the verifier learns nothing.
#[inline(always)]
pub fn read<T>(ctx: &TcContext, offset: usize) -> Option<T> {
    let (start, end) = bounds(ctx);
    let at = start + offset;
    if at + size_of::<T>() <= end {
        // SAFETY: bounds checked.
        return Some(unsafe { ptr::read_unaligned(at as *const T) });
    }
    ctx.load(offset).ok()
}

/// Bytes of the longest headers that every packet is read by: Ethernet and IPv6.
pub const HEADERS_BYTES: usize = ETHERNET_BYTES + size_of::<Ipv6>();

/// Brings the first `wanted` bytes together in the packet's first piece: a sender may lay a packet out as it likes. Before
/// anything is read, because it may move the packet.
///
/// To ask for more than a decision needs is dear: TCP keeps its payload in other pieces, and to pull one byte of it the kernel
/// copies the head.
///
/// # Errors
///
/// `PacketWrite` when there is no memory for it.
#[inline(always)]
pub fn gather(ctx: &TcContext, wanted: usize) -> Result<(), DropReason> {
    let (start, end) = bounds(ctx);
    if start + wanted > end {
        let bytes = ctx.len();
        if ((end - start) as u32) < bytes {
            let wanted = if bytes < wanted as u32 { bytes } else { wanted as u32 };
            return ctx.pull_data(wanted).map_err(|_| DropReason::PacketWrite);
        }
    }
    Ok(())
}

/// The Ethernet header.
///
/// # Errors
///
/// `Malformed` when the packet is shorter.
#[inline(always)]
pub fn ethernet(ctx: &TcContext) -> Result<Framed<()>, DropReason> {
    Framed::at_start(ctx).ok_or(DropReason::Malformed)
}

/// The IPv4 header, believable: version, header length and total length agree with each other and with the packet.
///
/// # Errors
///
/// `Malformed` when not.
#[inline(always)]
pub fn ipv4(ctx: &TcContext) -> Result<Framed<Ipv4>, DropReason> {
    let packet: Framed<Ipv4> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
    // SAFETY: bounds checked.
    let (first, total) = unsafe { ((*packet.payload).version_and_words, u16::from_be((*packet.payload).total_bytes)) };
    let header = u32::from(first & 0x0f) * 4;
    let room = ctx.len() - ETHERNET_BYTES as u32;
    let mut total = u32::from(total);
    if total == 0 && is_gso(ctx) {
        // "BIG TCP": too long for the field, which is then zero and the packet's own length stands for it.
        total = room;
    }
    if first >> 4 != 4 || header < size_of::<Ipv4>() as u32 || total < header || total > room {
        return Err(DropReason::Malformed);
    }
    Ok(packet)
}

/// The IPv6 header, believable: version and payload length agree with the packet.
///
/// # Errors
///
/// `Malformed` when not.
#[inline(always)]
pub fn ipv6(ctx: &TcContext) -> Result<Framed<Ipv6>, DropReason> {
    let packet: Framed<Ipv6> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
    // SAFETY: bounds checked.
    let (first, payload) = unsafe { ((*packet.payload).version_class_flow, (*packet.payload).payload_bytes) };
    let room = ctx.len() - (ETHERNET_BYTES + size_of::<Ipv6>()) as u32;
    if first & 0xf0 != 0x60 || u32::from(u16::from_be(payload)) > room {
        return Err(DropReason::Malformed);
    }
    Ok(packet)
}

/// A packet that stands for several on the wire.
#[inline(always)]
fn is_gso(ctx: &TcContext) -> bool {
    // SAFETY: the context the program was called with.
    unsafe { (*ctx.skb.skb).gso_size != 0 }
}

/// `224.0.0.0/4` or the limited broadcast; `address` in network byte order.
#[inline(always)]
pub fn is_group4(address: u32) -> bool {
    address & 0xf0 == 0xe0 || address == u32::MAX
}

/// `127.0.0.0/8` (RFC 1122, 3.2.1.3); `address` in network byte order.
#[inline(always)]
pub fn is_loopback4(address: u32) -> bool {
    address & 0xff == 127
}

impl Framed<Ipv4> {
    /// Network byte order.
    #[inline(always)]
    pub fn source(self) -> u32 {
        // SAFETY: bounds checked when made.
        unsafe { (*self.payload).source }
    }

    /// Network byte order.
    #[inline(always)]
    pub fn destination(self) -> u32 {
        // SAFETY: bounds checked when made.
        unsafe { (*self.payload).destination }
    }

    #[inline(always)]
    pub fn ttl(self) -> u8 {
        // SAFETY: bounds checked when made.
        unsafe { (*self.payload).ttl }
    }

    /// 1 for a packet that is no fragment, else 0.
    #[inline(always)]
    pub fn is_whole(self) -> u32 {
        // SAFETY: bounds checked when made.
        is_zero(u64::from(unsafe { (*self.payload).fragment() } & 0x3fff))
    }

    /// Takes one off a TTL that is not zero, and mends the header's checksum (RFC 1141): the word that holds the TTL in
    /// its high byte loses 0x0100, so the complement sum gains it. Right stays right, and wrong stays wrong.
    #[inline(always)]
    pub fn decrement_ttl(self) {
        // SAFETY: bounds checked when made.
        unsafe {
            let sum = u32::from((*self.payload).checksum) + u32::from(0x0100_u16.to_be());
            (*self.payload).checksum = (sum + u32::from(sum >= 0xffff)) as u16;
            (*self.payload).ttl -= 1;
        }
    }
}

impl Framed<Ipv6> {
    #[inline(always)]
    pub fn source(self) -> Ipv6Address {
        // SAFETY: bounds checked when made.
        unsafe { (*self.payload).source }
    }

    #[inline(always)]
    pub fn destination(self) -> Ipv6Address {
        // SAFETY: bounds checked when made.
        unsafe { (*self.payload).destination }
    }

    /// ICMPv6 follows the header without extension headers between. One hidden behind some is a packet like any other:
    /// its source must be the endpoint's, and on the way to another endpoint it loses the hop limit of 255.
    #[inline(always)]
    pub fn is_icmp(self) -> bool {
        // SAFETY: bounds checked when made.
        unsafe { (*self.payload).next_header == ICMPV6 }
    }

    #[inline(always)]
    pub fn hop_limit(self) -> u8 {
        // SAFETY: bounds checked when made.
        unsafe { (*self.payload).hop_limit }
    }

    /// 1 for a packet without extension headers, which may hide that it is a fragment; else 0, also for protocols that are rare.
    #[inline(always)]
    pub fn is_whole(self) -> u32 {
        // SAFETY: bounds checked when made.
        let next = unsafe { (*self.payload).next_header };
        [TCP, UDP, ICMPV6].iter().fold(0, |is, protocol| is | is_zero(u64::from(next ^ protocol)))
    }

    /// Takes one off a hop limit that is not zero.
    #[inline(always)]
    pub fn decrement_hop_limit(self) {
        // SAFETY: bounds checked when made.
        unsafe { (*self.payload).hop_limit -= 1 }
    }
}
