//! The flow cache ([`wharf_common::CachedFlow`]). Endpoint programs pass packets of flows that the node program
//! `established` passed on the same CPU, at most 64 jiffies ago, without a lookup of receiver and flow.
//!
//! An entry holds while the epoch of the endpoint, the rules, the rows about both addresses and the endpoint's
//! `FLOW_CACHE_ENDS` are the same. Packets that could begin or end a flow have no entry.

use core::ptr;

use aya_ebpf::{helpers::bpf_jiffies64, programs::TcContext};
use wharf_common::{
    Direction,
    flow::{CACHE_SHIFT, CACHED_INGRESS, CACHED_IPV6, SIGNAL_FIN, SIGNAL_RST, SIGNAL_SYN, TCP, cache_place},
    policy::{MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS},
};

use crate::{
    atomic,
    endpoints::{generation, policy_generation},
    maps::{FLOW_CACHE, FLOW_CACHE_ENDS},
    opaque::opaque,
    parse::{ETHERNET_BYTES, Framed, Ipv4, Ipv6, Ipv6Address, read, read_linear},
};

const ENDS_OR_BEGINS: u16 = (SIGNAL_FIN | SIGNAL_SYN | SIGNAL_RST) as u16;
/// Data offset and flags (RFC 9293, 3.1).
const TCP_FLAGS: usize = 12;
const TCP_BYTES: u32 = 20;
const UDP_BYTES: u32 = 8;

/// [`wharf_common::CachedFlow::generation`], read before the decision. `None` for an id that no endpoint has.
#[inline(always)]
pub fn generation_of(own_id: u32, own: Ipv6Address, peer: Ipv6Address) -> Option<u32> {
    let rows = generation(own)?.wrapping_add(generation(peer)?).wrapping_add(policy_generation()?);
    Some(rows.wrapping_add(*FLOW_CACHE_ENDS.get(own_id)?))
}

#[inline(always)]
pub fn ends(endpoint: u32) -> u32 {
    FLOW_CACHE_ENDS.get(endpoint).copied().unwrap_or(0)
}

/// Ends the entries of this endpoint; zero for none.
#[inline(always)]
pub fn end(endpoint: u32) {
    if let Some(ends) = FLOW_CACHE_ENDS.get_ptr_mut(endpoint) {
        // SAFETY: a map value, added to atomically.
        unsafe { atomic::increment(ends) };
    }
}

/// What an entry must have.
#[derive(Clone, Copy)]
pub struct Flow {
    peer: Ipv6Address,
    transport: Transport,
    kind: u32,
    own_epoch: u32,
    generation: u32,
}

impl Flow {
    #[inline(always)]
    pub fn new(direction: Direction, own_epoch: u32, peer: Ipv6Address, transport: Transport, generation: u32) -> Self {
        let ingress = if direction as u32 == Direction::Ingress as u32 { CACHED_INGRESS } else { 0 };
        Self { peer, transport, kind: transport.kind | ingress, own_epoch, generation }
    }

    #[inline(always)]
    fn place(&self) -> u32 {
        let peer = (self.peer.words()[1] >> 32) as u32;
        cache_place(peer, self.transport.ports, self.kind, self.own_epoch)
    }

    /// Slot of the receiver; zero if it has none.
    #[inline(always)]
    pub fn find(&self, ctx: &TcContext) -> Option<u32> {
        let entry = FLOW_CACHE.get_ptr(self.place())?;
        // SAFETY: this CPU's entry, a map value. Volatile: another program may run in between, and `sequence` shows it.
        let (receiver, different) = unsafe {
            let sequence = ptr::read_volatile(&raw const (*entry).sequence);
            let receiver = ptr::read_volatile(&raw const (*entry).receiver);
            let peer = (&raw const (*entry).peer).cast::<Ipv6Address>().read_volatile();
            let different = self.transport.oddities
                | (ptr::read_volatile(&raw const (*entry).ports) ^ self.transport.ports)
                | (ptr::read_volatile(&raw const (*entry).kind) ^ self.kind)
                | (ptr::read_volatile(&raw const (*entry).own_epoch) ^ self.own_epoch)
                | (ptr::read_volatile(&raw const (*entry).generation) ^ self.generation)
                | (ptr::read_volatile(&raw const (*entry).window) ^ window())
                | (mark_of(ctx) & (MARK_PROXIED_EGRESS | MARK_PROXIED_INGRESS));
            let torn = (ptr::read_volatile(&raw const (*entry).sequence) ^ sequence) | sequence & 1;
            (receiver, u64::from(different | torn) | peer.difference(self.peer))
        };
        (opaque(different) == 0).then_some(receiver)
    }

    /// Writes the entry, unless another program is writing it.
    #[inline(always)]
    pub fn keep(&self, receiver: u32) {
        let Some(entry) = FLOW_CACHE.get_ptr_mut(self.place()) else { return };
        // SAFETY: as in `find`.
        unsafe {
            let sequence = ptr::read_volatile(&raw const (*entry).sequence);
            if sequence & 1 != 0 || !atomic::exchange(&raw mut (*entry).sequence, sequence, sequence.wrapping_add(1)) {
                return;
            }
            (&raw mut (*entry).peer).cast::<Ipv6Address>().write_volatile(self.peer);
            ptr::write_volatile(&raw mut (*entry).ports, self.transport.ports);
            ptr::write_volatile(&raw mut (*entry).kind, self.kind);
            ptr::write_volatile(&raw mut (*entry).own_epoch, self.own_epoch);
            ptr::write_volatile(&raw mut (*entry).generation, self.generation);
            ptr::write_volatile(&raw mut (*entry).window, window());
            ptr::write_volatile(&raw mut (*entry).receiver, receiver);
            ptr::write_volatile(&raw mut (*entry).sequence, sequence.wrapping_add(2));
        }
    }
}

#[inline(always)]
fn window() -> u32 {
    // SAFETY: a helper without arguments.
    (unsafe { bpf_jiffies64() } >> CACHE_SHIFT) as u32
}

#[inline(always)]
fn mark_of(ctx: &TcContext) -> u32 {
    // SAFETY: the context. Volatile: the verifier wants whole accesses of the words.
    unsafe { ptr::read_volatile(&raw const (*ctx.skb.skb).mark) }
}

/// Ports and kind of a packet.
#[derive(Clone, Copy)]
pub struct Transport {
    pub ports: u32,
    /// IANA number and [`CACHED_IPV6`].
    kind: u32,
    /// Not zero for a packet that could begin or end its flow, or whose header is not whole.
    pub oddities: u32,
}

impl Transport {
    /// Of a packet without IPv4 options or IPv6 extension headers, which has `bytes` behind them. `None` if its header
    /// is not in the linear part.
    #[inline(always)]
    pub fn linear(ctx: &TcContext, protocol: u8, bytes: u16) -> Option<Self> {
        Self::of(ctx, protocol, bytes, read_linear, read_linear)
    }

    /// [`Self::linear`], wherever the header is.
    #[inline(always)]
    pub fn anywhere(ctx: &TcContext, protocol: u8, bytes: u16) -> Option<Self> {
        Self::of(ctx, protocol, bytes, read, read)
    }

    #[inline(always)]
    fn of(
        ctx: &TcContext,
        protocol: u8,
        bytes: u16,
        read_ports: impl Fn(&TcContext, usize) -> Option<u32>,
        read_flags: impl Fn(&TcContext, usize) -> Option<u16>,
    ) -> Option<Self> {
        let packet: Framed<u8> = Framed::at_start(ctx)?;
        // The version's second bit: a number that the verifier does not know, so that it follows one way.
        // SAFETY: bounds checked.
        let is_ipv6 = u32::from(unsafe { *packet.payload } >> 5 & 1);
        let more = is_ipv6 as usize * (size_of::<Ipv6>() - size_of::<Ipv4>());
        let at = ETHERNET_BYTES + size_of::<Ipv4>() + more;
        let ports = read_ports(ctx, at)?;
        let (least, begins_or_ends) = if protocol == TCP {
            (TCP_BYTES, u16::from_be(read_flags(ctx, at + TCP_FLAGS)?) & ENDS_OR_BEGINS)
        } else {
            (UDP_BYTES, 0)
        };
        let missing = u32::from(bytes).wrapping_sub(least) >> 31;
        let kind = u32::from(protocol) | (is_ipv6 * CACHED_IPV6);
        Some(Self { ports, kind, oddities: missing | u32::from(begins_or_ends) })
    }

    #[inline(always)]
    pub fn protocol(self) -> u8 {
        self.kind as u8
    }
}
