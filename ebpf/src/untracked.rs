//! The object `untracked`, for the benchmark alone: what stands in place of the node's programs `egress` and `ingress` to measure what
//! tracking costs. Each packet takes the direct way, and no row is read or written.
#![no_std]
#![no_main]

use aya_ebpf::{macros::classifier, programs::TcContext};
use wharf_ebpf::{egress as sent, flow::Way, ingress as received};

/// Judges what a container sends.
#[classifier]
pub fn egress(ctx: TcContext) -> i32 {
    sent::run(&ctx, |_, _| Ok(Way::Direct))
}

/// Judges what reaches a container.
#[classifier]
pub fn ingress(ctx: TcContext) -> i32 {
    received::run(&ctx, |_, _| Ok(Way::Direct))
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";
