//! Writes an event on the `EVENTS` ring and forwards the packet.

use core::mem::{MaybeUninit, offset_of};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, TC_ACT_SHOT},
    helpers::{bpf_ktime_get_ns, bpf_skb_load_bytes},
    programs::TcContext,
};
use wharf_common::{Direction, DropReason, Event};
use wharf_ebpf::{
    event::Told,
    handoff::{self, Verdict, Words},
    maps::EVENTS,
    parse::ETHERNET_BYTES,
};

use crate::packet::{EXTENSIONS, FRAGMENT, extension_bytes, is_extension};

#[inline(always)]
pub fn run(ctx: &TcContext) -> i32 {
    let told = Told::of(Words::of(ctx));
    send(ctx, &told);
    if told.receiver == 0 {
        return told.action;
    }
    handoff::deliver(ctx, told.receiver);
    let (endpoint, reason) = (told.words.sender(), DropReason::NoTailCallTarget);
    let verdict = Verdict::new(ctx, endpoint, Direction::Egress, reason, TC_ACT_SHOT);
    verdict.after(DropReason::ForwardedLocal).hand_over(ctx)
}

#[inline(always)]
fn send(ctx: &TcContext, told: &Told) {
    // The sender checked for room (`wharf_ebpf::event`).
    let Some(mut entry) = EVENTS.reserve(0) else { return };
    let event = entry.as_mut_ptr();
    // SAFETY: the ring's memory for an event; the context.
    unsafe {
        (*event).timestamp_ns = bpf_ktime_get_ns();
        (*event).epoch = told.words.epoch();
        (*event).identity = told.words.0[3];
        (*event).kind = told.kind;
        (*event).reason = told.reason;
        (*event).direction = told.direction;
        (*event).endpoint_id = told.words.sender();
        (*event).length = ctx.len();
        describe(ctx.as_ptr().cast(), event);
    }
    entry.submit(0);
}

const _: () = {
    assert!(offset_of!(Event, destination) == offset_of!(Event, source) + 16);
    assert!(offset_of!(Event, destination_port) == offset_of!(Event, source_port) + 2);
    assert!(offset_of!(Event, source).is_multiple_of(8) && offset_of!(Event, source_port).is_multiple_of(4));
};

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

/// Uses a helper: it also reads non-linear data, never moves the packet, and leaves zeros past its end.
///
/// `event`: an event's memory.
#[inline(always)]
unsafe fn describe(skb: *mut __sk_buff, event: *mut Event) {
    // SAFETY: the function's contract; destinations have the given length.
    unsafe {
        let source: *mut u64 = (&raw mut (*event).source).cast();
        // Volatile: plain stores become a call of a byte-wise `memset`.
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
                // Later fragments have no ports.
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
                for _ in 0..EXTENSIONS {
                    if !is_extension(next, true) {
                        break;
                    }
                    let mut header = 0_u32;
                    if !load(skb, offset, (&raw mut header).cast(), 4) {
                        break;
                    }
                    let header = u32::from_be(header);
                    if next == FRAGMENT {
                        later_fragment = header & 0xfff8 != 0;
                    }
                    offset += extension_bytes(next, header >> 16 & 0xff);
                    next = (header >> 24) as u8;
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
/// `to`: two writable words.
#[inline(always)]
unsafe fn mapped(to: *mut u64, address: u32) {
    // SAFETY: the caller's contract.
    unsafe { to.add(1).write(u64::from(0xffff_u32.to_be()) | u64::from(address) << 32) }
}

/// False, and zeros, past the packet's end.
///
/// `to`: `bytes` writable bytes.
#[inline(always)]
unsafe fn load(skb: *mut __sk_buff, offset: u32, to: *mut u8, bytes: u32) -> bool {
    // SAFETY: the caller's contract.
    unsafe { bpf_skb_load_bytes(skb.cast(), offset, to.cast(), bytes) == 0 }
}
