//! Parsers of untrusted bytes, callable without a kernel, for the fuzz targets. They accept any bytes.

use std::{collections::HashSet, io, net::IpAddr};

use wharf_common::{EndpointKey, EndpointRow};
use wharf_core::kernel::EndpointTableRow;
use zerocopy::FromBytes as _;

use crate::{bpf::rows::table_row, netlink};

/// Parses a netlink datagram: per message the sequence number and the content (debug notation; `None` if unreadable).
///
/// # Errors
/// The datagram does not end where its messages do.
pub fn netlink_datagram(datagram: &[u8]) -> io::Result<Vec<(u32, Option<String>)>> {
    netlink::batch::in_words(datagram)
}

/// Whether a ctnetlink row has one of the addresses. `None` without a readable row.
#[must_use]
pub fn conntrack_message(message: &[u8], wanted: &HashSet<IpAddr>) -> Option<bool> {
    netlink::conntrack::is_of(message, wanted)
}

/// Parses a sock_diag message. Returns the client of a proxy's connection, `None` for any other socket or bytes.
#[must_use]
pub fn socket_message(message: &[u8]) -> Option<IpAddr> {
    netlink::sockets::client_of(message).ok().flatten()
}

/// Parses a message with every nf_tables parser. Returns whether any accepts it.
#[must_use]
pub fn nft_message(message: &[u8]) -> bool {
    netlink::nft::is_readable(message)
}

/// Parses a row of the endpoint table. `None` for bytes of another length.
#[must_use]
pub fn endpoint_row(key: &[u8], value: &[u8]) -> Option<EndpointTableRow> {
    let (key, value) = (EndpointKey::read_from_bytes(key).ok()?, EndpointRow::read_from_bytes(value).ok()?);
    Some(table_row(&key, &value))
}
