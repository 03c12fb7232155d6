//! What can still speak for an address, in words.

use std::net::IpAddr;

use wharf_core::{ids::IfIndex, kernel::EndpointTableRow};

/// A row of the endpoint table as one of an address's speakers.
pub(crate) fn row(row: &EndpointTableRow) -> String {
    let EndpointTableRow { address, endpoint_id, epoch, ifindex, .. } = row;
    format!("endpoint table row {address} (endpoint {endpoint_id}, epoch {epoch}, interface {ifindex})")
}

/// A route to an address as one of its speakers.
pub(crate) fn route(address: IpAddr, ifindex: Option<IfIndex>) -> String {
    match ifindex {
        Some(ifindex) => format!("route to {address} (interface {ifindex})"),
        None => format!("route to {address} (unreachable)"),
    }
}
