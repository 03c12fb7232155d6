//! The object `endpoint`: the three programs of one endpoint. Each endpoint has its own, verified for it alone, so they are short
//! ([`wharf_ebpf::head`]); what is the same for all is in the object `node`.
//!
//! | program | hook | sees |
//! |---|---|---|
//! | [`from_container`] | clsact (or tcx) ingress, host side of the veth | what the container sends |
//! | [`to_container`] | clsact (or tcx) egress, host side of the veth | what the node's stack sends to the container |
//! | [`deliver`] | tail call from the **sender's** `deliver`, and from the node's programs | what another local endpoint sends to the container; verdicts about this endpoint's packets |
//!
//! None of them writes to a packet. The kernel itself drops, uncounted, only when it cannot unshare a packet's head for lack of memory,
//! which happens before a program that writes to packets begins.
#![no_std]
#![no_main]

mod deliver;

use aya_ebpf::{macros::classifier, programs::TcContext};
use wharf_common::DropReason;
use wharf_ebpf::{head, parse};

/// What the container sends.
#[classifier]
pub fn from_container(ctx: TcContext) -> i32 {
    head::send(&ctx).hand_over(&ctx)
}

/// What the node's stack sends to the container. Of a fragment it is not certain what becomes: the first of its packet may be missing.
#[classifier]
pub fn to_container(ctx: TcContext) -> i32 {
    head::receive(&ctx, DropReason::ForwardedStack, || parse::is_whole(&ctx)).hand_over(&ctx)
}

/// What another local endpoint sends to the container, and verdicts.
#[classifier]
pub fn deliver(ctx: TcContext) -> i32 {
    deliver::run(&ctx)
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";
