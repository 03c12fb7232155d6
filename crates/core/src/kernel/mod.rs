//! The interface to the kernel, in the terms of the domain.
//!
//! `ensure_*` is idempotent, `remove_*` succeeds when the object does not exist, `observe_*` and `dump` change
//! nothing. `wharf-datapath` has the real implementation and the fake; one contract test runs on both.
//!
//! Each room of the agent takes the part of the interface that it needs; [`Kernel`] is all of it.

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

/// All of the kernel's parts.
pub trait Kernel: NodeKernel + EndpointKernel + NatKernel + FlowKernel + PolicyKernel {}

impl<K: NodeKernel + EndpointKernel + NatKernel + FlowKernel + PolicyKernel> Kernel for K {}

/// What all endpoints share, the node's networks, and what is left over of others. Every call is bounded in time by the caller.
pub trait NodeKernel: Send + Sync + 'static {
    /// The kernel features probed when this object was opened.
    fn features(&self) -> &KernelFeatures;

    /// Creates the node's objects: shared maps, router interface and addresses, unreachable routes for the pools.
    fn ensure_node(&self, spec: &NodeSpec) -> impl Future<Output = Result<()>> + Send;

    /// The maps, shared and per endpoint, with the number of rows in use.
    fn observe_maps(&self) -> impl Future<Output = Result<Vec<MapInfo>>> + Send;

    /// A map's rows in readable form, column name to value. Names as in [`MapInfo::name`].
    fn dump_map(&self, name: &str) -> impl Future<Output = Result<Vec<BTreeMap<String, String>>>> + Send {
        let subject = name.to_owned();
        async move { Err(unsupported("dump map", subject)) }
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
    /// [`NatKernel::remove_connections`].
    fn observe_speakers(&self, ip: IpAddr) -> impl Future<Output = Result<Vec<String>>> + Send {
        async move { Err(unsupported("observe speakers for", ip.to_string())) }
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

/// An endpoint's programs, link and routes, and what is seen of them. Every call is bounded in time by the caller.
pub trait EndpointKernel: Send + Sync + 'static {
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

    /// Looks at a container's interface that another plugin made. Changes nothing.
    ///
    /// # Errors
    /// `NotFound` when the container has no such interface, `Unsupported` when it is no veth whose other end is in the node's namespace.
    fn observe_plugin_link(
        &self,
        netns: &NetnsRef,
        ifname: &IfName,
    ) -> impl Future<Output = Result<PluginLink>> + Send {
        let subject = format!("{ifname} in {}", netns.path.display());
        async move { Err(unsupported("look at", subject)) }
    }

    /// Links of other plugins that have programs of endpoints, or the one that drops everything, each with the endpoint that they are of.
    fn observe_plugin_links(&self) -> impl Future<Output = Result<Vec<LinkRef>>> + Send {
        async move { Err(unsupported("list links", "of other plugins".to_owned())) }
    }

    /// Takes the endpoint's programs, or the one that drops everything, off another plugin's link, which is then as it was before
    /// [`Self::ensure_attached`]. Nothing happens to a link that is gone, or that has nothing of this endpoint and epoch.
    fn remove_from_plugin_link(&self, link: &LinkRef) -> impl Future<Output = Result<()>> + Send {
        let subject = format!("{} (endpoint {})", link.host_ifname, link.id);
        async move { Err(unsupported("restore link", subject)) }
    }

    /// Writes the endpoint's configuration row.
    fn ensure_config(&self, id: EndpointId, spec: &ConfigSpec) -> impl Future<Output = Result<()>> + Send;

    /// Attaches the pinned programs to the host side, or replaces the attached programs atomically.
    fn ensure_attached(&self, link: &LinkRef) -> impl Future<Output = Result<Attached>> + Send;

    /// Adds the container's addresses and routes and the node's routes to the container, and brings both sides up. Of another plugin's
    /// link it only sees whether it is still the one of the record.
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
    /// the pair is removed by the container's side. Another plugin's link stays, with the program on it that drops everything.
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
}

/// Masquerade, published ports, and the node's own connection tracking. Every call is bounded in time by the caller.
pub trait NatKernel: Send + Sync + 'static {
    /// Makes the node masquerade and forward as its specification says, or takes that back. Published ports stay as they
    /// are, as do addresses that are not masqueraded; where the table was missing, what endpoints put there since the agent's start is written again. Announces the endpoints that can be reached, where that is
    /// wanted. Apart from [`NodeKernel::ensure_node`],
    /// because a node that cannot is one whose containers reach each other.
    ///
    /// # Errors
    /// `Unsupported` without nf_tables, `Conflict` where somebody else's table has the name, `Permission` where a setting
    /// cannot be written.
    fn ensure_nat(&self, spec: &NodeSpec) -> impl Future<Output = Result<()>> + Send;

    /// Compares what [`Self::ensure_nat`] makes with the node's specification.
    fn observe_nat(&self, spec: &NodeSpec) -> impl Future<Output = Result<NatView>> + Send;

    /// Asks whether the node has the addresses of the mappings, and whether a process of the node holds one of their ports.
    /// The monitor of the container itself may hold them (podman reserves ports so). Ports of SCTP are not looked at.
    ///
    /// # Errors
    /// `NotFound` where the node does not have the address, `Exists` where a process holds the port, `Unsupported` where
    /// the address cannot lead to a container.
    fn observe_ports(&self, _: &ContainerId, mappings: &[PortMapping]) -> impl Future<Output = Result<()>> + Send {
        let subject = format!("{} ports", mappings.len());
        async move { Err(unsupported("publish", subject)) }
    }

    /// Takes an entry out of the node's table, unless an endpoint has put it there since the agent's start; for repair.
    fn remove_nat_entry(&self, entry: &NatEntry) -> impl Future<Output = Result<()>> + Send {
        let subject = entry.to_string();
        async move { Err(unsupported("take back", subject)) }
    }

    /// Removes the node's conntrack entries in which any of the addresses occurs, in either direction, and ends the
    /// connections that the proxies have with clients of these addresses; returns the number of both. One pass over each
    /// table serves all of the addresses.
    /// A DEL never waits for it; an ADD does only for a port or an address that is about to be free.
    fn remove_connections(&self, ips: &[IpAddr]) -> impl Future<Output = Result<u64>> + Send {
        let subject = format!("{} addresses", ips.len());
        async move { Err(unsupported("remove connections of", subject)) }
    }
}

/// The table of flows. Every call is bounded in time by the caller.
pub trait FlowKernel: Send + Sync + 'static {
    /// Removes the rows of flows that are over from the flow tables, and tells how full they are. One collection runs at a time.
    fn collect_flows(&self) -> impl Future<Output = Result<FlowUsage>> + Send {
        async move { Err(unsupported("collect", "flows".to_owned())) }
    }

    /// Connections to the node's proxies that endpoints began, since the kernel's table was made; wraps.
    fn observe_opened_to_proxies(&self) -> impl Future<Output = Result<u32>> + Send {
        async move { Err(unsupported("observe", "connections to the proxies".to_owned())) }
    }

    /// Counts the connections to the node's proxies that each endpoint has open as their client, and has the programs refuse
    /// those beyond `share` of one endpoint. The limits hold for about 4 s, so that an agent that is gone refuses nobody.
    fn limit_proxy_clients(&self, share: u32) -> impl Future<Output = Result<ProxyClients>> + Send {
        async move { Err(unsupported("limit", format!("clients of the proxies to {share} connections"))) }
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
}

/// The rows of policy. Every call is bounded in time by the caller.
pub trait PolicyKernel: Send + Sync + 'static {
    /// Changes rows of policy's tables in their order, then the generation, so that every flow is judged by them before its next
    /// packet passes. Without changes nothing happens but to the mode. After a failure, rows before the one that failed have changed.
    fn change_policy(&self, changes: Vec<RowChange>, mode: Mode) -> impl Future<Output = Result<()>> + Send {
        let subject = format!("{} rows, {mode:?}", changes.len());
        async move { Err(unsupported("change policy", subject)) }
    }

    /// Makes the node's part of redirects, before the first row leads to the proxy, or takes it away; [`NodeKernel::ensure_node`] and [`NatKernel::ensure_nat`] keep it or take it
    /// away, as their specification says.
    fn ensure_way_to_proxy(&self, wanted: bool) -> impl Future<Output = Result<()>> + Send {
        let _ = wanted;
        async move { Err(unsupported("set up redirects", "node".to_owned())) }
    }

    /// The addresses of the node's interfaces, in its network namespace.
    fn observe_addresses(&self) -> impl Future<Output = Result<Vec<IpAddr>>> + Send {
        async move { Err(unsupported("observe", "addresses of the node".to_owned())) }
    }

    /// All rows of policy's tables.
    fn observe_policy(&self) -> impl Future<Output = Result<PolicyRows>> + Send {
        async move { Err(unsupported("observe", "policy".to_owned())) }
    }
}

fn unsupported(operation: &'static str, subject: String) -> KernelError {
    KernelError { operation, subject, cause: "this kernel body cannot".into(), kind: KernelErrorKind::Unsupported }
}
