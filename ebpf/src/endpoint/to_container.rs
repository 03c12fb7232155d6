//! Egress hook (clsact or tcx) on the host side of the veth: what the node's stack sends to the container (the endpoint's ingress).
//!
//! The interface has no ARP, so the stack puts no useful address on the frame; this program does.

use aya_ebpf::programs::TcContext;
use wharf_common::{Direction, DropReason};

use wharf_ebpf::{
    config::Config,
    stack_path,
    verdict::{self, Decision, Forward, Next},
};

use crate::receive::{self, Hop};

/// Runs the program.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    verdict::run(ctx, Direction::Ingress, |config, _| decide(ctx, config))
}

#[inline(always)]
fn decide(ctx: &TcContext, config: Config) -> Decision {
    receive::accept(ctx, config, Hop::WasBefore)?;
    if stack_path::is_noted(ctx, config) {
        return Ok(Forward { reason: DropReason::ForwardedStack, next: Next::Note });
    }
    Ok(Forward::STACK)
}
