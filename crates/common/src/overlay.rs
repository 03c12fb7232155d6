//! The overlay's filter. Its maps are not pinned, so [`crate::ABI_VERSION`] does not cover them.

/// LPM trie, prefix of [`crate::EndpointKey`] to [`OverlayRow`]: other nodes' addresses and container networks,
/// disjoint. User space locks inserts; lookups take no lock.
pub const OVERLAY_NODES: &str = "OVERLAY_NODES";
/// Per-CPU array of [`crate::Counter`] by [`OverlayDrop`], without atomics; readers sum.
pub const OVERLAY_DROPS: &str = "OVERLAY_DROPS";
/// The program.
pub const FROM_OVERLAY: &str = "from_overlay";

/// A few per node, for 8,192 nodes; only existing rows use memory.
pub const OVERLAY_NODES_MAX: u32 = 131_072;

/// Value of [`OVERLAY_NODES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct OverlayRow {
    /// Equal for all rows of a node.
    pub node: u32,
    /// VXLAN network identifier of accepted frames, 24 bits.
    pub vni: u32,
    /// 1 for an address of the node, 0 for a network of its containers.
    pub is_address: u32,
}

/// Why a frame is dropped; the row of [`OVERLAY_DROPS`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverlayDrop {
    /// The outer source is no address of another node.
    UnknownNode = 0,
    /// The inner source is not that node's or of its containers.
    ForeignSource = 1,
    /// Truncated IP header, or another network identifier.
    Malformed = 2,
}

impl OverlayDrop {
    /// In the order of their numbers.
    pub const ALL: [Self; 3] = [Self::UnknownNode, Self::ForeignSource, Self::Malformed];

    /// For metrics and messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::UnknownNode => "overlay-unknown-node",
            Self::ForeignSource => "overlay-foreign-source",
            Self::Malformed => "overlay-malformed",
        }
    }
}

/// Rows of [`OVERLAY_DROPS`].
pub const OVERLAY_DROPS_MAX: u32 = OverlayDrop::Malformed as u32 + 1;

#[cfg(feature = "user")]
crate::pod!(OverlayRow);
