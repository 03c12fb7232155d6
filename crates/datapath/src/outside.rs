//! Parsers of untrusted bytes, callable without a kernel, for the fuzz targets.
//!
//! Each function is the parsing half of a kernel query and accepts any bytes.

use std::{collections::HashSet, io, net::IpAddr};

use wharf_common::{EndpointKey, EndpointRow};
use wharf_core::kernel::EndpointTableRow;
use zerocopy::FromBytes as _;

use crate::{bpf::rows::table_row, netlink};

/// A datagram of netlink's: for each message its sequence number, and what it says (in Rust's debug notation; `None`
/// for a message that is left out because it cannot be read).
///
/// # Errors
/// The datagram does not end where its messages do.
pub fn netlink_datagram(datagram: &[u8]) -> io::Result<Vec<(u32, Option<String>)>> {
    netlink::batch::in_words(datagram)
}

/// A message of ctnetlink's: whether one of the addresses occurs in the row that it tells of. `None` when it tells of
/// no row that can be read.
#[must_use]
pub fn conntrack_message(message: &[u8], wanted: &HashSet<IpAddr>) -> Option<bool> {
    netlink::conntrack::is_of(message, wanted)
}

/// A message of sock_diag: the client of the connection that a proxy has with it. None for another socket, and for a message that is no
/// socket's.
#[must_use]
pub fn socket_message(message: &[u8]) -> Option<IpAddr> {
    netlink::sockets::client_of(message).ok().flatten()
}

/// A message of nf_tables about a table, a chain, a rule, a set or elements: read as each of them, and as entries of
/// endpoints. Says whether it can be read as any.
#[must_use]
pub fn nft_message(message: &[u8]) -> bool {
    netlink::nft::is_readable(message)
}

/// A row of the endpoint table, as key and value stand in the map. `None` for bytes of another length.
#[must_use]
pub fn endpoint_row(key: &[u8], value: &[u8]) -> Option<EndpointTableRow> {
    let (key, value) = (EndpointKey::read_from_bytes(key).ok()?, EndpointRow::read_from_bytes(value).ok()?);
    Some(table_row(&key, &value))
}
