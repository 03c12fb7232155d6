//! Services that endpoints reach through the node's stack (`STACK_PATHS`), for flows without a row.
//!
//! All flows of a pair of endpoints to such a port take the stack: its connection tracking must know every flow that
//! could have the same addresses and ports.

use core::mem::{offset_of, size_of};

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use wharf_common::{StackPathKey, StackPathRow, map::STACK_PATH_PORTS};
use wharf_ebpf::{
    cache,
    endpoints::endpoint,
    maps::{STACK_PATHS, STACK_USERS},
    parse::Ipv6Address,
};

use crate::{flow::now, packet::Packet};

/// [`StackPathKey`] with addresses as words.
#[repr(C)]
#[derive(Clone, Copy)]
struct Key {
    client: Ipv6Address,
    server: Ipv6Address,
    port: u16,
    /// With the next byte, zero: separately zeroed bytes become a call of a loop.
    protocol: u16,
    pad: u32,
}

const _: () = {
    assert!(size_of::<Key>() == size_of::<StackPathKey>());
    assert!(offset_of!(Key, port) == offset_of!(StackPathKey, port));
    assert!(offset_of!(Key, protocol) == offset_of!(StackPathKey, protocol));
};

impl Key {
    /// `reply`: the packet's sender is the server.
    #[inline(always)]
    fn of(packet: &Packet, reply: bool) -> Self {
        let (client, server, port) = if reply {
            (packet.destination, packet.source, packet.source_port)
        } else {
            (packet.source, packet.destination, packet.destination_port)
        };
        Self { client, server, port, protocol: packet.protocol.into(), pad: 0 }
    }

    #[inline(always)]
    fn as_shared(&self) -> &StackPathKey {
        // SAFETY: same size and offsets (asserted above), greater alignment.
        unsafe { &*(&raw const *self).cast() }
    }

    #[inline(always)]
    fn row(&self, client_epoch: u64, server_epoch: u64) -> Option<&'static StackPathRow> {
        // SAFETY: the kernel can reuse the row meanwhile, but epochs never repeat.
        let row = unsafe { STACK_PATHS.get(self.as_shared()) }?;
        (row.client_epoch == client_epoch && row.server_epoch == server_epoch).then_some(row)
    }

    /// Also true if every port is recorded.
    #[inline(always)]
    fn is_noted(mut self, client_epoch: u64, server_epoch: u64) -> bool {
        if self.row(client_epoch, server_epoch).is_some() {
            return true;
        }
        self.port = 0;
        self.row(client_epoch, server_epoch).is_some_and(|pair| pair.ports >= STACK_PATH_PORTS)
    }
}

/// Index of a number's high half in memory.
const HIGH: usize = cfg!(target_endian = "little") as usize;

#[inline(always)]
pub fn has_paths(own: u32, own_epoch: u32) -> bool {
    STACK_USERS.get(own).is_some_and(|user| *user as u32 == own_epoch)
}

/// A path was recorded in this tick or the one before: `judge` may have looked at a flow of this tick before that.
#[inline(always)]
pub fn has_new_path(own: u32, own_epoch: u32, now: u32) -> bool {
    let is_new = |user: u64| user as u32 == own_epoch && now.wrapping_sub((user >> 32) as u32) <= 1;
    STACK_USERS.get(own).is_some_and(|user| is_new(*user))
}

#[inline(always)]
pub fn is_noted(ctx: &TcContext, own: u32, own_epoch: u32, packet: &Packet) -> bool {
    // SAFETY: the context.
    has_paths(own, own_epoch) && unsafe { wharf_path(ctx.skb.skb, packet.ports(), packet.protocol.into(), 0) } != 0
}

/// The stack brought the packet to `server` from another endpoint.
#[inline(always)]
pub fn note(ctx: &TcContext, packet: &Packet, server: u32) {
    // SAFETY: the context.
    unsafe { wharf_path(ctx.skb.skb, packet.ports(), packet.protocol.into(), server) };
}

/// With `server` zero, returns 1 if the path is recorded, else [`note`].
#[unsafe(no_mangle)]
#[inline(never)]
pub unsafe extern "C" fn wharf_path(skb: *mut __sk_buff, ports: u32, protocol: u32, server: u32) -> u64 {
    let ctx = &TcContext::new(skb);
    let Some(packet) = Packet::with(ctx, ports, protocol as u8) else { return 0 };
    if server == 0 {
        return u64::from(is_noted_between(&packet));
    }
    note_between(&packet, server);
    0
}

#[inline(always)]
pub fn is_noted_between(packet: &Packet) -> bool {
    let (Some(sender), Some(receiver)) = (endpoint(packet.source), endpoint(packet.destination)) else {
        return false;
    };
    is_either_noted(packet, sender.epoch, receiver.epoch)
}

#[inline(always)]
fn is_either_noted(packet: &Packet, sender: u64, receiver: u64) -> bool {
    Key::of(packet, false).is_noted(sender, receiver) || Key::of(packet, true).is_noted(receiver, sender)
}

#[inline(always)]
fn note_between(packet: &Packet, server: u32) {
    let (Some(client), Some(receiver)) = (endpoint(packet.source), endpoint(packet.destination)) else { return };
    let (client_epoch, server_epoch, direct) = (client.epoch, receiver.epoch, client.direct);
    if is_either_noted(packet, client_epoch, server_epoch) {
        return;
    }
    let mut row = StackPathRow { client_epoch, server_epoch, ports: 0, _pad: 0 };
    let mut path = Key::of(packet, false);
    // Fails only without memory; the flow's row has the way too.
    let _ = STACK_PATHS.insert(path.as_shared(), row, 0);
    if path.port != 0 {
        path.port = 0;
        row.ports = path.row(client_epoch, server_epoch).map_or(0, |pair| pair.ports) + 1;
        let _ = STACK_PATHS.insert(path.as_shared(), row, 0);
    }
    // After the rows: readers of the epochs find them.
    let mut user = 0;
    let halves = (&raw mut user).cast::<u32>();
    // SAFETY: the halves of `user`. Whole writes: the compiler would compute both numbers in registers.
    unsafe {
        halves.add(HIGH).write_volatile(now());
        halves.add(1 - HIGH).write_volatile(client_epoch as u32);
        let _ = STACK_USERS.set(direct, &user, 0);
        halves.add(1 - HIGH).write_volatile(server_epoch as u32);
        let _ = STACK_USERS.set(server, &user, 0);
    }
    cache::end(direct);
    cache::end(server);
}
