//! Bandwidth limits: a token bucket per direction.
//!
//! A bucket stores the time at which it is empty: it contains the rate times the time since then, at most the burst. A
//! packet of any size passes unless the bucket is empty. One race loses a charge: while a CPU advances a full bucket's
//! time, it overwrites another CPU's charge.

use core::{intrinsics, ptr};

use aya_ebpf::{bindings::__sk_buff, helpers::bpf_ktime_get_ns, programs::TcContext};
use wharf_common::{DropReason, drop_reason::REASONS};

use crate::{config::Config, maps::BANDWIDTH, test_packet};

const NANOSECONDS: u64 = 1_000_000_000;
const BITS: u64 = 8;

/// Charges a forwarded packet, except test packets and neighbour messages; true: drop it.
#[inline(always)]
pub fn exceeds(ctx: &TcContext, config: Config, row: u32) -> bool {
    let direction = row / REASONS;
    config.limits(direction)
        && row % REASONS != DropReason::NeighbourAnswered as u32
        // SAFETY: the context.
        && unsafe { wharf_bandwidth(ctx.skb.skb, direction) } == EXCEEDS
}

/// Header bytes per further GSO segment, for IPv6 with TCP; others are overcharged. The container's segment count is
/// not trusted.
const SEGMENT_HEADERS: u64 = 14 + 40 + 20;

/// Length on the wire, bytes.
///
/// # Safety
///
/// `skb`: the context.
#[inline(always)]
unsafe fn wire_bytes(skb: *mut __sk_buff) -> u64 {
    // SAFETY: the caller's contract.
    let (bytes, segment) = unsafe { (u64::from((*skb).len), u64::from((*skb).gso_size)) };
    bytes + bytes.checked_div(segment).unwrap_or(0) * SEGMENT_HEADERS
}

const EXCEEDS: u32 = 0;
const PASSES: u32 = 1;

/// [`exceeds`] as a global function.
///
/// # Safety
///
/// `skb`: the context.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_bandwidth(skb: *mut __sk_buff, direction: u32) -> u32 {
    if test_packet::is_test(&TcContext::new(skb)) {
        return PASSES;
    }
    let Some(bucket) = BANDWIDTH.get_ptr_mut(direction) else { return PASSES };
    // SAFETY: a map value: words are accessed whole, or atomically.
    unsafe {
        let rate = ptr::read_volatile(&raw const (*bucket).rate);
        if rate == 0 {
            return PASSES;
        }
        let now = bpf_ktime_get_ns();
        let full = now.saturating_sub(ptr::read_volatile(&raw const (*bucket).burst_ns));
        let mut empty_at = ptr::read_volatile(&raw const (*bucket).empty_at_ns);
        if empty_at < full {
            ptr::write_volatile(&raw mut (*bucket).empty_at_ns, full);
            empty_at = full;
        }
        if empty_at >= now {
            return EXCEEDS;
        }
        let cost = wire_bytes(skb) * (BITS * NANOSECONDS) / rate;
        intrinsics::atomic_xadd::<u64, u64, { intrinsics::AtomicOrdering::Relaxed }>(
            &raw mut (*bucket).empty_at_ns,
            cost,
        );
    }
    PASSES
}
