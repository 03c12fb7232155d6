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
        TCP, UDP,
    },
    policy::BY_SERVICE,
};
use wharf_ebpf::{
    cache::{self, Flow, Transport},
    handoff::{self, Verdict, Words},
    maps::FLOWS,
    parse::{self, Framed, Ipv4, Ipv6, PROTOCOL_IPV4},
};

use crate::{
    flow::{Ends, now},
    packet::Packet,
    policy, redirect, stack_path,
};

/// Flags of rows for `judge`; [`FLOW_REPLIED`] must be set.
const OTHERS: u16 = FLOW_FIN | FLOW_FIN_REPLY | FLOW_RESET | FLOW_RECENT | FLOW_PREFIX | FLOW_OF_PROXY;

#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let words = Words::of(ctx);
    let asked = words.asked();
    let verdict = |reason| Verdict::new(ctx, asked.own, asked.direction, reason, TC_ACT_SHOT);
    let way = way(ctx, words);
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
fn way(ctx: &TcContext, words: Words) -> u32 {
    let asked = &words.asked();
    // Before the rules, as in `judge`.
    let generation = policy::state().generation;
    let receives = asked.direction as u32 == Direction::Ingress as u32;
    let (is_between, now) = (!receives && asked.peer.endpoint_id != 0, now());
    if redirect::has_mark_of_proxy(ctx) || is_between && stack_path::has_new_path(asked.own, asked.own_epoch, now) {
        return NONE;
    }
    let Some(transport) = transport(ctx) else { return NONE };
    if transport.oddities != 0 || !matches!(transport.protocol(), TCP | UDP) {
        return NONE;
    }
    let Some(packet) = Packet::with(ctx, transport.ports, transport.protocol()) else { return NONE };
    let (key, by_high) = packet.key();
    let rows = generation.wrapping_add(key.generation());
    // The hook has read it before the receiver's row.
    let cached = if receives { rows.wrapping_add(cache::ends(asked.own)) } else { words.generation() };
    // SAFETY: a row's memory outlives this run; fields are read separately.
    let Some(row) = (unsafe { FLOWS.get_ptr_mut(key.as_shared()).map(|row| &*row) }) else { return NONE };
    let flags = row.flags;
    let differs = u32::from((flags & (OTHERS | FLOW_REPLIED)) ^ FLOW_REPLIED) | (row.rule & BY_SERVICE);
    if black_box(differs) != 0 {
        return NONE;
    }
    let judged = if generation == 0 { 0 } else { rows };
    let differs = (row.seen ^ now) | (row.generation ^ judged);
    if black_box(differs) != 0 || !Ends::of(asked, by_high).match_row(row) {
        return NONE;
    }
    let by_stack = flags & FLOW_BY_STACK != 0;
    let sender = if by_high { row.high_epoch } else { row.low_epoch };
    if receives && !by_stack && sender != 0 {
        return NONE;
    }
    let peer = if receives { packet.source } else { packet.destination };
    let receiver = if is_between && !by_stack { asked.peer.endpoint_id } else { 0 };
    Flow::new(asked.direction, asked.own_epoch, peer, transport, cached).keep(receiver);
    if is_between && by_stack { STACK } else { OTHER }
}

#[inline(always)]
fn transport(ctx: &TcContext) -> Option<Transport> {
    // SAFETY: the context.
    let is_ipv4 = unsafe { ptr::read_volatile(&raw const (*ctx.skb.skb).protocol) } == PROTOCOL_IPV4;
    if is_ipv4 {
        let packet: Framed<Ipv4> = Framed::at_start(ctx)?;
        Transport::anywhere(ctx, packet.protocol(), packet.payload_bytes())
    } else {
        let packet: Framed<Ipv6> = Framed::at_start(ctx)?;
        Transport::anywhere(ctx, packet.next_header(), packet.payload_bytes())
    }
}
