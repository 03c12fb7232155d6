//! Judges packets to a service with a backend on another node: the node has translated the address, and no endpoint's
//! hook follows.
//!
//! Routing rules send packets with [`MARK_UNDECIDED`] to the router's link (`wharf_datapath::translated`), at whose
//! egress hook this program judges each packet, without flow rows. An accepted packet enters the stack again through
//! that link with [`MARK_TURNED`], which prevents a second translation.

use aya_ebpf::{
    bindings::{BPF_F_INGRESS, TC_ACT_SHOT, TC_ACT_UNSPEC},
    helpers::bpf_redirect,
    programs::TcContext,
};
use wharf_common::{
    Direction, DropReason,
    flow::{ICMP, ICMPV6, TCP},
    policy::{MARK_TO_PROXY, MARK_TURNED, MARK_UNDECIDED},
};
use wharf_ebpf::{handoff::Verdict, parse::ETHERNET_BYTES};

use crate::{
    clients,
    flow::ICMP_ERROR_BYTES,
    packet::{Packet, echo_request},
    policy, redirect, sources,
};

#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    // SAFETY: a field of the context.
    if unsafe { (*ctx.skb.skb).mark } & MARK_UNDECIDED == 0 {
        return TC_ACT_UNSPEC;
    }
    let sender = sources::sender(ctx);
    if !sender.is_some() {
        return TC_ACT_SHOT;
    }
    match judge(ctx, sender.id()) {
        Ok(mark) => {
            // SAFETY: the context; a classifier may write the mark. The link resolves no neighbours: the
            // frame's destination is the link.
            unsafe {
                (*ctx.skb.skb).mark = (*ctx.skb.skb).mark & !MARK_UNDECIDED | MARK_TURNED | mark;
                bpf_redirect((*ctx.skb.skb).ifindex, BPF_F_INGRESS.into()) as i32
            }
        }
        Err(reason) => {
            let verdict = Verdict::new(ctx, sender.id(), Direction::Egress, reason, TC_ACT_SHOT);
            verdict.after(DropReason::ForwardedStack).hand_over(ctx)
        }
    }
}

/// The backend's protocol and port, from the packet at `inner` that an error reports.
#[inline(always)]
fn reported(ctx: &TcContext, inner: usize) -> Result<(u8, u16), DropReason> {
    let about = Packet::at(ctx, inner).ok_or(DropReason::Malformed)?;
    Ok(match about.protocol {
        ICMP | ICMPV6 => (about.protocol, u16::from(echo_request(about.protocol)).to_be()),
        protocol => (protocol, about.source_port),
    })
}

/// [`MARK_TO_PROXY`] or zero.
#[inline(always)]
fn judge(ctx: &TcContext, sender: u32) -> Result<u32, DropReason> {
    let packet = Packet::at(ctx, ETHERNET_BYTES).ok_or(DropReason::Malformed)?;
    if packet.is_later_fragment() {
        // The stack forwards fragments only together, and the first is judged.
        return Ok(0);
    }
    if packet.is_incomplete() {
        return Err(DropReason::UnknownTransport);
    }
    let (protocol, port) = match packet.protocol {
        ICMP | ICMPV6 if packet.is_error => reported(ctx, packet.transport + ICMP_ERROR_BYTES)?,
        ICMP | ICMPV6 => (packet.protocol, u16::from(packet.kind).to_be()),
        _ => (packet.protocol, packet.destination_port),
    };
    let passed = policy::judge_sender(ctx, sender, u32::from(port) | u32::from(protocol) << 16)?;
    if !passed.is_redirected() || packet.is_error {
        return Ok(0);
    }
    if redirect::redirect(ctx, &packet, false, true, passed)?.flag() == 0 {
        return Ok(0);
    }
    if packet.protocol == TCP {
        clients::admit(ctx, &packet, Direction::Ingress)?;
    }
    Ok(MARK_TO_PROXY)
}
