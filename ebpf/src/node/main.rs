//! The object `node`: the node programs, loaded once for all endpoints and tail-called in the slots of
//! [`wharf_common::map::NodeCall`] (see [`wharf_ebpf::handoff`]). The `skb` of a global function is the program's
//! context.
//!
//! | program | called by | does |
//! |---|---|---|
//! | [`egress`] | `from_container` | judges packets from a container; finds flow and way |
//! | [`ingress`] | `deliver`, `to_container` | judges packets to a container; finds the flow |
//! | [`neighbour`] | `egress` | judges and answers ARP and neighbour discovery |
//! | [`event`] | `deliver` | writes the record of a drop or trace |
//! | [`collect`] | user space | removes rows of finished flows |
#![allow(
    clippy::needless_borrows_for_generic_args,
    reason = "a key passed by value is a copy on the stack of 512 bytes"
)]
#![no_std]
#![no_main]

mod clients;
mod collect;
mod event;
mod flow;
mod neighbour;
mod packet;
mod policy;
mod recent;
mod redirect;
mod sources;
mod stack_path;

use aya_ebpf::{
    macros::{classifier, raw_tracepoint},
    programs::{RawTracePointContext, TcContext},
};

#[classifier]
pub fn event(ctx: TcContext) -> i32 {
    event::run(&ctx)
}

#[classifier]
pub fn neighbour(ctx: TcContext) -> i32 {
    neighbour::run(&ctx)
}

#[classifier]
pub fn egress(ctx: TcContext) -> i32 {
    wharf_ebpf::egress::run(&ctx, flow::way, sources::may_send)
}

#[classifier]
pub fn ingress(ctx: TcContext) -> i32 {
    wharf_ebpf::ingress::run(&ctx, flow::way, sources::may_receive)
}

#[raw_tracepoint]
pub fn collect(_: RawTracePointContext) -> i32 {
    collect::run();
    0
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";
