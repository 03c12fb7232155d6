//! What every object of Wharf's BPF programs is made of. Arrows lead down:
//!
//! | module | content |
//! |---|---|
//! | [`head`] | how an endpoint's own programs begin: what is this endpoint's alone, then a program of the node's |
//! | [`egress`], [`ingress`] | what the node's programs of these names decide, for every endpoint |
//! | [`shortcut`] | the packets that an endpoint's own programs judge themselves |
//! | [`verdict`] | the one place where a decision is recorded, in the endpoint's `deliver` |
//! | [`event`], [`metrics`], [`test_packet`] | what is recorded: events, counters; nothing of a test packet |
//! | [`bandwidth`] | token buckets |
//! | [`neighbour`], [`flow`] | neighbour messages; what is asked about a packet's flow |
//! | [`handoff`] | what a program hands to the one that it tail-calls |
//! | [`turn`] | packets that the node's stack sends and the proxy is to get |
//! | [`endpoints`] | which addresses are local endpoints |
//! | [`profile`] | what the node's programs know of an endpoint |
//! | [`config`] | whose programs an endpoint's own ones are: constants, and the row that user space may change |
//! | [`maps`] | the maps |
//! | [`parse`], [`atomic`] | packet headers; additions |
#![no_std]
// For `atomic_xadd`: the one atomic addition that every kernel's BPF has, which `core::sync::atomic` does not give here.
#![feature(core_intrinsics)]
#![allow(internal_features)]

pub mod atomic;
pub mod bandwidth;
pub mod config;
pub mod egress;
pub mod endpoints;
pub mod event;
pub mod flow;
pub mod handoff;
pub mod head;
pub mod ingress;
pub mod maps;
pub mod metrics;
pub mod neighbour;
pub mod parse;
pub mod profile;
pub mod shortcut;
pub mod test_packet;
pub mod turn;
pub mod verdict;

/// Never reached: the programs have no panicking path, and the verifier would refuse this loop if one led here.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
