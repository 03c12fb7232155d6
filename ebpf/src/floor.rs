//! The object `floor`, for benchmarks: the minimal program that passes a packet between containers.
#![no_std]
#![no_main]

use aya_ebpf::{helpers::bpf_redirect_peer, macros::classifier, programs::TcContext};

/// Ifindex of the receiver's host side.
#[unsafe(no_mangle)]
static RECEIVER: u32 = 0;

#[classifier]
pub fn floor(_ctx: TcContext) -> i32 {
    // SAFETY: a static; the loader writes it before load.
    let receiver = unsafe { core::ptr::read_volatile(&raw const RECEIVER) };
    // SAFETY: a helper without pointers.
    unsafe { bpf_redirect_peer(receiver, 0) as i32 }
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
