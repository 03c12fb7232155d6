//! A packet as its flow sees it: addresses, protocol, ports, what it signals, and whether it is a fragment.

use core::mem::{offset_of, size_of};

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use wharf_common::{
    FlowKey,
    flow::{ICMP, ICMPV6, SCTP, SIGNAL_FIN, SIGNAL_RST, SIGNAL_SYN, TCP, UDP},
};
use wharf_ebpf::parse::{ETHERNET_BYTES, Ipv4, Ipv6, Ipv6Address, PROTOCOL_IPV4, PROTOCOL_IPV6, read};

/// Extension headers of IPv6 that may come before the fragment header (RFC 8200, 4.1).
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const DESTINATION: u8 = 60;
/// IPv6's fragment header (RFC 8200, 4.5).
const FRAGMENT: u8 = 44;
/// Place of the identification in it.
const IDENTIFICATION: u32 = 4;
/// More fragments follow; the offset is below (RFC 791, 3.1).
const MORE: u16 = 0x2000;
const OFFSET: u16 = 0x1fff;
/// Place of the flags in TCP's header.
const TCP_FLAGS: usize = 13;
/// Place of the first chunk's type in SCTP's packet (RFC 9260, 3).
const SCTP_CHUNK: usize = 12;

/// The packet. Ports are in network byte order, and zero where there are none.
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
}

impl Packet {
    /// The IP packet at `offset`, with its ports where it has them; `None` when it is cut short.
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
        let (protocol, place, transport) = (found as u8, (found >> 16) as u16, (found >> 32) as u32 & TRANSPORT_MAX);
        let is_later = if place & OFFSET != 0 { IS_LATER } else { 0 };
        // SAFETY: as above.
        let behind = unsafe { wharf_transport(ctx.skb.skb, transport, u32::from(protocol) | is_later) };
        let behind = core::hint::black_box(behind);
        if behind == CUT_SHORT {
            return None;
        }
        Some(Self {
            source: address_at(ctx, offset, true)?,
            destination: address_at(ctx, offset, false)?,
            source_port: behind as u16,
            destination_port: (behind >> 16) as u16,
            protocol,
            kind: (behind >> 32) as u8,
            signals: (behind >> 40) as u8,
            is_error: behind & IS_ERROR != 0,
            place,
            identification_at: (found >> 48) as u32 & TRANSPORT_MAX,
            transport: transport as usize,
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
        })
    }

    /// Source port, from bit 16 on the destination port.
    #[inline(always)]
    pub fn ports(&self) -> u32 {
        u32::from(self.source_port) | u32::from(self.destination_port) << 16
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

/// Headers that are looked behind. A packet may have each kind once, one of them twice (RFC 8200, 4.1).
const EXTENSIONS: u32 = 5;
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
/// What [`wharf_transport`] answers about a packet that is cut short.
const CUT_SHORT: u64 = u64::MAX;

/// The IP headers of the packet at `offset`: the protocol of what follows them, from bit 16 on flags and offset of a fragment as IPv4 has
/// them, from bit 32 on the offset of what follows, from bit 48 on that of a fragment's identification. Zero for a packet that is cut short. An IPv6
/// packet with more than [`EXTENSIONS`] headers, or longer ones, is one of the protocol of the header where the search ends.
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
    let told = |protocol: u8, place: u16, transport: u32, identification: u32| {
        u64::from(protocol) | u64::from(place) << 16 | u64::from(transport) << 32 | u64::from(identification) << 48
    };
    // SAFETY: the context the program was called with.
    match unsafe { (*skb).protocol } {
        PROTOCOL_IPV4 => {
            let Some(ip) = read::<Ipv4>(ctx, start as usize) else { return 0 };
            let identification = start + offset_of!(Ipv4, identification) as u32;
            told(ip.protocol, ip.fragment() & (MORE | OFFSET), start + ip.header_bytes() as u32, identification)
        }
        PROTOCOL_IPV6 => {
            let at = start as usize + offset_of!(Ipv6, next_header);
            let Some([first, _]) = read::<[u8; 2]>(ctx, at) else { return 0 };
            let (mut next, mut offset, mut place, mut fragment) = (first, start + size_of::<Ipv6>() as u32, 0_u16, 0);
            for _ in 0..EXTENSIONS {
                // What follows in a later fragment is not a header.
                if place & OFFSET != 0 || !matches!(next, HOP_BY_HOP | ROUTING | DESTINATION | FRAGMENT) {
                    break;
                }
                offset &= TRANSPORT_MAX; // it is less: for the verifier
                let Some(header) = read::<[u16; 4]>(ctx, offset as usize) else { return 0 };
                let (kind, length) = (header[0] as u8, u32::from(header[0] >> 8));
                if next == FRAGMENT {
                    let bits = u16::from_be(header[1]);
                    // An "atomic" fragment (RFC 6946) is a whole packet.
                    (place, fragment) = (bits >> 3 | (bits & 1) << 13, offset + IDENTIFICATION);
                    offset += 8;
                } else {
                    offset += 8 * (length + 1);
                }
                if offset > SEARCHED {
                    break;
                }
                next = kind;
            }
            told(next, place, offset & TRANSPORT_MAX, fragment)
        }
        _ => 0,
    }
}

/// What the headers behind those of IP say, at the offset `transport`: source port, from bit 16 on the destination port, from bit 32 on
/// [`Packet::kind`], from bit 40 on [`Packet::signals`], [`IS_ERROR`]; or [`CUT_SHORT`]. `what`: the protocol, and [`IS_LATER`].
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
        u64::from(ports) | u64::from(kind) << 32 | u64::from(signals) << 40 | error
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

/// Identification of a fragment of the packet at hand, as it stands in the header at `at`, and beside it [`wharf_common::FragmentKey::protocol`].
#[inline(always)]
pub fn identification(ctx: &TcContext, at: u32, protocol: u8) -> Option<(u32, u8)> {
    let at = (at & TRANSPORT_MAX) as usize;
    // SAFETY: the context the program was called with.
    if unsafe { (*ctx.skb.skb).protocol } == PROTOCOL_IPV4 {
        return Some((read::<u16>(ctx, at)?.into(), protocol));
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
