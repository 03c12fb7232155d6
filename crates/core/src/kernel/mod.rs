//! The kernel interface, in domain terms.
//!
//! `ensure_*` is idempotent, `remove_*` succeeds without the object, `observe_*` and `dump` change nothing. The
//! caller bounds every call in time. `wharf-datapath` has the implementation and the fake; one contract test covers
//! both. A component of the agent depends on the traits that it needs; [`Kernel`] combines them.

mod objects;

use std::{collections::BTreeMap, net::IpAddr, path::Path, sync::Arc};

use async_trait::async_trait;
use ipnet::IpNet;

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

/// Kind of a kernel error, for the caller's reaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelErrorKind {
    /// The object exists (an interface of that name in the container).
    Exists,
    /// The object (link, namespace, pin) does not exist.
    NotFound,
    /// The path is not a network namespace, or is the node's.
    NotANetns,
    /// A capability is missing.
    Permission,
    /// The kernel lacks a feature.
    Unsupported,
    /// A limit was reached (memory, full map, busy); a retry may succeed.
    Exhausted,
    /// An unexpected object is in place (foreign pin, other ABI), and stays untouched.
    Conflict,
    /// Other.
    Other,
}

/// A failed kernel operation: operation, subject, cause.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{operation} {subject}: {cause}")]
pub struct KernelError {
    /// Verb phrase: `create link`, `attach program`.
    pub operation: &'static str,
    /// Object: `wh00010000002a (endpoint 1)`.
    pub subject: String,
    /// Cause, with a hint for the user if known.
    pub cause: String,
    /// Kind.
    pub kind: KernelErrorKind,
}

/// Result of a kernel operation.
pub type Result<T> = std::result::Result<T, KernelError>;

/// All kernel traits.
pub trait Kernel: NodeKernel + EndpointKernel + NatKernel + FlowKernel + PolicyKernel {}

impl<K: NodeKernel + EndpointKernel + NatKernel + FlowKernel + PolicyKernel> Kernel for K {}

/// The node's shared objects, its networks, and orphans.
#[async_trait]
pub trait NodeKernel: Send + Sync + 'static {
    /// Features probed at open.
    fn features(&self) -> &KernelFeatures;

    /// Creates the node's objects: shared maps, router interface and addresses, unreachable pool routes.
    async fn ensure_node(&self, spec: &NodeSpec) -> Result<()>;

    /// All maps with their row counts.
    async fn observe_maps(&self) -> Result<Vec<MapInfo>>;

    /// Readable rows of a map, column name to value. `name` as in [`MapInfo::name`].
    async fn dump_map(&self, name: &str) -> Result<Vec<BTreeMap<String, String>>>;

    /// Compares the node's objects with the specification.
    async fn observe_node(&self, spec: &NodeSpec) -> Result<Vec<NodeProblem>>;

    /// The node's addresses and routes that overlap the CIDRs.
    async fn observe_networks(&self, cidrs: &[IpNet]) -> Result<NodeNetworks>;

    /// For each address, the network of the node's route to it; none without a route or for Wharf's. Costs few
    /// netlink requests for any routing table.
    async fn observe_networks_of(&self, ips: &[IpAddr]) -> Result<Vec<Option<NodeNetwork>>>;

    /// Interfaces with a default route of either family in the main table, without Wharf's.
    async fn observe_uplinks(&self) -> Result<Vec<Uplink>>;

    /// Shared-map rows and routes that refer to an address without an endpoint, in words; if empty, the address may
    /// be leased again. Excludes connections: see [`NatKernel::remove_connections`].
    async fn observe_speakers(&self, ip: IpAddr) -> Result<Vec<String>>;

    /// Dumps Wharf's objects.
    async fn dump(&self) -> Result<KernelDump>;

    /// Repair: removes an endpoint-table row of that epoch, and the address's nftables entries unless an endpoint
    /// wrote them since the agent's start.
    async fn remove_endpoint_row(&self, ip: IpAddr, epoch: Epoch) -> Result<()>;

    /// Repair: clears a program-array slot.
    async fn remove_call_slot(&self, slot: u32) -> Result<()>;

    /// Repair: removes a route with Wharf's protocol number.
    async fn remove_route(&self, route: &RouteRow) -> Result<()>;

    /// Uninstall: removes the router interface, routes and shared pins.
    async fn remove_node(&self) -> Result<()>;
}

/// An endpoint's programs, link, routes and state.
#[async_trait]
pub trait EndpointKernel: Send + Sync + 'static {
    /// Opens a path and identifies its network namespace.
    ///
    /// # Errors
    /// `NotFound` without the path, `NotANetns` when it is no network namespace or the node's.
    async fn observe_netns(&self, path: &Path) -> Result<NetnsRef>;

    /// Loads and pins an endpoint's programs and maps, reusing maps pinned for the id. Pins move to the new programs
    /// after all of them loaded. [`ProgramSpec::keep`] skips unchanged programs.
    async fn ensure_programs(&self, spec: &ProgramSpec) -> Result<Programs>;

    /// Creates the veth pair, both sides down, with the container side in its namespace.
    ///
    /// # Errors
    /// `Exists` when the container has any interface of that name.
    async fn ensure_link(&self, spec: &LinkSpec) -> Result<Link>;

    /// Inspects a container's interface made by another plugin.
    ///
    /// # Errors
    /// `NotFound` without the interface, `Unsupported` unless it is a veth with its other end in the node's
    /// namespace.
    async fn observe_plugin_link(&self, netns: &NetnsRef, ifname: &IfName) -> Result<PluginLink>;

    /// Other plugins' links with an endpoint's programs or the program that drops everything, each with its endpoint.
    async fn observe_plugin_links(&self) -> Result<Vec<LinkRef>>;

    /// Detaches the endpoint's programs, or the program that drops everything, from another plugin's link, undoing
    /// [`Self::ensure_attached`]. No effect without the link, or without programs of this endpoint and epoch.
    async fn remove_from_plugin_link(&self, link: &LinkRef) -> Result<()>;

    /// Writes the configuration row.
    async fn ensure_config(&self, id: EndpointId, spec: &ConfigSpec) -> Result<()>;

    /// Attaches the pinned programs, or atomically replaces the attached ones.
    async fn ensure_attached(&self, link: &LinkRef) -> Result<Attached>;

    /// Adds addresses and routes on both sides and brings the link up. Only verifies the identity of another plugin's
    /// link.
    async fn ensure_connected(&self, record: &EndpointRecord) -> Result<()>;

    /// Sets an MTU that differs from the record's on both sides. The container's side keeps a smaller choice of the
    /// container, which is returned. Skips missing and replaced sides, which [`Self::observe_endpoints`] reports.
    async fn ensure_mtu(&self, record: &EndpointRecord, mtu: u32) -> Result<Option<u32>>;

    /// Writes the endpoint's shared-map rows, `CALLS` first, and nftables entries. Other endpoints can reach it from
    /// then on.
    ///
    /// # Errors
    /// `Exists` for a port with another target. Without masquerading there is no table.
    async fn ensure_reachable(&self, record: &EndpointRecord) -> Result<()>;

    /// Removes the endpoint's nftables entries and this epoch's shared-map rows.
    async fn remove_reachable(&self, record: &EndpointRecord) -> Result<()>;

    /// Replaces the programs with one that drops everything, so that no packet bypasses policy before the link's
    /// removal.
    async fn remove_attached(&self, link: &LinkRef) -> Result<()>;

    /// Unpins links, programs and maps; returns the last counters for the node's totals.
    async fn remove_programs(&self, id: EndpointId) -> Result<Vec<CounterRow>>;

    /// Removes the veth pair and its routes; by the container's side if the host side left the node's namespace.
    /// Returns when look-ups fail, long before the kernel's release. Another plugin's link stays, with the program
    /// that drops everything.
    async fn unlist_link(&self, link: &LinkRef) -> Result<LinkRelease>;

    /// [`Self::unlist_link`], then waits for the release. Concurrent calls share one kernel wait.
    async fn remove_link(&self, link: &LinkRef) -> Result<()> {
        self.unlist_link(link).await?.await
    }

    /// Compares endpoints with their records; returns the problems of each, in order. Batching saves thread switches.
    async fn observe_endpoints(&self, records: &[EndpointRecord]) -> Result<Vec<Vec<EndpointProblem>>>;

    /// [`Self::observe_endpoints`] for one endpoint.
    async fn observe_endpoint(&self, record: &EndpointRecord) -> Result<Vec<EndpointProblem>> {
        Ok(self.observe_endpoints(std::slice::from_ref(record)).await?.pop().unwrap_or_default())
    }

    /// Links whose host side is gone or replaced under its name. Looks up names, without a dump or RTNL: cheap enough
    /// for each status.
    async fn observe_missing(&self, links: &[LinkRef]) -> Result<Vec<EndpointId>>;

    /// Counters that are not zero.
    async fn observe_counters(&self, id: EndpointId) -> Result<Vec<CounterRow>>;

    /// Runs test packets through the pinned programs; returns the results of endpoints and cases, in order. Sends and
    /// counts nothing. Batching saves thread switches.
    ///
    /// # Errors
    /// `NotFound` for an endpoint without pinned maps. A case whose program cannot run has a separate error.
    async fn observe_verdicts(&self, checks: &[(EndpointId, Arc<[Case]>)]) -> Result<Vec<Result<Vec<CaseResult>>>>;
}

/// Masquerading, published ports and conntrack.
#[async_trait]
pub trait NatKernel: Send + Sync + 'static {
    /// Applies or reverts masquerading and forwarding, and announces reachable endpoints if enabled. Existing entries
    /// stay; a new table gets the entries written since the agent's start. Separate from [`NodeKernel::ensure_node`],
    /// because containers reach each other even if this fails.
    ///
    /// # Errors
    /// `Unsupported` without nf_tables, `Conflict` for a foreign table of the name, `Permission` for a
    /// setting that cannot be written.
    async fn ensure_nat(&self, spec: &NodeSpec) -> Result<()>;

    /// Compares the state of [`Self::ensure_nat`] with the specification.
    async fn observe_nat(&self, spec: &NodeSpec) -> Result<NatView>;

    /// Checks that the node has the mappings' addresses and no process holds their ports, except the container's
    /// monitor (podman reserves ports). Skips SCTP.
    ///
    /// # Errors
    /// `NotFound` without the address, `Exists` for a held port, `Unsupported` for an address that cannot lead to a
    /// container.
    async fn observe_ports(&self, _: &ContainerId, mappings: &[PortMapping]) -> Result<()>;

    /// Repair: removes an nftables entry unless an endpoint wrote it since the agent's start.
    async fn remove_nat_entry(&self, entry: &NatEntry) -> Result<()>;

    /// Removes conntrack entries with any of the addresses, in one pass; returns their number, 0 without conntrack. A
    /// DEL never waits for it; an ADD only for a port or an address that is about to be free.
    async fn remove_connections(&self, ips: &[IpAddr]) -> Result<u64>;

    /// Ends the proxies' connections with clients of these addresses, whose endpoints are deleted; returns their number. One
    /// pass over the node's TCP sockets, none without redirects.
    async fn end_proxy_connections(&self, ips: &[IpAddr]) -> Result<u64>;
}

/// The flow tables.
#[async_trait]
pub trait FlowKernel: Send + Sync + 'static {
    /// Collects the rows of ended flows and returns the usage. One collection runs at a time.
    async fn collect_flows(&self) -> Result<FlowUsage>;

    /// Connections to the node's proxies that endpoints opened since the map was created; wraps.
    async fn observe_opened_to_proxies(&self) -> Result<u32>;

    /// Counts the connections of each endpoint to the node's proxies and limits them to `share` for about 4 s: an agent
    /// that stops counting must not keep clients out.
    async fn limit_proxy_clients(&self, share: u32) -> Result<ProxyClients>;

    /// At most `limit` matching flows. Costs two system calls per table row.
    async fn observe_flows(&self, filter: &FlowFilter, limit: usize) -> Result<FlowList>;

    /// Removes matching flows and returns their number. The next packet of a live flow restarts it.
    async fn remove_flows(&self, filter: &FlowFilter) -> Result<u64>;
}

/// Policy rows.
#[async_trait]
pub trait PolicyKernel: Send + Sync + 'static {
    /// Applies row changes in order, then the generation, so that they decide every flow's next packet. Without
    /// changes, sets only the mode. After a failure, preceding rows have changed.
    async fn change_policy(&self, changes: Vec<RowChange>, mode: Mode) -> Result<()>;

    /// Creates the node's part of redirects, before a row refers to the proxy, or removes it. Then
    /// [`NodeKernel::ensure_node`] and [`NatKernel::ensure_nat`] manage it.
    async fn ensure_way_to_proxy(&self, wanted: bool) -> Result<()>;

    /// Addresses of the node's interfaces.
    async fn observe_addresses(&self) -> Result<Vec<IpAddr>>;

    /// All policy rows.
    async fn observe_policy(&self) -> Result<PolicyRows>;
}
