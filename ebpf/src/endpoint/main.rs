//! The object `endpoint`: the three programs of one endpoint. They are verified per endpoint, so they are short
//! ([`wharf_ebpf::head`]); the rest is in the object `node`.
//!
//! | program | hook | sees |
//! |---|---|---|
//! | [`from_container`] | clsact (or tcx) ingress, host side of the veth | packets from the container |
//! | [`to_container`] | clsact (or tcx) egress, host side of the veth | packets from the stack to the container |
//! | [`deliver`] | tail call | packets from another local endpoint; unjudged packets; verdicts |
//!
//! `deliver` is tail-called by the node's `egress`, the **sender's** `deliver`, the endpoint's hook programs, and node
//! programs.
//!
//! The hook programs write to no packet, so the kernel skips unsharing the packet's head. Before a program that
//! writes, the kernel drops a packet uncounted when it has no memory to unshare the head.
#![no_std]
#![no_main]

mod deliver;

use aya_ebpf::{macros::classifier, programs::TcContext};
use wharf_ebpf::head;

/// Packets from the container.
#[classifier]
pub fn from_container(ctx: TcContext) -> i32 {
    head::send(&ctx)
}

/// Packets from the node's stack to the container.
#[classifier]
pub fn to_container(ctx: TcContext) -> i32 {
    head::receive(&ctx)
}

#[classifier]
pub fn deliver(ctx: TcContext) -> i32 {
    deliver::run(&ctx)
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";
