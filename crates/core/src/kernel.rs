//! The interface to the kernel, in the terms of the domain.
//!
//! `ensure_*` is idempotent, `remove_*` succeeds when the object does not exist, `observe_*` and `dump` change
//! nothing. `wharf-datapath` has the real implementation and the fake; one contract test runs on both.

use std::{
    fmt,
    future::Future,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{
    bandwidth::Bandwidth,
    endpoint::{EndpointRecord, NetnsRef},
    finding::{EndpointProblem, NodeProblem},
    flow::{FlowFilter, FlowList, FlowUsage},
    identity::Identity,
    ids::{Attachment, EndpointId, Epoch, IfIndex, IfName, MacAddr},
    mtu::Uplink,
    nat::{Masquerade, NatEntry, PortMapping},
    overlap::{NodeNetwork, NodeNetworks},
    policy::{Mode, PolicyRows, RowChange},
    selfcheck::{Case, CaseResult},
};

/// Kind of a kernel error. It decides how the caller may react.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelErrorKind {
    /// The object exists already (an interface of that name in the container).
    Exists,
    /// The object does not exist (link, namespace, pin).
    NotFound,
    /// The path is not a network namespace, or is the node's own.
    NotANetns,
    /// The caller lacks a capability.
    Permission,
    /// The kernel is too old, or lacks a feature.
    Unsupported,
    /// A limit was reached (memory, map full, busy). A retry may succeed.
    Exhausted,
    /// An unexpected object is in place (foreign pin, other ABI). It is never touched.
    Conflict,
    /// Anything else.
    Other,
}

/// A failed kernel operation: the operation, its subject and the cause.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{operation} {subject}: {cause}")]
pub struct KernelError {
    /// The operation, as a verb phrase: `create link`, `attach program`.
    pub operation: &'static str,
    /// The object of the operation: `wh00010000002a (endpoint 1)`.
    pub subject: String,
    /// The cause in words, with a hint for the user where one is known.
    pub cause: String,
    /// Kind.
    pub kind: KernelErrorKind,
}

/// Result of a kernel operation.
pub type Result<T> = std::result::Result<T, KernelError>;

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
    /// Limits of the bandwidth.
    pub bandwidth: Bandwidth,
}

/// Unambiguous reference to a link. Every destructive operation first checks id, epoch and name or mark in the
/// kernel.
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
            container,
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

/// The kernel, as the agent sees it. Every call is bounded in time by the caller.
pub trait Kernel: Send + Sync + 'static {
    /// The kernel features probed when this object was opened.
    fn features(&self) -> &KernelFeatures;

    /// Creates the node's objects: shared maps, router interface and addresses, unreachable routes for the pools.
    fn ensure_node(&self, spec: &NodeSpec) -> impl Future<Output = Result<()>> + Send;

    /// Makes the node masquerade and forward as its specification says, or takes that back. Published ports stay as they
    /// are, as do addresses that are not masqueraded; where the table was missing, what endpoints put there since the agent's start is written again. Announces the endpoints that can be reached, where that is
    /// wanted. Apart from [`Self::ensure_node`],
    /// because a node that cannot is one whose containers reach each other.
    ///
    /// # Errors
    /// `Unsupported` without nf_tables, `Conflict` where somebody else's table has the name, `Permission` where a setting
    /// cannot be written.
    fn ensure_nat(&self, spec: &NodeSpec) -> impl Future<Output = Result<()>> + Send;

    /// Compares what [`Self::ensure_nat`] makes with the node's specification.
    fn observe_nat(&self, spec: &NodeSpec) -> impl Future<Output = Result<NatView>> + Send;

    /// Asks whether the node has the addresses of the mappings, and whether a process of the node holds one of their ports.
    /// Ports of SCTP are not looked at.
    ///
    /// # Errors
    /// `NotFound` where the node does not have the address, `Exists` where a process holds the port, `Unsupported` where
    /// the address cannot lead to a container.
    fn observe_ports(&self, mappings: &[PortMapping]) -> impl Future<Output = Result<()>> + Send {
        let subject = format!("{} ports", mappings.len());
        async move { Err(unsupported("publish", subject)) }
    }

    /// Takes an entry out of the node's table, unless an endpoint has put it there since the agent's start; for repair.
    fn remove_nat_entry(&self, entry: &NatEntry) -> impl Future<Output = Result<()>> + Send {
        let subject = entry.to_string();
        async move { Err(unsupported("take back", subject)) }
    }

    /// Opens a path and returns the network namespace there.
    ///
    /// # Errors
    /// `NotFound` when the path does not exist, `NotANetns` when it is no network namespace or the node's own.
    fn observe_netns(&self, path: &Path) -> impl Future<Output = Result<NetnsRef>> + Send;

    /// Loads an endpoint's programs and maps, and pins them. New programs use maps that are already pinned for the
    /// id. The pins move to the new programs only after all of them have loaded. With [`ProgramSpec::keep`],
    /// unchanged programs are not loaded.
    fn ensure_programs(&self, spec: &ProgramSpec) -> impl Future<Output = Result<Programs>> + Send;

    /// Creates the veth pair with both sides down and the container side in its namespace.
    ///
    /// # Errors
    /// `Exists` when the container already has an interface of that name, whoever created it.
    fn ensure_link(&self, spec: &LinkSpec) -> impl Future<Output = Result<Link>> + Send;

    /// Writes the endpoint's configuration row.
    fn ensure_config(&self, id: EndpointId, spec: &ConfigSpec) -> impl Future<Output = Result<()>> + Send;

    /// Attaches the pinned programs to the host side, or replaces the attached programs atomically.
    fn ensure_attached(&self, link: &LinkRef) -> impl Future<Output = Result<Attached>> + Send;

    /// Adds the container's addresses and routes and the node's routes to the container, and brings both sides up.
    fn ensure_connected(&self, record: &EndpointRecord) -> impl Future<Output = Result<()>> + Send;

    /// Gives both sides of the endpoint's link another MTU than the record's. The container's side keeps a smaller one that the
    /// container chose; returns that choice. A side that is gone or was replaced is left out; [`Self::observe_endpoints`]
    /// reports it.
    fn ensure_mtu(&self, record: &EndpointRecord, mtu: u32) -> impl Future<Output = Result<Option<u32>>> + Send;

    /// Puts the endpoint's rows into the shared maps, `CALLS` first, and its entries into the node's table. Other endpoints
    /// can reach the endpoint from then on.
    ///
    /// # Errors
    /// `Exists` for a port that leads elsewhere. On a node that does not masquerade there is no table.
    fn ensure_reachable(&self, record: &EndpointRecord) -> impl Future<Output = Result<()>> + Send;

    /// Takes the endpoint's entries of the node's table back and removes the rows of this endpoint and epoch from the shared maps.
    fn remove_reachable(&self, record: &EndpointRecord) -> impl Future<Output = Result<()>> + Send;

    /// Replaces the endpoint's programs on its link by a program that drops everything, so that no packet passes
    /// without policy until the link is removed.
    fn remove_attached(&self, link: &LinkRef) -> impl Future<Output = Result<()>> + Send;

    /// Unpins the endpoint's links, programs and maps. Returns the endpoint's last counters, for the node's totals.
    fn remove_programs(&self, id: EndpointId) -> impl Future<Output = Result<Vec<CounterRow>>> + Send;

    /// Removes the veth pair and, with it, the node's routes over it. Returns when nothing finds either side, its
    /// addresses or a route, which is long before the kernel has released them. Where the host side is not in the node's namespace,
    /// the pair is removed by the container's side.
    fn unlist_link(&self, link: &LinkRef) -> impl Future<Output = Result<LinkRelease>> + Send;

    /// [`Self::unlist_link`], and awaits the release. Concurrent calls share one kernel wait.
    fn remove_link(&self, link: &LinkRef) -> impl Future<Output = Result<()>> + Send {
        async move { self.unlist_link(link).await?.await }
    }

    /// Compares the kernel's state of endpoints with their records. Returns a list of problems for each endpoint, in
    /// order; an empty list means none. One call for many endpoints saves a thread switch for each.
    fn observe_endpoints(
        &self,
        records: &[EndpointRecord],
    ) -> impl Future<Output = Result<Vec<Vec<EndpointProblem>>>> + Send;

    /// [`Self::observe_endpoints`] for one endpoint.
    fn observe_endpoint(&self, record: &EndpointRecord) -> impl Future<Output = Result<Vec<EndpointProblem>>> + Send {
        async move { Ok(self.observe_endpoints(std::slice::from_ref(record)).await?.pop().unwrap_or_default()) }
    }

    /// The links whose host side is gone, or whose name another interface has. Each link is looked up by name,
    /// without a dump and without the kernel's lock on links (RTNL): cheap enough for each status.
    fn observe_missing(&self, links: &[LinkRef]) -> impl Future<Output = Result<Vec<EndpointId>>> + Send {
        let subject = format!("{} links", links.len());
        async move { Err(unsupported("look for missing links among", subject)) }
    }

    /// The endpoint's counters that are not zero.
    fn observe_counters(&self, id: EndpointId) -> impl Future<Output = Result<Vec<CounterRow>>> + Send;

    /// Runs test packets through the pinned programs of endpoints and returns the result of each, in the order of
    /// endpoints and cases. Nothing is sent and nothing is counted. One call for many endpoints saves a thread switch
    /// for each.
    ///
    /// # Errors
    /// `NotFound` in the place of an endpoint whose maps are not pinned. A case whose program cannot be run has its
    /// error in its own place.
    fn observe_verdicts(
        &self,
        checks: &[(EndpointId, Arc<[Case]>)],
    ) -> impl Future<Output = Result<Vec<Result<Vec<CaseResult>>>>> + Send {
        let subject = format!("{} endpoints", checks.len());
        async move { Err(unsupported("check programs of", subject)) }
    }

    /// The maps, shared and per endpoint, with the number of rows in use.
    fn observe_maps(&self) -> impl Future<Output = Result<Vec<MapInfo>>> + Send;

    /// A map's rows in readable form, column name to value. Names as in [`MapInfo::name`].
    fn dump_map(
        &self,
        name: &str,
    ) -> impl Future<Output = Result<Vec<std::collections::BTreeMap<String, String>>>> + Send {
        let subject = name.to_owned();
        async move { Err(unsupported("dump map", subject)) }
    }

    /// Removes the rows of flows that are over from the flow tables, and tells how full they are. One collection runs at a time.
    fn collect_flows(&self) -> impl Future<Output = Result<FlowUsage>> + Send {
        async move { Err(unsupported("collect", "flows".to_owned())) }
    }

    /// The flows that are meant, `limit` at most. Costs two calls of the kernel for each row of the tables.
    fn observe_flows(&self, filter: &FlowFilter, limit: usize) -> impl Future<Output = Result<FlowList>> + Send {
        let subject = format!("{limit} flows ({filter:?})");
        async move { Err(unsupported("observe", subject)) }
    }

    /// Removes the flows that are meant, and returns their number. A flow that lives on begins anew with its next packet.
    fn remove_flows(&self, filter: &FlowFilter) -> impl Future<Output = Result<u64>> + Send {
        let subject = format!("flows ({filter:?})");
        async move { Err(unsupported("remove", subject)) }
    }

    /// Changes rows of policy's tables in their order, then the generation, so that every flow is judged by them before its next
    /// packet passes. Without changes nothing happens but to the mode. After a failure, rows before the one that failed have changed.
    fn change_policy(&self, changes: Vec<RowChange>, mode: Mode) -> impl Future<Output = Result<()>> + Send {
        let subject = format!("{} rows, {mode:?}", changes.len());
        async move { Err(unsupported("change policy", subject)) }
    }

    /// The addresses of the node's interfaces, in its network namespace.
    fn observe_addresses(&self) -> impl Future<Output = Result<Vec<IpAddr>>> + Send {
        async move { Err(unsupported("observe", "addresses of the node".to_owned())) }
    }

    /// All rows of policy's tables.
    fn observe_policy(&self) -> impl Future<Output = Result<PolicyRows>> + Send {
        async move { Err(unsupported("observe", "policy".to_owned())) }
    }

    /// Compares the node's objects (router interface and addresses, routes of the pools, shared pins) with the node's
    /// specification. An empty list means no problem.
    fn observe_node(&self, spec: &NodeSpec) -> impl Future<Output = Result<Vec<NodeProblem>>> + Send {
        let subject = format!("{} pools", spec.cidrs.len());
        async move { Err(unsupported("observe node", subject)) }
    }

    /// The node's own addresses and routes, as far as they share addresses with the CIDRs.
    fn observe_networks(&self, cidrs: &[IpNet]) -> impl Future<Output = Result<NodeNetworks>> + Send {
        let subject = format!("{} CIDRs", cidrs.len());
        async move { Err(unsupported("observe networks of", subject)) }
    }

    /// For each address the node's network that a route lookup returns; none when there is no route, or the route is
    /// Wharf's. Costs a few netlink requests, whatever the size of the routing table.
    fn observe_networks_of(&self, ips: &[IpAddr]) -> impl Future<Output = Result<Vec<Option<NodeNetwork>>>> + Send {
        let subject = format!("{} addresses", ips.len());
        async move { Err(unsupported("look up", subject)) }
    }

    /// The interfaces that have a default route in the main table, of either family. Wharf's own are left out.
    fn observe_uplinks(&self) -> impl Future<Output = Result<Vec<Uplink>>> + Send {
        async move { Err(unsupported("observe", "uplinks".to_owned())) }
    }

    /// The kernel objects that still refer to an address that no endpoint has: rows of the shared maps and routes,
    /// each in words. When the list is empty, the address may be leased again. Connections are not listed, see
    /// [`Self::remove_connections`].
    fn observe_speakers(&self, ip: IpAddr) -> impl Future<Output = Result<Vec<String>>> + Send {
        async move { Err(unsupported("observe speakers for", ip.to_string())) }
    }

    /// Removes the node's conntrack entries in which any of the addresses occurs, in either direction, and returns
    /// their number: 0 where the kernel tracks no connections. One pass over the table serves all of the addresses.
    /// A DEL never waits for it; an ADD does only for a port or an address that is about to be free.
    fn remove_connections(&self, ips: &[IpAddr]) -> impl Future<Output = Result<u64>> + Send {
        let subject = format!("{} addresses", ips.len());
        async move { Err(unsupported("remove connections of", subject)) }
    }

    /// Dumps all of Wharf's objects.
    fn dump(&self) -> impl Future<Output = Result<KernelDump>> + Send;

    /// Removes a row of the shared endpoint table if the row has that epoch, and the entries of its
    /// address in the node's table unless an endpoint has put them there since the agent's start; for repair.
    fn remove_endpoint_row(&self, ip: IpAddr, epoch: Epoch) -> impl Future<Output = Result<()>> + Send {
        async move { Err(unsupported("remove endpoint row", format!("{ip} of epoch {epoch}"))) }
    }

    /// Empties a slot of the program array; for repair.
    fn remove_call_slot(&self, slot: u32) -> impl Future<Output = Result<()>> + Send {
        async move { Err(unsupported("empty call slot", slot.to_string())) }
    }

    /// Removes a route that has our protocol number; for repair.
    fn remove_route(&self, route: &RouteRow) -> impl Future<Output = Result<()>> + Send {
        let subject = route.destination.to_string();
        async move { Err(unsupported("remove route", subject)) }
    }

    /// Removes the node's objects (uninstall): router interface, routes, shared pins.
    fn remove_node(&self) -> impl Future<Output = Result<()>> + Send;
}

fn unsupported(operation: &'static str, subject: String) -> KernelError {
    KernelError { operation, subject, cause: "this kernel body cannot".into(), kind: KernelErrorKind::Unsupported }
}
