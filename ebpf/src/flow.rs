//! Requests for a packet's way.

use wharf_common::{Direction, DropReason};

use crate::profile::Profile;

#[derive(Clone, Copy)]
pub struct Peer {
    /// Zero for none, and if only the stack reaches it.
    pub endpoint_id: u32,
    /// Low half, also behind the stack: the row is right at both ends.
    pub epoch: u32,
}

impl Peer {
    pub const STACK: Self = Self { endpoint_id: 0, epoch: 0 };

    /// Counter of packets to this peer.
    #[inline(always)]
    pub fn forwarded(self) -> DropReason {
        if self.endpoint_id == 0 { DropReason::ForwardedStack } else { DropReason::ForwardedLocal }
    }
}

/// Flags in [`Asked::numbers`].
const INGRESS: u32 = 1 << 14;
/// Packets between endpoints always take the stack: no path is recorded.
const LOCAL_BY_STACK: u32 = 1 << 15;

#[derive(Clone, Copy)]
pub struct Asked {
    /// Endpoint of the hook.
    pub own: u32,
    /// Low half of the epoch.
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

    /// Ids and flags, then both epochs.
    #[inline(always)]
    pub fn numbers(self) -> [u32; 3] {
        let direction = if matches!(self.direction, Direction::Ingress) { INGRESS } else { 0 };
        let local_by_stack = if self.local_by_stack { LOCAL_BY_STACK } else { 0 };
        [self.own | self.peer.endpoint_id << 16 | direction | local_by_stack, self.own_epoch, self.peer.epoch]
    }

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

/// As wide as a [`DropReason`]: a result has one payload slot for both. With two, the verifier rejects computations
/// with the unwritten one.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Direct,
    Stack,
    /// To a local socket, by the packet's mark.
    Proxy,
}
