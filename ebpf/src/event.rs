//! Tells user space of a packet: a record on the `EVENTS` ring, within the endpoint's budget.

use core::{
    intrinsics,
    mem::{MaybeUninit, offset_of},
    ptr,
};

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::{bpf_ktime_get_ns, bpf_skb_load_bytes},
    programs::TcContext,
};
use wharf_common::{
    Direction, DropReason, Event, EventKind,
    drop_reason::{REASONS, metrics_index},
    map::EVENTS_PER_SECOND,
};

use crate::{
    config::{self, Config},
    maps::{EVENT_BUDGET, EVENTS},
    metrics,
    parse::ETHERNET_BYTES,
};

const WINDOW_NS: u64 = 1_000_000_000;

/// Sends an event about the packet, or counts that there was none.
#[inline(always)]
pub fn emit(ctx: &TcContext, kind: EventKind, direction: Direction, reason: DropReason) {
    // The answer is there for the kernel's sake, see below.
    // SAFETY: the context the program was called with.
    unsafe { wharf_event(ctx.skb.skb, kind as u32, metrics_index(direction, reason)) };
}

/// One subprogram for every call: the cold path of all programs. `verdict` is the row of `METRICS`, which is both direction
/// and reason.
///
/// Its name is exported and it takes but the context and numbers, so that the verifier takes it for a global function and
/// looks at it once, not again for every verdict that leads here; such a function must return a number. It looks up the
/// configuration itself for the same reason.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_event(skb: *mut __sk_buff, kind: u32, verdict: u32) -> u32 {
    // SAFETY: a helper without arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    let direction = if verdict < REASONS { Direction::Ingress } else { Direction::Egress };
    if !within_budget(now) {
        metrics::count(direction, DropReason::EventSuppressed, 0);
        return 0;
    }
    let Some(mut entry) = EVENTS.reserve(0) else {
        metrics::count(direction, DropReason::EventLost, 0);
        return 0;
    };
    let event = entry.as_mut_ptr();
    // SAFETY: the ring's memory, of an event's size, until it is submitted; `skb` is the context.
    unsafe {
        (*event).timestamp_ns = now;
        (*event).epoch = 0;
        (*event).identity = 0;
        if let Some(config) = Config::load() {
            (*event).epoch = config.epoch();
            (*event).identity = config.identity();
        }
        (*event).kind = kind;
        (*event).reason = verdict % REASONS;
        (*event).direction = direction as u32;
        (*event).endpoint_id = config::endpoint_id();
        (*event).length = (*skb).len;
        describe(skb, event);
    }
    entry.submit(0);
    1
}

/// Takes a place in this second's budget. The window is not exact to the packet: CPUs that meet at its end may each give
/// a place too many.
#[inline(always)]
fn within_budget(now: u64) -> bool {
    let Some(budget) = EVENT_BUDGET.get_ptr_mut(0) else { return false };
    // SAFETY: a map value from a lookup. It is shared by all CPUs: the words are read and written whole, and added to
    // atomically.
    unsafe {
        if now.wrapping_sub(ptr::read_volatile(&raw const (*budget).window_ns)) >= WINDOW_NS {
            ptr::write_volatile(&raw mut (*budget).window_ns, now);
            ptr::write_volatile(&raw mut (*budget).used, 0);
        }
        if ptr::read_volatile(&raw const (*budget).used) >= EVENTS_PER_SECOND as u64 {
            return false;
        }
        intrinsics::atomic_xadd::<u64, u64, { intrinsics::AtomicOrdering::Relaxed }>(&raw mut (*budget).used, 1);
    }
    true
}

/// Source and destination port are next to each other in events and in transport headers, and so are addresses.
const _: () = {
    assert!(offset_of!(Event, destination) == offset_of!(Event, source) + 16);
    assert!(offset_of!(Event, destination_port) == offset_of!(Event, source_port) + 2);
    assert!(offset_of!(Event, source).is_multiple_of(8) && offset_of!(Event, source_port).is_multiple_of(4));
};

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;
/// IPv6 extension headers that are looked behind. RFC 8200, 4.1 lets a packet have each kind once, one of them twice.
const EXTENSION_HEADERS: u32 = 4;

/// Fills in what the packet is. Bytes are copied by a helper rather than read in place: it fetches them from wherever
/// they lie, never moves the packet, and leaves zeros where there is nothing.
///
/// # Safety
///
/// `skb` is the context of the running program; `event` is memory of an event's size.
#[inline(always)]
unsafe fn describe(skb: *mut __sk_buff, event: *mut Event) {
    // SAFETY: as the function's own contract; the destinations are fields or stack arrays of the length given.
    unsafe {
        let source: *mut u64 = (&raw mut (*event).source).cast();
        // Volatile: as plain stores they would become a call to a byte-by-byte `memset`.
        for word in 0..4 {
            source.add(word).write_volatile(0);
        }
        (&raw mut (*event).source_port).cast::<u32>().write_volatile(0);
        (*event).protocol = 0;
        (*event)._pad = 0;
        let mut ethertype = 0_u16;
        load(skb, 12, (&raw mut ethertype).cast(), 2);
        (*event).ethertype = ethertype.to_ne_bytes();

        let (protocol, transport) = match u16::from_be(ethertype) {
            0x0800 => {
                let mut header = MaybeUninit::<[u32; 5]>::uninit();
                load(skb, ETHERNET_BYTES as u32, header.as_mut_ptr().cast(), 20);
                let header = header.assume_init();
                mapped(source, header[3]);
                mapped(source.add(2), header[4]);
                let protocol = (u32::from_be(header[2]) >> 16) as u8;
                (*event).protocol = protocol;
                // Only the first fragment carries the transport header.
                if u32::from_be(header[1]) & 0x1fff != 0 {
                    return;
                }
                (protocol, ETHERNET_BYTES as u32 + (header[0] & 0x0f) * 4)
            }
            0x86dd => {
                let mut next = 0_u8;
                load(skb, ETHERNET_BYTES as u32 + 6, &raw mut next, 1);
                load(skb, ETHERNET_BYTES as u32 + 8, source.cast(), 32);
                let mut offset = ETHERNET_BYTES as u32 + 40;
                let mut later_fragment = false;
                for _ in 0..EXTENSION_HEADERS {
                    if !matches!(next, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION_OPTIONS) {
                        break;
                    }
                    let mut header = 0_u32;
                    if !load(skb, offset, (&raw mut header).cast(), 4) {
                        break;
                    }
                    let header = u32::from_be(header);
                    if next == FRAGMENT {
                        later_fragment = header & 0xfff8 != 0;
                        offset += 8;
                    } else {
                        offset += 8 + (header >> 16 & 0xff) * 8;
                    }
                    next = (header >> 24) as u8;
                    // What follows lies in the first fragment.
                    if later_fragment {
                        break;
                    }
                }
                (*event).protocol = next;
                if later_fragment {
                    return;
                }
                (next, offset)
            }
            0x0806 => {
                // The sender's and the target's address, with the target's MAC between them.
                let mut addresses = [0_u32; 2];
                load(skb, ETHERNET_BYTES as u32 + 14, addresses.as_mut_ptr().cast(), 4);
                load(skb, ETHERNET_BYTES as u32 + 24, addresses.as_mut_ptr().add(1).cast(), 4);
                mapped(source, addresses[0]);
                mapped(source.add(2), addresses[1]);
                load(skb, ETHERNET_BYTES as u32 + 6, (&raw mut (*event).source_port).cast(), 2);
                return;
            }
            _ => return,
        };
        match protocol {
            TCP | UDP => load(skb, transport, (&raw mut (*event).source_port).cast(), 4),
            ICMP | ICMPV6 => load(skb, transport, (&raw mut (*event).source_port).cast(), 2),
            _ => false,
        };
    }
}

/// Writes an IPv4-mapped address.
///
/// # Safety
///
/// `to` is two words of writable memory.
#[inline(always)]
unsafe fn mapped(to: *mut u64, address: u32) {
    // SAFETY: the caller's word.
    unsafe { to.add(1).write(u64::from(0xffff_u32.to_be()) | u64::from(address) << 32) }
}

/// Copies `bytes` bytes of the packet and says so, or copies zeros when the packet has fewer.
///
/// # Safety
///
/// `to` is that many bytes of writable memory.
#[inline(always)]
unsafe fn load(skb: *mut __sk_buff, offset: u32, to: *mut u8, bytes: u32) -> bool {
    // SAFETY: the caller's word. The helper's error means that it wrote zeros, which is what an event then shows.
    unsafe { bpf_skb_load_bytes(skb.cast(), offset, to.cast(), bytes) == 0 }
}

/// A log record of the verdict, for an endpoint that asks for them and in an object built with them.
#[cfg(feature = "debug-log")]
#[inline(always)]
pub fn debug(ctx: &TcContext, direction: Direction, reason: DropReason) {
    if config::debug() {
        aya_log_ebpf::debug!(
            ctx,
            "endpoint {} direction {} reason {} bytes {}",
            config::endpoint_id(),
            direction as u32,
            reason as u32,
            ctx.len()
        );
    }
}

/// Nothing, in an object built without log records.
#[cfg(not(feature = "debug-log"))]
#[inline(always)]
pub fn debug(_ctx: &TcContext, _direction: Direction, _reason: DropReason) {}
