//! Controls of the fake for tests.

use std::collections::{HashMap, VecDeque};

use tokio::sync::watch;
use wharf_core::kernel::KernelErrorKind;

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)+) => {
        /// The operations of the kernel trait.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Operation { $($(#[$doc])* $name,)+ }

        impl Operation {
            /// In the trait's order.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];

            /// The method's name.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)+ }
            }
        }
    };
}

operations! {
    EnsureNode = "ensure_node",
    EnsureNat = "ensure_nat",
    ObserveNat = "observe_nat",
    ObservePorts = "observe_ports",
    RemoveNatEntry = "remove_nat_entry",
    ObserveNetns = "observe_netns",
    EnsurePrograms = "ensure_programs",
    EnsureLink = "ensure_link",
    ObservePluginLink = "observe_plugin_link",
    ObservePluginLinks = "observe_plugin_links",
    RemoveFromPluginLink = "remove_from_plugin_link",
    EnsureConfig = "ensure_config",
    EnsureAttached = "ensure_attached",
    EnsureConnected = "ensure_connected",
    EnsureMtu = "ensure_mtu",
    EnsureReachable = "ensure_reachable",
    RemoveReachable = "remove_reachable",
    RemoveAttached = "remove_attached",
    RemovePrograms = "remove_programs",
    RemoveLink = "unlist_link",
    /// The release that `unlist_link` returns.
    ReleaseLink = "release_link",
    ObserveEndpoint = "observe_endpoint",
    ObserveMissing = "observe_missing",
    ObserveCounters = "observe_counters",
    ObserveVerdicts = "observe_verdicts",
    ObserveMaps = "observe_maps",
    DumpMap = "dump_map",
    CollectFlows = "collect_flows",
    ObserveOpenedToProxies = "observe_opened_to_proxies",
    LimitProxyClients = "limit_proxy_clients",
    ObserveFlows = "observe_flows",
    RemoveFlows = "remove_flows",
    RemoveEndpointRow = "remove_endpoint_row",
    RemoveCallSlot = "remove_call_slot",
    RemoveRoute = "remove_route",
    ChangePolicy = "change_policy",
    EnsureWayToProxy = "ensure_way_to_proxy",
    ObserveAddresses = "observe_addresses",
    ObservePolicy = "observe_policy",
    ObserveNode = "observe_node",
    ObserveNetworks = "observe_networks",
    ObservePeers = "observe_peers",
    ObserveNetworksOf = "observe_networks_of",
    ObserveUplinks = "observe_uplinks",
    ObserveSpeakers = "observe_speakers",
    RemoveConnections = "remove_connections",
    EndProxyConnections = "end_proxy_connections",
    Dump = "dump",
    CallSlots = "call_slots",
    RemoveNode = "remove_node",
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Failure {
    pub(super) kind: KernelErrorKind,
    pub(super) after_effect: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct HoldState {
    waiting: u64,
    released: bool,
}

/// Drops the read lock that tokio's `wait_for` returns: a state change would deadlock.
async fn wait_until(state: &watch::Sender<HoldState>, reached: impl Fn(&HoldState) -> bool) {
    // The sender lives in `state`: this cannot fail.
    drop(state.subscribe().wait_for(|s| reached(s)).await);
}

/// Blocks an operation's calls until dropped.
pub struct Hold {
    state: watch::Sender<HoldState>,
}

impl Hold {
    /// Waits until a call is blocked.
    pub async fn reached(&self) {
        wait_until(&self.state, |s| s.waiting > 0).await;
    }

    /// Releases the calls.
    pub fn release(self) {
        drop(self);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.state.send_modify(|s| s.released = true);
    }
}

pub(super) struct Waiter(watch::Sender<HoldState>);

impl Waiter {
    /// A dropped call no longer counts as waiting.
    pub(super) async fn wait(self) {
        struct Leave(watch::Sender<HoldState>);
        impl Drop for Leave {
            fn drop(&mut self) {
                self.0.send_modify(|s| s.waiting = s.waiting.saturating_sub(1));
            }
        }
        self.0.send_modify(|s| s.waiting += 1);
        let leave = Leave(self.0);
        wait_until(&leave.0, |s| s.released).await;
    }
}

#[derive(Default)]
pub(super) struct Controls {
    pub(super) log: Vec<(Operation, String)>,
    once: HashMap<Operation, VecDeque<Failure>>,
    always: HashMap<Operation, KernelErrorKind>,
    holds: HashMap<Operation, watch::Sender<HoldState>>,
    node_hold: Option<(usize, watch::Sender<HoldState>)>,
}

impl Controls {
    pub(super) fn fail(&mut self, operation: Operation, kind: KernelErrorKind, after_effect: bool) {
        self.once.entry(operation).or_default().push_back(Failure { kind, after_effect });
    }

    pub(super) fn fail_always(&mut self, operation: Operation, kind: Option<KernelErrorKind>) {
        match kind {
            Some(kind) => self.always.insert(operation, kind),
            None => self.always.remove(&operation),
        };
    }

    pub(super) fn hold(&mut self, operation: Operation) -> Hold {
        let (state, _) = watch::channel(HoldState::default());
        self.holds.insert(operation, state.clone());
        Hold { state }
    }

    pub(super) fn hold_node(&mut self, changes: usize) -> Hold {
        let (state, _) = watch::channel(HoldState::default());
        self.node_hold = Some((changes, state.clone()));
        Hold { state }
    }

    /// For one call. The changes before the wait.
    pub(super) fn node_hold(&mut self) -> Option<(usize, Waiter)> {
        let (changes, state) = self.node_hold.take().filter(|(_, state)| !state.borrow().released)?;
        Some((changes, Waiter(state)))
    }

    pub(super) fn is_held(&self, operation: Operation) -> bool {
        self.holds.get(&operation).is_some_and(|s| !s.borrow().released)
    }

    pub(super) fn enter(&mut self, operation: Operation, subject: &str) -> Option<Waiter> {
        self.log.push((operation, subject.to_owned()));
        self.holds.get(&operation).filter(|s| !s.borrow().released).cloned().map(Waiter)
    }

    pub(super) fn failure(&mut self, operation: Operation) -> Option<Failure> {
        self.once
            .get_mut(&operation)
            .and_then(VecDeque::pop_front)
            .or_else(|| self.always.get(&operation).map(|kind| Failure { kind: *kind, after_effect: false }))
    }
}
