//! Arguments and results of the kernel interface.

use std::{
    fmt,
    future::Future,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::PathBuf,
    pin::Pin,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::Result;
use crate::{
    bandwidth::Bandwidth,
    endpoint::{EndpointRecord, HooksFound, LinkOwner, NetnsRef},
    finding::NodeProblem,
    identity::Identity,
    ids::{Attachment, EndpointId, Epoch, IfIndex, IfName, MacAddr},
    nat::{Masquerade, NatEntry},
};

/// Least MTU with IPv6, bytes (RFC 8200, section 5): below it Linux removes the IPv6 addresses.
pub const MIN_MTU: u32 = 1_280;

/// How programs are attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttachMode {
    /// tcx links (Linux 6.6): pinned, atomic link update.
    Tcx,
    /// clsact filters: replaced in place by netlink.
    Clsact,
}

impl fmt::Display for AttachMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        })
    }
}

/// Kernel features, probed at start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelFeatures {
    /// `uname -r`.
    pub release: String,
    /// Attach mode.
    pub attach_mode: AttachMode,
    /// tcx.
    pub tcx: bool,
    /// netkit devices.
    pub netkit: bool,
    /// `bpf_redirect_peer` (Linux 5.10).
    pub redirect_peer: bool,
    /// BTF.
    pub btf: bool,
    /// `SO_NETNS_COOKIE` (Linux 5.14).
    pub netns_cookie: bool,
    /// `nf_conntrack` is loaded. It may be loaded after the probe.
    pub conntrack: bool,
}

/// The desired node objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSpec {
    /// IPv4 router address: the endpoints' gateway, and the node's source address toward them.
    pub router4: Option<Ipv4Addr>,
    /// IPv6 router address.
    pub router6: Option<Ipv6Addr>,
    /// Every CIDR of every pool. Each has an unreachable route; endpoint routes are longer.
    pub cidrs: Vec<IpNet>,
    /// Router interface MTU, bytes.
    pub mtu: u32,
    /// Masquerading of packets that leave the pools; `None` leaves the node's firewall and forwarding unchanged.
    pub masquerade: Option<Masquerade>,
    /// Packets between endpoints use the node's stack, which must forward them.
    pub local_by_stack: bool,
    /// The node answers for endpoint addresses on links whose network contains a pool.
    pub announce: bool,
    /// Policy rules redirect flows to the proxy, to which the node delivers them.
    pub redirects: bool,
}

/// Observed state of the node's NAT and forwarding.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NatView {
    /// Differences from the specification.
    pub problems: Vec<NodeProblem>,
    /// Sysctls that Wharf changed and will restore.
    pub changed: Vec<String>,
    /// Foreign chains that refuse, or may refuse, forwarded packets of containers.
    pub foreign: Vec<ForeignChain>,
    /// Conntrack usage; `None` without conntrack, and then without NAT.
    pub tracked: Option<Tracked>,
}

/// A foreign forward chain that refuses, or may refuse, packets of containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignChain {
    /// `family table chain`.
    pub name: String,
    /// Pools with refused packets: sent by containers, replies, or to published ports.
    pub refused: Vec<IpNet>,
    /// Whether other packets pass depends on the packet, or on rules that the agent cannot evaluate.
    pub unclear: bool,
}

/// Conntrack usage in the node's network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tracked {
    /// Connections.
    pub entries: u64,
    /// Maximum (`net.netfilter.nf_conntrack_max`), above which packets of new connections are dropped.
    pub limit: u64,
}

impl Tracked {
    /// Usage that warns the operator, percent: a busy node may double its connections in seconds.
    const WARN_PERCENT: u64 = 80;

    /// True when connections may soon be dropped. A limit of 0 means none.
    #[must_use]
    pub const fn is_nearly_full(&self) -> bool {
        self.limit > 0 && self.entries.saturating_mul(100) >= self.limit.saturating_mul(Self::WARN_PERCENT)
    }
}

/// Desired programs of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramSpec {
    /// Endpoint id: a program constant, and the pin directory's name.
    pub id: EndpointId,
    /// Program constant.
    pub container_mac: MacAddr,
    /// Program constant.
    pub host_mac: MacAddr,
    /// Enables debug records (requires an object with them).
    pub debug: bool,
    /// Keep pinned programs whose load would give the same instructions, constants and maps. Programs with debug
    /// records may be reloaded even when equal.
    pub keep: bool,
}

/// Loaded programs of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Programs {
    /// Kernel ids of `from_container`, `to_container`, `deliver`.
    pub program_ids: [u32; 3],
    /// Kernel ids of `CONFIG`, `METRICS` and `BANDWIDTH`.
    pub map_ids: [u32; 3],
    /// Kernel memory of programs and maps, bytes (memlock in fdinfo).
    pub memlock_bytes: u64,
}

/// Desired veth pair of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkSpec {
    /// Endpoint id, for messages.
    pub id: EndpointId,
    /// Epoch, for messages.
    pub epoch: Epoch,
    /// Owner. With id and epoch it forms the owner's mark, the alias of the host side.
    pub attachment: Attachment,
    /// Host side's name.
    pub host_ifname: IfName,
    /// The container's namespace.
    pub netns: NetnsRef,
    /// Container side's name.
    pub ifname: IfName,
    /// Container side's MAC.
    pub container_mac: MacAddr,
    /// Host side's MAC.
    pub host_mac: MacAddr,
    /// MTU of both sides, bytes: 68 to 65535, with IPv6 at least 1280.
    pub mtu: u32,
}

/// An existing veth pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Link {
    /// Host side's index, in the node's namespace.
    pub host_ifindex: IfIndex,
    /// Container side's index, in the container's namespace.
    pub container_ifindex: IfIndex,
}

/// A container's interface made by another plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginLink {
    /// Both indexes.
    pub link: Link,
    /// Host side's name.
    pub host_ifname: IfName,
    /// Host side's MAC.
    pub host_mac: MacAddr,
    /// Container side's MAC.
    pub container_mac: MacAddr,
    /// Container side's MTU, bytes.
    pub mtu: u32,
    /// Container side's addresses.
    pub addresses: Vec<IpAddr>,
    /// State of the host side's hooks.
    pub hooks: HooksFound,
}

/// An endpoint's configuration row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigSpec {
    /// Epoch.
    pub epoch: Epoch,
    /// Host side's index.
    pub host_ifindex: IfIndex,
    /// Identity.
    pub identity: Identity,
    /// IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
    /// IPv4 gateway.
    pub gateway4: Option<Ipv4Addr>,
    /// IPv6 gateway.
    pub gateway6: Option<Ipv6Addr>,
    /// Whether the endpoint may send and receive.
    pub live: bool,
    /// Trace forwarded packets.
    pub trace: bool,
    /// Packets to other endpoints of the node use its stack.
    pub local_by_stack: bool,
    /// Another plugin made the link; packets to other endpoints use the stack, too.
    pub chained: bool,
    /// Bandwidth limits.
    pub bandwidth: Bandwidth,
}

/// Unambiguous link reference. Destructive operations first check id, epoch and name or mark. Another plugin's link
/// is found by name and index and never changed; Wharf's attachments on it carry id and epoch.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LinkRef {
    /// Endpoint id.
    pub id: EndpointId,
    /// Epoch.
    pub epoch: Epoch,
    /// Host side's name, with id and epoch.
    pub host_ifname: IfName,
    /// Host side's index, if known.
    pub host_ifindex: Option<IfIndex>,
    /// Container's side, if known, for removal when the host side left the node's namespace.
    pub container: Option<ContainerSide>,
    /// Owner of the link.
    #[serde(default, skip_serializing_if = "LinkOwner::is_wharf")]
    pub owner: LinkOwner,
}

/// Reference to the container's side.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ContainerSide {
    /// The container's namespace.
    pub netns: NetnsRef,
    /// Index there.
    pub ifindex: IfIndex,
    /// Original MAC address.
    pub mac: MacAddr,
}

impl LinkRef {
    /// Link of a record.
    #[must_use]
    pub fn of(record: &EndpointRecord) -> Self {
        let known = |ifindex: IfIndex| (ifindex.0 != 0).then_some(ifindex);
        let container = known(record.container_ifindex).map(|ifindex| ContainerSide {
            netns: record.netns.clone(),
            ifindex,
            mac: record.container_mac,
        });
        Self {
            id: record.id,
            epoch: record.epoch,
            host_ifname: record.host_ifname.clone(),
            host_ifindex: known(record.host_ifindex),
            container: container.filter(|_| record.link_owner.is_wharf()),
            owner: record.link_owner,
        }
    }
}

/// Result of an attach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Attached {
    /// New attachment.
    New,
    /// Atomic replacement of an attached program.
    Replaced,
}

/// A counter row.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CounterRow {
    /// `ingress` or `egress`.
    pub direction: String,
    /// Reason.
    pub reason: String,
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

/// A BPF map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapInfo {
    /// `ENDPOINTS`, or `<endpoint id>/CONFIG`.
    pub name: String,
    /// Kernel map type.
    pub kind: String,
    /// Row count, if countable.
    pub entries: Option<u64>,
    /// Capacity: rows, or bytes of a ring buffer.
    pub max_entries: u64,
    /// Kernel memory, bytes.
    pub memlock_bytes: u64,
}

/// A route with Wharf's protocol number.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RouteRow {
    /// Destination.
    pub destination: IpNet,
    /// Interface; none for an unreachable route.
    pub ifindex: Option<IfIndex>,
}

/// A link with a name and kind of Wharf's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LinkRow {
    /// Name.
    pub name: String,
    /// Index.
    pub ifindex: IfIndex,
    /// Alias: the owner's mark on Wharf's links.
    pub alias: Option<String>,
}

/// A row of the endpoint table.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EndpointTableRow {
    /// Address.
    pub address: IpAddr,
    /// Stored endpoint id (untrusted until matched).
    pub endpoint_id: u32,
    /// Stored program-array slot for direct delivery; 0 for none.
    pub direct: u32,
    /// Epoch.
    pub epoch: Epoch,
    /// Host side's index.
    pub ifindex: IfIndex,
    /// Identity.
    pub identity: u32,
    /// Container side's MAC.
    pub mac: MacAddr,
}

/// Wharf's objects in the kernel and bpffs, for restore and audit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelDump {
    /// Host sides of veth pairs.
    pub links: Vec<LinkRow>,
    /// Routes with Wharf's protocol number.
    pub routes: Vec<RouteRow>,
    /// The endpoint table.
    pub endpoint_rows: Vec<EndpointTableRow>,
    /// Endpoint ids with a program-array slot.
    pub call_slots: Vec<u32>,
    /// Endpoint ids with a pin directory, and the pinned names.
    pub pins: Vec<(String, Vec<String>)>,
    /// Foreign objects under the pin root (reported, never touched).
    pub foreign_pins: Vec<PathBuf>,
    /// nftables entries that no endpoint wrote since the agent's start, or that their endpoint removed.
    pub nat: Vec<NatEntry>,
}

/// Completes when the kernel has released a removed link.
///
/// # Errors
/// The kernel refused; repeat the removal.
pub type LinkRelease = Pin<Box<dyn Future<Output = Result<()>> + Send>>;
