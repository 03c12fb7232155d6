//! Flows between an endpoint and its peers.
//!
//! Both directions share one row: the key sorts the ends, and [`FLOW_BY_HIGH`] names the initiator.
//!
//! A flow begins as *recent* in [`crate::map::FLOWS`], and becomes *kept* when the initiator continues after an answer,
//! which forged packets cannot achieve. After [`crate::map::FLOWS_SHARE`] newer flows of the endpoint, a recent flow
//! moves to [`crate::map::FLOWS_NEW`], where it can still become kept. Collection removes ended flows from
//! [`crate::map::FLOWS`].

use crate::map::EndpointKey;

/// A flow's ends, sorted by address (two little-endian words), then port.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FlowKey {
    /// Low end.
    pub low: EndpointKey,
    /// High end.
    pub high: EndpointKey,
    /// Network byte order for TCP, UDP and SCTP; an ICMP echo's identifier in both ports; else zero.
    pub low_port: u16,
    /// As `low_port`.
    pub high_port: u16,
    /// IANA number, or [`UNKNOWN_TRANSPORT`].
    pub protocol: u8,
    /// Type of the ICMP request, also in answers; zero for an echo and other protocols.
    pub kind: u8,
    /// 1 for a TCP connection of the proxy in a client's name, else zero: the client may use the same ports.
    pub upstream: u8,
    /// Zero.
    pub _pad: u8,
}

impl FlowKey {
    /// Nonzero hash for [`FlowUse::recent_counted`]: flows with the hash of a row in removal begin in
    /// [`crate::map::FLOWS_NEW`].
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
/// Valid while the epochs match; deleting an endpoint removes no rows. Programs write single fields without a lock; a
/// lost flag only lengthens the flow's timeout.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FlowRow {
    /// Last packet that was not in the cache, ticks ([`TICK_SHIFT`]) since boot (CLOCK_MONOTONIC).
    pub seen: u32,
    /// Low half of the low end's epoch; zero for no endpoint of this node.
    pub low_epoch: u32,
    /// As `low_epoch`.
    pub high_epoch: u32,
    /// `FLOW_*` bits.
    pub flags: u16,
    /// Charged endpoint: the initiator, or the destination of an outside flow.
    pub owner: u16,
    /// Of the judgement: the sum of [`crate::PolicyState::generation`] and both ends'
    /// [`crate::map::ADDRESS_GENERATIONS`]. None decreases, so an equal sum means no change. Zero before any policy,
    /// and for a UDP flow that an open rule passes.
    pub generation: u32,
    /// Number of the rule that passed it, preferably the receiver's; zero for none. It may have the bit
    /// [`crate::policy::BY_SERVICE`], or be [`crate::policy::UNDECIDED`].
    pub rule: u32,
}

/// The high end sent the first packet.
pub const FLOW_BY_HIGH: u16 = 1 << 0;
/// A flow between endpoints takes the node's stack.
pub const FLOW_BY_STACK: u16 = 1 << 1;
/// The other end answered.
pub const FLOW_REPLIED: u16 = 1 << 2;
/// The initiator closed the flow (FIN, SHUTDOWN).
pub const FLOW_FIN: u16 = 1 << 3;
/// The other end closed it.
pub const FLOW_FIN_REPLY: u16 = 1 << 4;
/// The last packet was a reset (RST, ABORT).
pub const FLOW_RESET: u16 = 1 << 5;

/// The initiator's packets go to the proxy: constant for TCP, updated by each UDP packet of the initiator.
pub const FLOW_PROXIED: u16 = 1 << 6;
/// The proxy began the flow in one end's name; packets to that end go to the proxy.
pub const FLOW_UPSTREAM: u16 = 1 << 7;
/// With [`FLOW_UPSTREAM`]: the receiver's rules already redirected the flow.
pub const FLOW_LET_IN: u16 = 1 << 8;
/// Not kept.
pub const FLOW_RECENT: u16 = 1 << 9;
/// With [`FLOW_PROXIED`], for TCP: the proxy's socket is established, so no packet opens an uncounted connection.
pub const FLOW_ADMITTED: u16 = 1 << 10;
/// One end's address is in its endpoint's source prefixes ([`crate::map::SOURCES`]), not in [`crate::map::ENDPOINTS`].
pub const FLOW_PREFIX: u16 = 1 << 11;
/// The proxy is one end.
pub const FLOW_OF_PROXY: u16 = FLOW_PROXIED | FLOW_UPSTREAM | FLOW_LET_IN;

/// A tick is 2^this nanoseconds: 1.07 s.
pub const TICK_SHIFT: u32 = 30;

/// IANA number.
pub const TCP: u8 = 6;
/// IANA number.
pub const UDP: u8 = 17;
/// IANA number.
pub const SCTP: u8 = 132;
/// IANA number.
pub const ICMP: u8 = 1;
/// IANA number.
pub const ICMPV6: u8 = 58;

/// No transport header. IPv6 uses this number for the hop-by-hop header, which is skipped; IPv4 reserves it.
pub const UNKNOWN_TRANSPORT: u8 = 0;

/// TCP flag (RFC 9293, 3.1): closes the sender's direction.
pub const SIGNAL_FIN: u8 = 1 << 0;
/// Begins a flow, or with [`SIGNAL_ACK`] answers.
pub const SIGNAL_SYN: u8 = 1 << 1;
/// Ends the flow.
pub const SIGNAL_RST: u8 = 1 << 2;
/// Acknowledges another packet.
pub const SIGNAL_ACK: u8 = 1 << 4;

/// Phase of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FlowState {
    /// Packets in one direction.
    New,
    /// Packets in both.
    Established,
    /// Closed by one end.
    Closing,
    /// Closed by both ends, or reset.
    Closed,
}

impl FlowState {
    /// In the order of a flow's life.
    pub const ALL: &'static [Self] = &[Self::New, Self::Established, Self::Closing, Self::Closed];

    /// In API and CLI.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Established => "established",
            Self::Closing => "closing",
            Self::Closed => "closed",
        }
    }

    /// Ticks without a packet until the flow is over.
    #[inline(always)]
    #[must_use]
    pub const fn timeout(self, protocol: u8) -> u32 {
        match (self, protocol) {
            (Self::New, TCP | SCTP) => 60,
            (Self::New, _) => 30,
            // RFC 5382, REQ-5: two hours and four minutes.
            (Self::Established, TCP) => 7_440,
            // RFC 9260, 8.3: heartbeats every 30 s.
            (Self::Established, SCTP) => 300,
            // RFC 4787, REQ-5: at least two minutes.
            (Self::Established, UDP) => 180,
            (Self::Established, ICMP | ICMPV6) => 30,
            (Self::Established, _) => 600,
            // As kernel connection tracking.
            (Self::Closing, _) => 120,
            (Self::Closed, _) => 10,
        }
    }
}

impl FlowRow {
    /// Phase.
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

    /// Ticks since the last packet; zero after a later packet on another CPU.
    #[inline(always)]
    #[must_use]
    pub const fn idle(&self, now: u32) -> u32 {
        let age = now.wrapping_sub(self.seen);
        if age > u32::MAX / 2 { 0 } else { age }
    }

    /// Silent longer than its state allows.
    #[inline(always)]
    #[must_use]
    pub const fn is_over(&self, protocol: u8, now: u32) -> bool {
        self.idle(now) > self.state().timeout(protocol)
    }

    /// A packet with these `SIGNAL_*` bits begins another flow.
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
        // RFC 9293, 3.5.2, RFC 5961: the sender ignored the reset.
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

/// Value of [`crate::map::FLOW_CACHE`]: a flow that `established` passed, for packets of the next jiffies on this CPU.
///
/// Written only by the node's programs, read by the endpoint's.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct CachedFlow {
    /// The end that is not the endpoint of the hook.
    pub peer: EndpointKey,
    /// As in the packet.
    pub ports: u32,
    /// IANA number and `CACHED_*` bits.
    pub kind: u32,
    /// Low half of the epoch of the hook's endpoint.
    pub own_epoch: u32,
    /// Sum, before the decision, of [`crate::PolicyState::generation`], both ends' [`crate::map::ADDRESS_GENERATIONS`],
    /// and the endpoint's [`crate::map::FLOW_CACHE_ENDS`].
    pub generation: u32,
    /// Jiffies of the decision, in units of 2^[`CACHE_SHIFT`].
    pub window: u32,
    /// Slot of [`crate::map::CALLS`], zero for the stack or the container.
    pub receiver: u32,
    /// Odd while a program writes: since Linux 6.18, programs of a PREEMPT_RT kernel can interleave on a CPU.
    pub sequence: u32,
    /// Zero.
    pub _pad: u32,
}

/// Flag in [`CachedFlow::kind`]: from the stack.
pub const CACHED_INGRESS: u32 = 1 << 8;
/// Flag in [`CachedFlow::kind`].
pub const CACHED_IPV6: u32 = 1 << 9;

/// At most 64 jiffies, 64 to 640 ms: after that, a packet looks at the flow's row again.
pub const CACHE_SHIFT: u32 = 6;

/// Row of [`crate::map::FLOW_CACHE`]: a multiplicative hash of the peer's last word ([`EndpointKey::last_word`]) and
/// fields of [`CachedFlow`].
#[inline(always)]
#[must_use]
pub const fn cache_place(peer: u32, ports: u32, kind: u32, own_epoch: u32) -> u32 {
    let mixed = (ports ^ kind).wrapping_mul(0x9e37_79b1) ^ peer ^ own_epoch;
    mixed.wrapping_mul(0x85eb_ca6b) >> (32 - crate::map::FLOW_CACHE_MAX.trailing_zeros())
}

/// Key of [`crate::map::FRAGMENTS`]: a packet (RFC 791, RFC 8200) at one hook.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FragmentKey {
    /// Sender.
    pub source: EndpointKey,
    /// Receiver.
    pub destination: EndpointKey,
    /// Header byte order.
    pub identification: u32,
    /// Of the hook.
    pub endpoint: u16,
    /// [`crate::Direction`] of the hook.
    pub direction: u8,
    /// RFC 791, 3.2. Zero for IPv6, whose later fragments lack it (RFC 8200, 4.5).
    pub protocol: u8,
}

/// Value of [`crate::map::FRAGMENTS`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FragmentRow {
    /// Network byte order.
    pub source_port: u16,
    /// Network byte order.
    pub destination_port: u16,
    /// Arrival of the first fragment, ticks.
    pub seen: u32,
    /// Low half of the endpoint's epoch.
    pub epoch: u32,
    /// Behind all extension headers, or [`UNKNOWN_TRANSPORT`].
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

/// Later fragments are accepted for 60 s (RFC 8200, 4.5).
pub const FRAGMENT_TICKS: u32 = 60;

/// Value of [`crate::map::FLOW_USE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct FlowUse {
    /// Kept rows: last count plus additions. Row 0: all endpoints.
    pub rows: u32,
    /// Count of the running collection. Row 0: nonzero during a collection.
    pub counted: u32,
    /// Tick of `begun`.
    pub tick: u32,
    /// Flows begun in that tick.
    pub begun: u32,
    /// Recent rows; racing CPUs can leave it negative until the next collection.
    pub recent: u32,
    /// Like `counted`. Row 0: [`FlowKey::mark`] of the row being removed, or zero.
    pub recent_counted: u32,
    /// Recent flows begun: the next place in the ring.
    pub next: u32,
    /// As `next`, from outside the node.
    pub next_outside: u32,
}

/// Value of [`crate::map::PROXY_USE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct ProxyUse {
    /// Admitted packets that could open a connection; wraps. Written by programs. Row 0: all endpoints.
    pub opened: u32,
    /// `opened` from which packets drop. Written only by user space. Row 0: last tick in which limits are enforced.
    pub limit: u32,
}

impl ProxyUse {
    /// Refuses the next connection while limits are enforced.
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
    /// Collected rows of ended flows.
    pub expired: u64,
    /// Collected rows of deleted endpoints.
    pub orphaned: u64,
    /// Packets of flows not kept: [`crate::map::FLOWS_QUOTA`].
    pub over_quota: u64,
    /// Packets of flows not kept: [`crate::map::FLOWS_KEPT_MAX`], or no memory.
    pub no_room: u64,
    /// Packets of flows without a row: [`crate::map::FLOWS_PER_TICK`].
    pub untracked: u64,
}

#[cfg(feature = "user")]
crate::pod!(FlowKey, FlowRow, CachedFlow, FragmentKey, FragmentRow, FragmentSlot, FlowUse, ProxyUse, FlowTotals);

const _: () = {
    use core::mem::size_of;
    assert!(size_of::<FlowKey>() == 40);
    assert!(size_of::<FlowRow>() == 24);
    assert!(size_of::<CachedFlow>() == 48);
    assert!(size_of::<FragmentKey>() == 40);
    assert!(size_of::<FragmentRow>() == 16);
    assert!(size_of::<FragmentSlot>() == 56);
    assert!(size_of::<FlowUse>() == 32);
    assert!(size_of::<ProxyUse>() == 8);
    assert!(size_of::<FlowTotals>() == 48);
};
