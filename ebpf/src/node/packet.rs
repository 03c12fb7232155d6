//! A packet's addresses, protocol, ports, signals and fragmentation.

use core::mem::{offset_of, size_of};

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use wharf_common::{
    FlowKey,
    flow::{ICMP, ICMPV6, SCTP, SIGNAL_FIN, SIGNAL_RST, SIGNAL_SYN, TCP, UDP, UNKNOWN_TRANSPORT},
};
use wharf_ebpf::{
    endpoints::generation,
    parse::{ETHERNET_BYTES, Ipv4, Ipv6, Ipv6Address, PROTOCOL_IPV4, PROTOCOL_IPV6, read},
};

use crate::flow::forget;

/// IPv6's fragment header (RFC 8200, 4.5).
pub const FRAGMENT: u8 = 44;
const IDENTIFICATION: u32 = 4;
/// RFC 4302; IPv4 and IPv6.
const AUTHENTICATION: u8 = 51;
/// IPv6 extension headers as bits: hop-by-hop, routing, destination options, fragment (RFC 8200, 4).
const LOW_EXTENSIONS: u64 = 1 << 0 | 1 << 43 | 1 << 60 | 1 << FRAGMENT;
/// Mobility (RFC 6275), HIP (RFC 7401), Shim6 (RFC 5533).
const MOBILITY: u8 = 135;
const HIP: u8 = 139;
const SHIM6: u8 = 140;
/// Flag and mask (RFC 791, 3.1).
const MORE: u16 = 0x2000;
const OFFSET: u16 = 0x1fff;
const IPV4_BYTES: usize = 2;
const TCP_FLAGS: usize = 13;
/// First chunk type (RFC 9260, 3).
const SCTP_CHUNK: usize = 12;

/// Ports: network byte order, zero if absent. Protocol: [`UNKNOWN_TRANSPORT`] if no transport header was found.
pub struct Packet {
    pub source: Ipv6Address,
    pub destination: Ipv6Address,
    pub source_port: u16,
    pub destination_port: u16,
    pub protocol: u8,
    /// ICMP or ICMPv6 type; an echo request's if not visible.
    pub kind: u8,
    pub signals: u8,
    /// RFC 792, RFC 4443.
    pub is_error: bool,
    /// IPv4-style fragment flags and offset, host byte order.
    place: u16,
    /// Offset of a fragment's identification.
    pub identification_at: u32,
    /// Offset behind the IP headers.
    pub transport: usize,
    is_incomplete: bool,
}

impl Packet {
    /// `None` for a truncated IP header.
    #[inline(always)]
    pub fn at(ctx: &TcContext, offset: usize) -> Option<Self> {
        // SAFETY: the context.
        let found = unsafe { wharf_headers(ctx.skb.skb, offset as u32) };
        // The compiler knows the result's range and would omit masks, which the verifier needs.
        let found = core::hint::black_box(found);
        if found == 0 {
            return None;
        }
        let (place, transport) = ((found >> 16) as u16, (found >> 32) as u32 & TRANSPORT_MAX);
        let is_later = if place & OFFSET != 0 { IS_LATER } else { 0 };
        // SAFETY: as above.
        let behind = unsafe { wharf_transport(ctx.skb.skb, transport, u32::from(found as u8) | is_later) };
        let behind = core::hint::black_box(behind);
        Some(Self {
            source: address_at(ctx, offset, true)?,
            destination: address_at(ctx, offset, false)?,
            source_port: behind as u16,
            destination_port: (behind >> 16) as u16,
            protocol: (behind >> PROTOCOL_SHIFT) as u8,
            kind: (behind >> 32) as u8,
            signals: (behind >> 40) as u8,
            is_error: behind & IS_ERROR != 0,
            place,
            identification_at: (found >> 48) as u32 & TRANSPORT_MAX,
            transport: transport as usize,
            is_incomplete: found & INCOMPLETE != 0,
        })
    }

    /// The current packet, with known ports and protocol.
    #[inline(always)]
    pub fn with(ctx: &TcContext, ports: u32, protocol: u8) -> Option<Self> {
        Some(Self {
            source: address(ctx, true)?,
            destination: address(ctx, false)?,
            source_port: ports as u16,
            destination_port: (ports >> 16) as u16,
            protocol,
            kind: echo_request(protocol),
            signals: 0,
            is_error: false,
            place: 0,
            identification_at: 0,
            transport: 0,
            is_incomplete: false,
        })
    }

    /// Source port; from bit 16, destination port.
    #[inline(always)]
    pub fn ports(&self) -> u32 {
        u32::from(self.source_port) | u32::from(self.destination_port) << 16
    }

    /// A first fragment without all headers; RFC 7112, 5 permits to drop it.
    #[inline(always)]
    pub fn is_incomplete(&self) -> bool {
        self.is_incomplete
    }

    #[inline(always)]
    pub fn is_fragment(&self) -> bool {
        self.place != 0
    }

    #[inline(always)]
    pub fn is_later_fragment(&self) -> bool {
        self.place & OFFSET != 0
    }

    /// Type of the ICMP request, also of an answer; else, and for an echo, zero.
    #[inline(always)]
    fn asked(&self) -> u8 {
        match (self.protocol, self.kind) {
            // Timestamp, information and mask replies (RFC 792, RFC 950); node information (RFC 4620).
            (ICMP, 14 | 16 | 18) | (ICMPV6, 140) => self.kind - 1,
            (ICMP | ICMPV6, kind) if !is_echo(self.protocol, kind) => kind,
            _ => 0,
        }
    }

    /// True: the high end sent the packet.
    #[inline(always)]
    pub fn key(&self) -> (Key, bool) {
        let ports = (self.source_port, self.destination_port);
        let by_high = match self.source.order(self.destination) {
            0 => ports.0 > ports.1,
            order => order > 0,
        };
        let (low, high, (low_port, high_port)) = if by_high {
            (self.destination, self.source, (ports.1, ports.0))
        } else {
            (self.source, self.destination, ports)
        };
        let kinds = u32::from(self.protocol) | u32::from(self.asked()) << 8;
        (Key { low, high, low_port, high_port, kinds }, by_high)
    }
}

#[inline(always)]
pub fn address(ctx: &TcContext, source: bool) -> Option<Ipv6Address> {
    address_at(ctx, ETHERNET_BYTES, source)
}

/// The packet at `offset` has the current packet's IP version.
#[inline(always)]
fn address_at(ctx: &TcContext, offset: usize, source: bool) -> Option<Ipv6Address> {
    // SAFETY: the context.
    if unsafe { (*ctx.skb.skb).protocol } == PROTOCOL_IPV4 {
        let place = if source { offset_of!(Ipv4, source) } else { offset_of!(Ipv4, destination) };
        return Some(Ipv6Address::mapped(read(ctx, offset + place)?));
    }
    let place = if source { offset_of!(Ipv6, source) } else { offset_of!(Ipv6, destination) };
    read(ctx, offset + place)
}

/// Limit of RFC 8200, 4.1.
pub const EXTENSIONS: u32 = 6;

#[inline(always)]
pub fn is_extension(next: u8, ipv6: bool) -> bool {
    let is_low = next < 64 && LOW_EXTENSIONS >> next & 1 != 0;
    next == AUTHENTICATION || ipv6 && (is_low || matches!(next, MOBILITY | HIP | SHIM6))
}

#[inline(always)]
pub fn extension_bytes(next: u8, length: u32) -> u32 {
    match next {
        FRAGMENT => 8,
        AUTHENTICATION => 4 * (length + 2),
        _ => 8 * (length + 1),
    }
}

const SEARCHED: u32 = 0x7f0;
/// Mask of a packet's offset, also inside an ICMP error.
pub const PACKET_MAX: u32 = 0x7ff;
/// Mask of [`Packet::transport`].
const TRANSPORT_MAX: u32 = 0xfff;
/// Argument flag of [`wharf_transport`].
const IS_LATER: u32 = 1 << 8;
/// Result flag: [`Packet::is_error`].
const IS_ERROR: u64 = 1 << 48;
/// Shift of the protocol in the result.
const PROTOCOL_SHIFT: u32 = 56;
/// Result for a truncated packet.
const CUT_SHORT: u64 = (UNKNOWN_TRANSPORT as u64) << PROTOCOL_SHIFT;

/// Result flag of [`wharf_headers`]: [`Packet::is_incomplete`].
const INCOMPLETE: u64 = 1 << 8;
/// Bytes (RFC 8200, 4.5).
const FRAGMENT_UNIT: u32 = 8;

/// Parses the IP headers at `offset`. Bits of the result: next protocol; [`INCOMPLETE`]; from 16, IPv4-style flags and
/// offset of a fragment; from 32, offset behind the IP headers; from 48, offset of a fragment's identification. Zero
/// for a truncated IP header. The protocol is [`UNKNOWN_TRANSPORT`] for too many or too long headers, or a truncated
/// packet.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_headers(skb: *mut __sk_buff, offset: u32) -> u64 {
    let (ctx, start) = (&TcContext::new(skb), offset & PACKET_MAX);
    let ipv6 = is_ipv6(skb);
    let mut round = if ipv6 {
        let Some([next, _]) = read::<[u8; 2]>(ctx, start as usize + offset_of!(Ipv6, next_header)) else { return 0 };
        found(next, 0, start + size_of::<Ipv6>() as u32, 0)
    } else {
        // Version and header length, total length, identification, flags and offset, TTL and protocol.
        let Some([first, bytes, _, place, last]) = read::<[u16; 5]>(ctx, start as usize) else { return 0 };
        let (at, end) = (start + u32::from(first & 0x0f) * 4, start + u32::from(u16::from_be(bytes)));
        let place = u16::from_be(place) & (MORE | OFFSET);
        let all = found((last >> 8) as u8, place, at, start + offset_of!(Ipv4, identification) as u32);
        all | if place == MORE && at + FRAGMENT_UNIT > end { INCOMPLETE } else { 0 }
    };
    round |= continues(round, ipv6);
    for _ in 0..EXTENSIONS {
        if round & CONTINUES == 0 {
            return round;
        }
        // SAFETY: the context.
        round = unsafe { wharf_extension(skb, start, round) };
    }
    if round & CONTINUES == 0 { round } else { round & !0xff | u64::from(UNKNOWN_TRANSPORT) }
}

/// Result flag: another extension header follows.
const CONTINUES: u64 = 1 << 9;

/// Later fragments have no headers.
#[inline(always)]
fn continues(round: u64, ipv6: bool) -> u64 {
    let ends = round & (u64::from(OFFSET) << 16 | INCOMPLETE) != 0;
    if !ends && is_extension(round as u8, ipv6) { CONTINUES } else { 0 }
}

#[inline(always)]
fn found(protocol: u8, place: u16, at: u32, identified: u32) -> u64 {
    u64::from(protocol) | u64::from(place) << 16 | u64::from(at) << 32 | u64::from(identified) << 48
}

/// Updates [`wharf_headers`]' result for one extension header.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_extension(skb: *mut __sk_buff, offset: u32, round: u64) -> u64 {
    let (ctx, start) = (&TcContext::new(skb), offset & PACKET_MAX);
    let at = (round >> 32) as u32 & TRANSPORT_MAX;
    // Encoded: decoded numbers exceed the stack.
    let mut fragment = round & (0xffff << 16 | 0xffff << 48);
    let Some(header) = read::<[u16; 2]>(ctx, at as usize) else {
        return failed(fragment) | if (fragment >> 16) as u16 == MORE { INCOMPLETE } else { 0 };
    };
    let behind = at + extension_bytes(round as u8, u32::from(header[0] >> 8));
    if round as u8 == FRAGMENT {
        let bits = u16::from_be(header[1]);
        // An atomic fragment (RFC 6946) is whole.
        fragment = found(0, bits >> 3 | (bits & 1) << 13, 0, at + IDENTIFICATION);
    }
    if (fragment >> 16) as u16 == MORE {
        // The IP header decides: the receiver trims a longer frame.
        let (field, before) = match is_ipv6(skb) {
            true => (offset_of!(Ipv6, payload_bytes), size_of::<Ipv6>() as u32),
            false => (IPV4_BYTES, 0),
        };
        let bytes = read::<u16>(ctx, start as usize + field).map_or(0, u16::from_be);
        if behind + FRAGMENT_UNIT > start + before + u32::from(bytes) {
            return failed(fragment) | INCOMPLETE;
        }
    }
    if behind > SEARCHED && (fragment >> 16) as u16 & OFFSET == 0 {
        return failed(fragment);
    }
    let round = fragment | found(header[0] as u8, 0, behind & TRANSPORT_MAX, 0);
    round | continues(round, is_ipv6(skb))
}

#[inline(always)]
fn failed(fragment: u64) -> u64 {
    // Never zero.
    fragment | found(UNKNOWN_TRANSPORT, 0, 1, 0)
}

/// Volatile, to save stack.
#[inline(always)]
fn is_ipv6(skb: *mut __sk_buff) -> bool {
    // SAFETY: the context.
    unsafe { core::ptr::read_volatile(&raw const (*skb).protocol) == PROTOCOL_IPV6 }
}

/// Parses the headers at offset `transport`. Bits of the result: source port; from 16, destination port; from 32,
/// [`Packet::kind`]; from 40, [`Packet::signals`]; [`IS_ERROR`]; from 56, the protocol; or [`CUT_SHORT`]. `what`: the
/// protocol and [`IS_LATER`].
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_transport(skb: *mut __sk_buff, transport: u32, what: u32) -> u64 {
    let (ctx, at, protocol) = (&TcContext::new(skb), (transport & TRANSPORT_MAX) as usize, what as u8);
    let told = |ports: u32, kind: u8, signals: u8, is_error: bool| {
        let error = if is_error { IS_ERROR } else { 0 };
        let protocol = u64::from(protocol) << PROTOCOL_SHIFT;
        u64::from(ports) | u64::from(kind) << 32 | u64::from(signals) << 40 | error | protocol
    };
    if what & IS_LATER != 0 {
        return told(0, echo_request(protocol), 0, false);
    }
    match protocol {
        TCP | UDP | SCTP => {
            let Some(ports) = read::<u32>(ctx, at) else { return CUT_SHORT };
            let signals = match protocol {
                TCP => read(ctx, at + TCP_FLAGS - 1).map_or(0, |[_, flags]: [u8; 2]| flags),
                SCTP => match read::<[u8; 2]>(ctx, at + SCTP_CHUNK) {
                    // INIT; ABORT, SHUTDOWN COMPLETE; SHUTDOWN, SHUTDOWN ACK.
                    Some([1, _]) => SIGNAL_SYN,
                    Some([6 | 14, _]) => SIGNAL_RST,
                    Some([7 | 8, _]) => SIGNAL_FIN,
                    _ => 0,
                },
                _ => 0,
            };
            told(ports, 0, signals, false)
        }
        ICMP | ICMPV6 => {
            let Some([head, _, identifier]) = read::<[u16; 3]>(ctx, at) else { return CUT_SHORT };
            let (kind, identifier) = (head as u8, u32::from(identifier));
            let is_error = if protocol == ICMP { matches!(kind, 3 | 4 | 5 | 11 | 12) } else { kind < 128 };
            told(if is_echo(protocol, kind) { identifier << 16 | identifier } else { 0 }, kind, 0, is_error)
        }
        _ => told(0, 0, 0, false),
    }
}

/// Identification (header byte order) and [`wharf_common::FragmentKey::protocol`].
#[inline(always)]
pub fn identification(ctx: &TcContext, at: u32) -> Option<(u32, u8)> {
    let at = (at & TRANSPORT_MAX) as usize;
    // SAFETY: the context.
    if unsafe { (*ctx.skb.skb).protocol } == PROTOCOL_IPV4 {
        let [identification, _, last] = read::<[u16; 3]>(ctx, at)?;
        return Some((identification.into(), (last >> 8) as u8));
    }
    Some((read(ctx, at)?, 0))
}

/// RFC 792, RFC 4443.
#[inline(always)]
pub fn echo_request(protocol: u8) -> u8 {
    if protocol == ICMPV6 { 128 } else { 8 }
}

#[inline(always)]
fn is_echo(protocol: u8, kind: u8) -> bool {
    match protocol {
        ICMP => matches!(kind, 0 | 8),
        _ => matches!(kind, 128 | 129),
    }
}

/// [`FlowKey`] with addresses as words.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Key {
    pub low: Ipv6Address,
    pub high: Ipv6Address,
    low_port: u16,
    high_port: u16,
    /// [`FlowKey::protocol`], [`FlowKey::kind`], [`FlowKey::upstream`], zero. One word: the compiler turns separately
    /// zeroed bytes into a call of a loop.
    kinds: u32,
}

/// In [`Key::kinds`].
const UPSTREAM: u32 = 1 << 16;

const _: () = {
    assert!(size_of::<Key>() == size_of::<FlowKey>());
    assert!(offset_of!(Key, low_port) == offset_of!(FlowKey, low_port));
    assert!(offset_of!(Key, kinds) == offset_of!(FlowKey, protocol));
    assert!(offset_of!(FlowKey, kind) == offset_of!(FlowKey, protocol) + 1);
    assert!(offset_of!(FlowKey, upstream) == offset_of!(FlowKey, protocol) + 2);
};

impl Key {
    #[inline(always)]
    pub fn protocol(&self) -> u8 {
        self.kinds as u8
    }

    /// Sum of both ends' `ADDRESS_GENERATIONS`.
    #[inline(always)]
    pub fn generation(&self) -> u32 {
        generation(self.low).unwrap_or(0).wrapping_add(generation(self.high).unwrap_or(0))
    }

    /// Switches between a client's flow and the proxy's in its name.
    #[inline(always)]
    pub fn switch_upstream(&mut self) {
        self.kinds ^= UPSTREAM;
    }

    /// Hides the numbers from the verifier ([`crate::flow::forget`]).
    #[inline(always)]
    pub fn forget_kinds(&mut self) {
        self.kinds = forget(self.kinds.into()) as u32;
    }

    #[inline(always)]
    pub fn as_shared(&self) -> &FlowKey {
        // SAFETY: same size and offsets (asserted above), greater alignment.
        unsafe { &*(&raw const *self).cast() }
    }
}
