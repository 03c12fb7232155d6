//! Egress hook (clsact or tcx) on the host side of the veth: what the node's stack sends to the container (the endpoint's ingress).
//!
//! The interface has no ARP, so the stack puts no useful address on the frame; this program does.

use aya_ebpf::programs::TcContext;
use wharf_common::Direction;

use wharf_ebpf::{flow::Peer, verdict};

use crate::receive::{self, Hop};

/// Runs the program.
#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    verdict::run(ctx, Direction::Ingress, |config, _| receive::accept(ctx, config, Hop::WasBefore).map(Peer::stack))
}
