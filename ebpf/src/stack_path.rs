//! Which packets between two endpoints take the node's stack, and not the direct way.
//!
//! A rule of the node's may translate what an endpoint sends (DNAT to a service's backend) so that it reaches another
//! endpoint of the same node. Only the stack can translate the replies back, so **replies take the way that the flow came**:
//! the receiver's `to_container` notes in `STACK_PATHS` which service of it (protocol and port) the sender reached through
//! the stack, and `from_container` of both asks there. All flows of that pair to that port take the stack from then on, also
//! those that no rule translates: the node's connection tracking then knows every flow that could have the same addresses and
//! ports.
//!
//! Fragments of TCP, UDP and SCTP follow the pair's row with port 0, because only the first has ports. An ICMP error follows
//! the packet that it is about.

use core::mem::{offset_of, size_of};

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use wharf_common::{EndpointKey, EndpointRow, StackPathKey, StackPathRow, map::STACK_PATH_PORTS};

use crate::{
    config::{self, Config},
    maps::{ENDPOINTS, STACK_PATHS, STACK_USERS},
    parse::{ETHERNET_BYTES, ICMPV6, Ipv4, Ipv6, Ipv6Address},
    test_packet,
};

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;
/// Extension headers of IPv6 that may come before the fragment header (RFC 8200, 4.1).
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const DESTINATION: u8 = 60;
/// IPv6's fragment header (RFC 8200, 4.5).
const FRAGMENT: u8 = 44;
/// Bytes of an ICMP error before the packet that it is about (RFC 792, RFC 4443).
const ICMP_ERROR_BYTES: usize = 8;
/// `ETH_P_IP` and `ETH_P_IPV6` as `__sk_buff.protocol` has them: network byte order.
const PROTOCOL_IPV4: u32 = 0x0800_u16.to_be() as u32;
const PROTOCOL_IPV6: u32 = 0x86dd_u16.to_be() as u32;

/// [`StackPathKey`] with addresses as words.
#[repr(C)]
#[derive(Clone, Copy)]
struct Key {
    client: Ipv6Address,
    server: Ipv6Address,
    port: u16,
    protocol: u8,
    pad: [u8; 5],
}

const _: () = {
    assert!(size_of::<Key>() == size_of::<StackPathKey>());
    assert!(offset_of!(Key, port) == offset_of!(StackPathKey, port));
    assert!(offset_of!(Key, protocol) == offset_of!(StackPathKey, protocol));
};

impl Key {
    #[inline(always)]
    fn as_shared(&self) -> &StackPathKey {
        // SAFETY: same size and places (asserted above), and the words' alignment is greater.
        unsafe { &*(&raw const *self).cast() }
    }

    /// The row, where it is of the endpoints that have these epochs.
    #[inline(always)]
    fn row(&self, client_epoch: u64, server_epoch: u64) -> Option<&'static StackPathRow> {
        // SAFETY: the row may become another's while it is read. Epochs never repeat, so another's row does not match.
        let row = unsafe { STACK_PATHS.get(self.as_shared()) }?;
        (row.client_epoch == client_epoch && row.server_epoch == server_epoch).then_some(row)
    }

    /// True when the path is noted for the endpoints that have these epochs: its port, or every port of the pair.
    #[inline(always)]
    fn is_noted(mut self, client_epoch: u64, server_epoch: u64) -> bool {
        if self.row(client_epoch, server_epoch).is_some() {
            return true;
        }
        self.port = 0;
        self.row(client_epoch, server_epoch).is_some_and(|pair| pair.ports >= STACK_PATH_PORTS)
    }
}

/// Addresses and ports of a packet. Ports are in network byte order, and zero where there are none.
struct Flow {
    source: Ipv6Address,
    destination: Ipv6Address,
    source_port: u16,
    destination_port: u16,
    protocol: u8,
    /// Offset of what follows the IP headers.
    transport: usize,
    /// The first fragment, or a later one.
    fragment: bool,
}

impl Flow {
    /// The IP packet at `offset`; `None` when it is cut short. One extension header is looked behind, and a fragment header
    /// after it; more hide the ports.
    #[inline(always)]
    fn at(ctx: &TcContext, offset: usize) -> Option<Self> {
        // SAFETY: the context the program was called with.
        let (mut flow, place) = match unsafe { (*ctx.skb.skb).protocol } {
            PROTOCOL_IPV4 => {
                let ip: Ipv4 = ctx.load(offset).ok()?;
                let (source, destination) = (Ipv6Address::mapped(ip.source), Ipv6Address::mapped(ip.destination));
                (Self::new(source, destination, ip.protocol, offset + ip.header_bytes()), ip.fragment())
            }
            PROTOCOL_IPV6 => {
                let ip: Ipv6 = ctx.load(offset).ok()?;
                let mut flow = Self::new(ip.source, ip.destination, ip.next_header, offset + size_of::<Ipv6>());
                let mut place = 0;
                if matches!(flow.protocol, HOP_BY_HOP | ROUTING | DESTINATION) {
                    let [next, words]: [u8; 2] = ctx.load(flow.transport).ok()?;
                    flow.protocol = next;
                    flow.transport += 8 * (usize::from(words) + 1);
                }
                if flow.protocol == FRAGMENT {
                    let [next, bits, _, _]: [u16; 4] = ctx.load(flow.transport).ok()?;
                    flow.protocol = next as u8;
                    flow.transport += 8;
                    // As IPv4 has it. An "atomic" fragment (RFC 6946) is a whole packet.
                    place = u16::from_be(bits) >> 3 | (u16::from_be(bits) & 1) << 13;
                }
                (flow, place)
            }
            _ => return None,
        };
        flow.fragment = place & 0x3fff != 0;
        if place & 0x1fff == 0 && matches!(flow.protocol, TCP | UDP | SCTP) {
            [flow.source_port, flow.destination_port] = ctx.load(flow.transport).ok()?;
        }
        Some(flow)
    }

    #[inline(always)]
    fn new(source: Ipv6Address, destination: Ipv6Address, protocol: u8, transport: usize) -> Self {
        Self { source, destination, source_port: 0, destination_port: 0, protocol, transport, fragment: false }
    }

    /// An ICMP message about another packet (RFC 792, RFC 4443).
    #[inline(always)]
    fn is_error(&self, ctx: &TcContext) -> bool {
        let Ok(kind) = ctx.load::<u8>(self.transport) else { return false };
        match self.protocol {
            ICMP => matches!(kind, 3 | 4 | 5 | 11 | 12),
            ICMPV6 => kind < 128,
            _ => false,
        }
    }

    /// The path whose client sent this packet, or, with `reply`, whose server did.
    #[inline(always)]
    fn path(&self, reply: bool) -> Key {
        let (client, server, port) = if reply {
            (self.destination, self.source, self.source_port)
        } else {
            (self.source, self.destination, self.destination_port)
        };
        Key { client, server, port, protocol: self.protocol, pad: [0; 5] }
    }
}

/// The row of the local endpoint that has this address.
#[inline(always)]
pub fn endpoint(address: Ipv6Address) -> Option<&'static EndpointRow> {
    // SAFETY: same size, and a byte array asks for no alignment.
    let key = unsafe { &*(&raw const address).cast::<EndpointKey>() };
    // SAFETY: rows are freed after an RCU grace period, so the row outlives this run; user space replaces rows whole.
    unsafe { ENDPOINTS.get(key) }
}

/// True when this endpoint has paths at all. A test packet takes the direct way, which is what the desired state says.
#[inline(always)]
pub fn may_be_taken(ctx: &TcContext, config: Config) -> bool {
    let epoch = STACK_USERS.get(config::endpoint_id());
    epoch.is_some_and(|epoch| *epoch == config.epoch()) && !test_packet::is_test(ctx)
}

/// True when the packet, which this endpoint sends to another one of the node, belongs to a flow that takes the stack.
#[inline(always)]
pub fn is_taken(ctx: &TcContext) -> bool {
    // SAFETY: the context the program was called with.
    let find = |offset| unsafe { wharf_stack_path_find(ctx.skb.skb, offset) };
    match find(ETHERNET_BYTES as u32) {
        NO => false,
        YES => true,
        inner => find(inner) == YES,
    }
}

const NO: u32 = 0;
const YES: u32 = 1;

/// Whether the IP packet at `offset` takes the stack, or, for an ICMP error, the offset of the packet that it is about.
///
/// Its name is exported and it takes but the context and a number, so that the verifier takes it for a global function
/// and looks at it once.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_stack_path_find(skb: *mut __sk_buff, offset: u32) -> u32 {
    find(&TcContext::new(skb), offset as usize).unwrap_or(NO)
}

#[inline(always)]
fn find(ctx: &TcContext, offset: usize) -> Option<u32> {
    let mut flow = Flow::at(ctx, offset)?;
    if flow.is_error(ctx) {
        return Some((flow.transport + ICMP_ERROR_BYTES) as u32);
    }
    if flow.fragment {
        (flow.source_port, flow.destination_port) = (0, 0);
    }
    let (sender, receiver) = (endpoint(flow.source)?.epoch, endpoint(flow.destination)?.epoch);
    let is_noted = flow.path(false).is_noted(sender, receiver) || flow.path(true).is_noted(receiver, sender);
    Some(if is_noted { YES } else { NO })
}

/// Notes the path of a packet that another endpoint of the node sent and the stack brought to this one.
#[inline(always)]
pub fn note(ctx: &TcContext) {
    // SAFETY: the context the program was called with.
    let from_link = unsafe { (*ctx.skb.skb).ingress_ifindex != 0 };
    // What the node itself sent came in by no link.
    if from_link && !test_packet::is_test(ctx) {
        // SAFETY: as above.
        unsafe { wharf_stack_path_note(ctx.skb.skb) };
    }
}

/// [`note`] as a global function; returns 1 when a path was noted.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_stack_path_note(skb: *mut __sk_buff) -> u32 {
    u32::from(add(&TcContext::new(skb)).is_some())
}

#[inline(always)]
fn add(ctx: &TcContext) -> Option<()> {
    let config = Config::load()?;
    let flow = Flow::at(ctx, ETHERNET_BYTES)?;
    let sender = endpoint(flow.source)?;
    // SAFETY: the context the program was called with.
    let came_by = unsafe { (*ctx.skb.skb).ingress_ifindex };
    if config.local_by_stack() || sender.ifindex != came_by {
        return None;
    }
    let (client_epoch, server_epoch) = (sender.epoch, config.epoch());
    if flow.path(false).is_noted(client_epoch, server_epoch) || flow.path(true).is_noted(server_epoch, client_epoch) {
        return None;
    }
    let mut row = StackPathRow { client_epoch, server_epoch, ports: 0, _pad: 0 };
    let mut path = flow.path(false);
    // Without room (the map evicts, so only without memory) the flow's replies take the direct way, as before.
    let _ = STACK_PATHS.insert(path.as_shared(), row, 0);
    if path.port != 0 {
        path.port = 0;
        row.ports = path.row(client_epoch, server_epoch).map_or(0, |pair| pair.ports) + 1;
        let _ = STACK_PATHS.insert(path.as_shared(), row, 0);
    }
    // After the rows: who reads the epoch finds them.
    let _ = STACK_USERS.set(sender.endpoint_id, client_epoch, 0);
    let _ = STACK_USERS.set(config::endpoint_id(), server_epoch, 0);
    Some(())
}
