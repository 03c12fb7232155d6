//! What a program hands to the one that it tail-calls: the five words of the packet's control block (`__sk_buff.cb`).
//!
//! An endpoint's own programs hold its maps, and what is about this endpoint alone. What is the same for all is in
//! programs of the node's ([`NODE_CALLS`]), which are verified once and not for each endpoint. They know an endpoint by its id in the
//! words and by its [`crate::profile`], and give a verdict back to the endpoint's `deliver`, which records it ([`Verdict`]).
//!
//! The words are the packet's own. Words 0 and 1 are where a test packet's verdict is reported ([`crate::test_packet`]); only
//! what is handed to the program `event`, and what the stack sends and [`track`] hands over, uses them, and no test packet is either.

use core::ptr;

use aya_ebpf::{
    bindings::{TC_ACT_REDIRECT, TC_ACT_SHOT},
    helpers::bpf_redirect_peer,
    programs::TcContext,
};
use wharf_common::{
    Direction, DropReason, MAX_ENDPOINT_ID,
    drop_reason::metrics_index,
    map::{METRICS_MAX, NodeCall},
};

use crate::{
    config::{self, Config},
    flow::{Asked, Peer},
    maps::{CALLS, NODE_CALLS},
    metrics::direction_of,
    parse::Mac,
};

/// Number of words.
const WORDS: usize = 5;
const _: () = assert!((MAX_ENDPOINT_ID + 1).is_power_of_two(), "a mask for endpoint ids");
/// In the high half of the last word: the words are a [`Verdict`]. A sender of another build may leave what the container's stack
/// left there; a packet that then passes for a verdict is miscounted, and goes into the node's stack at most.
const IS_VERDICT: u32 = 0x5746_0000;
/// In the high half of the last word: the packet is at one of this endpoint's hooks and is not judged yet. The low half has the
/// [`Direction`], which has one bit, and perhaps [`FROM_STACK`].
const IS_UNJUDGED: u32 = 0x5755_0000;
/// In the last word of a [`Verdict`]: the packet was counted as forwarded.
const COUNTED: u32 = 1 << 5;
/// Beside [`COUNTED`]: into or from the stack, and not to another endpoint.
const COUNTED_STACK: u32 = 1 << 6;
const _: () = assert!(DropReason::ForwardedLocal as u32 == 0 && DropReason::ForwardedStack as u32 == 1);
/// Place of the row in the last word of a [`Verdict`].
const ROW_SHIFT: u32 = 8;
const _: () = assert!(METRICS_MAX <= 1 << 8);
/// In the word with the ids, beside them: the packet comes from the node's stack.
pub const FROM_STACK: u32 = 1 << 14;
/// In the word with the ids, beside them: the packet is recorded as forwarded already.
pub const RECORDED: u32 = 1 << 30;

/// The words, read.
#[derive(Clone, Copy)]
pub struct Words(pub [u32; WORDS]);

impl Words {
    /// The packet's.
    #[inline(always)]
    pub fn of(ctx: &TcContext) -> Self {
        let mut words = [0; WORDS];
        // Volatile: the verifier wants the context's words read and written one by one.
        for (index, word) in words.iter_mut().enumerate() {
            // SAFETY: the context the program was called with; a classifier may read `cb`, of five words.
            *word = unsafe { ptr::read_volatile(&raw const (*ctx.skb.skb).cb[index]) };
        }
        Self(words)
    }

    /// Makes these the packet's words.
    #[inline(always)]
    fn put(self, ctx: &TcContext) {
        for (index, word) in self.0.into_iter().enumerate() {
            put(ctx, index, word);
        }
    }

    /// True when the word with the ids has this flag.
    #[inline(always)]
    pub fn has(self, flag: u32) -> bool {
        self.0[2] & flag != 0
    }

    /// Endpoint whose program handed the packet over.
    #[inline(always)]
    pub fn sender(self) -> u32 {
        self.0[2] & MAX_ENDPOINT_ID
    }

    /// Endpoint that the packet goes to, or zero.
    #[inline(always)]
    pub fn receiver(self) -> u32 {
        self.0[2] >> 16 & MAX_ENDPOINT_ID
    }

    /// True where the words are not those of [`judge`]: another endpoint sends the packet.
    #[inline(always)]
    pub fn is_from_endpoint(self) -> bool {
        self.0[4] & 0xffff_0000 != IS_UNJUDGED
    }

    /// For a packet from another endpoint, or one that [`judge`] handed over: its direction, the program of the node's that judges it
    /// ([`NodeCall`] as a number), and flags for that. They are reckoned from the word without a branch: the verifier walks what
    /// follows once for each program that it knows to be called there.
    #[inline(always)]
    pub fn judged_by(self) -> (Direction, u32, u32) {
        const { assert!(NodeCall::Ingress as u32 == NodeCall::Egress as u32 + Direction::Egress as u32) };
        let is_egress = self.0[4] & Direction::Egress as u32;
        let direction = if is_egress == 0 { Direction::Ingress } else { Direction::Egress };
        (direction, NodeCall::Ingress as u32 - is_egress, self.0[4] & FROM_STACK)
    }

    /// Where a packet from the stack that [`track`] handed over goes on its link.
    #[inline(always)]
    pub fn container_mac(self) -> Mac {
        Mac::of([self.0[0], self.0[1]])
    }

    /// What is asked about a packet that [`track`] handed over.
    #[inline(always)]
    pub fn asked(self) -> Asked {
        Asked::of([self.0[2], self.0[3], self.0[4]])
    }

    /// The epoch of the sender's attachment, where [`with_epoch`] made the words.
    #[inline(always)]
    pub fn epoch(self) -> u64 {
        u64::from(self.0[0]) | u64::from(self.0[1]) << 32
    }
}

/// Writes one of the packet's words.
#[inline(always)]
fn put(ctx: &TcContext, index: usize, word: u32) {
    // Volatile: as in `Words::of`.
    // SAFETY: as in `Words::of`; a classifier may also write `cb`.
    unsafe { ptr::write_volatile(&raw mut (*ctx.skb.skb).cb[index], word) };
}

/// This endpoint and the one that the packet goes to (or zero), as word 2. Ids have 14 bits; the two above each are free.
#[inline(always)]
pub fn pair(receiver: u32) -> u32 {
    config::endpoint_id() | receiver << 16
}

/// Words that begin with the epoch of this endpoint's attachment.
#[inline(always)]
pub fn with_epoch(config: Config, receiver: u32, rest: [u32; 2]) -> Words {
    let epoch = config.epoch();
    Words([epoch as u32, (epoch >> 32) as u32, pair(receiver), rest[0], rest[1]])
}

/// Continues in this endpoint's `deliver` with a packet at one of its hooks that is to be judged. Without one the packet is dropped;
/// there are no counters then either.
#[inline(always)]
pub fn judge(ctx: &TcContext, direction: Direction, flags: u32) -> i32 {
    put(ctx, 2, config::endpoint_id());
    put(ctx, 4, IS_UNJUDGED | direction as u32 | flags);
    to_own_deliver(ctx)
}

/// Continues in the `deliver` of the endpoint whose id is in word 2. The id is read from there, because the kernel makes a jump of a call
/// whose index the verifier knows, and changing a slot with such callers waits for a grace period, 20 ms of each DEL.
#[inline(always)]
fn to_own_deliver(ctx: &TcContext) -> i32 {
    // SAFETY: as in `Words::of`.
    let ids = unsafe { ptr::read_volatile(&raw const (*ctx.skb.skb).cb[2]) };
    // SAFETY: as in `jump`.
    unsafe { CALLS.tail_call(ctx, ids & MAX_ENDPOINT_ID) };
    TC_ACT_SHOT
}

/// Continues in a program of the node's ([`NodeCall`] as a number), which gets `ids`: the endpoint's own and flags. Comes back only when
/// there is none.
#[inline(always)]
pub fn call(ctx: &TcContext, program: u32, ids: u32) {
    put(ctx, 2, ids);
    jump(ctx, program);
}

/// Continues in the program that finds the flow of a packet which is proven to be this endpoint's, and recorded as forwarded, to `peer` or
/// from the stack: the words are [`Asked::numbers`], and before them the container's MAC for what comes from the stack. Comes back only when there is none.
#[inline(always)]
pub fn track(ctx: &TcContext, direction: Direction, config: Config, peer: Peer) {
    let asked = Asked {
        own: config::endpoint_id(),
        own_epoch: config.epoch() as u32,
        peer,
        direction,
        local_by_stack: config.local_by_stack(),
    };
    let [ids, own_epoch, peer_epoch] = asked.numbers();
    if matches!(direction, Direction::Ingress) {
        put(ctx, 0, config::macs(0));
        put(ctx, 1, config::macs(1));
    }
    put(ctx, 2, ids | RECORDED);
    put(ctx, 3, own_epoch);
    put(ctx, 4, peer_epoch);
    jump(ctx, if matches!(direction, Direction::Egress) { NodeCall::Egress } else { NodeCall::Ingress } as u32);
}

/// Continues in the program that writes an event. Comes back only when there is none.
#[inline(always)]
pub fn call_event(ctx: &TcContext, words: Words) {
    words.put(ctx);
    jump(ctx, NodeCall::Event as u32);
}

#[inline(always)]
fn jump(ctx: &TcContext, program: u32) {
    // SAFETY: everything this run holds is on its stack; the call does not come back when it succeeds.
    unsafe { NODE_CALLS.tail_call(ctx, program) };
}

/// Gives the packet to an endpoint's `deliver`. Comes back only when there is none.
#[inline(always)]
pub fn deliver(ctx: &TcContext, receiver: u32) {
    // Zero is no verdict.
    put(ctx, 4, 0);
    // SAFETY: as in `jump`.
    unsafe { CALLS.tail_call(ctx, receiver) };
}

/// Hands the packet to the container's side of the veth whose host side is `ifindex`, as if it had just arrived there:
/// no queue, no second hook. Returns what the hook is to return.
#[inline(always)]
pub fn redirect_peer(ifindex: u32) -> i32 {
    // SAFETY: a helper without pointers. It answers `TC_ACT_REDIRECT`, or `TC_ACT_SHOT` for flags it does not know.
    unsafe { bpf_redirect_peer(ifindex, 0) as i32 }
}

/// What was decided about a packet of an endpoint's, by a program of the node's or at the hook, for the endpoint's own `deliver` to
/// record. It is kept as the words that tell it: each number that was two would be a branch, and the verifier follows both ways of each.
#[derive(Clone, Copy)]
pub struct Verdict {
    ids: u32,
    /// The packet's length as it came in, bytes.
    pub bytes: u32,
    last: u32,
}

impl Verdict {
    /// About a packet at a hook of this endpoint's; `action`: one of `TC_ACT_*`, below 8.
    #[inline(always)]
    pub fn new(ctx: &TcContext, endpoint: u32, direction: Direction, reason: DropReason, action: i32) -> Self {
        let last = IS_VERDICT | metrics_index(direction, reason) << ROW_SHIFT | action as u32;
        Self { ids: endpoint, bytes: ctx.len(), last }
    }

    /// The packet goes to this endpoint next, or to none (zero).
    #[inline(always)]
    pub fn to(self, receiver: u32) -> Self {
        Self { ids: self.ids | receiver << 16, ..self }
    }

    /// The packet was counted already: [`DropReason::ForwardedLocal`] or [`DropReason::ForwardedStack`].
    #[inline(always)]
    pub fn after(self, counted: DropReason) -> Self {
        let stack = if matches!(counted, DropReason::ForwardedStack) { COUNTED_STACK } else { 0 };
        Self { last: self.last | COUNTED | stack, ..self }
    }

    /// The verdict in the words, if they are one.
    #[inline(always)]
    pub fn of(words: Words) -> Option<Self> {
        let [_, _, ids, bytes, last] = words.0;
        (last & 0xffff_0000 == IS_VERDICT).then_some(Self { ids, bytes, last })
    }

    /// Hands the verdict to the endpoint's `deliver`. Without one the packet is dropped; there are no counters then either.
    #[inline(always)]
    pub fn hand_over(self, ctx: &TcContext) -> i32 {
        put(ctx, 2, self.ids);
        put(ctx, 3, self.bytes);
        put(ctx, 4, self.last);
        to_own_deliver(ctx)
    }

    /// Endpoint that the packet goes to next, or zero.
    #[inline(always)]
    pub fn receiver(self) -> u32 {
        self.ids >> 16 & MAX_ENDPOINT_ID
    }

    /// Row of `METRICS`: direction and reason.
    #[inline(always)]
    pub fn row(self) -> u32 {
        self.last >> ROW_SHIFT & 0xff
    }

    /// One of `TC_ACT_*`.
    #[inline(always)]
    pub fn action(self) -> i32 {
        (self.last & 0x07) as i32
    }

    /// The packet is to be handed to this endpoint's container. One that goes to the proxy has been redirected by the node's program.
    #[inline(always)]
    pub fn is_for_container(self) -> bool {
        let to_proxy = metrics_index(Direction::Ingress, DropReason::Redirected);
        self.action() == TC_ACT_REDIRECT && self.receiver() == 0 && self.row() != to_proxy
    }

    /// Row of `METRICS` in which the packet was counted already, if it was.
    #[inline(always)]
    pub fn counted(self) -> Option<u32> {
        (self.last & COUNTED != 0).then_some(direction_of(self.row()) | ((self.last & COUNTED_STACK) / COUNTED_STACK))
    }
}
