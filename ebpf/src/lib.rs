//! Shared parts of Wharf's BPF programs. An *endpoint program* is loaded per endpoint, a *node program* once; it serves
//! all endpoints by tail call. A *global function* takes only the context (`__sk_buff`) and numbers: the verifier
//! checks it once, not at every call.
//!
//! Modules use only modules further down: [`head`]; [`egress`], [`ingress`]; [`shortcut`]; [`cache`]; [`verdict`];
//! [`event`], [`metrics`], [`test_packet`]; [`bandwidth`]; [`neighbour`], [`flow`]; [`handoff`]; [`turn`];
//! [`endpoints`]; [`profile`], [`config`]; [`maps`]; [`parse`], [`atomic`], [`opaque`], [`whole`].
#![no_std]
// `core::sync::atomic` lacks `atomic_xadd`.
#![feature(core_intrinsics)]
// For `opaque`.
#![feature(asm_experimental_arch)]
#![allow(internal_features)]

pub mod atomic;
pub mod bandwidth;
pub mod cache;
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
pub mod opaque;
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
