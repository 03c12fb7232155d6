//! What reaches the container, from the node or from another endpoint: only IP, only for its own address.

use aya_ebpf::programs::TcContext;
use wharf_common::{Direction, DropReason};

use wharf_ebpf::{
    bandwidth,
    config::{self, Config},
    parse::{self, EtherType, Framed, HEADERS_BYTES, Ipv4, Ipv6},
};

/// Whether the way from the sender to the container is a hop of its own, which takes one off the TTL.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Hop {
    /// The packet comes straight from another endpoint. Its sender's program saw that the TTL is more than one.
    IsHere,
    /// The node's stack took its own.
    WasBefore,
}

/// Decides whether the packet may reach the container, and gives it the Ethernet addresses it needs there. 1 for a packet that is
/// no fragment, else 0.
///
/// Neighbour messages need no rule of their own: those of other endpoints were decremented on the way (receivers demand
/// a hop limit of 255), the node's interface sends none, and what a privileged process of the node forges is its own.
#[inline(always)]
pub fn accept(ctx: &TcContext, config: Config, hop: Hop) -> Result<u32, DropReason> {
    if !config.live() {
        return Err(DropReason::EndpointNotReady);
    }
    parse::gather(ctx, HEADERS_BYTES)?;
    let whole = match EtherType::of(ctx, parse::ethernet(ctx)?)? {
        EtherType::Ipv4 => {
            let packet: Framed<Ipv4> = parse::ipv4(ctx)?;
            let destination = packet.destination();
            if !config.owns4(destination) {
                return Err(refusal(parse::is_group4(destination)));
            }
            packet.address(config::container_mac(), config::host_mac());
            if hop == Hop::IsHere {
                packet.decrement_ttl();
            }
            packet.is_whole()
        }
        EtherType::Ipv6 => {
            let packet: Framed<Ipv6> = parse::ipv6(ctx)?;
            let destination = packet.destination();
            if !config.owns6(destination) {
                return Err(refusal(destination.is_multicast()));
            }
            packet.address(config::container_mac(), config::host_mac());
            if hop == Hop::IsHere {
                packet.decrement_hop_limit();
            }
            packet.is_whole()
        }
        // The node knows the container's MAC without asking; nobody asks the container.
        EtherType::Arp => return Err(DropReason::NeighbourUnknown),
    };
    bandwidth::charge(ctx, config, Direction::Ingress).map(|()| whole)
}

#[inline(always)]
const fn refusal(group: bool) -> DropReason {
    if group { DropReason::Multicast } else { DropReason::NotOurAddress }
}
