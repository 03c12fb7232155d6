//! Judges flows by the rules of both endpoints (`wharf_common::policy`), when they begin and at the next packet after a
//! rule change. The hook that finds the flow judges both ends.

use core::{hint::black_box, ptr};

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use wharf_common::{
    CellKey, CellRow, Direction, DropReason, PolicyState, PortKey,
    flow::{FLOW_LET_IN, FLOW_UPSTREAM, ICMP, ICMPV6, SCTP, TCP, UDP, UNKNOWN_TRANSPORT},
    policy::{
        BY_SERVICE, CHECK_BACKEND, DENY, IDENTITY_NODE, MARK_BY_SERVICE, NO_RANK, PASS, PEER_SERVICE, POLICY_AUDITS,
        PORT_UNKNOWN, REDIRECT, REDIRECT_OPEN, REDIRECT_PORT_SHIFT, RULING, SET_DENIES, UNDECIDED,
    },
};
use wharf_ebpf::{
    atomic, endpoints,
    flow::Asked,
    maps::{POLICY_CELLS, POLICY_PORTS, POLICY_SETS, POLICY_STATE},
    test_packet,
    whole::Whole,
};

use crate::{
    packet::{Packet, address, echo_request},
    sources,
};

/// Rule set that denies every source except the node.
const NO_SET: u32 = u32::MAX;
/// Argument flags of [`wharf_rules`]: the packet goes to the endpoint.
const TO_ENDPOINT: u32 = 1 << 24;
/// The peer is the packet's source.
const OF_SOURCE: u32 = 1 << 25;
/// Result flags of [`wharf_rules`].
const DENIED: u64 = 1 << 32;
/// A rule set decides about a packet to a service.
const TO_SERVICE: u64 = 1 << 33;
/// Also in [`wharf_judge`]'s result.
const REDIRECTED: u64 = 1 << 34;
/// With [`REDIRECTED`]: passes if the proxy is missing.
const OPEN: u64 = 1 << 35;
const UNKNOWN: u64 = 1 << 36;
/// With [`DENIED`]: unknown peer address.
const UNRESOLVED: u64 = 1 << 37;
/// With [`REDIRECTED`]: the proxy's port, host byte order.
const PORT_SHIFT: u32 = 48;
/// Also in [`wharf_judge`]'s result.
const RULE: u64 = 0xffff_ffff;

#[derive(Clone, Copy)]
pub struct Passed(u64);

impl Passed {
    /// With [`BY_SERVICE`], or [`UNDECIDED`]; zero for none.
    #[inline(always)]
    pub fn rule(self) -> u32 {
        self.0 as u32
    }

    #[inline(always)]
    pub fn is_redirected(self) -> bool {
        self.0 & REDIRECTED != 0
    }

    #[inline(always)]
    pub fn is_open(self) -> bool {
        self.0 & OPEN != 0
    }

    /// Host byte order.
    #[inline(always)]
    pub fn port(self) -> u32 {
        (self.0 >> PORT_SHIFT) as u32
    }
}

#[inline(always)]
pub fn state() -> PolicyState {
    POLICY_STATE.get(0).copied().unwrap_or_default()
}

/// Judges a flow with `flags` [`FLOW_UPSTREAM`], [`FLOW_LET_IN`] at both ends. `peer`: the receiving endpoint or zero;
/// `by_owner`: the flow's initiator sent the packet; `rule`: the flow's previous rule or zero.
#[inline(always)]
pub fn judge(
    ctx: &TcContext,
    asked: &Asked,
    peer: u32,
    packet: &Packet,
    by_owner: bool,
    rule: u32,
    flags: u16,
) -> Result<Passed, DropReason> {
    let sends = asked.direction as u32 == Direction::Egress as u32;
    let port = match (packet.protocol, by_owner) {
        (ICMP | ICMPV6, true) => u16::from(packet.kind).to_be(),
        (ICMP | ICMPV6, false) => u16::from(echo_request(packet.protocol)).to_be(),
        (_, true) => packet.destination_port,
        (_, false) => packet.source_port,
    };
    let destination = u32::from(port) | u32::from(packet.protocol) << 16;
    let alone = if test_packet::is_test(ctx) { ALONE } else { 0 };
    let which = (if sends { SENDS } else { 0 }) | if by_owner { BY_OWNER } else { 0 } | alone;
    let which = which | ((rule & BY_SERVICE) / (BY_SERVICE / TRANSLATED));
    let which = which | u32::from(flags & (FLOW_UPSTREAM | FLOW_LET_IN));
    // SAFETY: the context.
    let answer = unsafe { wharf_judge(ctx.skb.skb, asked.own, peer, destination, which) };
    match (answer >> 32) as u32 & (OWN | OTHER | NOT_FOUND) {
        0 => Ok(Passed(answer)),
        OWN => Err(DropReason::PolicyDenied),
        OTHER => Err(DropReason::PeerPolicyDenied),
        _ => Err(DropReason::UnknownTransport),
    }
}

/// Argument flags of [`wharf_judge`]: its endpoint sends the packet.
const SENDS: u32 = 1 << 0;
const BY_OWNER: u32 = 1 << 1;
const ALONE: u32 = 1 << 2;
/// The previous rule has [`BY_SERVICE`].
const TRANSLATED: u32 = 1 << 3;
const _: () = assert!((SENDS | BY_OWNER | ALONE | TRANSLATED) as u16 & (FLOW_UPSTREAM | FLOW_LET_IN) == 0);
/// High half of [`wharf_judge`]'s result: endpoint `own` denies.
const OWN: u32 = 1;
/// The other endpoint denies.
const OTHER: u32 = 2;
const NOT_FOUND: u32 = (UNKNOWN >> 32) as u32;

/// Judges the flow at both ends. `peer`: receiving endpoint, zero for the stack in either direction; `destination`: as
/// in [`wharf_rules`]; `which`: the flags above, and the flow's. Result: in the low half the rule that passes it;
/// [`OWN`], [`OTHER`], [`NOT_FOUND`] or [`REDIRECTED`]. Of two redirects, the client's comes first.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_judge(skb: *mut __sk_buff, own: u32, peer: u32, destination: u32, which: u32) -> u64 {
    let ctx = &TcContext::new(skb);
    let (sends, by_owner) = (which & SENDS != 0, which & BY_OWNER != 0);
    let other = match peer {
        _ if which & ALONE != 0 => 0,
        0 => sources::other(ctx, sends).id(),
        _ => peer,
    };
    let own_began = sends == by_owner;
    let (client, server) = if own_began { (own, other) } else { (other, own) };
    let (to, from) = if by_owner { (0, OF_SOURCE) } else { (OF_SOURCE, 0) };
    let egress = egress_set(client);
    // SAFETY: the context.
    let (mut sent, received) = unsafe {
        let sent = wharf_rules(skb, egress, destination | to);
        (sent, wharf_rules(skb, ingress_set(server), destination | from | TO_ENDPOINT))
    };
    let flags = state().flags;
    let mut by_service = if sent & (DENIED | TO_SERVICE) == TO_SERVICE && sent as u32 | (egress / SET_DENIES) != 0 {
        BY_SERVICE | ((egress / (SET_DENIES / CHECK_BACKEND)) & CHECK_BACKEND)
    } else {
        0
    };
    // The sender's hook judges the address that the sender wrote. At the receiver, the packet's mark has that
    // judgement; for answers, the row.
    let translated = if sends { which & TRANSLATED != 0 } else { service_mark(ctx) != 0 };
    if !own_began && translated && sent & (DENIED | UNKNOWN | UNRESOLVED | RULE) == DENIED {
        // Isolation denies, not a rule: the judgement of the written address applies.
        (sent, by_service) = (0, BY_SERVICE);
    }
    if (sent | received) & DENIED != 0 && flags & POLICY_AUDITS == 0 {
        let by_client = sent & DENIED != 0;
        if sent & TO_SERVICE != 0 && received & DENIED == 0 {
            return UNDECIDED.into();
        }
        if (if by_client { sent } else { received }) & UNKNOWN != 0 {
            return UNKNOWN;
        }
        return u64::from(if by_client == own_began { OWN } else { OTHER }) << 32;
    }
    let rule = if received as u32 != 0 { received & RULE } else { sent & RULE } | u64::from(by_service);
    let of_client = if which & u32::from(FLOW_UPSTREAM) == 0 { sent } else { 0 };
    let of_server = if which & u32::from(FLOW_LET_IN) == 0 { received } else { 0 };
    let redirects = if of_client & REDIRECTED != 0 { of_client } else { of_server };
    if redirects & REDIRECTED == 0 || flags & POLICY_AUDITS != 0 { rule } else { rule | redirects & !RULE }
}

/// Judges a packet by the sender's rules alone.
#[inline(always)]
pub fn judge_sender(ctx: &TcContext, sender: u32, destination: u32) -> Result<Passed, DropReason> {
    // SAFETY: the context.
    let sent = black_box(unsafe { wharf_rules(ctx.skb.skb, egress_set(sender), destination) });
    let by_isolation = sent & (DENIED | UNKNOWN | UNRESOLVED | RULE) == DENIED;
    if sent & DENIED == 0 || by_isolation && service_mark(ctx) != 0 || state().flags & POLICY_AUDITS != 0 {
        return Ok(Passed(sent));
    }
    Err(if sent & UNKNOWN != 0 { DropReason::UnknownTransport } else { DropReason::PolicyDenied })
}

/// [`BY_SERVICE`] if the packet has [`MARK_BY_SERVICE`].
#[inline(always)]
pub fn service_mark(ctx: &TcContext) -> u32 {
    // SAFETY: the context. Volatile: the verifier requires whole reads.
    let mark = unsafe { ptr::read_volatile(&raw const (*ctx.skb.skb).mark) };
    (mark & MARK_BY_SERVICE) * (BY_SERVICE / MARK_BY_SERVICE)
}

/// True for a source address of the node, with policy.
#[inline(always)]
pub fn is_of_node(ctx: &TcContext) -> bool {
    // SAFETY: the context.
    unsafe { wharf_rules(ctx.skb.skb, NO_SET, OF_SOURCE | TO_ENDPOINT) == 0 }
}

#[inline(always)]
fn egress_set(endpoint: u32) -> u32 {
    POLICY_SETS.get(endpoint).map_or(0, |sets| sets.egress)
}

#[inline(always)]
fn ingress_set(endpoint: u32) -> u32 {
    POLICY_SETS.get(endpoint).map_or(0, |sets| sets.ingress)
}

/// The deciding rule (zero for none), [`DENIED`] with [`TO_SERVICE`], [`UNKNOWN`] and [`UNRESOLVED`], or
/// [`REDIRECTED`]. `destination`: port (network byte order), protocol from bit 16, [`TO_ENDPOINT`], [`OF_SOURCE`].
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_rules(skb: *mut __sk_buff, set: u32, destination: u32) -> u64 {
    if set == 0 {
        return 0;
    }
    let ctx = &TcContext::new(skb);
    let Some(peer) = address(ctx, destination & OF_SOURCE != 0).and_then(endpoints::peer) else {
        return DENIED | UNRESOLVED;
    };
    if peer.identity == IDENTITY_NODE && destination & TO_ENDPOINT != 0 {
        return 0;
    }
    if set == NO_SET {
        return DENIED;
    }
    let (class, protocol) = (peer.class, (destination >> 16) as u8);
    let port = match protocol {
        TCP | UDP | SCTP | ICMP | ICMPV6 => {
            let key = PortKey { set, protocol, _pad: 0, port: (destination as u16).to_ne_bytes() };
            POLICY_PORTS.get(Whole::new(key).as_shared()).copied().unwrap_or(0)
        }
        UNKNOWN_TRANSPORT => PORT_UNKNOWN,
        _ => 0,
    };
    // Hidden: the kernel verifies one path for all classes. One number: both are in one slot of the stack.
    let of = black_box(u64::from(set) << 32 | u64::from(class));
    // Not `Option`s, which are on the stack: Linux before 6.3 rejects reads of unwritten stack.
    let (mut admin, mut rest) = (ptr::null_mut::<CellRow>(), ptr::null_mut::<CellRow>());
    let (mut admin_rank, mut rest_rank) = (NO_RANK, NO_RANK);
    let (mut admin_is_unknown, mut rest_is_unknown) = (false, false);
    for which in 0..4_u32 {
        let (any_class, any_port) = (which & 2 != 0, which & 1 != 0);
        let (set, class) = ((of >> 32) as u32, of as u32);
        let key = CellKey { set, class: if any_class { 0 } else { class }, port: if any_port { 0 } else { port } };
        let Some(row) = POLICY_CELLS.get_ptr_mut(key) else { continue };
        // SAFETY: a map value.
        let (admin_here, rest_here) = unsafe { ((*row).admin.rank, (*row).rest.rank) };
        let is_unknown = !any_port && port == PORT_UNKNOWN;
        if admin_here <= admin_rank {
            (admin, admin_rank, admin_is_unknown) = (row, admin_here, is_unknown);
        }
        if rest_here <= rest_rank {
            (rest, rest_rank, rest_is_unknown) = (row, rest_here, is_unknown);
        }
    }
    let service = if peer.identity & PEER_SERVICE != 0 { TO_SERVICE } else { 0 };
    // The same choice as `wharf_common::policy::Choice`, which the in-memory kernel uses.
    // SAFETY: as above.
    let (row, hit, rank, is_unknown) = unsafe {
        let admin_decides = !admin.is_null()
            && admin_rank != NO_RANK
            && ((*admin).admin.ruling != PASS || (*admin).admin.rank != admin_rank);
        if admin_decides {
            (admin, (*admin).admin, admin_rank, admin_is_unknown)
        } else if !rest.is_null() {
            (rest, (*rest).rest, rest_rank, rest_is_unknown)
        } else {
            return service;
        }
    };
    // The kernel can reuse a removed row's memory at once.
    if hit.rank != rank {
        return DENIED | UNRESOLVED;
    }
    if !test_packet::is_test(ctx) {
        // SAFETY: a map value, added to atomically.
        unsafe {
            atomic::increment(&raw mut (*row).packets);
            atomic::add(&raw mut (*row).bytes, u64::from(ctx.len()));
        }
    }
    let (rule, ruling) = (u64::from(hit.rule), hit.ruling);
    if ruling & RULING == REDIRECT {
        let open = if ruling & REDIRECT_OPEN != 0 { OPEN } else { 0 };
        return rule | REDIRECTED | open | u64::from(ruling >> REDIRECT_PORT_SHIFT) << PORT_SHIFT;
    }
    if ruling != DENY {
        return rule | service;
    }
    rule | DENIED | service | if is_unknown { UNKNOWN } else { 0 }
}

#[inline(always)]
pub unsafe fn note(row: *mut wharf_common::FlowRow, generation: u32, rule: u32) {
    // Rule before generation: readers of the generation find the rule.
    // SAFETY: fields of a map value, written whole.
    unsafe {
        ptr::write_volatile(&raw mut (*row).rule, rule);
        ptr::write_volatile(&raw mut (*row).generation, generation);
    }
}
