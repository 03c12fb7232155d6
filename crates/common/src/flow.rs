//! Flows between an endpoint and whom it talks to: keys and values of the tables, and the rules by which a flow begins, lives
//! and ends. The programs apply the rules to packets; user space reads the rows by the same rules.
//!
//! A flow is two addresses with a port each and a protocol. **Both directions share one row**: the key has the ends in an order of
//! their own ([`FlowKey`]), and [`FLOW_BY_HIGH`] says which of them began.
//!
//! A flow begins as a *recent* flow of its endpoint ([`FLOW_RECENT`]) in [`crate::map::FLOWS`], from which nothing is evicted. It is
//! *kept* there when the end that began it goes on after an answer: a sender of forged or unanswered packets never gets there. When
//! the endpoint has begun [`crate::map::FLOWS_SHARE`] later flows, its oldest recent flow moves to the LRU table
//! [`crate::map::FLOWS_NEW`], from which it can still become a kept one. Rows leave [`crate::map::FLOWS`] by collection,
//! when they are over ([`FlowRow::is_over`]).

use crate::map::EndpointKey;

/// Key of [`crate::map::FLOWS`] and [`crate::map::FLOWS_NEW`]: the two ends of a flow, the lower one first. They are compared as two
/// little-endian words of the address, then by port; the order has no other meaning.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FlowKey {
    /// Address of the low end.
    pub low: EndpointKey,
    /// Address of the high end.
    pub high: EndpointKey,
    /// Port of the low end, network byte order, of TCP, UDP and SCTP. The identifier of an ICMP echo, in both ports. Zero for other
    /// protocols.
    pub low_port: u16,
    /// Port of the high end.
    pub high_port: u16,
    /// Protocol number (IANA), or [`UNKNOWN_TRANSPORT`].
    pub protocol: u8,
    /// Type of an ICMP or ICMPv6 request, and of the answers to it; zero for an echo and for other protocols.
    pub kind: u8,
    /// Zero.
    pub _pad: [u8; 2],
}

impl FlowKey {
    /// A number other than zero by which a collection names the key whose row it removes ([`FlowUse::recent_counted`]).
    /// Few keys share a number; the flow of such a key begins in [`crate::map::FLOWS_NEW`].
    #[inline(always)]
    #[must_use]
    pub const fn mark(&self) -> u32 {
        let [low, high] = [self.low.last_word(), self.high.last_word()];
        let ports = self.low_port as u32 | (self.high_port as u32) << 16;
        (low ^ high.rotate_left(11) ^ ports.rotate_left(17)) | 1
    }
}

/// Value of [`crate::map::FLOWS`] and [`crate::map::FLOWS_NEW`].
///
/// A row counts while the epochs are those of the endpoints that have the addresses, so that an endpoint never inherits the
/// flows of the one that had its address before, and a delete removes none. Programs write single fields without a lock: of two
/// CPUs that set flags of one row at the same time, one may lose; the flow then ends by a longer timeout.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FlowRow {
    /// When the flow's last packet was seen, in [`TICK_SHIFT`] ticks since boot (CLOCK_MONOTONIC).
    pub seen: u32,
    /// Low half of the epoch of the low end's attachment; zero for an end that is no endpoint of this node. A half suffices: an
    /// attachment has to live through four billion others to meet its own number again.
    pub low_epoch: u32,
    /// As `low_epoch`, of the high end.
    pub high_epoch: u32,
    /// `FLOW_*` bits.
    pub flags: u16,
    /// Endpoint that the row is charged to: the one that began the flow, or the one that was reached from outside.
    pub owner: u16,
    /// [`crate::PolicyState::generation`] by which the flow was judged; zero before there is policy, and for a UDP flow that passes by a rule's
    /// leave while the proxy is not there.
    pub generation: u32,
    /// The rule that let it pass, the receiver's before the sender's; zero for none, with
    /// [`crate::policy::BY_SERVICE`], or [`crate::policy::UNDECIDED`].
    pub rule: u32,
}

/// [`FlowRow::flags`]: the high end sent the flow's first packet.
pub const FLOW_BY_HIGH: u16 = 1 << 0;
/// [`FlowRow::flags`]: between two endpoints of the node, the flow takes the node's stack.
pub const FLOW_BY_STACK: u16 = 1 << 1;
/// [`FlowRow::flags`]: the other end answered.
pub const FLOW_REPLIED: u16 = 1 << 2;
/// [`FlowRow::flags`]: the end that began the flow has closed it (FIN, SHUTDOWN).
pub const FLOW_FIN: u16 = 1 << 3;
/// [`FlowRow::flags`]: the other end has closed it.
pub const FLOW_FIN_REPLY: u16 = 1 << 4;
/// [`FlowRow::flags`]: the last packet was a reset (RST, ABORT).
pub const FLOW_RESET: u16 = 1 << 5;

/// [`FlowRow::flags`]: the packets of the end that began the flow go to the proxy, which takes the other end's place. Of a TCP connection this
/// never changes; of a UDP flow each packet of that end sets or clears it, by the rules as they are.
pub const FLOW_PROXIED: u16 = 1 << 6;
/// [`FlowRow::flags`]: the proxy began the flow in the name of the end that has the address; the packets to that end go to the proxy.
pub const FLOW_UPSTREAM: u16 = 1 << 7;
/// [`FlowRow::flags`]: beside [`FLOW_UPSTREAM`], the receiver's own rules redirected what the proxy sends here, so they do not redirect it again.
pub const FLOW_LET_IN: u16 = 1 << 8;
/// [`FlowRow::flags`]: the row is in [`crate::map::FLOWS`] as a recent flow of its endpoint, and not kept.
pub const FLOW_RECENT: u16 = 1 << 9;
/// [`FlowRow::flags`]: beside [`FLOW_PROXIED`], of TCP: the proxy's socket was seen established, so the flow's packets open no connection
/// that [`ProxyUse`] does not count.
pub const FLOW_ADMITTED: u16 = 1 << 10;
/// The flags of a flow that the proxy has an end of.
pub const FLOW_OF_PROXY: u16 = FLOW_PROXIED | FLOW_UPSTREAM | FLOW_LET_IN;

/// A tick is two to the power of this many nanoseconds: 1.07 s. A shift is one instruction, where a division by 10^9 is many.
pub const TICK_SHIFT: u32 = 30;

/// IANA's number of TCP.
pub const TCP: u8 = 6;
/// IANA's number of UDP.
pub const UDP: u8 = 17;
/// IANA's number of SCTP.
pub const SCTP: u8 = 132;
/// IANA's number of ICMP.
pub const ICMP: u8 = 1;
/// IANA's number of ICMPv6.
pub const ICMPV6: u8 = 58;

/// In the place of a protocol number: the search for the transport header did not end at one. No transport protocol has
/// this number: IPv6 gives it to the hop-by-hop header, behind which the search continues, and IPv4 reserves it for
/// IPv6.
pub const UNKNOWN_TRANSPORT: u8 = 0;

/// What a packet says of its flow, in the bits of TCP's flags (RFC 9293, 3.1): it closes its sender's direction.
pub const SIGNAL_FIN: u8 = 1 << 0;
/// It begins a flow, or with [`SIGNAL_ACK`] answers to that.
pub const SIGNAL_SYN: u8 = 1 << 1;
/// It ends the flow.
pub const SIGNAL_RST: u8 = 1 << 2;
/// It acknowledges another packet.
pub const SIGNAL_ACK: u8 = 1 << 4;

/// Where a flow is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FlowState {
    /// Seen in one direction.
    New,
    /// Seen in both.
    Established,
    /// One end has closed it.
    Closing,
    /// Both ends have closed it, or one has reset it.
    Closed,
}

impl FlowState {
    /// Each of them, in the order of a flow's life.
    pub const ALL: &'static [Self] = &[Self::New, Self::Established, Self::Closing, Self::Closed];

    /// Name in the API and the CLI.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Established => "established",
            Self::Closing => "closing",
            Self::Closed => "closed",
        }
    }

    /// Ticks (about a second each) without a packet after which a flow of this protocol is over.
    #[inline(always)]
    #[must_use]
    pub const fn timeout(self, protocol: u8) -> u32 {
        match (self, protocol) {
            (Self::New, TCP | SCTP) => 60,
            (Self::New, _) => 30,
            // Two hours and four minutes: RFC 5382, REQ-5.
            (Self::Established, TCP) => 7_440,
            // Heartbeats come every 30 s (RFC 9260, 8.3).
            (Self::Established, SCTP) => 300,
            // Two minutes at least: RFC 4787, REQ-5.
            (Self::Established, UDP) => 180,
            (Self::Established, ICMP | ICMPV6) => 30,
            (Self::Established, _) => 600,
            // The other direction may go on; as long as the kernel's own tracking waits.
            (Self::Closing, _) => 120,
            (Self::Closed, _) => 10,
        }
    }
}

impl FlowRow {
    /// Where the flow is in its life.
    #[inline(always)]
    #[must_use]
    pub const fn state(&self) -> FlowState {
        const BOTH: u16 = FLOW_FIN | FLOW_FIN_REPLY;
        if self.flags & FLOW_RESET != 0 || self.flags & BOTH == BOTH {
            FlowState::Closed
        } else if self.flags & BOTH != 0 {
            FlowState::Closing
        } else if self.flags & FLOW_REPLIED != 0 {
            FlowState::Established
        } else {
            FlowState::New
        }
    }

    /// Ticks since the last packet. A packet that another CPU saw a tick later than `now` is no age at all.
    #[inline(always)]
    #[must_use]
    pub const fn idle(&self, now: u32) -> u32 {
        let age = now.wrapping_sub(self.seen);
        if age > u32::MAX / 2 { 0 } else { age }
    }

    /// True when nothing was heard of the flow for longer than its state allows.
    #[inline(always)]
    #[must_use]
    pub const fn is_over(&self, protocol: u8, now: u32) -> bool {
        self.idle(now) > self.state().timeout(protocol)
    }

    /// True when a packet with these `SIGNAL_*` bits begins another flow of the same ends: this one is closed, or about to be.
    #[inline(always)]
    #[must_use]
    pub const fn is_succeeded_by(&self, signals: u8) -> bool {
        let ended = self.flags & (FLOW_FIN | FLOW_FIN_REPLY | FLOW_RESET) != 0;
        ended && signals & (SIGNAL_SYN | SIGNAL_ACK | SIGNAL_RST) == SIGNAL_SYN
    }

    /// The flags after a packet with these `SIGNAL_*` bits, which the high end sent, or the low one.
    #[inline(always)]
    #[must_use]
    pub const fn flags_after(&self, signals: u8, by_high: bool) -> u16 {
        let is_reply = by_high != (self.flags & FLOW_BY_HIGH != 0);
        // Whoever goes on after a reset did not believe it (RFC 9293, 3.5.2, RFC 5961).
        let mut flags = self.flags & !FLOW_RESET;
        if is_reply {
            flags |= FLOW_REPLIED;
        }
        if signals & SIGNAL_RST != 0 {
            flags |= FLOW_RESET;
        } else if signals & SIGNAL_FIN != 0 {
            flags |= if is_reply { FLOW_FIN_REPLY } else { FLOW_FIN };
        }
        flags
    }
}

/// Key of [`crate::map::FRAGMENTS`]: the fragments of one packet (RFC 791, RFC 8200) at one hook.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FragmentKey {
    /// Who sent them.
    pub source: EndpointKey,
    /// To whom.
    pub destination: EndpointKey,
    /// The packet's identification, as it stands in the header.
    pub identification: u32,
    /// Endpoint whose hook this is.
    pub endpoint: u16,
    /// [`crate::Direction`] of the hook.
    pub direction: u8,
    /// Protocol number of IPv4 (RFC 791, 3.2). Zero for IPv6, where an identification is one of the two addresses (RFC 8200, 4.5) and a
    /// later fragment does not show the protocol.
    pub protocol: u8,
}

/// Value of [`crate::map::FRAGMENTS`]: what only the first fragment says.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FragmentRow {
    /// Source port, network byte order.
    pub source_port: u16,
    /// Destination port.
    pub destination_port: u16,
    /// When the first fragment came, in ticks.
    pub seen: u32,
    /// Low half of the epoch of the endpoint's attachment.
    pub epoch: u32,
    /// Protocol number (IANA) behind all extension headers, or [`UNKNOWN_TRANSPORT`].
    pub protocol: u8,
    /// Zero.
    pub pad: [u8; 3],
}

/// Value of [`crate::map::FRAGMENT_SLOTS`]: the packet in a place of an endpoint's share.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FragmentSlot {
    /// The packet.
    pub key: FragmentKey,
    /// Its ports.
    pub row: FragmentRow,
}

/// Ticks that a packet's later fragments may come after the first: RFC 8200, 4.5 gives up after 60 s.
pub const FRAGMENT_TICKS: u32 = 60;

/// Value of [`crate::map::FLOW_USE`]: what an endpoint takes of the tables.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FlowUse {
    /// Kept rows of [`crate::map::FLOWS`] that are charged to it: as the last collection counted them, and those added since. In row 0
    /// the rows of all endpoints.
    pub rows: u32,
    /// The count of the collection that runs. In row 0 not zero while a collection runs.
    pub counted: u32,
    /// The tick that `begun` is about.
    pub tick: u32,
    /// Flows that it began in that tick.
    pub begun: u32,
    /// Rows of [`crate::map::FLOWS`] with [`FLOW_RECENT`], counted like `rows`. CPUs that race may leave it below zero (two's
    /// complement) until the next collection.
    pub recent: u32,
    /// As `counted`, of `recent`. In row 0 the mark of the key ([`FlowKey::mark`]) whose row a collection is about to remove,
    /// zero for none.
    pub recent_counted: u32,
    /// Recent flows that it began, since the table was made: the next place in its ring.
    pub next: u32,
    /// As `next`, of flows that began outside of the node.
    pub next_outside: u32,
}

/// Value of [`crate::map::PROXY_USE`]: connections to the node's proxies that an endpoint began as their client.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct ProxyUse {
    /// Packets that could open a connection and were let through, since the map was made; wraps. Only programs write it. In row 0
    /// those of all endpoints.
    pub opened: u32,
    /// Count in `opened` from which on further ones are dropped. Only user space writes it. In row 0 the last tick in which
    /// limits hold.
    pub limit: u32,
}

impl ProxyUse {
    /// True when the next connection is refused while limits hold.
    #[inline(always)]
    #[must_use]
    pub const fn is_spent(self) -> bool {
        self.limit.wrapping_sub(self.opened).cast_signed() <= 0
    }
}

/// Value of [`crate::map::FLOW_TOTALS`]: the tables as a whole, since they were made.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FlowTotals {
    /// Kept rows of [`crate::map::FLOWS`] that the last collection left there.
    pub rows: u64,
    /// Rows that collections removed because their flow was over.
    pub expired: u64,
    /// Rows that collections removed because an endpoint of theirs was gone.
    pub orphaned: u64,
    /// Packets whose flow was not kept because its endpoint has [`crate::map::FLOWS_QUOTA`] rows.
    pub over_quota: u64,
    /// Packets whose flow was not kept because [`crate::map::FLOWS_KEPT_MAX`] rows are, or there was no memory.
    pub no_room: u64,
    /// Packets whose flow got no row at all, because its endpoint began [`crate::map::FLOWS_PER_TICK`] in that tick.
    pub untracked: u64,
}

#[cfg(feature = "user")]
crate::pod!(FlowKey, FlowRow, FragmentKey, FragmentRow, FragmentSlot, FlowUse, ProxyUse, FlowTotals);

const _: () = {
    use core::mem::size_of;
    assert!(size_of::<FlowKey>() == 40);
    assert!(size_of::<FlowRow>() == 24);
    assert!(size_of::<FragmentKey>() == 40);
    assert!(size_of::<FragmentRow>() == 16);
    assert!(size_of::<FragmentSlot>() == 56);
    assert!(size_of::<FlowUse>() == 32);
    assert!(size_of::<ProxyUse>() == 8);
    assert!(size_of::<FlowTotals>() == 48);
};
