//! What a program hands to the one that it tail-calls: the five words of the packet's control block (`__sk_buff.cb`).
//!
//! An endpoint's own programs hold the checks that every packet needs, and its maps. What few packets need is in
//! programs of the node's ([`NODE_CALLS`]), which are verified once and not for each endpoint. They know an endpoint's maps
//! only by what is handed over, and give a verdict back to the endpoint's `deliver`, which records it ([`Verdict`]).
//!
//! The words are the packet's own: a map for each CPU would not do, because a packet may interrupt a test run on the same CPU
//! (`bpf_test_run` before Linux 6.10 leaves bottom halves on). Words 0 and 1 are where a test packet's verdict is reported
//! ([`crate::test_packet`]), so who used them clears them.

use core::ptr;

use aya_ebpf::{bindings::TC_ACT_SHOT, programs::TcContext};
use wharf_common::map::NodeCall;

use crate::{
    config::{self, Config},
    maps::{CALLS, NODE_CALLS},
};

/// Number of words.
const WORDS: usize = 5;
/// In the high half of the last word: the words are a [`Verdict`]. A sender of another build may leave what the container's stack
/// left there; a packet that then passes for a verdict is miscounted, and goes into the node's stack at most.
const IS_VERDICT: u32 = 0x5746_0000;

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
        for (index, word) in self.0.into_iter().enumerate() {
            // SAFETY: as in `of`; a classifier may also write `cb`.
            unsafe { ptr::write_volatile(&raw mut (*ctx.skb.skb).cb[index], word) }
        }
    }

    /// Endpoint whose program handed the packet over.
    #[inline(always)]
    pub fn sender(self) -> u32 {
        self.0[2] & 0xffff
    }

    /// Endpoint that the packet goes to, or zero.
    #[inline(always)]
    pub fn receiver(self) -> u32 {
        self.0[2] >> 16
    }

    /// The epoch of the sender's attachment, where [`with_epoch`] made the words.
    #[inline(always)]
    pub fn epoch(self) -> u64 {
        u64::from(self.0[0]) | u64::from(self.0[1]) << 32
    }
}

/// This endpoint and the one that the packet goes to (or zero), as word 2.
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

/// What a program of the node's decided about a packet that an endpoint sent, for the endpoint's own program to record.
#[derive(Clone, Copy)]
pub struct Verdict {
    /// Endpoint that sent the packet.
    pub sender: u32,
    /// Endpoint that the packet goes to next, or zero.
    pub receiver: u32,
    /// The packet's length as it came in, bytes.
    pub bytes: u32,
    /// [`wharf_common::DropReason`] as a number.
    pub reason: u32,
    /// `TC_ACT_*`.
    pub action: u32,
}

impl Verdict {
    /// Hands the verdict to the endpoint's `deliver`. Without one the packet is dropped; there are no counters then either.
    #[inline(always)]
    pub fn hand_over(self, ctx: &TcContext) -> i32 {
        let last = IS_VERDICT | self.reason << 8 | self.action;
        Words([0, 0, self.sender | self.receiver << 16, self.bytes, last]).put(ctx);
        // SAFETY: as in `call`.
        unsafe { CALLS.tail_call(ctx, self.sender) };
        TC_ACT_SHOT
    }

    /// The verdict in the words, if they are one.
    #[inline(always)]
    pub fn of(words: Words) -> Option<Self> {
        let last = words.0[4];
        if last & 0xffff_0000 != IS_VERDICT {
            return None;
        }
        let (reason, action) = (last >> 8 & 0xff, last & 0xff);
        Some(Self { sender: words.sender(), receiver: words.receiver(), bytes: words.0[3], reason, action })
    }
}
