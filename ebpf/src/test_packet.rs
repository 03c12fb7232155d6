//! Test packets (`wharf_common::test_packet`) leave no trace: check [`is_test`] before writing a packet's data to a
//! map, [`is_untracked`] before the flow lookup.

use core::{mem::offset_of, ptr};

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use wharf_common::{
    Direction, TestReport,
    drop_reason::REASONS,
    test_packet::{MARK_OFFSET, POLICY_MARK, REPORTS_OFFSET, TEST_IFINDEX},
};

use crate::config;

const _: () = assert!(offset_of!(__sk_buff, cb) == REPORTS_OFFSET && offset_of!(__sk_buff, mark) == MARK_OFFSET);

#[inline(always)]
pub fn is_test(ctx: &TcContext) -> bool {
    // SAFETY: the context.
    unsafe { (*ctx.skb.skb).ifindex == TEST_IFINDEX }
}

#[inline(always)]
pub fn is_untracked(ctx: &TcContext) -> bool {
    is_test(ctx) && !asks_policy(ctx)
}

#[inline(always)]
pub fn asks_policy(ctx: &TcContext) -> bool {
    // SAFETY: the context.
    is_test(ctx) && unsafe { (*ctx.skb.skb).mark == POLICY_MARK }
}

/// A counter row as the endpoint's verdict; replaces an earlier report.
#[inline(always)]
pub fn report(ctx: &TcContext, row: u32) {
    let (direction, reason) = (row / REASONS, row % REASONS);
    let word = TestReport::word(config::endpoint_id(), reason);
    for each in Direction::ALL {
        // Both words are accessed, separately (volatile): the verifier allows no variable context offset.
        // SAFETY: the context; a classifier may read and write `cb`.
        unsafe {
            let before = ptr::read_volatile(&raw const (*ctx.skb.skb).cb[each as usize]);
            let after = if each as u32 == direction { word } else { before };
            ptr::write_volatile(&raw mut (*ctx.skb.skb).cb[each as usize], after);
        }
    }
}
