//! Test packets: how the programs recognise one, and where they report its verdict.
//!
//! `BPF_PROG_TEST_RUN` builds its packet on the loopback interface of the caller's network namespace
//! (`bpf_prog_test_run_skb`, net/bpf/test_run.c), and copies the packet's control block `__sk_buff.cb` to the caller after
//! the run. The programs write a test packet's verdict into that block and write to no map. A packet on a hook is on
//! the host side of a veth pair, so no sender can make one that passes for a test packet.

use crate::{Direction, DropReason};

/// `__sk_buff.ifindex` of a test packet: the loopback interface has this index in every network namespace
/// (`LOOPBACK_IFINDEX` in include/net/net_namespace.h), and no other interface has it.
pub const TEST_IFINDEX: u32 = 1;

/// Offset of the reports in `struct __sk_buff` of linux/bpf.h, bytes: its member `cb`.
pub const REPORTS_OFFSET: usize = 48;

/// `__sk_buff.mark` of a test packet that asks the endpoint's own rules of policy alone: it passes, or is dropped. Others are not judged by
/// policy.
pub const POLICY_MARK: u32 = 1;

/// Offset of the mark in `struct __sk_buff`, bytes.
pub const MARK_OFFSET: usize = 8;

/// What one program reports of a test packet: whose program gave the verdict, and which. The report of a direction is
/// the word of `cb` with that [`Direction`]'s number. A word that no program wrote is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TestReport {
    /// Endpoint whose program gave the verdict.
    pub endpoint_id: u32,
    /// The verdict.
    pub reason: DropReason,
}

impl TestReport {
    /// As a word of `cb`; `reason` is a [`DropReason`] as a number.
    #[inline(always)]
    #[must_use]
    pub const fn word(endpoint_id: u32, reason: u32) -> u32 {
        endpoint_id << 16 | reason
    }

    /// From a word of `cb`; `None` when no program wrote it, or one with reasons that this version does not know.
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
