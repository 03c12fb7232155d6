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
    DropReason, ProxyUse,
    flow::{FLOW_ADMITTED, FLOW_FIN, FLOW_FIN_REPLY, FLOW_RESET},
};
use wharf_ebpf::{atomic, endpoints::endpoint, maps::PROXY_USE};

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
    // A client that is not on this node has no share of its own.
    let Some(client) = address(ctx, true).and_then(endpoint) else { return if first != 0 { 0 } else { admitted } };
    if first == 0 && HELD >> (tcp_state(ctx, ports) & 31) & 1 != 0 {
        return admitted;
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
