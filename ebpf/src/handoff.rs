//! Data for a tail-called program: the words of `__sk_buff.cb`. Functions that call a program return only if it is
//! missing.
//!
//! Node programs find an endpoint's [`crate::profile`] by the id in the words, and return a [`Verdict`] to its
//! `deliver`.
//!
//! Words 0 and 1 take a test packet's verdict. Only events and calls of `established` use them otherwise, not for test
//! packets.

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

const WORDS: usize = 5;
const _: () = assert!((MAX_ENDPOINT_ID + 1).is_power_of_two(), "a mask for endpoint ids");
/// High half of the last word: a [`Verdict`]. A packet of another build's program, mistaken for a verdict, reaches at
/// most the stack.
const IS_VERDICT: u32 = 0x5746_0000;
/// High half of the last word: unjudged, at this endpoint's hook. Low half: [`Direction`] and [`FROM_STACK`].
const IS_UNJUDGED: u32 = 0x5755_0000;
/// Last word of a [`Verdict`]: counted as forwarded.
const COUNTED: u32 = 1 << 5;
/// With [`COUNTED`]: as [`DropReason::ForwardedStack`].
const COUNTED_STACK: u32 = 1 << 6;
const _: () = assert!(DropReason::ForwardedLocal as u32 == 0 && DropReason::ForwardedStack as u32 == 1);
/// Last word of a [`Verdict`]: `METRICS` row.
const ROW_SHIFT: u32 = 8;
const _: () = assert!(METRICS_MAX <= 1 << 8);
/// Flag with the ids: from the stack.
pub const FROM_STACK: u32 = 1 << 14;
/// Flag with the ids: counted as forwarded.
pub const RECORDED: u32 = 1 << 30;

#[derive(Clone, Copy)]
pub struct Words(pub [u32; WORDS]);

impl Words {
    #[inline(always)]
    pub fn of(ctx: &TcContext) -> Self {
        let mut words = [0; WORDS];
        // Volatile: the verifier wants separate accesses.
        for (index, word) in words.iter_mut().enumerate() {
            // SAFETY: the context; a classifier may read `cb`.
            *word = unsafe { ptr::read_volatile(&raw const (*ctx.skb.skb).cb[index]) };
        }
        Self(words)
    }

    #[inline(always)]
    fn put(self, ctx: &TcContext) {
        for (index, word) in self.0.into_iter().enumerate() {
            put(ctx, index, word);
        }
    }

    #[inline(always)]
    pub fn has(self, flag: u32) -> bool {
        self.0[2] & flag != 0
    }

    #[inline(always)]
    pub fn sender(self) -> u32 {
        self.0[2] & MAX_ENDPOINT_ID
    }

    /// Zero for none.
    #[inline(always)]
    pub fn receiver(self) -> u32 {
        self.0[2] >> 16 & MAX_ENDPOINT_ID
    }

    /// False if [`deliver_unjudged`] wrote the words.
    #[inline(always)]
    pub fn is_from_endpoint(self) -> bool {
        self.0[4] & 0xffff_0000 != IS_UNJUDGED
    }

    /// Direction by [`deliver_unjudged`] or [`deliver`].
    #[inline(always)]
    fn judged(self) -> Direction {
        if self.0[4] & Direction::Egress as u32 == 0 { Direction::Ingress } else { Direction::Egress }
    }

    #[inline(always)]
    pub fn to_judge(self) -> (Direction, u32) {
        (self.judged(), self.0[4] & FROM_STACK)
    }

    /// For the node program `judge`.
    #[inline(always)]
    pub fn direction(self) -> Direction {
        if self.has(RECORDED) { self.asked().direction } else { self.judged() }
    }

    /// Written by [`call_established`] for a packet from the stack.
    #[inline(always)]
    pub fn container_mac(self) -> Mac {
        Mac::of([self.0[0], self.0[1]])
    }

    /// Written by [`call_established`] for a packet from the container: [`crate::cache::generation_of`].
    #[inline(always)]
    pub fn generation(self) -> u32 {
        self.0[0]
    }

    /// Written by [`call_established`].
    #[inline(always)]
    pub fn asked(self) -> Asked {
        Asked::of([self.0[2], self.0[3], self.0[4]])
    }

    /// Written by [`with_epoch`].
    #[inline(always)]
    pub fn epoch(self) -> u64 {
        u64::from(self.0[0]) | u64::from(self.0[1]) << 32
    }
}

#[inline(always)]
fn put(ctx: &TcContext, index: usize, word: u32) {
    // SAFETY: as in `Words::of`, also volatile.
    unsafe { ptr::write_volatile(&raw mut (*ctx.skb.skb).cb[index], word) };
}

/// Word 2: ids of 14 bits, each below two free bits.
#[inline(always)]
pub fn pair(receiver: u32) -> u32 {
    config::endpoint_id() | receiver << 16
}

/// This endpoint's epoch, ids, `rest`.
#[inline(always)]
pub fn with_epoch(config: Config, receiver: u32, rest: [u32; 2]) -> Words {
    let epoch = config.epoch();
    Words([epoch as u32, (epoch >> 32) as u32, pair(receiver), rest[0], rest[1]])
}

/// Continues in this endpoint's `deliver` with an unjudged packet; drops it, uncounted, if that is missing.
#[inline(always)]
pub fn deliver_unjudged(ctx: &TcContext, direction: Direction, flags: u32) -> i32 {
    put(ctx, 2, config::endpoint_id());
    put(ctx, 4, IS_UNJUDGED | direction as u32 | flags);
    to_own_deliver(ctx)
}

/// Continues in the `deliver` of the endpoint in word 2. The id is read back: for an index that the verifier knows, the
/// kernel compiles a direct jump, and a change of the slot waits for a grace period (20 ms of each DEL).
#[inline(always)]
fn to_own_deliver(ctx: &TcContext) -> i32 {
    // SAFETY: as in `Words::of`.
    let ids = unsafe { ptr::read_volatile(&raw const (*ctx.skb.skb).cb[2]) };
    // SAFETY: as in `jump`.
    unsafe { CALLS.tail_call(ctx, ids & MAX_ENDPOINT_ID) };
    TC_ACT_SHOT
}

#[inline(always)]
pub fn call(ctx: &TcContext, program: NodeCall, ids: u32) {
    put(ctx, 2, ids);
    jump(ctx, program);
}

/// Continues in the node program that finds the flow of a packet already counted as forwarded. Words:
/// [`Asked::numbers`], after the container's MAC if from the stack. Returns only if the program is missing.
#[inline(always)]
pub fn call_established(ctx: &TcContext, direction: Direction, config: Config, peer: Peer, generation: u32) {
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
    } else {
        put(ctx, 0, generation);
    }
    put(ctx, 2, ids | RECORDED);
    put(ctx, 3, own_epoch);
    put(ctx, 4, peer_epoch);
    jump(ctx, NodeCall::Established);
}

/// With the words of [`call_established`].
#[inline(always)]
pub fn call_judge(ctx: &TcContext) {
    jump(ctx, NodeCall::Judge);
}

#[inline(always)]
pub fn call_event(ctx: &TcContext, words: Words) {
    words.put(ctx);
    jump(ctx, NodeCall::Event);
}

#[inline(always)]
fn jump(ctx: &TcContext, program: NodeCall) {
    // SAFETY: a successful call does not return.
    unsafe { NODE_CALLS.tail_call(ctx, program as u32) };
}

#[inline(always)]
pub fn deliver(ctx: &TcContext, receiver: u32) {
    put(ctx, 4, 0);
    // SAFETY: as in `jump`.
    unsafe { CALLS.tail_call(ctx, receiver) };
}

/// To the container, without queue or second hook.
#[inline(always)]
pub fn redirect_peer(ifindex: u32) -> i32 {
    // SAFETY: a helper without pointers.
    unsafe { bpf_redirect_peer(ifindex, 0) as i32 }
}

/// A decision for the endpoint's `deliver`. Encoded: the verifier follows both ways of each branch on a number.
#[derive(Clone, Copy)]
pub struct Verdict {
    ids: u32,
    /// Length on arrival.
    pub bytes: u32,
    last: u32,
}

impl Verdict {
    /// `action`: a `TC_ACT_*` below 8.
    #[inline(always)]
    pub fn new(ctx: &TcContext, endpoint: u32, direction: Direction, reason: DropReason, action: i32) -> Self {
        let last = IS_VERDICT | metrics_index(direction, reason) << ROW_SHIFT | action as u32;
        Self { ids: endpoint, bytes: ctx.len(), last }
    }

    /// Zero for none.
    #[inline(always)]
    pub fn to(self, receiver: u32) -> Self {
        Self { ids: self.ids | receiver << 16, ..self }
    }

    /// After a count as [`DropReason::ForwardedLocal`] or [`DropReason::ForwardedStack`].
    #[inline(always)]
    pub fn after(self, counted: DropReason) -> Self {
        let stack = if matches!(counted, DropReason::ForwardedStack) { COUNTED_STACK } else { 0 };
        Self { last: self.last | COUNTED | stack, ..self }
    }

    #[inline(always)]
    pub fn of(words: Words) -> Option<Self> {
        let [_, _, ids, bytes, last] = words.0;
        (last & 0xffff_0000 == IS_VERDICT).then_some(Self { ids, bytes, last })
    }

    #[inline(always)]
    pub fn hand_over(self, ctx: &TcContext) -> i32 {
        put(ctx, 2, self.ids);
        put(ctx, 3, self.bytes);
        put(ctx, 4, self.last);
        to_own_deliver(ctx)
    }

    /// Zero for none.
    #[inline(always)]
    pub fn receiver(self) -> u32 {
        self.ids >> 16 & MAX_ENDPOINT_ID
    }

    /// Row of `METRICS`.
    #[inline(always)]
    pub fn row(self) -> u32 {
        self.last >> ROW_SHIFT & 0xff
    }

    #[inline(always)]
    pub fn action(self) -> i32 {
        (self.last & 0x07) as i32
    }

    /// Not redirected to the proxy.
    #[inline(always)]
    pub fn is_for_container(self) -> bool {
        let to_proxy = metrics_index(Direction::Ingress, DropReason::Redirected);
        self.action() == TC_ACT_REDIRECT && self.receiver() == 0 && self.row() != to_proxy
    }

    /// `METRICS` row that counted the packet.
    #[inline(always)]
    pub fn counted(self) -> Option<u32> {
        (self.last & COUNTED != 0).then_some(direction_of(self.row()) | ((self.last & COUNTED_STACK) / COUNTED_STACK))
    }
}
