//! Types shared by the BPF programs and user space, byte for byte.
//!
//! All are `#[repr(C)]` with explicit padding, so that x86-64 and BPF agree on offsets and map keys have no
//! uninitialised byte. Addresses and ports are in **network byte order**, other integers in host order. A change of a
//! layout, a map's kind, its rows' meaning or a drop reason's number changes [`ABI_VERSION`], part of every pin path:
//! a program never opens another version's map.
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

/// Version of every layout; pins are in `<bpffs>/wharf/v<ABI_VERSION>`.
///
/// | version | change |
/// |---|---|
/// | 1 | the first; user space kept counts of test packets in rows 24 and up of each half of [`map::METRICS`] |
/// | 2 | every row of [`map::METRICS`] is a reason's; programs recognise test packets ([`test_packet`]), count none |
/// | 3 | [`FlowUse`] counts recent flows; [`map::FLOWS_RECENT`], [`map::FRAGMENT_SLOTS`] |
/// | 4 | [`map::PROXY_USE`] |
///
/// With the feature `next-abi`, programs have the next version and another layout of [`map::CONFIG`], for upgrade and
/// downgrade tests. User space reads the version from `abi`.
pub const ABI_VERSION: u32 = if cfg!(feature = "next-abi") { CURRENT_VERSION + 1 } else { CURRENT_VERSION };

const CURRENT_VERSION: u32 = 4;

/// Highest endpoint id; ids start at 1, 0 means "none". Bounds [`map::CALLS`]; twice this bounds [`map::ENDPOINTS`].
pub const MAX_ENDPOINT_ID: u32 = 16_383;

/// Map memory can be copied to and from these types. Only for this crate.
#[cfg(feature = "user")]
macro_rules! pod {
    ($($t:ty),+ $(,)?) => { $(
        // SAFETY: `#[repr(C)]`, no implicit padding (checked by zerocopy's IntoBytes derive), every bit pattern
        // valid.
        unsafe impl aya::Pod for $t {}
    )+ };
}
#[cfg(feature = "user")]
pub(crate) use pod;
