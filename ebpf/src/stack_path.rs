//! Which packets between two endpoints take the node's stack, and not the direct way: what an endpoint's own programs ask.
//! The answers are programs of the node's.
//!
//! A rule of the node's may translate what an endpoint sends (DNAT to a service's backend) so that it reaches another
//! endpoint of the same node. Only the stack can translate the replies back, so **replies take the way that the flow came**:
//! what the stack brings from another endpoint is noted in `STACK_PATHS` behind the receiver's `to_container` ([`note`]), and
//! `from_container` of both asks there ([`ask`]).

use aya_ebpf::programs::TcContext;
use wharf_common::{EndpointKey, EndpointRow, map::NodeCall};

use crate::{
    config::{self, Config},
    handoff::{self, Words},
    maps::{ENDPOINTS, STACK_USERS},
    parse::Ipv6Address,
    test_packet,
};

/// The row of the local endpoint that has this address.
#[inline(always)]
pub fn endpoint(address: Ipv6Address) -> Option<&'static EndpointRow> {
    // SAFETY: same size, and a byte array asks for no alignment.
    let key = unsafe { &*(&raw const address).cast::<EndpointKey>() };
    // SAFETY: rows are freed after an RCU grace period, so the row outlives this run; user space replaces rows whole.
    unsafe { ENDPOINTS.get(key) }
}

/// Lets the node's program `path` decide which way the packet of `bytes` to another endpoint takes, where this endpoint has
/// paths through the stack at all. Comes back when it has none. A test packet takes the direct way, which is what the desired
/// state says.
#[inline(always)]
pub fn ask(ctx: &TcContext, config: Config, receiver: u32, bytes: u32) {
    let epoch = STACK_USERS.get(config::endpoint_id());
    if epoch.is_some_and(|epoch| *epoch == config.epoch()) && !test_packet::is_test(ctx) {
        handoff::call(ctx, NodeCall::Path, Words([0, 0, handoff::pair(receiver), bytes, 0]));
    }
}

/// True for a packet from the stack whose path is to be noted: the node itself sends by no link.
#[inline(always)]
pub fn is_noted(ctx: &TcContext, config: Config) -> bool {
    // SAFETY: the context the program was called with.
    let from_link = unsafe { (*ctx.skb.skb).ingress_ifindex != 0 };
    from_link && !config.local_by_stack() && !test_packet::is_test(ctx)
}

/// Lets the node's program `note` note the path of a packet that the stack brought. Comes back when there is no such program: the
/// flow's replies then take the direct way.
#[inline(always)]
pub fn note(ctx: &TcContext, config: Config) {
    handoff::call(ctx, NodeCall::Note, handoff::with_epoch(config, 0, [0, 0]));
}
