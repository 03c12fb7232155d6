//! Tail-called at this endpoint's slot of `CALLS`, by the sender's `deliver`: what another local endpoint sends to the
//! container (this endpoint's ingress); and by a program of the node's, or from a hook, with a verdict about a packet at one of this
//! endpoint's hooks.
//!
//! The sender decided who the packet is for; the receiver's own program, with the receiver's own maps, decides whether
//! it is let in. A slot or a row that a late sender still holds of an endpoint that is gone ends here, or at the address.

use aya_ebpf::programs::TcContext;
use wharf_common::DropReason;

use wharf_ebpf::{
    handoff::{Verdict, Words},
    head, verdict,
};

/// Runs the program.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    match Verdict::of(Words::of(ctx)) {
        Some(verdict) => verdict::conclude(ctx, verdict),
        None => verdict::refuse(ctx, head::receive(ctx, DropReason::ForwardedLocal, || true)),
    }
}
