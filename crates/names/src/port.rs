//! Published ports.

use std::net::IpAddr;

/// Whether two host IPs of published ports share an address of the node: none is every address, `0.0.0.0` and `::` are those
/// of their family.
#[must_use]
pub fn share_address(one: Option<IpAddr>, other: Option<IpAddr>) -> bool {
    match (one, other) {
        (Some(a), Some(b)) => a.is_ipv4() == b.is_ipv4() && (a == b || a.is_unspecified() || b.is_unspecified()),
        _ => true,
    }
}
