//! What the programs know of their endpoint: constants set at load, and the row that user space may change.

use core::{
    mem::{offset_of, size_of},
    ptr,
};

use aya_ebpf::Global;
use wharf_common::{
    Direction, EndpointConfig, EndpointConsts,
    map::{CONFIG_ROW, FLAG_LIVE, FLAG_LOCAL_BY_STACK, FLAG_TRACE, limit_flag},
};

use crate::{maps::CONFIG, parse::Ipv6Address};

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
    assert!(offset_of!(EndpointConsts, container_mac).is_multiple_of(align_of::<u32>()));
    assert!(offset_of!(EndpointConsts, host_mac) == offset_of!(EndpointConsts, container_mac) + 6);
    assert!(limit_flag(Direction::Egress) == limit_flag(Direction::Ingress) << Direction::Egress as u32);
    assert!(offset_of!(EndpointConfig, ipv4).is_multiple_of(align_of::<u32>()));
    assert!(offset_of!(EndpointConfig, ipv6).is_multiple_of(align_of::<Ipv6Address>()));
    assert!(size_of::<EndpointConfig>().is_multiple_of(size_of::<u64>()));
};

/// Reads one field of the constants; volatile, because the loader writes them behind the compiler's back.
macro_rules! constant {
    ($field:ident as $t:ty) => {{
        let consts = (&raw const CONSTS).cast::<EndpointConsts>();
        // SAFETY: `Global` is transparent over the struct, what is read lies inside it and is aligned (asserted above).
        unsafe { ptr::read_volatile((&raw const (*consts).$field).cast::<$t>()) }
    }};
}

/// Endpoint whose programs these are.
#[inline(always)]
pub fn endpoint_id() -> u32 {
    constant!(endpoint_id as u32)
}

/// The only Ethernet source that the container may use, and what the container takes for the gateway's MAC: one of three words, as they
/// lie next to each other.
#[inline(always)]
pub fn macs(index: usize) -> u32 {
    let all = const { offset_of!(EndpointConsts, container_mac) / size_of::<u32>() };
    debug_assert!(index < 3);
    // SAFETY: `Global` is transparent over the struct, of which these are three aligned words (asserted above).
    unsafe { ptr::read_volatile((&raw const CONSTS).cast::<u32>().add(all + index)) }
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
    /// The row; `None` only if the map lacks it, which is not so in this version's map.
    #[inline(always)]
    pub fn load() -> Option<Self> {
        CONFIG.get_ptr(CONFIG_ROW).map(Self)
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

    /// The bandwidth of this [`Direction`], as a number, is limited.
    #[inline(always)]
    pub fn limits(self, direction: u32) -> bool {
        self.flags() & limit_flag(Direction::Ingress) << direction != 0
    }

    /// Packets to other endpoints of the node go through its stack.
    #[inline(always)]
    pub fn local_by_stack(self) -> bool {
        self.flags() & FLAG_LOCAL_BY_STACK != 0
    }

    /// `FLAG_*` bits.
    #[inline(always)]
    pub fn flags(self) -> u32 {
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

    /// The endpoint's IPv6 address; unspecified when it has none.
    #[inline(always)]
    pub fn ipv6(self) -> Ipv6Address {
        // SAFETY: as in `flags`; the place is aligned for Ipv6Address (asserted above).
        unsafe { (&raw const (*self.0).ipv6).cast::<Ipv6Address>().read() }
    }

    /// Number of words of the row.
    pub const WORDS: usize = size_of::<EndpointConfig>() / size_of::<u64>();

    /// One of the row's words.
    #[inline(always)]
    pub fn word(self, index: usize) -> u64 {
        debug_assert!(index < Self::WORDS);
        // SAFETY: as in `flags`; the place is in the row. Volatile: read again rather than kept, which would be more instructions.
        unsafe { ptr::read_volatile(self.0.cast::<u64>().add(index)) }
    }
}
