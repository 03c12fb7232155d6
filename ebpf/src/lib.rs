//! What every object of Wharf's BPF programs shares: the panic handler that the language asks for.
#![no_std]

/// Never reached: the programs have no panicking path, and the verifier would refuse this loop if one led here.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
