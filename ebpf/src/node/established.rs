//! Passes packets that change nothing in their established flow's row; others continue in `judge`, with the same words.
//! Only a missing program drops a packet.
//!
//! [`wharf_ebpf::shortcut`] has judged the packet: it is whole, without IP options or extension headers. `judge` would
//! change nothing on these conditions:
//!
//! | condition | else `judge` would |
//! |---|---|
//! | TCP without SYN, FIN, RST, or UDP; whole header | end, begin or refuse the flow |
//! | the flow is kept, answered, not ended | keep, answer or replace it |
//! | both ends' epochs match | begin another flow |
//! | judged by current rules | judge again |
//! | seen in this tick | write the tick |
//! | no proxy, service or source prefix | mark, redirect or count |
//! | the pair's way cannot have changed since the tick began | record or change the way |
//!
//! Separate from `judge`: the verifier would follow each of these branches through `judge`.

use core::{hint::black_box, ptr};

use aya_ebpf::{
    bindings::{TC_ACT_OK, TC_ACT_SHOT},
    programs::TcContext,
};
use wharf_common::{
    Direction, DropReason,
    flow::{
        FLOW_BY_STACK, FLOW_FIN, FLOW_FIN_REPLY, FLOW_OF_PROXY, FLOW_PREFIX, FLOW_RECENT, FLOW_REPLIED, FLOW_RESET,
        SIGNAL_FIN, SIGNAL_RST, SIGNAL_SYN, TCP, UDP,
    },
    policy::BY_SERVICE,
};
use wharf_ebpf::{
    flow::Asked,
    handoff::{self, Verdict, Words},
    maps::FLOWS,
    parse::{self, ETHERNET_BYTES, Framed, HEADERS_BYTES, Ipv4, Ipv6, PROTOCOL_IPV4, read},
    test_packet,
};

use crate::{
    flow::{Ends, now},
    packet::Packet,
    policy, redirect, stack_path,
};

/// Flags of rows for `judge`; [`FLOW_REPLIED`] must be set.
const OTHERS: u16 = FLOW_FIN | FLOW_FIN_REPLY | FLOW_RESET | FLOW_RECENT | FLOW_PREFIX | FLOW_OF_PROXY;
const ENDS_OR_BEGINS: u16 = (SIGNAL_FIN | SIGNAL_SYN | SIGNAL_RST) as u16;
/// Data offset and flags (RFC 9293, 3.1).
const TCP_FLAGS: usize = 12;
const TCP_BYTES: u16 = 20;
const UDP_BYTES: u16 = 8;

#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let words = Words::of(ctx);
    let asked = words.asked();
    let verdict = |reason| Verdict::new(ctx, asked.own, asked.direction, reason, TC_ACT_SHOT);
    let way = way(ctx, &asked);
    if way != NONE {
        if asked.direction as u32 == Direction::Ingress as u32 {
            if let Ok(frame) = parse::ethernet(ctx) {
                frame.set_destination(words.container_mac());
                return TC_ACT_OK;
            }
        } else if asked.peer.endpoint_id == 0 {
            return TC_ACT_OK;
        } else if way == STACK {
            let stack = Verdict::new(ctx, asked.own, asked.direction, DropReason::ForwardedStack, TC_ACT_OK);
            return stack.after(asked.peer.forwarded()).hand_over(ctx);
        } else {
            handoff::deliver(ctx, asked.peer.endpoint_id);
            return verdict(DropReason::NoTailCallTarget).after(asked.peer.forwarded()).hand_over(ctx);
        }
    }
    handoff::call_judge(ctx);
    verdict(DropReason::NoNodeProgram).after(asked.peer.forwarded()).hand_over(ctx)
}

/// Results of [`way`].
const NONE: u32 = 0;
const STACK: u32 = 1;
const OTHER: u32 = 2;

/// [`NONE`] leaves the packet to `judge`; [`STACK`] for a flow between endpoints that takes the node's stack.
#[inline(always)]
fn way(ctx: &TcContext, asked: &Asked) -> u32 {
    // Before the rules, as in `judge`.
    let generation = policy::state().generation;
    let receives = asked.direction as u32 == Direction::Ingress as u32;
    let (is_between, now) = (!receives && asked.peer.endpoint_id != 0, now());
    if test_packet::is_test(ctx)
        || redirect::has_mark_of_proxy(ctx)
        || is_between && stack_path::has_new_path(asked.own, asked.own_epoch, now)
    {
        return NONE;
    }
    let Some((ports, protocol)) = ports(ctx) else { return NONE };
    let Some(packet) = Packet::with(ctx, ports, protocol) else { return NONE };
    let (key, by_high) = packet.key();
    // SAFETY: a row's memory outlives this run; fields are read separately.
    let Some(row) = (unsafe { FLOWS.get_ptr_mut(key.as_shared()).map(|row| &*row) }) else { return NONE };
    let flags = row.flags;
    let differs = u32::from((flags & (OTHERS | FLOW_REPLIED)) ^ FLOW_REPLIED) | (row.rule & BY_SERVICE);
    if black_box(differs) != 0 {
        return NONE;
    }
    let judged = if generation == 0 { 0 } else { generation.wrapping_add(key.generation()) };
    let differs = (row.seen ^ now) | (row.generation ^ judged);
    if black_box(differs) != 0 || !Ends::of(asked, by_high).match_row(row) {
        return NONE;
    }
    let by_stack = flags & FLOW_BY_STACK != 0;
    let sender = if by_high { row.high_epoch } else { row.low_epoch };
    match () {
        () if receives && !by_stack && sender != 0 => NONE,
        () if is_between && by_stack => STACK,
        () => OTHER,
    }
}

/// [`Packet::ports`] and protocol of a packet that neither begins nor ends its flow.
#[inline(always)]
fn ports(ctx: &TcContext) -> Option<(u32, u8)> {
    // SAFETY: the context.
    let is_ipv4 = unsafe { ptr::read_volatile(&raw const (*ctx.skb.skb).protocol) } == PROTOCOL_IPV4;
    let (protocol, bytes, at) = if is_ipv4 {
        let packet: Framed<Ipv4> = Framed::at_start(ctx)?;
        (packet.protocol(), packet.total_bytes().wrapping_sub(size_of::<Ipv4>() as u16), ETHERNET_BYTES + 20)
    } else {
        let packet: Framed<Ipv6> = Framed::at_start(ctx)?;
        (packet.next_header(), packet.payload_bytes(), HEADERS_BYTES)
    };
    let ports = read::<u32>(ctx, at)?;
    match protocol {
        TCP if bytes >= TCP_BYTES => {
            let flags = u16::from_be(read::<u16>(ctx, at + TCP_FLAGS)?);
            (flags & ENDS_OR_BEGINS == 0).then_some((ports, TCP))
        }
        UDP if bytes >= UDP_BYTES => Some((ports, UDP)),
        _ => None,
    }
}
