//! What every object of Wharf's BPF programs is made of. Arrows lead down:
//!
//! | module | content |
//! |---|---|
//! | [`verdict`] | a program's decision, and the one place where it is recorded |
//! | [`event`], [`metrics`], [`test_packet`] | what is recorded: events, counters; nothing of a test packet |
//! | [`bandwidth`] | token buckets |
//! | [`neighbour`], [`flow`] | what an endpoint's programs hand to the node's: neighbour messages; packets, of which the flow is to be found |
//! | [`handoff`] | what a program hands to the one that it tail-calls |
//! | [`endpoints`] | which addresses are local endpoints |
//! | [`config`] | whose programs these are: constants, and the row that user space may change |
//! | [`maps`] | the maps |
//! | [`parse`], [`atomic`] | packet headers; additions |
#![no_std]
// For `atomic_xadd`: the one atomic addition that every kernel's BPF has, which `core::sync::atomic` does not give here.
#![feature(core_intrinsics)]
#![allow(internal_features)]

pub mod atomic;
pub mod bandwidth;
pub mod config;
pub mod endpoints;
pub mod event;
pub mod flow;
pub mod handoff;
pub mod maps;
pub mod metrics;
pub mod neighbour;
pub mod parse;
pub mod test_packet;
pub mod verdict;

/// Never reached: the programs have no panicking path, and the verifier would refuse this loop if one led here.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
