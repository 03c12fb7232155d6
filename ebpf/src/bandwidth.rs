//! Limits of an endpoint's bandwidth: a token bucket for each direction.
//!
//! The bucket is kept as one number, the time at which it is empty: it holds what the rate gives between that time and now,
//! at most the burst. A packet passes when there is anything in the bucket and is charged with its whole length on the wire (a
//! GSO packet with the headers of each segment), so that a
//! GSO packet larger than the burst passes too; the time then lies in the future, and everything drops until it has come.
//!
//! **Two CPUs** may charge one bucket at once. The charge is an atomic addition, so none is lost, and packets that pass
//! together are paid for by those that follow. One loss is possible: while one CPU sets the time of a full bucket forward,
//! the charge that another CPU makes in the same moment is overwritten. A bucket that was full thus lets one packet for each
//! other CPU pass uncharged; under load a bucket is not full.

use core::{intrinsics, ptr};

use aya_ebpf::{bindings::__sk_buff, helpers::bpf_ktime_get_ns, programs::TcContext};
use wharf_common::{DropReason, drop_reason::REASONS};

use crate::{config::Config, maps::BANDWIDTH, test_packet};

const NANOSECONDS: u64 = 1_000_000_000;
const BITS: u64 = 8;

/// Charges a packet that is forwarded to the bucket of the direction of its row of counters; true: it must be dropped. A direction without a
/// limit costs a look at a flag; a test packet is not charged, nor is a neighbour message.
#[inline(always)]
pub fn exceeds(ctx: &TcContext, config: Config, row: u32) -> bool {
    let direction = row / REASONS;
    config.limits(direction)
        && row % REASONS != DropReason::NeighbourAnswered as u32
        // SAFETY: the context the program was called with.
        && unsafe { wharf_bandwidth(ctx.skb.skb, direction) } == EXCEEDS
}

/// Bytes of the headers of an IPv6 packet with TCP: what each further segment of a GSO packet adds on the wire. Less than
/// that (IPv4, UDP) is charged too much; what the container's stack says of the number of segments is not believed.
const SEGMENT_HEADERS: u64 = 14 + 40 + 20;

/// Bytes that the packet is on the wire.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[inline(always)]
unsafe fn wire_bytes(skb: *mut __sk_buff) -> u64 {
    // SAFETY: the caller's word.
    let (bytes, segment) = unsafe { (u64::from((*skb).len), u64::from((*skb).gso_size)) };
    bytes + bytes.checked_div(segment).unwrap_or(0) * SEGMENT_HEADERS
}

const EXCEEDS: u32 = 0;
const PASSES: u32 = 1;

/// [`exceeds`] as a global function, which the verifier looks at once.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_bandwidth(skb: *mut __sk_buff, direction: u32) -> u32 {
    if test_packet::is_test(&TcContext::new(skb)) {
        return PASSES;
    }
    let Some(bucket) = BANDWIDTH.get_ptr_mut(direction) else { return PASSES };
    // SAFETY: a map value from a lookup. It is shared by all CPUs and user space: words are read and written whole, and added
    // to atomically. A helper without arguments; the length of the context.
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
