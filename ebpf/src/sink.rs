//! The object `sink`: stands in for an endpoint's programs while the endpoint is being deleted, so that nothing passes
//! unpoliced on the links and in the `CALLS` slot while the rest is taken away. No maps: it may outlive all of them.
#![no_std]
#![no_main]

use aya_ebpf::{bindings::TC_ACT_SHOT, macros::classifier, programs::TcContext};
use wharf_ebpf as _;

/// Drops every packet. Nothing is counted: the endpoint it stands for is gone.
#[classifier]
pub fn sink(_ctx: TcContext) -> i32 {
    TC_ACT_SHOT
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";
