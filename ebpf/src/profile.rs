//! The endpoint's data for node programs: rows of `PROFILES` by endpoint id. `deliver` updates a differing row before
//! it calls a node program ([`publish`]).
//!
//! Not per CPU: runs on one CPU can interleave (PREEMPT_RT since Linux 6.18; a packet during a test run), and no packet
//! may be judged by another endpoint's addresses. Values can mix while user space changes `CONFIG`. An id is reused
//! only when its old endpoint's programs have ended.

use core::{
    mem::{offset_of, size_of},
    ptr,
};

use wharf_common::{
    EndpointConfig, EndpointProfile,
    map::{FLAG_CHAINED, FLAG_LOCAL_BY_STACK, FLAG_SOURCES},
};

use crate::{
    config::{self, Config},
    maps::PROFILES,
    parse::{Ipv6Address, Mac},
};

const _: () = {
    assert!(offset_of!(EndpointProfile, config) == 0);
    assert!(offset_of!(EndpointProfile, container_mac) == size_of::<EndpointConfig>());
    assert!(offset_of!(EndpointProfile, host_mac) == size_of::<EndpointConfig>() + 6);
    assert!(offset_of!(EndpointConfig, ipv4).is_multiple_of(align_of::<u32>()));
    assert!(offset_of!(EndpointConfig, gateway4).is_multiple_of(align_of::<u32>()));
    assert!(offset_of!(EndpointConfig, ipv6).is_multiple_of(align_of::<Ipv6Address>()));
    assert!(offset_of!(EndpointConfig, gateway6).is_multiple_of(align_of::<Ipv6Address>()));
};

const WORDS: usize = size_of::<EndpointProfile>() / size_of::<u64>();

#[inline(always)]
fn word(config: Config, index: usize) -> u64 {
    const FIRST_MACS: usize = Config::WORDS;
    const LAST_MAC: usize = Config::WORDS + 1;
    match index {
        FIRST_MACS => u64::from(config::macs(0)) | u64::from(config::macs(1)) << 32,
        LAST_MAC => u64::from(config::macs(2)),
        _ => config.word(index),
    }
}

/// Test packets too: the data is not the packet's.
#[inline(always)]
pub fn publish(config: Config) {
    let Some(row) = PROFILES.get_ptr_mut(config::endpoint_id()) else { return };
    let row = row.cast::<u64>();
    let mut difference = 0;
    for index in 0..WORDS {
        // SAFETY: a map value of `WORDS` words, accessed whole.
        difference |= unsafe { ptr::read_volatile(row.add(index)) } ^ word(config, index);
    }
    // Else the compiler branches per word, and the verifier follows both ways.
    if core::hint::black_box(difference) != 0 {
        for index in 0..WORDS {
            // SAFETY: as above.
            unsafe { ptr::write_volatile(row.add(index), word(config, index)) };
        }
    }
}

/// Read from the map each time.
#[derive(Clone, Copy)]
pub struct Profile(*const EndpointProfile);

impl Profile {
    /// `None` only for an invalid id.
    #[inline(always)]
    pub fn of(endpoint: u32) -> Option<Self> {
        PROFILES.get_ptr(endpoint).map(Self)
    }

    /// Low half of the epoch.
    #[inline(always)]
    pub fn epoch(self) -> u32 {
        // SAFETY: a map value, valid for this run.
        unsafe { (*self.0).config.epoch as u32 }
    }

    #[inline(always)]
    pub fn ifindex(self) -> u32 {
        // SAFETY: as in `epoch`.
        unsafe { (*self.0).config.ifindex }
    }

    #[inline(always)]
    pub fn local_by_stack(self) -> bool {
        // SAFETY: as in `epoch`.
        let flags = unsafe { (*self.0).config.flags };
        flags & FLAG_LOCAL_BY_STACK != 0
    }

    /// Volatile: a kept value is spilled, and the stack is full ([`Self::owns6`]).
    #[inline(always)]
    pub fn chained(self) -> bool {
        // SAFETY: as in `epoch`.
        let flags = unsafe { ptr::read_volatile(&raw const (*self.0).config.flags) };
        flags & FLAG_CHAINED != 0
    }

    /// Volatile: as [`Self::chained`].
    #[inline(always)]
    pub fn has_sources(self) -> bool {
        // SAFETY: as in `epoch`.
        let flags = unsafe { ptr::read_volatile(&raw const (*self.0).config.flags) };
        flags & FLAG_SOURCES != 0
    }

    #[inline(always)]
    pub fn container_mac(self) -> Mac {
        // SAFETY: as in `epoch`; aligned (asserted above).
        unsafe { (&raw const (*self.0).container_mac).cast::<Mac>().read() }
    }

    #[inline(always)]
    pub fn host_mac(self) -> Mac {
        // SAFETY: as in `container_mac`.
        unsafe { (&raw const (*self.0).host_mac).cast::<Mac>().read() }
    }

    /// `address`: network byte order. False without IPv4.
    #[inline(always)]
    pub fn owns4(self, address: u32) -> bool {
        // SAFETY: as in `epoch`; aligned (asserted above).
        let own = unsafe { (&raw const (*self.0).config.ipv4).cast::<u32>().read() };
        address == own && address != 0
    }

    /// False without IPv6.
    #[inline(always)]
    pub fn owns6(self, address: Ipv6Address) -> bool {
        // SAFETY: as in `epoch`; aligned (asserted above).
        let own = unsafe { (&raw const (*self.0).config.ipv6).cast::<Ipv6Address>().read() };
        // Else the compiler spills four words; kernels before 6.7 round each stack frame up to 32 bytes.
        core::hint::black_box(address.difference(own)) == 0 && own.bits() != 0
    }

    /// `address`: network byte order. False without an IPv4 gateway.
    #[inline(always)]
    pub fn has_gateway4(self, address: u32) -> bool {
        // SAFETY: as in `owns4`.
        let gateway = unsafe { (&raw const (*self.0).config.gateway4).cast::<u32>().read() };
        address == gateway && address != 0
    }

    /// False without an IPv6 gateway.
    #[inline(always)]
    pub fn has_gateway6(self, address: Ipv6Address) -> bool {
        // SAFETY: as in `owns6`.
        let gateway = unsafe { (&raw const (*self.0).config.gateway6).cast::<Ipv6Address>().read() };
        address.equals(gateway) && !address.is_unspecified()
    }
}
