//! Hands flows to the proxy where a rule redirects them.
//!
//! **The way to the proxy.** A packet that the proxy is to get has [`MARK_TO_PROXY`]: a rule of the node's routing delivers it to the node itself,
//! whatever its destination is, and the kernel finds the socket. Sockets of the proxy are transparent: they have the addresses and ports of
//! the client and the server. The first packet of a connection has the proxy's port in the mark too, and the node's nftables table
//! gives it to the socket that listens there. What the stack brings to a container's link is turned round ([`wharf_ebpf::turn`]).
//!
//! **The proxy's own packets** have the client's address as source. Their flow is another one, because their source port is another;
//! its row has [`FLOW_UPSTREAM`], and the answers go to the proxy. One flow may be both: what the proxy sends for the client's rules is
//! redirected by the server's.

use core::ptr;

use aya_ebpf::{
    bindings::{__sk_buff, bpf_sock_tuple},
    helpers::{bpf_sk_release, bpf_skc_lookup_tcp},
    programs::TcContext,
};
use wharf_common::{
    Direction, DropReason,
    flow::{FLOW_LET_IN, FLOW_PROXIED, FLOW_UPSTREAM, SIGNAL_ACK, SIGNAL_RST, SIGNAL_SYN, TCP},
    policy::{MARK_PORT_SHIFT, MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS, MARK_TO_PROXY},
};
use wharf_ebpf::{flow::Asked, parse::PROTOCOL_IPV4};

use crate::{packet::Packet, policy::Passed};

/// `BPF_TCP_LISTEN` of `linux/bpf.h`.
const LISTEN: u32 = 10;
/// The low half of a mark, without a port.
const MARKS: u32 = (1 << MARK_PORT_SHIFT) - 1;

/// What becomes of a packet whose flow the rules redirect and that is not the proxy's yet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Redirect {
    /// The flow is the proxy's from here on.
    Begins,
    /// The connection is older than the rule: the proxy's listening socket resets it.
    Resets,
    /// The proxy is not there, and the rule lets the flow pass.
    Passes,
}

/// Decides about a packet whose flow the rules redirect; one that the proxy's listening socket is to take is marked. `running`: the flow has a row
/// and is not the proxy's; `by_owner`: as in [`crate::policy::judge`].
///
/// # Errors
/// `ProxyUnavailable`.
#[inline(always)]
pub fn redirect(
    ctx: &TcContext,
    packet: &Packet,
    running: bool,
    by_owner: bool,
    passed: Passed,
) -> Result<Redirect, DropReason> {
    let of_packet = u32::from(packet.protocol) | u32::from(packet.signals) << 8;
    let of_flow = if running { RUNNING } else { 0 } | if by_owner { BY_OWNER } else { 0 };
    let open = if passed.is_open() { IS_OPEN } else { 0 };
    // SAFETY: the context the program was called with.
    let what = unsafe { wharf_redirect(ctx.skb.skb, passed.port(), of_packet | of_flow | open) };
    match core::hint::black_box(what) {
        BEGINS => Ok(Redirect::Begins),
        RESETS => Ok(Redirect::Resets),
        PASSES => Ok(Redirect::Passes),
        _ => Err(DropReason::ProxyUnavailable),
    }
}

/// In what [`wharf_redirect`] is asked, beside the packet's protocol and, from bit 8 on, its signals.
const RUNNING: u32 = 1 << 16;
const BY_OWNER: u32 = 1 << 17;
const IS_OPEN: u32 = 1 << 18;
/// What [`wharf_redirect`] answers.
const UNAVAILABLE: u32 = 0;
const BEGINS: u32 = 1;
const RESETS: u32 = 2;
const PASSES: u32 = 3;

/// [`redirect`], with the proxy's port and the bits above.
///
/// Its name is exported and it takes but the context and numbers, so that the verifier looks at it once.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_redirect(skb: *mut __sk_buff, port: u32, what: u32) -> u32 {
    let (ctx, protocol, signals, running) = (&TcContext::new(skb), what as u8, (what >> 8) as u8, what & RUNNING != 0);
    if protocol != TCP || !listens(ctx, port) {
        return if what & IS_OPEN != 0 { PASSES } else { UNAVAILABLE };
    }
    if running && what & BY_OWNER == 0 {
        return UNAVAILABLE;
    }
    // Without a row, what goes on may be a connection of the proxy's whose row is gone: its socket is found without a port.
    if running || opens(signals) {
        let port = u32::from((port as u16).to_be());
        set_mark_of(ctx, mark_of(ctx) & MARKS | port << MARK_PORT_SHIFT);
    }
    if running { RESETS } else { BEGINS }
}

/// The first packet of a connection.
#[inline(always)]
pub fn opens(signals: u8) -> bool {
    signals & (SIGNAL_SYN | SIGNAL_ACK | SIGNAL_RST) == SIGNAL_SYN
}

/// True for a packet of a flow with these flags whose sender has no part in the flow, because the proxy is in its place: a container chose the
/// port that the proxy chose in its name, or answers what it never got.
#[inline(always)]
pub fn is_strange(asked: &Asked, flags: u16, by_owner: bool) -> bool {
    asked.direction as u32 == Direction::Egress as u32 && flags & in_place_of(by_owner) != 0
}

/// True for a packet of a flow with these flags that the proxy is to get.
#[inline(always)]
pub fn is_for_proxy(flags: u16, by_owner: bool) -> bool {
    flags & in_place_of(!by_owner) != 0
}

/// The flag of a flow that has the proxy in the place of the end that began it, or of the other one.
#[inline(always)]
fn in_place_of(owner: bool) -> u16 {
    if owner { FLOW_UPSTREAM } else { FLOW_PROXIED }
}

/// Marks a packet that the proxy is to get.
///
/// # Errors
/// `ProxyUnavailable` for a packet that has the mark and came to a container's link all the same: the node does not deliver it.
#[inline(always)]
pub fn mark(ctx: &TcContext, asked: &Asked) -> Result<(), DropReason> {
    let mark = mark_of(ctx);
    if asked.direction as u32 == Direction::Ingress as u32 && mark & MARK_TO_PROXY != 0 {
        return Err(DropReason::ProxyUnavailable);
    }
    set_mark_of(ctx, mark | MARK_TO_PROXY);
    Ok(())
}

/// The packet's mark.
#[inline(always)]
fn mark_of(ctx: &TcContext) -> u32 {
    // SAFETY: the context the program was called with. Volatile: the verifier wants the context's words read and written whole.
    unsafe { ptr::read_volatile(&raw const (*ctx.skb.skb).mark) }
}

#[inline(always)]
fn set_mark_of(ctx: &TcContext, mark: u32) {
    // SAFETY: as in `mark_of`; programs of this kind may write it.
    unsafe { ptr::write_volatile(&raw mut (*ctx.skb.skb).mark, mark) };
}

/// The flags of a flow that begins with this packet: those of one of the proxy's.
#[inline(always)]
pub fn of_proxy(ctx: &TcContext, asked: &Asked) -> u16 {
    // SAFETY: the context the program was called with.
    let (mark, came_by) = (mark_of(ctx), unsafe { (*ctx.skb.skb).ingress_ifindex });
    if asked.direction as u32 == Direction::Egress as u32 || came_by != 0 {
        return 0;
    }
    match mark & (MARK_PROXIED_EGRESS | MARK_PROXIED_INGRESS) {
        0 => 0,
        MARK_PROXIED_EGRESS => FLOW_UPSTREAM,
        _ => FLOW_UPSTREAM | FLOW_LET_IN,
    }
}

/// True when a TCP socket listens at this port of the node's loopback address of the packet's family, or of any address.
#[inline(always)]
fn listens(ctx: &TcContext, port: u32) -> bool {
    let skb = ctx.skb.skb;
    // `struct bpf_sock_tuple`: source and destination, of which the source does not matter, then the ports.
    let port = u32::from((port as u16).to_be()) << 16;
    // SAFETY: the context the program was called with.
    let v4 = unsafe { (*skb).protocol } == PROTOCOL_IPV4;
    let mut tuple = [0_u32; 9];
    let words: u32 = if v4 {
        (tuple[1], tuple[2]) = (0x7f00_0001_u32.to_be(), port);
        3
    } else {
        (tuple[7], tuple[8]) = (1_u32.to_be(), port);
        9
    };
    let tuple = tuple.as_mut_ptr().cast::<bpf_sock_tuple>();
    // SAFETY: the context, and a tuple of that many words; a negative namespace is that of the packet's device.
    let socket = unsafe { bpf_skc_lookup_tcp(skb.cast(), tuple, words * 4, u64::MAX, 0) };
    if socket.is_null() {
        return false;
    }
    // SAFETY: a socket from a lookup, which is given back once.
    unsafe {
        let state = ptr::read_volatile(&raw const (*socket).state);
        bpf_sk_release(socket.cast());
        state == LISTEN
    }
}
