//! The program in this endpoint's slot of `CALLS`. A late sender's stale slot or row fails here, or at the address
//! check.

use aya_ebpf::programs::TcContext;

use wharf_ebpf::{
    handoff::{Verdict, Words},
    head, verdict,
};

#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let words = Words::of(ctx);
    match Verdict::of(words) {
        Some(verdict) => verdict::conclude(ctx, verdict),
        None => head::deliver(ctx, words).unwrap_or_else(|refused| verdict::refuse(ctx, refused)),
    }
}
