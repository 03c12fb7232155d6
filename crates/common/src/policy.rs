//! Policy tables. `wharf-policy` makes the rows.
//!
//! The address of a packet's other end gives a peer *class* ([`PeerRow`]), the destination port another ([`PortKey`]).
//! They select up to four cells of the endpoint's rule set; [`Choice`] takes the deciding rule. 0 as a class means
//! *any*, as a rule set *accept everything*, as a rule *none*.

/// Value of [`crate::map::IPCACHE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct PeerRow {
    /// Reserved for addresses of no endpoint.
    pub identity: u32,
    /// Peer class.
    pub class: u32,
}

/// Bit of the number of a rule set of egress with a rule that denies: packets to a service that pass have both marks of
/// services.
pub const SET_DENIES: u32 = 1 << 31;

/// Bit of [`PeerRow::identity`]: a service, which the node translates.
pub const PEER_SERVICE: u32 = 1 << 31;

/// Bit of a rule number: accepts by the service's address, not the backend's.
pub const BY_SERVICE: u32 = 1 << 31;

/// With [`BY_SERVICE`]: the sender's rule set has [`SET_DENIES`], so the backend is judged too.
pub const CHECK_BACKEND: u32 = 1 << 30;

/// No rule accepted the packet, but its destination is a service ([`PEER_SERVICE`]).
pub const UNDECIDED: u32 = u32::MAX;

/// `skb->mark` bit for [`UNDECIDED`]: programs of the backend or of the router's link judge the packet; elsewhere, the
/// node's nftables table drops it without [`MARK_BY_SERVICE`]. Kubernetes uses bits 14 and 15, CNI's `portmap` 13.
pub const MARK_UNDECIDED: u32 = 1 << 6;

/// `skb->mark` bit for [`BY_SERVICE`]: the sender's isolation does not drop the packet.
pub const MARK_BY_SERVICE: u32 = 1 << 11;

/// `skb->mark` bit: the node delivers the packet locally. Set by programs for redirected flows, by the nftables table
/// for answers to the proxy.
pub const MARK_TO_PROXY: u32 = 1 << 7;
/// `skb->mark` bit of the proxy's packets to the server: the client's egress rules were applied.
pub const MARK_PROXIED_EGRESS: u32 = 1 << 8;
/// Like [`MARK_PROXIED_EGRESS`], for the server's ingress rules.
pub const MARK_PROXIED_INGRESS: u32 = 1 << 9;
/// With [`MARK_TO_PROXY`]: a program turned the packet back, after connection tracking.
pub const MARK_TURNED: u32 = 1 << 10;
/// With [`MARK_TO_PROXY`], for a listening socket (TCP until the connection's socket is known, every UDP packet): shift
/// of the port, network byte order. The node's nftables table clears it before routing, or drops the packet.
pub const MARK_PORT_SHIFT: u32 = 16;

/// The node's [`PeerRow::identity`]: its probes pass under any policy.
pub const IDENTITY_NODE: u32 = 1;

/// Key of [`crate::map::POLICY_PORTS`] after the prefix length.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct PortKey {
    /// Rule set.
    pub set: u32,
    /// IANA number.
    pub protocol: u8,
    /// Zero.
    pub _pad: u8,
    /// Destination port (TCP, UDP, SCTP) or ICMP type, network byte order.
    pub port: [u8; 2],
}

/// [`CellKey::port`] without a transport header; its cells [`DENY`] at the rank of the first rule with ports.
pub const PORT_UNKNOWN: u32 = u32::MAX;

/// Bits of a [`PortKey`] before the port.
pub const PORT_PREFIX_BITS: u32 = 48;

/// Key of [`crate::map::POLICY_CELLS`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct CellKey {
    /// Rule set.
    pub set: u32,
    /// Peer class.
    pub class: u32,
    /// Port class.
    pub port: u32,
}

/// Rank of no rule.
pub const NO_RANK: u32 = u32::MAX;

/// Passes the packet.
pub const ACCEPT: u32 = 0;
/// Drops the packet.
pub const DENY: u32 = 1;
/// An admin-tier rule defers to later tiers.
pub const PASS: u32 = 2;

/// The flow (TCP or UDP) goes to the proxy on loopback.
pub const REDIRECT: u32 = 3;
/// Mask of a ruling's kind.
pub const RULING: u32 = 0b11;
/// With [`REDIRECT`]: the flow passes without the proxy.
pub const REDIRECT_OPEN: u32 = 1 << 2;
/// Shift of a [`REDIRECT`]'s port, host byte order.
pub const REDIRECT_PORT_SHIFT: u32 = 16;

/// Ruling for a redirect; `open`: with [`REDIRECT_OPEN`].
#[inline(always)]
#[must_use]
pub const fn redirect(port: u16, open: bool) -> u32 {
    REDIRECT | if open { REDIRECT_OPEN } else { 0 } | (port as u32) << REDIRECT_PORT_SHIFT
}

/// Inverse of [`redirect`]; `None` for other rulings.
#[inline(always)]
#[must_use]
pub const fn redirected(ruling: u32) -> Option<(u16, bool)> {
    let (port, open) = ((ruling >> REDIRECT_PORT_SHIFT) as u16, ruling & REDIRECT_OPEN != 0);
    if port != 0 && ruling == redirect(port, open) { Some((port, open)) } else { None }
}

/// A rule in a cell.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct Hit {
    /// Lower first; [`NO_RANK`] for no rule.
    pub rank: u32,
    /// Rule number; zero for isolation.
    pub rule: u32,
    /// [`ACCEPT`], [`DENY`], [`PASS`], or a result of [`redirect`].
    pub ruling: u32,
}

impl Hit {
    pub const NONE: Self = Self { rank: NO_RANK, rule: 0, ruling: ACCEPT };
}

/// Value of [`crate::map::POLICY_CELLS`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct CellRow {
    /// Of the admin tier.
    pub admin: Hit,
    /// Of later tiers; never [`PASS`].
    pub rest: Hit,
    /// Judged packets: a flow's first, all of rejected flows, the next after a policy change.
    pub packets: u64,
    /// Ethernet header included.
    pub bytes: u64,
}

/// The best rules of several cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    admin: Hit,
    rest: Hit,
}

impl Choice {
    /// No cell.
    pub const NONE: Self = Self { admin: Hit::NONE, rest: Hit::NONE };

    /// Adds a cell.
    #[inline(always)]
    pub const fn add(&mut self, admin: Hit, rest: Hit) {
        if admin.rank < self.admin.rank {
            self.admin = admin;
        }
        if rest.rank < self.rest.rank {
            self.rest = rest;
        }
    }

    /// [`Hit::NONE`], which passes the packet, if no rule decides.
    #[inline(always)]
    #[must_use]
    pub const fn decides(&self) -> Hit {
        if self.admin.rank != NO_RANK && self.admin.ruling != PASS { self.admin } else { self.rest }
    }
}

/// Value of [`crate::map::POLICY_SETS`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct SetsRow {
    /// To the endpoint.
    pub ingress: u32,
    /// From the endpoint.
    pub egress: u32,
}

/// Value of [`crate::map::POLICY_STATE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct PolicyState {
    /// Increments after each change of other tables that is not in [`crate::map::ADDRESS_GENERATIONS`]. Zero before the
    /// first policy.
    pub generation: u32,
    /// `POLICY_*` bits.
    pub flags: u32,
}

/// [`PolicyState::flags`]: flows used by both ends survive a change that rejects them.
pub const POLICY_KEEPS_FLOWS: u32 = 1 << 0;
/// [`PolicyState::flags`]: denied packets pass and count in [`CellRow::packets`].
pub const POLICY_AUDITS: u32 = 1 << 1;

#[cfg(feature = "user")]
crate::pod!(PeerRow, PortKey, CellKey, Hit, CellRow, SetsRow, PolicyState);

const _: () = {
    use core::mem::size_of;
    assert!(UNDECIDED & BY_SERVICE != 0);
    assert!(size_of::<PeerRow>() == 8);
    assert!(size_of::<PortKey>() == 8);
    assert!(size_of::<CellKey>() == 12);
    assert!(size_of::<CellRow>() == 40);
    assert!(size_of::<SetsRow>() == 8);
    assert!(size_of::<PolicyState>() == 8);
};
