//! Addresses of local endpoints, and peers of policy.

use wharf_common::{EndpointRow, PeerRow};

use crate::{
    maps::{ENDPOINTS, IPCACHE},
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
