//! What the BPF programs and user space share, byte for byte.
//!
//! Everything here is `#[repr(C)]` with explicit padding, so that the two compilers (x86-64 and BPF) agree on every
//! offset and no byte of a map key is ever uninitialised. Addresses and ports are in **network byte order** as they
//! stand in the packet; every other integer is in host order. A change of any layout, of a map's kind, of the meaning of
//! its rows or of a drop reason's number is a change of [`ABI_VERSION`], which is part of every pin path: a program never
//! opens a map that another version laid out.
#![no_std]

#[cfg(feature = "user")]
pub mod abi;
pub mod drop_reason;
pub mod event;
pub mod flow;
pub mod map;
pub mod policy;
pub mod test_packet;

pub use drop_reason::{Direction, DropReason};
pub use event::{Event, EventKind};
pub use flow::{FlowKey, FlowRow, FlowState, FlowTotals, FlowUse, FragmentKey, FragmentRow, FragmentSlot, ProxyUse};
pub use map::{
    Bucket, Counter, EndpointConfig, EndpointConsts, EndpointKey, EndpointProfile, EndpointRow, EventBudget,
    StackPathKey, StackPathRow,
};
pub use policy::{CellKey, CellRow, PeerRow, PolicyState, PortKey, SetsRow};
pub use test_packet::TestReport;

/// Version of every layout in this crate; the directory under `<bpffs>/wharf/` that pins live in is `v<ABI_VERSION>`.
///
/// | version | change |
/// |---|---|
/// | 1 | the first; user space kept counts of test packets in rows 24 and up of each half of [`map::METRICS`] |
/// | 2 | every row of [`map::METRICS`] is a reason's; the programs recognise test packets ([`test_packet`]) and count none |
/// | 3 | [`FlowUse`] counts recent flows; [`map::FLOWS_RECENT`], [`map::FRAGMENT_SLOTS`] |
/// | 4 | [`map::PROXY_USE`] |
///
/// The programs that are built with the feature `next-abi` have the version after, in which [`map::CONFIG`] has another
/// layout. The tests of upgrade and downgrade upgrade to it. User space asks `abi` for the version in use.
pub const ABI_VERSION: u32 = if cfg!(feature = "next-abi") { CURRENT_VERSION + 1 } else { CURRENT_VERSION };

const CURRENT_VERSION: u32 = 4;

/// Highest endpoint id (ids start at 1; 0 means "none"). Bounds [`map::CALLS`] and twice that [`map::ENDPOINTS`].
pub const MAX_ENDPOINT_ID: u32 = 16_383;

/// Capability to copy a type to and from map memory. Implemented only for the types of this crate.
#[cfg(feature = "user")]
macro_rules! pod {
    ($($t:ty),+ $(,)?) => { $(
        // SAFETY: `#[repr(C)]`, no implicit padding (zerocopy's IntoBytes derive refuses it), every bit pattern valid.
        unsafe impl aya::Pod for $t {}
    )+ };
}
#[cfg(feature = "user")]
pub(crate) use pod;
