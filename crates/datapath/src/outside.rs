//! Parsers of untrusted bytes, for the fuzz targets.

use std::{collections::HashSet, io, net::IpAddr};

use wharf_common::{EndpointKey, EndpointRow};
use wharf_core::kernel::EndpointTableRow;
use zerocopy::FromBytes as _;

use crate::{bpf::rows::table_row, netlink};

/// Sequence number and content of a netlink datagram's messages.
///
/// # Errors
/// The datagram does not end where its messages do.
pub fn netlink_datagram(datagram: &[u8]) -> io::Result<Vec<(u32, Option<String>)>> {
    netlink::batch::in_words(datagram)
}

/// Whether a ctnetlink row has one of the addresses; `None` if unreadable.
#[must_use]
pub fn conntrack_message(message: &[u8], wanted: &HashSet<IpAddr>) -> Option<bool> {
    netlink::conntrack::is_of(message, wanted)
}

/// The client in a sock_diag message of a proxy's connection.
#[must_use]
pub fn socket_message(message: &[u8]) -> Option<IpAddr> {
    netlink::sockets::client_of(message).ok().flatten()
}

/// Whether an nf_tables parser accepts the message.
#[must_use]
pub fn nft_message(message: &[u8]) -> bool {
    netlink::nft::is_readable(message)
}

/// A row of the endpoint table. `None` for another length.
#[must_use]
pub fn endpoint_row(key: &[u8], value: &[u8]) -> Option<EndpointTableRow> {
    let (key, value) = (EndpointKey::read_from_bytes(key).ok()?, EndpointRow::read_from_bytes(value).ok()?);
    Some(table_row(&key, &value))
}
