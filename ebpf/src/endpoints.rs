//! Which addresses are local endpoints.

use wharf_common::EndpointRow;

use crate::{maps::ENDPOINTS, parse::Ipv6Address};

/// The row of the local endpoint that has this address.
#[inline(always)]
pub fn endpoint(address: Ipv6Address) -> Option<&'static EndpointRow> {
    // SAFETY: rows are freed after an RCU grace period, so the row outlives this run; user space replaces rows whole.
    unsafe { ENDPOINTS.get(address.as_shared()) }
}
