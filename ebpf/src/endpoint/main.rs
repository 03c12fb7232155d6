//! The object `endpoint`: the three programs of one endpoint.
//!
//! | program | hook | sees |
//! |---|---|---|
//! | [`from_container`] | clsact (or tcx) ingress, host side of the veth | what the container sends |
//! | [`to_container`] | clsact (or tcx) egress, host side of the veth | what the node's stack sends to the container |
//! | [`deliver`] | tail call from the **sender's** `from_container` | what another local endpoint sends to the container; verdicts of the node's programs about what this container sends |
//!
//! Every program runs the same way: gate, parse, decide, then [`wharf_ebpf::verdict::run`] records the one verdict. What few packets need is in the object `node`. The
//! kernel itself drops, uncounted, only when it cannot unshare a packet's head for lack of memory, which happens before a
//! program that writes to packets begins.
#![no_std]
#![no_main]

mod deliver;
mod forward;
mod from_container;
mod receive;
mod to_container;

use aya_ebpf::{macros::classifier, programs::TcContext};

/// What the container sends.
#[classifier]
pub fn from_container(ctx: TcContext) -> i32 {
    from_container::run(&ctx)
}

/// What the node's stack sends to the container.
#[classifier]
pub fn to_container(ctx: TcContext) -> i32 {
    to_container::run(&ctx)
}

/// What another local endpoint sends to the container.
#[classifier]
pub fn deliver(ctx: TcContext) -> i32 {
    deliver::run(&ctx)
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";
