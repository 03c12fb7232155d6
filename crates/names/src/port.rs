//! Published ports.

use std::net::IpAddr;

/// Whether two published ports' host IPs overlap. `None` is every address; `0.0.0.0` and `::` are all of their family.
#[must_use]
pub fn share_address(one: Option<IpAddr>, other: Option<IpAddr>) -> bool {
    match (one, other) {
        (Some(a), Some(b)) => a.is_ipv4() == b.is_ipv4() && (a == b || a.is_unspecified() || b.is_unspecified()),
        _ => true,
    }
}
