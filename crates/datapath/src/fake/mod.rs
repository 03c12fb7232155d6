//! A kernel in memory. It models names, indexes and epochs; namespaces; pins, attachments, rows and routes and their
//! required order; failures before or after the effect; calls that hang.
//!
//! A green run proves nothing about programs, netlink encoding, time and RTNL, limits, old kernels, concurrent changes,
//! bpffs, attach modes, routes in a container, announcements, connection tracking, ageing of flows.

mod control;
mod endpoint;
mod kernel;
mod observe;
mod peers;
mod policy;
mod selfcheck;
mod state;

pub use control::{Hold, Operation};
pub use peers::Peers;
pub use state::LinkChange;

use std::{
    collections::BTreeSet,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use wharf_common::CellKey;
use wharf_core::{
    endpoint::NetnsRef,
    finding::NodeProblem,
    flow::{Flow, FlowUsage},
    ids::{EndpointId, IfName},
    kernel::{CounterRow, KernelErrorKind, KernelFeatures, MissingRoute},
    mtu::Uplink,
    nat::NatEntry,
    overlap::NodeNetwork,
    policy::{Judged, Mode, PolicyRows},
};

use control::Controls;
use state::{Hook, State};

/// Programs on a link's hooks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attachment {
    /// The endpoint's programs.
    Programs,
    /// Drops everything.
    Sink,
}

/// Clones share one kernel.
#[derive(Clone)]
pub struct FakeKernel {
    features: Arc<KernelFeatures>,
    state: Arc<Mutex<State>>,
    controls: Arc<Mutex<Controls>>,
}

impl Default for FakeKernel {
    fn default() -> Self {
        Self::new()
    }
}

impl FakeKernel {
    /// With all features and no objects.
    #[must_use]
    pub fn new() -> Self {
        Self {
            features: Arc::new(state::features()),
            state: Arc::new(Mutex::new(State::default())),
            controls: Arc::new(Mutex::new(Controls::default())),
        }
    }

    /// Binds a new namespace to a path.
    pub fn add_netns(&self, path: impl Into<PathBuf>) -> NetnsRef {
        self.state().add_netns(path.into())
    }

    /// Also removes its interfaces and their peers.
    pub fn remove_netns(&self, path: &Path) {
        self.state().remove_netns(path);
    }

    /// Adds a file that is no namespace.
    pub fn add_plain_file(&self, path: impl Into<PathBuf>) {
        self.state().plain_files.insert(path.into());
    }

    /// False without the namespace.
    pub fn add_foreign_interface(&self, netns: &Path, ifname: &str) -> bool {
        self.state().add_foreign_interface(netns, ifname)
    }

    /// The link is up. False without the namespace.
    pub fn add_plugin_link(
        &self,
        netns: &Path,
        ifname: IfName,
        host_ifname: IfName,
        addresses: impl IntoIterator<Item = IpAddr>,
    ) -> bool {
        self.state().add_plugin_link(netns, ifname, host_ifname, addresses.into_iter().collect())
    }

    /// The hooks' programs.
    #[must_use]
    pub fn attached(&self, host_ifname: &str) -> Option<Attachment> {
        self.state().links.get(host_ifname)?.attached.map(|hook| match hook {
            Hook::Programs(_) => Attachment::Programs,
            Hook::Sink => Attachment::Sink,
        })
    }

    /// Whether the node has the link.
    #[must_use]
    pub fn has_link(&self, host_ifname: &str) -> bool {
        self.state().links.contains_key(host_ifname)
    }

    /// False without the route.
    pub fn remove_route_behind_the_back(&self, address: IpAddr) -> bool {
        self.state().routes.remove(&state::host_net(address)).is_some()
    }

    /// False without the link.
    pub fn remove_link_behind_the_back(&self, host_ifname: &str) -> bool {
        self.state().remove_link_named(host_ifname)
    }

    /// False without the link.
    pub fn change_link_behind_the_back(&self, host_ifname: &str, change: LinkChange) -> bool {
        self.state().change_link(host_ifname, change)
    }

    /// False without the link.
    pub fn set_alias_behind_the_back(&self, host_ifname: &str, alias: Option<&str>) -> bool {
        match self.state().links.get_mut(host_ifname) {
            Some(link) => {
                link.alias = alias.map(str::to_owned);
                true
            }
            None => false,
        }
    }

    /// The node's table.
    #[must_use]
    pub fn nat(&self) -> BTreeSet<NatEntry> {
        self.state().nat.clone()
    }

    pub fn add_nat_behind_the_back(&self, entry: NatEntry) {
        self.state().nat.insert(entry);
    }

    /// False without the entry.
    pub fn remove_nat_behind_the_back(&self, entry: &NatEntry) -> bool {
        self.state().nat.remove(entry)
    }

    /// A process of the node holds the port.
    pub fn hold_port(&self, port: u16) {
        self.state().held.insert(port);
    }

    /// `observe_node` reports it until the next `ensure_node`.
    pub fn break_node(&self, problem: NodeProblem) {
        self.state().broken.push(problem);
    }

    /// Routes to other nodes, and the overlay.
    #[must_use]
    pub fn peers(&self) -> Peers {
        self.state().peers.clone()
    }

    /// By another program.
    pub fn change_peers_behind_the_back(&self, change: impl FnOnce(&mut Peers)) {
        change(&mut self.state().peers);
    }

    /// Routes that cannot be made.
    pub fn set_missing_routes(&self, missing: Vec<MissingRoute>) {
        self.state().missing_routes = missing;
    }

    /// Interfaces with a default route.
    pub fn set_uplinks(&self, uplinks: Vec<Uplink>) {
        self.state().uplinks = uplinks;
    }

    /// Foreign addresses and routes.
    pub fn set_networks(&self, networks: Vec<NodeNetwork>) {
        self.state().networks = networks;
    }

    /// Adds a conntrack row.
    pub fn add_connection(&self, source: IpAddr, destination: IpAddr) {
        self.state().connections.push((source, destination));
    }

    /// Source, destination.
    #[must_use]
    pub fn connections(&self) -> Vec<(IpAddr, IpAddr)> {
        self.state().connections.clone()
    }

    /// A collection removes it when no time is left.
    pub fn add_flow(&self, flow: Flow) {
        self.state().flows.push(flow);
    }

    #[must_use]
    pub fn flows(&self) -> Vec<Flow> {
        self.state().flows.clone()
    }

    /// A collection updates the row count.
    pub fn set_flow_usage(&self, usage: FlowUsage) {
        self.state().flow_usage = usage;
    }

    /// Of any interface.
    pub fn add_node_address(&self, address: IpAddr) {
        self.state().node_addresses.insert(address);
    }

    #[must_use]
    pub fn policy(&self) -> (PolicyRows, Mode) {
        let state = self.state();
        (state.policy.rows.clone(), state.policy.mode)
    }

    /// Size of the peer table.
    pub fn set_peers_max(&self, rows: u32) {
        self.state().policy.peers_max = Some(rows);
    }

    /// Sets counters. False without the cell.
    pub fn set_judged(&self, key: &CellKey, judged: Judged) -> bool {
        match self.state().policy.rows.cells.get_mut(key) {
            Some((_, by)) => {
                *by = judged;
                true
            }
            None => false,
        }
    }

    /// The next policy change fails at row change `index`, from zero; earlier rows change.
    pub fn fail_policy_at(&self, index: usize, kind: KernelErrorKind) {
        self.state().policy.fails_at = Some((index, kind));
    }

    /// False without the endpoint's maps.
    pub fn set_counters(&self, id: EndpointId, rows: Vec<CounterRow>) -> bool {
        self.state().set_counters(id, rows)
    }

    /// The next call fails without effect.
    pub fn fail_next(&self, operation: Operation, kind: KernelErrorKind) {
        self.controls().fail(operation, kind, false);
    }

    /// The next call fails after its effect.
    pub fn fail_next_after_effect(&self, operation: Operation, kind: KernelErrorKind) {
        self.controls().fail(operation, kind, true);
    }

    /// Calls fail without effect until [`FakeKernel::mend`].
    pub fn fail_always(&self, operation: Operation, kind: KernelErrorKind) {
        self.controls().fail_always(operation, Some(kind));
    }

    /// Ends [`FakeKernel::fail_always`].
    pub fn mend(&self, operation: Operation) {
        self.controls().fail_always(operation, None);
    }

    /// Calls wait, without effect, until the hold is dropped.
    #[must_use]
    pub fn hold(&self, operation: Operation) -> Hold {
        self.controls().hold(operation)
    }

    /// The next `ensure_node` waits after `changes` changes of [`Peers`]; a call without a further change does not.
    #[must_use]
    pub fn hold_node(&self, changes: usize) -> Hold {
        self.controls().hold_node(changes)
    }

    /// Failed calls included.
    #[must_use]
    pub fn calls(&self, operation: Operation) -> u64 {
        self.controls().log.iter().filter(|(o, _)| *o == operation).count() as u64
    }

    /// Oldest first, with subjects (`endpoint 7`, a path, `node`).
    #[must_use]
    pub fn call_log(&self) -> Vec<(Operation, String)> {
        self.controls().log.clone()
    }

    /// Empties [`Self::call_log`].
    pub fn clear_call_log(&self) {
        self.controls().log.clear();
    }

    /// No Wharf object is left, except the node's.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.state().is_clean()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn controls(&self) -> MutexGuard<'_, Controls> {
        self.controls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
