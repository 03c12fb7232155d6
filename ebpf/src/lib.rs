//! Shared parts of Wharf's BPF programs. An *endpoint program* is loaded per endpoint; a *node program* is loaded once
//! and serves all endpoints by tail call. A *global function* is exported and takes only the context and numbers, so
//! that the verifier checks it once and not at every call. Modules use only modules further down:
//!
//! | module | content |
//! |---|---|
//! | [`head`] | start of the endpoint programs |
//! | [`egress`], [`ingress`] | decisions of the node program `judge` |
//! | [`shortcut`] | packets that endpoint programs judge |
//! | [`verdict`] | records every decision |
//! | [`event`], [`metrics`], [`test_packet`] | events; counters; test packets, which leave neither |
//! | [`bandwidth`] | token buckets |
//! | [`neighbour`], [`flow`] | neighbour messages; requests for a packet's flow |
//! | [`handoff`] | data for a tail-called program |
//! | [`turn`] | packets from the stack to the proxy |
//! | [`endpoints`] | addresses of local endpoints |
//! | [`profile`], [`config`] | the endpoint's data for node programs; for its own |
//! | [`maps`] | the maps |
//! | [`parse`], [`atomic`], [`whole`] | packet headers; atomic additions; keys of longest-prefix searches |
#![no_std]
// `core::sync::atomic` lacks `atomic_xadd`.
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
pub mod whole;

/// No path panics: the verifier would reject this loop.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
