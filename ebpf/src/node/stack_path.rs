//! Which packets between two endpoints take the node's stack: what is noted, and what is asked
//! ([`wharf_ebpf::stack_path`] says why).
//!
//! A row of `STACK_PATHS` says which service of an endpoint (protocol and port) another one reached through the stack. All flows
//! of that pair to that port take the stack from then on, also those that no rule translates: the node's connection tracking
//! then knows every flow that could have the same addresses and ports.
//!
//! Fragments of TCP, UDP and SCTP follow the pair's row with port 0, because only the first has ports. An ICMP error follows
//! the packet that it is about.

use core::mem::{offset_of, size_of};

use aya_ebpf::{
    bindings::{TC_ACT_OK, TC_ACT_REDIRECT},
    programs::TcContext,
};
use wharf_common::{DropReason, StackPathKey, StackPathRow, map::STACK_PATH_PORTS};
use wharf_ebpf::{
    handoff::{Verdict, Words},
    maps::{STACK_PATHS, STACK_USERS},
    parse::{ETHERNET_BYTES, ICMPV6, Ipv4, Ipv6, Ipv6Address},
    stack_path::endpoint,
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

/// `path`: whether a packet to another endpoint of the node takes the stack.
#[inline(always)]
pub fn path(ctx: &TcContext) -> i32 {
    let words = Words::of(ctx);
    let (sender, bytes) = (words.sender(), words.0[3]);
    let by_stack =
        Verdict { sender, receiver: 0, bytes, reason: DropReason::ForwardedStack as u32, action: TC_ACT_OK as u32 };
    if is_taken(ctx) {
        return by_stack.hand_over(ctx);
    }
    let reason = DropReason::ForwardedLocal as u32;
    Verdict { sender, receiver: words.receiver(), bytes, reason, action: TC_ACT_REDIRECT as u32 }.hand_over(ctx)
}

/// True when the packet belongs to a flow that takes the stack.
#[inline(always)]
fn is_taken(ctx: &TcContext) -> bool {
    match find(ctx, ETHERNET_BYTES) {
        Found::Noted(is_noted) => is_noted,
        Found::About(inner) => matches!(find(ctx, inner), Found::Noted(true)),
    }
}

enum Found {
    /// Whether the flow's path is noted.
    Noted(bool),
    /// The packet is an ICMP error about the packet at this offset.
    About(usize),
}

/// Looks up the IP packet at `offset`.
#[inline(always)]
fn find(ctx: &TcContext, offset: usize) -> Found {
    let Some(mut flow) = Flow::at(ctx, offset) else { return Found::Noted(false) };
    if flow.is_error(ctx) {
        return Found::About(flow.transport + ICMP_ERROR_BYTES);
    }
    if flow.fragment {
        (flow.source_port, flow.destination_port) = (0, 0);
    }
    let (Some(sender), Some(receiver)) = (endpoint(flow.source), endpoint(flow.destination)) else {
        return Found::Noted(false);
    };
    let (sender, receiver) = (sender.epoch, receiver.epoch);
    Found::Noted(flow.path(false).is_noted(sender, receiver) || flow.path(true).is_noted(receiver, sender))
}

/// `note`: notes the path of a packet that the stack brought to an endpoint, where another endpoint of the node sent it.
#[inline(always)]
pub fn note(ctx: &TcContext) -> i32 {
    let words = Words::of(ctx);
    // Nothing to note is no failure.
    let _ = add(ctx, words.sender(), words.epoch());
    TC_ACT_OK
}

#[inline(always)]
fn add(ctx: &TcContext, server: u32, server_epoch: u64) -> Option<()> {
    let flow = Flow::at(ctx, ETHERNET_BYTES)?;
    let sender = endpoint(flow.source)?;
    // SAFETY: the context the program was called with.
    let came_by = unsafe { (*ctx.skb.skb).ingress_ifindex };
    if sender.ifindex != came_by {
        return None;
    }
    let client_epoch = sender.epoch;
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
    let _ = STACK_USERS.set(server, server_epoch, 0);
    Some(())
}
