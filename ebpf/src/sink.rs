//! The object `sink`: takes the place of an endpoint's programs on both hooks while the endpoint is deleted, so that no
//! packet passes unpoliced until the link is gone. The endpoint's `CALLS` slot is emptied, and an empty slot drops.
//! No maps: the program may outlive all of them. So it does without the library, whose maps would come along.
#![no_std]
#![no_main]

use aya_ebpf::{bindings::TC_ACT_SHOT, macros::classifier, programs::TcContext};

/// Drops every packet. Nothing is counted: the endpoint it stands for is gone.
#[classifier]
pub fn sink(_ctx: TcContext) -> i32 {
    TC_ACT_SHOT
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";

/// As the library's: never reached.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
