//! A kernel in memory.
//!
//! What a green run does **not** prove: that the programs load or police anything (there are no packets); that
//! netlink messages are well formed; that deleting a link removes its routes, attachments and peer exactly as Linux
//! does (here it is immediate and without RTNL); limits, permissions and old kernels; concurrent changes by other
//! programs; bpffs; attach modes; routes and rules inside a container; announcements to neighbours; time (a call takes
//! none unless a test holds it); protocols and zones of connections; how a flow begins, ages and is evicted; anything
//! about test packets except the verdict. What it models: names,
//! indexes and epochs; the contents of each namespace; pins, attachments, rows and routes and their required order;
//! failures before or after the effect; calls that hang.

mod control;
mod endpoint;
mod kernel;
mod observe;
mod policy;
mod selfcheck;
mod state;

pub use control::{Hold, Operation};
pub use state::LinkChange;

use std::{
    collections::BTreeSet,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use wharf_common::{CellKey, Event};
use wharf_core::{
    endpoint::NetnsRef,
    finding::NodeProblem,
    flow::{Flow, FlowUsage},
    ids::{EndpointId, IfIndex, IfName},
    kernel::{CounterRow, EndpointTableRow, KernelErrorKind, KernelFeatures, Tracked},
    mtu::Uplink,
    nat::NatEntry,
    overlap::NodeNetwork,
    policy::{Judged, Mode, PolicyRows},
};

use control::Controls;
use state::{Hook, State};

/// What is on the hooks of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attachment {
    /// An endpoint's programs.
    Programs,
    /// The program that drops everything.
    Sink,
}

/// The fake. Clones share one kernel, as processes do: a clone that outlives another stands for a restarted agent.
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
    /// A kernel that offers everything and holds nothing of ours.
    #[must_use]
    pub fn new() -> Self {
        Self {
            features: Arc::new(state::features()),
            state: Arc::new(Mutex::new(State::default())),
            controls: Arc::new(Mutex::new(Controls::default())),
        }
    }

    /// Creates a network namespace and binds it to a path. The path's previous namespace becomes unreachable but
    /// stays.
    pub fn add_netns(&self, path: impl Into<PathBuf>) -> NetnsRef {
        self.state().add_netns(path.into())
    }

    /// Ends the namespace at a path: its interfaces go, and with them the host sides of their pairs.
    pub fn remove_netns(&self, path: &Path) {
        self.state().remove_netns(path);
    }

    /// Puts a file that is not a namespace at a path.
    pub fn add_plain_file(&self, path: impl Into<PathBuf>) {
        self.state().plain_files.insert(path.into());
    }

    /// Puts an interface that is not ours into the namespace at a path. False when there is no such namespace.
    pub fn add_foreign_interface(&self, netns: &Path, ifname: &str) -> bool {
        self.state().add_foreign_interface(netns, ifname)
    }

    /// Puts a veth pair that another plugin made into the namespace at a path, up and with these addresses. False when there is no such
    /// namespace.
    pub fn add_plugin_link(
        &self,
        netns: &Path,
        ifname: IfName,
        host_ifname: IfName,
        addresses: impl IntoIterator<Item = IpAddr>,
    ) -> bool {
        self.state().add_plugin_link(netns, ifname, host_ifname, addresses.into_iter().collect())
    }

    /// What is on the hooks of a link, by its host side's name.
    #[must_use]
    pub fn attached(&self, host_ifname: &str) -> Option<Attachment> {
        self.state().links.get(host_ifname)?.attached.map(|hook| match hook {
            Hook::Programs(_) => Attachment::Programs,
            Hook::Sink => Attachment::Sink,
        })
    }

    /// Whether there is a link, by its host side's name.
    #[must_use]
    pub fn has_link(&self, host_ifname: &str) -> bool {
        self.state().links.contains_key(host_ifname)
    }

    /// Takes a route to an address away behind the agent's back. False when there is none.
    pub fn remove_route_behind_the_back(&self, address: IpAddr) -> bool {
        self.state().routes.remove(&state::host_net(address)).is_some()
    }

    /// Takes a link away behind the agent's back, by its host side's name. False when there is none.
    pub fn remove_link_behind_the_back(&self, host_ifname: &str) -> bool {
        self.state().remove_link_named(host_ifname)
    }

    /// Changes a link behind the agent's back, by its host side's name. False when there is no such link.
    pub fn change_link_behind_the_back(&self, host_ifname: &str, change: LinkChange) -> bool {
        self.state().change_link(host_ifname, change)
    }

    /// Gives a link another alias behind the agent's back, or none. False when there is no such link.
    pub fn set_alias_behind_the_back(&self, host_ifname: &str, alias: Option<&str>) -> bool {
        match self.state().links.get_mut(host_ifname) {
            Some(link) => {
                link.alias = alias.map(str::to_owned);
                true
            }
            None => false,
        }
    }

    /// Puts a route of ours to an address in behind the agent's back.
    pub fn add_route_behind_the_back(&self, address: IpAddr, ifindex: IfIndex) {
        self.state().routes.insert(state::host_net(address), Some(ifindex));
    }

    /// Puts a row into the endpoint table behind the agent's back.
    pub fn add_row_behind_the_back(&self, row: EndpointTableRow) {
        self.state().rows.insert(row.address, row);
    }

    /// What the node's table has of endpoints.
    #[must_use]
    pub fn nat(&self) -> BTreeSet<NatEntry> {
        self.state().nat.clone()
    }

    /// Puts an entry into the node's table behind the agent's back.
    pub fn add_nat_behind_the_back(&self, entry: NatEntry) {
        self.state().nat.insert(entry);
    }

    /// Takes an entry out of the node's table behind the agent's back. False when it is not there.
    pub fn remove_nat_behind_the_back(&self, entry: &NatEntry) -> bool {
        self.state().nat.remove(entry)
    }

    /// Lets a process of the node hold a port.
    pub fn hold_port(&self, port: u16) {
        self.state().held.insert(port);
    }

    /// Breaks the node's part: [`observe_node`](wharf_core::kernel::NodeKernel::observe_node) tells of this problem
    /// until the node's part is made again.
    pub fn break_node(&self, problem: NodeProblem) {
        self.state().broken.push(problem);
    }

    /// Sets the interfaces with a default route.
    pub fn set_uplinks(&self, uplinks: Vec<Uplink>) {
        self.state().uplinks = uplinks;
    }

    /// Sets the node's addresses and routes that are not ours.
    pub fn set_networks(&self, networks: Vec<NodeNetwork>) {
        self.state().networks = networks;
    }

    /// Sets the fill of the connection tracking.
    pub fn set_tracked(&self, tracked: Option<Tracked>) {
        self.state().tracked = tracked;
    }

    /// Adds a conntrack row.
    pub fn add_connection(&self, source: IpAddr, destination: IpAddr) {
        self.state().connections.push((source, destination));
    }

    /// The conntrack rows, source and destination.
    #[must_use]
    pub fn connections(&self) -> Vec<(IpAddr, IpAddr)> {
        self.state().connections.clone()
    }

    /// Puts a row into the flow tables. A collection removes it when no time is left to it.
    pub fn add_flow(&self, flow: Flow) {
        self.state().flows.push(flow);
    }

    /// The rows of the flow tables.
    #[must_use]
    pub fn flows(&self) -> Vec<Flow> {
        self.state().flows.clone()
    }

    /// Sets what the flow tables have counted, and how many rows fit. A collection counts the rows itself.
    pub fn set_flow_usage(&self, usage: FlowUsage) {
        self.state().flow_usage = usage;
    }

    /// Gives an interface of the node an address.
    pub fn add_node_address(&self, address: IpAddr) {
        self.state().node_addresses.insert(address);
    }

    /// The rows of policy's tables, and what the programs do with them.
    #[must_use]
    pub fn policy(&self) -> (PolicyRows, Mode) {
        let state = self.state();
        (state.policy.rows.clone(), state.policy.mode)
    }

    /// Sets what was judged by a cell. False when there is no such cell.
    pub fn set_judged(&self, key: &CellKey, judged: Judged) -> bool {
        match self.state().policy.rows.cells.get_mut(key) {
            Some((_, by)) => {
                *by = judged;
                true
            }
            None => false,
        }
    }

    /// The next change of policy fails at its change of this index, counted from zero. The rows before it change.
    pub fn fail_policy_at(&self, index: usize, kind: KernelErrorKind) {
        self.state().policy.fails_at = Some((index, kind));
    }

    /// Sets what the endpoint's programs have counted. False when it has no maps.
    pub fn set_counters(&self, id: EndpointId, rows: Vec<CounterRow>) -> bool {
        self.state().set_counters(id, rows)
    }

    /// Adds an event, as if a program had sent it.
    pub fn push_event(&self, event: Event) {
        self.state().events.push(event);
    }

    /// Takes the events pushed so far.
    #[must_use]
    pub fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut self.state().events)
    }

    /// The next call of this operation fails with this kind, before it has any effect.
    pub fn fail_next(&self, operation: Operation, kind: KernelErrorKind) {
        self.controls().fail(operation, kind, false);
    }

    /// The next call of this operation takes effect and then reports a failure, as when an answer is lost.
    pub fn fail_next_after_effect(&self, operation: Operation, kind: KernelErrorKind) {
        self.controls().fail(operation, kind, true);
    }

    /// Every call of this operation fails with this kind until [`FakeKernel::mend`].
    pub fn fail_always(&self, operation: Operation, kind: KernelErrorKind) {
        self.controls().fail_always(operation, Some(kind));
    }

    /// Ends [`FakeKernel::fail_always`].
    pub fn mend(&self, operation: Operation) {
        self.controls().fail_always(operation, None);
    }

    /// Calls of this operation wait, before any effect, until the returned hold is released or dropped. A held change
    /// of an endpoint then takes effect even if its caller was dropped.
    #[must_use]
    pub fn hold(&self, operation: Operation) -> Hold {
        self.controls().hold(operation)
    }

    /// How often an operation was called, failed calls included.
    #[must_use]
    pub fn calls(&self, operation: Operation) -> u64 {
        self.controls().log.iter().filter(|(o, _)| *o == operation).count() as u64
    }

    /// Every call so far, oldest first, with its subject (`endpoint 7`, a path, `node`).
    #[must_use]
    pub fn call_log(&self) -> Vec<(Operation, String)> {
        self.controls().log.clone()
    }

    /// Forgets the calls so far.
    pub fn clear_call_log(&self) {
        self.controls().log.clear();
    }

    /// True when nothing of ours is left, the node's own part aside.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.state().is_clean()
    }

    /// A panic of one test thread must not hide the state from the others: it is plain data, never half-written.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn controls(&self) -> MutexGuard<'_, Controls> {
        self.controls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
