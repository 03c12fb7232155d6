//! Hands flows to the proxy where a rule redirects them.
//!
//! **The way to the proxy.** A packet that the proxy is to get has [`MARK_TO_PROXY`]: a rule of the node's routing delivers it to the node itself,
//! whatever its destination is, and the kernel finds the socket. Sockets of the proxy are transparent: they have the addresses and ports of
//! the client and the server. The first packet of a connection has the proxy's port in the mark too, and the node's nftables table
//! gives it to the socket that listens there. What the stack brings to a container's link is turned round ([`wharf_ebpf::turn`]).
//!
//! **UDP** has no connections: one socket of the proxy's takes the packets of all flows, so each of them has the port in its mark, and is judged for that.
//! A flow goes to the proxy from the packet on that the rules redirect, and back to the server when they no longer do. Fragments have the port
//! too; the kernel puts them together before a rule with `tproxy` (`nft_tproxy_init` asks for that), those that were turned round as well.
//!
//! **The proxy's own packets** have the client's address as source. Their flow is another one, because their source port is another;
//! its row has [`FLOW_UPSTREAM`], and the answers go to the proxy. One flow may be both: what the proxy sends for the client's rules is
//! redirected by the server's. The answers of UDP have the server's address as source and no mark.
//!
//! Of two flows with the same ports, one that a client began and one that the proxy began in its name, the later one has the row. A proxy
//! that takes its ports for UDP out of another range than clients do (32768 to 60999, as a rule) is spared that.

use core::ptr;

use aya_ebpf::{
    bindings::{__sk_buff, bpf_sock_tuple},
    btf_maps::lpm_trie::Key,
    helpers::{bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp},
    programs::TcContext,
};
use wharf_common::{
    Direction, DropReason,
    flow::{FLOW_LET_IN, FLOW_PROXIED, FLOW_UPSTREAM, SIGNAL_ACK, SIGNAL_RST, SIGNAL_SYN, TCP, UDP},
    policy::{IDENTITY_NODE, MARK_PORT_SHIFT, MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS, MARK_TO_PROXY},
};
use wharf_ebpf::{flow::Asked, maps::IPCACHE, parse::PROTOCOL_IPV4};

use crate::{
    packet::{Packet, address},
    policy::{ADDRESS_BITS, Passed},
};

/// `BPF_TCP_LISTEN` of `linux/bpf.h`.
const LISTEN: u32 = 10;
/// The low half of a mark, without a port.
const MARKS: u32 = (1 << MARK_PORT_SHIFT) - 1;
/// What the proxy sends in a client's name has one of them.
const MARKS_OF_PROXY: u32 = MARK_PROXIED_EGRESS | MARK_PROXIED_INGRESS;

/// What becomes of a packet whose flow the rules redirect and that is not the proxy's yet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Redirect {
    /// The flow is the proxy's from here on.
    Begins,
    /// The connection is older than the rule: the proxy's listening socket resets it.
    Resets,
    /// The proxy is not there, and the rule lets the flow pass.
    Passes,
    /// As [`Redirect::Passes`], until the flow's next packet: nothing but the proxy's absence keeps a UDP flow from it.
    PassesOnce,
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
        PASSES_ONCE => Ok(Redirect::PassesOnce),
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
const PASSES_ONCE: u32 = 4;

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
    let udp = protocol == UDP;
    if protocol != TCP && !udp || !listens(ctx, port, udp) {
        return match what & IS_OPEN {
            0 => UNAVAILABLE,
            _ if udp => PASSES_ONCE,
            _ => PASSES,
        };
    }
    // What answers to packets that the proxy has not seen.
    if running && what & BY_OWNER == 0 {
        return UNAVAILABLE;
    }
    // Without a row, what goes on may be a connection of the proxy's whose row is gone: its socket is found without a port.
    if running || udp || opens(signals) {
        let port = u32::from((port as u16).to_be());
        set_mark_of(ctx, mark_of(ctx) & MARKS | port << MARK_PORT_SHIFT);
    }
    if running && !udp { RESETS } else { BEGINS }
}

/// The first packet of a connection.
#[inline(always)]
pub fn opens(signals: u8) -> bool {
    signals & (SIGNAL_SYN | SIGNAL_ACK | SIGNAL_RST) == SIGNAL_SYN
}

/// What the next packet is to a flow that the proxy has an end of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Next {
    GoesOn,
    /// It goes on as the rules say: they alone tell the port of the socket, and whether a UDP flow is the proxy's still.
    Asks,
    /// It begins another flow of the same ends.
    Begins,
    /// Its sender has no part in the flow, because the proxy is in its place: it chose the port that the proxy chose in its name, or answers what
    /// it never got.
    IsStrange,
}

/// What a packet is to its flow, which has a row with these flags, of [`wharf_common::flow::FLOW_OF_PROXY`] at least one.
#[inline(always)]
pub fn next(ctx: &TcContext, asked: &Asked, packet: &Packet, flags: u16, by_owner: bool) -> Next {
    let of_packet = if asked.direction as u32 == Direction::Egress as u32 { SENDS } else { 0 }
        | if opens(packet.signals) { OPENS } else { 0 }
        | if packet.protocol == UDP { IS_UDP } else { 0 };
    let of_flow = u32::from(flags) | if by_owner { BY_OWNER } else { 0 };
    // The other way round: what the other end would send.
    let ports = packet.ports().rotate_left(16);
    // SAFETY: the context the program was called with.
    match core::hint::black_box(unsafe { wharf_next(ctx.skb.skb, ports, of_packet | of_flow) }) {
        NEXT_GOES_ON => Next::GoesOn,
        NEXT_ASKS => Next::Asks,
        NEXT_BEGINS => Next::Begins,
        _ => Next::IsStrange,
    }
}

/// In what [`wharf_next`] is asked, beside the flow's flags and [`BY_OWNER`].
const SENDS: u32 = 1 << 19;
const OPENS: u32 = 1 << 20;
const IS_UDP: u32 = 1 << 21;
/// What [`wharf_next`] answers.
const NEXT_GOES_ON: u32 = 0;
const NEXT_ASKS: u32 = 1;
const NEXT_BEGINS: u32 = 2;
const NEXT_IS_STRANGE: u32 = 3;

/// [`next`], with the bits above. `ports`: those of a packet the other way, as [`Packet::ports`] has them.
///
/// Its name is exported and it takes but the context and numbers, so that the verifier looks at it once.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_next(skb: *mut __sk_buff, ports: u32, what: u32) -> u32 {
    let ctx = &TcContext::new(skb);
    let (flags, by_owner, udp) = (what as u16, what & BY_OWNER != 0, what & IS_UDP != 0);
    let by_node = what & SENDS == 0 && is_by_node(ctx);
    if !by_node && flags & in_place_of(by_owner) != 0 {
        // The proxy closes its socket when its flow is over, which no packet of UDP says.
        let is_over = udp && by_owner && !has_socket(ctx, ports);
        return if is_over { NEXT_BEGINS } else { NEXT_IS_STRANGE };
    }
    if !by_owner {
        return NEXT_GOES_ON;
    }
    // The proxy chose the port of a flow that the client began.
    let is_proxys = udp && by_node && flags & FLOW_UPSTREAM == 0 && mark_of(ctx) & MARKS_OF_PROXY != 0;
    match flags & FLOW_PROXIED {
        _ if what & OPENS != 0 || is_proxys => NEXT_BEGINS,
        0 => NEXT_GOES_ON,
        _ if udp => NEXT_ASKS,
        _ => NEXT_GOES_ON,
    }
}

/// True where a socket of the proxy's takes what comes from the destination of the packet at hand to its source; `ports`: of that.
#[inline(always)]
fn has_socket(ctx: &TcContext, ports: u32) -> bool {
    let (Some(client), Some(server)) = (address(ctx, true), address(ctx, false)) else { return false };
    is_taken(ctx, true, server.words(), client.words(), ports)
}

/// True for a packet, at a hook on its way to a container, that the node's own stack made.
#[inline(always)]
fn is_by_node(ctx: &TcContext) -> bool {
    // SAFETY: the context the program was called with.
    unsafe { (*ctx.skb.skb).ingress_ifindex == 0 }
}

/// True for a packet, at a hook on its way to a container, that the proxy sends in the name of a server. It is of a flow that a client began, and
/// begins none where that one's row is gone: what the client sends would pass for answers, which no rule redirects.
#[inline(always)]
pub fn is_answer(ctx: &TcContext, of_proxy: u16) -> bool {
    // SAFETY: the context the program was called with.
    of_proxy & FLOW_UPSTREAM == 0 && is_by_node(ctx) && unsafe { wharf_answers(ctx.skb.skb) } != 0
}

/// 1 for a packet whose source is not an address of the node's, as far as there is policy; else 0.
///
/// Its name is exported and it takes but the context and numbers, so that the verifier looks at it once.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_answers(skb: *mut __sk_buff) -> u32 {
    let Some(source) = address(&TcContext::new(skb), true) else { return 0 };
    let row = IPCACHE.get(&Key::new(ADDRESS_BITS, *source.as_shared()));
    u32::from(row.is_some_and(|row| row.identity != IDENTITY_NODE))
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
    if asked.direction as u32 == Direction::Egress as u32 || !is_by_node(ctx) {
        return 0;
    }
    match mark_of(ctx) & MARKS_OF_PROXY {
        0 => 0,
        MARK_PROXIED_EGRESS => FLOW_UPSTREAM,
        _ => FLOW_UPSTREAM | FLOW_LET_IN,
    }
}

/// True when a TCP socket listens at this port of the node's loopback address of the packet's family, or of any address; any socket of UDP does
/// that is bound there.
#[inline(always)]
fn listens(ctx: &TcContext, port: u32, udp: bool) -> bool {
    // The second word. An IPv4 address is the end of its mapped form.
    let loopback = if is_v4(ctx) { u64::from(0x7f00_0001_u32.to_be()) << 32 } else { 1_u64.to_be() };
    is_taken(ctx, udp, [0; 2], [0, loopback], u32::from((port as u16).to_be()) << 16)
}

#[inline(always)]
fn is_v4(ctx: &TcContext) -> bool {
    // SAFETY: the context the program was called with.
    unsafe { (*ctx.skb.skb).protocol == PROTOCOL_IPV4 }
}

/// True when a TCP socket listens for packets with these addresses, two words each, and ports ([`Packet::ports`]), or a UDP socket takes them.
#[inline(always)]
fn is_taken(ctx: &TcContext, udp: bool, source: [u64; 2], destination: [u64; 2], ports: u32) -> bool {
    let (low, high) = (|word: u64| word as u32, |word: u64| (word >> 32) as u32);
    // `struct bpf_sock_tuple`: source and destination, then the ports.
    let mut tuple = [0_u32; 9];
    let words: u32 = if is_v4(ctx) {
        (tuple[0], tuple[1], tuple[2]) = (high(source[1]), high(destination[1]), ports);
        3
    } else {
        let halves = |words: [u64; 2]| [low(words[0]), high(words[0]), low(words[1]), high(words[1])];
        let ([s0, s1, s2, s3], [d0, d1, d2, d3]) = (halves(source), halves(destination));
        tuple = [s0, s1, s2, s3, d0, d1, d2, d3, ports];
        9
    };
    let (skb, tuple, bytes) = (ctx.skb.skb.cast(), tuple.as_mut_ptr().cast::<bpf_sock_tuple>(), words * 4);
    if udp {
        // SAFETY: the context, and a tuple of that many bytes; a negative namespace is that of the packet's device. The socket is given back once.
        unsafe {
            let socket = bpf_sk_lookup_udp(skb, tuple, bytes, u64::MAX, 0);
            if socket.is_null() {
                return false;
            }
            bpf_sk_release(socket.cast());
        }
        return true;
    }
    // SAFETY: as above.
    unsafe {
        let socket = bpf_skc_lookup_tcp(skb, tuple, bytes, u64::MAX, 0);
        if socket.is_null() {
            return false;
        }
        let state = ptr::read_volatile(&raw const (*socket).state);
        bpf_sk_release(socket.cast());
        state == LISTEN
    }
}
