//! Policy tables: keys, values, and the choice among matching rules. `wharf-policy` makes the rows.
//!
//! A packet's *peer* is its other end, seen from one endpoint. The peer's address gives a *class* ([`PeerRow`]), the
//! destination port another ([`PortKey`]). They select up to four cells of the endpoint's rule set, from which a
//! [`Choice`] takes the deciding rule. 0 as a class means *any*, as a rule set *accept everything*, as a rule *none*.

/// Value of [`crate::map::IPCACHE`]: the peer behind the addresses of a prefix.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct PeerRow {
    /// Security identity; reserved for addresses of no endpoint.
    pub identity: u32,
    /// Peer class.
    pub class: u32,
}

/// Bit of [`PeerRow::identity`]: a service, which the node translates to endpoints. A deny of the sender's rules is
/// decided only afterwards.
pub const PEER_SERVICE: u32 = 1 << 31;

/// Bit of a rule number: accepts by a service address ([`PEER_SERVICE`]), which stands for the backends.
pub const BY_SERVICE: u32 = 1 << 31;

/// As a rule: no rule accepted the packet, but its destination is a service ([`PEER_SERVICE`]).
pub const UNDECIDED: u32 = u32::MAX;

/// `skb->mark` bit for [`UNDECIDED`]. The backend endpoint's programs judge the packet; the node's nftables table
/// drops it if it goes elsewhere. Not used by Kubernetes (14, 15) or CNI's `portmap` (13).
pub const MARK_UNDECIDED: u32 = 1 << 6;

/// `skb->mark` bit for [`BY_SERVICE`]: at the backend endpoint, the sender's isolation does not drop the packet.
pub const MARK_BY_SERVICE: u32 = 1 << 11;

/// `skb->mark` bit: the node delivers the packet locally for any destination. Set by programs for redirected flows,
/// and by the node's nftables table for answers to the proxy.
pub const MARK_TO_PROXY: u32 = 1 << 7;
/// `skb->mark` bit of the proxy's packets to the server for the client's egress rules. Answers do not have it.
pub const MARK_PROXIED_EGRESS: u32 = 1 << 8;
/// Like [`MARK_PROXIED_EGRESS`], for the server's ingress rules.
pub const MARK_PROXIED_INGRESS: u32 = 1 << 9;
/// `skb->mark` bit, with [`MARK_TO_PROXY`]: a program at the path's end turned the packet back, so connection
/// tracking has already seen it.
pub const MARK_TURNED: u32 = 1 << 10;
/// With [`MARK_TO_PROXY`], for the packets of a listening socket (a TCP connection's first, every UDP packet): shift
/// of the port, network byte order. The node's nftables table clears the port before routing, or drops the packet.
pub const MARK_PORT_SHIFT: u32 = 16;

/// [`PeerRow::identity`] of the node, whose packets pass to every endpoint under any policy, for probes.
pub const IDENTITY_NODE: u32 = 1;

/// Key of [`crate::map::POLICY_PORTS`] after the prefix length: [`PORT_PREFIX_BITS`] plus the ports' common bits.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct PortKey {
    /// Rule set.
    pub set: u32,
    /// Protocol number (IANA).
    pub protocol: u8,
    /// Zero.
    pub _pad: u8,
    /// Network byte order: destination port of TCP, UDP and SCTP, or ICMP and ICMPv6 type.
    pub port: [u8; 2],
}

/// [`CellKey::port`] without a found transport header ([`crate::flow::UNKNOWN_TRANSPORT`]). Its cells hold [`DENY`]
/// at the rank of the first rule with ports.
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

/// The rank of no rule.
pub const NO_RANK: u32 = u32::MAX;

/// The packet passes.
pub const ACCEPT: u32 = 0;
/// The packet is dropped.
pub const DENY: u32 = 1;
/// The admin-tier rule defers to later tiers.
pub const PASS: u32 = 2;

/// In the low two bits: the flow (TCP or UDP) goes to the proxy on the node's loopback address. From bit
/// [`REDIRECT_PORT_SHIFT`]: port, host byte order.
pub const REDIRECT: u32 = 3;
/// Mask of the kind of a ruling.
pub const RULING: u32 = 0b11;
/// With [`REDIRECT`]: without the proxy the flow passes.
pub const REDIRECT_OPEN: u32 = 1 << 2;
/// Shift of the port of a [`REDIRECT`].
pub const REDIRECT_PORT_SHIFT: u32 = 16;

/// The ruling for a redirect; `open`: with [`REDIRECT_OPEN`].
#[inline(always)]
#[must_use]
pub const fn redirect(port: u16, open: bool) -> u32 {
    REDIRECT | if open { REDIRECT_OPEN } else { 0 } | (port as u32) << REDIRECT_PORT_SHIFT
}

/// Port and `open` of [`redirect`]'s ruling; `None` for others.
#[inline(always)]
#[must_use]
pub const fn redirected(ruling: u32) -> Option<(u16, bool)> {
    let (port, open) = ((ruling >> REDIRECT_PORT_SHIFT) as u16, ruling & REDIRECT_OPEN != 0);
    if port != 0 && ruling == redirect(port, open) { Some((port, open)) } else { None }
}

/// Rank, number and ruling of a rule.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct Hit {
    /// Order in the rule set, lower first; [`NO_RANK`] for no rule.
    pub rank: u32,
    /// Rule number; zero for isolation, which no rule states.
    pub rule: u32,
    /// [`ACCEPT`], [`DENY`], [`PASS`], or a result of [`redirect`].
    pub ruling: u32,
}

impl Hit {
    /// No rule.
    pub const NONE: Self = Self { rank: NO_RANK, rule: 0, ruling: ACCEPT };
}

/// Value of [`crate::map::POLICY_CELLS`]: best rules of a peer class and a port class.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct CellRow {
    /// The best rule of the admin tier.
    pub admin: Hit,
    /// The best rule of later tiers; never a pass.
    pub rest: Hit,
    /// Packets judged by this row: each flow's first, all of rejected flows, and each flow's next after a policy
    /// change.
    pub packets: u64,
    /// Their bytes, Ethernet header included.
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

    /// [`Hit::NONE`] if no rule decides: the packet passes.
    #[inline(always)]
    #[must_use]
    pub const fn decides(&self) -> Hit {
        if self.admin.rank != NO_RANK && self.admin.ruling != PASS { self.admin } else { self.rest }
    }
}

/// Value of [`crate::map::POLICY_SETS`]: the rule sets of an endpoint.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct SetsRow {
    /// Rule set for packets to the endpoint.
    pub ingress: u32,
    /// Rule set for packets from the endpoint.
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
    /// Increments after each change of the other tables: flows with another number are judged again. Zero before the
    /// first policy.
    pub generation: u32,
    /// `POLICY_*` bits.
    pub flags: u32,
}

/// [`PolicyState::flags`]: flows that both ends use continue after a policy change that would reject them.
pub const POLICY_KEEPS_FLOWS: u32 = 1 << 0;
/// [`PolicyState::flags`]: packets that rules would drop pass, and [`CellRow::packets`] counts them.
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
