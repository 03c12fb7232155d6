//! The endpoint's data for its programs.

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

/// Frozen: the verifier knows every value.
#[unsafe(no_mangle)]
static CONSTS: Global<EndpointConsts> = Global::new(EndpointConsts {
    abi_version: wharf_common::ABI_VERSION,
    endpoint_id: 0,
    container_mac: [0; 6],
    host_mac: [0; 6],
    debug: 0,
});

const _: () = {
    assert!(offset_of!(EndpointConsts, container_mac).is_multiple_of(align_of::<u32>()));
    assert!(offset_of!(EndpointConsts, host_mac) == offset_of!(EndpointConsts, container_mac) + 6);
    assert!(limit_flag(Direction::Egress) == limit_flag(Direction::Ingress) << Direction::Egress as u32);
    assert!(offset_of!(EndpointConfig, ipv4).is_multiple_of(align_of::<u32>()));
    assert!(offset_of!(EndpointConfig, ipv6).is_multiple_of(align_of::<Ipv6Address>()));
    assert!(size_of::<EndpointConfig>().is_multiple_of(size_of::<u64>()));
};

/// Volatile: the loader writes the constant.
macro_rules! constant {
    ($field:ident as $t:ty) => {{
        let consts = (&raw const CONSTS).cast::<EndpointConsts>();
        // SAFETY: `Global` is transparent over the struct; aligned (asserted above).
        unsafe { ptr::read_volatile((&raw const (*consts).$field).cast::<$t>()) }
    }};
}

#[inline(always)]
pub fn endpoint_id() -> u32 {
    constant!(endpoint_id as u32)
}

/// Word 0 to 2 of container MAC and host MAC.
#[inline(always)]
pub fn macs(index: usize) -> u32 {
    let all = const { offset_of!(EndpointConsts, container_mac) / size_of::<u32>() };
    debug_assert!(index < 3);
    // SAFETY: `Global` is transparent over the struct; three aligned words (asserted above).
    unsafe { ptr::read_volatile((&raw const CONSTS).cast::<u32>().add(all + index)) }
}

#[cfg(feature = "debug-log")]
#[inline(always)]
pub fn debug() -> bool {
    constant!(debug as u32) != 0
}

/// Row of `CONFIG`. User space replaces flags before addresses: a half-written row refuses packets.
#[derive(Clone, Copy)]
pub struct Config(*const EndpointConfig);

impl Config {
    /// `None` only without the row.
    #[inline(always)]
    pub fn load() -> Option<Self> {
        CONFIG.get_ptr(CONFIG_ROW).map(Self)
    }

    #[inline(always)]
    pub fn live(self) -> bool {
        self.flags() & FLAG_LIVE != 0
    }

    #[inline(always)]
    pub fn trace(self) -> bool {
        self.flags() & FLAG_TRACE != 0
    }

    #[inline(always)]
    pub fn limits(self, direction: u32) -> bool {
        self.flags() & limit_flag(Direction::Ingress) << direction != 0
    }

    #[inline(always)]
    pub fn local_by_stack(self) -> bool {
        self.flags() & FLAG_LOCAL_BY_STACK != 0
    }

    #[inline(always)]
    pub fn flags(self) -> u32 {
        // SAFETY: a map value, valid for this run.
        unsafe { (*self.0).flags }
    }

    #[inline(always)]
    pub fn epoch(self) -> u64 {
        // SAFETY: as in `flags`.
        unsafe { (*self.0).epoch }
    }

    #[inline(always)]
    pub fn identity(self) -> u32 {
        // SAFETY: as in `flags`.
        unsafe { (*self.0).identity }
    }

    #[inline(always)]
    pub fn ifindex(self) -> u32 {
        // SAFETY: as in `flags`.
        unsafe { (*self.0).ifindex }
    }

    /// Network byte order; zero for none.
    #[inline(always)]
    pub fn ipv4(self) -> u32 {
        // SAFETY: as in `flags`; aligned (asserted above).
        unsafe { (&raw const (*self.0).ipv4).cast::<u32>().read() }
    }

    /// Unspecified for none.
    #[inline(always)]
    pub fn ipv6(self) -> Ipv6Address {
        // SAFETY: as in `flags`; aligned (asserted above).
        unsafe { (&raw const (*self.0).ipv6).cast::<Ipv6Address>().read() }
    }

    pub const WORDS: usize = size_of::<EndpointConfig>() / size_of::<u64>();

    #[inline(always)]
    pub fn word(self, index: usize) -> u64 {
        debug_assert!(index < Self::WORDS);
        // SAFETY: as in `flags`; inside the row. Volatile: rereading takes fewer instructions than keeping.
        unsafe { ptr::read_volatile(self.0.cast::<u64>().add(index)) }
    }
}
