//! The object `sink`: replaces an endpoint's programs during its deletion. It can outlive all maps, so it uses neither
//! maps nor the library, which brings maps.
#![no_std]
#![no_main]

use aya_ebpf::{bindings::TC_ACT_SHOT, macros::classifier, programs::TcContext};

#[classifier]
pub fn sink(_ctx: TcContext) -> i32 {
    TC_ACT_SHOT
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
