//! Map names, keys and values.
//!
//! | map | kind | scope | key -> value | why this kind and size |
//! |---|---|---|---|---|
//! | `ENDPOINTS` | hash, no prealloc | node | [`EndpointKey`] -> [`EndpointRow`] | one exact lookup decides local delivery; two rows (v4, v6) for each possible endpoint; memory only for rows in use |
//! | `CALLS` | program array | node | endpoint id -> `deliver` program | the receiver's own program polices what it receives; an empty slot drops |
//! | `NODE_CALLS` | program array | node | [`NodeCall`] -> program of the node's | what is the same for all endpoints is verified once for the node, not for each endpoint; an empty slot ends in the caller |
//! | `PROFILES` | array | node | endpoint id -> [`EndpointProfile`] | what the node's programs know of an endpoint whose packet they judge, written by the endpoint's own `deliver` from `CONFIG` and their constants; a row of its own for each endpoint, so that no program can read another's (a row for each CPU would have to be guarded against every other run on that CPU); one load, no hash; row 0, which is no endpoint's, has index and MAC address (`host_mac`) of the link where packets are turned round to the proxy, and is zero without redirects |
//! | `EVENTS` | ring buffer | node | [`crate::Event`] | ordered across CPUs, one reader; full means counted as lost, never blocked |
//! | `STACK_PATHS` | LRU hash | node | [`StackPathKey`] -> [`StackPathRow`] | which services of an endpoint another endpoint reaches through the node's stack; a row for each pair and service, not for each flow, so that no flood of flows evicts one that is in use |
//! | `STACK_USERS` | array | node | endpoint id -> epoch of the endpoint that has rows in `STACK_PATHS` | spares all others the look-up: one load, no hash |
//! | `FLOWS` | hash, no prealloc | node | [`crate::FlowKey`] -> [`crate::FlowRow`] | flows that both ends use, and the recent flows of each endpoint: a plain hash evicts nothing; one table for all, because each costs 16 bytes a place even when empty; memory only for rows in use |
//! | `FLOWS_RECENT` | hash, no prealloc | node | endpoint id and place -> [`crate::FlowKey`] | the order in which an endpoint began its recent flows; the kernel's LRU has no order for each owner; memory only for rows in use |
//! | `FLOWS_NEW` | LRU hash | node | [`crate::FlowKey`] -> [`crate::FlowRow`] | flows seen in one direction that are no longer recent: a flood evicts the oldest of all endpoints |
//! | `FRAGMENT_SLOTS` | hash, no prealloc | node | endpoint id and place -> [`crate::FragmentSlot`] | the ports and the protocol that only a packet's first fragment shows, of an endpoint's latest packets: no other endpoint takes their places; memory only for rows in use |
//! | `FRAGMENTS` | LRU hash | node | [`crate::FragmentKey`] -> [`crate::FragmentRow`] | the same of packets that lost their place; needed for moments |
//! | `FLOW_USE` | array | node | endpoint id -> [`crate::FlowUse`] | quotas: one load, no hash |
//! | `FLOW_TOTALS` | array of 1 | node | 0 -> [`crate::FlowTotals`] | fill, collection and what was refused; added to on rare paths only |
//! | `PROXY_USE` | array, memory shared with user space | node | endpoint id -> [`crate::ProxyUse`] | connections to the proxies of each client: one load, no hash; programs and user space write one word each of a row, which an update through the kernel could not do |
//! | `IPCACHE` | LPM trie | node | prefix of [`EndpointKey`] -> [`crate::PeerRow`] | who has an address, as policy sees it: endpoints and the networks that rules name; memory only for rows in use |
//! | `POLICY_PORTS` | LPM trie | node | prefix of [`crate::PortKey`] -> port class | ranges of ports are few prefixes |
//! | `POLICY_CELLS` | hash, no prealloc | node | [`crate::CellKey`] -> [`crate::CellRow`] | the rules, of all rule sets in one table: endpoints with the same rules share them; memory only for rows in use |
//! | `POLICY_SETS` | array | node | endpoint id -> [`crate::SetsRow`] | one load, no hash |
//! | `POLICY_STATE` | array of 1 | node | 0 -> [`crate::PolicyState`] | one load for each packet of a flow that was judged before |
//! | `CONFIG` | array of 1 | endpoint | 0 -> [`EndpointConfig`] | what changes without a new program: addresses, identity, gate; direct pointer, no hash |
//! | `METRICS` | per-CPU array | endpoint | `direction * REASONS + reason` -> [`Counter`] | counted without atomics; summed by readers |
//! | `BANDWIDTH` | array of 2 | endpoint | [`crate::Direction`] -> [`Bucket`] | a token bucket that all CPUs share: a per-CPU one would let a flow that changes its CPU have the rate again; read only where a flag of `CONFIG` says so |
//! | `EVENT_BUDGET` | array of 1 | endpoint | 0 -> [`EventBudget`] | one budget for all CPUs: a per-CPU one would grow with the machine; a flood only reads it. Not pinned: the programs hold it, a new set starts afresh |

use crate::Direction;

/// Node-wide endpoint table: destination address to local endpoint.
pub const ENDPOINTS: &str = "ENDPOINTS";
/// Node-wide program array of each endpoint's `deliver` program, by endpoint id.
pub const CALLS: &str = "CALLS";
/// Node-wide program array of the programs that all endpoints share, by [`NodeCall`].
pub const NODE_CALLS: &str = "NODE_CALLS";
/// Node-wide array of what the node's programs know of endpoints, by endpoint id.
pub const PROFILES: &str = "PROFILES";
/// Node-wide event ring buffer.
pub const EVENTS: &str = "EVENTS";
/// Node-wide table of the services of endpoints that other endpoints reach through the node's stack.
pub const STACK_PATHS: &str = "STACK_PATHS";
/// Node-wide array of the endpoints that have rows in [`STACK_PATHS`], by endpoint id.
pub const STACK_USERS: &str = "STACK_USERS";
/// Node-wide table of the flows that both ends use, and of the recent flows of each endpoint.
pub const FLOWS: &str = "FLOWS";
/// Node-wide table of the keys of recent flows, by endpoint id and place.
pub const FLOWS_RECENT: &str = "FLOWS_RECENT";
/// Node-wide table of older flows that were seen in one direction.
pub const FLOWS_NEW: &str = "FLOWS_NEW";
/// Node-wide table of the ports of the latest fragmented packets of each endpoint, by endpoint id and place.
pub const FRAGMENT_SLOTS: &str = "FRAGMENT_SLOTS";
/// Node-wide table of the ports of earlier fragmented packets.
pub const FRAGMENTS: &str = "FRAGMENTS";
/// Node-wide array of what each endpoint takes of the flow tables, by endpoint id.
pub const FLOW_USE: &str = "FLOW_USE";
/// Node-wide totals of the flow tables, one row.
pub const FLOW_TOTALS: &str = "FLOW_TOTALS";
/// Node-wide array of the connections to the proxies, by the endpoint id of the client.
pub const PROXY_USE: &str = "PROXY_USE";
/// Node-wide table of the classes of peers' addresses.
pub const IPCACHE: &str = "IPCACHE";
/// Node-wide table of the classes of ports.
pub const POLICY_PORTS: &str = "POLICY_PORTS";
/// Node-wide table of the rules of all rule sets.
pub const POLICY_CELLS: &str = "POLICY_CELLS";
/// Node-wide array of the rule sets of each endpoint, by endpoint id.
pub const POLICY_SETS: &str = "POLICY_SETS";
/// Node-wide state of policy, one row.
pub const POLICY_STATE: &str = "POLICY_STATE";
/// Per-endpoint configuration, one row.
pub const CONFIG: &str = "CONFIG";
/// Per-endpoint counters.
pub const METRICS: &str = "METRICS";
/// Per-endpoint limits of bandwidth, by direction.
pub const BANDWIDTH: &str = "BANDWIDTH";
/// Per-endpoint budget of events; the programs' own, never pinned or read by user space.
pub const EVENT_BUDGET: &str = "EVENT_BUDGET";

/// Rows of [`ENDPOINTS`]: one for each family of each endpoint id (rounded up to a power of two).
pub const ENDPOINTS_MAX: u32 = 32_768;
/// Rows of [`STACK_PATHS`]: a thousand clients of eight services each, with two rows for each; 2 MiB, allocated with the map.
pub const STACK_PATHS_MAX: u32 = 16_384;
/// Ports of one pair and protocol that have rows of their own in [`STACK_PATHS`]. Of a pair that uses more (a rule that
/// translates a whole host), all flows of the protocol take the stack: one container that tries every port fills no
/// table.
pub const STACK_PATH_PORTS: u32 = 32;
/// Rows of [`STACK_USERS`]: index is the endpoint id.
pub const STACK_USERS_MAX: u32 = CALLS_MAX;
/// Rows of [`FLOWS`]: 8 MiB for the places, and about 100 bytes for each row in use.
pub const FLOWS_MAX: u32 = 524_288;
/// Recent flows of one endpoint that it began, and as many that began outside of the node: floods of other endpoints do not evict
/// their rows.
pub const FLOWS_SHARE: u32 = 256;
/// Rows of [`FLOWS_RECENT`], and rows of [`FLOWS`] that are left free for recent flows: the whole share of 512 endpoints. 2 MiB for
/// the places, and about 130 bytes for each row in use.
pub const FLOWS_RECENT_MAX: u32 = FLOWS_MAX / 4;
/// Rows of [`FLOWS`] for flows that both ends use.
pub const FLOWS_KEPT_MAX: u32 = FLOWS_MAX - FLOWS_RECENT_MAX;
/// Rows of [`FLOWS_KEPT_MAX`] that one endpoint may take: a quarter, so that none can fill the table for the others.
pub const FLOWS_QUOTA: u32 = FLOWS_KEPT_MAX / 4;
/// Rows of [`FLOWS_NEW`]: 16 MiB, allocated with the map.
pub const FLOWS_NEW_MAX: u32 = 131_072;
/// Flows that one endpoint may begin in a tick and get a row for: one endpoint needs four ticks to fill [`FLOWS_NEW`].
pub const FLOWS_PER_TICK: u32 = FLOWS_NEW_MAX / 4;
/// Places in [`FRAGMENT_SLOTS`] that an endpoint has, half of them for each direction; a power of two.
pub const FRAGMENTS_SHARE: u32 = 64;
/// Rows of [`FRAGMENT_SLOTS`]: the whole share of 1,024 endpoints; 1 MiB for the places, and about 130 bytes for each row in use.
pub const FRAGMENT_SLOTS_MAX: u32 = 65_536;
/// Rows of [`FRAGMENTS`].
pub const FRAGMENTS_MAX: u32 = 8_192;
/// Rows of [`FLOW_USE`]: index is the endpoint id; row 0 is the whole node's.
pub const FLOW_USE_MAX: u32 = CALLS_MAX;
/// Rows of [`PROXY_USE`]: index is the endpoint id; row 0 is the whole node's. 128 KiB.
pub const PROXY_USE_MAX: u32 = CALLS_MAX;
/// Rows of [`IPCACHE`]: two addresses of each endpoint id, and as many networks again and more.
pub const IPCACHE_MAX: u32 = 131_072;
/// Rows of [`POLICY_PORTS`].
pub const POLICY_PORTS_MAX: u32 = 65_536;
/// Rows of [`POLICY_CELLS`]: 4 MiB for the places, and about 100 bytes for each row in use.
pub const POLICY_CELLS_MAX: u32 = 262_144;
/// Rows of [`POLICY_SETS`]: index is the endpoint id.
pub const POLICY_SETS_MAX: u32 = CALLS_MAX;
/// Slots of [`CALLS`]: index is the endpoint id, slot 0 stays empty.
pub const CALLS_MAX: u32 = crate::MAX_ENDPOINT_ID + 1;
/// Slots of [`NODE_CALLS`]: more than there are programs, because a map keeps its size as long as endpoints use it.
pub const NODE_CALLS_MAX: u32 = 16;
/// Rows of [`PROFILES`]: index is the endpoint id; 1.3 MiB, allocated with the map.
pub const PROFILES_MAX: u32 = CALLS_MAX;
/// Bytes of [`EVENTS`]; a power of two and a multiple of the page size, as `BPF_MAP_TYPE_RINGBUF` asks.
pub const EVENTS_BYTES: u32 = 256 * 1024;
/// Drop and trace events an endpoint may send in each second-long window; beyond it they are only counted, so that a
/// hostile container cannot crowd out the others' events. CPUs that race for the last place may exceed it by one each.
pub const EVENTS_PER_SECOND: u32 = 256;

/// Rows of [`METRICS`]: 2 directions x [`crate::drop_reason::REASONS`].
pub const METRICS_MAX: u32 = 2 * crate::drop_reason::REASONS;

/// Slots of [`NODE_CALLS`]. A retired number (1 to 4) is not used again: during a change of build, older programs may call it, and
/// get the older program that is still there.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeCall {
    /// Writes an event.
    Event = 0,
    /// Judges what a container sends, and finds its way.
    Egress = 5,
    /// Judges what reaches a container, and addresses it.
    Ingress = 6,
    /// Judges and answers neighbour messages, those to a chained endpoint too.
    Neighbour = 7,
}

impl NodeCall {
    /// Each of them.
    pub const ALL: &'static [Self] = &[Self::Event, Self::Egress, Self::Ingress, Self::Neighbour];

    /// Name of the program in the object `node`.
    #[must_use]
    pub const fn program(self) -> &'static str {
        match self {
            Self::Event => "event",
            Self::Egress => "egress",
            Self::Ingress => "ingress",
            Self::Neighbour => "neighbour",
        }
    }
}
/// Program in the object `node` that removes rows of [`FLOWS`] whose flow is over. No packet runs it: user space does, by
/// `BPF_PROG_TEST_RUN`.
pub const COLLECT: &str = "collect";
/// Rows of [`BANDWIDTH`]: one for each direction.
pub const BANDWIDTH_MAX: u32 = 2;

/// Key of [`ENDPOINTS`]: an address of either family. IPv4 stands as an IPv4-mapped IPv6 address
/// (RFC 4291 section 2.5.5.2), so that one map and one lookup serve both. The families cannot meet in a key: an IPv6
/// packet to such an address is dropped before the lookup ([`crate::DropReason::InvalidDestinationIp`]), and IPAM refuses
/// a pool of them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct EndpointKey {
    /// Network byte order.
    pub addr: [u8; 16],
}

impl EndpointKey {
    /// Key of an IPv4 address given in network byte order.
    #[inline(always)]
    #[must_use]
    pub const fn v4(a: [u8; 4]) -> Self {
        Self { addr: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a[0], a[1], a[2], a[3]] }
    }

    /// The last four bytes of the address.
    #[inline(always)]
    #[must_use]
    pub const fn last_word(&self) -> u32 {
        let [.., a, b, c, d] = self.addr;
        u32::from_ne_bytes([a, b, c, d])
    }

    /// Key of an IPv6 address given in network byte order.
    #[inline(always)]
    #[must_use]
    pub const fn v6(a: [u8; 16]) -> Self {
        Self { addr: a }
    }
}

/// Value of [`ENDPOINTS`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct EndpointRow {
    /// Epoch of the attachment: tells a late reader that the row is another endpoint's by now.
    pub epoch: u64,
    /// Slot of [`CALLS`] that takes packets for the address directly: the endpoint's id. Zero where only the node's stack reaches the
    /// endpoint ([`FLAG_CHAINED`]).
    pub direct: u32,
    /// Interface index of the host side of its veth, in the node's network namespace.
    pub ifindex: u32,
    /// Security identity (reserved numbers in `wharf-core`).
    pub identity: u32,
    /// MAC address of the container's side.
    pub mac: [u8; 6],
    /// Endpoint id.
    pub endpoint_id: u16,
    /// Zero.
    pub _pad: [u8; 4],
}

/// Key of [`STACK_PATHS`]: a service of one endpoint, as another endpoint uses it. The packets of such a flow take the
/// node's stack in both directions, because a rule of the node's (DNAT) may have sent them there, and only the stack can
/// translate the replies back.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct StackPathKey {
    /// Address of the endpoint that sent the first packet through the stack.
    pub client: EndpointKey,
    /// Address of the endpoint that received that packet.
    pub server: EndpointKey,
    /// The server's port, network byte order, of TCP, UDP and SCTP, and the identifier of an ICMP echo. Zero for other protocols, and
    /// in the row that counts the pair's ports.
    pub port: u16,
    /// Protocol number (IANA).
    pub protocol: u8,
    /// Zero.
    pub _pad: [u8; 5],
}

/// Value of [`STACK_PATHS`]. A row counts while both epochs are those of the endpoints that have the addresses, so that an
/// endpoint never inherits the rows of the one that had its address before, and a delete removes none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct StackPathRow {
    /// Epoch of the client's attachment.
    pub client_epoch: u64,
    /// Epoch of the server's attachment.
    pub server_epoch: u64,
    /// In the row with port 0: how many ports of the pair were noted, [`STACK_PATH_PORTS`] at most. Zero in other rows.
    pub ports: u32,
    /// Zero.
    pub _pad: u32,
}

/// Constants of an endpoint's programs: the `CONSTS` global, set before load and frozen by the kernel. They are known
/// before the endpoint is (its id, its MAC pair), so that programs can be verified ahead of need.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct EndpointConsts {
    /// Must equal [`crate::ABI_VERSION`]; user space reads it back from a pinned program set.
    pub abi_version: u32,
    /// Endpoint id.
    pub endpoint_id: u32,
    /// MAC address of the container's side: the only Ethernet source it may use.
    pub container_mac: [u8; 6],
    /// MAC address of the host's side: what ARP and neighbour discovery answer with.
    pub host_mac: [u8; 6],
    /// Non-zero: the programs write aya-log records (only in objects built with the `debug-log` feature).
    pub debug: u32,
}

/// [`EndpointConfig::flags`]: the endpoint may send and receive. While clear, every packet drops with
/// [`crate::DropReason::EndpointNotReady`].
pub const FLAG_LIVE: u32 = 1 << 0;
/// [`EndpointConfig::flags`]: forwarded packets are traced to [`EVENTS`] too, not only drops.
pub const FLAG_TRACE: u32 = 1 << 1;

/// [`EndpointConfig::flags`]: what the container sends to other endpoints of the node goes through the node's stack too.
pub const FLAG_LOCAL_BY_STACK: u32 = 1 << 2;

/// [`EndpointConfig::flags`]: the bandwidth toward the container is limited by the row of [`BANDWIDTH`].
pub const FLAG_LIMIT_INGRESS: u32 = 1 << 3;
/// [`EndpointConfig::flags`]: the bandwidth from the container is limited by the row of [`BANDWIDTH`].
pub const FLAG_LIMIT_EGRESS: u32 = 1 << 4;

/// [`EndpointConfig::flags`]: another plugin made the endpoint's link. Its neighbours on the link are not the node alone: neighbour messages pass when
/// what they say of the container is true, any Ethernet destination is allowed, and no Ethernet address is changed. Set with
/// [`FLAG_LOCAL_BY_STACK`].
pub const FLAG_CHAINED: u32 = 1 << 5;

/// The flag of a direction's limit.
#[inline(always)]
#[must_use]
pub const fn limit_flag(direction: Direction) -> u32 {
    match direction {
        Direction::Ingress => FLAG_LIMIT_INGRESS,
        Direction::Egress => FLAG_LIMIT_EGRESS,
    }
}

/// The row of [`CONFIG`] that programs read: another one in the tests' next ABI version (`crate::abi`).
pub const CONFIG_ROW: u32 = if cfg!(feature = "next-abi") { 1 } else { 0 };

/// Value of [`CONFIG`]. An absent family has an all-zero address, and packets of that family drop with
/// [`crate::DropReason::InvalidSourceIp`] (they cannot have a valid source).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct EndpointConfig {
    /// Epoch of the attachment.
    pub epoch: u64,
    /// Interface index of the host side: where `deliver` sends.
    pub ifindex: u32,
    /// `FLAG_*` bits.
    pub flags: u32,
    /// Security identity.
    pub identity: u32,
    /// The endpoint's IPv4 address, network byte order; zero when it has none.
    pub ipv4: [u8; 4],
    /// The gateway it sees (the node's router address), network byte order; ARP for it is answered.
    pub gateway4: [u8; 4],
    /// Zero.
    pub _pad: [u8; 4],
    /// The endpoint's IPv6 address, network byte order; zero when it has none.
    pub ipv6: [u8; 16],
    /// The IPv6 gateway it sees; neighbour solicitations for it are answered.
    pub gateway6: [u8; 16],
}

/// Value of [`PROFILES`]: what the programs of an endpoint know of it, its row of [`CONFIG`] and its MAC addresses, for the node's programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct EndpointProfile {
    /// The row of [`CONFIG`].
    pub config: EndpointConfig,
    /// As [`EndpointConsts::container_mac`].
    pub container_mac: [u8; 6],
    /// As [`EndpointConsts::host_mac`].
    pub host_mac: [u8; 6],
    /// Zero.
    pub _pad: [u8; 4],
}

/// Value of [`METRICS`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct Counter {
    /// Packets (a GSO packet counts once).
    pub packets: u64,
    /// Bytes, Ethernet header included.
    pub bytes: u64,
}

/// Value of [`BANDWIDTH`]. User space writes a row when a limit is set or changed; the programs write `empty_at_ns` alone.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct Bucket {
    /// Bits a second; zero is no limit.
    pub rate: u64,
    /// Time in which the rate fills an empty bucket, nanoseconds: the burst divided by the rate.
    pub burst_ns: u64,
    /// When the bucket is empty, nanoseconds since boot (CLOCK_MONOTONIC). Later than now while packets that passed are
    /// still to be paid for.
    pub empty_at_ns: u64,
}

/// Value of [`EVENT_BUDGET`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct EventBudget {
    /// Start of the window, nanoseconds since boot (CLOCK_MONOTONIC).
    pub window_ns: u64,
    /// Events sent in the window.
    pub used: u64,
}

#[cfg(feature = "user")]
crate::pod!(
    EndpointKey,
    EndpointRow,
    StackPathKey,
    StackPathRow,
    EndpointConsts,
    EndpointConfig,
    EndpointProfile,
    Counter,
    Bucket,
    EventBudget,
);

const _: () = {
    use core::mem::size_of;
    assert!(size_of::<EndpointKey>() == 16);
    assert!(size_of::<EndpointRow>() == 32);
    assert!(size_of::<StackPathKey>() == 40);
    assert!(size_of::<StackPathRow>() == 24);
    assert!(size_of::<EndpointConsts>() == 24);
    assert!(size_of::<EndpointConfig>() == 64);
    assert!(size_of::<EndpointProfile>() == size_of::<EndpointConfig>() + 16);
    assert!(size_of::<Counter>() == 16);
    assert!(size_of::<Bucket>() == 24);
    assert!(size_of::<EventBudget>() == 16);
};
