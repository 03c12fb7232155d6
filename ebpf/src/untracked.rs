//! The object `untracked`, for the benchmark alone: what stands in place of the node's program `flow` to measure what tracking costs.
//! Each packet takes the direct way, and no row is read or written.
#![no_std]
#![no_main]

use aya_ebpf::{macros::classifier, programs::TcContext};
use wharf_ebpf::{
    flow::{Asked, Way},
    handoff::Words,
};

/// Sends every packet on.
#[classifier]
pub fn untracked(ctx: TcContext) -> i32 {
    Asked::of(Words::of(&ctx)).conclude(&ctx, Ok(Way::Direct))
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";
