//! Judges packets to a container, from the stack or another endpoint (node program `judge`). Only IP packets to the
//! container's address pass, and from the stack those to its source prefixes. Packets judged by [`crate::shortcut`]
//! need only their flow and Ethernet destination.
//!
//! Chained endpoints' packets keep their Ethernet addresses; neighbour messages continue in `neighbour`.

use aya_ebpf::{
    bindings::{TC_ACT_OK, TC_ACT_REDIRECT, TC_ACT_SHOT},
    programs::TcContext,
};
use wharf_common::{Direction, DropReason, map::NodeCall};

use crate::{
    flow::{Asked, Peer, Way},
    handoff::{self, FROM_STACK, RECORDED, Verdict, Words},
    neighbour::{MESSAGE_BYTES, is_discovery},
    parse::{self, EtherType, Framed, HEADERS_BYTES, Ipv4, Ipv6},
    profile::Profile,
    test_packet,
    turn::turn,
};

/// `may_receive`: a source prefix of the endpoint contains the destination.
#[inline(always)]
pub fn run(
    ctx: &TcContext,
    track: impl Fn(&TcContext, Asked) -> Result<Way, DropReason>,
    may_receive: impl Fn(&TcContext, u32) -> bool,
) -> i32 {
    let words = Words::of(ctx);
    let (own, from_stack, is_recorded) = (words.sender(), words.has(FROM_STACK), words.has(RECORDED));
    let about = |reason, action| Verdict::new(ctx, own, Direction::Ingress, reason, action);
    let way = if is_recorded {
        let addressed = parse::ethernet(ctx).map(|frame| frame.set_destination(words.container_mac()));
        addressed.and_then(|()| track(ctx, words.asked()))
    } else {
        judge(ctx, own, from_stack, track, may_receive)
    };
    let verdict = match way {
        Ok(Way::Proxy) => turned(ctx, own),
        Ok(_) if is_recorded => return TC_ACT_OK,
        Ok(_) if from_stack => about(DropReason::ForwardedStack, TC_ACT_OK),
        Ok(_) => about(DropReason::ForwardedLocal, TC_ACT_REDIRECT),
        Err(reason) => about(reason, TC_ACT_SHOT),
    };
    if is_recorded { verdict.after(DropReason::ForwardedStack) } else { verdict }.hand_over(ctx)
}

#[inline(always)]
fn turned(ctx: &TcContext, own: u32) -> Verdict {
    let (reason, action) = match turn(ctx) {
        Ok(action) => (DropReason::Redirected, action),
        Err(reason) => (reason, TC_ACT_SHOT),
    };
    Verdict::new(ctx, own, Direction::Ingress, reason, action)
}

#[inline(always)]
fn judge(
    ctx: &TcContext,
    own: u32,
    from_stack: bool,
    track: impl FnOnce(&TcContext, Asked) -> Result<Way, DropReason>,
    may_receive: impl Fn(&TcContext, u32) -> bool,
) -> Result<Way, DropReason> {
    let profile = Profile::of(own).ok_or(DropReason::NoConfig)?;
    accept(ctx, own, profile, from_stack, may_receive)?;
    if from_stack && !test_packet::is_untracked(ctx) {
        return track(ctx, Asked::new(own, profile, Peer::STACK, Direction::Ingress));
    }
    Ok(Way::Direct)
}

/// Decides whether the packet may enter, and sets its Ethernet addresses. Decrements the TTL (more than one) of a
/// packet from another endpoint.
///
/// Neighbour messages need no rule: they need hop limit 255, which routing decrements, and only a privileged process on
/// the node can forge them.
#[inline(always)]
fn accept(
    ctx: &TcContext,
    own: u32,
    profile: Profile,
    from_stack: bool,
    may_receive: impl Fn(&TcContext, u32) -> bool,
) -> Result<(), DropReason> {
    parse::gather(ctx, if profile.chained() { MESSAGE_BYTES } else { HEADERS_BYTES })?;
    match EtherType::of(ctx, parse::ethernet(ctx)?)? {
        EtherType::Ipv4 => {
            let packet: Framed<Ipv4> = parse::ipv4(ctx)?;
            let destination = packet.destination();
            if !profile.owns4(destination) && !may_receive(ctx, own) {
                return Err(refusal(parse::is_group4(destination)));
            }
            if !from_stack {
                packet.decrement_ttl();
            }
        }
        EtherType::Ipv6 => {
            let packet: Framed<Ipv6> = parse::ipv6(ctx)?;
            // Before the address check (solicitations are multicast) and policy.
            if profile.chained() && packet.is_icmp() && is_discovery(ctx)? {
                return Err(to_neighbour(ctx, own));
            }
            let destination = packet.destination();
            if !profile.owns6(destination) && !may_receive(ctx, own) {
                return Err(refusal(destination.is_multicast()));
            }
            if !from_stack {
                packet.decrement_hop_limit();
            }
        }
        EtherType::Arp if profile.chained() => return Err(to_neighbour(ctx, own)),
        // The node knows the container's MAC.
        EtherType::Arp => return Err(DropReason::NeighbourUnknown),
    }
    if !profile.chained() {
        parse::ethernet(ctx)?.address(profile.container_mac(), profile.host_mac());
    }
    Ok(())
}

#[inline(always)]
fn to_neighbour(ctx: &TcContext, own: u32) -> DropReason {
    handoff::call(ctx, NodeCall::Neighbour, own | FROM_STACK);
    DropReason::NoNodeProgram
}

#[inline(always)]
const fn refusal(group: bool) -> DropReason {
    if group { DropReason::Multicast } else { DropReason::NotOurAddress }
}
