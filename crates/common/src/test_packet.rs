//! Test packets: recognition, and place of the verdict.
//!
//! `BPF_PROG_TEST_RUN` builds its packet on the loopback interface of the caller's network namespace
//! (`bpf_prog_test_run_skb`, net/bpf/test_run.c), then copies `__sk_buff.cb` to the caller. Programs write the verdict
//! there, and to no map. A packet on a hook comes from a veth, so no sender can forge a test packet.

use crate::{Direction, DropReason};

/// `__sk_buff.ifindex` of test packets (`LOOPBACK_IFINDEX` in include/net/net_namespace.h).
pub const TEST_IFINDEX: u32 = 1;

/// Offset of `cb` in `struct __sk_buff` (linux/bpf.h), bytes.
pub const REPORTS_OFFSET: usize = 48;

/// `__sk_buff.mark` of a test packet for the endpoint's own policy rules; others skip policy.
pub const POLICY_MARK: u32 = 1;

/// Offset of `mark` in `struct __sk_buff`, bytes.
pub const MARK_OFFSET: usize = 8;

/// A program's report, in the word of `cb` at its [`Direction`]'s number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TestReport {
    /// Endpoint whose program decided.
    pub endpoint_id: u32,
    /// The verdict.
    pub reason: DropReason,
}

impl TestReport {
    /// Encodes a word of `cb`; `reason` is a [`DropReason`].
    #[inline(always)]
    #[must_use]
    pub const fn word(endpoint_id: u32, reason: u32) -> u32 {
        endpoint_id << 16 | reason
    }

    /// `None` for an unwritten word or an unknown reason.
    #[must_use]
    pub const fn from_word(word: u32) -> Option<Self> {
        match (word >> 16, DropReason::from_u32(word & 0xffff)) {
            (0, _) | (_, None) => None,
            (endpoint_id, Some(reason)) => Some(Self { endpoint_id, reason }),
        }
    }
}

const _: () = {
    assert!(crate::MAX_ENDPOINT_ID <= 0xffff && crate::drop_reason::REASONS <= 0xffff);
    // `cb` has five words.
    assert!(Direction::ALL.len() <= 5);
};
