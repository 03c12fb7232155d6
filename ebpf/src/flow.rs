//! What the node's programs `egress` and `ingress` ask about a packet whose source or destination is proven: which way its flow takes.

use wharf_common::{Direction, DropReason};

use crate::profile::Profile;

/// The endpoint that a packet goes to.
#[derive(Clone, Copy)]
pub struct Peer {
    /// Its id; zero for none, and for one that packets reach through the stack alone.
    pub endpoint_id: u32,
    /// Low half of the epoch of its attachment; also that of an endpoint behind the stack, so that the flow's row is right at both ends.
    pub epoch: u32,
}

impl Peer {
    /// The packet goes to, or comes from, the node's stack.
    pub const STACK: Self = Self { endpoint_id: 0, epoch: 0 };

    /// What a packet that goes there is counted as.
    #[inline(always)]
    pub fn forwarded(self) -> DropReason {
        if self.endpoint_id == 0 { DropReason::ForwardedStack } else { DropReason::ForwardedLocal }
    }
}

/// Of [`Asked::ids`]: the packet comes from the stack ([`Direction::Ingress`]).
const INGRESS: u32 = 1 << 14;
/// Of [`Asked::ids`]: packets between endpoints take the stack anyway, so no path is noted.
const LOCAL_BY_STACK: u32 = 1 << 15;

/// A packet of which the way is to be found.
#[derive(Clone, Copy)]
pub struct Asked {
    /// Endpoint whose hook the packet is at.
    pub own: u32,
    /// Low half of its epoch.
    pub own_epoch: u32,
    pub peer: Peer,
    pub direction: Direction,
    pub local_by_stack: bool,
}

impl Asked {
    #[inline(always)]
    pub fn new(own: u32, profile: Profile, peer: Peer, direction: Direction) -> Self {
        Self { own, own_epoch: profile.epoch(), peer, direction, local_by_stack: profile.local_by_stack() }
    }

    /// As numbers, which a global function takes: ids and flags, and both epochs.
    #[inline(always)]
    pub fn numbers(self) -> [u32; 3] {
        let direction = if matches!(self.direction, Direction::Ingress) { INGRESS } else { 0 };
        let local_by_stack = if self.local_by_stack { LOCAL_BY_STACK } else { 0 };
        [self.own | self.peer.endpoint_id << 16 | direction | local_by_stack, self.own_epoch, self.peer.epoch]
    }

    /// From [`Self::numbers`].
    #[inline(always)]
    pub fn of([ids, own_epoch, peer_epoch]: [u32; 3]) -> Self {
        Self {
            own: ids & wharf_common::MAX_ENDPOINT_ID,
            own_epoch,
            peer: Peer { endpoint_id: ids >> 16 & wharf_common::MAX_ENDPOINT_ID, epoch: peer_epoch },
            direction: if ids & INGRESS != 0 { Direction::Ingress } else { Direction::Egress },
            local_by_stack: ids & LOCAL_BY_STACK != 0,
        }
    }
}

/// The way of a packet between two endpoints, or to the proxy. As wide as a [`DropReason`], so that both have one place in a
/// result: with two places, one of them is not written, and the verifier refuses a program that computes with what it has there.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Direct,
    Stack,
    /// To a socket of the node's, because of the packet's mark.
    Proxy,
}
