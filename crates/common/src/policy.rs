//! Policy's tables: keys, values, and how the programs choose among the rules that match. `wharf-policy` makes the rows.
//!
//! A packet's *peer* is its other end, as one of its two endpoints sees it. The peer's address gives a *class*
//! ([`PeerRow`]), the destination's port another one ([`PortKey`]), and the two together up to four cells of the endpoint's
//! rule set, from which a [`Choice`] takes the rule that decides. 0 in the place of a class means *any*, in the place of a
//! rule set *accept everything*, and in that of a rule *none*.

/// Value of [`crate::map::IPCACHE`]: what is known of the addresses of a prefix.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct PeerRow {
    /// Security identity; of what is no endpoint a reserved one.
    pub identity: u32,
    /// Peer class.
    pub class: u32,
}

/// Bit of [`PeerRow::identity`]: the node translates the addresses to those of endpoints (a service). What the rules of a sender deny
/// there is not decided before that.
pub const PEER_SERVICE: u32 = 1 << 31;

/// Bit of the number of a rule: it accepts by the address of a service ([`PEER_SERVICE`]), which stands for the
/// addresses behind it.
pub const BY_SERVICE: u32 = 1 << 31;

/// In the place of a rule: none let the packet pass, because it is to a service ([`PEER_SERVICE`]).
pub const UNDECIDED: u32 = u32::MAX;

/// Bit of a packet's mark (`skb->mark`) that says [`UNDECIDED`]. The programs of the endpoint that the node translates it to judge the packet;
/// the node's nftables table drops one that goes elsewhere. A bit that neither Kubernetes (14, 15) nor CNI's `portmap` (13) takes.
pub const MARK_UNDECIDED: u32 = 1 << 6;

/// Bit of a packet's mark that says [`BY_SERVICE`]: at the endpoint that the node translates it to, the sender's
/// isolation does not drop the packet.
pub const MARK_BY_SERVICE: u32 = 1 << 11;

/// Bit of a packet's mark: the node delivers the packet to a socket of its own, whatever its destination is. The programs set it for
/// packets of a redirected flow, the node's nftables table for answers to what the proxy sent.
pub const MARK_TO_PROXY: u32 = 1 << 7;
/// Bit of the mark of what the proxy sends on after it has taken a flow that the egress rules of the client redirect. Its answers do not have it.
pub const MARK_PROXIED_EGRESS: u32 = 1 << 8;
/// As [`MARK_PROXIED_EGRESS`], where the ingress rules of the server redirect.
pub const MARK_PROXIED_INGRESS: u32 = 1 << 9;
/// Bit of a packet's mark, beside [`MARK_TO_PROXY`]: a program at the end of the packet's way turned it round, so the node's connection
/// tracking has seen it already.
pub const MARK_TURNED: u32 = 1 << 10;
/// Beside [`MARK_TO_PROXY`], where the packet is to be taken by the socket that listens at a port (the first of a TCP connection, each one of UDP):
/// place of the port in the mark, network byte order. The node's nftables table takes the port out before the packet is routed, or drops it.
pub const MARK_PORT_SHIFT: u32 = 16;

/// [`PeerRow::identity`] of the node itself, whose packets every endpoint receives whatever its policy: its probes.
pub const IDENTITY_NODE: u32 = 1;

/// Key of [`crate::map::POLICY_PORTS`] behind the prefix's length: [`PORT_PREFIX_BITS`] and as many bits as the ports share.
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
    /// Destination port of TCP, UDP and SCTP, type of ICMP and ICMPv6: network byte order.
    pub port: [u8; 2],
}

/// [`CellKey::port`] of a packet whose transport header is not found ([`crate::flow::UNKNOWN_TRANSPORT`]). Its cells
/// hold [`DENY`] at the rank of the first rule about ports.
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

/// A rank that no rule has.
pub const NO_RANK: u32 = u32::MAX;

/// The rule lets the packet pass.
pub const ACCEPT: u32 = 0;
/// The rule drops the packet.
pub const DENY: u32 = 1;
/// The rule, of the admin tier, leaves the packet to the tiers after it.
pub const PASS: u32 = 2;

/// The rule hands the flow to the proxy, in the low two bits; from bit [`REDIRECT_PORT_SHIFT`] on is the port, host byte order, that the proxy
/// listens at on the node's loopback address. Flows of TCP and UDP; of other protocols, no proxy is there.
pub const REDIRECT: u32 = 3;
/// The bits of a ruling that tell which one it is.
pub const RULING: u32 = 0b11;
/// Beside [`REDIRECT`]: without the proxy the flow passes instead of being dropped.
pub const REDIRECT_OPEN: u32 = 1 << 2;
/// Place of the port of a [`REDIRECT`].
pub const REDIRECT_PORT_SHIFT: u32 = 16;

/// The ruling that hands a flow to the proxy's `port`; `open`: without the proxy the flow passes.
#[inline(always)]
#[must_use]
pub const fn redirect(port: u16, open: bool) -> u32 {
    REDIRECT | if open { REDIRECT_OPEN } else { 0 } | (port as u32) << REDIRECT_PORT_SHIFT
}

/// The port and whether the rule is open, of a ruling that [`redirect`] made; `None` for any other one.
#[inline(always)]
#[must_use]
pub const fn redirected(ruling: u32) -> Option<(u16, bool)> {
    let (port, open) = ((ruling >> REDIRECT_PORT_SHIFT) as u16, ruling & REDIRECT_OPEN != 0);
    if port != 0 && ruling == redirect(port, open) { Some((port, open)) } else { None }
}

/// A rule's place, number and ruling.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct Hit {
    /// Place in the rule set's order, lower first; [`NO_RANK`] for no rule.
    pub rank: u32,
    /// Number of the rule; zero for what no rule of a document says (isolation).
    pub rule: u32,
    /// [`ACCEPT`], [`DENY`], [`PASS`], or what [`redirect`] makes.
    pub ruling: u32,
}

impl Hit {
    /// No rule.
    pub const NONE: Self = Self { rank: NO_RANK, rule: 0, ruling: ACCEPT };
}

/// Value of [`crate::map::POLICY_CELLS`]: the best rules of a peer class and a port class.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct CellRow {
    /// Of the admin tier.
    pub admin: Hit,
    /// Of the tiers after it; never a pass.
    pub rest: Hit,
    /// Packets that were judged by this row: the first of each flow, those whose flow the rules did not let pass, and the
    /// next of each flow after a change of policy.
    pub packets: u64,
    /// Their bytes, Ethernet header included.
    pub bytes: u64,
}

/// The best rules of some cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    admin: Hit,
    rest: Hit,
}

impl Choice {
    /// Of no cell.
    pub const NONE: Self = Self { admin: Hit::NONE, rest: Hit::NONE };

    /// One more cell.
    #[inline(always)]
    pub const fn add(&mut self, admin: Hit, rest: Hit) {
        if admin.rank < self.admin.rank {
            self.admin = admin;
        }
        if rest.rank < self.rest.rank {
            self.rest = rest;
        }
    }

    /// The rule that decides, [`Hit::NONE`] where none does: then the packet passes.
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
    /// Of packets to it.
    pub ingress: u32,
    /// Of packets from it.
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
    /// Grows after each change of the other tables: a flow whose row has another one is judged again. Zero before there is
    /// policy.
    pub generation: u32,
    /// `POLICY_*` bits.
    pub flags: u32,
}

/// [`PolicyState::flags`]: flows that both ends use go on when a change of policy would no longer let them begin.
pub const POLICY_KEEPS_FLOWS: u32 = 1 << 0;
/// [`PolicyState::flags`]: what the rules would drop passes, and is counted in [`CellRow::packets`] alone.
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
