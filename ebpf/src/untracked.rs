//! The object `untracked`, for benchmarks: replaces the node programs `egress` and `ingress` to measure the cost of
//! tracking.
#![no_std]
#![no_main]

use aya_ebpf::{macros::classifier, programs::TcContext};
use wharf_ebpf::{egress as sent, flow::Way, ingress as received};

#[classifier]
pub fn egress(ctx: TcContext) -> i32 {
    sent::run(&ctx, |_, _| Ok(Way::Direct), |_, _| false)
}

#[classifier]
pub fn ingress(ctx: TcContext) -> i32 {
    received::run(&ctx, |_, _| Ok(Way::Direct), |_, _| false)
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";
