//! The object `node`: programs that an endpoint's own ones tail-call for what is the same for all. They are loaded once for all
//! endpoints ([`wharf_common::map::NodeCall`] has their slots); [`wharf_ebpf::handoff`] says how they know whose packet it is.
//!
//! | program | called by | what it does |
//! |---|---|---|
//! | [`egress`] | `from_container` | judges what a container sends, and finds the packet's flow and way; lets pass what policy allows |
//! | [`ingress`] | `deliver`, `to_container` | judges what reaches a container, addresses it, and finds the flow of what the stack sends; lets pass what policy allows |
//! | [`neighbour`] | `egress` | judges and answers ARP and neighbour discovery |
//! | [`event`] | `deliver` | writes the record of a drop or trace |
//! | [`collect`] | user space | removes the rows of flows that are over |
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

/// Judges what a container sends.
#[classifier]
pub fn egress(ctx: TcContext) -> i32 {
    wharf_ebpf::egress::run(&ctx, flow::way)
}

/// Judges what reaches a container.
#[classifier]
pub fn ingress(ctx: TcContext) -> i32 {
    wharf_ebpf::ingress::run(&ctx, flow::way)
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
