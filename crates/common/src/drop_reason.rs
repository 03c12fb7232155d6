//! Verdict reasons and directions: the index into `METRICS`, the `reason` of an event.
//!
//! Numbers are ABI: a retired reason keeps its place.

/// Number of reasons; [`DropReason`] values are below it. Room is left so that a new one needs no new map layout.
pub const REASONS: u32 = 32;

/// From the endpoint's point of view.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// Toward the container.
    Ingress = 0,
    /// From the container.
    Egress = 1,
}

impl Direction {
    /// Both, in index order.
    pub const ALL: [Self; 2] = [Self::Ingress, Self::Egress];

    /// Parses the number that stands in an event.
    #[must_use]
    pub const fn from_u32(n: u32) -> Option<Self> {
        match n {
            0 => Some(Self::Ingress),
            1 => Some(Self::Egress),
            _ => None,
        }
    }

    /// Name in the API and the CLI.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $n:literal, $text:literal;)+) => {
        /// Why a packet went where it went; below [`DropReason::FIRST_DROP`] it was not dropped.
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum DropReason { $($(#[$doc])* $name = $n,)+ }

        impl DropReason {
            /// Every reason, in number order.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];

            /// Parses the number that stands in an event.
            #[must_use]
            pub const fn from_u32(n: u32) -> Option<Self> {
                match n { $($n => Some(Self::$name),)+ _ => None }
            }

            /// Name in the API, the CLI and metrics' labels.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)+ }
            }
        }
    };
}

reasons! {
    /// Forwarded to another local endpoint.
    ForwardedLocal = 0, "forwarded-local";
    /// Passed to the node's stack (egress), or let through from it (ingress).
    ForwardedStack = 1, "forwarded-stack";
    /// ARP request or neighbour solicitation answered by the program itself.
    NeighbourAnswered = 2, "neighbour-answered";
    /// Not a verdict: an event that did not fit the full ring. Its packet is counted under its own reason too.
    EventLost = 3, "event-lost";
    /// Not a verdict: an event beyond the endpoint's budget. Its packet is counted under its own reason too.
    EventSuppressed = 4, "event-suppressed";
    /// Handed to the proxy, because a rule redirects its flow there.
    Redirected = 5, "redirected";
    /// Header cut short or lengths that contradict each other.
    Malformed = 8, "malformed";
    /// Ethertype other than IPv4, IPv6 and ARP.
    UnsupportedL2 = 9, "unsupported-l2-protocol";
    /// Ethernet source is not the endpoint's MAC.
    InvalidSourceMac = 10, "invalid-source-mac";
    /// IP source is not the endpoint's address.
    InvalidSourceIp = 11, "invalid-source-ip";
    /// ARP or neighbour message that claims an address or MAC that is not the endpoint's.
    NeighbourSpoof = 12, "neighbour-spoof";
    /// ARP or neighbour query for an address other than the gateway: everything else is routed.
    NeighbourUnknown = 13, "neighbour-unknown-target";
    /// Multicast or broadcast, which this datapath does not carry (MLD, RS, DAD probes and mDNS land here).
    Multicast = 14, "multicast-unsupported";
    /// TTL or hop limit used up; the node's stack, which would say so to the sender, was not asked.
    TtlExceeded = 15, "ttl-exceeded";
    /// The endpoint is not live yet or any more.
    EndpointNotReady = 16, "endpoint-not-ready";
    /// The destination endpoint's program is gone (it is being deleted).
    NoTailCallTarget = 17, "destination-gone";
    /// The packet that reached an endpoint's ingress is not addressed to it.
    NotOurAddress = 18, "not-endpoint-address";
    /// A helper that writes the packet failed (for example no memory).
    PacketWrite = 19, "packet-write-failed";
    /// Configuration map without its row: never in a healthy node.
    NoConfig = 20, "no-config";
    /// Ethernet destination is neither the host side's MAC nor a group address: nobody there would take it.
    InvalidDestinationMac = 21, "invalid-destination-mac";
    /// IPv6 destination that no packet on a link may have: unspecified, loopback, IPv4-compatible or IPv4-mapped.
    InvalidDestinationIp = 22, "invalid-destination-ip";
    /// The bandwidth limit of the endpoint's direction is used up.
    BandwidthExceeded = 23, "bandwidth-exceeded";
    /// A later fragment of a packet whose first one, which has the ports, was not seen before it.
    LoneFragment = 24, "fragment-without-first";
    /// A program of the node's that the packet needs is gone.
    NoNodeProgram = 25, "node-program-gone";
    /// The endpoint's own policy does not let the packet pass.
    PolicyDenied = 26, "policy-denied";
    /// The policy of the endpoint at the other end does not let the packet pass.
    PeerPolicyDenied = 27, "peer-policy-denied";
    /// A rule redirects the flow to the proxy, and no socket of it takes the packet: none listens on the rule's port, the server goes on with a flow
    /// that began before the rule, or the proxy itself has a flow with these addresses and ports.
    ProxyUnavailable = 28, "proxy-unavailable";
    /// The search for the transport header did not end at one ([`crate::flow::UNKNOWN_TRANSPORT`]), and a rule about
    /// ports could decide; or the first fragment of a packet does not hold all of its headers.
    UnknownTransport = 29, "transport-header-not-found";
    /// The endpoint has its share of connections to the node's proxies open ([`crate::ProxyUse`]).
    ProxyShareSpent = 30, "proxy-share-spent";
}

impl DropReason {
    /// Reasons from here on are drops.
    pub const FIRST_DROP: u32 = 8;

    /// True when the packet was dropped.
    #[inline(always)]
    #[must_use]
    pub const fn is_drop(self) -> bool {
        self as u32 >= Self::FIRST_DROP
    }

    /// True when the row tells what became of packets; false for the rows that count events. The sum over verdicts is
    /// every packet the programs saw.
    #[inline(always)]
    #[must_use]
    pub const fn is_verdict(self) -> bool {
        !matches!(self, Self::EventLost | Self::EventSuppressed)
    }
}

/// Row of the per-endpoint counters for a direction and reason.
#[inline(always)]
#[must_use]
pub const fn metrics_index(direction: Direction, reason: DropReason) -> u32 {
    direction as u32 * REASONS + reason as u32
}
