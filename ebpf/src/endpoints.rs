//! Which addresses are local endpoints, and which endpoints have paths through the stack.

use wharf_common::EndpointRow;

use crate::{
    config::{self, Config},
    maps::{ENDPOINTS, STACK_USERS},
    parse::{Ipv6Address, is_zero},
};

/// The row of the local endpoint that has this address.
#[inline(always)]
pub fn endpoint(address: Ipv6Address) -> Option<&'static EndpointRow> {
    // SAFETY: rows are freed after an RCU grace period, so the row outlives this run; user space replaces rows whole.
    unsafe { ENDPOINTS.get(address.as_shared()) }
}

/// 1 when this endpoint has flows with other endpoints that may take the node's stack, else 0.
#[inline(always)]
pub fn uses_stack(config: Config) -> u32 {
    STACK_USERS.get(config::endpoint_id()).map_or(0, |of| is_zero(u64::from(*of as u32 ^ config.epoch() as u32)))
}
