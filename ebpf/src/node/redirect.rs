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
//! **A server on the node** gets what the proxy sends without a hook, and answers to the container's link. The proxy's socket tells such an answer,
//! which is turned round as well; its flow has no row.
//!
//! Of two flows with the same ports, one that a client began and one that the proxy began in its name, the later one has the row. A proxy
//! that takes its ports for UDP out of another range than clients do (32768 to 60999, as a rule) is spared that.

use core::{mem::offset_of, ptr};

use aya_ebpf::{
    bindings::{__sk_buff, bpf_sock_tuple},
    helpers::{bpf_sk_lookup_udp, bpf_sk_release, bpf_skb_load_bytes, bpf_skc_lookup_tcp},
    programs::TcContext,
};
use wharf_common::{
    Direction, DropReason,
    flow::{FLOW_LET_IN, FLOW_PROXIED, FLOW_REPLIED, FLOW_UPSTREAM, SIGNAL_ACK, SIGNAL_RST, SIGNAL_SYN, TCP, UDP},
    policy::{MARK_PORT_SHIFT, MARK_PROXIED_EGRESS, MARK_PROXIED_INGRESS, MARK_TO_PROXY},
};
use wharf_ebpf::{
    flow::Asked,
    parse::{ETHERNET_BYTES, Ipv4, Ipv6, PROTOCOL_IPV4},
    profile::Profile,
};

use crate::{
    packet::Packet,
    policy::{Passed, is_of_node},
};

/// `BPF_TCP_LISTEN` of `linux/bpf.h`.
const LISTEN: u32 = 10;
/// No state of a TCP socket.
const NO_SOCKET: u32 = 0;
/// The low half of a mark, without a port.
const MARKS: u32 = (1 << MARK_PORT_SHIFT) - 1;
/// What the proxy sends in a client's name has one of them.
const MARKS_OF_PROXY: u32 = MARK_PROXIED_EGRESS | MARK_PROXIED_INGRESS;

/// What becomes of a packet whose flow the rules redirect and that is not the proxy's yet. It stays a number, because each way that a program
/// goes the verifier follows to the end.
#[derive(Clone, Copy)]
pub struct Redirect(u64);

impl Redirect {
    /// The connection is older than the rule: the proxy's listening socket resets it.
    #[inline(always)]
    pub fn resets(self) -> bool {
        self.0 & RESETS != 0
    }

    /// The flow's flag from here on: [`FLOW_PROXIED`], or none where the proxy is not there and the rule lets the flow pass.
    #[inline(always)]
    pub fn flag(self) -> u16 {
        self.0 as u16 & FLOW_PROXIED
    }

    /// The generation by which the flow is judged, of these rules; zero where its next packet is to be judged again.
    #[inline(always)]
    pub fn generation(self, of_rules: u32) -> u32 {
        of_rules & (self.0 >> 32) as u32
    }
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
        UNAVAILABLE => Err(DropReason::ProxyUnavailable),
        what => Ok(Redirect(what)),
    }
}

/// In what [`wharf_redirect`] is asked, beside the packet's protocol and, from bit 8 on, its signals.
const RUNNING: u32 = 1 << 16;
const BY_OWNER: u32 = 1 << 17;
const IS_OPEN: u32 = 1 << 18;
/// What [`wharf_redirect`] answers, beside [`FLOW_PROXIED`] and, in the high half, the bits of the generation that are noted.
const UNAVAILABLE: u64 = 0;
const RESETS: u64 = 1 << 0;
const PASSES: u64 = 1 << 1;
const JUDGED: u64 = 0xffff_ffff << 32;

/// [`redirect`], with the proxy's port and the bits above.
///
/// Its name is exported and it takes but the context and numbers, so that the verifier looks at it once.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_redirect(skb: *mut __sk_buff, port: u32, what: u32) -> u64 {
    let (ctx, protocol, signals, running) = (&TcContext::new(skb), what as u8, (what >> 8) as u8, what & RUNNING != 0);
    let udp = protocol == UDP;
    if protocol != TCP && !udp || !listens(ctx, port, udp) {
        return match what & IS_OPEN {
            0 => UNAVAILABLE,
            // Judged again at the next packet, so that the flow goes to the proxy when it is back.
            _ if udp => PASSES,
            _ => PASSES | JUDGED,
        };
    }
    if running && what & BY_OWNER == 0 {
        // What answers to packets that the proxy has not seen; but for the reset of the listening socket, by which the connection ends.
        return if signals & SIGNAL_RST != 0 && is_by_node(ctx) { PASSES } else { UNAVAILABLE };
    }
    // Without a row, what goes on may be a connection of the proxy's whose row is gone: its socket is found without a port.
    if running || udp || opens(signals) {
        let port = u32::from((port as u16).to_be());
        set_mark_of(ctx, mark_of(ctx) & MARKS | port << MARK_PORT_SHIFT);
    }
    // The first packet of a connection, also one that is repeated, begins anew there.
    if running && !udp && !opens(signals) { RESETS } else { u64::from(FLOW_PROXIED) | JUDGED }
}

/// The first packet of a connection.
#[inline(always)]
pub fn opens(signals: u8) -> bool {
    signals & (SIGNAL_SYN | SIGNAL_ACK | SIGNAL_RST) == SIGNAL_SYN
}

/// What a packet is to a flow that the proxy has an end of; a number, as [`Redirect`].
#[derive(Clone, Copy)]
pub struct Next(u32);

impl Next {
    /// Its sender has no part in the flow, because the proxy is in its place: it chose the port that the proxy chose in its name, or answers what
    /// it never got.
    #[inline(always)]
    pub fn is_strange(self) -> bool {
        self.0 & IS_STRANGE != 0
    }

    /// It begins another flow of the same ends.
    #[inline(always)]
    pub fn begins(self) -> bool {
        self.0 & BEGINS != 0
    }

    /// Flags that the flow does not have for this packet, which the rules judge anew: they alone tell the port of the socket, and whether a UDP
    /// flow is the proxy's still. None where it goes on as it is.
    #[inline(always)]
    pub fn anew(self) -> u16 {
        self.0 as u16
    }
}

/// What a packet is to its flow, which has a row with these flags, of [`wharf_common::flow::FLOW_OF_PROXY`] at least one.
#[inline(always)]
pub fn next(ctx: &TcContext, packet: &Packet, flags: u16, by_owner: bool) -> Next {
    let of_packet = if opens(packet.signals) { OPENS } else { 0 } | if packet.protocol == UDP { IS_UDP } else { 0 };
    let of_flow = u32::from(flags) | if by_owner { BY_OWNER } else { 0 };
    // The other way round: what the other end would send.
    let ports = packet.ports().rotate_left(16);
    // SAFETY: the context the program was called with.
    Next(core::hint::black_box(unsafe { wharf_next(ctx.skb.skb, ports, of_packet | of_flow) }))
}

/// In what [`wharf_next`] is asked, beside the flow's flags and [`BY_OWNER`].
const OPENS: u32 = 1 << 19;
const IS_UDP: u32 = 1 << 20;
/// What [`wharf_next`] answers, beside [`Next::anew`].
const GOES_ON: u32 = 0;
const BEGINS: u32 = 1 << 16;
const IS_STRANGE: u32 = 1 << 17;
/// [`FLOW_REPLIED`] is cleared too, so that `POLICY_KEEPS_FLOWS` does not skip the judgement that gives the port.
const ANEW: u32 = (FLOW_PROXIED | FLOW_REPLIED) as u32;

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
    if is_strange(ctx, flags, by_owner) {
        // The proxy closes its socket when its flow is over, which no packet of UDP says.
        let is_over = udp && by_owner && !has_socket(ctx, ports);
        return if is_over { BEGINS } else { IS_STRANGE };
    }
    if !by_owner {
        return GOES_ON;
    }
    // The proxy chose the port of a flow that the client began.
    let is_proxys = udp && is_by_node(ctx) && flags & FLOW_UPSTREAM == 0 && mark_of(ctx) & MARKS_OF_PROXY != 0;
    match flags & FLOW_PROXIED {
        _ if what & OPENS != 0 || is_proxys => BEGINS,
        0 => GOES_ON,
        _ if udp => ANEW,
        _ => GOES_ON,
    }
}

/// True where a socket of the proxy's takes what comes from the destination of the packet at hand to its source; `ports`: of that.
#[inline(always)]
fn has_socket(ctx: &TcContext, ports: u32) -> bool {
    let mut tuple = [0; 9];
    let (client, server) = (offset_of!(Ipv4, source), offset_of!(Ipv4, destination));
    if is_v4(ctx) {
        tuple[2] = ports;
        return load(ctx, server, &mut tuple, 0, 1)
            && load(ctx, client, &mut tuple, 1, 1)
            && is_taken(ctx, true, &mut tuple, 3);
    }
    let (client, server) = (offset_of!(Ipv6, source), offset_of!(Ipv6, destination));
    tuple[8] = ports;
    load(ctx, server, &mut tuple, 0, 4) && load(ctx, client, &mut tuple, 4, 4) && is_taken(ctx, true, &mut tuple, 9)
}

/// Loads words at an offset of the IP header into the tuple.
#[inline(always)]
fn load(ctx: &TcContext, offset: usize, tuple: &mut [u32; 9], at: usize, words: u32) -> bool {
    let (skb, offset) = (ctx.skb.skb.cast(), (ETHERNET_BYTES + offset) as u32);
    // SAFETY: the context the program was called with, and room for the words.
    unsafe { bpf_skb_load_bytes(skb, offset, tuple.as_mut_ptr().add(at).cast(), words * 4) == 0 }
}

/// True for a packet that the node's own stack made; false for one that a container sends, which came by a link.
#[inline(always)]
pub fn is_by_node(ctx: &TcContext) -> bool {
    // SAFETY: the context the program was called with.
    unsafe { (*ctx.skb.skb).ingress_ifindex == 0 }
}

/// True for a packet, at a hook on its way to a container, that the proxy sends in the name of a server, or that a server on the node sends to the
/// proxy. It is of a flow that a client began, and begins none where that one's row is gone: what the client sends would pass for answers, which no
/// rule redirects.
#[inline(always)]
pub fn is_answer(ctx: &TcContext, of_proxy: u16) -> bool {
    of_proxy & FLOW_UPSTREAM == 0 && is_by_node(ctx) && (of_proxy & FLOW_PROXIED != 0 || !is_of_node(ctx))
}

/// True for a packet of a flow with these flags whose sender has no part in the flow, because the proxy is in its place.
#[inline(always)]
pub fn is_strange(ctx: &TcContext, flags: u16, by_owner: bool) -> bool {
    flags & in_place_of(by_owner) != 0 && !is_by_node(ctx)
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
pub fn of_proxy(ctx: &TcContext, asked: &Asked, packet: &Packet) -> u16 {
    if asked.direction as u32 == Direction::Egress as u32 || !is_by_node(ctx) {
        return 0;
    }
    match mark_of(ctx) & MARKS_OF_PROXY {
        // SAFETY: the context the program was called with.
        0 if packet.protocol == TCP => {
            core::hint::black_box(unsafe { wharf_upstream(ctx.skb.skb, packet.ports()) }) as u16
        }
        0 => 0,
        MARK_PROXIED_EGRESS => FLOW_UPSTREAM,
        _ => FLOW_UPSTREAM | FLOW_LET_IN,
    }
}

/// [`FLOW_PROXIED`] for a packet of TCP, from the node to a container, that a connection of the proxy's takes: a server on the node answers there to
/// what no hook has seen. Else zero. `ports`: [`Packet::ports`].
///
/// Its name is exported and it takes but the context and numbers, so that the verifier looks at it once.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_upstream(skb: *mut __sk_buff, ports: u32) -> u32 {
    let ctx = &TcContext::new(skb);
    if Profile::of(0).is_none_or(|node| node.ifindex() == 0) {
        return 0;
    }
    let state = tcp_state(ctx, ports);
    if state == NO_SOCKET || state == LISTEN { 0 } else { FLOW_PROXIED.into() }
}

/// State of the TCP socket that takes the packet at hand (`BPF_TCP_*` of `linux/bpf.h`), zero without one. `ports`: [`Packet::ports`].
#[inline(always)]
pub fn tcp_state(ctx: &TcContext, ports: u32) -> u32 {
    let mut tuple = [0; 9];
    if is_v4(ctx) {
        tuple[2] = ports;
        return if load(ctx, offset_of!(Ipv4, source), &mut tuple, 0, 2) {
            state(ctx, &mut tuple, 3)
        } else {
            NO_SOCKET
        };
    }
    tuple[8] = ports;
    if load(ctx, offset_of!(Ipv6, source), &mut tuple, 0, 8) { state(ctx, &mut tuple, 9) } else { NO_SOCKET }
}

/// True when a TCP socket listens at this port of the node's loopback address of the packet's family, or of any address; any socket of UDP does
/// that is bound there.
#[inline(always)]
fn listens(ctx: &TcContext, port: u32, udp: bool) -> bool {
    let port = u32::from((port as u16).to_be()) << 16;
    let mut tuple = [0; 9];
    let words = if is_v4(ctx) {
        (tuple[1], tuple[2]) = (0x7f00_0001_u32.to_be(), port);
        3
    } else {
        (tuple[7], tuple[8]) = (1_u32.to_be(), port);
        9
    };
    is_taken(ctx, udp, &mut tuple, words)
}

#[inline(always)]
fn is_v4(ctx: &TcContext) -> bool {
    // SAFETY: the context the program was called with.
    unsafe { (*ctx.skb.skb).protocol == PROTOCOL_IPV4 }
}

/// True when a TCP socket listens for packets of this `struct bpf_sock_tuple` (source and destination, then the ports), or a UDP socket takes them.
#[inline(always)]
fn is_taken(ctx: &TcContext, udp: bool, tuple: &mut [u32; 9], words: u32) -> bool {
    if !udp {
        return state(ctx, tuple, words) == LISTEN;
    }
    let (skb, tuple, bytes) = (ctx.skb.skb.cast(), tuple.as_mut_ptr().cast::<bpf_sock_tuple>(), words * 4);
    // SAFETY: the context, and a tuple of that many bytes; a negative namespace is that of the packet's device. A socket from a lookup is given
    // back once.
    unsafe {
        let socket = bpf_sk_lookup_udp(skb, tuple, bytes, u64::MAX, 0);
        if socket.is_null() {
            return false;
        }
        bpf_sk_release(socket.cast());
    }
    true
}

/// State of the TCP socket that takes packets of this tuple, or [`NO_SOCKET`].
#[inline(always)]
fn state(ctx: &TcContext, tuple: &mut [u32; 9], words: u32) -> u32 {
    let (skb, tuple, bytes) = (ctx.skb.skb.cast(), tuple.as_mut_ptr().cast::<bpf_sock_tuple>(), words * 4);
    // SAFETY: as in `is_taken`.
    unsafe {
        let socket = bpf_skc_lookup_tcp(skb, tuple, bytes, u64::MAX, 0);
        if socket.is_null() {
            return NO_SOCKET;
        }
        let state = ptr::read_volatile(&raw const (*socket).state);
        bpf_sk_release(socket.cast());
        state
    }
}
