//! The kernel interface, in domain terms.
//!
//! `ensure_*` is idempotent, `remove_*` succeeds without the object, `observe_*` and `dump` change nothing. The
//! caller bounds every call in time. `wharf-datapath` has the implementation and the fake; one contract test covers
//! both. A component of the agent depends on the traits that it needs; [`Kernel`] combines them.

mod objects;

use std::{collections::BTreeMap, future::Future, net::IpAddr, path::Path, sync::Arc};

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
pub trait NodeKernel: Send + Sync + 'static {
    /// Features probed at open.
    fn features(&self) -> &KernelFeatures;

    /// Creates the node's objects: shared maps, router interface and addresses, unreachable pool routes.
    fn ensure_node(&self, spec: &NodeSpec) -> impl Future<Output = Result<()>> + Send;

    /// All maps with their row counts.
    fn observe_maps(&self) -> impl Future<Output = Result<Vec<MapInfo>>> + Send;

    /// Readable rows of a map, column name to value. `name` as in [`MapInfo::name`].
    fn dump_map(&self, name: &str) -> impl Future<Output = Result<Vec<BTreeMap<String, String>>>> + Send {
        let subject = name.to_owned();
        async move { Err(unsupported("dump map", subject)) }
    }

    /// Compares the node's objects with the specification.
    fn observe_node(&self, spec: &NodeSpec) -> impl Future<Output = Result<Vec<NodeProblem>>> + Send {
        let subject = format!("{} pools", spec.cidrs.len());
        async move { Err(unsupported("observe node", subject)) }
    }

    /// The node's addresses and routes that overlap the CIDRs.
    fn observe_networks(&self, cidrs: &[IpNet]) -> impl Future<Output = Result<NodeNetworks>> + Send {
        let subject = format!("{} CIDRs", cidrs.len());
        async move { Err(unsupported("observe networks of", subject)) }
    }

    /// For each address, the network of the node's route to it; none without a route or for Wharf's. Costs few
    /// netlink requests for any routing table.
    fn observe_networks_of(&self, ips: &[IpAddr]) -> impl Future<Output = Result<Vec<Option<NodeNetwork>>>> + Send {
        let subject = format!("{} addresses", ips.len());
        async move { Err(unsupported("look up", subject)) }
    }

    /// Interfaces with a default route of either family in the main table, without Wharf's.
    fn observe_uplinks(&self) -> impl Future<Output = Result<Vec<Uplink>>> + Send {
        async move { Err(unsupported("observe", "uplinks".to_owned())) }
    }

    /// Shared-map rows and routes that refer to an address without an endpoint, in words; if empty, the address may
    /// be leased again. Excludes connections: see [`NatKernel::remove_connections`].
    fn observe_speakers(&self, ip: IpAddr) -> impl Future<Output = Result<Vec<String>>> + Send {
        async move { Err(unsupported("observe speakers for", ip.to_string())) }
    }

    /// Dumps Wharf's objects.
    fn dump(&self) -> impl Future<Output = Result<KernelDump>> + Send;

    /// Repair: removes an endpoint-table row of that epoch, and the address's nftables entries unless an endpoint
    /// wrote them since the agent's start.
    fn remove_endpoint_row(&self, ip: IpAddr, epoch: Epoch) -> impl Future<Output = Result<()>> + Send {
        async move { Err(unsupported("remove endpoint row", format!("{ip} of epoch {epoch}"))) }
    }

    /// Repair: clears a program-array slot.
    fn remove_call_slot(&self, slot: u32) -> impl Future<Output = Result<()>> + Send {
        async move { Err(unsupported("empty call slot", slot.to_string())) }
    }

    /// Repair: removes a route with Wharf's protocol number.
    fn remove_route(&self, route: &RouteRow) -> impl Future<Output = Result<()>> + Send {
        let subject = route.destination.to_string();
        async move { Err(unsupported("remove route", subject)) }
    }

    /// Uninstall: removes the router interface, routes and shared pins.
    fn remove_node(&self) -> impl Future<Output = Result<()>> + Send;
}

/// An endpoint's programs, link, routes and state.
pub trait EndpointKernel: Send + Sync + 'static {
    /// Opens a path and identifies its network namespace.
    ///
    /// # Errors
    /// `NotFound` without the path, `NotANetns` when it is no network namespace or the node's.
    fn observe_netns(&self, path: &Path) -> impl Future<Output = Result<NetnsRef>> + Send;

    /// Loads and pins an endpoint's programs and maps, reusing maps pinned for the id. Pins move to the new programs
    /// after all of them loaded. [`ProgramSpec::keep`] skips unchanged programs.
    fn ensure_programs(&self, spec: &ProgramSpec) -> impl Future<Output = Result<Programs>> + Send;

    /// Creates the veth pair, both sides down, with the container side in its namespace.
    ///
    /// # Errors
    /// `Exists` when the container has any interface of that name.
    fn ensure_link(&self, spec: &LinkSpec) -> impl Future<Output = Result<Link>> + Send;

    /// Inspects a container's interface made by another plugin.
    ///
    /// # Errors
    /// `NotFound` without the interface, `Unsupported` unless it is a veth with its other end in the node's
    /// namespace.
    fn observe_plugin_link(
        &self,
        netns: &NetnsRef,
        ifname: &IfName,
    ) -> impl Future<Output = Result<PluginLink>> + Send {
        let subject = format!("{ifname} in {}", netns.path.display());
        async move { Err(unsupported("look at", subject)) }
    }

    /// Other plugins' links with an endpoint's programs or the program that drops everything, each with its endpoint.
    fn observe_plugin_links(&self) -> impl Future<Output = Result<Vec<LinkRef>>> + Send {
        async move { Err(unsupported("list links", "of other plugins".to_owned())) }
    }

    /// Detaches the endpoint's programs, or the program that drops everything, from another plugin's link, undoing
    /// [`Self::ensure_attached`]. No effect without the link, or without programs of this endpoint and epoch.
    fn remove_from_plugin_link(&self, link: &LinkRef) -> impl Future<Output = Result<()>> + Send {
        let subject = format!("{} (endpoint {})", link.host_ifname, link.id);
        async move { Err(unsupported("restore link", subject)) }
    }

    /// Writes the configuration row.
    fn ensure_config(&self, id: EndpointId, spec: &ConfigSpec) -> impl Future<Output = Result<()>> + Send;

    /// Attaches the pinned programs, or atomically replaces the attached ones.
    fn ensure_attached(&self, link: &LinkRef) -> impl Future<Output = Result<Attached>> + Send;

    /// Adds addresses and routes on both sides and brings the link up. Only verifies the identity of another plugin's
    /// link.
    fn ensure_connected(&self, record: &EndpointRecord) -> impl Future<Output = Result<()>> + Send;

    /// Sets an MTU that differs from the record's on both sides. The container's side keeps a smaller choice of the
    /// container, which is returned. Skips missing and replaced sides, which [`Self::observe_endpoints`] reports.
    fn ensure_mtu(&self, record: &EndpointRecord, mtu: u32) -> impl Future<Output = Result<Option<u32>>> + Send;

    /// Writes the endpoint's shared-map rows, `CALLS` first, and nftables entries. Other endpoints can reach it from
    /// then on.
    ///
    /// # Errors
    /// `Exists` for a port with another target. Without masquerading there is no table.
    fn ensure_reachable(&self, record: &EndpointRecord) -> impl Future<Output = Result<()>> + Send;

    /// Removes the endpoint's nftables entries and this epoch's shared-map rows.
    fn remove_reachable(&self, record: &EndpointRecord) -> impl Future<Output = Result<()>> + Send;

    /// Replaces the programs with one that drops everything, so that no packet bypasses policy before the link's
    /// removal.
    fn remove_attached(&self, link: &LinkRef) -> impl Future<Output = Result<()>> + Send;

    /// Unpins links, programs and maps; returns the last counters for the node's totals.
    fn remove_programs(&self, id: EndpointId) -> impl Future<Output = Result<Vec<CounterRow>>> + Send;

    /// Removes the veth pair and its routes; by the container's side if the host side left the node's namespace.
    /// Returns when look-ups fail, long before the kernel's release. Another plugin's link stays, with the program
    /// that drops everything.
    fn unlist_link(&self, link: &LinkRef) -> impl Future<Output = Result<LinkRelease>> + Send;

    /// [`Self::unlist_link`], then waits for the release. Concurrent calls share one kernel wait.
    fn remove_link(&self, link: &LinkRef) -> impl Future<Output = Result<()>> + Send {
        async move { self.unlist_link(link).await?.await }
    }

    /// Compares endpoints with their records; returns the problems of each, in order. Batching saves thread switches.
    fn observe_endpoints(
        &self,
        records: &[EndpointRecord],
    ) -> impl Future<Output = Result<Vec<Vec<EndpointProblem>>>> + Send;

    /// [`Self::observe_endpoints`] for one endpoint.
    fn observe_endpoint(&self, record: &EndpointRecord) -> impl Future<Output = Result<Vec<EndpointProblem>>> + Send {
        async move { Ok(self.observe_endpoints(std::slice::from_ref(record)).await?.pop().unwrap_or_default()) }
    }

    /// Links whose host side is gone or replaced under its name. Looks up names, without a dump or RTNL: cheap enough
    /// for each status.
    fn observe_missing(&self, links: &[LinkRef]) -> impl Future<Output = Result<Vec<EndpointId>>> + Send {
        let subject = format!("{} links", links.len());
        async move { Err(unsupported("look for missing links among", subject)) }
    }

    /// Counters that are not zero.
    fn observe_counters(&self, id: EndpointId) -> impl Future<Output = Result<Vec<CounterRow>>> + Send;

    /// Runs test packets through the pinned programs; returns the results of endpoints and cases, in order. Sends and
    /// counts nothing. Batching saves thread switches.
    ///
    /// # Errors
    /// `NotFound` for an endpoint without pinned maps. A case whose program cannot run has a separate error.
    fn observe_verdicts(
        &self,
        checks: &[(EndpointId, Arc<[Case]>)],
    ) -> impl Future<Output = Result<Vec<Result<Vec<CaseResult>>>>> + Send {
        let subject = format!("{} endpoints", checks.len());
        async move { Err(unsupported("check programs of", subject)) }
    }
}

/// Masquerading, published ports and conntrack.
pub trait NatKernel: Send + Sync + 'static {
    /// Applies or reverts masquerading and forwarding, and announces reachable endpoints if enabled. Existing entries
    /// stay; a new table gets the entries written since the agent's start. Separate from [`NodeKernel::ensure_node`],
    /// because containers reach each other even if this fails.
    ///
    /// # Errors
    /// `Unsupported` without nf_tables, `Conflict` for a foreign table of the name, `Permission` for a
    /// setting that cannot be written.
    fn ensure_nat(&self, spec: &NodeSpec) -> impl Future<Output = Result<()>> + Send;

    /// Compares the state of [`Self::ensure_nat`] with the specification.
    fn observe_nat(&self, spec: &NodeSpec) -> impl Future<Output = Result<NatView>> + Send;

    /// Checks that the node has the mappings' addresses and no process holds their ports, except the container's
    /// monitor (podman reserves ports). Skips SCTP.
    ///
    /// # Errors
    /// `NotFound` without the address, `Exists` for a held port, `Unsupported` for an address that cannot lead to a
    /// container.
    fn observe_ports(&self, _: &ContainerId, mappings: &[PortMapping]) -> impl Future<Output = Result<()>> + Send {
        let subject = format!("{} ports", mappings.len());
        async move { Err(unsupported("publish", subject)) }
    }

    /// Repair: removes an nftables entry unless an endpoint wrote it since the agent's start.
    fn remove_nat_entry(&self, entry: &NatEntry) -> impl Future<Output = Result<()>> + Send {
        let subject = entry.to_string();
        async move { Err(unsupported("take back", subject)) }
    }

    /// Removes conntrack entries with any of the addresses, and ends the proxies' connections with clients of these
    /// addresses, in one pass each; returns the number of both. A DEL never waits for it; an ADD only for a port or an
    /// address that is about to be free.
    fn remove_connections(&self, ips: &[IpAddr]) -> impl Future<Output = Result<u64>> + Send {
        let subject = format!("{} addresses", ips.len());
        async move { Err(unsupported("remove connections of", subject)) }
    }
}

/// The flow tables.
pub trait FlowKernel: Send + Sync + 'static {
    /// Collects the rows of ended flows and returns the usage. One collection runs at a time.
    fn collect_flows(&self) -> impl Future<Output = Result<FlowUsage>> + Send {
        async move { Err(unsupported("collect", "flows".to_owned())) }
    }

    /// Connections to the node's proxies that endpoints opened since the map was created; wraps.
    fn observe_opened_to_proxies(&self) -> impl Future<Output = Result<u32>> + Send {
        async move { Err(unsupported("observe", "connections to the proxies".to_owned())) }
    }

    /// Counts the connections of each endpoint to the node's proxies and limits them to `share` for about 4 s: an agent
    /// that stops counting must not keep clients out.
    fn limit_proxy_clients(&self, share: u32) -> impl Future<Output = Result<ProxyClients>> + Send {
        async move { Err(unsupported("limit", format!("clients of the proxies to {share} connections"))) }
    }

    /// At most `limit` matching flows. Costs two system calls per table row.
    fn observe_flows(&self, filter: &FlowFilter, limit: usize) -> impl Future<Output = Result<FlowList>> + Send {
        let subject = format!("{limit} flows ({filter:?})");
        async move { Err(unsupported("observe", subject)) }
    }

    /// Removes matching flows and returns their number. The next packet of a live flow restarts it.
    fn remove_flows(&self, filter: &FlowFilter) -> impl Future<Output = Result<u64>> + Send {
        let subject = format!("flows ({filter:?})");
        async move { Err(unsupported("remove", subject)) }
    }
}

/// Policy rows.
pub trait PolicyKernel: Send + Sync + 'static {
    /// Applies row changes in order, then the generation, so that they decide every flow's next packet. Without
    /// changes, sets only the mode. After a failure, preceding rows have changed.
    fn change_policy(&self, changes: Vec<RowChange>, mode: Mode) -> impl Future<Output = Result<()>> + Send {
        let subject = format!("{} rows, {mode:?}", changes.len());
        async move { Err(unsupported("change policy", subject)) }
    }

    /// Creates the node's part of redirects, before a row refers to the proxy, or removes it. Then
    /// [`NodeKernel::ensure_node`] and [`NatKernel::ensure_nat`] manage it.
    fn ensure_way_to_proxy(&self, wanted: bool) -> impl Future<Output = Result<()>> + Send {
        let _ = wanted;
        async move { Err(unsupported("set up redirects", "node".to_owned())) }
    }

    /// Addresses of the node's interfaces.
    fn observe_addresses(&self) -> impl Future<Output = Result<Vec<IpAddr>>> + Send {
        async move { Err(unsupported("observe", "addresses of the node".to_owned())) }
    }

    /// All policy rows.
    fn observe_policy(&self) -> impl Future<Output = Result<PolicyRows>> + Send {
        async move { Err(unsupported("observe", "policy".to_owned())) }
    }
}

fn unsupported(operation: &'static str, subject: String) -> KernelError {
    KernelError { operation, subject, cause: "this kernel body cannot".into(), kind: KernelErrorKind::Unsupported }
}
