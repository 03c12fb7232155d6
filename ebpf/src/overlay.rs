//! The object `overlay`: accepts from another node only packets of that node and its containers. Uses no maps
//! or library of the other objects: all state goes with the device.
#![no_std]
#![no_main]

#[path = "whole.rs"]
mod whole;

use core::mem;

use aya_ebpf::{
    bindings::{BPF_F_TUNINFO_IPV6, TC_ACT_SHOT, TC_ACT_UNSPEC, bpf_tunnel_key},
    btf_maps::{LpmTrie, PerCpuArray},
    helpers::{bpf_skb_change_type, bpf_skb_get_tunnel_key},
    macros::{btf_map, classifier},
    programs::TcContext,
};
use wharf_common::{
    Counter,
    overlay::{OVERLAY_DROPS_MAX, OVERLAY_NODES_MAX, OverlayDrop, OverlayRow},
};

/// `EndpointKey` in words: the verifier refuses unaligned writes, into which the compiler joins smaller parts.
type Address = [u64; 2];

#[btf_map]
static OVERLAY_NODES: LpmTrie<Address, OverlayRow, { OVERLAY_NODES_MAX as usize }> = LpmTrie::new();

#[btf_map]
static OVERLAY_DROPS: PerCpuArray<Counter, { OVERLAY_DROPS_MAX as usize }> = PerCpuArray::new();

/// `ETH_P_IP` and `ETH_P_IPV6` of `linux/if_ether.h`, in network byte order.
const IPV4: u32 = 0x0800_u16.to_be() as u32;
const IPV6: u32 = 0x86dd_u16.to_be() as u32;
/// `ETH_HLEN`.
const ETHERNET: usize = 14;
/// RFC 791, RFC 8200.
const SOURCE4: usize = ETHERNET + 12;
const SOURCE6: usize = ETHERNET + 8;
/// `linux/if_packet.h`.
const PACKET_HOST: u32 = 0;
/// Size before Linux 6.0, which newer kernels accept.
const TUNNEL_KEY: u32 = mem::offset_of!(bpf_tunnel_key, __bindgen_anon_3) as u32;

#[classifier]
pub fn from_overlay(ctx: TcContext) -> i32 {
    match judge(&ctx) {
        Ok(()) => {
            // Nodes do not know each other's link-layer addresses.
            // SAFETY: the context.
            unsafe { bpf_skb_change_type(ctx.skb.skb, PACKET_HOST) };
            // To the next filter.
            TC_ACT_UNSPEC
        }
        Err(why) => {
            if let Some(count) = OVERLAY_DROPS.get_ptr_mut(why as u32) {
                // SAFETY: this CPU's value, and the program does not interrupt itself; the context.
                unsafe {
                    (*count).packets += 1;
                    (*count).bytes += u64::from((*ctx.skb.skb).len);
                }
            }
            TC_ACT_SHOT
        }
    }
}

#[inline(always)]
fn judge(ctx: &TcContext) -> Result<(), OverlayDrop> {
    let (vni, outer) = outer(ctx).ok_or(OverlayDrop::Malformed)?;
    let sender = row(outer).filter(|row| row.is_address != 0).ok_or(OverlayDrop::UnknownNode)?;
    // SAFETY: the context.
    let protocol = unsafe { (*ctx.skb.skb).protocol };
    let inner = match protocol {
        IPV4 => ctx.load::<u32>(SOURCE4).map(mapped),
        IPV6 => ctx.load::<Address>(SOURCE6),
        _ => return Err(OverlayDrop::Malformed),
    };
    let inner = inner.map_err(|_| OverlayDrop::Malformed)?;
    if vni != sender.vni {
        return Err(OverlayDrop::Malformed);
    }
    match row(inner) {
        Some(row) if row.node == sender.node => Ok(()),
        _ => Err(OverlayDrop::ForeignSource),
    }
}

/// IPv4, network byte order (RFC 4291, 2.5.5.2).
#[inline(always)]
fn mapped(address: u32) -> Address {
    [0, joined(0xffff_u32.to_be(), address)]
}

/// Memory order, on a little-endian target.
#[inline(always)]
fn joined(first: u32, second: u32) -> u64 {
    u64::from(first) | u64::from(second) << 32
}

/// Aligns the address to 8 bytes.
#[repr(C, align(8))]
struct Tunnel {
    _pad: u32,
    key: bpf_tunnel_key,
}

/// Network identifier and outer source.
#[inline(always)]
fn outer(ctx: &TcContext) -> Option<(u32, Address)> {
    // SAFETY: integers, for which zero is a value.
    let mut tunnel: Tunnel = unsafe { mem::zeroed() };
    let key = &mut tunnel.key;
    // SAFETY: the key has at least that size.
    if unsafe { bpf_skb_get_tunnel_key(ctx.skb.skb, &raw mut *key, TUNNEL_KEY, 0) } == 0 {
        // SAFETY: the kernel wrote an IPv4 address, in host byte order.
        let address = unsafe { key.__bindgen_anon_1.remote_ipv4 };
        return Some((key.tunnel_id, mapped(address.to_be())));
    }
    let flags = u64::from(BPF_F_TUNINFO_IPV6);
    // SAFETY: as above.
    if unsafe { bpf_skb_get_tunnel_key(ctx.skb.skb, &raw mut *key, TUNNEL_KEY, flags) } != 0 {
        return None;
    }
    // SAFETY: the kernel wrote an IPv6 address, in network byte order.
    let [a, b, c, d] = unsafe { key.__bindgen_anon_1.remote_ipv6 };
    Some((key.tunnel_id, [joined(a, b), joined(c, d)]))
}

#[inline(always)]
fn row(address: Address) -> Option<OverlayRow> {
    // SAFETY: a copy; rows are replaced as a whole.
    OVERLAY_NODES.get(whole::Whole::new(address).as_shared()).copied()
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual BSD/GPL\0";

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
