//! Shared parts of Wharf's BPF programs. An *endpoint program* is loaded per endpoint; a *node program* is loaded
//! once and serves all endpoints by tail call. A *global function* has an exported name and takes only the context and
//! numbers, so that the verifier checks it once and not at every call. Modules use only modules further down:
//!
//! | module | content |
//! |---|---|
//! | [`head`] | start of the endpoint programs: work with the endpoint's maps, then a tail call to a node program |
//! | [`egress`], [`ingress`] | decisions of the node programs of these names |
//! | [`shortcut`] | packets that an endpoint program judges without a node program |
//! | [`verdict`] | records every decision, in the endpoint's `deliver` |
//! | [`event`], [`metrics`], [`test_packet`] | events; counters; test packets, which leave neither |
//! | [`bandwidth`] | token buckets |
//! | [`neighbour`], [`flow`] | neighbour messages; requests for a packet's flow |
//! | [`handoff`] | data that a program passes to the program it tail-calls |
//! | [`turn`] | packets of the node's stack that go to the proxy |
//! | [`endpoints`] | addresses of local endpoints |
//! | [`profile`] | the endpoint's data for node programs |
//! | [`config`] | the endpoint's data for its own programs: constants, and the row that user space changes |
//! | [`maps`] | the maps |
//! | [`parse`], [`atomic`] | packet headers; atomic additions |
#![no_std]
// `atomic_xadd` is the only atomic addition in every kernel's BPF; `core::sync::atomic` lacks it here.
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

/// Never reached: no path panics, and the verifier would reject this loop.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
