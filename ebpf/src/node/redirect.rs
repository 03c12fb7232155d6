//! Hands flows to the proxy where a rule redirects them.
//!
//! **To the proxy.** [`MARK_TO_PROXY`] makes the node deliver a packet locally, to the proxy's transparent socket with
//! the addresses and ports of client and server. Until that socket exists (first packets; with SYN cookies, also those
//! that complete the handshake), the mark also has the proxy's port, and the node's nftables table assigns the packet
//! to the listening socket. Packets from the stack to a container's link are turned back ([`wharf_ebpf::turn`]).
//!
//! **UDP.** One proxy socket receives all flows, so each packet has the port in its mark and is judged for it. A
//! running flow moves to the proxy or back. The kernel reassembles fragments before a `tproxy` rule.
//!
//! **From the proxy.** Its packets have the client's address and a source port of the node's stack. The flow's row has
//! [`FLOW_UPSTREAM`]; answers go to the proxy. The server's rules can redirect the flow again. UDP answers have the
//! server's address and no mark.
//!
//! **A server on the node** receives the proxy's packets without a hook. Its answers to the container's link are
//! recognized by the proxy's socket and turned back, without a row.
//!
//! The client may use the same port to the same server. So a proxy's TCP connection has another key
//! ([`wharf_common::FlowKey::upstream`]): its packets are recognized by the mark, answers by the client's flow
//! ([`may_answer_proxy`]). For UDP, the later flow owns the row; a port range of the proxy outside the clients'
//! (usually 32768 to 60999) avoids this.

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
const MARKS_OF_PROXY: u32 = MARK_PROXIED_EGRESS | MARK_PROXIED_INGRESS;

/// A number, because the verifier follows every path to the end.
#[derive(Clone, Copy)]
pub struct Redirect(u64);

impl Redirect {
    /// The connection is older than the rule: the proxy's listening socket resets it.
    #[inline(always)]
    pub fn resets(self) -> bool {
        self.0 & RESETS != 0
    }

    /// [`FLOW_PROXIED`], or zero if the proxy is missing and the rule open.
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

/// Decides about a packet whose flow the rules redirect, and marks it for the proxy's listening socket. `running`: the
/// flow has a row without [`FLOW_PROXIED`]. Error: `ProxyUnavailable`.
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
    // SAFETY: the context.
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

#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_redirect(skb: *mut __sk_buff, port: u32, what: u32) -> u64 {
    let (ctx, protocol, signals, running) = (&TcContext::new(skb), what as u8, (what >> 8) as u8, what & RUNNING != 0);
    let udp = protocol == UDP;
    if protocol != TCP && !udp || !listens(ctx, port, udp) {
        return match what & IS_OPEN {
            0 => UNAVAILABLE,
            // The proxy may be back at the next packet.
            _ if udp => PASSES,
            _ => PASSES | JUDGED,
        };
    }
    if running && what & BY_OWNER == 0 {
        // An answer to packets that the proxy has not seen: only the listening socket's reset passes.
        return if signals & SIGNAL_RST != 0 && is_by_node(ctx) { PASSES } else { UNAVAILABLE };
    }
    // The kernel prefers a connection's socket to the listening socket.
    let port = u32::from((port as u16).to_be());
    set_mark_of(ctx, mark_of(ctx) & MARKS | port << MARK_PORT_SHIFT);
    // A first packet, also a repeated one, starts a connection at the proxy.
    if running && !udp && !opens(signals) { RESETS } else { u64::from(FLOW_PROXIED) | JUDGED }
}

#[inline(always)]
pub fn opens(signals: u8) -> bool {
    signals & (SIGNAL_SYN | SIGNAL_ACK | SIGNAL_RST) == SIGNAL_SYN
}

/// A packet's role in a flow of the proxy; a number, like [`Redirect`].
#[derive(Clone, Copy)]
pub struct Next(u32);

impl Next {
    /// The proxy replaces the sender: it uses the sender's port, or the sender answers packets that it never received.
    #[inline(always)]
    pub fn is_strange(self) -> bool {
        self.0 & IS_STRANGE != 0
    }

    #[inline(always)]
    pub fn begins(self) -> bool {
        self.0 & BEGINS != 0
    }

    /// Flags to clear: the rules must judge the packet again, for the listening socket's port, and whether a UDP flow
    /// is still redirected.
    #[inline(always)]
    pub fn anew(self) -> u16 {
        self.0 as u16
    }
}

/// `flags`: with [`wharf_common::flow::FLOW_OF_PROXY`].
#[inline(always)]
pub fn next(ctx: &TcContext, packet: &Packet, flags: u16, by_owner: bool) -> Next {
    let of_packet = if opens(packet.signals) { OPENS } else { 0 } | if packet.protocol == UDP { IS_UDP } else { 0 };
    let of_flow = u32::from(flags) | if by_owner { BY_OWNER } else { 0 };
    // The other end's ports.
    let ports = packet.ports().rotate_left(16);
    // SAFETY: the context.
    Next(core::hint::black_box(unsafe { wharf_next(ctx.skb.skb, ports, of_packet | of_flow) }))
}

/// Argument of [`wharf_next`], with the flow's flags and [`BY_OWNER`].
const OPENS: u32 = 1 << 19;
const IS_UDP: u32 = 1 << 20;
/// Result of [`wharf_next`], with the flags to clear.
const GOES_ON: u32 = 0;
const BEGINS: u32 = 1 << 16;
const IS_STRANGE: u32 = 1 << 17;
/// With [`FLOW_REPLIED`], `POLICY_KEEPS_FLOWS` would skip the judgement that gives the port.
const ANEW: u32 = (FLOW_PROXIED | FLOW_REPLIED) as u32;

/// `ports`: of a packet in the other direction.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_next(skb: *mut __sk_buff, ports: u32, what: u32) -> u32 {
    let ctx = &TcContext::new(skb);
    let (flags, by_owner, udp) = (what as u16, what & BY_OWNER != 0, what & IS_UDP != 0);
    if is_strange(ctx, flags, by_owner) {
        // No UDP packet ends a flow; the proxy closes its socket.
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

/// A UDP socket of the proxy receives answers with these ports.
#[inline(always)]
fn has_socket(ctx: &TcContext, ports: u32) -> bool {
    socket(ctx, ports, ANSWERS | OF_UDP) != NO_SOCKET
}

#[inline(always)]
fn load(ctx: &TcContext, offset: usize, tuple: &mut [u32; 9], at: usize, words: u32) -> bool {
    let (skb, offset) = (ctx.skb.skb.cast(), (ETHERNET_BYTES + offset) as u32);
    // SAFETY: the context, and room for the words.
    unsafe { bpf_skb_load_bytes(skb, offset, tuple.as_mut_ptr().add(at).cast(), words * 4) == 0 }
}

/// Packets of containers came over a link.
#[inline(always)]
pub fn is_by_node(ctx: &TcContext) -> bool {
    // SAFETY: the context.
    unsafe { (*ctx.skb.skb).ingress_ifindex == 0 }
}

#[inline(always)]
pub fn has_mark_of_proxy(ctx: &TcContext) -> bool {
    mark_of(ctx) & MARKS_OF_PROXY != 0
}

/// The proxy sends the packet to a container in a client's name.
#[inline(always)]
pub fn is_upstream(ctx: &TcContext, packet: &Packet) -> bool {
    packet.protocol == TCP && has_mark_of_proxy(ctx) && is_by_node(ctx)
}

/// The packet may answer a connection that the proxy began in a client's name, although the client's flow (`flags`) has
/// the same addresses and ports.
#[inline(always)]
pub fn may_answer_proxy(ctx: &TcContext, flags: u16, by_owner: bool) -> bool {
    flags & FLOW_PROXIED != 0 && !by_owner && !is_by_node(ctx)
}

/// A packet to a container from the proxy in a server's name, or from a server on the node to the proxy. It begins no
/// flow, where the client's packets would count as answers, which no rule redirects.
#[inline(always)]
pub fn is_answer(ctx: &TcContext, of_proxy: u16) -> bool {
    of_proxy & FLOW_UPSTREAM == 0 && is_by_node(ctx) && (of_proxy & FLOW_PROXIED != 0 || !is_of_node(ctx))
}

/// The proxy replaces the packet's sender.
#[inline(always)]
pub fn is_strange(ctx: &TcContext, flags: u16, by_owner: bool) -> bool {
    flags & in_place_of(by_owner) != 0 && !is_by_node(ctx)
}

#[inline(always)]
pub fn is_for_proxy(flags: u16, by_owner: bool) -> bool {
    flags & in_place_of(!by_owner) != 0
}

/// Flag of the proxy in place of the initiator (`owner`) or the other end.
#[inline(always)]
fn in_place_of(owner: bool) -> u16 {
    if owner { FLOW_UPSTREAM } else { FLOW_PROXIED }
}

/// Error: `ProxyUnavailable` for an already marked packet at a container's link.
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
    // SAFETY: the context. Volatile: the verifier wants whole accesses of the words.
    unsafe { ptr::read_volatile(&raw const (*ctx.skb.skb).mark) }
}

#[inline(always)]
fn set_mark_of(ctx: &TcContext, mark: u32) {
    // SAFETY: as in `mark_of`; a classifier may write it.
    unsafe { ptr::write_volatile(&raw mut (*ctx.skb.skb).mark, mark) };
}

/// Flags of a flow that begins with this packet.
#[inline(always)]
pub fn of_proxy(ctx: &TcContext, asked: &Asked, packet: &Packet) -> u16 {
    if asked.direction as u32 == Direction::Egress as u32 || !is_by_node(ctx) {
        return 0;
    }
    match mark_of(ctx) & MARKS_OF_PROXY {
        // SAFETY: the context.
        0 if packet.protocol == TCP => {
            core::hint::black_box(unsafe { wharf_upstream(ctx.skb.skb, packet.ports()) }) as u16
        }
        0 => 0,
        MARK_PROXIED_EGRESS => FLOW_UPSTREAM,
        _ => FLOW_UPSTREAM | FLOW_LET_IN,
    }
}

/// [`FLOW_PROXIED`] for a TCP packet that a server on the node sends to a proxy connection, else zero.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_upstream(skb: *mut __sk_buff, ports: u32) -> u32 {
    let ctx = &TcContext::new(skb);
    if Profile::of(0).is_none_or(|node| node.ifindex() == 0) {
        return 0;
    }
    if has_connection(ctx, ports) { FLOW_PROXIED.into() } else { 0 }
}

/// A TCP socket, not a listening one, takes the packet.
#[inline(always)]
fn has_connection(ctx: &TcContext, ports: u32) -> bool {
    !matches!(tcp_state(ctx, ports), NO_SOCKET | LISTEN)
}

/// State of the TCP socket that takes the current packet (`BPF_TCP_*` of `linux/bpf.h`), or [`NO_SOCKET`].
#[inline(always)]
pub fn tcp_state(ctx: &TcContext, ports: u32) -> u32 {
    socket(ctx, ports, 0)
}

/// A TCP socket listens, or a UDP socket is bound, at this port of the loopback or any address.
#[inline(always)]
fn listens(ctx: &TcContext, port: u32, udp: bool) -> bool {
    let ports = u32::from((port as u16).to_be()) << 16;
    socket(ctx, ports, AT_LOOPBACK | if udp { OF_UDP } else { 0 }) == LISTEN
}

#[inline(always)]
fn socket(ctx: &TcContext, ports: u32, what: u32) -> u32 {
    // SAFETY: the context.
    core::hint::black_box(unsafe { wharf_socket(ctx.skb.skb, ports, what) })
}

/// Argument flags of [`wharf_socket`]: the socket that takes the packet's answers.
const ANSWERS: u32 = 1 << 0;
/// The socket at the loopback address.
const AT_LOOPBACK: u32 = 1 << 1;
const OF_UDP: u32 = 1 << 2;

/// [`tcp_state`], with [`LISTEN`] for a UDP socket. `ports`: of a packet that the socket takes.
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
    // SAFETY: the context.
    unsafe { (*ctx.skb.skb).protocol == PROTOCOL_IPV4 }
}
