//! Packet headers: bounds, layouts, and validity.
//!
//! Fields are aligned as in a frame two bytes past a multiple of four (`NET_IP_ALIGN`): the compiler emits whole loads.
//! BPF on Wharf's platforms loads from any address.

use core::ptr;

use aya_ebpf::programs::TcContext;
use wharf_common::{DropReason, EndpointKey};

pub const ETHERNET_BYTES: usize = size_of::<Ethernet>();

/// In frame order.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Mac([u16; 3]);

impl Mac {
    #[inline(always)]
    pub fn equals(self, other: Self) -> bool {
        // One comparison: the verifier follows both ways of each.
        self.whole() == other.whole()
    }

    /// Memory order; ignores the second's upper half.
    #[inline(always)]
    pub fn of([first, second]: [u32; 2]) -> Self {
        Self([first as u16, (first >> 16) as u16, second as u16])
    }

    /// Memory order; the highest 16 bits are zero.
    #[inline(always)]
    pub fn whole(self) -> u64 {
        u64::from(self.0[0]) | u64::from(self.0[1]) << 16 | u64::from(self.0[2]) << 32
    }

    /// As the kernel derives it (RFC 4291, appendix A).
    #[inline(always)]
    pub fn link_local(self) -> Ipv6Address {
        const { assert!(cfg!(target_endian = "little"), "bytes are shifted as a little-endian word has them") };
        let (company, rest) = (self.whole() & 0xff_ffff, self.whole() >> 24);
        Ipv6Address([u64::from(0xfe80_u16.to_be()), company ^ 0x02 | 0xfe_ff00_0000 | rest << 40])
    }

    #[inline(always)]
    pub fn is_group(self) -> bool {
        self.0[0] & 0x0100_u16.to_be() != 0
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Ethernet {
    pub destination: Mac,
    pub source: Mac,
    /// Network byte order.
    pub ethertype: u16,
}

#[derive(Clone, Copy)]
pub enum EtherType {
    Ipv4,
    Ipv6,
    Arp,
}

impl EtherType {
    /// A VLAN tag removed by the kernel counts as present.
    #[inline(always)]
    pub fn of<T>(ctx: &TcContext, frame: Framed<T>) -> Result<Self, DropReason> {
        // SAFETY: the context.
        if unsafe { (*ctx.skb.skb).vlan_present } != 0 {
            return Err(DropReason::UnsupportedL2);
        }
        // SAFETY: bounds checked.
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
    /// Header byte order.
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

/// Words in memory order.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Ipv6Address([u64; 2]);

impl Ipv6Address {
    /// IPv4-mapped (`::ffff:a.b.c.d`); `address` in network byte order.
    #[inline(always)]
    pub fn mapped(address: u32) -> Self {
        Self([0, u64::from(0xffff_u32.to_be()) | u64::from(address) << 32])
    }

    #[inline(always)]
    pub fn words(self) -> [u64; 2] {
        self.0
    }

    #[inline(always)]
    pub fn difference(self, other: Self) -> u64 {
        (self.0[0] ^ other.0[0]) | (self.0[1] ^ other.0[1])
    }

    #[inline(always)]
    pub fn as_shared(&self) -> &EndpointKey {
        // SAFETY: same size; a byte array needs no alignment.
        unsafe { &*(&raw const *self).cast() }
    }

    /// Negative, zero or positive, in the order of [`wharf_common::FlowKey`].
    #[inline(always)]
    pub fn order(self, other: Self) -> i32 {
        let compare = |a: u64, b: u64| i32::from(a > b) - i32::from(a < b);
        match compare(self.0[0], other.0[0]) {
            0 => compare(self.0[1], other.0[1]),
            order => order,
        }
    }

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

    /// `::/96` or `::ffff:0:0/96` (RFC 4291, 2.5.2 to 2.5.5), invalid as destination on a link. The latter are IPv4
    /// keys of `ENDPOINTS`.
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

const _: () = assert!(cfg!(target_endian = "little"), "the programs are built for little-endian BPF");

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

/// An Ethernet header and its payload, in bounds until a call that may move the packet.
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
    /// `None` for a shorter packet, or before [`gather`].
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
        // SAFETY: bounds checked.
        unsafe { (*self.ethernet).source }
    }

    #[inline(always)]
    pub fn destination_mac(self) -> Mac {
        // SAFETY: bounds checked.
        unsafe { (*self.ethernet).destination }
    }

    /// Comparable to [`PROTOCOL_IPV4`] and [`PROTOCOL_IPV6`].
    #[inline(always)]
    pub fn ethertype(self) -> u32 {
        // SAFETY: bounds checked.
        u32::from(unsafe { (*self.ethernet).ethertype })
    }

    /// Both addresses, in words of 2, 4, 4 and 2 bytes.
    #[inline(always)]
    pub fn words(self) -> [u32; 4] {
        let frame = self.ethernet.cast::<u8>();
        // SAFETY: bounds checked.
        unsafe {
            [
                u32::from(*frame.cast::<u16>()),
                *frame.add(2).cast::<u32>(),
                *frame.add(6).cast::<u32>(),
                u32::from(*frame.add(10).cast::<u16>()),
            ]
        }
    }

    #[inline(always)]
    pub fn set_words(self, words: [u32; 4]) {
        let frame = self.ethernet.cast::<u8>();
        // SAFETY: bounds checked. Volatile: otherwise the compiler stores halves.
        unsafe {
            ptr::write_volatile(frame.cast::<u16>(), words[0] as u16);
            ptr::write_volatile(frame.add(2).cast::<u32>(), words[1]);
            ptr::write_volatile(frame.add(6).cast::<u32>(), words[2]);
            ptr::write_volatile(frame.add(10).cast::<u16>(), words[3] as u16);
        }
    }

    /// The first two of [`Framed::words`].
    #[inline(always)]
    pub fn set_destination_words(self, [first, second, ..]: [u32; 4]) {
        let frame = self.ethernet.cast::<u8>();
        // SAFETY: bounds checked. Volatile: as in `set_words`.
        unsafe {
            ptr::write_volatile(frame.cast::<u16>(), first as u16);
            ptr::write_volatile(frame.add(2).cast::<u32>(), second);
        }
    }

    #[inline(always)]
    pub fn set_destination(self, destination: Mac) {
        // SAFETY: bounds checked.
        unsafe { (*self.ethernet).destination = destination };
    }

    #[inline(always)]
    pub fn address(self, destination: Mac, source: Mac) {
        // SAFETY: bounds checked.
        unsafe {
            (*self.ethernet).destination = destination;
            (*self.ethernet).source = source;
        }
    }
}

#[inline(always)]
fn bounds(ctx: &TcContext) -> (usize, usize) {
    let context = ctx.skb.skb;
    // Volatile: in a 32-bit register, a bound is no packet end to the verifier.
    // SAFETY: the context.
    unsafe {
        (
            ptr::read_volatile(&raw const (*context).data) as usize,
            ptr::read_volatile(&raw const (*context).data_end) as usize,
        )
    }
}

/// Reads a `T` at `offset`: in place in the linear part (much faster), else by helper. `None` when the packet is
/// shorter.
///
/// Not for a byte: the compiler then compares with `<`, from which the verifier learns nothing.
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

/// [`read`] in the linear part.
#[inline(always)]
pub fn read_linear<T>(ctx: &TcContext, offset: usize) -> Option<T> {
    let (start, end) = bounds(ctx);
    let at = start + offset;
    // SAFETY: bounds checked.
    (at + size_of::<T>() <= end).then(|| unsafe { ptr::read_unaligned(at as *const T) })
}

/// Network byte order, as `__sk_buff.protocol`.
pub const PROTOCOL_IPV4: u32 = 0x0800_u16.to_be() as u32;
pub const PROTOCOL_IPV6: u32 = 0x86dd_u16.to_be() as u32;
/// RFC 791, 3.1.
const IS_FRAGMENT: u16 = 0x3fff;

/// Headers that are always read.
pub const HEADERS_BYTES: usize = ETHERNET_BYTES + size_of::<Ipv6>();

/// Pulls the first `wanted` bytes into the linear part. Call it before any read: it may move the packet. Ask for no
/// more than needed: for TCP payload, the kernel copies the head.
///
/// Error: `PacketWrite` without memory.
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

/// Error: `Malformed` when the packet is shorter.
#[inline(always)]
pub fn ethernet(ctx: &TcContext) -> Result<Framed<()>, DropReason> {
    Framed::at_start(ctx).ok_or(DropReason::Malformed)
}

/// Error: `Malformed` unless version and lengths agree with each other and the packet.
#[inline(always)]
pub fn ipv4(ctx: &TcContext) -> Result<Framed<Ipv4>, DropReason> {
    let packet: Framed<Ipv4> = Framed::at_start(ctx).ok_or(DropReason::Malformed)?;
    // SAFETY: bounds checked.
    let (first, total) = unsafe { ((*packet.payload).version_and_words, u16::from_be((*packet.payload).total_bytes)) };
    let header = u32::from(first & 0x0f) * 4;
    let room = ctx.len() - ETHERNET_BYTES as u32;
    let mut total = u32::from(total);
    if total == 0 && is_gso(ctx) {
        // BIG TCP.
        total = room;
    }
    if first >> 4 != 4 || header < size_of::<Ipv4>() as u32 || total < header || total > room {
        return Err(DropReason::Malformed);
    }
    Ok(packet)
}

/// Error: `Malformed` unless version and length agree with the packet.
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

#[inline(always)]
fn is_gso(ctx: &TcContext) -> bool {
    // SAFETY: the context.
    unsafe { (*ctx.skb.skb).gso_size != 0 }
}

/// `224.0.0.0/4` or limited broadcast; network byte order.
#[inline(always)]
pub fn is_group4(address: u32) -> bool {
    address & 0xf0 == 0xe0 || address == u32::MAX
}

/// `127.0.0.0/8` (RFC 1122, 3.2.1.3); network byte order.
#[inline(always)]
pub fn is_loopback4(address: u32) -> bool {
    address & 0xff == 127
}

impl Framed<Ipv4> {
    #[inline(always)]
    pub fn source(self) -> u32 {
        // SAFETY: bounds checked.
        unsafe { (*self.payload).source }
    }

    #[inline(always)]
    pub fn destination(self) -> u32 {
        // SAFETY: bounds checked.
        unsafe { (*self.payload).destination }
    }

    #[inline(always)]
    pub fn total_bytes(self) -> u16 {
        // SAFETY: bounds checked.
        u16::from_be(unsafe { (*self.payload).total_bytes })
    }

    /// Without options; wraps for an invalid length.
    #[inline(always)]
    pub fn payload_bytes(self) -> u16 {
        self.total_bytes().wrapping_sub(size_of::<Ipv4>() as u16)
    }

    /// Zero for version 4 without options or fragment.
    #[inline(always)]
    pub fn oddities(self) -> u32 {
        // SAFETY: bounds checked.
        let (first, place) = unsafe { ((*self.payload).version_and_words, (*self.payload).fragment) };
        u32::from(first ^ 0x45) | u32::from(place & IS_FRAGMENT.to_be())
    }

    #[inline(always)]
    pub fn protocol(self) -> u8 {
        // SAFETY: bounds checked.
        unsafe { (*self.payload).protocol }
    }

    #[inline(always)]
    pub fn ttl(self) -> u8 {
        // SAFETY: bounds checked.
        unsafe { (*self.payload).ttl }
    }

    /// The TTL must be above zero. Checksum by RFC 1141: the complement sum gains 0x0100, plus a carry from 0xffff on.
    #[inline(always)]
    pub fn decrement_ttl(self) {
        // SAFETY: bounds checked.
        unsafe {
            let sum = u32::from((*self.payload).checksum) + u32::from(0x0100_u16.to_be());
            (*self.payload).checksum = (sum + ((sum + 1) >> 16)) as u16;
            (*self.payload).ttl -= 1;
        }
    }
}

impl Framed<Ipv6> {
    #[inline(always)]
    pub fn source(self) -> Ipv6Address {
        // SAFETY: bounds checked.
        unsafe { (*self.payload).source }
    }

    #[inline(always)]
    pub fn destination(self) -> Ipv6Address {
        // SAFETY: bounds checked.
        unsafe { (*self.payload).destination }
    }

    /// Not behind extension headers: there, ICMPv6 gets no exception.
    #[inline(always)]
    pub fn is_icmp(self) -> bool {
        // SAFETY: bounds checked.
        unsafe { (*self.payload).next_header == ICMPV6 }
    }

    #[inline(always)]
    pub fn next_header(self) -> u8 {
        // SAFETY: bounds checked.
        unsafe { (*self.payload).next_header }
    }

    #[inline(always)]
    pub fn payload_bytes(self) -> u16 {
        // SAFETY: bounds checked.
        u16::from_be(unsafe { (*self.payload).payload_bytes })
    }

    /// Zero for version 6.
    #[inline(always)]
    pub fn oddities(self) -> u32 {
        // SAFETY: bounds checked.
        unsafe { (*self.payload).version_class_flow & 0xf0 ^ 0x60 }
    }

    #[inline(always)]
    pub fn hop_limit(self) -> u8 {
        // SAFETY: bounds checked.
        unsafe { (*self.payload).hop_limit }
    }

    /// The hop limit must be above zero.
    #[inline(always)]
    pub fn decrement_hop_limit(self) {
        // SAFETY: bounds checked.
        unsafe { (*self.payload).hop_limit -= 1 }
    }
}
