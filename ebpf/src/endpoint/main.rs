//! The object `endpoint`: the three programs of one endpoint. Each endpoint has its own, verified for it alone, so they are short
//! ([`wharf_ebpf::head`]); what few packets need is in the object `node`.
//!
//! | program | hook | sees |
//! |---|---|---|
//! | [`from_container`] | clsact (or tcx) ingress, host side of the veth | what the container sends |
//! | [`to_container`] | clsact (or tcx) egress, host side of the veth | what the node's stack sends to the container |
//! | [`deliver`] | tail call from the node's `egress` or the **sender's** `deliver`, from the endpoint's own hooks, and from the node's programs | what another local endpoint sends to the container; packets at the hooks that are not judged yet; verdicts about this endpoint's packets |
//!
//! Those at the hooks write to no packet: the kernel spares them a call that unshares the packet's head. Uncounted it drops only when it
//! cannot do that for lack of memory, which happens before a program that writes to packets begins.
#![no_std]
#![no_main]

mod deliver;

use aya_ebpf::{macros::classifier, programs::TcContext};
use wharf_ebpf::head;

/// What the container sends.
#[classifier]
pub fn from_container(ctx: TcContext) -> i32 {
    head::send(&ctx)
}

/// What the node's stack sends to the container.
#[classifier]
pub fn to_container(ctx: TcContext) -> i32 {
    head::receive(&ctx)
}

/// What another local endpoint sends to the container, packets to be judged, and verdicts.
#[classifier]
pub fn deliver(ctx: TcContext) -> i32 {
    deliver::run(&ctx)
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";
