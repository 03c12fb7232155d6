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
const IDENTIFICATION: usize = 4;
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
    /// Flags and offset of a fragment as IPv4 has them, host byte order; zero for a whole packet.
    place: u16,
    /// Identification of a fragment, as it stands in the header.
    pub identification: u32,
    /// Protocol of IPv4, zero for IPv6: what tells packets of one identification apart.
    pub identified_by: u8,
    /// Offset of what follows the IP headers.
    pub transport: usize,
}

impl Packet {
    /// The IP packet at `offset`, with its ports where it has them; `None` when it is cut short.
    #[inline(always)]
    pub fn at(ctx: &TcContext, offset: usize) -> Option<Self> {
        // SAFETY: the context the program was called with.
        let mut packet = match unsafe { (*ctx.skb.skb).protocol } {
            PROTOCOL_IPV4 => {
                let ip: Ipv4 = read(ctx, offset)?;
                let (source, destination) = (Ipv6Address::mapped(ip.source), Ipv6Address::mapped(ip.destination));
                let mut packet = Self::new(source, destination, ip.protocol, offset + ip.header_bytes());
                packet.place = ip.fragment() & (MORE | OFFSET);
                packet.identification = u32::from(ip.identification);
                packet.identified_by = ip.protocol;
                packet
            }
            PROTOCOL_IPV6 => {
                let ip: Ipv6 = read(ctx, offset)?;
                let mut packet = Self::new(ip.source, ip.destination, ip.next_header, offset + size_of::<Ipv6>());
                if matches!(packet.protocol, HOP_BY_HOP | ROUTING | DESTINATION | FRAGMENT) {
                    // SAFETY: the context the program was called with.
                    let found =
                        unsafe { wharf_extensions(ctx.skb.skb, packet.transport as u32, packet.protocol.into()) };
                    // The compiler knows what the function may return and would leave masks out, without which the verifier, which does
                    // not know it, refuses the offsets.
                    let found = core::hint::black_box(found);
                    if found == 0 {
                        return None;
                    }
                    packet.protocol = found as u8;
                    packet.place = (found >> 16) as u16;
                    packet.transport = (found >> 32 & u64::from(TRANSPORT_MAX)) as usize;
                    if packet.place != 0 {
                        let header = (found >> 48 & u64::from(TRANSPORT_MAX)) as usize;
                        packet.identification = read(ctx, header + IDENTIFICATION)?;
                    }
                }
                packet
            }
            _ => return None,
        };
        if packet.place & OFFSET != 0 {
            return Some(packet);
        }
        match packet.protocol {
            TCP | UDP | SCTP => [packet.source_port, packet.destination_port] = read(ctx, packet.transport)?,
            ICMP | ICMPV6 => {
                let [head, _, identifier]: [u16; 3] = read(ctx, packet.transport)?;
                packet.kind = head as u8;
                if is_echo(packet.protocol, head as u8) {
                    (packet.source_port, packet.destination_port) = (identifier, identifier);
                }
            }
            _ => {}
        }
        Some(packet)
    }

    /// The packet at hand, of which protocol and ports ([`Packet::ports`]) are known.
    #[inline(always)]
    pub fn with(ctx: &TcContext, ports: u32, protocol: u8) -> Option<Self> {
        let mut packet = Self::new(address(ctx, true)?, address(ctx, false)?, protocol, 0);
        (packet.source_port, packet.destination_port) = (ports as u16, (ports >> 16) as u16);
        Some(packet)
    }

    /// Source port, from bit 16 on the destination port.
    #[inline(always)]
    pub fn ports(&self) -> u32 {
        u32::from(self.source_port) | u32::from(self.destination_port) << 16
    }

    #[inline(always)]
    fn new(source: Ipv6Address, destination: Ipv6Address, protocol: u8, transport: usize) -> Self {
        let (source_port, destination_port, place, identification, identified_by) = (0, 0, 0, 0, 0);
        Self {
            source,
            destination,
            source_port,
            destination_port,
            protocol,
            kind: echo_request(protocol),
            place,
            identification,
            identified_by,
            transport,
        }
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

    /// An ICMP message about another packet (RFC 792, RFC 4443).
    #[inline(always)]
    pub fn is_error(&self, ctx: &TcContext) -> bool {
        if !matches!(self.protocol, ICMP | ICMPV6) || self.is_later_fragment() {
            return false;
        }
        let Some([kind, _]) = read::<[u8; 2]>(ctx, self.transport) else { return false };
        match self.protocol {
            ICMP => matches!(kind, 3 | 4 | 5 | 11 | 12),
            _ => kind < 128,
        }
    }

    /// `SIGNAL_*` bits.
    #[inline(always)]
    pub fn signals(&self, ctx: &TcContext) -> u8 {
        if self.is_later_fragment() {
            return 0;
        }
        match self.protocol {
            TCP => read(ctx, self.transport + TCP_FLAGS - 1).map_or(0, |[_, flags]: [u8; 2]| flags),
            SCTP => match read::<[u8; 2]>(ctx, self.transport + SCTP_CHUNK) {
                // INIT; ABORT, SHUTDOWN COMPLETE; SHUTDOWN, SHUTDOWN ACK.
                Some([1, _]) => SIGNAL_SYN,
                Some([6 | 14, _]) => SIGNAL_RST,
                Some([7 | 8, _]) => SIGNAL_FIN,
                _ => 0,
            },
            _ => 0,
        }
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
    // SAFETY: the context the program was called with.
    if unsafe { (*ctx.skb.skb).protocol } == PROTOCOL_IPV4 {
        let place = if source { offset_of!(Ipv4, source) } else { offset_of!(Ipv4, destination) };
        return Some(Ipv6Address::mapped(read(ctx, ETHERNET_BYTES + place)?));
    }
    let place = if source { offset_of!(Ipv6, source) } else { offset_of!(Ipv6, destination) };
    read(ctx, ETHERNET_BYTES + place)
}

/// Headers that are looked behind. A packet may have each kind once, one of them twice (RFC 8200, 4.1).
const EXTENSIONS: u32 = 5;
/// Mask of the offset of what follows them: a packet that has more in front of it shows no ports.
const TRANSPORT_MAX: u32 = 0x3ff;

/// What follows the extension headers that begin at `offset` with the kind `next`: its protocol, from bit 16 on flags and offset of a
/// fragment as IPv4 has them, from bit 32 on its offset, from bit 48 on that of the fragment header. Zero for a packet that is cut short. A packet with more headers, or
/// longer ones, is one of the protocol of the header where the search ends.
///
/// Its name is exported and it takes but the context and numbers, so that the verifier looks at it once.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_extensions(skb: *mut __sk_buff, offset: u32, next: u32) -> u64 {
    let ctx = &TcContext::new(skb);
    let (mut next, mut offset, mut place, mut fragment) = (next as u8, offset, 0_u16, 0);
    for _ in 0..EXTENSIONS {
        offset &= TRANSPORT_MAX;
        let Some(header) = read::<[u16; 4]>(ctx, offset as usize) else { return 0 };
        let (kind, length) = (header[0] as u8, u32::from(header[0] >> 8));
        match next {
            HOP_BY_HOP | ROUTING | DESTINATION if offset + 8 * (length + 1) <= TRANSPORT_MAX => {
                offset += 8 * (length + 1)
            }
            FRAGMENT if offset + 8 <= TRANSPORT_MAX => {
                let bits = u16::from_be(header[1]);
                // An "atomic" fragment (RFC 6946) is a whole packet.
                (place, fragment) = (bits >> 3 | (bits & 1) << 13, offset);
                offset += 8;
            }
            _ => break,
        }
        next = kind;
        // What follows in a later fragment is not a header.
        if place & OFFSET != 0 || !matches!(next, HOP_BY_HOP | ROUTING | DESTINATION | FRAGMENT) {
            break;
        }
    }
    u64::from(next) | u64::from(place) << 16 | u64::from(offset) << 32 | u64::from(fragment) << 48
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
