//! How an endpoint's programs hand a packet to the node's program `flow`, which finds the packet's flow, decides which way the
//! packet takes. What is decided for nearly every packet is recorded before ([`Peer::expected`]); any other verdict is given back to
//! the endpoint's `deliver` ([`handoff::Verdict`]).

use aya_ebpf::{
    bindings::{TC_ACT_OK, TC_ACT_REDIRECT, TC_ACT_SHOT},
    programs::TcContext,
};
use wharf_common::{Direction, DropReason, map::NodeCall};

use crate::{
    config::Config,
    handoff::{self, Verdict, Words},
};

/// In the word with the ids: the packet comes from the stack ([`Direction::Ingress`]).
const INGRESS: u32 = 1 << 14;
/// In the word with the ids: packets between endpoints take the stack anyway, so no path is noted.
const LOCAL_BY_STACK: u32 = 1 << 15;
/// In the word with the ids: the packet is recorded as [`Peer::expected`] already.
const RECORDED: u32 = 1 << 30;

/// The endpoint that a packet goes to.
#[derive(Clone, Copy)]
pub struct Peer {
    /// Its id; zero for none.
    pub endpoint_id: u32,
    /// Low half of the epoch of its attachment.
    pub epoch: u32,
    /// 1 when what is expected of the packet is nearly certain, so that it may be recorded before, and counters do not go backward
    /// while somebody reads them; else 0. A number, because the verifier follows both ways of a branch.
    pub certain: u32,
}

impl Peer {
    /// The packet goes to, or comes from, the node's stack; `whole`: 1 when it is no fragment, else 0.
    #[inline(always)]
    pub const fn stack(whole: u32) -> Self {
        Self { endpoint_id: 0, epoch: 0, certain: whole }
    }

    /// What becomes of nearly every packet to this peer.
    #[inline(always)]
    pub fn expected(self) -> DropReason {
        if self.endpoint_id == 0 { DropReason::ForwardedStack } else { DropReason::ForwardedLocal }
    }
}

/// Continues in `flow`; `recorded`: 1 when the packet is recorded as [`Peer::expected`] already, else 0. Comes back only where there is no such
/// program.
#[inline(always)]
pub fn hand_over(ctx: &TcContext, config: Config, direction: Direction, peer: Peer, recorded: u32) {
    let direction = if matches!(direction, Direction::Ingress) { INGRESS } else { 0 };
    let local_by_stack = if config.local_by_stack() { LOCAL_BY_STACK } else { 0 };
    let flags = direction | local_by_stack | (recorded * RECORDED);
    let words = [handoff::pair(peer.endpoint_id) | flags, config.epoch() as u32, peer.epoch];
    handoff::call_beside_reports(ctx, NodeCall::Flow, words);
}

/// What [`hand_over`] handed over.
#[derive(Clone, Copy)]
pub struct Asked {
    /// Endpoint whose hook the packet is at.
    pub own: u32,
    /// Low half of its epoch.
    pub own_epoch: u32,
    pub peer: Peer,
    pub direction: Direction,
    pub local_by_stack: bool,
    pub recorded: bool,
}

impl Asked {
    /// From the words of the packet.
    #[inline(always)]
    pub fn of(words: Words) -> Self {
        let flags = words.0[2];
        Self {
            own: words.sender(),
            own_epoch: words.0[3],
            peer: Peer { endpoint_id: words.receiver(), epoch: words.0[4], certain: 0 },
            direction: if flags & INGRESS != 0 { Direction::Ingress } else { Direction::Egress },
            local_by_stack: flags & LOCAL_BY_STACK != 0,
            recorded: flags & RECORDED != 0,
        }
    }

    /// Sends the packet on its way, or drops it for the reason. Returns what the hook is to return.
    #[inline(always)]
    pub fn conclude(self, ctx: &TcContext, way: Result<Way, DropReason>) -> i32 {
        let Self { own, peer, direction, recorded, .. } = self;
        let (receiver, reason, action) = match way {
            Ok(Way::Direct) if peer.endpoint_id != 0 => {
                if recorded {
                    handoff::deliver(ctx, peer.endpoint_id);
                    (0, DropReason::NoTailCallTarget, TC_ACT_SHOT)
                } else {
                    (peer.endpoint_id, DropReason::ForwardedLocal, TC_ACT_REDIRECT)
                }
            }
            Ok(_) if recorded && peer.endpoint_id == 0 => return TC_ACT_OK,
            Ok(_) => (0, DropReason::ForwardedStack, TC_ACT_OK),
            Err(reason) => (0, reason, TC_ACT_SHOT),
        };
        let counted = if recorded { Some(peer.expected()) } else { None };
        let (bytes, reason, action) = (ctx.len(), reason as u32, action as u32);
        Verdict { endpoint: own, receiver, bytes, direction, reason, action, counted }.hand_over(ctx)
    }
}

/// The way of a packet between two endpoints.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Direct,
    Stack,
}
