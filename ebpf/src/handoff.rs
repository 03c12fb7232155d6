//! What a program hands to the one that it tail-calls: the five words of the packet's control block (`__sk_buff.cb`).
//!
//! An endpoint's own programs hold the checks that are about this endpoint, and its maps. What is the same for all is in
//! programs of the node's ([`NODE_CALLS`]), which are verified once and not for each endpoint. They know an endpoint's maps
//! only by what is handed over, and give a verdict back to the endpoint's `deliver`, which records it ([`Verdict`]).
//!
//! The words are the packet's own: a map for each CPU would not do, because a packet may interrupt a test run on the same CPU
//! (`bpf_test_run` before Linux 6.10 leaves bottom halves on). Words 0 and 1 are where a test packet's verdict is reported
//! ([`crate::test_packet`]), so who used them clears them.

use core::ptr;

use aya_ebpf::{bindings::TC_ACT_SHOT, programs::TcContext};
use wharf_common::{Direction, DropReason, MAX_ENDPOINT_ID, map::NodeCall};

use crate::{
    config::{self, Config},
    maps::{CALLS, NODE_CALLS},
};

/// Number of words.
const WORDS: usize = 5;
const _: () = assert!((MAX_ENDPOINT_ID + 1).is_power_of_two(), "a mask for endpoint ids");
/// In the high half of the last word: the words are a [`Verdict`]. A sender of another build may leave what the container's stack
/// left there; a packet that then passes for a verdict is miscounted, and goes into the node's stack at most.
const IS_VERDICT: u32 = 0x5746_0000;
/// In the last word of a [`Verdict`]: the packet was counted as forwarded.
const COUNTED: u32 = 1 << 5;
/// Beside [`COUNTED`]: to another endpoint, and not to the stack.
const COUNTED_LOCAL: u32 = 1 << 6;
/// In the last word of a [`Verdict`]: the packet is on its way to the container.
const INGRESS: u32 = 1 << 7;

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
    pub fn put(self, ctx: &TcContext) {
        self.put_from::<0>(ctx);
    }

    /// As [`Words::put`], from the word `FIRST` on.
    #[inline(always)]
    fn put_from<const FIRST: usize>(self, ctx: &TcContext) {
        // Every word in a line of its own: a loop that begins at another word is not unrolled.
        macro_rules! put {
            ($($index:literal)+) => { $(
                if $index >= FIRST {
                    // SAFETY: as in `of`; a classifier may also write `cb`.
                    unsafe { ptr::write_volatile(&raw mut (*ctx.skb.skb).cb[$index], self.0[$index]) }
                }
            )+ };
        }
        put!(0 1 2 3 4);
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

    /// The epoch of the sender's attachment, where [`with_epoch`] made the words.
    #[inline(always)]
    pub fn epoch(self) -> u64 {
        u64::from(self.0[0]) | u64::from(self.0[1]) << 32
    }
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

/// Continues in a program of the node's. Comes back only when there is none.
#[inline(always)]
pub fn call(ctx: &TcContext, program: NodeCall, words: Words) {
    words.put(ctx);
    jump(ctx, program);
}

/// As [`call`], with the words from 2 on: the first two keep a test packet's reports.
#[inline(always)]
pub fn call_beside_reports(ctx: &TcContext, program: NodeCall, words: [u32; 3]) {
    let [second, third, last] = words;
    Words([0, 0, second, third, last]).put_from::<2>(ctx);
    jump(ctx, program);
}

#[inline(always)]
fn jump(ctx: &TcContext, program: NodeCall) {
    // SAFETY: everything this run holds is on its stack; the call does not come back when it succeeds.
    unsafe { NODE_CALLS.tail_call(ctx, program as u32) };
}

/// Gives the packet to an endpoint's `deliver`. Comes back only when there is none.
#[inline(always)]
pub fn deliver(ctx: &TcContext, receiver: u32) {
    // SAFETY: the context the program was called with. Zero is no verdict.
    unsafe { ptr::write_volatile(&raw mut (*ctx.skb.skb).cb[4], 0) };
    // SAFETY: as in `call`.
    unsafe { CALLS.tail_call(ctx, receiver) };
}

/// What a program of the node's decided about a packet of an endpoint's, for the endpoint's own program to record.
#[derive(Clone, Copy)]
pub struct Verdict {
    /// Endpoint whose hook the packet is at.
    pub endpoint: u32,
    /// Endpoint that the packet goes to next, or zero.
    pub receiver: u32,
    /// The packet's length as it came in, bytes.
    pub bytes: u32,
    /// From the endpoint's point of view.
    pub direction: Direction,
    /// [`wharf_common::DropReason`] as a number.
    pub reason: u32,
    /// `TC_ACT_*`, below 8.
    pub action: u32,
    /// What the packet was counted as, if it was: [`DropReason::ForwardedLocal`] or [`DropReason::ForwardedStack`].
    pub counted: Option<DropReason>,
}

impl Verdict {
    /// Hands the verdict to the endpoint's `deliver`. Without one the packet is dropped; there are no counters then either.
    #[inline(always)]
    pub fn hand_over(self, ctx: &TcContext) -> i32 {
        let counted = match self.counted {
            None => 0,
            Some(DropReason::ForwardedLocal) => COUNTED | COUNTED_LOCAL,
            Some(_) => COUNTED,
        };
        let ingress = if matches!(self.direction, Direction::Ingress) { INGRESS } else { 0 };
        let last = IS_VERDICT | self.reason << 8 | ingress | counted | self.action;
        Words([0, 0, self.endpoint | self.receiver << 16, self.bytes, last]).put(ctx);
        // SAFETY: as in `call`.
        unsafe { CALLS.tail_call(ctx, self.endpoint) };
        TC_ACT_SHOT
    }

    /// The verdict in the words, if they are one.
    #[inline(always)]
    pub fn of(words: Words) -> Option<Self> {
        let last = words.0[4];
        if last & 0xffff_0000 != IS_VERDICT {
            return None;
        }
        let (reason, action) = (last >> 8 & 0xff, last & 0x07);
        let counted = match last & (COUNTED | COUNTED_LOCAL) {
            0 => None,
            COUNTED => Some(DropReason::ForwardedStack),
            _ => Some(DropReason::ForwardedLocal),
        };
        let direction = if last & INGRESS != 0 { Direction::Ingress } else { Direction::Egress };
        let (endpoint, receiver, bytes) = (words.sender(), words.receiver(), words.0[3]);
        Some(Self { endpoint, receiver, bytes, direction, reason, action, counted })
    }
}
