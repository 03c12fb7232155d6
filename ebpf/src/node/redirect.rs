//! Hands flows to the proxy where a rule redirects them.
//!
//! **To the proxy.** By [`MARK_TO_PROXY`] a routing rule of the node delivers a packet locally for any destination,
//! and the kernel finds the proxy's transparent socket, which has the addresses and ports of client and server. Until
//! that socket exists (first packets and, with SYN cookies, those that complete the handshake), packets also have the
//! proxy's port in their mark, and the node's nftables table assigns them to the listening socket. A packet from the
//! stack to a container's link is turned back ([`wharf_ebpf::turn`]).
//!
//! **UDP**: one proxy socket receives all flows, so each packet has the port in its mark and is judged for it. A flow
//! goes to the proxy from the first redirected packet, and back to the server when the rules no longer redirect.
//! Fragments have the port too; the kernel reassembles them before a `tproxy` rule, also turned ones.
//!
//! **From the proxy.** Its packets have the client's address and a source port that the node's stack chose. That flow's
//! row has [`FLOW_UPSTREAM`], and the answers go to the proxy. One flow can be both: the server's rules can redirect
//! what the proxy sends for the client's rules. UDP answers have the server's address as source and no mark.
//!
//! **A server on the node** receives the proxy's packets without a hook, and answers to the container's link. The
//! proxy's socket identifies such an answer, which is turned back too; its flow has no row.
//!
//! The client's own stack can choose the same port for the same server, so a TCP connection of the proxy has another
//! key ([`wharf_common::FlowKey::upstream`]): its packets are known by their mark, and those of the other end by the
//! client's flow ([`may_answer_proxy`]). For UDP, the later flow owns the row; a port range of the proxy outside the
//! clients' (usually 32768 to 60999) avoids this.

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
    clients,
    packet::Packet,
    policy::{Passed, is_of_node},
};

/// `BPF_TCP_LISTEN` of `linux/bpf.h`.
const LISTEN: u32 = 10;
/// Not a state of a TCP socket.
const NO_SOCKET: u32 = 0;
const MARKS: u32 = (1 << MARK_PORT_SHIFT) - 1;
/// The marks of packets in a client's name.
const MARKS_OF_PROXY: u32 = MARK_PROXIED_EGRESS | MARK_PROXIED_INGRESS;

/// Decision about a packet whose flow the rules redirect and that is not yet the proxy's. A number, because the
/// verifier follows every path to the end.
#[derive(Clone, Copy)]
pub struct Redirect(u64);

impl Redirect {
    /// The connection is older than the rule: the proxy's listening socket resets it.
    #[inline(always)]
    pub fn resets(self) -> bool {
        self.0 & RESETS != 0
    }

    /// The flow's new flag: [`FLOW_PROXIED`], or none if the proxy is missing and the rule open.
    #[inline(always)]
    pub fn flag(self) -> u16 {
        self.0 as u16 & FLOW_PROXIED
    }

    /// The generation to record; zero if the next packet must be judged again.
    #[inline(always)]
    pub fn generation(self, of_rules: u32) -> u32 {
        of_rules & (self.0 >> 32) as u32
    }
}

/// Decides about a packet whose flow the rules redirect, and marks it for the proxy's listening socket. `running`:
/// the flow has a row and is not the proxy's; `by_owner`: as in [`crate::policy::judge`].
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
    // SAFETY: the program's context.
    let what = unsafe { wharf_redirect(ctx.skb.skb, passed.port(), of_packet | of_flow | open) };
    match core::hint::black_box(what) {
        UNAVAILABLE => Err(DropReason::ProxyUnavailable),
        what => Ok(Redirect(what)),
    }
}

/// Argument of [`wharf_redirect`], with the protocol and, from bit 8, the signals.
const RUNNING: u32 = 1 << 16;
const BY_OWNER: u32 = 1 << 17;
const IS_OPEN: u32 = 1 << 18;
/// Result of [`wharf_redirect`], with [`FLOW_PROXIED`] and, in the high half, a mask for the recorded generation.
const UNAVAILABLE: u64 = 0;
const RESETS: u64 = 1 << 0;
const PASSES: u64 = 1 << 1;
const JUDGED: u64 = 0xffff_ffff << 32;

/// [`redirect`] as a global function.
///
/// # Safety
///
/// `skb`: the program's context.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_redirect(skb: *mut __sk_buff, port: u32, what: u32) -> u64 {
    let (ctx, protocol, signals, running) = (&TcContext::new(skb), what as u8, (what >> 8) as u8, what & RUNNING != 0);
    let udp = protocol == UDP;
    if protocol != TCP && !udp || !listens(ctx, port, udp) {
        return match what & IS_OPEN {
            0 => UNAVAILABLE,
            // Judged again at the next packet, so the flow goes to the proxy once it is back.
            _ if udp => PASSES,
            _ => PASSES | JUDGED,
        };
    }
    if running && what & BY_OWNER == 0 {
        // An answer to packets that the proxy has not seen. Only the listening socket's reset, which ends the
        // connection, passes.
        return if signals & SIGNAL_RST != 0 && is_by_node(ctx) { PASSES } else { UNAVAILABLE };
    }
    // A socket of the connection precedes the listening one.
    let port = u32::from((port as u16).to_be());
    set_mark_of(ctx, mark_of(ctx) & MARKS | port << MARK_PORT_SHIFT);
    // A first or repeated first packet starts a new connection at the proxy.
    if running && !udp && !opens(signals) { RESETS } else { u64::from(FLOW_PROXIED) | JUDGED }
}

#[inline(always)]
pub fn opens(signals: u8) -> bool {
    signals & (SIGNAL_SYN | SIGNAL_ACK | SIGNAL_RST) == SIGNAL_SYN
}

/// Role of a packet in a flow with the proxy at one end; a number, like [`Redirect`].
#[derive(Clone, Copy)]
pub struct Next(u32);

impl Next {
    /// The proxy replaces the sender: the proxy chose the sender's port in the sender's name, or the sender answers
    /// packets that it never received.
    #[inline(always)]
    pub fn is_strange(self) -> bool {
        self.0 & IS_STRANGE != 0
    }

    #[inline(always)]
    pub fn begins(self) -> bool {
        self.0 & BEGINS != 0
    }

    /// Flags to clear so that the rules judge the packet again: only they give the listening socket's port, and whether
    /// a UDP flow is still the proxy's.
    #[inline(always)]
    pub fn anew(self) -> u16 {
        self.0 as u16
    }
}

/// `flags`: at least one of [`wharf_common::flow::FLOW_OF_PROXY`].
#[inline(always)]
pub fn next(ctx: &TcContext, packet: &Packet, flags: u16, by_owner: bool) -> Next {
    let of_packet = if opens(packet.signals) { OPENS } else { 0 } | if packet.protocol == UDP { IS_UDP } else { 0 };
    let of_flow = u32::from(flags) | if by_owner { BY_OWNER } else { 0 };
    // The other end's ports.
    let ports = packet.ports().rotate_left(16);
    // SAFETY: the program's context.
    Next(core::hint::black_box(unsafe { wharf_next(ctx.skb.skb, ports, of_packet | of_flow) }))
}

/// Argument of [`wharf_next`], with the flow's flags and [`BY_OWNER`].
const OPENS: u32 = 1 << 19;
const IS_UDP: u32 = 1 << 20;
/// Result of [`wharf_next`], with the flags to clear.
const GOES_ON: u32 = 0;
const BEGINS: u32 = 1 << 16;
const IS_STRANGE: u32 = 1 << 17;
/// Also clears [`FLOW_REPLIED`], so that `POLICY_KEEPS_FLOWS` does not skip the judgement that gives the port.
const ANEW: u32 = (FLOW_PROXIED | FLOW_REPLIED) as u32;

/// [`next`] as a global function. `ports`: [`Packet::ports`] of a packet in the other direction.
///
/// # Safety
///
/// `skb`: the program's context.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_next(skb: *mut __sk_buff, ports: u32, what: u32) -> u32 {
    let ctx = &TcContext::new(skb);
    let (flags, by_owner, udp) = (what as u16, what & BY_OWNER != 0, what & IS_UDP != 0);
    if is_strange(ctx, flags, by_owner) {
        // The proxy closes its socket when its flow ends; UDP has no packet for that.
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
        _ if clients::may_await_socket(flags) && !has_connection(ctx, ports.rotate_left(16)) => ANEW,
        _ => GOES_ON,
    }
}

/// True if a UDP socket of the proxy receives the answers to this packet; `ports`: of those.
#[inline(always)]
fn has_socket(ctx: &TcContext, ports: u32) -> bool {
    socket(ctx, ports, ANSWERS | OF_UDP) != NO_SOCKET
}

/// Loads words at an offset of the IP header.
#[inline(always)]
fn load(ctx: &TcContext, offset: usize, tuple: &mut [u32; 9], at: usize, words: u32) -> bool {
    let (skb, offset) = (ctx.skb.skb.cast(), (ETHERNET_BYTES + offset) as u32);
    // SAFETY: the program's context, and room for the words.
    unsafe { bpf_skb_load_bytes(skb, offset, tuple.as_mut_ptr().add(at).cast(), words * 4) == 0 }
}

/// The node's stack created the packet; a container's came over a link.
#[inline(always)]
pub fn is_by_node(ctx: &TcContext) -> bool {
    // SAFETY: the program's context.
    unsafe { (*ctx.skb.skb).ingress_ifindex == 0 }
}

#[inline(always)]
pub fn has_mark_of_proxy(ctx: &TcContext) -> bool {
    mark_of(ctx) & MARKS_OF_PROXY != 0
}

/// True for a TCP packet to a container that the proxy sends in a client's name.
#[inline(always)]
pub fn is_upstream(ctx: &TcContext, packet: &Packet) -> bool {
    packet.protocol == TCP && has_mark_of_proxy(ctx) && is_by_node(ctx)
}

/// True if the packet can belong to a connection that the proxy began in a client's name, although the client's own
/// flow has these addresses and ports: the proxy replaces the packet's sender there. `flags`: of that flow.
#[inline(always)]
pub fn may_answer_proxy(ctx: &TcContext, flags: u16, by_owner: bool) -> bool {
    flags & FLOW_PROXIED != 0 && !by_owner && !is_by_node(ctx)
}

/// True for a packet to a container that the proxy sends in a server's name, or a server on the node to the proxy. It
/// belongs to a client's flow and begins none without that row: the client's packets would then count as answers,
/// which no rule redirects.
#[inline(always)]
pub fn is_answer(ctx: &TcContext, of_proxy: u16) -> bool {
    of_proxy & FLOW_UPSTREAM == 0 && is_by_node(ctx) && (of_proxy & FLOW_PROXIED != 0 || !is_of_node(ctx))
}

/// The proxy replaces the packet's sender in a flow with these flags.
#[inline(always)]
pub fn is_strange(ctx: &TcContext, flags: u16, by_owner: bool) -> bool {
    flags & in_place_of(by_owner) != 0 && !is_by_node(ctx)
}

/// The packet of a flow with these flags goes to the proxy.
#[inline(always)]
pub fn is_for_proxy(flags: u16, by_owner: bool) -> bool {
    flags & in_place_of(!by_owner) != 0
}

/// The flag for the proxy in place of the end that began the flow (`owner`), or the other end.
#[inline(always)]
fn in_place_of(owner: bool) -> u16 {
    if owner { FLOW_UPSTREAM } else { FLOW_PROXIED }
}

/// # Errors
/// `ProxyUnavailable` for a packet that already has the mark at a container's link: the node does not deliver it.
#[inline(always)]
pub fn mark(ctx: &TcContext, asked: &Asked) -> Result<(), DropReason> {
    let mark = mark_of(ctx);
    if asked.direction as u32 == Direction::Ingress as u32 && mark & MARK_TO_PROXY != 0 {
        return Err(DropReason::ProxyUnavailable);
    }
    set_mark_of(ctx, mark | MARK_TO_PROXY);
    Ok(())
}

#[inline(always)]
fn mark_of(ctx: &TcContext) -> u32 {
    // SAFETY: the program's context. Volatile: the verifier wants whole accesses of the words.
    unsafe { ptr::read_volatile(&raw const (*ctx.skb.skb).mark) }
}

#[inline(always)]
fn set_mark_of(ctx: &TcContext, mark: u32) {
    // SAFETY: as in `mark_of`; a classifier may write it.
    unsafe { ptr::write_volatile(&raw mut (*ctx.skb.skb).mark, mark) };
}

/// Proxy flags of a flow that begins with this packet.
#[inline(always)]
pub fn of_proxy(ctx: &TcContext, asked: &Asked, packet: &Packet) -> u16 {
    if asked.direction as u32 == Direction::Egress as u32 || !is_by_node(ctx) {
        return 0;
    }
    match mark_of(ctx) & MARKS_OF_PROXY {
        // SAFETY: the program's context.
        0 if packet.protocol == TCP => {
            core::hint::black_box(unsafe { wharf_upstream(ctx.skb.skb, packet.ports()) }) as u16
        }
        0 => 0,
        MARK_PROXIED_EGRESS => FLOW_UPSTREAM,
        _ => FLOW_UPSTREAM | FLOW_LET_IN,
    }
}

/// [`FLOW_PROXIED`] for a TCP packet from the node to a container that a proxy connection receives: a server on the
/// node answers packets that passed no hook. Else zero. `ports`: [`Packet::ports`]. A global function, verified once.
///
/// # Safety
///
/// `skb`: the program's context.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_upstream(skb: *mut __sk_buff, ports: u32) -> u32 {
    let ctx = &TcContext::new(skb);
    if Profile::of(0).is_none_or(|node| node.ifindex() == 0) {
        return 0;
    }
    if has_connection(ctx, ports) { FLOW_PROXIED.into() } else { 0 }
}

/// True if a TCP socket of its own connection, not a listening one, takes the packet. `ports`: [`Packet::ports`].
#[inline(always)]
fn has_connection(ctx: &TcContext, ports: u32) -> bool {
    !matches!(tcp_state(ctx, ports), NO_SOCKET | LISTEN)
}

/// State of the TCP socket that takes the current packet (`BPF_TCP_*` of `linux/bpf.h`), or [`NO_SOCKET`].
/// `ports`: [`Packet::ports`].
#[inline(always)]
pub fn tcp_state(ctx: &TcContext, ports: u32) -> u32 {
    socket(ctx, ports, 0)
}

/// True if a TCP socket listens at this port of the node's loopback or any address in the packet's family, or a UDP
/// socket is bound there.
#[inline(always)]
fn listens(ctx: &TcContext, port: u32, udp: bool) -> bool {
    let ports = u32::from((port as u16).to_be()) << 16;
    socket(ctx, ports, AT_LOOPBACK | if udp { OF_UDP } else { 0 }) == LISTEN
}

/// [`wharf_socket`].
#[inline(always)]
fn socket(ctx: &TcContext, ports: u32, what: u32) -> u32 {
    // SAFETY: the program's context.
    core::hint::black_box(unsafe { wharf_socket(ctx.skb.skb, ports, what) })
}

/// Arguments of [`wharf_socket`]. The socket that takes the answers to the packet.
const ANSWERS: u32 = 1 << 0;
/// The one at the node's loopback address.
const AT_LOOPBACK: u32 = 1 << 1;
const OF_UDP: u32 = 1 << 2;

/// State of the socket that takes the packet (`BPF_TCP_*` of `linux/bpf.h`; [`LISTEN`] for UDP), or [`NO_SOCKET`].
/// `ports`: [`Packet::ports`] of a packet that this socket takes. A global function, verified once.
///
/// # Safety
///
/// `skb`: the program's context.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_socket(skb: *mut __sk_buff, ports: u32, what: u32) -> u32 {
    let ctx = &TcContext::new(skb);
    let order = |source, destination| if what & ANSWERS == 0 { (source, destination) } else { (destination, source) };
    let mut tuple = [0; 9];
    let words = if is_v4(ctx) {
        let (first, second) = order(offset_of!(Ipv4, source), offset_of!(Ipv4, destination));
        if what & AT_LOOPBACK != 0 {
            tuple[1] = 0x7f00_0001_u32.to_be();
        } else if !load(ctx, first, &mut tuple, 0, 1) || !load(ctx, second, &mut tuple, 1, 1) {
            return NO_SOCKET;
        }
        tuple[2] = ports;
        3
    } else {
        let (first, second) = order(offset_of!(Ipv6, source), offset_of!(Ipv6, destination));
        if what & AT_LOOPBACK != 0 {
            tuple[7] = 1_u32.to_be();
        } else if !load(ctx, first, &mut tuple, 0, 4) || !load(ctx, second, &mut tuple, 4, 4) {
            return NO_SOCKET;
        }
        tuple[8] = ports;
        9
    };
    let (tuple, bytes) = (tuple.as_mut_ptr().cast::<bpf_sock_tuple>(), words * 4);
    // SAFETY: the context, and a tuple of that many bytes; a negative namespace is the packet's device's. A socket is
    // released once.
    unsafe {
        if what & OF_UDP != 0 {
            let socket = bpf_sk_lookup_udp(skb.cast(), tuple, bytes, u64::MAX, 0);
            if socket.is_null() {
                return NO_SOCKET;
            }
            bpf_sk_release(socket.cast());
            return LISTEN;
        }
        let socket = bpf_skc_lookup_tcp(skb.cast(), tuple, bytes, u64::MAX, 0);
        if socket.is_null() {
            return NO_SOCKET;
        }
        let state = ptr::read_volatile(&raw const (*socket).state);
        bpf_sk_release(socket.cast());
        state
    }
}

#[inline(always)]
fn is_v4(ctx: &TcContext) -> bool {
    // SAFETY: the program's context.
    unsafe { (*ctx.skb.skb).protocol == PROTOCOL_IPV4 }
}
