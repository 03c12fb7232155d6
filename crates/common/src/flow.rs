//! Flows between an endpoint and its peers: tables, and the rules of their life, for programs and user space.
//!
//! A flow is two addresses, two ports and a protocol. **Both directions share one row**: the key sorts the ends
//! ([`FlowKey`]), and [`FLOW_BY_HIGH`] names the initiator.
//!
//! A flow begins as *recent* ([`FLOW_RECENT`]) in [`crate::map::FLOWS`], without eviction. It becomes *kept* there
//! when the initiator continues after an answer: forged or unanswered packets never achieve that. After
//! [`crate::map::FLOWS_SHARE`] newer flows, an endpoint's oldest recent flow moves to the LRU table
//! [`crate::map::FLOWS_NEW`], where it can still become kept. Collection removes rows that are over
//! ([`FlowRow::is_over`]) from [`crate::map::FLOWS`].

use crate::map::EndpointKey;

/// Key of [`crate::map::FLOWS`] and [`crate::map::FLOWS_NEW`]: a flow's ends, the lower first, by address (two
/// little-endian words), then port. The order has no other meaning.
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
    /// Low end's port for TCP, UDP and SCTP, network byte order; for an ICMP echo, its identifier in both ports; else
    /// zero.
    pub low_port: u16,
    /// Port of the high end.
    pub high_port: u16,
    /// Protocol number (IANA), or [`UNKNOWN_TRANSPORT`].
    pub protocol: u8,
    /// Type of an ICMP or ICMPv6 request, also in answers; zero for an echo and other protocols.
    pub kind: u8,
    /// Zero.
    pub _pad: [u8; 2],
}

impl FlowKey {
    /// Nonzero number of the key that a collection removes ([`FlowUse::recent_counted`]). A flow with an equal number
    /// begins in [`crate::map::FLOWS_NEW`].
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
/// Valid while the epochs match the endpoints with these addresses: no endpoint inherits a predecessor's flows, and a
/// delete removes no rows. Programs write single fields without a lock: one of two concurrent flag updates can be
/// lost, and the flow ends by a longer timeout.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FlowRow {
    /// Last packet: [`TICK_SHIFT`] ticks since boot (CLOCK_MONOTONIC).
    pub seen: u32,
    /// Low half of the low end's epoch; zero for an end outside this node's endpoints. It repeats only after four
    /// billion attachments.
    pub low_epoch: u32,
    /// Low half of the high end's epoch.
    pub high_epoch: u32,
    /// `FLOW_*` bits.
    pub flags: u16,
    /// Endpoint charged with the row: the initiator, or the destination of an outside flow.
    pub owner: u16,
    /// [`crate::PolicyState::generation`] of the judgement; zero before any policy, and for a UDP flow that an open
    /// rule passes without the proxy.
    pub generation: u32,
    /// The rule that passed it, first the receiver's; zero for none, with [`crate::policy::BY_SERVICE`], or
    /// [`crate::policy::UNDECIDED`].
    pub rule: u32,
}

/// [`FlowRow::flags`]: the high end sent the flow's first packet.
pub const FLOW_BY_HIGH: u16 = 1 << 0;
/// [`FlowRow::flags`]: a flow between two endpoints takes the node's stack.
pub const FLOW_BY_STACK: u16 = 1 << 1;
/// [`FlowRow::flags`]: the other end answered.
pub const FLOW_REPLIED: u16 = 1 << 2;
/// [`FlowRow::flags`]: the initiator has closed the flow (FIN, SHUTDOWN).
pub const FLOW_FIN: u16 = 1 << 3;
/// [`FlowRow::flags`]: the other end has closed it.
pub const FLOW_FIN_REPLY: u16 = 1 << 4;
/// [`FlowRow::flags`]: the last packet was a reset (RST, ABORT).
pub const FLOW_RESET: u16 = 1 << 5;

/// [`FlowRow::flags`]: the initiator's packets go to the proxy, which replaces the other end. Constant for a TCP
/// connection; each packet of a UDP flow's initiator updates it by the current rules.
pub const FLOW_PROXIED: u16 = 1 << 6;
/// [`FlowRow::flags`]: the proxy began the flow in the name of one end; packets to that end go to the proxy.
pub const FLOW_UPSTREAM: u16 = 1 << 7;
/// [`FlowRow::flags`], with [`FLOW_UPSTREAM`]: the receiver's rules redirected the flow here and do not redirect it
/// again.
pub const FLOW_LET_IN: u16 = 1 << 8;
/// [`FlowRow::flags`]: recent, not kept.
pub const FLOW_RECENT: u16 = 1 << 9;
/// [`FlowRow::flags`]: with [`FLOW_PROXIED`], for TCP: a lookup found the proxy's established socket, so the flow's packets
/// open no connection that [`ProxyUse`] does not count.
pub const FLOW_ADMITTED: u16 = 1 << 10;
/// Flags of a flow with the proxy at one end.
pub const FLOW_OF_PROXY: u16 = FLOW_PROXIED | FLOW_UPSTREAM | FLOW_LET_IN;

/// A tick is 2^this nanoseconds: 1.07 s. A shift is one instruction, a division by 10^9 many.
pub const TICK_SHIFT: u32 = 30;

/// IANA number of TCP.
pub const TCP: u8 = 6;
/// IANA number of UDP.
pub const UDP: u8 = 17;
/// IANA number of SCTP.
pub const SCTP: u8 = 132;
/// IANA number of ICMP.
pub const ICMP: u8 = 1;
/// IANA number of ICMPv6.
pub const ICMPV6: u8 = 58;

/// Protocol number if no transport header is found. No transport protocol has it: IPv6 uses it for the hop-by-hop
/// header, which is skipped, and IPv4 reserves it for IPv6.
pub const UNKNOWN_TRANSPORT: u8 = 0;

/// Signals are bits of TCP's flags (RFC 9293, 3.1). Closes the sender's direction.
pub const SIGNAL_FIN: u8 = 1 << 0;
/// Begins a flow, or with [`SIGNAL_ACK`] answers that.
pub const SIGNAL_SYN: u8 = 1 << 1;
/// Ends the flow.
pub const SIGNAL_RST: u8 = 1 << 2;
/// Acknowledges another packet.
pub const SIGNAL_ACK: u8 = 1 << 4;

/// Phase of a flow's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FlowState {
    /// Packets in one direction.
    New,
    /// Packets in both.
    Established,
    /// One end has closed it.
    Closing,
    /// Both ends have closed it, or one has reset it.
    Closed,
}

impl FlowState {
    /// All states in the order of a flow's life.
    pub const ALL: &'static [Self] = &[Self::New, Self::Established, Self::Closing, Self::Closed];

    /// Name in API and CLI.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Established => "established",
            Self::Closing => "closing",
            Self::Closed => "closed",
        }
    }

    /// Ticks (about a second) without a packet after which the flow is over.
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
            // The other direction can continue; as long as kernel connection tracking waits.
            (Self::Closing, _) => 120,
            (Self::Closed, _) => 10,
        }
    }
}

impl FlowRow {
    /// Phase of the flow.
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

    /// Ticks since the last packet; zero if another CPU saw one a tick after `now`.
    #[inline(always)]
    #[must_use]
    pub const fn idle(&self, now: u32) -> u32 {
        let age = now.wrapping_sub(self.seen);
        if age > u32::MAX / 2 { 0 } else { age }
    }

    /// The flow was silent longer than its state allows.
    #[inline(always)]
    #[must_use]
    pub const fn is_over(&self, protocol: u8, now: u32) -> bool {
        self.idle(now) > self.state().timeout(protocol)
    }

    /// A packet with these `SIGNAL_*` bits begins another flow of the same ends: this one is closed or closing.
    #[inline(always)]
    #[must_use]
    pub const fn is_succeeded_by(&self, signals: u8) -> bool {
        let ended = self.flags & (FLOW_FIN | FLOW_FIN_REPLY | FLOW_RESET) != 0;
        ended && signals & (SIGNAL_SYN | SIGNAL_ACK | SIGNAL_RST) == SIGNAL_SYN
    }

    /// Flags after a packet with these `SIGNAL_*` bits.
    #[inline(always)]
    #[must_use]
    pub const fn flags_after(&self, signals: u8, by_high: bool) -> u16 {
        let is_reply = by_high != (self.flags & FLOW_BY_HIGH != 0);
        // A packet after a reset: the sender ignored the reset (RFC 9293, 3.5.2, RFC 5961).
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

/// Key of [`crate::map::FRAGMENTS`]: fragments of one packet (RFC 791, RFC 8200) at one hook.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FragmentKey {
    /// Sender's address.
    pub source: EndpointKey,
    /// Receiver's address.
    pub destination: EndpointKey,
    /// The packet's identification, header byte order.
    pub identification: u32,
    /// Endpoint of the hook.
    pub endpoint: u16,
    /// [`crate::Direction`] of the hook.
    pub direction: u8,
    /// IPv4's protocol number (RFC 791, 3.2). Zero for IPv6: identifications belong to the address pair (RFC 8200,
    /// 4.5), and later fragments lack the protocol.
    pub protocol: u8,
}

/// Value of [`crate::map::FRAGMENTS`]: data only in the first fragment.
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
    /// Arrival of the first fragment, ticks.
    pub seen: u32,
    /// Low half of the endpoint's epoch.
    pub epoch: u32,
    /// Protocol behind all extension headers, or [`UNKNOWN_TRANSPORT`].
    pub protocol: u8,
    /// Zero.
    pub pad: [u8; 3],
}

/// Value of [`crate::map::FRAGMENT_SLOTS`].
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FragmentSlot {
    /// The packet.
    pub key: FragmentKey,
    /// The packet's ports.
    pub row: FragmentRow,
}

/// Ticks in which later fragments are accepted: RFC 8200, 4.5 gives up after 60 s.
pub const FRAGMENT_TICKS: u32 = 60;

/// Value of [`crate::map::FLOW_USE`]: an endpoint's use of the tables.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FlowUse {
    /// Kept rows of [`crate::map::FLOWS`]: last collection's count plus additions. Row 0: all endpoints.
    pub rows: u32,
    /// Count of the running collection. Row 0: nonzero during a collection.
    pub counted: u32,
    /// The tick of `begun`.
    pub tick: u32,
    /// Flows begun in that tick.
    pub begun: u32,
    /// Rows with [`FLOW_RECENT`], counted like `rows`. Racing CPUs can leave it negative (two's complement) until the
    /// next collection.
    pub recent: u32,
    /// Like `counted`, for `recent`. Row 0: [`FlowKey::mark`] of the row that a collection is removing, or zero.
    pub recent_counted: u32,
    /// Recent flows begun in total: gives the next place in the ring.
    pub next: u32,
    /// Like `next`, for flows from outside the node.
    pub next_outside: u32,
}

/// Value of [`crate::map::PROXY_USE`]: connections that a client endpoint opened to the node's proxies.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct ProxyUse {
    /// Admitted packets that could open a connection, since the map was created; wraps. Written only by programs. Row 0
    /// counts all endpoints.
    pub opened: u32,
    /// Value of `opened` from which further packets are dropped. Written only by user space. In row 0 the last tick in
    /// which limits are enforced.
    pub limit: u32,
}

impl ProxyUse {
    /// True when the next connection is refused while limits are enforced.
    #[inline(always)]
    #[must_use]
    pub const fn is_spent(self) -> bool {
        self.limit.wrapping_sub(self.opened).cast_signed() <= 0
    }
}

/// Value of [`crate::map::FLOW_TOTALS`], since the tables were made.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FlowTotals {
    /// Kept rows after the last collection.
    pub rows: u64,
    /// Rows that collections removed as over.
    pub expired: u64,
    /// Rows that collections removed without their endpoint.
    pub orphaned: u64,
    /// Packets whose flow was not kept because of [`crate::map::FLOWS_QUOTA`].
    pub over_quota: u64,
    /// Packets whose flow was not kept because of [`crate::map::FLOWS_KEPT_MAX`], or without memory.
    pub no_room: u64,
    /// Packets whose flow got no row because of [`crate::map::FLOWS_PER_TICK`].
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
