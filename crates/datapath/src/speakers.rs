//! Descriptions of objects that still use an address.

use std::net::IpAddr;

use wharf_core::{ids::IfIndex, kernel::EndpointTableRow};

pub(crate) fn row(row: &EndpointTableRow) -> String {
    let EndpointTableRow { address, endpoint_id, epoch, ifindex, .. } = row;
    format!("endpoint table row {address} (endpoint {endpoint_id}, epoch {epoch}, interface {ifindex})")
}

pub(crate) fn route(address: IpAddr, ifindex: Option<IfIndex>) -> String {
    match ifindex {
        Some(ifindex) => format!("route to {address} (interface {ifindex})"),
        None => format!("route to {address} (unreachable)"),
    }
}
