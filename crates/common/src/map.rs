//! Map names, keys and values. Plain hashes are not preallocated. The maps from `CONFIG` on exist per endpoint, the
//! others per node.

use crate::Direction;

/// Hash, [`EndpointKey`] to [`EndpointRow`]: one exact lookup for local delivery.
pub const ENDPOINTS: &str = "ENDPOINTS";
/// Program array of `deliver` by endpoint id; an empty slot drops.
pub const CALLS: &str = "CALLS";
/// Program array by [`NodeCall`]: programs verified once per node; an empty slot returns to the caller.
pub const NODE_CALLS: &str = "NODE_CALLS";
/// Array of [`EndpointProfile`] by endpoint id, written by `deliver` for node programs. Not per CPU: runs on one CPU
/// can interleave. Row 0: ifindex and `host_mac` of the link that turns packets back to the proxy; zero without
/// redirects.
pub const PROFILES: &str = "PROFILES";
/// Ring buffer of [`crate::Event`], ordered across CPUs. When it is full, events only count as lost.
pub const EVENTS: &str = "EVENTS";
/// LRU hash, [`StackPathKey`] to [`StackPathRow`]. A row per pair and service: no flood of flows evicts it.
pub const STACK_PATHS: &str = "STACK_PATHS";
/// Array by endpoint id, of endpoints with rows in [`STACK_PATHS`]; others skip the lookup. Low half: epoch; high half:
/// tick of the latest new row (zero by earlier programs).
pub const STACK_USERS: &str = "STACK_USERS";
/// Hash, host ifindex (`u32`) to [`SourcesRow`], for endpoints with [`FLAG_SOURCES`].
pub const SOURCES: &str = "SOURCES";
/// Hash, [`crate::FlowKey`] to [`crate::FlowRow`]: kept and recent flows, without eviction.
pub const FLOWS: &str = "FLOWS";
/// Hash, endpoint id and place to [`crate::FlowKey`]: recent flows in order per owner, which an LRU hash lacks.
pub const FLOWS_RECENT: &str = "FLOWS_RECENT";
/// LRU hash, as [`FLOWS`]: older one-way flows of all endpoints.
pub const FLOWS_NEW: &str = "FLOWS_NEW";
/// Per-CPU array of [`crate::CachedFlow`] by hash: what packets of busy flows need instead of two lookups in hashes.
pub const FLOW_CACHE: &str = "FLOW_CACHE";
/// Array of `u32` by endpoint id, increased by programs when a flow of the endpoint is reset or replaced, or gets
/// another path: ends the endpoint's entries of [`FLOW_CACHE`].
pub const FLOW_CACHE_ENDS: &str = "FLOW_CACHE_ENDS";
/// Hash, endpoint id and place to [`crate::FragmentSlot`]: no endpoint takes another's places.
pub const FRAGMENT_SLOTS: &str = "FRAGMENT_SLOTS";
/// LRU hash, [`crate::FragmentKey`] to [`crate::FragmentRow`]: displaced packets.
pub const FRAGMENTS: &str = "FRAGMENTS";
/// Array of [`crate::FlowUse`] by endpoint id.
pub const FLOW_USE: &str = "FLOW_USE";
/// One [`crate::FlowTotals`], written only on rare paths.
pub const FLOW_TOTALS: &str = "FLOW_TOTALS";
/// Array of [`crate::ProxyUse`] by endpoint id. Mapped: programs and user space each write one word of a row, and a
/// kernel update would write both.
pub const PROXY_USE: &str = "PROXY_USE";
/// LPM trie, prefix of [`EndpointKey`] to [`crate::PeerRow`]: endpoints, and networks of rules.
pub const IPCACHE: &str = "IPCACHE";
/// LPM trie, prefix of [`crate::PortKey`] to port class: a range is few prefixes.
pub const POLICY_PORTS: &str = "POLICY_PORTS";
/// Hash, [`crate::CellKey`] to [`crate::CellRow`]: endpoints with equal rules share rule sets.
pub const POLICY_CELLS: &str = "POLICY_CELLS";
/// Array of [`crate::SetsRow`] by endpoint id.
pub const POLICY_SETS: &str = "POLICY_SETS";
/// One [`crate::PolicyState`]: one load per packet.
pub const POLICY_STATE: &str = "POLICY_STATE";
/// Array of `u32` by [`EndpointKey::generation_slot`]: changes of rows of [`ENDPOINTS`], and of whole addresses in
/// [`IPCACHE`]. Only flows of the changed slot are judged again.
pub const ADDRESS_GENERATIONS: &str = "ADDRESS_GENERATIONS";
/// One [`EndpointConfig`]: data that changes without a new program.
pub const CONFIG: &str = "CONFIG";
/// Per-CPU array of [`Counter`], `direction * REASONS + reason`, without atomics; readers sum.
pub const METRICS: &str = "METRICS";
/// Array of [`Bucket`] by [`crate::Direction`]. Not per CPU: a flow that changes its CPU must not get the rate again.
pub const BANDWIDTH: &str = "BANDWIDTH";
/// One [`EventBudget`]. Not per CPU: the budget must not grow with the machine. Not pinned.
pub const EVENT_BUDGET: &str = "EVENT_BUDGET";

/// Two per endpoint id, rounded up to a power of two.
pub const ENDPOINTS_MAX: u32 = 32_768;
/// A thousand clients of eight services, two rows each; 2 MiB.
pub const STACK_PATHS_MAX: u32 = 16_384;
/// Ports per pair and protocol; with more, the whole protocol takes the stack: a port scan fills no table.
pub const STACK_PATH_PORTS: u32 = 32;
/// By endpoint id.
pub const STACK_USERS_MAX: u32 = CALLS_MAX;
/// One per endpoint. 256 KiB, about 350 bytes per used row.
pub const SOURCES_MAX: u32 = CALLS_MAX;
/// Prefixes per endpoint, of both families together.
pub const SOURCES_SHARE: usize = 8;
/// 8 MiB empty (16 bytes per place), about 100 bytes per used row.
pub const FLOWS_MAX: u32 = 524_288;
/// Recent flows of an endpoint, and as many from outside the node.
pub const FLOWS_SHARE: u32 = 256;
/// Also the recent rows of [`FLOWS`]: 512 endpoints' shares. 2 MiB, about 130 bytes per used row.
pub const FLOWS_RECENT_MAX: u32 = FLOWS_MAX / 4;
/// Kept rows of [`FLOWS`].
pub const FLOWS_KEPT_MAX: u32 = FLOWS_MAX - FLOWS_RECENT_MAX;
/// Kept rows per endpoint: none can fill the table.
pub const FLOWS_QUOTA: u32 = FLOWS_KEPT_MAX / 4;
/// 16 MiB.
pub const FLOWS_NEW_MAX: u32 = 131_072;
/// A power of two; 48 KiB for each possible CPU.
pub const FLOW_CACHE_MAX: u32 = 1_024;
/// By endpoint id; 128 KiB.
pub const FLOW_CACHE_ENDS_MAX: u32 = CALLS_MAX;
/// New rows per endpoint and tick: filling [`FLOWS_NEW`] takes four ticks.
pub const FLOWS_PER_TICK: u32 = FLOWS_NEW_MAX / 4;
/// Places per endpoint, half per direction; a power of two.
pub const FRAGMENTS_SHARE: u32 = 64;
/// The share of 1,024 endpoints; 1 MiB, about 130 bytes per used row.
pub const FRAGMENT_SLOTS_MAX: u32 = 65_536;
/// Rows of [`FRAGMENTS`].
pub const FRAGMENTS_MAX: u32 = 8_192;
/// By endpoint id; row 0 is the node's.
pub const FLOW_USE_MAX: u32 = CALLS_MAX;
/// By endpoint id; row 0 is the node's. 128 KiB.
pub const PROXY_USE_MAX: u32 = CALLS_MAX;
/// Two addresses and two networks per endpoint id, two addresses of 155,000 pods of other nodes.
pub const IPCACHE_MAX: u32 = 524_288;
/// Rows of a table of version 5, which an upgraded node uses until its next boot.
pub const IPCACHE_LEAST: u32 = 131_072;
/// A power of two; 16 KiB. At 1,000 address changes a second, a flow is judged again about every two seconds.
pub const ADDRESS_GENERATIONS_MAX: u32 = 4_096;
/// Rows.
pub const POLICY_PORTS_MAX: u32 = 65_536;
/// 4 MiB, about 100 bytes per used row.
pub const POLICY_CELLS_MAX: u32 = 262_144;
/// By endpoint id.
pub const POLICY_SETS_MAX: u32 = CALLS_MAX;
/// By endpoint id; slot 0 stays empty.
pub const CALLS_MAX: u32 = crate::MAX_ENDPOINT_ID + 1;
/// With spare slots: a map in use keeps its size.
pub const NODE_CALLS_MAX: u32 = 16;
/// By endpoint id; 1.3 MiB.
pub const PROFILES_MAX: u32 = CALLS_MAX;
/// A power of two and a multiple of the page size (`BPF_MAP_TYPE_RINGBUF`).
pub const EVENTS_BYTES: u32 = 256 * 1024;
/// Per endpoint and second, so that no container displaces others' events; more only count. Each racing CPU can exceed
/// it by one.
pub const EVENTS_PER_SECOND: u32 = 256;

/// 2 directions x [`crate::drop_reason::REASONS`].
pub const METRICS_MAX: u32 = 2 * crate::drop_reason::REASONS;

/// Slots of [`NODE_CALLS`]. 1 to 4 and 6 are retired: older programs can still call them.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NodeCall {
    /// Writes an event.
    Event = 0,
    /// Judges packets, and finds their flow.
    Judge = 5,
    /// Answers neighbour messages.
    Neighbour = 7,
    /// Passes packets that do not change their flow.
    Established = 8,
}

impl NodeCall {
    /// In number order.
    pub const ALL: &'static [Self] = &[Self::Event, Self::Judge, Self::Neighbour, Self::Established];

    /// Name in the object `node`.
    #[must_use]
    pub const fn program(self) -> &'static str {
        match self {
            Self::Event => "event",
            Self::Judge => "judge",
            Self::Neighbour => "neighbour",
            Self::Established => "established",
        }
    }
}
/// Judges packets behind a service's translation; at the router's link.
pub const TRANSLATED: &str = "translated";
/// Removes finished flows; run by `BPF_PROG_TEST_RUN`.
pub const COLLECT: &str = "collect";
/// One per direction.
pub const BANDWIDTH_MAX: u32 = 2;

/// An address, IPv4 as IPv4-mapped (RFC 4291, 2.5.5.2). IPv6 packets with such destinations drop
/// ([`crate::DropReason::InvalidDestinationIp`]), and IPAM rejects such pools.
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

    /// Last four bytes.
    #[inline(always)]
    #[must_use]
    pub const fn last_word(&self) -> u32 {
        let [.., a, b, c, d] = self.addr;
        u32::from_ne_bytes([a, b, c, d])
    }

    /// Row of [`ADDRESS_GENERATIONS`]: the address's low bits.
    #[inline(always)]
    #[must_use]
    pub const fn generation_slot(&self) -> u32 {
        u32::from_be(self.last_word()) & (ADDRESS_GENERATIONS_MAX - 1)
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
    /// Of the attachment: reveals a reused row to late readers.
    pub epoch: u64,
    /// Slot of [`CALLS`]; zero with [`FLAG_CHAINED`]: only the stack reaches the endpoint.
    pub direct: u32,
    /// Host side of the veth.
    pub ifindex: u32,
    /// Security identity.
    pub identity: u32,
    /// Container side.
    pub mac: [u8; 6],
    pub endpoint_id: u16,
    /// Zero.
    pub _pad: [u8; 4],
}

/// A service that another endpoint used through the stack. Its flows take the stack both ways: only the stack can undo
/// a node rule's DNAT in replies.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct StackPathKey {
    /// Sender of the first packet.
    pub client: EndpointKey,
    /// Its receiver.
    pub server: EndpointKey,
    /// Server port or ICMP echo identifier, network byte order. Zero for other protocols, and in the row that counts
    /// the ports.
    pub port: u16,
    /// IANA number.
    pub protocol: u8,
    /// Zero.
    pub _pad: [u8; 5],
}

/// Value of [`STACK_PATHS`], valid while both epochs match; deleting an endpoint removes no rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct StackPathRow {
    /// Client's attachment.
    pub client_epoch: u64,
    /// Server's attachment.
    pub server_epoch: u64,
    /// Recorded ports, in the row with port 0.
    pub ports: u32,
    /// Zero.
    pub _pad: u32,
}

/// A prefix, IPv4 as IPv4-mapped: the addresses that equal `addr` under the mask.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct SourcePrefix {
    /// Network byte order.
    pub addr: [u8; 16],
    /// Network byte order.
    pub mask: [u8; 16],
}

impl SourcePrefix {
    /// Contains no address: `addr` has bits outside of the mask.
    pub const NONE: Self = Self { addr: [0xff; 16], mask: [0; 16] };
}

impl Default for SourcePrefix {
    fn default() -> Self {
        Self::NONE
    }
}

/// Value of [`SOURCES`], replaced whole; written before [`FLAG_SOURCES`] is set, removed after it is cleared.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct SourcesRow {
    /// Of the attachment.
    pub epoch: u64,
    pub endpoint_id: u16,
    /// Zero.
    pub _pad: [u8; 6],
    /// Unused slots are [`SourcePrefix::NONE`].
    pub prefixes: [SourcePrefix; SOURCES_SHARE],
}

/// Frozen global `CONSTS`. Chosen before the endpoint exists: programs are verified ahead of need.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct EndpointConsts {
    /// [`crate::ABI_VERSION`], for readers of pinned programs.
    pub abi_version: u32,
    pub endpoint_id: u32,
    /// The only Ethernet source the container may use.
    pub container_mac: [u8; 6],
    /// Answer of ARP and neighbour discovery.
    pub host_mac: [u8; 6],
    /// Non-zero: write aya-log records (feature `debug-log`).
    pub debug: u32,
}

/// [`EndpointConfig::flags`]: packets pass, else they drop ([`crate::DropReason::EndpointNotReady`]).
pub const FLAG_LIVE: u32 = 1 << 0;
/// [`EVENTS`] also gets forwarded packets.
pub const FLAG_TRACE: u32 = 1 << 1;

/// Packets to local endpoints take the node's stack.
pub const FLAG_LOCAL_BY_STACK: u32 = 1 << 2;

/// [`BANDWIDTH`] limits packets to the container.
pub const FLAG_LIMIT_INGRESS: u32 = 1 << 3;
/// [`BANDWIDTH`] limits packets from the container.
pub const FLAG_LIMIT_EGRESS: u32 = 1 << 4;

/// With [`FLAG_LOCAL_BY_STACK`]: another plugin made the link. Valid neighbour messages about the container pass, to
/// any Ethernet destination; no Ethernet address changes.
pub const FLAG_CHAINED: u32 = 1 << 5;

/// The endpoint sends from and receives for its prefixes in [`SOURCES`]. Never with [`FLAG_CHAINED`].
pub const FLAG_SOURCES: u32 = 1 << 6;

#[inline(always)]
#[must_use]
pub const fn limit_flag(direction: Direction) -> u32 {
    match direction {
        Direction::Ingress => FLAG_LIMIT_INGRESS,
        Direction::Egress => FLAG_LIMIT_EGRESS,
    }
}

/// Differs in the next ABI version.
pub const CONFIG_ROW: u32 = if cfg!(feature = "next-abi") { 1 } else { 0 };

/// Value of [`CONFIG`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct EndpointConfig {
    /// Of the attachment.
    pub epoch: u64,
    /// Host side: target of `deliver`.
    pub ifindex: u32,
    /// `FLAG_*` bits.
    pub flags: u32,
    /// Security identity.
    pub identity: u32,
    /// Network byte order; zero for none.
    pub ipv4: [u8; 4],
    /// The node's router address, network byte order; ARP for it is answered.
    pub gateway4: [u8; 4],
    /// Zero.
    pub _pad: [u8; 4],
    /// Network byte order; zero for none.
    pub ipv6: [u8; 16],
    /// Neighbour solicitations for it are answered.
    pub gateway6: [u8; 16],
}

/// Value of [`PROFILES`].
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
    /// A GSO packet counts once.
    pub packets: u64,
    /// Ethernet header included.
    pub bytes: u64,
}

/// Value of [`BANDWIDTH`]. Programs write only `empty_at_ns`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "user",
    derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)
)]
pub struct Bucket {
    /// Bits per second; zero is no limit.
    pub rate: u64,
    /// Time to fill an empty bucket, nanoseconds.
    pub burst_ns: u64,
    /// Nanoseconds since boot (CLOCK_MONOTONIC); in the future while overdrawn.
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
    /// Start, nanoseconds since boot (CLOCK_MONOTONIC).
    pub window_ns: u64,
    /// Events in the window.
    pub used: u64,
}

#[cfg(feature = "user")]
crate::pod!(
    EndpointKey,
    EndpointRow,
    StackPathKey,
    StackPathRow,
    SourcePrefix,
    SourcesRow,
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
    assert!(size_of::<SourcePrefix>() == 32);
    assert!(size_of::<SourcesRow>() == 16 + 32 * SOURCES_SHARE);
    assert!(size_of::<EndpointConsts>() == 24);
    assert!(size_of::<EndpointConfig>() == 64);
    assert!(size_of::<EndpointProfile>() == size_of::<EndpointConfig>() + 16);
    assert!(size_of::<Counter>() == 16);
    assert!(size_of::<Bucket>() == 24);
    assert!(size_of::<EventBudget>() == 16);
};
