//! Addresses of local endpoints.

use wharf_common::EndpointRow;

use crate::{maps::ENDPOINTS, parse::Ipv6Address};

#[inline(always)]
pub fn endpoint(address: Ipv6Address) -> Option<&'static EndpointRow> {
    // SAFETY: rows are freed after an RCU grace period; user space replaces rows whole.
    unsafe { ENDPOINTS.get(address.as_shared()) }
}
