//! Test packets get the verdict that any packet would get, and leave no trace: `wharf_common::test_packet` says how they
//! are recognised and where their verdict goes.
//!
//! A program that writes to a map must ask [`is_test`] first. [`crate::verdict::record`] does for counters and events; a
//! map with state of connections has to as well, where it adds or changes a row.

use core::{mem::offset_of, ptr};

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use wharf_common::{
    Direction, DropReason, TestReport,
    test_packet::{REPORTS_OFFSET, TEST_IFINDEX},
};

use crate::config;

const _: () = assert!(offset_of!(__sk_buff, cb) == REPORTS_OFFSET);

/// True for a packet of `BPF_PROG_TEST_RUN`, which is not on its way anywhere.
#[inline(always)]
pub fn is_test(ctx: &TcContext) -> bool {
    // SAFETY: the context the program was called with.
    unsafe { (*ctx.skb.skb).ifindex == TEST_IFINDEX }
}

/// Reports this endpoint's verdict; a later one of the same run takes its place.
#[inline(always)]
pub fn report(ctx: &TcContext, direction: Direction, reason: DropReason) {
    let report = TestReport { endpoint_id: config::endpoint_id(), reason };
    // Volatile: the verifier wants the context's words written one by one.
    // SAFETY: the context the program was called with, whose `cb` a classifier may write.
    unsafe { ptr::write_volatile(&raw mut (*ctx.skb.skb).cb[direction as usize], report.to_word()) }
}
