//! What the node's programs know of the endpoint whose packet they have: a row of `PROFILES`, by the endpoint's id.
//!
//! An endpoint's `deliver` brings the row up to date before each packet that it gives to a program of the node's to judge ([`publish`]): it
//! compares the row with what it knows, and writes only what is new. So a packet is judged by what its endpoint's own program read a
//! moment before. The row of an endpoint that never had such a packet is zero.
//!
//! **Why a row for each endpoint, and not for each CPU.** All that ever writes a row are programs of the endpoint whose row it
//! is: whatever runs between the write and the read, also under PREEMPT_RT, where since Linux 6.18 runs on one CPU may come between each
//! other, and also a packet that interrupts a test run, a packet cannot be judged by another endpoint's addresses. What may mix are the
//! old and the new row of the same endpoint, while user space changes its `CONFIG`; so may the fields of `CONFIG` itself. An id goes to
//! another endpoint only when no program of its old one runs any more.

use core::{
    mem::{offset_of, size_of},
    ptr,
};

use wharf_common::{
    EndpointConfig, EndpointProfile,
    map::{FLAG_CHAINED, FLAG_LOCAL_BY_STACK},
};

use crate::{
    config::{self, Config},
    maps::PROFILES,
    parse::{Ipv6Address, Mac},
};

// `publish` writes the row in words, and the casts below rely on these places.
const _: () = {
    assert!(offset_of!(EndpointProfile, config) == 0);
    assert!(offset_of!(EndpointProfile, container_mac) == size_of::<EndpointConfig>());
    assert!(offset_of!(EndpointProfile, host_mac) == size_of::<EndpointConfig>() + 6);
    assert!(offset_of!(EndpointConfig, ipv4).is_multiple_of(align_of::<u32>()));
    assert!(offset_of!(EndpointConfig, gateway4).is_multiple_of(align_of::<u32>()));
    assert!(offset_of!(EndpointConfig, ipv6).is_multiple_of(align_of::<Ipv6Address>()));
    assert!(offset_of!(EndpointConfig, gateway6).is_multiple_of(align_of::<Ipv6Address>()));
};

/// Words of a row.
const WORDS: usize = size_of::<EndpointProfile>() / size_of::<u64>();

/// One of the words that this endpoint's row should have.
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

/// Brings this endpoint's row up to date. A test packet does so too: what is written is not about the packet.
#[inline(always)]
pub fn publish(config: Config) {
    let Some(row) = PROFILES.get_ptr_mut(config::endpoint_id()) else { return };
    let row = row.cast::<u64>();
    let mut difference = 0;
    for index in 0..WORDS {
        // SAFETY: a map value of so many words from a lookup; it is shared by all CPUs, so words are read and written whole.
        difference |= unsafe { ptr::read_volatile(row.add(index)) } ^ word(config, index);
    }
    // The compiler would make a branch of every word, and the verifier follows both ways of each.
    if core::hint::black_box(difference) != 0 {
        for index in 0..WORDS {
            // SAFETY: as above.
            unsafe { ptr::write_volatile(row.add(index), word(config, index)) };
        }
    }
}

/// An endpoint's row. Every read goes to the map.
#[derive(Clone, Copy)]
pub struct Profile(*const EndpointProfile);

impl Profile {
    /// The row; `None` only for a number that is no endpoint's id.
    #[inline(always)]
    pub fn of(endpoint: u32) -> Option<Self> {
        PROFILES.get_ptr(endpoint).map(Self)
    }

    /// Low half of the epoch of the attachment.
    #[inline(always)]
    pub fn epoch(self) -> u32 {
        // SAFETY: a map value; the pointer came from a lookup and lives as long as the program runs.
        unsafe { (*self.0).config.epoch as u32 }
    }

    /// Host side of the endpoint's veth.
    #[inline(always)]
    pub fn ifindex(self) -> u32 {
        // SAFETY: as in `epoch`.
        unsafe { (*self.0).config.ifindex }
    }

    /// Packets to other endpoints of the node go through its stack.
    #[inline(always)]
    pub fn local_by_stack(self) -> bool {
        // SAFETY: as in `epoch`.
        let flags = unsafe { (*self.0).config.flags };
        flags & FLAG_LOCAL_BY_STACK != 0
    }

    /// Another plugin made the link. Read anew each time: kept, it would be spilled, and the stack is full (see [`Self::owns6`]).
    #[inline(always)]
    pub fn chained(self) -> bool {
        // SAFETY: as in `epoch`.
        let flags = unsafe { ptr::read_volatile(&raw const (*self.0).config.flags) };
        flags & FLAG_CHAINED != 0
    }

    /// The only Ethernet source the container may use.
    #[inline(always)]
    pub fn container_mac(self) -> Mac {
        // SAFETY: as in `epoch`; the place is aligned for Mac (asserted above).
        unsafe { (&raw const (*self.0).container_mac).cast::<Mac>().read() }
    }

    /// What the container takes for the gateway's MAC.
    #[inline(always)]
    pub fn host_mac(self) -> Mac {
        // SAFETY: as in `container_mac`.
        unsafe { (&raw const (*self.0).host_mac).cast::<Mac>().read() }
    }

    /// True when `address` (network byte order) is the endpoint's own; never for an endpoint without IPv4.
    #[inline(always)]
    pub fn owns4(self, address: u32) -> bool {
        // SAFETY: as in `epoch`; the place is aligned for u32 (asserted above).
        let own = unsafe { (&raw const (*self.0).config.ipv4).cast::<u32>().read() };
        address == own && address != 0
    }

    /// True when `address` is the endpoint's own; never for an endpoint without IPv6.
    #[inline(always)]
    pub fn owns6(self, address: Ipv6Address) -> bool {
        // SAFETY: as in `epoch`; the place is aligned for Ipv6Address (asserted above).
        let own = unsafe { (&raw const (*self.0).config.ipv6).cast::<Ipv6Address>().read() };
        // One number each: with four words at hand, the compiler spills them, and kernels before 6.7 count each frame of the stack in
        // steps of 32 bytes.
        core::hint::black_box(address.difference(own)) == 0 && own.bits() != 0
    }

    /// True when `address` (network byte order) is the IPv4 gateway that the endpoint sees; never for one without.
    #[inline(always)]
    pub fn has_gateway4(self, address: u32) -> bool {
        // SAFETY: as in `owns4`.
        let gateway = unsafe { (&raw const (*self.0).config.gateway4).cast::<u32>().read() };
        address == gateway && address != 0
    }

    /// True when `address` is the IPv6 gateway that the endpoint sees; never for one without.
    #[inline(always)]
    pub fn has_gateway6(self, address: Ipv6Address) -> bool {
        // SAFETY: as in `owns6`.
        let gateway = unsafe { (&raw const (*self.0).config.gateway6).cast::<Ipv6Address>().read() };
        address.equals(gateway) && !address.is_unspecified()
    }
}
