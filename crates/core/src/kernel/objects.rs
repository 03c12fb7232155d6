//! What the interface to the kernel takes and answers.

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

/// Least MTU of an interface with IPv6, bytes (RFC 8200, section 5): below it Linux takes the addresses off.
pub const MIN_MTU: u32 = 1_280;

/// How programs are attached to an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttachMode {
    /// tcx links (Linux 6.6): pinned, replaced atomically by link update.
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

/// What the kernel offers, probed once at start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelFeatures {
    /// `uname -r`.
    pub release: String,
    /// Attach mode in use.
    pub attach_mode: AttachMode,
    /// The kernel has tcx.
    pub tcx: bool,
    /// The kernel has netkit devices.
    pub netkit: bool,
    /// The kernel has `bpf_redirect_peer` (Linux 5.10).
    pub redirect_peer: bool,
    /// The kernel has BTF.
    pub btf: bool,
    /// The kernel has `SO_NETNS_COOKIE` (Linux 5.14).
    pub netns_cookie: bool,
    /// The node tracks connections: `nf_conntrack` is loaded. The module may be loaded after the probe.
    pub conntrack: bool,
}

/// The node's own part of the datapath.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSpec {
    /// IPv4 router address: the gateway of the endpoints, and the node's source address toward them.
    pub router4: Option<Ipv4Addr>,
    /// IPv6 router address.
    pub router6: Option<Ipv6Addr>,
    /// Every CIDR of every pool. Each has an unreachable route; an endpoint's own route is longer.
    pub cidrs: Vec<IpNet>,
    /// MTU of the router interface, bytes.
    pub mtu: u32,
    /// What leaves the pools takes an address of the node; `None` leaves the node's firewall and forwarding alone.
    pub masquerade: Option<Masquerade>,
    /// Packets between endpoints go through the stack, which must forward them.
    pub local_by_stack: bool,
    /// The node answers for endpoints' addresses on links whose own network a pool is part of.
    pub announce: bool,
    /// Rules of policy redirect flows to the proxy, to which the node delivers them.
    pub redirects: bool,
}

/// What the node does for packets that leave it, as found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NatView {
    /// What differs from the specification.
    pub problems: Vec<NodeProblem>,
    /// Settings (`sysctl`) of the node that Wharf changed and takes back.
    pub changed: Vec<String>,
    /// Chains of others that refuse forwarded packets of containers, or may.
    pub foreign: Vec<ForeignChain>,
    /// The connections that the kernel tracks, without which nothing is translated; `None` where it tracks nothing.
    pub tracked: Option<Tracked>,
}

/// A forward chain of somebody else's that stands in the way of containers, or may.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignChain {
    /// `family table chain`.
    pub name: String,
    /// Pools whose packets it refuses: what containers send, the answers to it, or what comes to published ports.
    pub refused: Vec<IpNet>,
    /// It depends on what the packet is, or on rules that cannot be judged, whether other packets of the pools pass.
    pub unclear: bool,
}

/// The fill of the kernel's connection tracking in the node's network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tracked {
    /// Connections.
    pub entries: u64,
    /// Maximum (`net.netfilter.nf_conntrack_max`); packets of new connections are dropped when it is reached.
    pub limit: u64,
}

impl Tracked {
    /// Share of the limit from which an operator is warned, percent: connections come in bursts, and a busy node doubles
    /// what it has within seconds.
    const WARN_PERCENT: u64 = 80;

    /// Whether an operator is to act before new connections are dropped. A limit of 0 is none.
    #[must_use]
    pub const fn is_nearly_full(&self) -> bool {
        self.limit > 0 && self.entries.saturating_mul(100) >= self.limit.saturating_mul(Self::WARN_PERCENT)
    }
}

/// The desired programs of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramSpec {
    /// Endpoint id: a constant of the programs and the name of the pin directory.
    pub id: EndpointId,
    /// Constant of the programs.
    pub container_mac: MacAddr,
    /// Constant of the programs.
    pub host_mac: MacAddr,
    /// Debug log records wanted (needs an object built with them).
    pub debug: bool,
    /// Keep the pinned programs and their ids when a load would produce the same instructions, constants and maps.
    /// Other programs are loaded anew. Programs with log records may be loaded anew even when they are the same.
    pub keep: bool,
}

/// What the kernel holds of an endpoint's programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Programs {
    /// Kernel ids of `from_container`, `to_container`, `deliver`.
    pub program_ids: [u32; 3],
    /// Kernel ids of `CONFIG`, `METRICS` and `BANDWIDTH`.
    pub map_ids: [u32; 3],
    /// Bytes of kernel memory the programs and maps take (memlock of fdinfo).
    pub memlock_bytes: u64,
}

/// The desired veth pair of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkSpec {
    /// Endpoint id, for messages.
    pub id: EndpointId,
    /// Epoch, for messages.
    pub epoch: Epoch,
    /// Attachment that owns the link. With id and epoch it makes the owner's mark, the alias of the host side.
    pub attachment: Attachment,
    /// Host side's name in the node's namespace.
    pub host_ifname: IfName,
    /// Namespace in which the container side is created.
    pub netns: NetnsRef,
    /// Container side's name.
    pub ifname: IfName,
    /// Container side's MAC.
    pub container_mac: MacAddr,
    /// Host side's MAC.
    pub host_mac: MacAddr,
    /// MTU of both sides, bytes (68 to 65535; at least 1280 when the link carries IPv6).
    pub mtu: u32,
}

/// A veth pair as the kernel holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Link {
    /// Host side's index, in the node's namespace.
    pub host_ifindex: IfIndex,
    /// Container side's index, in the container's namespace.
    pub container_ifindex: IfIndex,
}

/// A container's interface that another plugin made, with what Wharf has to know of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginLink {
    /// Indexes of both sides.
    pub link: Link,
    /// Host side's name.
    pub host_ifname: IfName,
    /// Host side's MAC.
    pub host_mac: MacAddr,
    /// Container side's MAC.
    pub container_mac: MacAddr,
    /// MTU of the container's side, bytes.
    pub mtu: u32,
    /// Addresses of the container's side.
    pub addresses: Vec<IpAddr>,
    /// What is on the hooks of the host side.
    pub hooks: HooksFound,
}

/// The endpoint's configuration row.
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
    /// The endpoint may send and receive.
    pub live: bool,
    /// Forwarded packets are traced.
    pub trace: bool,
    /// Packets to other endpoints of the node go through its stack.
    pub local_by_stack: bool,
    /// Another plugin made the link; packets to other endpoints go through the stack too.
    pub chained: bool,
    /// Limits of the bandwidth.
    pub bandwidth: Bandwidth,
}

/// Unambiguous reference to a link. Every destructive operation first checks id, epoch and name or mark in the
/// kernel. A link of another plugin's is never removed or changed; what Wharf attached to it carries id and epoch, and it is
/// found by name and index together.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LinkRef {
    /// Endpoint id.
    pub id: EndpointId,
    /// Epoch.
    pub epoch: Epoch,
    /// Host side's name (carries id and epoch).
    pub host_ifname: IfName,
    /// Host side's index, when it is known.
    pub host_ifindex: Option<IfIndex>,
    /// The container's side, when it is known. The pair is removed by it when the host side was moved to another
    /// network namespace.
    pub container: Option<ContainerSide>,
    /// Whose the link is.
    #[serde(default, skip_serializing_if = "LinkOwner::is_wharf")]
    pub owner: LinkOwner,
}

/// Reference to the container's side of a link.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ContainerSide {
    /// The container's network namespace.
    pub netns: NetnsRef,
    /// Interface index in the container's namespace.
    pub ifindex: IfIndex,
    /// MAC address that the interface was created with.
    pub mac: MacAddr,
}

impl LinkRef {
    /// The link of a record.
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
    /// The program behind an existing attachment was replaced atomically.
    Replaced,
}

/// A row of counters.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CounterRow {
    /// `ingress` or `egress`.
    pub direction: String,
    /// Reason's name.
    pub reason: String,
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

/// A BPF map as the kernel holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapInfo {
    /// `ENDPOINTS`, or `<endpoint id>/CONFIG`.
    pub name: String,
    /// Map type in the kernel's words.
    pub kind: String,
    /// Rows in use, where that can be counted.
    pub entries: Option<u64>,
    /// Capacity, rows (bytes for a ring buffer).
    pub max_entries: u64,
    /// Kernel memory, bytes.
    pub memlock_bytes: u64,
}

/// A route of Wharf's (recognised by its protocol number).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RouteRow {
    /// Destination.
    pub destination: IpNet,
    /// Outgoing interface; none for an unreachable route.
    pub ifindex: Option<IfIndex>,
}

/// A link of Wharf's (recognised by its name and kind).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LinkRow {
    /// Name.
    pub name: String,
    /// Index.
    pub ifindex: IfIndex,
    /// Alias, if any. On a link of Wharf's it is the owner's mark.
    pub alias: Option<String>,
}

/// A row of the shared endpoint table.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EndpointTableRow {
    /// Address.
    pub address: IpAddr,
    /// Endpoint id as stored (untrusted until matched).
    pub endpoint_id: u32,
    /// Slot of the program array that packets for the address go to directly, as stored; 0 for none.
    pub direct: u32,
    /// Epoch.
    pub epoch: Epoch,
    /// Host side's index.
    pub ifindex: IfIndex,
    /// Identity.
    pub identity: u32,
    /// MAC of the container's side.
    pub mac: MacAddr,
}

/// All of Wharf's objects in the kernel and the bpffs, for restore and audit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelDump {
    /// Host sides of veth pairs.
    pub links: Vec<LinkRow>,
    /// Routes with our protocol number.
    pub routes: Vec<RouteRow>,
    /// Rows of the shared endpoint table.
    pub endpoint_rows: Vec<EndpointTableRow>,
    /// Endpoint ids with a filled slot in the program array.
    pub call_slots: Vec<u32>,
    /// Endpoint ids that have a pin directory, with the names pinned in it.
    pub pins: Vec<(String, Vec<String>)>,
    /// Foreign objects under Wharf's pin root (reported, never touched).
    pub foreign_pins: Vec<PathBuf>,
    /// Published ports, and addresses that are not masqueraded, in the node's table that no endpoint put there since the
    /// agent's start, or whose endpoint took them back.
    pub nat: Vec<NatEntry>,
}

/// Ends when the kernel has released a removed link: nothing refers to the device any more.
///
/// # Errors
/// The kernel's refusal; the removal is to be repeated.
pub type LinkRelease = Pin<Box<dyn Future<Output = Result<()>> + Send>>;
