//! Finds the flow of every packet that an endpoint sends or gets from the stack, keeps its row (`wharf_common::flow` has the
//! rules), and decides which way a packet between two endpoints takes.
//!
//! **Replies take the way that the flow came.** A rule of the node's may translate what an endpoint sends (DNAT to a service's
//! backend) so that it reaches another endpoint of the same node; only the stack can translate the replies back. The flow's row
//! has the way; a flow without a row asks [`crate::stack_path`], which no flood of flows makes forget.
//!
//! A packet between two endpoints passes here once, at its sender: the row has both ends. [`wharf_flow`] is part of the programs `egress`
//! and `ingress` and not one of its own: that spares each packet a tail call, and costs the verifier the same again once at a start.

use core::ptr;

use aya_ebpf::{
    bindings::{__sk_buff, BPF_NOEXIST},
    helpers::bpf_ktime_get_coarse_ns,
    programs::TcContext,
};
use wharf_common::{
    Direction, DropReason, FlowRow, FlowTotals, FlowUse, FragmentKey, FragmentRow,
    flow::{FLOW_BY_HIGH, FLOW_BY_STACK, FLOW_REPLIED, FRAGMENT_TICKS, SIGNAL_ACK, SIGNAL_RST, SIGNAL_SYN, TICK_SHIFT},
    map::{FLOWS_PER_TICK, FLOWS_QUOTA},
};
use wharf_ebpf::{
    atomic,
    flow::{Asked, Way},
    maps::{FLOW_TOTALS, FLOW_USE, FLOWS, FLOWS_NEW, FRAGMENTS},
    parse::ETHERNET_BYTES,
};

use crate::{
    packet::{Key, Packet},
    stack_path,
};

/// Bytes of an ICMP error before the packet that it is about (RFC 792, RFC 4443).
const ICMP_ERROR_BYTES: usize = 8;

/// Finds the packet's flow, and with it the packet's way.
///
/// # Errors
/// `LoneFragment`.
#[inline(always)]
pub fn way(ctx: &TcContext, asked: Asked) -> Result<Way, DropReason> {
    let [ids, own_epoch, peer_epoch] = asked.numbers();
    // SAFETY: the context the program was called with.
    let way = unsafe { wharf_flow(ctx.skb.skb, ids, own_epoch, peer_epoch) };
    // The compiler knows what the function may return, the verifier does not.
    match core::hint::black_box(way) {
        DIRECT => Ok(Way::Direct),
        STACK => Ok(Way::Stack),
        _ => Err(DropReason::LoneFragment),
    }
}

const DIRECT: u32 = 0;
const STACK: u32 = 1;
const LONE_FRAGMENT: u32 = 2;

/// [`way`], with [`Asked::numbers`].
///
/// Its name is exported and it takes but the context and numbers, so that the verifier looks at it once, and not again for each
/// way that leads here.
///
/// # Safety
///
/// `skb` is the context of the running program.
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_flow(skb: *mut __sk_buff, ids: u32, own_epoch: u32, peer_epoch: u32) -> u32 {
    match track(&TcContext::new(skb), &Asked::of([ids, own_epoch, peer_epoch])) {
        Ok(Way::Direct) => DIRECT,
        Ok(Way::Stack) => STACK,
        Err(_) => LONE_FRAGMENT,
    }
}

/// The ticks since boot.
#[inline(always)]
fn now() -> u32 {
    // SAFETY: a helper without arguments.
    (unsafe { bpf_ktime_get_coarse_ns() } >> TICK_SHIFT) as u32
}

#[inline(always)]
fn track(ctx: &TcContext, asked: &Asked) -> Result<Way, DropReason> {
    // A packet cut short has no flow; its receiver's stack judges it.
    let Some(mut packet) = Packet::at(ctx, ETHERNET_BYTES) else { return Ok(Way::Direct) };
    if packet.is_first_fragment() {
        remember(asked, &packet);
    } else if packet.is_later_fragment() {
        let first = remembered(asked, &packet)?;
        (packet.source_port, packet.destination_port) = (first.source_port, first.destination_port);
        packet.protocol = first.protocol;
    }
    if packet.is_error(ctx) {
        // It goes the way of the packet that it is about, which its sender received: so it is a packet of the same flow.
        let Some(about) = Packet::at(ctx, packet.transport + ICMP_ERROR_BYTES) else { return Ok(Way::Direct) };
        return Ok(match find(&about.key().0) {
            Some((row, _)) if row.flags & FLOW_BY_STACK != 0 => Way::Stack,
            _ => noted(asked, &about),
        });
    }
    let (key, by_high) = packet.key();
    let ends = Ends::of(asked, by_high);
    let (signals, now) = (packet.signals(ctx), now());
    if let Some((row, table)) = find(&key) {
        let lives = row.seen == now || !row.is_over(key.protocol, now);
        if ends.match_row(row) && lives && !row.is_succeeded_by(signals) {
            return Ok(go_on(ctx, asked, &packet, &key, by_high, signals, row, table, now));
        }
        // A row of other endpoints, or of a flow that is over.
        let _ = FLOWS.remove(key.as_shared());
        let _ = FLOWS_NEW.remove(key.as_shared());
    }
    Ok(begin(ctx, asked, &packet, &key, by_high, signals, now))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Table {
    Established,
    New,
}

/// The flow's row. It may become another flow's while it is used, which the epochs mostly tell; the harm is a time or a flag.
#[inline(always)]
fn find(key: &Key) -> Option<(&'static mut FlowRow, Table)> {
    // SAFETY: a row's memory outlives this run; fields are read and written one by one.
    unsafe {
        match FLOWS.get_ptr_mut(key.as_shared()) {
            Some(row) => Some((&mut *row, Table::Established)),
            None => Some((&mut *FLOWS_NEW.get_ptr_mut(key.as_shared())?, Table::New)),
        }
    }
}

/// The epochs of a packet's flow, as far as they are known at this hook.
struct Ends {
    own: u32,
    /// Zero where the hook does not know the other end: it is elsewhere, or the packet takes the stack to it.
    peer: u32,
    own_is_high: bool,
}

impl Ends {
    #[inline(always)]
    fn of(asked: &Asked, by_high: bool) -> Self {
        let own_is_high = by_high == (asked.direction as u32 == Direction::Egress as u32);
        Self { own: asked.own_epoch, peer: asked.peer.epoch, own_is_high }
    }

    #[inline(always)]
    fn match_row(&self, row: &FlowRow) -> bool {
        let (own, peer) =
            if self.own_is_high { (row.high_epoch, row.low_epoch) } else { (row.low_epoch, row.high_epoch) };
        own == self.own && (self.peer == 0 || peer == self.peer)
    }
}

/// The next packet of a flow that has a row.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "inlined; a struct of the same would only be spelled twice")]
fn go_on(
    ctx: &TcContext,
    asked: &Asked,
    packet: &Packet,
    key: &Key,
    by_high: bool,
    signals: u8,
    row: &mut FlowRow,
    table: Table,
    now: u32,
) -> Way {
    let mut flags = row.flags_after(signals, by_high);
    let from_endpoint = if by_high { row.high_epoch } else { row.low_epoch } != 0;
    if asked.direction as u32 == Direction::Ingress as u32 && from_endpoint && flags & FLOW_BY_STACK == 0 {
        // The stack brought what an endpoint sent.
        if let Some(sender) = stack_path::sender(ctx, packet.source) {
            flags |= FLOW_BY_STACK;
            if !asked.local_by_stack {
                stack_path::note(packet, sender, asked.own);
            }
        }
    } else if flags & FLOW_BY_STACK == 0 && noted(asked, packet) == Way::Stack {
        // Another flow of the pair came through the stack meanwhile: the node's connection tracking must know this one, too.
        flags |= FLOW_BY_STACK;
    }
    // Written only when something changed: CPUs that share the row would otherwise pass its memory to and fro.
    // SAFETY: fields of a map value, written whole.
    unsafe {
        if row.seen != now {
            ptr::write_volatile(&raw mut row.seen, now);
        }
        if row.flags != flags {
            ptr::write_volatile(&raw mut row.flags, flags);
        }
    }
    let by_owner = by_high == (flags & FLOW_BY_HIGH != 0);
    if table == Table::New && flags & FLOW_REPLIED != 0 && by_owner {
        establish(key, FlowRow { flags, seen: now, ..*row });
    }
    if flags & FLOW_BY_STACK != 0 { Way::Stack } else { Way::Direct }
}

/// Moves a flow to the table from which nothing is evicted. It stays where it is when its endpoint has its quota, or there is no
/// room.
#[inline(always)]
fn establish(key: &Key, row: FlowRow) {
    let Some(used) = used_by(u32::from(row.owner)) else { return };
    // SAFETY: a map value; CPUs that race for the last place may take one each.
    if unsafe { ptr::read_volatile(&raw const (*used).rows) } >= FLOWS_QUOTA {
        return total(|totals| &raw mut totals.over_quota);
    }
    match FLOWS.insert(key.as_shared(), row, u64::from(BPF_NOEXIST)) {
        // SAFETY: as above; added to atomically.
        Ok(()) => unsafe { atomic::increment(&raw mut (*used).rows) },
        // Another CPU was faster with the same flow.
        Err(EEXIST) => {}
        Err(_) => return total(|totals| &raw mut totals.no_room),
    }
    let _ = FLOWS_NEW.remove(key.as_shared()); // the LRU may have evicted the row
}

/// `EEXIST` of errno.h, as helpers return it.
const EEXIST: i32 = -17;

/// The first packet of a flow, or one whose row is gone, is over or was of endpoints that are gone.
#[inline(always)]
fn begin(ctx: &TcContext, asked: &Asked, packet: &Packet, key: &Key, by_high: bool, signals: u8, now: u32) -> Way {
    let egress = asked.direction as u32 == Direction::Egress as u32;
    let sender = if egress { None } else { stack_path::sender(ctx, packet.source) };
    let (way, peer, peer_epoch) = match sender {
        Some(sender) => {
            if !asked.local_by_stack {
                stack_path::note(packet, sender, asked.own);
            }
            (Way::Stack, sender.endpoint_id, sender.epoch as u32)
        }
        None => {
            let way = if egress { noted(asked, packet) } else { Way::Direct };
            (way, asked.peer.endpoint_id, asked.peer.epoch)
        }
    };
    if signals & SIGNAL_RST != 0 || signals & (SIGNAL_SYN | SIGNAL_ACK) == SIGNAL_SYN | SIGNAL_ACK {
        // It ends a flow that is not known, or answers an opening that nobody sent or that got no row. Whoever goes on after the
        // answer begins the flow; a forged answer begins none, in nobody's name.
        return way;
    }
    let owner = if egress || peer == 0 { asked.own } else { peer };
    if !may_begin(owner, now) {
        total(|totals| &raw mut totals.untracked);
        return way;
    }
    let own_is_high = by_high == egress;
    let (low_epoch, high_epoch) =
        if own_is_high { (peer_epoch, asked.own_epoch) } else { (asked.own_epoch, peer_epoch) };
    let direction = if by_high { FLOW_BY_HIGH } else { 0 };
    let by_stack = if way == Way::Stack { FLOW_BY_STACK } else { 0 };
    let flags = direction | by_stack;
    let mut row = FlowRow { seen: now, low_epoch, high_epoch, flags, owner: owner as u16, generation: 0, rule: 0 };
    row.flags = row.flags_after(signals, by_high);
    // Of two CPUs that begin one flow, the first tells who began it. Else this fails only without memory: the LRU evicts.
    let _ = FLOWS_NEW.insert(key.as_shared(), row, u64::from(BPF_NOEXIST));
    way
}

/// The way of a packet to another endpoint, as it is noted for the pair.
#[inline(always)]
fn noted(asked: &Asked, packet: &Packet) -> Way {
    let noted = asked.peer.endpoint_id != 0 && stack_path::is_noted(asked, packet);
    if noted { Way::Stack } else { Way::Direct }
}

#[inline(always)]
fn used_by(endpoint: u32) -> Option<*mut FlowUse> {
    FLOW_USE.get_ptr_mut(endpoint)
}

/// Takes one of the flows that an endpoint may begin in this tick.
#[inline(always)]
fn may_begin(endpoint: u32, now: u32) -> bool {
    let Some(used) = used_by(endpoint) else { return false };
    // SAFETY: a map value, shared by all CPUs: words are read and written whole, and added to atomically. CPUs that meet at
    // the tick's end may each take some flows too many.
    unsafe {
        if ptr::read_volatile(&raw const (*used).tick) != now {
            ptr::write_volatile(&raw mut (*used).tick, now);
            ptr::write_volatile(&raw mut (*used).begun, 0);
        }
        if ptr::read_volatile(&raw const (*used).begun) >= FLOWS_PER_TICK {
            return false;
        }
        atomic::increment(&raw mut (*used).begun);
    }
    true
}

/// Adds one to a total.
#[inline(always)]
fn total(which: impl FnOnce(&mut FlowTotals) -> *mut u64) {
    if let Some(totals) = FLOW_TOTALS.get_ptr_mut(0) {
        // SAFETY: a map value, added to atomically.
        unsafe {
            atomic::increment(which(&mut *totals));
        }
    }
}

#[inline(always)]
fn fragment_key(asked: &Asked, packet: &Packet) -> FragmentKey {
    FragmentKey {
        source: *packet.source.as_shared(),
        destination: *packet.destination.as_shared(),
        identification: packet.identification,
        endpoint: asked.own as u16,
        direction: asked.direction as u8,
        protocol: packet.identified_by,
    }
}

/// Keeps what only the first fragment shows. Without room the later ones are drops.
#[inline(always)]
fn remember(asked: &Asked, packet: &Packet) {
    let Packet { source_port, destination_port, protocol, .. } = *packet;
    let row = FragmentRow { source_port, destination_port, seen: now(), epoch: asked.own_epoch, protocol, pad: [0; 3] };
    let _ = FRAGMENTS.insert(fragment_key(asked, packet), row, 0);
}

/// What the first fragment showed.
#[inline(always)]
fn remembered<'a>(asked: &Asked, packet: &Packet) -> Result<&'a FragmentRow, DropReason> {
    // SAFETY: the row's memory outlives this run; another packet's ports are as good as none.
    let row = unsafe { FRAGMENTS.get(fragment_key(asked, packet)) };
    match row {
        Some(row) if row.epoch == asked.own_epoch && now().wrapping_sub(row.seen) <= FRAGMENT_TICKS => Ok(row),
        _ => Err(DropReason::LoneFragment),
    }
}
