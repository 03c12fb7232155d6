//! A packet as its flow sees it: addresses, protocol, ports, what it signals, and whether it is a fragment.

use core::mem::{offset_of, size_of};

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use wharf_common::{
    FlowKey,
    flow::{ICMP, ICMPV6, SCTP, SIGNAL_FIN, SIGNAL_RST, SIGNAL_SYN, TCP, UDP, UNKNOWN_TRANSPORT},
};
use wharf_ebpf::parse::{ETHERNET_BYTES, Ipv4, Ipv6, Ipv6Address, PROTOCOL_IPV4, PROTOCOL_IPV6, read};

/// IPv6's fragment header (RFC 8200, 4.5).
pub const FRAGMENT: u8 = 44;
/// Place of the identification in it.
const IDENTIFICATION: u32 = 4;
/// The authentication header (RFC 4302), of both families.
const AUTHENTICATION: u8 = 51;
/// Bit by number: the other extension headers of IPv6 below 64, which are hop-by-hop options, routing and destination
/// options (RFC 8200, 4).
const LOW_EXTENSIONS: u64 = 1 << 0 | 1 << 43 | 1 << 60 | 1 << FRAGMENT;
/// Mobility (RFC 6275), HIP (RFC 7401) and Shim6 (RFC 5533), each in the form of RFC 6564.
const MOBILITY: u8 = 135;
const HIP: u8 = 139;
const SHIM6: u8 = 140;
/// More fragments follow; the offset is below (RFC 791, 3.1).
const MORE: u16 = 0x2000;
const OFFSET: u16 = 0x1fff;
/// Place of the packet's bytes in IPv4's header.
const IPV4_BYTES: usize = 2;
/// Place of the flags in TCP's header.
const TCP_FLAGS: usize = 13;
/// Place of the first chunk's type in SCTP's packet (RFC 9260, 3).
const SCTP_CHUNK: usize = 12;

/// The packet. Ports are in network byte order, and zero where there are none. A packet whose transport header is not
/// found is one of the protocol [`UNKNOWN_TRANSPORT`].
pub struct Packet {
    pub source: Ipv6Address,
    pub destination: Ipv6Address,
    pub source_port: u16,
    pub destination_port: u16,
    pub protocol: u8,
    /// Type of ICMP and ICMPv6; where it cannot be seen, that of an echo request.
    pub kind: u8,
    /// `SIGNAL_*` bits.
    pub signals: u8,
    /// An ICMP message about another packet (RFC 792, RFC 4443).
    pub is_error: bool,
    /// Flags and offset of a fragment as IPv4 has them, host byte order; zero for a whole packet.
    place: u16,
    /// Offset of the identification of a fragment.
    pub identification_at: u32,
    /// Offset of what follows the IP headers.
    pub transport: usize,
    is_incomplete: bool,
}

impl Packet {
    /// The IP packet at `offset`, with its ports where it has them; `None` when its IP header is cut short.
    ///
    /// What the headers say comes from global functions, so that to the verifier all packets are one.
    #[inline(always)]
    pub fn at(ctx: &TcContext, offset: usize) -> Option<Self> {
        // SAFETY: the context the program was called with.
        let found = unsafe { wharf_headers(ctx.skb.skb, offset as u32) };
        // The compiler knows what the functions may return and would leave masks out, without which the verifier, which does not know
        // it, refuses the offsets.
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

    /// The packet at hand, of which protocol and ports ([`Packet::ports`]) are known.
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

    /// Source port, from bit 16 on the destination port.
    #[inline(always)]
    pub fn ports(&self) -> u32 {
        u32::from(self.source_port) | u32::from(self.destination_port) << 16
    }

    /// The first fragment of a packet, which does not hold all of its headers: RFC 7112, 5 lets it be dropped.
    #[inline(always)]
    pub fn is_incomplete(&self) -> bool {
        self.is_incomplete
    }

    /// One of several fragments.
    #[inline(always)]
    pub fn is_fragment(&self) -> bool {
        self.place != 0
    }

    /// A fragment after the first, without a transport header.
    #[inline(always)]
    pub fn is_later_fragment(&self) -> bool {
        self.place & OFFSET != 0
    }

    /// The type of the ICMP request that the packet is, or answers to; zero for an echo and for other protocols.
    #[inline(always)]
    fn asked(&self) -> u8 {
        match (self.protocol, self.kind) {
            // Answers about time, information and masks (RFC 792, RFC 950); node information (RFC 4620).
            (ICMP, 14 | 16 | 18) | (ICMPV6, 140) => self.kind - 1,
            (ICMP | ICMPV6, kind) if !is_echo(self.protocol, kind) => kind,
            _ => 0,
        }
    }

    /// The packet's flow, and whether the high end sent the packet.
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

/// Source or destination of the packet at hand.
#[inline(always)]
pub fn address(ctx: &TcContext, source: bool) -> Option<Ipv6Address> {
    address_at(ctx, ETHERNET_BYTES, source)
}

/// Source or destination of the packet at `offset`, which is one of the protocol of the packet at hand.
#[inline(always)]
fn address_at(ctx: &TcContext, offset: usize, source: bool) -> Option<Ipv6Address> {
    // SAFETY: the context the program was called with.
    if unsafe { (*ctx.skb.skb).protocol } == PROTOCOL_IPV4 {
        let place = if source { offset_of!(Ipv4, source) } else { offset_of!(Ipv4, destination) };
        return Some(Ipv6Address::mapped(read(ctx, offset + place)?));
    }
    let place = if source { offset_of!(Ipv6, source) } else { offset_of!(Ipv6, destination) };
    read(ctx, offset + place)
}

/// Extension headers that are looked behind: as many as RFC 8200, 4.1 recommends at most in front of a transport
/// header.
pub const EXTENSIONS: u32 = 6;

/// An extension header, which tells the number of the header after it.
#[inline(always)]
pub fn is_extension(next: u8, ipv6: bool) -> bool {
    let is_low = next < 64 && LOW_EXTENSIONS >> next & 1 != 0;
    next == AUTHENTICATION || ipv6 && (is_low || matches!(next, MOBILITY | HIP | SHIM6))
}

/// Bytes of an extension header whose second byte is `length`.
#[inline(always)]
pub fn extension_bytes(next: u8, length: u32) -> u32 {
    match next {
        FRAGMENT => 8,
        AUTHENTICATION => 4 * (length + 2),
        _ => 8 * (length + 1),
    }
}

/// Offset behind which no header is looked for: a packet that has more in front of it shows no ports.
const SEARCHED: u32 = 0x7f0;
/// Mask of the offset of a packet, which may be one that an ICMP error is about, 8 bytes behind what follows the IP headers.
pub const PACKET_MAX: u32 = 0x7ff;
/// Mask of the offset of what follows the IP headers.
const TRANSPORT_MAX: u32 = 0xfff;
/// In what [`wharf_transport`] is asked: a fragment after the first.
const IS_LATER: u32 = 1 << 8;
/// In what [`wharf_transport`] answers: [`Packet::is_error`].
const IS_ERROR: u64 = 1 << 48;
/// Place of the protocol in what [`wharf_transport`] answers.
const PROTOCOL_SHIFT: u32 = 56;
/// What [`wharf_transport`] answers about a packet that is cut short: one of the protocol [`UNKNOWN_TRANSPORT`].
const CUT_SHORT: u64 = (UNKNOWN_TRANSPORT as u64) << PROTOCOL_SHIFT;

/// In what [`wharf_headers`] answers: [`Packet::is_incomplete`].
const INCOMPLETE: u64 = 1 << 8;
/// Bytes that the first fragment of a packet holds at least behind its headers: the lengths of fragments are multiples
/// of it (RFC 8200, 4.5).
const FRAGMENT_UNIT: u32 = 8;

/// The IP headers of the packet at `offset`: the protocol of what follows them, [`INCOMPLETE`], from bit 16 on flags
/// and offset of a fragment as IPv4 has them, from bit 32 on the offset of what follows, from bit 48 on that of a
/// fragment's identification. Zero for a packet whose IP header is cut short. A packet with more than [`EXTENSIONS`]
/// headers, longer ones, or fewer bytes than they say is one of the protocol [`UNKNOWN_TRANSPORT`].
///
/// Its name is exported and it takes but the context and numbers, so that the verifier looks at it once.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_headers(skb: *mut __sk_buff, offset: u32) -> u64 {
    let (ctx, start) = (&TcContext::new(skb), offset & PACKET_MAX);
    let ipv6 = is_ipv6(skb);
    let mut round = if ipv6 {
        let Some([next, _]) = read::<[u8; 2]>(ctx, start as usize + offset_of!(Ipv6, next_header)) else { return 0 };
        found(next, 0, start + size_of::<Ipv6>() as u32, 0)
    } else {
        // Version and words of the header, bytes of the packet, identification, flags and offset, TTL and protocol.
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
        // SAFETY: the context the program was called with.
        round = unsafe { wharf_extension(skb, start, round) };
    }
    if round & CONTINUES == 0 { round } else { round & !0xff | u64::from(UNKNOWN_TRANSPORT) }
}

/// In what [`wharf_extension`] answers: an extension header follows, and can be looked behind.
const CONTINUES: u64 = 1 << 9;

/// [`CONTINUES`] where it belongs into this answer. What follows in a later fragment is not a header.
#[inline(always)]
fn continues(round: u64, ipv6: bool) -> u64 {
    let ends = round & (u64::from(OFFSET) << 16 | INCOMPLETE) != 0;
    if !ends && is_extension(round as u8, ipv6) { CONTINUES } else { 0 }
}

/// What [`wharf_headers`] answers.
#[inline(always)]
fn found(protocol: u8, place: u16, at: u32, identified: u32) -> u64 {
    u64::from(protocol) | u64::from(place) << 16 | u64::from(at) << 32 | u64::from(identified) << 48
}

/// What [`wharf_headers`] answers about the packet at `offset` behind the extension header that `round`, an answer with
/// [`CONTINUES`], ends before.
///
/// Its name is exported and it takes but the context and numbers, so that the verifier looks at it once.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_extension(skb: *mut __sk_buff, offset: u32, round: u64) -> u64 {
    let (ctx, start) = (&TcContext::new(skb), offset & PACKET_MAX);
    let at = (round >> 32) as u32 & TRANSPORT_MAX;
    // Place and identification as they stand in the answer, because numbers of their own take stack that is not there.
    let mut fragment = round & (0xffff << 16 | 0xffff << 48);
    let Some(header) = read::<[u16; 2]>(ctx, at as usize) else {
        return failed(fragment) | if (fragment >> 16) as u16 == MORE { INCOMPLETE } else { 0 };
    };
    let behind = at + extension_bytes(round as u8, u32::from(header[0] >> 8));
    if round as u8 == FRAGMENT {
        let bits = u16::from_be(header[1]);
        // An "atomic" fragment (RFC 6946) is a whole packet.
        fragment = found(0, bits >> 3 | (bits & 1) << 13, 0, at + IDENTIFICATION);
    }
    if (fragment >> 16) as u16 == MORE {
        // The end by the packet's own header. A frame may have more bytes, which the receiver takes off.
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

/// What [`wharf_extension`] answers about a packet, perhaps a fragment, whose next header cannot be read.
#[inline(always)]
fn failed(fragment: u64) -> u64 {
    // An answer is not zero.
    fragment | found(UNKNOWN_TRANSPORT, 0, 1, 0)
}

/// The packet at hand is one of IPv6. Read again each time, rather than kept on the stack.
#[inline(always)]
fn is_ipv6(skb: *mut __sk_buff) -> bool {
    // SAFETY: the context the program was called with.
    unsafe { core::ptr::read_volatile(&raw const (*skb).protocol) == PROTOCOL_IPV6 }
}

/// What the headers behind those of IP say, at the offset `transport`: source port, from bit 16 on the destination
/// port, from bit 32 on [`Packet::kind`], from bit 40 on [`Packet::signals`], [`IS_ERROR`], from bit 56 on the
/// protocol; or [`CUT_SHORT`]. `what`: the protocol, and [`IS_LATER`].
///
/// Its name is exported and it takes but the context and numbers, so that the verifier looks at it once.
///
/// # Safety
///
/// `skb` is the context of the running program.
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

/// Identification of a fragment of the packet at hand, as it stands in the header at `at`, and
/// [`wharf_common::FragmentKey::protocol`].
#[inline(always)]
pub fn identification(ctx: &TcContext, at: u32) -> Option<(u32, u8)> {
    let at = (at & TRANSPORT_MAX) as usize;
    // SAFETY: the context the program was called with.
    if unsafe { (*ctx.skb.skb).protocol } == PROTOCOL_IPV4 {
        // Identification, flags and offset, then TTL and protocol.
        let [identification, _, last] = read::<[u16; 3]>(ctx, at)?;
        return Some((identification.into(), (last >> 8) as u8));
    }
    Some((read(ctx, at)?, 0))
}

/// The type of an echo request (RFC 792, RFC 4443).
#[inline(always)]
pub fn echo_request(protocol: u8) -> u8 {
    if protocol == ICMPV6 { 128 } else { 8 }
}

/// A request or an answer of ICMP's echo.
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
    low: Ipv6Address,
    high: Ipv6Address,
    low_port: u16,
    high_port: u16,
    /// [`FlowKey::protocol`] and [`FlowKey::kind`] with the zeros after them: bytes that are zeroed on their own are a call of a
    /// function that loops.
    kinds: u32,
}

const _: () = {
    assert!(size_of::<Key>() == size_of::<FlowKey>());
    assert!(offset_of!(Key, low_port) == offset_of!(FlowKey, low_port));
    assert!(offset_of!(Key, kinds) == offset_of!(FlowKey, protocol));
    assert!(offset_of!(FlowKey, kind) == offset_of!(FlowKey, protocol) + 1);
};

impl Key {
    #[inline(always)]
    pub fn protocol(&self) -> u8 {
        self.kinds as u8
    }

    #[inline(always)]
    pub fn as_shared(&self) -> &FlowKey {
        // SAFETY: same size and places (asserted above), and the words' alignment is greater.
        unsafe { &*(&raw const *self).cast() }
    }
}
