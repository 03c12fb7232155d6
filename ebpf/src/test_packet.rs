//! Test packets get the verdict that any packet would get, and leave no trace: `wharf_common::test_packet` says how they
//! are recognised and where their verdict goes.
//!
//! A program that writes to a map what is about a packet must ask [`is_test`] first. [`crate::verdict`] and [`crate::head`] do for
//! counters and events; [`crate::egress`] and [`crate::ingress`] before they look for a flow, whose row that would add or change.

use core::{mem::offset_of, ptr};

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use wharf_common::{
    Direction, TestReport,
    drop_reason::REASONS,
    test_packet::{MARK_OFFSET, POLICY_MARK, REPORTS_OFFSET, TEST_IFINDEX},
};

use crate::config;

const _: () = assert!(offset_of!(__sk_buff, cb) == REPORTS_OFFSET && offset_of!(__sk_buff, mark) == MARK_OFFSET);

/// True for a packet of `BPF_PROG_TEST_RUN`, which is not on its way anywhere.
#[inline(always)]
pub fn is_test(ctx: &TcContext) -> bool {
    // SAFETY: the context the program was called with.
    unsafe { (*ctx.skb.skb).ifindex == TEST_IFINDEX }
}

/// True for a test packet whose flow is not looked for.
#[inline(always)]
pub fn is_untracked(ctx: &TcContext) -> bool {
    is_test(ctx) && !asks_policy(ctx)
}

/// True for a test packet that asks policy.
#[inline(always)]
pub fn asks_policy(ctx: &TcContext) -> bool {
    // SAFETY: the context the program was called with.
    is_test(ctx) && unsafe { (*ctx.skb.skb).mark == POLICY_MARK }
}

/// Reports this endpoint's verdict, which has this row of counters; a later one of the same run takes its place.
#[inline(always)]
pub fn report(ctx: &TcContext, row: u32) {
    let (direction, reason) = (row / REASONS, row % REASONS);
    let word = TestReport::word(config::endpoint_id(), reason);
    for each in Direction::ALL {
        // Both words are read and written, one of them with what it has: the verifier allows no variable place in the context, and
        // wants its words read and written one by one, so volatile.
        // SAFETY: the context the program was called with, whose `cb` a classifier may read and write.
        unsafe {
            let before = ptr::read_volatile(&raw const (*ctx.skb.skb).cb[each as usize]);
            let after = if each as u32 == direction { word } else { before };
            ptr::write_volatile(&raw mut (*ctx.skb.skb).cb[each as usize], after);
        }
    }
}
