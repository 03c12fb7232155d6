//! Judges packets to a service whose backend is a container of another node: the node has translated the address, and
//! no hook of an endpoint sees the packet behind that.
//!
//! Routing rules send packets with [`MARK_UNDECIDED`] to the router's link (`wharf_datapath::translated`); this program
//! is at its egress hook. A packet that the sender's rules accept enters the stack again through that link, with
//! [`MARK_TURNED`], which keeps it from a second translation. The program has no flow rows: it judges each packet.

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
    // SAFETY: a field of the program's context.
    if unsafe { (*ctx.skb.skb).mark } & MARK_UNDECIDED == 0 {
        return TC_ACT_UNSPEC;
    }
    let sender = sources::sender(ctx);
    if !sender.is_some() {
        return TC_ACT_SHOT;
    }
    match judge(ctx, sender.id()) {
        Ok(mark) => {
            // SAFETY: the program's context; a classifier may write the mark. The link resolves no neighbours, so the
            // frame's destination is the link itself.
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

/// The backend's protocol and port in the packet at `inner`, about which the sender reports an error.
#[inline(always)]
fn reported(ctx: &TcContext, inner: usize) -> Result<(u8, u16), DropReason> {
    let about = Packet::at(ctx, inner).ok_or(DropReason::Malformed)?;
    Ok(match about.protocol {
        ICMP | ICMPV6 => (about.protocol, u16::from(echo_request(about.protocol)).to_be()),
        protocol => (protocol, about.source_port),
    })
}

/// Returns [`MARK_TO_PROXY`] for a packet to the proxy, else zero.
#[inline(always)]
fn judge(ctx: &TcContext, sender: u32) -> Result<u32, DropReason> {
    let packet = Packet::at(ctx, ETHERNET_BYTES).ok_or(DropReason::Malformed)?;
    if packet.is_later_fragment() {
        // The stack forwards a packet only with all of its fragments, and the first one is judged.
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
