//! Tail-called at this endpoint's slot of `CALLS`: by the sender's side, with what another local endpoint sends to the container (this
//! endpoint's ingress); by this endpoint's programs at the hooks, with a packet for the node's programs to judge; and by a program of the
//! node's, or from a hook, with a verdict about a packet at one of this endpoint's hooks.
//!
//! The sender decided who the packet is for; the receiver's own program, with the receiver's own maps, decides whether
//! it is let in. A slot or a row that a late sender still holds of an endpoint that is gone ends here, or at the address.

use aya_ebpf::programs::TcContext;

use wharf_ebpf::{
    handoff::{Verdict, Words},
    head, verdict,
};

/// Runs the program.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let words = Words::of(ctx);
    match Verdict::of(words) {
        Some(verdict) => verdict::conclude(ctx, verdict),
        None => head::deliver(ctx, words).unwrap_or_else(|refused| verdict::refuse(ctx, refused)),
    }
}
