//! Map names, keys and values.
//!
//! | map | kind | scope | key -> value |
//! |---|---|---|---|
//! | `ENDPOINTS` | hash, no prealloc | node | [`EndpointKey`] -> [`EndpointRow`] |
//! | `CALLS` | program array | node | endpoint id -> `deliver` program |
//! | `NODE_CALLS` | program array | node | [`NodeCall`] -> node program |
//! | `PROFILES` | array | node | endpoint id -> [`EndpointProfile`] |
//! | `EVENTS` | ring buffer | node | [`crate::Event`] |
//! | `STACK_PATHS` | LRU hash | node | [`StackPathKey`] -> [`StackPathRow`] |
//! | `STACK_USERS` | array | node | endpoint id -> epoch of the endpoint |
//! | `FLOWS` | hash, no prealloc | node | [`crate::FlowKey`] -> [`crate::FlowRow`] |
//! | `FLOWS_RECENT` | hash, no prealloc | node | endpoint id and place -> [`crate::FlowKey`] |
//! | `FLOWS_NEW` | LRU hash | node | [`crate::FlowKey`] -> [`crate::FlowRow`] |
//! | `FRAGMENT_SLOTS` | hash, no prealloc | node | endpoint id and place -> [`crate::FragmentSlot`] |
//! | `FRAGMENTS` | LRU hash | node | [`crate::FragmentKey`] -> [`crate::FragmentRow`] |
//! | `FLOW_USE` | array | node | endpoint id -> [`crate::FlowUse`] |
//! | `FLOW_TOTALS` | array of 1 | node | 0 -> [`crate::FlowTotals`] |
//! | `PROXY_USE` | array, mapped by user space | node | endpoint id -> [`crate::ProxyUse`] |
//! | `IPCACHE` | LPM trie | node | prefix of [`EndpointKey`] -> [`crate::PeerRow`] |
//! | `POLICY_PORTS` | LPM trie | node | prefix of [`crate::PortKey`] -> port class |
//! | `POLICY_CELLS` | hash, no prealloc | node | [`crate::CellKey`] -> [`crate::CellRow`] |
//! | `POLICY_SETS` | array | node | endpoint id -> [`crate::SetsRow`] |
//! | `POLICY_STATE` | array of 1 | node | 0 -> [`crate::PolicyState`] |
//! | `CONFIG` | array of 1 | endpoint | 0 -> [`EndpointConfig`] |
//! | `METRICS` | per-CPU array | endpoint | `direction * REASONS + reason` -> [`Counter`] |
//! | `BANDWIDTH` | array of 2 | endpoint | [`crate::Direction`] -> [`Bucket`] |
//! | `EVENT_BUDGET` | array of 1 | endpoint | 0 -> [`EventBudget`] |
//!
//! An array lookup is one load without a hash; a hash without prealloc uses memory only for its rows. Reasons per
//! map:
//!
//! - `ENDPOINTS`: one exact lookup decides local delivery; two rows (v4, v6) for each possible endpoint.
//! - `CALLS`: the receiver's program polices its packets; an empty slot drops.
//! - `NODE_CALLS`: shared programs are verified once; an empty slot returns to the caller.
//! - `PROFILES`: the endpoint's `deliver` copies `CONFIG` and its constants here for the node programs. A row per
//!   endpoint, because a row per CPU would need a guard against every other run on that CPU. Row 0 has ifindex and
//!   MAC (`host_mac`) of the link that turns packets back to the proxy; it is zero without redirects.
//! - `EVENTS`: ordered across CPUs, one reader; when full, events are counted as lost, and no program blocks.
//! - `STACK_PATHS`: services of an endpoint that another endpoint reaches through the node's stack; a row per pair
//!   and service, not per flow, so that no flood of flows evicts a used row.
//! - `STACK_USERS`: endpoints with rows in `STACK_PATHS`; all others skip the lookup.
//! - `FLOWS`: kept flows, and each endpoint's recent flows: a plain hash evicts nothing. One table for all, because a
//!   place costs 16 bytes even when empty.
//! - `FLOWS_RECENT`: order of each endpoint's recent flows; the kernel's LRU has no order per owner.
//! - `FLOWS_NEW`: older flows with packets in one direction; a flood evicts the oldest of all endpoints.
//! - `FRAGMENT_SLOTS`: ports and protocol of each endpoint's latest fragmented packets; other endpoints cannot take
//!   its places.
//! - `FRAGMENTS`: the same for displaced packets, for a short time.
//! - `FLOW_USE`: quotas.
//! - `FLOW_TOTALS`: fill, collection and refusals; written only on rare paths.
//! - `PROXY_USE`: the proxies' connections per client. Programs and user space each write one word of a row at any time;
//!   an update through the kernel would write both.
//! - `IPCACHE`: policy's view of addresses: endpoints, and networks that rules name.
//! - `POLICY_PORTS`: a port range is few prefixes.
//! - `POLICY_CELLS`: all rule sets in one table; endpoints with equal rules share them.
//! - `POLICY_STATE`: one load per packet of a judged flow.
//! - `CONFIG`: data that changes without a new program: addresses, identity, gate.
//! - `METRICS`: counted without atomics; readers sum.
//! - `BANDWIDTH`: one bucket for all CPUs: with per-CPU buckets a flow that changes its CPU would get the rate again.
//!   Read only under a flag of `CONFIG`.
//! - `EVENT_BUDGET`: one budget for all CPUs: a per-CPU budget would grow with the machine; a flood only reads it.
//!   Not pinned: a new program set starts with a new budget.

use crate::Direction;

/// Local endpoints by address.
pub const ENDPOINTS: &str = "ENDPOINTS";
/// `deliver` programs by endpoint id.
pub const CALLS: &str = "CALLS";
/// Node programs by [`NodeCall`].
pub const NODE_CALLS: &str = "NODE_CALLS";
/// Endpoint data for node programs.
pub const PROFILES: &str = "PROFILES";
/// Event ring buffer.
pub const EVENTS: &str = "EVENTS";
/// Services reached through the stack.
pub const STACK_PATHS: &str = "STACK_PATHS";
/// Endpoints with rows in [`STACK_PATHS`].
pub const STACK_USERS: &str = "STACK_USERS";
/// Kept and recent flows.
pub const FLOWS: &str = "FLOWS";
/// Keys of recent flows.
pub const FLOWS_RECENT: &str = "FLOWS_RECENT";
/// Older one-way flows.
pub const FLOWS_NEW: &str = "FLOWS_NEW";
/// Ports of recent fragmented packets.
pub const FRAGMENT_SLOTS: &str = "FRAGMENT_SLOTS";
/// Ports of earlier fragmented packets.
pub const FRAGMENTS: &str = "FRAGMENTS";
/// Use of the flow tables.
pub const FLOW_USE: &str = "FLOW_USE";
/// Totals of the flow tables.
pub const FLOW_TOTALS: &str = "FLOW_TOTALS";
/// Connections to the proxies, by the client's endpoint id.
pub const PROXY_USE: &str = "PROXY_USE";
/// Peer address classes.
pub const IPCACHE: &str = "IPCACHE";
/// Port classes.
pub const POLICY_PORTS: &str = "POLICY_PORTS";
/// All rules.
pub const POLICY_CELLS: &str = "POLICY_CELLS";
/// Rule sets by endpoint id.
pub const POLICY_SETS: &str = "POLICY_SETS";
/// State of policy.
pub const POLICY_STATE: &str = "POLICY_STATE";
/// Endpoint configuration.
pub const CONFIG: &str = "CONFIG";
/// Endpoint counters.
pub const METRICS: &str = "METRICS";
/// Bandwidth limits by direction.
pub const BANDWIDTH: &str = "BANDWIDTH";
/// Event budget; neither pinned nor read by user space.
pub const EVENT_BUDGET: &str = "EVENT_BUDGET";

/// One per family and endpoint id (rounded up to a power of two).
pub const ENDPOINTS_MAX: u32 = 32_768;
/// A thousand clients of eight services, two rows each; 2 MiB, allocated with the map.
pub const STACK_PATHS_MAX: u32 = 16_384;
/// Ports of one pair and protocol with a row. When a pair uses more (a rule that translates a whole host), all its
/// flows of the protocol take the stack: a container that tries every port fills no table.
pub const STACK_PATH_PORTS: u32 = 32;
/// Rows by endpoint id.
pub const STACK_USERS_MAX: u32 = CALLS_MAX;
/// 8 MiB for the places, about 100 bytes per used row.
pub const FLOWS_MAX: u32 = 524_288;
/// Recent flows that an endpoint began, and as many from outside the node; floods of other endpoints do not evict
/// them.
pub const FLOWS_SHARE: u32 = 256;
/// Also rows of [`FLOWS`] reserved for recent flows: the whole share of 512 endpoints. 2 MiB for the places, about
/// 130 bytes per used row.
pub const FLOWS_RECENT_MAX: u32 = FLOWS_MAX / 4;
/// Rows of [`FLOWS`] for kept flows.
pub const FLOWS_KEPT_MAX: u32 = FLOWS_MAX - FLOWS_RECENT_MAX;
/// Kept rows per endpoint: a quarter, so that none can fill the table.
pub const FLOWS_QUOTA: u32 = FLOWS_KEPT_MAX / 4;
/// 16 MiB, allocated with the map.
pub const FLOWS_NEW_MAX: u32 = 131_072;
/// Flows with a row per endpoint and tick: filling [`FLOWS_NEW`] takes an endpoint four ticks.
pub const FLOWS_PER_TICK: u32 = FLOWS_NEW_MAX / 4;
/// Places per endpoint in [`FRAGMENT_SLOTS`], half per direction; a power of two.
pub const FRAGMENTS_SHARE: u32 = 64;
/// The whole share of 1,024 endpoints; 1 MiB for the places, about 130 bytes per used row.
pub const FRAGMENT_SLOTS_MAX: u32 = 65_536;
/// Rows of [`FRAGMENTS`].
pub const FRAGMENTS_MAX: u32 = 8_192;
/// Rows by endpoint id; row 0 is the node's.
pub const FLOW_USE_MAX: u32 = CALLS_MAX;
/// Rows: one per endpoint id, and row 0 for the node. 128 KiB.
pub const PROXY_USE_MAX: u32 = CALLS_MAX;
/// Rows: two addresses per endpoint id, and more than as many networks.
pub const IPCACHE_MAX: u32 = 131_072;
/// Rows of [`POLICY_PORTS`].
pub const POLICY_PORTS_MAX: u32 = 65_536;
/// 4 MiB for the places, about 100 bytes per used row.
pub const POLICY_CELLS_MAX: u32 = 262_144;
/// Rows by endpoint id.
pub const POLICY_SETS_MAX: u32 = CALLS_MAX;
/// Slots by endpoint id; slot 0 stays empty.
pub const CALLS_MAX: u32 = crate::MAX_ENDPOINT_ID + 1;
/// Slots, with spare ones, because a map keeps its size while endpoints use it.
pub const NODE_CALLS_MAX: u32 = 16;
/// Rows by endpoint id; 1.3 MiB, allocated with the map.
pub const PROFILES_MAX: u32 = CALLS_MAX;
/// Size in bytes: a power of two and a multiple of the page size, for `BPF_MAP_TYPE_RINGBUF`.
pub const EVENTS_BYTES: u32 = 256 * 1024;
/// Drop and trace events per endpoint and second; further ones are only counted, so that a hostile container cannot
/// displace others' events. Racing CPUs can each exceed it by one.
pub const EVENTS_PER_SECOND: u32 = 256;

/// 2 directions x [`crate::drop_reason::REASONS`].
pub const METRICS_MAX: u32 = 2 * crate::drop_reason::REASONS;

/// Slots of [`NODE_CALLS`]. Retired numbers (1 to 4) are not reused: older programs can still call the programs there
/// during a change of build.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeCall {
    /// Writes an event.
    Event = 0,
    /// Judges packets from a container.
    Egress = 5,
    /// Judges packets to a container.
    Ingress = 6,
    /// Judges and answers neighbour messages.
    Neighbour = 7,
}

impl NodeCall {
    /// All, in number order.
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
/// Program in the object `node` that removes finished flows. User space runs it by `BPF_PROG_TEST_RUN`; no packet
/// does.
pub const COLLECT: &str = "collect";
/// One per direction.
pub const BANDWIDTH_MAX: u32 = 2;

/// An address of either family, IPv4 as IPv4-mapped (RFC 4291 section 2.5.5.2). The families cannot collide: an IPv6
/// packet to such an address is dropped before the lookup ([`crate::DropReason::InvalidDestinationIp`]), and IPAM
/// rejects a pool of them.
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
    /// Network byte order.
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

    /// Network byte order.
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
    /// Epoch of the attachment: reveals to a late reader that the row is another endpoint's.
    pub epoch: u64,
    /// Slot of [`CALLS`] for direct delivery: the endpoint id. Zero where only the stack reaches the endpoint
    /// ([`FLAG_CHAINED`]).
    pub direct: u32,
    /// Host side of the veth, in the node's network namespace.
    pub ifindex: u32,
    /// Security identity (reserved numbers in `wharf-core`).
    pub identity: u32,
    /// Container side.
    pub mac: [u8; 6],
    /// Endpoint id.
    pub endpoint_id: u16,
    /// Zero.
    pub _pad: [u8; 4],
}

/// A service of one endpoint, as used by another. Such flows take the node's stack both ways, because a node rule
/// (DNAT) may have sent them there, and only the stack can translate the replies back.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct StackPathKey {
    /// Address of the endpoint that sent the first packet.
    pub client: EndpointKey,
    /// Address of the endpoint that received it.
    pub server: EndpointKey,
    /// Server port for TCP, UDP and SCTP, or an ICMP echo's identifier, network byte order. Zero for other protocols,
    /// and in the row that counts the pair's ports.
    pub port: u16,
    /// Protocol number (IANA).
    pub protocol: u8,
    /// Zero.
    pub _pad: [u8; 5],
}

/// Value of [`STACK_PATHS`]. Valid while both epochs match the endpoints with these addresses: no endpoint inherits a
/// predecessor's rows, and a delete removes no rows.
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
    /// In the row with port 0: the pair's recorded ports, at most [`STACK_PATH_PORTS`]. Else zero.
    pub ports: u32,
    /// Zero.
    pub _pad: u32,
}

/// Constants of an endpoint's programs: the global `CONSTS`, set before load and frozen. Id and MACs are chosen
/// before the endpoint exists, so that programs can be verified ahead of need.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct EndpointConsts {
    /// Equals [`crate::ABI_VERSION`]; user space reads it from pinned programs.
    pub abi_version: u32,
    /// Endpoint id.
    pub endpoint_id: u32,
    /// Container side: the only Ethernet source it may use.
    pub container_mac: [u8; 6],
    /// Host side: answer of ARP and neighbour discovery.
    pub host_mac: [u8; 6],
    /// Non-zero: write aya-log records (only with the feature `debug-log`).
    pub debug: u32,
}

/// [`EndpointConfig::flags`]: the endpoint may send and receive. While clear, packets drop with
/// [`crate::DropReason::EndpointNotReady`].
pub const FLAG_LIVE: u32 = 1 << 0;
/// [`EndpointConfig::flags`]: [`EVENTS`] gets forwarded packets too, not only drops.
pub const FLAG_TRACE: u32 = 1 << 1;

/// [`EndpointConfig::flags`]: packets to other endpoints of the node also take its stack.
pub const FLAG_LOCAL_BY_STACK: u32 = 1 << 2;

/// [`EndpointConfig::flags`]: [`BANDWIDTH`] limits packets to the container.
pub const FLAG_LIMIT_INGRESS: u32 = 1 << 3;
/// [`EndpointConfig::flags`]: [`BANDWIDTH`] limits packets from the container.
pub const FLAG_LIMIT_EGRESS: u32 = 1 << 4;

/// [`EndpointConfig::flags`]: another plugin made the link, which can have other neighbours: neighbour messages with
/// true claims about the container pass, any Ethernet destination is allowed, and no Ethernet address is changed. Set
/// with [`FLAG_LOCAL_BY_STACK`].
pub const FLAG_CHAINED: u32 = 1 << 5;

/// The limit flag of `direction`.
#[inline(always)]
#[must_use]
pub const fn limit_flag(direction: Direction) -> u32 {
    match direction {
        Direction::Ingress => FLAG_LIMIT_INGRESS,
        Direction::Egress => FLAG_LIMIT_EGRESS,
    }
}

/// Differs in the tests' next ABI version (`crate::abi`).
pub const CONFIG_ROW: u32 = if cfg!(feature = "next-abi") { 1 } else { 0 };

/// Value of [`CONFIG`]. A missing family's address is zero; its packets drop with
/// [`crate::DropReason::InvalidSourceIp`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct EndpointConfig {
    /// Epoch of the attachment.
    pub epoch: u64,
    /// Host side: target of `deliver`.
    pub ifindex: u32,
    /// `FLAG_*` bits.
    pub flags: u32,
    /// Security identity.
    pub identity: u32,
    /// Network byte order; zero for none.
    pub ipv4: [u8; 4],
    /// Gateway (the node's router address), network byte order; ARP for it is answered.
    pub gateway4: [u8; 4],
    /// Zero.
    pub _pad: [u8; 4],
    /// Network byte order; zero for none.
    pub ipv6: [u8; 16],
    /// IPv6 gateway; neighbour solicitations for it are answered.
    pub gateway6: [u8; 16],
}

/// Value of [`PROFILES`]: an endpoint's data for the node programs.
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

/// Value of [`BANDWIDTH`]. User space writes it when a limit changes; programs write only `empty_at_ns`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct Bucket {
    /// Bits per second; zero is no limit.
    pub rate: u64,
    /// Time to fill an empty bucket (burst divided by rate), nanoseconds.
    pub burst_ns: u64,
    /// Nanoseconds since boot (CLOCK_MONOTONIC); in the future while passed packets are unpaid.
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
