//! The object `node`: programs that an endpoint's own ones tail-call for what few packets need. They are loaded once for all
//! endpoints ([`wharf_common::map::NodeCall`] has their slots); [`wharf_ebpf::handoff`] says how they know whose packet it is.
//!
//! | program | called by | what it does |
//! |---|---|---|
//! | [`event`] | every program | writes the record of a drop or trace |
//! | [`neighbour`] | `from_container` | judges and answers ARP and neighbour discovery |
//! | [`path`] | `from_container` | whether a packet to another endpoint takes the stack |
//! | [`note`] | `to_container` | notes that a flow between endpoints came through the stack |
#![no_std]
#![no_main]

mod event;
mod neighbour;
mod stack_path;

use aya_ebpf::{macros::classifier, programs::TcContext};

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

/// Decides which way a packet to another endpoint takes.
#[classifier]
pub fn path(ctx: TcContext) -> i32 {
    stack_path::path(&ctx)
}

/// Notes the path of a packet that the stack brought.
#[classifier]
pub fn note(ctx: TcContext) -> i32 {
    stack_path::note(&ctx)
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";
