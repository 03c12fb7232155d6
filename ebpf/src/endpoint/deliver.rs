//! Tail-called by the sender's `from_container` at this endpoint's slot of `CALLS`: what another local endpoint sends
//! to the container (this endpoint's ingress).
//!
//! The sender decided who the packet is for; the receiver's own program, with the receiver's own maps, decides whether
//! it is let in. A slot or a row that a late sender still holds of an endpoint that is gone ends here, at the address.

use aya_ebpf::{helpers::bpf_redirect_peer, programs::TcContext};
use wharf_common::{Direction, DropReason};

use wharf_ebpf::{
    config::Config,
    verdict::{self, Decision, Forward},
};

use crate::receive;

/// Runs the program.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    verdict::run(ctx, Direction::Ingress, |config, _| decide(ctx, config))
}

#[inline(always)]
fn decide(ctx: &TcContext, config: Config) -> Decision {
    receive::accept(ctx, config)?;
    Ok(Forward { reason: DropReason::ForwardedLocal, action: redirect_peer(config.ifindex()) })
}

/// Hands the packet to the container's side of the veth whose host side is `ifindex`, as if it had just arrived there:
/// no queue, no second hook.
#[inline(always)]
pub fn redirect_peer(ifindex: u32) -> i32 {
    // SAFETY: a helper without pointers. It answers `TC_ACT_REDIRECT`, or `TC_ACT_SHOT` for flags it does not know.
    unsafe { bpf_redirect_peer(ifindex, 0) as i32 }
}
