//! Which services of an endpoint another endpoint reaches through the node's stack: what answers for flows that have no row.
//!
//! A row of `STACK_PATHS` is about a pair of endpoints, a protocol and a port, not about a flow, so that no flood of flows makes
//! it forgotten. All flows of that pair to that port take the stack, also those that no rule translates: the node's connection
//! tracking then knows every flow that could have the same addresses and ports.

use core::mem::{offset_of, size_of};

use aya_ebpf::programs::TcContext;
use wharf_common::{EndpointRow, StackPathKey, StackPathRow, map::STACK_PATH_PORTS};
use wharf_ebpf::{
    endpoints::endpoint,
    flow::Asked,
    maps::{STACK_PATHS, STACK_USERS},
    parse::Ipv6Address,
};

use crate::packet::Packet;

/// [`StackPathKey`] with addresses as words.
#[repr(C)]
#[derive(Clone, Copy)]
struct Key {
    client: Ipv6Address,
    server: Ipv6Address,
    port: u16,
    protocol: u8,
    pad: [u8; 5],
}

const _: () = {
    assert!(size_of::<Key>() == size_of::<StackPathKey>());
    assert!(offset_of!(Key, port) == offset_of!(StackPathKey, port));
    assert!(offset_of!(Key, protocol) == offset_of!(StackPathKey, protocol));
};

impl Key {
    /// The path whose client sent this packet, or, with `reply`, whose server did.
    #[inline(always)]
    fn of(packet: &Packet, reply: bool) -> Self {
        let (client, server, port) = if reply {
            (packet.destination, packet.source, packet.source_port)
        } else {
            (packet.source, packet.destination, packet.destination_port)
        };
        Self { client, server, port, protocol: packet.protocol, pad: [0; 5] }
    }

    #[inline(always)]
    fn as_shared(&self) -> &StackPathKey {
        // SAFETY: same size and places (asserted above), and the words' alignment is greater.
        unsafe { &*(&raw const *self).cast() }
    }

    /// The row, where it is of the endpoints that have these epochs.
    #[inline(always)]
    fn row(&self, client_epoch: u64, server_epoch: u64) -> Option<&'static StackPathRow> {
        // SAFETY: the row may become another's while it is read. Epochs never repeat, so another's row does not match.
        let row = unsafe { STACK_PATHS.get(self.as_shared()) }?;
        (row.client_epoch == client_epoch && row.server_epoch == server_epoch).then_some(row)
    }

    /// True when the path is noted for the endpoints that have these epochs: its port, or every port of the pair.
    #[inline(always)]
    fn is_noted(mut self, client_epoch: u64, server_epoch: u64) -> bool {
        if self.row(client_epoch, server_epoch).is_some() {
            return true;
        }
        self.port = 0;
        self.row(client_epoch, server_epoch).is_some_and(|pair| pair.ports >= STACK_PATH_PORTS)
    }
}

/// True when the flow of a packet from this endpoint to another one takes the stack. Endpoints without such paths are spared the
/// look-ups.
#[inline(always)]
pub fn is_noted(asked: &Asked, packet: &Packet) -> bool {
    if STACK_USERS.get(asked.own).is_none_or(|epoch| *epoch as u32 != asked.own_epoch) {
        return false;
    }
    let (Some(sender), Some(receiver)) = (endpoint(packet.source), endpoint(packet.destination)) else {
        return false;
    };
    is_either_noted(packet, sender.epoch, receiver.epoch)
}

#[inline(always)]
fn is_either_noted(packet: &Packet, sender: u64, receiver: u64) -> bool {
    Key::of(packet, false).is_noted(sender, receiver) || Key::of(packet, true).is_noted(receiver, sender)
}

/// The endpoint that sent what the stack brought: it has the source address, and the packet came over its link. `None` for what
/// the node itself sends, and for what comes from elsewhere.
#[inline(always)]
pub fn sender(ctx: &TcContext, source: Ipv6Address) -> Option<&'static EndpointRow> {
    // SAFETY: the context the program was called with.
    let came_by = unsafe { (*ctx.skb.skb).ingress_ifindex };
    if came_by == 0 {
        return None;
    }
    endpoint(source).filter(|row| row.ifindex == came_by)
}

/// Notes the path of a packet that the stack brought to `server` from another endpoint.
#[inline(always)]
pub fn note(packet: &Packet, sender: &EndpointRow, server: u32) {
    let Some(server_epoch) = endpoint(packet.destination).map(|row| row.epoch) else { return };
    let client_epoch = sender.epoch;
    if is_either_noted(packet, client_epoch, server_epoch) {
        return;
    }
    let mut row = StackPathRow { client_epoch, server_epoch, ports: 0, _pad: 0 };
    let mut path = Key::of(packet, false);
    // Without room (the map evicts, so only without memory) the flow's own row says the same.
    let _ = STACK_PATHS.insert(path.as_shared(), row, 0);
    if path.port != 0 {
        path.port = 0;
        row.ports = path.row(client_epoch, server_epoch).map_or(0, |pair| pair.ports) + 1;
        let _ = STACK_PATHS.insert(path.as_shared(), row, 0);
    }
    // After the rows: who reads the epoch finds them.
    let _ = STACK_USERS.set(sender.endpoint_id, client_epoch, 0);
    let _ = STACK_USERS.set(server, server_epoch, 0);
}
