//! Requests for a packet's way.

use wharf_common::{Direction, DropReason, flow::FLOW_BY_SETTING};

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

/// Flag in [`Asked::numbers`], beside [`FLOW_BY_SETTING`].
const INGRESS: u32 = 1 << 14;

#[inline(always)]
pub fn by_setting(local_by_stack: bool) -> u16 {
    if local_by_stack { FLOW_BY_SETTING } else { 0 }
}

#[derive(Clone, Copy)]
pub struct Asked {
    /// Endpoint of the hook.
    pub own: u32,
    /// Low half of the epoch.
    pub own_epoch: u32,
    pub peer: Peer,
    pub direction: Direction,
    /// [`FLOW_BY_SETTING`] if packets between endpoints always take the stack, else zero.
    pub by_setting: u16,
}

impl Asked {
    #[inline(always)]
    pub fn new(own: u32, profile: Profile, peer: Peer, direction: Direction) -> Self {
        Self { own, own_epoch: profile.epoch(), peer, direction, by_setting: by_setting(profile.local_by_stack()) }
    }

    /// Ids and flags, then both epochs.
    #[inline(always)]
    pub fn numbers(self) -> [u32; 3] {
        let direction = if matches!(self.direction, Direction::Ingress) { INGRESS } else { 0 };
        let ids = self.own | self.peer.endpoint_id << 16 | direction | u32::from(self.by_setting);
        [ids, self.own_epoch, self.peer.epoch]
    }

    #[inline(always)]
    pub fn of([ids, own_epoch, peer_epoch]: [u32; 3]) -> Self {
        Self {
            own: ids & wharf_common::MAX_ENDPOINT_ID,
            own_epoch,
            peer: Peer { endpoint_id: ids >> 16 & wharf_common::MAX_ENDPOINT_ID, epoch: peer_epoch },
            direction: if ids & INGRESS != 0 { Direction::Ingress } else { Direction::Egress },
            by_setting: ids as u16 & FLOW_BY_SETTING,
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
