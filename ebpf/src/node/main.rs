//! The object `node`: programs that an endpoint's own ones tail-call for what is the same for all. They are loaded once for all
//! endpoints ([`wharf_common::map::NodeCall`] has their slots); [`wharf_ebpf::handoff`] says how they know whose packet it is.
//!
//! | program | called by | what it does |
//! |---|---|---|
//! | [`event`] | every program | writes the record of a drop or trace |
//! | [`neighbour`] | `from_container` | judges and answers ARP and neighbour discovery |
//! | [`flow`] | `from_container`, `to_container` | finds the packet's flow, and with it the packet's way; lets pass what policy allows |
//! | [`collect`] | user space | removes the rows of flows that are over |
#![no_std]
#![no_main]

mod collect;
mod event;
mod flow;
mod neighbour;
mod packet;
mod policy;
mod stack_path;

use aya_ebpf::{
    macros::{classifier, raw_tracepoint},
    programs::{RawTracePointContext, TcContext},
};

/// Writes an event.
#[classifier]
pub fn event(ctx: TcContext) -> i32 {
    event::run(&ctx)
}

/// Judges a neighbour message.
#[classifier]
pub fn neighbour(ctx: TcContext) -> i32 {
    neighbour::run(&ctx)
}

/// Finds a packet's flow.
#[classifier]
pub fn flow(ctx: TcContext) -> i32 {
    flow::run(&ctx)
}

/// Removes rows of flows that are over.
#[raw_tracepoint]
pub fn collect(_: RawTracePointContext) -> i32 {
    collect::run();
    0
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";
