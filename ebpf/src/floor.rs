//! The object `floor`, for the benchmark alone: the least that a program can do to hand a packet from one container to
//! another. What Wharf's programs cost is the distance to it.
#![no_std]
#![no_main]

use aya_ebpf::{helpers::bpf_redirect_peer, macros::classifier, programs::TcContext};

/// Index of the receiver's host side; the loader sets it.
#[unsafe(no_mangle)]
static RECEIVER: u32 = 0;

/// Hands every packet to the receiver.
#[classifier]
pub fn floor(_ctx: TcContext) -> i32 {
    // SAFETY: the address of a static of this program; the loader has written it before the program is loaded.
    let receiver = unsafe { core::ptr::read_volatile(&raw const RECEIVER) };
    // SAFETY: a helper without pointers.
    unsafe { bpf_redirect_peer(receiver, 0) as i32 }
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
