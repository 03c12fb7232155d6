//! Limits a client endpoint's open connections to the node's proxies.
//!
//! Programs count opened connections in `PROXY_USE`, not ended ones: a client can elicit resets and acknowledgements,
//! so no packet proves that a proxy closed its socket. About once a second, the agent counts the proxies' sockets and
//! unfinished handshakes, and writes per endpoint the count from which programs refuse.
//!
//! A packet counts until a lookup finds the proxy's established socket, or that socket answers. First packets from the
//! node's stack (published ports, services) count, because after the handshake the stack passes packets to the proxy
//! before any program. Final handshake packets that were dropped on the way and are sent again count again.

use core::ptr;

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use wharf_common::{
    Direction, DropReason, EndpointRow, ProxyUse,
    flow::{FLOW_ADMITTED, FLOW_FIN_REPLY, FLOW_RESET},
};
use wharf_ebpf::{atomic, endpoints::endpoint, maps::PROXY_USE, parse::Ipv6Address};

use crate::{
    flow::now,
    packet::{Packet, address},
    redirect::{opens, tcp_state},
};

/// The node's row of `PROXY_USE`.
const NODE: u32 = 0;
/// TCP states in which a proxy may hold the socket, as bits (`BPF_TCP_*` of `linux/bpf.h`): `ESTABLISHED`, `FIN_WAIT1`,
/// `FIN_WAIT2`, `CLOSE_WAIT`, `LAST_ACK`, `CLOSING`.
const HELD: u32 = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11;
/// `BPF_TCP_TIME_WAIT`: only a first packet opens a connection.
const TIME_WAIT: u32 = 6;
/// Result of [`wharf_admit`]: no share left.
const SPENT: u32 = 1 << 16;

/// The connection may be over. Not after the client's FIN: the proxy still has the socket.
pub const ENDED: u16 = FLOW_FIN_REPLY | FLOW_RESET;

/// The next packet cannot open a connection. False before the proxy's socket is found, and after the proxy's FIN or a
/// RST: with SYN cookies, an acknowledgement opens the next connection.
#[inline(always)]
pub fn is_admitted(flags: u16) -> bool {
    flags & (FLOW_ADMITTED | ENDED) == FLOW_ADMITTED
}

/// The connection has no socket yet. With SYN cookies, the packet that completes the handshake creates it.
#[inline(always)]
pub fn may_await_socket(flags: u16) -> bool {
    flags & (FLOW_ADMITTED | ENDED) == 0
}

/// Admits a packet of a TCP flow to a proxy. Returns [`FLOW_ADMITTED`] when later packets need no check, else zero.
/// Error: `ProxyShareSpent`.
#[inline(always)]
pub fn admit(ctx: &TcContext, packet: &Packet, direction: Direction) -> Result<u16, DropReason> {
    let by_stack = if direction as u32 == Direction::Ingress as u32 { BY_STACK } else { 0 };
    let what = if opens(packet.signals) { FIRST | by_stack } else { 0 };
    // SAFETY: the context.
    match core::hint::black_box(unsafe { wharf_admit(ctx.skb.skb, packet.ports(), what) }) {
        SPENT => Err(DropReason::ProxyShareSpent),
        flags => Ok(flags as u16),
    }
}

/// Argument of [`wharf_admit`]: a connection's first packet.
const FIRST: u32 = 1 << 0;
/// With [`FIRST`].
const BY_STACK: u32 = 1 << 1;

/// [`admit`]. `ports`: [`Packet::ports`].
///
/// A global function with the context and scalars only: the verifier checks it once.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_admit(skb: *mut __sk_buff, ports: u32, what: u32) -> u32 {
    let ctx = &TcContext::new(skb);
    let admitted = u32::from(FLOW_ADMITTED);
    let Some(client) = address(ctx, true).and_then(|source| client(ctx, source)) else {
        return if what & FIRST != 0 { 0 } else { admitted };
    };
    if what & FIRST == 0 {
        let state = tcp_state(ctx, ports) & 31;
        if HELD >> state & 1 != 0 {
            return admitted;
        }
        if state == TIME_WAIT {
            return 0;
        }
    }
    let (Some(used), Some(node)) = (PROXY_USE.get_ptr_mut(client.endpoint_id.into()), PROXY_USE.get_ptr_mut(NODE))
    else {
        return SPENT;
    };
    // SAFETY: map values: words are read whole, additions atomic. Each racing CPU may admit one connection too many.
    unsafe {
        if ptr::read_volatile(&raw const (*node).limit).wrapping_sub(now()).cast_signed() >= 0 && is_spent(used) {
            return SPENT;
        }
        if what != FIRST {
            atomic::increment(&raw mut (*used).opened);
            atomic::increment(&raw mut (*node).opened);
        }
    }
    0
}

/// A socket that a proxy may hold sent the packet. It proves the connection where the node translates addresses behind
/// the hook, and lookups find no socket.
#[inline(always)]
pub fn is_by_held_socket(ctx: &TcContext) -> bool {
    // SAFETY: the context; a socket is null or lives as long as the packet.
    unsafe {
        let socket = ptr::read_volatile(&raw const (*ctx.skb.skb).__bindgen_anon_2.sk);
        !socket.is_null() && HELD >> (ptr::read_volatile(&raw const (*socket).state) & 31) & 1 != 0
    }
}

/// Endpoint with the source address, if the packet came from its link or the node; other packets are forged.
#[inline(always)]
fn client(ctx: &TcContext, source: Ipv6Address) -> Option<&'static EndpointRow> {
    // SAFETY: the context.
    let came_by = unsafe { (*ctx.skb.skb).ingress_ifindex };
    endpoint(source).filter(|row| came_by == 0 || came_by == row.ifindex)
}

#[inline(always)]
unsafe fn is_spent(used: *const ProxyUse) -> bool {
    // SAFETY: a map value; words are read whole.
    let (opened, limit) =
        unsafe { (ptr::read_volatile(&raw const (*used).opened), ptr::read_volatile(&raw const (*used).limit)) };
    ProxyUse { opened, limit }.is_spent()
}
