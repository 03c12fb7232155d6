//! Bounds the connections that an endpoint of the node, as the client, has open to the node's proxies.
//!
//! The programs count what opens, in `PROXY_USE`. They do not count what ends, because no packet proves that a proxy has closed its
//! socket: a client can cause resets and acknowledgements without an end. The agent counts the sockets of the proxies, about once
//! a second and sooner when many connections open, and writes for each endpoint the count at which the next connection is refused.
//!
//! A packet counts until the proxy's socket is established, which a lookup of that socket tells, and nothing in the packet. A
//! client that has the last packet of its handshakes dropped on the way (a wrong checksum, a full queue), to send them again all
//! at once, is counted each time.

use core::ptr;

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use wharf_common::{
    DropReason, EndpointRow, ProxyUse,
    flow::{FLOW_ADMITTED, FLOW_FIN, FLOW_FIN_REPLY, FLOW_RESET},
};
use wharf_ebpf::{atomic, endpoints::endpoint, maps::PROXY_USE, parse::Ipv6Address};

use crate::{
    flow::now,
    packet::{Packet, address},
    redirect::{opens, tcp_state},
};

/// The row of `PROXY_USE` for the whole node: `opened` counts all connections, `limit` is the tick until which limits hold.
const NODE: u32 = 0;
/// States of a TCP socket in which a proxy may hold it, as bits: all but no socket, `SYN_SENT`, `SYN_RECV`, `TIME_WAIT`, `CLOSE`,
/// `LISTEN` and `NEW_SYN_RECV` (`BPF_TCP_*` of `linux/bpf.h`).
const HELD: u32 = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11;
/// `BPF_TCP_TIME_WAIT`: only a first packet opens a connection there.
const TIME_WAIT: u32 = 6;
/// Answer of [`wharf_admit`] beside [`FLOW_ADMITTED`]: the client has its share.
const SPENT: u32 = 1 << 16;

/// False for a flow with these flags whose next packet may open a connection: the proxy's socket was not seen, or one end has closed or
/// reset the connection since (with SYN cookies, an acknowledgement alone opens the next one).
#[inline(always)]
pub fn is_admitted(flags: u16) -> bool {
    flags & (FLOW_ADMITTED | FLOW_FIN | FLOW_FIN_REPLY | FLOW_RESET) == FLOW_ADMITTED
}

/// Admits a packet of a TCP flow that goes to a proxy. Returns [`FLOW_ADMITTED`] when no later packet of the flow needs to be
/// looked at, else zero.
///
/// # Errors
/// `ProxyShareSpent`.
#[inline(always)]
pub fn admit(ctx: &TcContext, packet: &Packet) -> Result<u16, DropReason> {
    // SAFETY: the context the program was called with.
    match core::hint::black_box(unsafe { wharf_admit(ctx.skb.skb, packet.ports(), opens(packet.signals).into()) }) {
        SPENT => Err(DropReason::ProxyShareSpent),
        flags => Ok(flags as u16),
    }
}

/// [`admit`]. `ports`: [`Packet::ports`]; `first`: not zero for the first packet of a connection.
///
/// Its name is exported and it takes but the context and numbers, so that the verifier looks at it once.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_admit(skb: *mut __sk_buff, ports: u32, first: u32) -> u32 {
    let ctx = &TcContext::new(skb);
    let admitted = u32::from(FLOW_ADMITTED);
    let Some(client) = address(ctx, true).and_then(|source| client(ctx, source)) else {
        return if first != 0 { 0 } else { admitted };
    };
    if first == 0 {
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
    // SAFETY: map values that CPUs share: words are read whole and added to atomically. Each CPU may let one connection pass too many.
    unsafe {
        if ptr::read_volatile(&raw const (*node).limit).wrapping_sub(now()).cast_signed() >= 0 && is_spent(used) {
            return SPENT;
        }
        if first == 0 {
            atomic::increment(&raw mut (*used).opened);
            atomic::increment(&raw mut (*node).opened);
        }
    }
    0
}

/// The endpoint that has the source address, when its link or the node itself brought the packet. A client elsewhere has no share, also one
/// that forges the address of an endpoint.
#[inline(always)]
fn client(ctx: &TcContext, source: Ipv6Address) -> Option<&'static EndpointRow> {
    // SAFETY: the context the program was called with.
    let came_by = unsafe { (*ctx.skb.skb).ingress_ifindex };
    endpoint(source).filter(|row| came_by == 0 || came_by == row.ifindex)
}

/// # Safety
///
/// `used` is a map value.
#[inline(always)]
unsafe fn is_spent(used: *const ProxyUse) -> bool {
    // SAFETY: a map value; words are read whole.
    let (opened, limit) =
        unsafe { (ptr::read_volatile(&raw const (*used).opened), ptr::read_volatile(&raw const (*used).limit)) };
    ProxyUse { opened, limit }.is_spent()
}
