//! The kernel interface: `ensure_*` is idempotent, `remove_*` succeeds without the object, `observe_*` and `dump`
//! change nothing. The caller bounds every call in time. `wharf-datapath` has the implementation and the fake; one
//! contract test covers both.

mod objects;

use std::{collections::BTreeMap, net::IpAddr, path::Path, sync::Arc};

use async_trait::async_trait;
use ipnet::IpNet;
use wharf_common::PeerRow;

use crate::{
    endpoint::{EndpointRecord, NetnsRef},
    finding::{EndpointProblem, NodeProblem},
    flow::{FlowFilter, FlowList, FlowUsage, ProxyClients},
    ids::{ContainerId, EndpointId, Epoch, IfName},
    mtu::Uplink,
    nat::{NatEntry, PortMapping},
    overlap::{NodeNetwork, NodeNetworks},
    policy::{Mode, PolicyRows, RowChange},
    selfcheck::{Case, CaseResult},
};

pub use objects::*;

/// Kind of an error, for the caller's reaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelErrorKind {
    /// The object exists.
    Exists,
    /// The object does not exist.
    NotFound,
    /// Not a network namespace, or the node's.
    NotANetns,
    /// A capability is missing.
    Permission,
    /// The kernel lacks a feature.
    Unsupported,
    /// A limit (memory, full map, busy); a retry may succeed.
    Exhausted,
    /// An unexpected object (foreign pin, other ABI), which stays untouched.
    Conflict,
    Other,
}

/// A failed kernel operation.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{operation} {subject}: {cause}")]
pub struct KernelError {
    /// As `create link`.
    pub operation: &'static str,
    /// As `wh00010000002a (endpoint 1)`.
    pub subject: String,
    /// With a hint for the user if known.
    pub cause: String,
    pub kind: KernelErrorKind,
}

/// Result of a kernel operation.
pub type Result<T> = std::result::Result<T, KernelError>;

/// All kernel traits. Components of the agent take the traits they need.
pub trait Kernel: NodeKernel + EndpointKernel + NatKernel + FlowKernel + PolicyKernel {}

impl<K: NodeKernel + EndpointKernel + NatKernel + FlowKernel + PolicyKernel> Kernel for K {}

/// The node's shared objects, networks, and orphans.
#[async_trait]
pub trait NodeKernel: Send + Sync + 'static {
    /// Probed at open.
    fn features(&self) -> &KernelFeatures;

    /// Creates shared maps, router interface and addresses, unreachable pool routes, routes to other nodes. Returns the
    /// routes to other nodes that cannot be made: everything else on the node works.
    async fn ensure_node(&self, spec: &NodeSpec) -> Result<Vec<MissingRoute>>;

    /// With row counts.
    async fn observe_maps(&self) -> Result<Vec<MapInfo>>;

    /// Readable rows, column name to value. `name` as in [`MapInfo::name`].
    async fn dump_map(&self, name: &str) -> Result<Vec<BTreeMap<String, String>>>;

    /// Differences from the specification.
    async fn observe_node(&self, spec: &NodeSpec) -> Result<Vec<NodeProblem>>;

    /// Routes to other nodes, without the unreachable routes behind them.
    async fn observe_peers(&self) -> Result<Vec<PeerRoute>>;

    /// Empty without an overlay.
    async fn observe_overlay(&self) -> Result<OverlayView>;

    /// Addresses and routes that overlap the CIDRs.
    async fn observe_networks(&self, cidrs: &[IpNet]) -> Result<NodeNetworks>;

    /// The node's network for each address; none without a route or for Wharf's. Few netlink requests.
    async fn observe_networks_of(&self, ips: &[IpAddr]) -> Result<Vec<Option<NodeNetwork>>>;

    /// Foreign interfaces with a default route in the main table.
    async fn observe_uplinks(&self) -> Result<Vec<Uplink>>;

    /// Shared-map rows and routes that refer to an address without an endpoint. Excludes connections
    /// ([`NatKernel::remove_connections`]).
    async fn observe_speakers(&self, ip: IpAddr) -> Result<Vec<String>>;

    /// Wharf's objects, except for call slots.
    async fn dump(&self) -> Result<KernelDump>;

    /// The ids that have a program in the endpoints' program array; one system call for each possible id.
    async fn call_slots(&self) -> Result<Vec<u32>>;

    /// Repair: also removes nftables entries not written since the agent's start.
    async fn remove_endpoint_row(&self, ip: IpAddr, epoch: Epoch) -> Result<()>;

    /// Repair.
    async fn remove_call_slot(&self, slot: u32) -> Result<()>;

    /// Repair. Requires Wharf's protocol number.
    async fn remove_route(&self, route: &RouteRow) -> Result<()>;

    /// Uninstall.
    async fn remove_node(&self) -> Result<()>;
}

/// An endpoint's programs, link and rows.
#[async_trait]
pub trait EndpointKernel: Send + Sync + 'static {
    /// Identifies a path's network namespace.
    ///
    /// # Errors
    /// `NotFound`, or `NotANetns` also for the node's.
    async fn observe_netns(&self, path: &Path) -> Result<NetnsRef>;

    /// Loads and pins programs, reusing the id's pinned maps. Pins move after all programs loaded.
    async fn ensure_programs(&self, spec: &ProgramSpec) -> Result<Programs>;

    /// Creates the link, both sides down.
    ///
    /// # Errors
    /// `Exists`: the container has an interface of that name.
    async fn ensure_link(&self, spec: &LinkSpec) -> Result<Link>;

    /// Inspects another plugin's interface.
    ///
    /// # Errors
    /// `NotFound`, or `Unsupported` unless it is a veth with one end on the node.
    async fn observe_plugin_link(&self, netns: &NetnsRef, ifname: &IfName) -> Result<PluginLink>;

    /// Other plugins' links with Wharf's programs.
    async fn observe_plugin_links(&self) -> Result<Vec<LinkRef>>;

    /// Undoes [`Self::ensure_attached`], if the programs have this endpoint and epoch.
    async fn remove_from_plugin_link(&self, link: &LinkRef) -> Result<()>;

    /// Writes the configuration row.
    async fn ensure_config(&self, id: EndpointId, spec: &ConfigSpec) -> Result<()>;

    /// Attaches or atomically replaces programs.
    async fn ensure_attached(&self, link: &LinkRef) -> Result<Attached>;

    /// Adds addresses and routes, brings the link up; writes missing shared-map rows before the node's route. Only
    /// checks another plugin's link.
    async fn ensure_connected(&self, record: &EndpointRecord) -> Result<()>;

    /// Returns the container's smaller MTU, which stays. Skips missing and replaced sides.
    async fn ensure_mtu(&self, record: &EndpointRecord, mtu: u32) -> Result<Option<u32>>;

    /// Writes nftables entries and shared-map rows, `CALLS` first.
    ///
    /// # Errors
    /// `Exists` for a port with another target. Without masquerading there is no table.
    async fn ensure_reachable(&self, record: &EndpointRecord) -> Result<()>;

    /// Removes nftables entries and this epoch's rows.
    async fn remove_reachable(&self, record: &EndpointRecord) -> Result<()>;

    /// Attaches the sink: no packet bypasses policy before the link's removal.
    async fn remove_attached(&self, link: &LinkRef) -> Result<()>;

    /// Returns the last counters.
    async fn remove_programs(&self, id: EndpointId) -> Result<Vec<CounterRow>>;

    /// Removes the link and its routes, by the container's side if the host side left the node. Returns when
    /// look-ups fail, long before the kernel's release. Another plugin's link stays, with the sink.
    async fn unlist_link(&self, link: &LinkRef) -> Result<LinkRelease>;

    /// Waits for the release. Concurrent calls share one kernel wait.
    async fn remove_link(&self, link: &LinkRef) -> Result<()> {
        self.unlist_link(link).await?.await
    }

    /// Differences from each record. Batching saves thread switches.
    async fn observe_endpoints(&self, records: &[EndpointRecord]) -> Result<Vec<Vec<EndpointProblem>>>;

    async fn observe_endpoint(&self, record: &EndpointRecord) -> Result<Vec<EndpointProblem>> {
        Ok(self.observe_endpoints(std::slice::from_ref(record)).await?.pop().unwrap_or_default())
    }

    /// The host side is gone or replaced. Without a dump or RTNL: cheap enough for each status.
    async fn observe_missing(&self, links: &[LinkRef]) -> Result<Vec<EndpointId>>;

    /// Not zero.
    async fn observe_counters(&self, id: EndpointId) -> Result<Vec<CounterRow>>;

    /// Runs test packets through the pinned programs; results in order. Sends and counts nothing.
    ///
    /// # Errors
    /// `NotFound` without pinned maps. A case that cannot run has a separate error.
    async fn observe_verdicts(&self, checks: &[(EndpointId, Arc<[Case]>)]) -> Result<Vec<Result<Vec<CaseResult>>>>;
}

/// Masquerading, published ports and conntrack.
#[async_trait]
pub trait NatKernel: Send + Sync + 'static {
    /// Applies or reverts masquerading, forwarding and announcements. A new table gets the entries written since the
    /// agent's start. Separate from [`NodeKernel::ensure_node`]: containers reach each other even if this fails.
    ///
    /// # Errors
    /// `Unsupported` without nf_tables, `Conflict` for a foreign table, `Permission` for a setting.
    async fn ensure_nat(&self, spec: &NodeSpec) -> Result<()>;

    /// Differences from [`Self::ensure_nat`].
    async fn observe_nat(&self, spec: &NodeSpec) -> Result<NatView>;

    /// The node has the addresses, and no process but the container's monitor (podman reserves ports) holds the ports.
    /// Skips SCTP.
    ///
    /// # Errors
    /// `NotFound` for an address, `Exists` for a port, `Unsupported` for an address that cannot lead to a container.
    async fn observe_ports(&self, _: &ContainerId, mappings: &[PortMapping]) -> Result<()>;

    /// Repair. Skips entries written since the agent's start.
    async fn remove_nat_entry(&self, entry: &NatEntry) -> Result<()>;

    /// Removes conntrack entries in one pass; returns their number.
    async fn remove_connections(&self, ips: &[IpAddr]) -> Result<u64>;

    /// Ends the proxies' connections with deleted clients; returns their number. One pass over the TCP sockets.
    async fn end_proxy_connections(&self, ips: &[IpAddr]) -> Result<u64>;
}

/// The flow tables.
#[async_trait]
pub trait FlowKernel: Send + Sync + 'static {
    /// Collects rows of ended flows. One collection runs at a time.
    async fn collect_flows(&self) -> Result<FlowUsage>;

    /// Connections to the node's proxies so far; wraps.
    async fn observe_opened_to_proxies(&self) -> Result<u32>;

    /// Counts each endpoint's proxy connections and limits them to `share` for about 4 s: an agent that stops counting
    /// must not keep clients out.
    async fn limit_proxy_clients(&self, share: u32) -> Result<ProxyClients>;

    /// At most `limit`, two system calls per table row.
    async fn observe_flows(&self, filter: &FlowFilter, limit: usize) -> Result<FlowList>;

    /// Returns their number. A live flow restarts.
    async fn remove_flows(&self, filter: &FlowFilter) -> Result<u64>;
}

/// Policy rows.
#[async_trait]
pub trait PolicyKernel: Send + Sync + 'static {
    /// Applies row changes in order, then the generation, so that they decide every flow's next packet.
    async fn change_policy(&self, changes: Vec<RowChange>, mode: Mode) -> Result<()>;

    /// Creates or removes the node's part of redirects, before a row refers to the proxy.
    async fn ensure_way_to_proxy(&self, wanted: bool) -> Result<()>;

    /// Of the node's interfaces.
    async fn observe_addresses(&self) -> Result<Vec<IpAddr>>;

    /// The row by which policy judges each address; `None` if the address is unknown.
    async fn observe_peer_rows(&self, ips: &[IpAddr]) -> Result<Vec<Option<PeerRow>>>;

    /// All policy rows.
    async fn observe_policy(&self) -> Result<PolicyRows>;

    /// Rows that the table of peers holds: until the node boots, it may be one of an earlier version.
    async fn observe_peers_max(&self) -> Result<u32>;
}
