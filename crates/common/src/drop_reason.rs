//! Verdict reasons and directions: rows of `METRICS`, `reason` of an event. Numbers are ABI: a retired reason keeps
//! its number.

/// Number of reasons; spare numbers let new reasons keep the map layout.
pub const REASONS: u32 = 32;

/// Seen from the endpoint.
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

    /// Parses an event's number.
    #[must_use]
    pub const fn from_u32(n: u32) -> Option<Self> {
        match n {
            0 => Some(Self::Ingress),
            1 => Some(Self::Egress),
            _ => None,
        }
    }

    /// Name in API and CLI.
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
        /// A packet's verdict; below [`DropReason::FIRST_DROP`] it was not dropped.
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum DropReason { $($(#[$doc])* $name = $n,)+ }

        impl DropReason {
            /// Every reason, in number order.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];

            /// Parses an event's number.
            #[must_use]
            pub const fn from_u32(n: u32) -> Option<Self> {
                match n { $($n => Some(Self::$name),)+ _ => None }
            }

            /// Name in API, CLI and metric labels.
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
    /// Passed to the node's stack (egress) or from it (ingress).
    ForwardedStack = 1, "forwarded-stack";
    /// ARP request or neighbour solicitation, answered by the program.
    NeighbourAnswered = 2, "neighbour-answered";
    /// Not a verdict: an event lost to a full ring. Its packet is also counted under its reason.
    EventLost = 3, "event-lost";
    /// Not a verdict: an event over budget. Its packet is also counted under its reason.
    EventSuppressed = 4, "event-suppressed";
    /// Passed to the proxy, where a rule redirects its flow.
    Redirected = 5, "redirected";
    /// Truncated header or contradictory lengths.
    Malformed = 8, "malformed";
    /// Ethertype other than IPv4, IPv6 and ARP.
    UnsupportedL2 = 9, "unsupported-l2-protocol";
    /// Ethernet source is not the endpoint's MAC.
    InvalidSourceMac = 10, "invalid-source-mac";
    /// IP source is not the endpoint's address.
    InvalidSourceIp = 11, "invalid-source-ip";
    /// ARP or neighbour message that claims a foreign address or MAC.
    NeighbourSpoof = 12, "neighbour-spoof";
    /// ARP or neighbour request for another address than the gateway: all others are routed.
    NeighbourUnknown = 13, "neighbour-unknown-target";
    /// Multicast or broadcast, which is not carried (including MLD, RS, DAD probes and mDNS).
    Multicast = 14, "multicast-unsupported";
    /// TTL or hop limit exhausted, without an ICMP error from the node's stack.
    TtlExceeded = 15, "ttl-exceeded";
    /// The endpoint is not yet or no longer live.
    EndpointNotReady = 16, "endpoint-not-ready";
    /// The destination's program is missing (deletion in progress).
    NoTailCallTarget = 17, "destination-gone";
    /// A packet at an endpoint's ingress for another address.
    NotOurAddress = 18, "not-endpoint-address";
    /// A helper that writes the packet failed (for example no memory).
    PacketWrite = 19, "packet-write-failed";
    /// The configuration map lacks its row; never on a healthy node.
    NoConfig = 20, "no-config";
    /// Ethernet destination is neither the host MAC nor a group address: no receiver.
    InvalidDestinationMac = 21, "invalid-destination-mac";
    /// IPv6 destination invalid on a link: unspecified, loopback, IPv4-compatible or IPv4-mapped.
    InvalidDestinationIp = 22, "invalid-destination-ip";
    /// The direction's bandwidth limit is exceeded.
    BandwidthExceeded = 23, "bandwidth-exceeded";
    /// A later fragment before the first, which has the ports.
    LoneFragment = 24, "fragment-without-first";
    /// A required node program is missing.
    NoNodeProgram = 25, "node-program-gone";
    /// The endpoint's policy denies the packet.
    PolicyDenied = 26, "policy-denied";
    /// The other end's policy denies the packet.
    PeerPolicyDenied = 27, "peer-policy-denied";
    /// No proxy socket receives a redirected packet: none listens on the rule's port, the server continues a flow
    /// older than the rule, or the proxy has a flow with these addresses and ports.
    ProxyUnavailable = 28, "proxy-unavailable";
    /// No transport header found ([`crate::flow::UNKNOWN_TRANSPORT`]), and a rule with ports could decide; or a first
    /// fragment lacks headers.
    UnknownTransport = 29, "transport-header-not-found";
    /// The endpoint has its share of connections to the node's proxies open ([`crate::ProxyUse`]).
    ProxyShareSpent = 30, "proxy-share-spent";
}

impl DropReason {
    /// Number of the first drop reason.
    pub const FIRST_DROP: u32 = 8;

    /// True when the packet was dropped.
    #[inline(always)]
    #[must_use]
    pub const fn is_drop(self) -> bool {
        self as u32 >= Self::FIRST_DROP
    }

    /// False for a count of events. The sum over verdicts is every packet that the programs saw.
    #[inline(always)]
    #[must_use]
    pub const fn is_verdict(self) -> bool {
        !matches!(self, Self::EventLost | Self::EventSuppressed)
    }
}

/// Row of the endpoint's counters.
#[inline(always)]
#[must_use]
pub const fn metrics_index(direction: Direction, reason: DropReason) -> u32 {
    direction as u32 * REASONS + reason as u32
}
