//! Finds a packet's flow, maintains its row (`wharf_common::flow`), and decides the way between endpoints.
//!
//! Only the stack can undo a node rule's translation, so replies take the flow's way: from its row, or without a row
//! from [`crate::stack_path`].
//!
//! A packet between endpoints passes here once, at its sender.

use core::ptr;

use aya_ebpf::{
    bindings::{__sk_buff, BPF_NOEXIST},
    helpers::bpf_ktime_get_coarse_ns,
    programs::TcContext,
};
use wharf_common::{
    Direction, DropReason, FlowRow, FlowTotals, FlowUse, FragmentKey, FragmentRow, FragmentSlot,
    flow::{
        FLOW_ADMITTED, FLOW_BY_HIGH, FLOW_BY_STACK, FLOW_OF_PROXY, FLOW_PREFIX, FLOW_PROXIED, FLOW_RECENT,
        FLOW_REPLIED, FLOW_RESET, FLOW_UPSTREAM, FRAGMENT_TICKS, SIGNAL_ACK, SIGNAL_RST, SIGNAL_SYN, TCP, TICK_SHIFT,
    },
    map::{FLOWS_PER_TICK, FRAGMENTS_SHARE},
    policy::{BY_SERVICE, CHECK_BACKEND, MARK_BY_SERVICE, MARK_UNDECIDED, POLICY_KEEPS_FLOWS, UNDECIDED},
};
use wharf_ebpf::{
    atomic, cache,
    endpoints::endpoint,
    flow::{Asked, Way},
    maps::{FLOW_TOTALS, FLOW_USE, FLOWS, FLOWS_NEW, FRAGMENT_SLOTS, FRAGMENTS},
    parse::ETHERNET_BYTES,
    test_packet,
};

use crate::{
    clients,
    packet::{Key, PACKET_MAX, Packet, address, echo_request, identification},
    policy, recent, redirect,
    sources::{self, End},
    stack_path,
};

/// ICMP error header (RFC 792, RFC 4443).
pub const ICMP_ERROR_BYTES: usize = 8;

/// Finds the packet's flow and way, and applies policy. Error: a drop; `Malformed` only with policy, for a truncated
/// packet.
#[inline(always)]
pub fn way(ctx: &TcContext, asked: Asked) -> Result<Way, DropReason> {
    let [ids, own_epoch, peer_epoch] = asked.numbers();
    // SAFETY: the context.
    let way = unsafe { wharf_flow(ctx.skb.skb, ids, own_epoch, peer_epoch) };
    // The compiler knows the possible results, the verifier does not.
    match core::hint::black_box(way) {
        DIRECT => Ok(Way::Direct),
        STACK => Ok(Way::Stack),
        PROXY => Ok(Way::Proxy),
        MALFORMED => Err(DropReason::Malformed),
        POLICY_DENIED => Err(DropReason::PolicyDenied),
        PEER_POLICY_DENIED => Err(DropReason::PeerPolicyDenied),
        UNKNOWN_TRANSPORT => Err(DropReason::UnknownTransport),
        PROXY_UNAVAILABLE => Err(DropReason::ProxyUnavailable),
        PROXY_SHARE_SPENT => Err(DropReason::ProxyShareSpent),
        _ => Err(DropReason::LoneFragment),
    }
}

const DIRECT: u32 = 0;
const STACK: u32 = 1;
const PROXY: u32 = 2;
const MALFORMED: u32 = DropReason::Malformed as u32;
const POLICY_DENIED: u32 = DropReason::PolicyDenied as u32;
const PEER_POLICY_DENIED: u32 = DropReason::PeerPolicyDenied as u32;
const UNKNOWN_TRANSPORT: u32 = DropReason::UnknownTransport as u32;
const PROXY_UNAVAILABLE: u32 = DropReason::ProxyUnavailable as u32;
const PROXY_SHARE_SPENT: u32 = DropReason::ProxyShareSpent as u32;

/// Result: [`DIRECT`], [`STACK`], [`PROXY`], or a drop's reason.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_flow(skb: *mut __sk_buff, ids: u32, own_epoch: u32, peer_epoch: u32) -> u32 {
    match track(&TcContext::new(skb), &Asked::of([ids, own_epoch, peer_epoch])) {
        Ok(Way::Direct) => DIRECT,
        Ok(Way::Stack) => STACK,
        Ok(Way::Proxy) => PROXY,
        Err(reason) => reason as u32,
    }
}

/// Ticks since boot.
#[inline(always)]
pub fn now() -> u32 {
    // SAFETY: a helper without arguments.
    (unsafe { bpf_ktime_get_coarse_ns() } >> TICK_SHIFT) as u32
}

#[inline(always)]
fn track(ctx: &TcContext, asked: &Asked) -> Result<Way, DropReason> {
    // Read before the rules: a flow judged during a change is judged again.
    let mut policy = policy::state();
    // For a truncated IP header. Without policy, the receiver's stack judges it.
    let unknown = || if policy.generation == 0 { Ok(Way::Direct) } else { Err(DropReason::Malformed) };
    let Some(mut packet) = Packet::at(ctx, ETHERNET_BYTES) else { return unknown() };
    if packet.is_fragment() {
        if packet.is_incomplete() {
            return Err(DropReason::UnknownTransport);
        }
        let what = Fragment::of(asked, &packet).number();
        let at = packet.identification_at;
        // SAFETY: the context.
        let first = unsafe { wharf_fragment(ctx.skb.skb, what, asked.own_epoch, at, packet.ports()) };
        if first & LONE != 0 {
            return Err(DropReason::LoneFragment);
        }
        (packet.source_port, packet.destination_port) = (first as u16, (first >> 16) as u16);
        packet.protocol = (first >> 32) as u8;
        if packet.is_later_fragment() {
            packet.kind = echo_request(packet.protocol);
        }
    }
    if test_packet::is_test(ctx) {
        return policy::judge(ctx, asked, asked.peer.endpoint_id, &packet, true, 0, 0).map(|_| Way::Direct);
    }
    if packet.is_error {
        // An error takes the way of the packet that it reports.
        let sends = asked.direction as u32 == Direction::Egress as u32;
        let inner = (packet.transport + ICMP_ERROR_BYTES) as u32
            | if sends { ABOUT_SENT } else { 0 }
            | if asked.peer.endpoint_id != 0 { ABOUT_BETWEEN } else { 0 };
        // SAFETY: the context.
        let about = unsafe { wharf_about(ctx.skb.skb, inner, asked.own, asked.own_epoch) };
        if about & ABOUT_STRANGE != 0 {
            return Err(DropReason::ProxyUnavailable);
        }
        // Current policy did not pass that flow: the error itself is judged.
        let rule = if about as u32 == policy.generation {
            rule_about(about)
        } else {
            policy::judge(ctx, asked, asked.peer.endpoint_id, &packet, true, 0, 0)?.rule()
        };
        if !mark_service(ctx, asked, rule) {
            return Err(DropReason::PolicyDenied);
        }
        if about & ABOUT_PROXY != 0 {
            return redirect::mark(ctx, asked).map(|()| Way::Proxy);
        }
        return Ok(if about & ABOUT_STACK != 0 { Way::Stack } else { Way::Direct });
    }
    let (mut key, by_high) = packet.key();
    let by_high = forget(u64::from(by_high)) & 1 != 0;
    if policy.generation != 0 {
        policy.generation = policy.generation.wrapping_add(key.generation());
    }
    let ends = Ends::of(asked, by_high);
    let (signals, now) = (packet.signals, now());
    let is_upstream = redirect::is_upstream(ctx, &packet);
    if is_upstream {
        key.switch_upstream();
    }
    let mut found = find(&key);
    let may_be_answer = packet.protocol == TCP && !is_upstream && !redirect::opens(signals);
    if may_be_answer
        && found.as_ref().is_none_or(|(row, _)| {
            let by_owner = by_high == (row.flags & FLOW_BY_HIGH != 0);
            redirect::may_answer_proxy(ctx, row.flags, by_owner)
        })
        && is_of_upstream(ctx, &key, by_high)
    {
        key.switch_upstream();
        found = find(&key);
    }
    key.forget_kinds();
    let (mut by_owner, mut is_judged, mut flags, mut replaces) = (true, policy.generation == 0, 0, false);
    if let Some((row, _)) = &mut found {
        let lives = row.seen == now || !row.is_over(key.protocol(), now);
        let mut goes_on = ends.match_row(row) && lives && !row.is_succeeded_by(signals);
        if goes_on && row.flags & FLOW_PREFIX != 0 {
            goes_on = sources::is_same_flow(ctx, asked, row.owner, ends.other_epoch(row));
        }
        by_owner = by_high == (row.flags & FLOW_BY_HIGH != 0);
        if goes_on && row.flags & FLOW_OF_PROXY != 0 {
            let next = redirect::next(ctx, &packet, row.flags, by_owner);
            if next.is_strange() {
                return Err(DropReason::ProxyUnavailable);
            }
            (goes_on, flags) = (!next.begins(), next.anew());
        }
        if goes_on {
            let anew = flags;
            flags = row.flags & !anew;
            let kept = policy.flags & POLICY_KEEPS_FLOWS != 0 && flags & FLOW_REPLIED != 0;
            // The row's judgement includes the sender's acceptance of a service address.
            let unmarked = if by_owner && asked.direction as u32 == Direction::Ingress as u32 {
                row.rule & BY_SERVICE & !(policy::service_mark(ctx))
            } else {
                0
            };
            is_judged = (row.generation ^ policy.generation) | u32::from(anew) | unmarked == 0;
            if kept && !is_judged {
                // SAFETY: a map value.
                unsafe { policy::note(&raw mut **row, policy.generation, row.rule) };
                is_judged = true;
            }
        } else {
            if row.flags & FLOW_RECENT != 0 {
                recent::left(row.owner);
            }
            let _ = FLOWS.remove(key.as_shared());
            let _ = FLOWS_NEW.remove(key.as_shared());
            end_cached(&key);
            (found, by_owner, replaces) = (None, true, true);
        }
    }
    if found.is_none() {
        flags = redirect::of_proxy(ctx, asked, &packet);
    }
    let known = u64::from(flags) | u64::from(by_owner) << 16 | u64::from(is_judged) << 17 | u64::from(replaces) << 18;
    let known = forget(known);
    (flags, by_owner, is_judged) = (known as u16, known & 1 << 16 != 0, known & 1 << 17 != 0);
    replaces = known & 1 << 18 != 0;
    let mut rule = found.as_ref().map_or(0, |(row, _)| row.rule);
    if !is_judged {
        let peer = found.as_ref().map_or(asked.peer.endpoint_id, |(row, _)| sources::receiver(asked, row));
        let passed = policy::judge(ctx, asked, peer, &packet, by_owner, rule, flags)?;
        rule = passed.rule();
        if passed.is_redirected() && flags & FLOW_PROXIED == 0 {
            // Packets of equal connections of client and proxy would mix. A client's later connection waits for the end
            // of the proxy's; the proxy's replaces the client's.
            let is_upstream = flags & FLOW_UPSTREAM != 0;
            if packet.protocol == TCP && is_held_by_proxy(other(&key, is_upstream)) && !is_upstream {
                return Err(DropReason::ProxyUnavailable);
            }
            let is_running = found.as_ref().is_some_and(|(row, _)| row.flags & FLOW_PROXIED == 0);
            let redirect = redirect::redirect(ctx, &packet, is_running, by_owner, passed)?;
            if redirect.resets() {
                return redirect::mark(ctx, asked).map(|()| Way::Proxy);
            }
            flags |= redirect.flag();
            policy.generation = redirect.generation(policy.generation);
        }
        // Packets that the node sends as a server are judged without the server's rules: the row stays unchanged.
        let is_whole = forget(u64::from(by_owner || !redirect::is_by_node(ctx))) & 1 != 0;
        if is_whole
            && let Some((row, _)) = &mut found
            && !sources::is_judged_alone(asked, row)
        {
            // SAFETY: a map value; fields are written whole.
            unsafe {
                ptr::write_volatile(&raw mut row.flags, row.flags & !FLOW_PROXIED | flags & FLOW_PROXIED);
                policy::note(&raw mut **row, policy.generation, rule);
            }
        }
    }
    let may_open = by_owner && packet.protocol == TCP && signals & SIGNAL_RST == 0;
    if flags & FLOW_PROXIED != 0 && may_open && !clients::is_admitted(flags) {
        let admitted = clients::admit(ctx, &packet, asked.direction)?;
        flags = flags & !FLOW_ADMITTED | admitted;
        if let Some((row, _)) = &mut found {
            // SAFETY: a map value; fields are written whole.
            unsafe { ptr::write_volatile(&raw mut row.flags, row.flags & !FLOW_ADMITTED | admitted) };
        }
    } else if flags & (FLOW_PROXIED | FLOW_ADMITTED) == FLOW_PROXIED
        && !by_owner
        && clients::is_by_held_socket(ctx)
        && let Some((row, _)) = &mut found
    {
        // SAFETY: as above.
        unsafe { ptr::write_volatile(&raw mut row.flags, row.flags | FLOW_ADMITTED) };
    }
    let known = forget(u64::from(flags) | u64::from(by_owner) << 16 | u64::from(replaces) << 17);
    (flags, by_owner, replaces) = (known as u16, known & 1 << 16 != 0, known & 1 << 17 != 0);
    let known = forget(u64::from(rule) << 32 | u64::from(policy.generation));
    (rule, policy.generation) = ((known >> 32) as u32, known as u32);
    if !mark_service(ctx, asked, rule) {
        return Err(DropReason::PolicyDenied);
    }
    let way = match found {
        Some((row, table)) => go_on(ctx, asked, &packet, &key, by_high, signals, row, table, now),
        None => begin(ctx, asked, &packet, &key, by_high, signals, now, flags, replaces, (policy.generation, rule)),
    };
    if flags & FLOW_OF_PROXY != 0 && redirect::is_for_proxy(flags, by_owner) {
        return redirect::mark(ctx, asked).map(|()| Way::Proxy);
    }
    Ok(way)
}

/// Marks a packet to a service by the rule that passes its flow, for the backend's hook. False if the
/// packet must be dropped: an answer in a flow to a service address that is no longer accepted.
#[inline(always)]
fn mark_service(ctx: &TcContext, asked: &Asked, rule: u32) -> bool {
    if rule & BY_SERVICE != 0 {
        if asked.direction as u32 == Direction::Egress as u32 {
            let mark = match rule {
                UNDECIDED => MARK_UNDECIDED,
                _ => MARK_BY_SERVICE | ((rule & CHECK_BACKEND) / (CHECK_BACKEND / MARK_UNDECIDED)),
            };
            // SAFETY: the context; a classifier may write the field.
            unsafe { (*ctx.skb.skb).mark |= mark };
        } else if rule == UNDECIDED && policy::service_mark(ctx) != 0 {
            return false;
        }
    }
    true
}

/// Hides the number from the verifier, which otherwise follows a path per possible range (Linux before 6.8).
#[inline(always)]
pub fn forget(number: u64) -> u64 {
    core::hint::black_box(wharf_forget(number))
}

#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wharf_forget(number: u64) -> u64 {
    core::hint::black_box(number)
}

// Flags of the result of [`wharf_about`].
/// The flow takes the stack.
const ABOUT_STACK: u64 = 1 << 32;
/// The error goes to the proxy.
const ABOUT_PROXY: u64 = 1 << 33;
/// The proxy has replaced the error's sender.
const ABOUT_STRANGE: u64 = 1 << 34;
const ABOUT_UNDECIDED: u64 = 1 << 37;
/// From [`SERVICE_BITS`] (bits 30 and 31) to bits 35 and 36 of the result.
const SERVICE_SHIFT: u32 = 5;
/// Of a rule number.
const SERVICE_BITS: u32 = BY_SERVICE | CHECK_BACKEND;

#[inline(always)]
fn rule_about(about: u64) -> u32 {
    if about & ABOUT_UNDECIDED != 0 { UNDECIDED } else { (about >> SERVICE_SHIFT) as u32 & SERVICE_BITS }
}

/// Flow of the packet at `offset` that an ICMP error at endpoint `own` reports: the flags above, and the policy
/// generation of its judgement while its ends are unchanged (zero without a row).
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_about(skb: *mut __sk_buff, offset: u32, own: u32, own_epoch: u32) -> u64 {
    let ctx = &TcContext::new(skb);
    let Some(about) = Packet::at(ctx, (offset & PACKET_MAX) as usize) else { return 0 };
    // A router reports any packet, an endpoint only packets that it received.
    let Some(destination) = address(ctx, false) else { return 0 };
    let mut is_of_flow = destination.equals(about.source);
    if offset & ABOUT_SENT != 0 {
        let Some(source) = address(ctx, true) else { return 0 };
        is_of_flow &= source.equals(about.destination);
    }
    let may_take_stack = offset & ABOUT_BETWEEN != 0 && stack_path::has_paths(own, own_epoch);
    let by_stack = may_take_stack && stack_path::is_noted_between(&about);
    let answer = if by_stack { ABOUT_STACK } else { 0 };
    if !is_of_flow {
        return answer;
    }
    let (mut key, by_high) = about.key();
    // One number, so that both are in one slot of the stack.
    let known = core::hint::black_box(answer | u64::from(by_high));
    // No host reports a client's packets to the proxy.
    if about.protocol == TCP && other(&key, false) & FOUND != 0 {
        key.switch_upstream();
    }
    let (answer, by_high) = (known & ABOUT_STACK, known & 1 != 0);
    let Some((row, _)) = find(&key) else { return answer };
    let (flags, rule) = (row.flags, row.rule);
    let generation = if row.generation == 0 { 0 } else { row.generation.wrapping_sub(key.generation()) };
    let by_owner = by_high != (flags & FLOW_BY_HIGH != 0);
    answer
        | u64::from(generation)
        | if flags & FLOW_BY_STACK != 0 { ABOUT_STACK } else { 0 }
        | if redirect::is_for_proxy(flags, by_owner) { ABOUT_PROXY } else { 0 }
        | if redirect::is_strange(ctx, flags, by_owner) { ABOUT_STRANGE } else { 0 }
        | if rule == UNDECIDED { ABOUT_UNDECIDED } else { 0 }
        | u64::from(rule & SERVICE_BITS) << SERVICE_SHIFT
}

/// Flags in `offset`. The endpoint sends the error.
const ABOUT_SENT: u32 = 1 << 16;
/// To another endpoint.
const ABOUT_BETWEEN: u32 = 1 << 17;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Table {
    Established,
    New,
}

/// Another flow can reuse the row meanwhile; mostly, its epochs differ.
#[inline(always)]
fn find(key: &Key) -> Option<(&'static mut FlowRow, Table)> {
    // SAFETY: a row's memory outlives this run; fields are accessed separately.
    unsafe {
        match FLOWS.get_ptr_mut(key.as_shared()) {
            Some(row) => Some((&mut *row, Table::Established)),
            None => Some((&mut *FLOWS_NEW.get_ptr_mut(key.as_shared())?, Table::New)),
        }
    }
}

/// Flags and [`FOUND`] of the flow with the switched key ([`Key::switch_upstream`]); zero without a row. `removes`: not
/// zero to remove it.
///
/// # Safety
///
/// `key` points to a key, or is null.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_other(key: *const Key, removes: u32) -> u32 {
    // SAFETY: the caller's contract.
    let Some(key) = (unsafe { key.as_ref() }) else { return 0 };
    // On this function's stack: Linux before 6.2 takes no other memory as a key.
    let mut other = *key;
    other.switch_upstream();
    let other = core::hint::black_box(&mut other);
    let Some((row, _)) = find(other) else { return 0 };
    let flags = row.flags;
    if removes != 0 {
        if flags & FLOW_RECENT != 0 {
            recent::left(row.owner);
        }
        let _ = FLOWS.remove(other.as_shared());
        let _ = FLOWS_NEW.remove(other.as_shared());
    }
    FOUND | u32::from(flags)
}

const FOUND: u32 = 1 << 16;

#[inline(always)]
fn other(key: &Key, removes: bool) -> u32 {
    // SAFETY: a key.
    let flags = core::hint::black_box(unsafe { wharf_other(&raw const *key, removes.into()) });
    if removes {
        end_cached(key);
    }
    flags
}

/// The packet goes to the proxy, which began its flow in the receiver's name, or is the stack's reset in place of the
/// proxy's closed socket. `key`: of the client's flow.
#[inline(always)]
fn is_of_upstream(ctx: &TcContext, key: &Key, by_high: bool) -> bool {
    let flags = other(key, false);
    flags & FOUND != 0 && (redirect::is_by_node(ctx) || by_high != (flags as u16 & FLOW_BY_HIGH != 0))
}

/// The proxy has both ends of a connection in a client's name. `flags`: of [`other`], for the client's flow.
#[inline(always)]
fn is_held_by_proxy(flags: u32) -> bool {
    flags as u16 & (FLOW_PROXIED | clients::ENDED) == FLOW_PROXIED
}

pub struct Ends {
    own: u32,
    /// Zero: outside, or behind the stack.
    peer: u32,
    own_is_high: bool,
}

impl Ends {
    #[inline(always)]
    pub fn of(asked: &Asked, by_high: bool) -> Self {
        let own_is_high = by_high == (asked.direction as u32 == Direction::Egress as u32);
        Self { own: asked.own_epoch, peer: asked.peer.epoch, own_is_high }
    }

    #[inline(always)]
    pub fn match_row(&self, row: &FlowRow) -> bool {
        let (own, peer) =
            if self.own_is_high { (row.high_epoch, row.low_epoch) } else { (row.low_epoch, row.high_epoch) };
        own == self.own && (self.peer == 0 || peer == self.peer)
    }

    #[inline(always)]
    fn other_epoch(&self, row: &FlowRow) -> u32 {
        if self.own_is_high { row.low_epoch } else { row.high_epoch }
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "inlined; a struct of the same would only be spelled twice")]
fn go_on(
    ctx: &TcContext,
    asked: &Asked,
    packet: &Packet,
    key: &Key,
    by_high: bool,
    signals: u8,
    row: &mut FlowRow,
    table: Table,
    now: u32,
) -> Way {
    let mut flags = row.flags_after(signals, by_high);
    let from_endpoint = if by_high { row.high_epoch } else { row.low_epoch } != 0;
    if asked.direction as u32 == Direction::Ingress as u32 && from_endpoint && flags & FLOW_BY_STACK == 0 {
        let sender = sources::sender(ctx);
        if sender.is_some() {
            flags |= FLOW_BY_STACK;
            // Other answers take the stack anyway.
            if sender.is_direct() && !asked.local_by_stack {
                stack_path::note(ctx, packet, asked.own);
            }
        }
    } else if flags & FLOW_BY_STACK == 0 && noted(ctx, asked, packet) == Way::Stack {
        // Another flow of the pair took the stack, whose connection tracking must know this flow too.
        flags |= FLOW_BY_STACK;
    }
    let by_owner = by_high == (flags & FLOW_BY_HIGH != 0);
    let is_kept = flags & FLOW_REPLIED != 0 && by_owner;
    if is_kept
        && flags & FLOW_RECENT != 0
        && let Some(counters) = recent::room(row.owner)
    {
        flags &= !FLOW_RECENT;
        recent::left(row.owner);
        recent::count_kept(counters);
    }
    // Only on a change: CPUs share the cache line.
    // SAFETY: fields of a map value, written whole.
    unsafe {
        if row.seen != now {
            ptr::write_volatile(&raw mut row.seen, now);
        }
        if row.flags != flags {
            let changes_way = (row.flags ^ flags) & FLOW_BY_STACK;
            ptr::write_volatile(&raw mut row.flags, flags);
            // The next packet must take the reset back.
            if changes_way | flags & FLOW_RESET != 0 {
                end_cached(key);
            }
        }
    }
    if is_kept && table == Table::New {
        establish(key, FlowRow { flags, seen: now, ..*row });
    }
    if flags & FLOW_BY_STACK != 0 { Way::Stack } else { Way::Direct }
}

/// Ends all entries of both endpoints in the flow cache: rare, and cheaper than to find the flow's on each processor.
#[inline(always)]
fn end_cached(key: &Key) {
    // SAFETY: a key.
    unsafe { wharf_end_cached(&raw const *key) };
}

/// # Safety
///
/// `key` points to a key, or is null.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_end_cached(key: *const Key) -> u32 {
    // SAFETY: the caller's contract.
    let Some(key) = (unsafe { key.as_ref() }) else { return 0 };
    for end in [key.low, key.high] {
        // On this function's stack, as in `wharf_other`.
        let end = core::hint::black_box(end);
        if let Some(row) = endpoint(end) {
            cache::end(row.endpoint_id.into());
        }
    }
    0
}

/// Moves a flow to `FLOWS`, if it has room and no collection runs.
#[inline(always)]
fn establish(key: &Key, row: FlowRow) {
    if recent::is_collecting() {
        return;
    }
    let Some(counters) = recent::room(row.owner) else { return };
    match FLOWS.insert(key.as_shared(), row, u64::from(BPF_NOEXIST)) {
        Ok(()) => recent::count_kept(counters),
        // Another CPU inserted the flow.
        Err(EEXIST) => {}
        Err(_) => return total(|totals| &raw mut totals.no_room),
    }
    let _ = FLOWS_NEW.remove(key.as_shared()); // the LRU may have evicted the row
}

/// `EEXIST` of errno.h, as helpers return it.
pub const EEXIST: i32 = -17;

/// For a flow without a valid row.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "as for `go_on`")]
fn begin(
    ctx: &TcContext,
    asked: &Asked,
    packet: &Packet,
    key: &Key,
    by_high: bool,
    signals: u8,
    now: u32,
    of_proxy: u16,
    replaces: bool,
    (generation, rule): (u32, u32),
) -> Way {
    let egress = asked.direction as u32 == Direction::Egress as u32;
    let sender = if egress { End::NONE } else { sources::sender(ctx) };
    let of_proxy = of_proxy | sender.flow_flag() | sources::own_flag(ctx, asked);
    let (way, peer, peer_epoch) = if sender.is_some() {
        if sender.is_direct() && !asked.local_by_stack {
            stack_path::note(ctx, packet, asked.own);
        }
        (Way::Stack, sender.id(), sender.epoch())
    } else if of_proxy & FLOW_UPSTREAM != 0 {
        match endpoint(packet.source) {
            Some(client) => (Way::Direct, u32::from(client.endpoint_id), client.epoch as u32),
            None => (Way::Direct, 0, 0),
        }
    } else {
        let way = if egress { noted(ctx, asked, packet) } else { Way::Direct };
        (way, asked.peer.endpoint_id, asked.peer.epoch)
    };
    if signals & SIGNAL_RST != 0 || signals & (SIGNAL_SYN | SIGNAL_ACK) == SIGNAL_SYN | SIGNAL_ACK {
        // Ends an unknown flow, or answers an opening without a row.
        return way;
    }
    if !egress && generation != 0 && redirect::is_answer(ctx, of_proxy) {
        return way;
    }
    let owner = if egress || peer == 0 { asked.own } else { peer };
    if !may_begin(owner, now) {
        total(|totals| &raw mut totals.untracked);
        return way;
    }
    let own_is_high = by_high == egress;
    let (low_epoch, high_epoch) =
        if own_is_high { (peer_epoch, asked.own_epoch) } else { (asked.own_epoch, peer_epoch) };
    let direction = if by_high { FLOW_BY_HIGH } else { 0 };
    let by_stack = if way == Way::Stack { FLOW_BY_STACK } else { 0 };
    let flags = direction | by_stack | of_proxy;
    let mut row = FlowRow { seen: now, low_epoch, high_epoch, flags, owner: owner as u16, generation, rule };
    row.flags = row.flags_after(signals, by_high);
    // A collection may be removing the replaced row, or have removed it on another CPU.
    let enters = !(replaces && recent::is_collecting() || recent::is_being_removed(key.as_shared()));
    if !(enters && recent::enter(key, row, !egress && peer == 0)) {
        // Of two CPUs, the first insert decides who began the flow.
        let _ = FLOWS_NEW.insert(key.as_shared(), row, u64::from(BPF_NOEXIST));
    }
    way
}

#[inline(always)]
fn noted(ctx: &TcContext, asked: &Asked, packet: &Packet) -> Way {
    let noted = asked.peer.endpoint_id != 0 && stack_path::is_noted(ctx, asked.own, asked.own_epoch, packet);
    if noted { Way::Stack } else { Way::Direct }
}

#[inline(always)]
fn used_by(endpoint: u32) -> Option<*mut FlowUse> {
    FLOW_USE.get_ptr_mut(endpoint)
}

#[inline(always)]
fn may_begin(endpoint: u32, now: u32) -> bool {
    let Some(used) = used_by(endpoint) else { return false };
    // SAFETY: a map value; words are accessed whole, or atomically. Racing CPUs can exceed the bound.
    unsafe {
        if ptr::read_volatile(&raw const (*used).tick) != now {
            ptr::write_volatile(&raw mut (*used).tick, now);
            ptr::write_volatile(&raw mut (*used).begun, 0);
        }
        if ptr::read_volatile(&raw const (*used).begun) >= FLOWS_PER_TICK {
            return false;
        }
        atomic::increment(&raw mut (*used).begun);
    }
    true
}

#[inline(always)]
pub fn total(which: impl FnOnce(&mut FlowTotals) -> *mut u64) {
    if let Some(totals) = FLOW_TOTALS.get_ptr_mut(0) {
        // SAFETY: a map value, added to atomically.
        unsafe {
            atomic::increment(which(&mut *totals));
        }
    }
}

/// Result flag of [`wharf_fragment`]: the first fragment is unknown.
const LONE: u64 = 1 << 40;

struct Fragment {
    own: u16,
    direction: u8,
    is_later: bool,
    protocol: u8,
}

const _: () = assert!(wharf_common::MAX_ENDPOINT_ID < 1 << 14);

impl Fragment {
    #[inline(always)]
    fn of(asked: &Asked, packet: &Packet) -> Self {
        let (own, direction, is_later) = (asked.own as u16, asked.direction as u8, packet.is_later_fragment());
        Self { own, direction, is_later, protocol: packet.protocol }
    }

    #[inline(always)]
    fn number(self) -> u32 {
        let Self { own, direction, is_later, protocol } = self;
        u32::from(own) | u32::from(direction) << 14 | u32::from(is_later) << 15 | u32::from(protocol) << 16
    }

    #[inline(always)]
    fn from_number(number: u32) -> Self {
        Self {
            own: (number & wharf_common::MAX_ENDPOINT_ID) as u16,
            direction: (number >> 14 & 1) as u8,
            is_later: number & 1 << 15 != 0,
            protocol: (number >> 16) as u8,
        }
    }
}

/// Records ports and protocol of a packet's first fragment, or finds them for a later one. Bits of the result: source
/// port; from 16, destination port; from 32, the protocol behind all extension headers. `what`: [`Fragment::number`];
/// [`Packet::identification_at`]; `ports`: the first fragment's.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_fragment(skb: *mut __sk_buff, what: u32, own_epoch: u32, at: u32, ports: u32) -> u64 {
    let ctx = &TcContext::new(skb);
    let Fragment { own, direction, is_later, protocol } = Fragment::from_number(what);
    let Some(source) = address(ctx, true) else { return LONE };
    let Some(destination) = address(ctx, false) else { return LONE };
    let Some((identification, identified_by)) = identification(ctx, at) else { return LONE };
    let key = FragmentKey {
        source: *source.as_shared(),
        destination: *destination.as_shared(),
        identification,
        endpoint: own,
        direction,
        protocol: identified_by,
    };
    let mut slot = FragmentSlot { key, row: FragmentRow::default() };
    let place = place_of(&slot.key);
    let told = |source: u16, destination: u16, protocol: u8| {
        u64::from(source) | u64::from(destination) << 16 | u64::from(protocol) << 32
    };
    if !is_later {
        let (source_port, destination_port) = (ports as u16, (ports >> 16) as u16);
        slot.row = FragmentRow { source_port, destination_port, seen: now(), epoch: own_epoch, protocol, pad: [0; 3] };
        match FRAGMENT_SLOTS.get_ptr_mut(place) {
            // SAFETY: a map value. Wrong ports for a racing reader are no worse than none.
            Some(held) => unsafe {
                // Later fragments of the displaced packet can arrive.
                let _ = FRAGMENTS.insert(&(*held).key, &(*held).row, 0);
                ptr::write(held, slot);
            },
            None if FRAGMENT_SLOTS.insert(place, &slot, 0).is_ok() => {}
            None => _ = FRAGMENTS.insert(&slot.key, &slot.row, 0),
        }
        return told(source_port, destination_port, protocol);
    }
    // SAFETY: a row's memory outlives this run.
    let found = unsafe {
        match FRAGMENT_SLOTS.get(place) {
            Some(held) if is_same(held, &slot) => Some(&held.row),
            _ => FRAGMENTS.get(&slot.key),
        }
    };
    match found {
        Some(row) if row.epoch == own_epoch && now().wrapping_sub(row.seen) <= FRAGMENT_TICKS => {
            told(row.source_port, row.destination_port, row.protocol)
        }
        _ => LONE,
    }
}

const FRAGMENT_PLACES: u32 = FRAGMENTS_SHARE / 2;

/// Knuth's golden-ratio hash: consecutive identifications get different places.
#[inline(always)]
fn place_of(key: &FragmentKey) -> u32 {
    let hash = key.identification.wrapping_mul(0x9e37_79b1) >> (32 - FRAGMENT_PLACES.trailing_zeros());
    u32::from(key.endpoint) * FRAGMENTS_SHARE + u32::from(key.direction & 1) * FRAGMENT_PLACES + hash
}

/// The compiler turns a byte comparison into a call of a loop.
#[inline(always)]
fn is_same(a: &FragmentSlot, b: &FragmentSlot) -> bool {
    // SAFETY: the key is first, 40 bytes without padding; aligned to 8.
    let (a, b) = unsafe { (&*ptr::from_ref(a).cast::<[u64; 5]>(), &*ptr::from_ref(b).cast::<[u64; 5]>()) };
    (a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]) | (a[4] ^ b[4]) == 0
}

const _: () = assert!(core::mem::offset_of!(FragmentSlot, row) == 40);
