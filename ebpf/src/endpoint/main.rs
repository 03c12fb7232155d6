//! The object `endpoint`: three short programs, verified per endpoint; the rest is in the object `node`.
//!
//! | program | hook | packets |
//! |---|---|---|
//! | [`from_container`] | ingress of the host side (clsact or tcx) | from the container |
//! | [`to_container`] | egress of the host side | from the stack to the container |
//! | [`deliver`] | tail call | from another endpoint; unjudged; with a verdict |
//!
//! `from_container` writes to no packet: before a program that writes, the kernel unshares the packet's head, and
//! without memory drops the packet uncounted.
#![no_std]
#![no_main]

mod deliver;

use aya_ebpf::{macros::classifier, programs::TcContext};
use wharf_ebpf::head;

#[classifier]
pub fn from_container(ctx: TcContext) -> i32 {
    head::send(&ctx)
}

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
