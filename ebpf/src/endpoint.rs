//! The object `endpoint`: the three programs of one endpoint.
//!
//! | program | hook | sees |
//! |---|---|---|
//! | [`from_container`] | clsact (or tcx) ingress, host side of the veth | what the container sends |
//! | [`to_container`] | clsact (or tcx) egress, host side of the veth | what the node's stack sends to the container |
//! | [`deliver`] | tail call from the **sender's** `from_container` | what another local endpoint sends to the container |
//!
//! Every program runs the same way: gate, parse, decide, then [`verdict::conclude`] records the one verdict. The
//! kernel itself drops, uncounted, only when it cannot unshare a packet's head for lack of memory, which happens before a
//! program that writes to packets begins.
#![no_std]
#![no_main]
// For `atomic_xadd`: the one atomic addition that every kernel's BPF has, which `core::sync::atomic` does not give here.
#![feature(core_intrinsics)]
#![allow(internal_features)]

mod config;
mod deliver;
mod event;
mod forward;
mod from_container;
mod maps;
mod metrics;
mod neighbour;
mod parse;
mod receive;
mod test_packet;
mod to_container;
mod verdict;

use aya_ebpf::{macros::classifier, programs::TcContext};
use wharf_ebpf as _;

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
