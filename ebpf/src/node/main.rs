//! The object `node`: programs loaded once for all endpoints, tail-called in the slots of
//! [`wharf_common::map::NodeCall`] ([`wharf_ebpf::handoff`]). A global function's `skb` is the program's context.
//!
//! | program | called by | does |
//! |---|---|---|
//! | [`established`] | `from_container`, `to_container` | passes packets that change nothing in their flow |
//! | [`judge`] | `established`, `deliver` | judges packets; finds flow and way |
//! | [`neighbour`] | `judge` | answers ARP and neighbour discovery |
//! | [`event`] | `deliver` | writes an event |
//! | [`translated`] | router link's hook | judges packets to a backend on another node |
//! | [`collect`] | user space | removes rows of finished flows |
#![allow(
    clippy::needless_borrows_for_generic_args,
    reason = "a key passed by value is a copy on the stack of 512 bytes"
)]
#![no_std]
#![no_main]

mod clients;
mod collect;
mod established;
mod event;
mod flow;
mod neighbour;
mod packet;
mod policy;
mod recent;
mod redirect;
mod sources;
mod stack_path;
mod translated;

use aya_ebpf::{
    macros::{classifier, raw_tracepoint},
    programs::{RawTracePointContext, TcContext},
};
use wharf_common::Direction;
use wharf_ebpf::{egress, handoff::Words, ingress};

#[classifier]
pub fn event(ctx: TcContext) -> i32 {
    event::run(&ctx)
}

#[classifier]
pub fn neighbour(ctx: TcContext) -> i32 {
    neighbour::run(&ctx)
}

#[classifier]
pub fn established(ctx: TcContext) -> i32 {
    established::run(&ctx)
}

/// Both directions: the kernel verifies shared code once.
#[classifier]
pub fn judge(ctx: TcContext) -> i32 {
    match Words::of(&ctx).direction() {
        Direction::Egress => egress::run(&ctx, flow::way, sources::may_send),
        Direction::Ingress => ingress::run(&ctx, flow::way, sources::may_receive),
    }
}

#[classifier]
pub fn translated(ctx: TcContext) -> i32 {
    translated::run(&ctx)
}

#[raw_tracepoint]
pub fn collect(_: RawTracePointContext) -> i32 {
    collect::run();
    0
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";
