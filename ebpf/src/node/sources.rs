//! Endpoints of a packet, by address and link: also of addresses in source prefixes (`SOURCES`), which `ENDPOINTS`
//! lacks.
//!
//! A flow's row has the endpoint's epoch and [`FLOW_PREFIX`]. The other end's hook finds the endpoint only as the
//! sender, by the incoming link, or as the row's owner. Otherwise it judges the packet by one end's rules and records
//! nothing; the endpoint's hook judges both.

use core::{
    mem::{offset_of, size_of},
    ptr,
};

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use wharf_common::{
    Direction, FlowRow, MAX_ENDPOINT_ID, SourcePrefix, SourcesRow, flow::FLOW_PREFIX, map::SOURCES_SHARE,
    policy::IDENTITY_NODE,
};
use wharf_ebpf::{
    endpoints::{endpoint, peer},
    flow::Asked,
    maps::SOURCES,
    parse::{Ipv6Address, PROTOCOL_IPV4},
    profile::Profile,
};

use crate::{packet::address, redirect::is_by_node};

const _: () = {
    assert!(offset_of!(SourcesRow, prefixes).is_multiple_of(size_of::<u64>()));
    assert!(size_of::<SourcePrefix>() == WORDS * size_of::<u64>());
    assert!(offset_of!(SourcePrefix, mask) == size_of::<SourcePrefix>() / 2);
};

/// Address words, then mask words.
const WORDS: usize = 4;

/// An endpoint or none: the id; from bit 32, the epoch's low half; flags. A number: even an empty `Option` is on the
/// stack.
#[derive(Clone, Copy)]
pub struct End(u64);

/// Flag of an [`End`] (bits 0 to 13 have the id, the upper 32 bits the low half of the epoch): the endpoint has a slot
/// of `CALLS`, so another endpoint's program reaches it without the stack.
const DIRECT: u64 = 1 << 30;
/// Flag: the address is in a source prefix.
const BY_PREFIX: u64 = 1 << 31;

impl End {
    pub const NONE: Self = Self(0);

    #[inline(always)]
    pub fn is_some(self) -> bool {
        self.0 != 0
    }

    /// Zero for none.
    #[inline(always)]
    pub fn id(self) -> u32 {
        self.0 as u32 & MAX_ENDPOINT_ID
    }

    /// Low half, or zero.
    #[inline(always)]
    pub fn epoch(self) -> u32 {
        (self.0 >> 32) as u32
    }

    #[inline(always)]
    pub fn is_direct(self) -> bool {
        self.0 & DIRECT != 0
    }

    /// [`FLOW_PREFIX`] or zero.
    #[inline(always)]
    pub fn flow_flag(self) -> u16 {
        (self.0 / (BY_PREFIX / u64::from(FLOW_PREFIX))) as u16 & FLOW_PREFIX
    }

    #[inline(always)]
    fn is_in_prefix_of(self, id: u32, epoch: u32) -> bool {
        self.0 == u64::from(id) | BY_PREFIX | u64::from(epoch) << 32
    }
}

/// Argument of [`wharf_end`]; else the source.
const DESTINATION: u32 = 1;

#[inline(always)]
fn end(ctx: &TcContext, ifindex: u32, which: u32) -> End {
    // SAFETY: the context.
    End(unsafe { wharf_end(ctx.skb.skb, ifindex, which) })
}

#[inline(always)]
fn came_by(ctx: &TcContext) -> u32 {
    // SAFETY: the context.
    unsafe { (*ctx.skb.skb).ingress_ifindex }
}

/// Sender of a packet from the stack.
#[inline(always)]
pub fn sender(ctx: &TcContext) -> End {
    end(ctx, came_by(ctx), 0)
}

/// The other end at the hook, except for destinations in source prefixes.
#[inline(always)]
pub fn other(ctx: &TcContext, sends: bool) -> End {
    let (ifindex, which) = if sends { (0, DESTINATION) } else { (came_by(ctx), 0) };
    end(ctx, ifindex, which)
}

/// Endpoint at an end of the packet, as an [`End`]. A source must arrive from the endpoint's link `ifindex` (zero for
/// none); for a chained endpoint, whose link can be a bridge port, any link counts. A destination has the endpoint's
/// address, or is in a source prefix of link `ifindex`.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_end(skb: *mut __sk_buff, ifindex: u32, which: u32) -> u64 {
    let ctx = &TcContext::new(skb);
    let is_source = which & DESTINATION == 0;
    let Some(address) = address(ctx, is_source) else { return 0 };
    if let Some(row) = endpoint(address) {
        if is_source && (ifindex == 0 || row.ifindex != ifindex && row.direct != 0) {
            return 0;
        }
        let direct = if row.direct != 0 { DIRECT } else { 0 };
        return u64::from(row.endpoint_id) | direct | row.epoch << 32;
    }
    // An IPv6 packet's IPv4-mapped address is not that IPv4 address.
    // SAFETY: the context.
    if unsafe { (*skb).protocol } != PROTOCOL_IPV4 && address.is_host_internal() {
        return 0;
    }
    let Some(row) = SOURCES.get_ptr(ifindex) else { return 0 };
    // SAFETY: a map value, freed after an RCU grace period.
    unsafe {
        // The node's addresses can change after the prefixes were checked, and policy accepts them.
        if !contains(row, address) || is_of_node(address) {
            return 0;
        }
        u64::from((*row).endpoint_id) | BY_PREFIX | (*row).epoch << 32
    }
}

#[inline(always)]
unsafe fn contains(row: *const SourcesRow, address: Ipv6Address) -> bool {
    let [first, second] = address.words();
    // SAFETY: the caller's contract.
    let words = unsafe { &raw const (*row).prefixes }.cast::<u64>();
    let mut index = 0;
    while index < SOURCES_SHARE {
        // SAFETY: inside the row; aligned (asserted above).
        let word = |number: usize| unsafe { ptr::read(words.add(WORDS * index + number)) };
        if (first & word(2) ^ word(0)) | (second & word(3) ^ word(1)) == 0 {
            return true;
        }
        // Unrolled, the loop is eight times as long.
        index = core::hint::black_box(index + 1);
    }
    false
}

#[inline(always)]
pub fn has_prefix_with(profile: Profile, address: Ipv6Address) -> bool {
    if !profile.has_sources() {
        return false;
    }
    let Some(row) = SOURCES.get_ptr(profile.ifindex()) else { return false };
    // SAFETY: a map value, freed after an RCU grace period.
    unsafe { (*row).epoch as u32 == profile.epoch() && contains(row, address) }
}

/// Without policy, the node's addresses are unknown.
#[inline(always)]
fn is_of_node(address: Ipv6Address) -> bool {
    peer(address).is_some_and(|peer| peer.identity == IDENTITY_NODE)
}

/// [`FLOW_PREFIX`] if the hook's end is in the endpoint's source prefixes, else zero.
#[inline(always)]
pub fn own_flag(ctx: &TcContext, asked: &Asked) -> u16 {
    let which = if asked.direction as u32 == Direction::Egress as u32 { 0 } else { DESTINATION };
    // SAFETY: the context.
    let by_prefix = unsafe { wharf_source(ctx.skb.skb, asked.own, which) };
    by_prefix as u16 * FLOW_PREFIX
}

#[inline(always)]
pub fn may_send(ctx: &TcContext, own: u32) -> bool {
    // SAFETY: the context.
    unsafe { wharf_source(ctx.skb.skb, own, 0) != 0 }
}

#[inline(always)]
pub fn may_receive(ctx: &TcContext, own: u32) -> bool {
    // SAFETY: the context.
    unsafe { wharf_source(ctx.skb.skb, own, DESTINATION) != 0 }
}

/// 1 if the end is in a source prefix of endpoint `own`; else 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_source(skb: *mut __sk_buff, own: u32, which: u32) -> u32 {
    let Some(profile) = Profile::of(own) else { return 0 };
    if !profile.has_sources() {
        return 0;
    }
    u32::from(end(&TcContext::new(skb), profile.ifindex(), which).is_in_prefix_of(own, profile.epoch()))
}

/// False if the other end of a row with [`FLOW_PREFIX`] is another endpoint or gone; `epoch`: of that end.
#[inline(always)]
pub fn is_same_flow(ctx: &TcContext, asked: &Asked, owner: u16, epoch: u32) -> bool {
    let sends = asked.direction as u32 == Direction::Egress as u32;
    if sends && asked.peer.epoch != 0 {
        return true;
    }
    let receives = if sends { 0 } else { RECEIVES };
    // SAFETY: the context.
    unsafe { wharf_same_flow(ctx.skb.skb, asked.own | receives, owner.into(), epoch) != 0 }
}

/// Flag in the `own` of [`wharf_same_flow`]: the hook's endpoint receives.
const RECEIVES: u32 = 1 << 14;

#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_same_flow(skb: *mut __sk_buff, own: u32, owner: u32, epoch: u32) -> u32 {
    let ctx = &TcContext::new(skb);
    if own & RECEIVES != 0 {
        // The node sends the proxy's packets in the other end's name.
        return u32::from(is_by_node(ctx) || sender(ctx).epoch() == epoch);
    }
    // To an address of no endpoint.
    if owner == own & MAX_ENDPOINT_ID {
        return 1;
    }
    // The owner's programs saw the flow and wrote its profile.
    let Some(profile) = Profile::of(owner) else { return 0 };
    u32::from(end(ctx, profile.ifindex(), DESTINATION).is_in_prefix_of(owner, epoch))
}

/// The destination may be in a source prefix of an endpoint that the hook cannot find.
#[inline(always)]
fn is_to_prefix(asked: &Asked, row: &FlowRow) -> bool {
    let sends = asked.direction as u32 == Direction::Egress as u32;
    row.flags & FLOW_PREFIX != 0 && sends && asked.peer.epoch == 0
}

/// `peer` of [`crate::policy::judge`].
#[inline(always)]
pub fn receiver(asked: &Asked, row: &FlowRow) -> u32 {
    let owner = u32::from(row.owner);
    if is_to_prefix(asked, row) && owner != asked.own { owner } else { asked.peer.endpoint_id }
}

/// The hook judged by one end's rules, although the row has two endpoints.
#[inline(always)]
pub fn is_judged_alone(asked: &Asked, row: &FlowRow) -> bool {
    is_to_prefix(asked, row) && u32::from(row.owner) == asked.own && row.low_epoch != 0 && row.high_epoch != 0
}
