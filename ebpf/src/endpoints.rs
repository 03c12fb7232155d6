//! Addresses of local endpoints, and peers of policy.

use wharf_common::{EndpointRow, PeerRow, map::ADDRESS_GENERATIONS_MAX};

use crate::{
    maps::{ADDRESS_GENERATIONS, ENDPOINTS, IPCACHE, POLICY_STATE},
    parse::Ipv6Address,
    whole::Whole,
};

#[inline(always)]
pub fn endpoint(address: Ipv6Address) -> Option<&'static EndpointRow> {
    // SAFETY: rows are freed after an RCU grace period; user space replaces rows whole.
    unsafe { ENDPOINTS.get(address.as_shared()) }
}

/// By longest prefix in `IPCACHE`; with rules, every address has one.
#[inline(always)]
pub fn peer(address: Ipv6Address) -> Option<&'static PeerRow> {
    IPCACHE.get(Whole::new(*address.as_shared()).as_shared())
}

/// Increases with each change of a row about the address. Always there.
#[inline(always)]
pub fn generation(address: Ipv6Address) -> Option<u32> {
    let slot = ((address.words()[1] >> 32) as u32).swap_bytes() & (ADDRESS_GENERATIONS_MAX - 1);
    ADDRESS_GENERATIONS.get(slot).copied()
}

/// Increases with each other change of policy's rows. Always there.
#[inline(always)]
pub fn policy_generation() -> Option<u32> {
    POLICY_STATE.get(0).map(|state| state.generation)
}
