//! What the node's program `ingress` does with what reaches a container, from the node or from another endpoint: only IP, only for its
//! own address. Packets from the stack that the endpoint's own program has judged ([`crate::shortcut`]) come here for their flow, and to
//! be addressed, alone.
//!
//! What reaches a chained endpoint keeps its Ethernet addresses, and neighbour messages for it go on to the program `neighbour`.

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

/// Runs the program; `track` finds the flow of what the node's stack sends. A test packet is not tracked.
#[inline(always)]
pub fn run(ctx: &TcContext, track: impl FnOnce(&TcContext, Asked) -> Result<Way, DropReason>) -> i32 {
    let words = Words::of(ctx);
    let (own, from_stack) = (words.sender(), words.has(FROM_STACK));
    let about = |reason, action| Verdict::new(ctx, own, Direction::Ingress, reason, action);
    if words.has(RECORDED) {
        let addressed = parse::ethernet(ctx).map(|frame| frame.set_destination(words.container_mac()));
        let verdict = match addressed.and_then(|()| track(ctx, words.asked())) {
            Ok(Way::Proxy) => turned(ctx, own),
            Ok(_) => return TC_ACT_OK,
            Err(reason) => about(reason, TC_ACT_SHOT),
        };
        return verdict.after(DropReason::ForwardedStack).hand_over(ctx);
    }
    match judge(ctx, own, from_stack, track) {
        Ok(Way::Proxy) => turned(ctx, own),
        Ok(_) if from_stack => about(DropReason::ForwardedStack, TC_ACT_OK),
        Ok(_) => about(DropReason::ForwardedLocal, TC_ACT_REDIRECT),
        Err(reason) => about(reason, TC_ACT_SHOT),
    }
    .hand_over(ctx)
}

/// The verdict about a packet that goes to the proxy instead of the container.
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
) -> Result<Way, DropReason> {
    let profile = Profile::of(own).ok_or(DropReason::NoConfig)?;
    accept(ctx, own, profile, from_stack)?;
    if from_stack && !test_packet::is_untracked(ctx) {
        return track(ctx, Asked::new(own, profile, Peer::STACK, Direction::Ingress));
    }
    Ok(Way::Direct)
}

/// Decides whether the packet may reach the container, and gives it the Ethernet addresses it needs there.
///
/// The way from another endpoint is a hop of its own, which takes one off the TTL; the sender's program saw that it is more than
/// one. The node's stack took its own before.
///
/// Neighbour messages need no rule of their own: those of other endpoints were decremented on the way (receivers demand
/// a hop limit of 255), the node's interface sends none, and what a privileged process of the node forges is its own.
#[inline(always)]
fn accept(ctx: &TcContext, own: u32, profile: Profile, from_stack: bool) -> Result<(), DropReason> {
    parse::gather(ctx, if profile.chained() { MESSAGE_BYTES } else { HEADERS_BYTES })?;
    match EtherType::of(ctx, parse::ethernet(ctx)?)? {
        EtherType::Ipv4 => {
            let packet: Framed<Ipv4> = parse::ipv4(ctx)?;
            let destination = packet.destination();
            if !profile.owns4(destination) {
                return Err(refusal(parse::is_group4(destination)));
            }
            if !from_stack {
                packet.decrement_ttl();
            }
        }
        EtherType::Ipv6 => {
            let packet: Framed<Ipv6> = parse::ipv6(ctx)?;
            // Before the addresses: solicitations are multicast. Before policy: who may be spoken to must be found.
            if profile.chained() && packet.is_icmp() && is_discovery(ctx)? {
                return Err(to_neighbour(ctx, own));
            }
            let destination = packet.destination();
            if !profile.owns6(destination) {
                return Err(refusal(destination.is_multicast()));
            }
            if !from_stack {
                packet.decrement_hop_limit();
            }
        }
        EtherType::Arp if profile.chained() => return Err(to_neighbour(ctx, own)),
        // The node knows the container's MAC without asking; nobody asks the container.
        EtherType::Arp => return Err(DropReason::NeighbourUnknown),
    }
    if !profile.chained() {
        parse::ethernet(ctx)?.address(profile.container_mac(), profile.host_mac());
    }
    Ok(())
}

/// Continues in the program `neighbour`. Comes back only where there is none.
#[inline(always)]
fn to_neighbour(ctx: &TcContext, own: u32) -> DropReason {
    handoff::call(ctx, NodeCall::Neighbour as u32, own | FROM_STACK);
    DropReason::NoNodeProgram
}

#[inline(always)]
const fn refusal(group: bool) -> DropReason {
    if group { DropReason::Multicast } else { DropReason::NotOurAddress }
}
