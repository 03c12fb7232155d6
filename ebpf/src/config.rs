//! What the programs know of their endpoint: constants set at load, and the row that user space may change.

use core::{mem::offset_of, ptr};

use aya_ebpf::Global;
use wharf_common::{
    Direction, EndpointConfig, EndpointConsts,
    map::{FLAG_LIVE, FLAG_LOCAL_BY_STACK, FLAG_TRACE, limit_flag},
};

use crate::{
    maps::CONFIG,
    parse::{Ipv6Address, Mac},
};

/// Set by the loader and frozen before the verifier sees it, which then treats every field as a known number.
#[unsafe(no_mangle)]
static CONSTS: Global<EndpointConsts> = Global::new(EndpointConsts {
    abi_version: wharf_common::ABI_VERSION,
    endpoint_id: 0,
    container_mac: [0; 6],
    host_mac: [0; 6],
    debug: 0,
});

// The casts below rely on these places and on the alignment of the structs' first fields.
const _: () = {
    assert!(offset_of!(EndpointConsts, container_mac).is_multiple_of(align_of::<Mac>()));
    assert!(offset_of!(EndpointConsts, host_mac).is_multiple_of(align_of::<Mac>()));
    assert!(offset_of!(EndpointConfig, ipv4).is_multiple_of(align_of::<u32>()));
    assert!(offset_of!(EndpointConfig, gateway4).is_multiple_of(align_of::<u32>()));
    assert!(offset_of!(EndpointConfig, ipv6).is_multiple_of(align_of::<Ipv6Address>()));
    assert!(offset_of!(EndpointConfig, gateway6).is_multiple_of(align_of::<Ipv6Address>()));
};

/// Reads one field of the constants; volatile, because the loader writes them behind the compiler's back.
macro_rules! constant {
    ($field:ident as $t:ty) => {{
        let consts = (&raw const CONSTS).cast::<EndpointConsts>();
        // SAFETY: `Global` is transparent over the struct, the field lies inside it and is aligned (asserted above).
        unsafe { ptr::read_volatile((&raw const (*consts).$field).cast::<$t>()) }
    }};
}

/// Endpoint whose programs these are.
#[inline(always)]
pub fn endpoint_id() -> u32 {
    constant!(endpoint_id as u32)
}

/// The only Ethernet source the container may use.
#[inline(always)]
pub fn container_mac() -> Mac {
    constant!(container_mac as Mac)
}

/// What the container takes for the gateway's MAC.
#[inline(always)]
pub fn host_mac() -> Mac {
    constant!(host_mac as Mac)
}

/// Debug records wanted.
#[cfg(feature = "debug-log")]
#[inline(always)]
pub fn debug() -> bool {
    constant!(debug as u32) != 0
}

/// The endpoint's row of `CONFIG`. Every read goes to the map: user space may replace the row at any time, field after
/// field, with the flags before the addresses, so that a half-written row refuses packets rather than letting one pass.
#[derive(Clone, Copy)]
pub struct Config(*const EndpointConfig);

impl Config {
    /// The row; `None` only if the map has none, which an array of one cannot be.
    #[inline(always)]
    pub fn load() -> Option<Self> {
        CONFIG.get_ptr(0).map(Self)
    }

    /// The endpoint may send and receive.
    #[inline(always)]
    pub fn live(self) -> bool {
        self.flags() & FLAG_LIVE != 0
    }

    /// Forwarded packets are traced.
    #[inline(always)]
    pub fn trace(self) -> bool {
        self.flags() & FLAG_TRACE != 0
    }

    /// [`Self::trace`] as 1 or 0, without a branch.
    #[inline(always)]
    pub fn trace_bit(self) -> u32 {
        (self.flags() & FLAG_TRACE) / FLAG_TRACE
    }

    /// Packets to other endpoints of the node go through its stack.
    #[inline(always)]
    pub fn local_by_stack(self) -> bool {
        self.flags() & FLAG_LOCAL_BY_STACK != 0
    }

    /// The bandwidth of this direction is limited.
    #[inline(always)]
    pub fn limits(self, direction: Direction) -> bool {
        self.flags() & limit_flag(direction) != 0
    }

    #[inline(always)]
    fn flags(self) -> u32 {
        // SAFETY: a map value; the pointer came from a lookup and lives as long as the program runs.
        unsafe { (*self.0).flags }
    }

    /// Epoch of the attachment.
    #[inline(always)]
    pub fn epoch(self) -> u64 {
        // SAFETY: as in `flags`.
        unsafe { (*self.0).epoch }
    }

    /// Security identity.
    #[inline(always)]
    pub fn identity(self) -> u32 {
        // SAFETY: as in `flags`.
        unsafe { (*self.0).identity }
    }

    /// Host side of the endpoint's veth.
    #[inline(always)]
    pub fn ifindex(self) -> u32 {
        // SAFETY: as in `flags`.
        unsafe { (*self.0).ifindex }
    }

    /// The endpoint's IPv4 address, network byte order; zero when it has none.
    #[inline(always)]
    pub fn ipv4(self) -> u32 {
        // SAFETY: as in `flags`; the place is aligned for u32 (asserted above).
        unsafe { (&raw const (*self.0).ipv4).cast::<u32>().read() }
    }

    /// The IPv4 gateway it sees, network byte order; zero when it has none.
    #[inline(always)]
    pub fn gateway4(self) -> u32 {
        // SAFETY: as in `ipv4`.
        unsafe { (&raw const (*self.0).gateway4).cast::<u32>().read() }
    }

    /// The endpoint's IPv6 address; unspecified when it has none.
    #[inline(always)]
    pub fn ipv6(self) -> Ipv6Address {
        // SAFETY: as in `flags`; the place is aligned for Ipv6Address (asserted above).
        unsafe { (&raw const (*self.0).ipv6).cast::<Ipv6Address>().read() }
    }

    /// The IPv6 gateway it sees; unspecified when it has none.
    #[inline(always)]
    pub fn gateway6(self) -> Ipv6Address {
        // SAFETY: as in `ipv6`.
        unsafe { (&raw const (*self.0).gateway6).cast::<Ipv6Address>().read() }
    }

    /// True when `address` (network byte order) is the endpoint's own; never for an endpoint without IPv4.
    #[inline(always)]
    pub fn owns4(self, address: u32) -> bool {
        address == self.ipv4() && address != 0
    }

    /// True when `address` is the endpoint's own; never for an endpoint without IPv6.
    #[inline(always)]
    pub fn owns6(self, address: Ipv6Address) -> bool {
        address.equals(self.ipv6()) && !address.is_unspecified()
    }
}
