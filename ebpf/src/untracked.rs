//! The object `untracked`, for benchmarks: replaces the node programs `established` and `judge` to measure the
//! cost of tracking.
#![no_std]
#![no_main]

use aya_ebpf::{macros::classifier, programs::TcContext};
use wharf_common::Direction;
use wharf_ebpf::{egress, flow::Way, handoff::Words, ingress};

#[classifier]
pub fn judge(ctx: TcContext) -> i32 {
    match Words::of(&ctx).direction() {
        Direction::Egress => egress::run(&ctx, |_, _| Ok(Way::Direct), |_, _| false),
        Direction::Ingress => ingress::run(&ctx, |_, _| Ok(Way::Direct), |_, _| false),
    }
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";
