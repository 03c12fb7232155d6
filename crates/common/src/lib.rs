//! Types shared byte for byte by BPF programs and user space.
//!
//! All are `#[repr(C)]` with explicit padding: x86-64 and BPF agree on offsets, and map keys have no uninitialised
//! byte. Addresses and ports are in **network byte order**, other integers in host order. A change of a layout, a map's
//! kind, its rows' meaning or a reason's number changes [`ABI_VERSION`].
#![no_std]

#[cfg(feature = "user")]
pub mod abi;
pub mod drop_reason;
pub mod event;
pub mod flow;
pub mod map;
pub mod overlay;
pub mod policy;
pub mod test_packet;

pub use drop_reason::{Direction, DropReason};
pub use event::{Event, EventKind};
pub use flow::{
    CachedFlow, FlowKey, FlowRow, FlowState, FlowTotals, FlowUse, FragmentKey, FragmentRow, FragmentSlot, ProxyUse,
};
pub use map::{
    Bucket, Counter, EndpointConfig, EndpointConsts, EndpointKey, EndpointProfile, EndpointRow, EventBudget,
    SourcePrefix, SourcesRow, StackPathKey, StackPathRow,
};
pub use policy::{CellKey, CellRow, PeerRow, PolicyState, PortKey, SetsRow};
pub use test_packet::TestReport;

/// Version of every layout. Pins are in `<bpffs>/wharf/v<ABI_VERSION>`: programs open only maps of their version.
///
/// | version | change |
/// |---|---|
/// | 1 | rows 24 and up of each half of [`map::METRICS`] count test packets |
/// | 2 | every row of [`map::METRICS`] is a reason's; test packets ([`test_packet`]) are not counted |
/// | 3 | [`FlowUse`] counts recent flows; [`map::FLOWS_RECENT`], [`map::FRAGMENT_SLOTS`] |
/// | 4 | [`map::PROXY_USE`] |
/// | 5 | [`map::SOURCES`], [`map::FLAG_SOURCES`], [`flow::FLOW_PREFIX`] |
/// | 6 | [`map::ADDRESS_GENERATIONS`]; [`map::IPCACHE`] has four times the rows |
/// | 7 | [`map::FLOW_CACHE`], [`map::FLOW_CACHE_ENDS`]; endpoint programs read the generations of policy |
///
/// The feature `next-abi` builds the next version for upgrade tests, with another layout of [`map::CONFIG`]. User space
/// reads the version from `abi`.
pub const ABI_VERSION: u32 = if cfg!(feature = "next-abi") { CURRENT_VERSION + 1 } else { CURRENT_VERSION };

const CURRENT_VERSION: u32 = 7;

/// Ids start at 1; 0 means "none".
pub const MAX_ENDPOINT_ID: u32 = 16_383;

/// Allows copies of these types from and to map memory.
#[cfg(feature = "user")]
macro_rules! pod {
    ($($t:ty),+ $(,)?) => { $(
        // SAFETY: `#[repr(C)]`, no implicit padding (zerocopy's IntoBytes derive), every bit pattern valid.
        unsafe impl aya::Pod for $t {}
    )+ };
}
#[cfg(feature = "user")]
pub(crate) use pod;
