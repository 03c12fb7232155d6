//! Verdict reasons and directions: rows of `METRICS`, fields of events. Retired numbers are not reused.

/// With spare numbers: new reasons keep the layout.
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
    /// In index order.
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
        /// A packet's verdict; drops begin at [`DropReason::FIRST_DROP`].
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum DropReason { $($(#[$doc])* $name = $n,)+ }

        impl DropReason {
            /// In number order.
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
    /// Forwarded to a local endpoint.
    ForwardedLocal = 0, "forwarded-local";
    /// Passed to (egress) or from (ingress) the node's stack.
    ForwardedStack = 1, "forwarded-stack";
    /// Neighbour request, answered by the program.
    NeighbourAnswered = 2, "neighbour-answered";
    /// Not a verdict: an event lost to a full ring.
    EventLost = 3, "event-lost";
    /// Not a verdict: an event over budget.
    EventSuppressed = 4, "event-suppressed";
    /// Passed to the proxy by a rule.
    Redirected = 5, "redirected";
    /// Truncated header or contradictory lengths.
    Malformed = 8, "malformed";
    /// Neither IPv4, IPv6 nor ARP.
    UnsupportedL2 = 9, "unsupported-l2-protocol";
    /// Foreign Ethernet source.
    InvalidSourceMac = 10, "invalid-source-mac";
    /// Foreign IP source.
    InvalidSourceIp = 11, "invalid-source-ip";
    /// Neighbour message that claims a foreign address or MAC.
    NeighbourSpoof = 12, "neighbour-spoof";
    /// Neighbour request for another address than the gateway.
    NeighbourUnknown = 13, "neighbour-unknown-target";
    /// Multicast or broadcast, including MLD, RS, DAD probes and mDNS.
    Multicast = 14, "multicast-unsupported";
    /// TTL or hop limit exhausted; no ICMP error is sent.
    TtlExceeded = 15, "ttl-exceeded";
    /// The endpoint is not yet or no longer live.
    EndpointNotReady = 16, "endpoint-not-ready";
    /// The destination's program is missing: deletion in progress.
    NoTailCallTarget = 17, "destination-gone";
    /// Destination at ingress is another address.
    NotOurAddress = 18, "not-endpoint-address";
    /// A helper that writes the packet failed.
    PacketWrite = 19, "packet-write-failed";
    /// The configuration map lacks its row; never on a healthy node.
    NoConfig = 20, "no-config";
    /// Ethernet destination is neither the host MAC nor a group address.
    InvalidDestinationMac = 21, "invalid-destination-mac";
    /// IPv6 destination is unspecified, loopback, IPv4-compatible or IPv4-mapped.
    InvalidDestinationIp = 22, "invalid-destination-ip";
    /// The direction's bandwidth limit is exceeded.
    BandwidthExceeded = 23, "bandwidth-exceeded";
    /// A later fragment arrived before the first, which has the ports.
    LoneFragment = 24, "fragment-without-first";
    /// A required node program is missing.
    NoNodeProgram = 25, "node-program-gone";
    /// The endpoint's policy denies the packet.
    PolicyDenied = 26, "policy-denied";
    /// The other end's policy denies the packet.
    PeerPolicyDenied = 27, "peer-policy-denied";
    /// No proxy socket for a redirected packet: no listener, flow older than the rule, or equal flow of the proxy.
    ProxyUnavailable = 28, "proxy-unavailable";
    /// No transport header where a rule with ports could decide; or a first fragment lacks headers.
    UnknownTransport = 29, "transport-header-not-found";
    /// Its share of proxy connections is open ([`crate::ProxyUse`]).
    ProxyShareSpent = 30, "proxy-share-spent";
}

impl DropReason {
    /// First drop reason.
    pub const FIRST_DROP: u32 = 8;

    /// The packet was dropped.
    #[inline(always)]
    #[must_use]
    pub const fn is_drop(self) -> bool {
        self as u32 >= Self::FIRST_DROP
    }

    /// False for counts of events; the sum over verdicts is every packet.
    #[inline(always)]
    #[must_use]
    pub const fn is_verdict(self) -> bool {
        !matches!(self, Self::EventLost | Self::EventSuppressed)
    }
}

/// Row of [`crate::map::METRICS`].
#[inline(always)]
#[must_use]
pub const fn metrics_index(direction: Direction, reason: DropReason) -> u32 {
    direction as u32 * REASONS + reason as u32
}
