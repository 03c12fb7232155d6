//! What reaches the container, from the node or from another endpoint: only IP, only for its own address.

use aya_ebpf::programs::TcContext;
use wharf_common::{Direction, DropReason};

use wharf_ebpf::{
    bandwidth,
    config::{self, Config},
    parse::{self, EtherType, Framed, Ipv4, Ipv6},
};

/// Decides whether the packet may reach the container, and gives it the Ethernet addresses it needs there.
///
/// Neighbour messages need no rule of their own: those of other endpoints were decremented on the way (receivers demand
/// a hop limit of 255), the node's interface sends none, and what a privileged process of the node forges is its own.
#[inline(always)]
pub fn accept(ctx: &TcContext, config: Config) -> Result<(), DropReason> {
    if !config.live() {
        return Err(DropReason::EndpointNotReady);
    }
    parse::gather(ctx)?;
    match EtherType::of(ctx, parse::ethernet(ctx)?)? {
        EtherType::Ipv4 => {
            let packet: Framed<Ipv4> = parse::ipv4(ctx)?;
            let destination = packet.destination();
            if !config.owns4(destination) {
                return Err(refusal(parse::is_group4(destination)));
            }
            packet.address(config::container_mac(), config::host_mac());
        }
        EtherType::Ipv6 => {
            let packet: Framed<Ipv6> = parse::ipv6(ctx)?;
            let destination = packet.destination();
            if !config.owns6(destination) {
                return Err(refusal(destination.is_multicast()));
            }
            packet.address(config::container_mac(), config::host_mac());
        }
        // The node knows the container's MAC without asking; nobody asks the container.
        EtherType::Arp => return Err(DropReason::NeighbourUnknown),
    }
    bandwidth::charge(ctx, config, Direction::Ingress)
}

#[inline(always)]
const fn refusal(group: bool) -> DropReason {
    if group { DropReason::Multicast } else { DropReason::NotOurAddress }
}
