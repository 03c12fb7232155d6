//! The edge to the kernel, in the domain's verbs.
//!
//! `ensure_*` is idempotent, `remove_*` succeeds when the thing is already gone, `observe_*` and `dump` change nothing.
//! `wharf-datapath` has the real body and the fake; one contract test runs on both.

use std::{
    fmt,
    future::Future,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    sync::Arc,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{
    endpoint::{EndpointRecord, NetnsRef},
    finding::{EndpointProblem, NodeProblem},
    identity::Identity,
    ids::{Attachment, EndpointId, Epoch, IfIndex, IfName, MacAddr},
    overlap::{NodeNetwork, NodeNetworks},
    selfcheck::{Case, CaseResult},
};

/// What kind of failure it was; decides what the caller may do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelErrorKind {
    /// The thing named is there already (an interface of that name in the container).
    Exists,
    /// The thing named is not there (link, namespace, pin).
    NotFound,
    /// The path is not a network namespace, or is the node's own.
    NotANetns,
    /// The caller lacks a capability.
    Permission,
    /// The kernel is too old, or lacks a feature.
    Unsupported,
    /// A limit was reached (memory, map full, busy); a retry may mend it.
    Exhausted,
    /// What is there is not what was expected (foreign pin, other ABI); never touched.
    Conflict,
    /// Anything else.
    Other,
}

/// A kernel operation that failed: what, on what, why.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {subject}: {cause}")]
pub struct KernelError {
    /// The operation, as a verb phrase: `create link`, `attach program`.
    pub operation: &'static str,
    /// What it was done to: `wh00010000002a (endpoint 1)`.
    pub subject: String,
    /// The cause in words, with what the user can do where that is known.
    pub cause: String,
    /// Kind.
    pub kind: KernelErrorKind,
}

/// Result of a kernel operation.
pub type Result<T> = std::result::Result<T, KernelError>;

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
    /// tcx is there.
    pub tcx: bool,
    /// netkit devices are there.
    pub netkit: bool,
    /// `bpf_redirect_peer` is there (Linux 5.10).
    pub redirect_peer: bool,
    /// Kernel BTF is there.
    pub btf: bool,
    /// `SO_NETNS_COOKIE` is there (Linux 5.14).
    pub netns_cookie: bool,
    /// Connections are tracked on the node: `nf_conntrack` is there. It may come later, when somebody loads it.
    pub conntrack: bool,
}

/// The node's own part of the datapath.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSpec {
    /// Router addresses: what endpoints see as gateway and what the node speaks to endpoints with.
    pub router4: Option<Ipv4Addr>,
    /// The same for IPv6.
    pub router6: Option<Ipv6Addr>,
    /// Every CIDR of every pool: routed to nowhere except where an endpoint's own route is longer.
    pub cidrs: Vec<IpNet>,
    /// MTU of the router interface, bytes.
    pub mtu: u32,
}

/// The programs an endpoint is to have.
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
    /// Programs that are pinned stay, with their ids, when they are the very ones that a load would bring: the same
    /// instructions, constants and maps. Otherwise they are loaded anew in any case. Programs with log records may be.
    pub keep: bool,
}

/// What the kernel holds of an endpoint's programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Programs {
    /// Kernel ids of `from_container`, `to_container`, `deliver`.
    pub program_ids: [u32; 3],
    /// Kernel ids of `CONFIG` and `METRICS`.
    pub map_ids: [u32; 2],
    /// Bytes of kernel memory the programs and maps take (memlock of fdinfo).
    pub memlock_bytes: u64,
}

/// The veth pair an endpoint is to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkSpec {
    /// Endpoint id, for messages.
    pub id: EndpointId,
    /// Epoch, for messages.
    pub epoch: Epoch,
    /// Whose it is: with id and epoch it makes the owner's mark, the alias of the host side.
    pub attachment: Attachment,
    /// Host side's name in the node's namespace.
    pub host_ifname: IfName,
    /// Where the container side is born.
    pub netns: NetnsRef,
    /// Container side's name.
    pub ifname: IfName,
    /// Container side's MAC.
    pub container_mac: MacAddr,
    /// Host side's MAC.
    pub host_mac: MacAddr,
    /// MTU of both, bytes (68 to 65535; 1280 at least when it carries IPv6).
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

/// The endpoint's row of configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigSpec {
    /// Epoch.
    pub epoch: Epoch,
    /// Host side's index.
    pub host_ifindex: IfIndex,
    /// Identity.
    pub identity: Identity,
    /// Addresses and gateways.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
    /// IPv4 gateway.
    pub gateway4: Option<Ipv4Addr>,
    /// IPv6 gateway.
    pub gateway6: Option<Ipv6Addr>,
    /// May send and receive.
    pub live: bool,
    /// Forwarded packets are traced.
    pub trace: bool,
}

/// What names a link beyond doubt: every destructive act checks id, epoch and name or mark against the kernel before it acts.
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
    /// The container's side, when it is known: by it the pair is removed when somebody moved the host side to another
    /// network namespace.
    pub container: Option<ContainerSide>,
}

/// What names the container's side of a link.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ContainerSide {
    /// The container's network namespace.
    pub netns: NetnsRef,
    /// Index there.
    pub ifindex: IfIndex,
    /// MAC address that it was made with.
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

/// How an attach ended.
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

/// A route of ours (recognised by its protocol number).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RouteRow {
    /// Destination.
    pub destination: IpNet,
    /// Outgoing interface; none for an unreachable route.
    pub ifindex: Option<IfIndex>,
}

/// A link of ours (recognised by its name and kind).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LinkRow {
    /// Name.
    pub name: String,
    /// Index.
    pub ifindex: IfIndex,
    /// Alias, where it has one: the owner's mark if it is ours.
    pub alias: Option<String>,
}

/// A row of the shared endpoint table.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EndpointTableRow {
    /// Address.
    pub address: IpAddr,
    /// Endpoint id as stored (hostile until matched).
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

/// Everything of ours that the kernel and the bpffs hold, for restore and audit.
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
    /// Things under our pin root that are not of our making (named, never touched).
    pub foreign_pins: Vec<PathBuf>,
}

/// The kernel, as the agent sees it. Every call is bounded in time by the caller.
pub trait Kernel: Send + Sync + 'static {
    /// What was probed when this was opened.
    fn features(&self) -> &KernelFeatures;

    /// Makes the node's part: shared maps, router interface and addresses, unreachable routes for the pools.
    fn ensure_node(&self, spec: &NodeSpec) -> impl Future<Output = Result<()>> + Send;

    /// Opens a path and says which network namespace it is.
    ///
    /// # Errors
    /// `NotFound` when the path is gone, `NotANetns` when it is something else or the node's own namespace.
    fn observe_netns(&self, path: &Path) -> impl Future<Output = Result<NetnsRef>> + Send;

    /// Loads an endpoint's programs, with their maps, and pins them. With maps already pinned for the id, the new
    /// programs use those, and the pins move to the new programs only after all of them have loaded. With
    /// [`ProgramSpec::keep`], what needs no load is not loaded.
    fn ensure_programs(&self, spec: &ProgramSpec) -> impl Future<Output = Result<Programs>> + Send;

    /// Creates the veth pair, both sides down, the container side born in its namespace.
    ///
    /// # Errors
    /// `Exists` when the container already has an interface of that name (whoever made it).
    fn ensure_link(&self, spec: &LinkSpec) -> impl Future<Output = Result<Link>> + Send;

    /// Writes the endpoint's configuration row.
    fn ensure_config(&self, id: EndpointId, spec: &ConfigSpec) -> impl Future<Output = Result<()>> + Send;

    /// Attaches the pinned programs to the host side, or replaces what is attached there atomically.
    fn ensure_attached(&self, link: &LinkRef) -> impl Future<Output = Result<Attached>> + Send;

    /// Gives the container its addresses and routes, the node its routes to it, and brings both sides up.
    fn ensure_connected(&self, record: &EndpointRecord) -> impl Future<Output = Result<()>> + Send;

    /// Puts the endpoint's rows into the shared maps, `CALLS` first: from here on others reach it.
    fn ensure_reachable(&self, record: &EndpointRecord) -> impl Future<Output = Result<()>> + Send;

    /// Takes the endpoint's rows out of the shared maps, only those whose epoch is this one's.
    fn remove_reachable(&self, record: &EndpointRecord) -> impl Future<Output = Result<()>> + Send;

    /// Takes the endpoint's programs off its link and leaves a program there that drops everything, so that nothing
    /// passes unpoliced until the link is gone.
    fn remove_attached(&self, link: &LinkRef) -> impl Future<Output = Result<()>> + Send;

    /// Unpins the endpoint's links, programs and maps. Returns its last counters, for the node's totals.
    fn remove_programs(&self, id: EndpointId) -> impl Future<Output = Result<Vec<CounterRow>>> + Send;

    /// Removes the veth pair, and with it the node's routes to it. Calls that come together share one kernel wait. Where
    /// the host side is not in the node's namespace, the pair is removed by the container's side.
    fn remove_link(&self, link: &LinkRef) -> impl Future<Output = Result<()>> + Send;

    /// Compares what the kernel holds for endpoints with what it should: the problems of each in its place, empty when all
    /// is well. Asking for many at once saves the changes of thread that asking for each costs.
    fn observe_endpoints(
        &self,
        records: &[EndpointRecord],
    ) -> impl Future<Output = Result<Vec<Vec<EndpointProblem>>>> + Send;

    /// [`Self::observe_endpoints`] for one.
    fn observe_endpoint(&self, record: &EndpointRecord) -> impl Future<Output = Result<Vec<EndpointProblem>>> + Send {
        async move { Ok(self.observe_endpoints(std::slice::from_ref(record)).await?.pop().unwrap_or_default()) }
    }

    /// Those of the links whose host side is gone, or whose name another interface has. Asks for each by its name, without
    /// a dump and without the kernel's lock on links: cheap enough for each status.
    fn observe_missing(&self, links: &[LinkRef]) -> impl Future<Output = Result<Vec<EndpointId>>> + Send {
        let subject = format!("{} links", links.len());
        async move { Err(unsupported("look for missing links among", subject)) }
    }

    /// The endpoint's counters that are not zero.
    fn observe_counters(&self, id: EndpointId) -> impl Future<Output = Result<Vec<CounterRow>>> + Send;

    /// Gives test packets to the pinned programs of endpoints and says what came of each packet, in the order of endpoints
    /// and cases. Nothing is sent and nothing is counted. Asking for many endpoints at once saves the changes of thread
    /// that asking for each costs.
    ///
    /// # Errors
    /// In an endpoint's place `NotFound` when its maps are not pinned. A case whose program cannot be run is told in its
    /// place.
    fn observe_verdicts(
        &self,
        checks: &[(EndpointId, Arc<[Case]>)],
    ) -> impl Future<Output = Result<Vec<Result<Vec<CaseResult>>>>> + Send {
        let subject = format!("{} endpoints", checks.len());
        async move { Err(unsupported("check programs of", subject)) }
    }

    /// The maps, shared and per endpoint, with their fill.
    fn observe_maps(&self) -> impl Future<Output = Result<Vec<MapInfo>>> + Send;

    /// A map's rows in readable form, column name to value. Names as in [`MapInfo::name`].
    fn dump_map(
        &self,
        name: &str,
    ) -> impl Future<Output = Result<Vec<std::collections::BTreeMap<String, String>>>> + Send {
        let subject = name.to_owned();
        async move { Err(unsupported("dump map", subject)) }
    }

    /// Compares the node's own part (router interface and addresses, routes of the pools, shared pins) with what it should
    /// be; empty when all is well.
    fn observe_node(&self, spec: &NodeSpec) -> impl Future<Output = Result<Vec<NodeProblem>>> + Send {
        let subject = format!("{} pools", spec.cidrs.len());
        async move { Err(unsupported("observe node", subject)) }
    }

    /// The node's own addresses and routes, as far as they share addresses with the CIDRs.
    fn observe_networks(&self, cidrs: &[IpNet]) -> impl Future<Output = Result<NodeNetworks>> + Send {
        let subject = format!("{} CIDRs", cidrs.len());
        async move { Err(unsupported("observe networks of", subject)) }
    }

    /// The network of the node that a look-up of an address leads to: none when it leads nowhere, or over a route of
    /// Wharf's. Costs a few questions to the kernel, whatever there is.
    fn observe_network_of(&self, ip: IpAddr) -> impl Future<Output = Result<Option<NodeNetwork>>> + Send {
        async move { Err(unsupported("look up", ip.to_string())) }
    }

    /// What in the kernel can still speak for an address that no endpoint has: rows of the shared maps, routes, in words
    /// that name each. Empty: the address may be given out again. Connections are not among them, see
    /// [`Self::remove_connections`].
    fn observe_speakers(&self, ip: IpAddr) -> impl Future<Output = Result<Vec<String>>> + Send {
        async move { Err(unsupported("observe speakers for", ip.to_string())) }
    }

    /// Removes the node's conntrack rows in which any of the addresses occurs, in either direction, and says how many there
    /// were: 0 where the kernel tracks nothing. One pass over the table for all of the addresses, never on the path of an
    /// ADD or a DEL that has free addresses.
    fn remove_connections(&self, ips: &[IpAddr]) -> impl Future<Output = Result<u64>> + Send {
        let subject = format!("{} addresses", ips.len());
        async move { Err(unsupported("remove connections of", subject)) }
    }

    /// Everything of ours.
    fn dump(&self) -> impl Future<Output = Result<KernelDump>> + Send;

    /// Takes a row out of the shared endpoint table if it is of that epoch; for repair.
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

    /// Removes the node's part (uninstall): router interface, routes, shared pins.
    fn remove_node(&self) -> impl Future<Output = Result<()>> + Send;
}

fn unsupported(operation: &'static str, subject: String) -> KernelError {
    KernelError { operation, subject, cause: "this kernel body cannot".into(), kind: KernelErrorKind::Unsupported }
}
