//! Inputs of policy, and known states of kernel and proxy.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use wharf_common::{PeerRow, SetsRow, policy::PEER_SERVICE};
use wharf_core::{
    identity::Identity,
    ids::EndpointId,
    policy::{Enforcement, PolicyRows, RowChange},
};
use wharf_policy::compile::{self, Engine, Limits, Sizes, Tables};

use crate::{
    feed::FeedPolicies,
    inputs::{Input, Inputs},
    limits::{LIMITS, PARTS},
    members::{Surroundings, Unrecorded},
    redirects::{self, Outgoing, Owed, Ports, ProxyError, RedirectTable},
    rounds::Rounds,
    rows,
};

/// Connections end within this time of an acknowledgement; Envoy takes 2 s.
pub const PROXY_DRAINS: Duration = Duration::from_millis(2_500);

/// Settings of the agent.
#[derive(Debug, Clone)]
pub struct Settings {
    /// File of policies, for messages.
    pub file: PathBuf,
    /// Networks of services.
    pub services: Arc<[IpNet]>,
    /// First port of the proxy.
    pub first_port: u16,
    /// There is a cluster feed.
    pub has_feed: bool,
}

/// State of the kernel.
#[derive(Debug, Clone)]
pub struct KernelRows {
    /// All rows.
    pub rows: PolicyRows,
    /// Addresses of the node.
    pub addresses: BTreeSet<IpAddr>,
    /// Capacity of the table of peers.
    pub peers_max: u32,
}

#[derive(Debug, Clone)]
pub(crate) enum Base {
    /// The rows may contain part of a change.
    Unknown,
    /// Rows of another agent, or of lost policies. The engine has no inputs, and its tables lack peers' identities.
    Rows(Engine, Arc<BTreeMap<IpNet, PeerRow>>),
    Inputs(Engine),
}

impl Base {
    pub(crate) const fn engine(&self) -> Option<&Engine> {
        match self {
            Self::Unknown => None,
            Self::Rows(engine, _) | Self::Inputs(engine) => Some(engine),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Proxy {
    /// Redirects that the proxy has or gets next.
    pub(crate) sent: RedirectTable,
    /// Members in `sent` that rows no longer lead to.
    pub(crate) outgoing: Outgoing,
    pub(crate) rounds: Rounds,
    pub(crate) owed: Owed,
    pub(crate) kept: Ports,
    /// The kernel's part of redirects exists.
    pub(crate) has_way: bool,
    /// The kernel's part of redirects may exist in part.
    pub(crate) may_have_way: bool,
    /// Other programs' ports, which new listeners avoid.
    pub(crate) taken: Arc<BTreeSet<u16>>,
}

/// New redirects, and ports to save before.
#[derive(Debug, Default)]
pub struct ProxyUpdate {
    /// `None` if saved.
    pub ports: Option<Ports>,
    /// `None` if the proxy has them.
    pub redirects: Option<RedirectTable>,
    /// Whose acknowledgement is awaited.
    pub awaited: Awaited,
}

/// Redirects whose acknowledgement is awaited.
#[derive(Debug, Default)]
pub enum Awaited {
    /// No redirects.
    #[default]
    Nothing,
    /// Redirects of these ports.
    Ports(BTreeSet<u16>),
    /// All changed redirects.
    All,
}

/// Result of a [`ProxyUpdate`].
#[derive(Debug)]
pub struct ProxyAnswer {
    /// The ports are saved.
    pub is_kept: bool,
    /// The proxy's answer.
    pub answer: Result<(), ProxyError>,
    /// Redirects without an acknowledgement.
    pub outstanding: Vec<String>,
}

/// Policy of the node.
#[derive(Debug)]
pub struct State {
    pub(crate) settings: Settings,
    pub(crate) inputs: Inputs,
    pub(crate) base: Base,
    pub(crate) proxy: Proxy,
    /// Rows exist, or a policy existed since the start.
    pub(crate) is_active: bool,
    pub(crate) is_kept: bool,
    /// Flags of the documents in the file.
    pub(crate) kept_flags: [bool; 2],
    pub(crate) limits: Limits,
    pub(crate) unrecorded: Vec<Unrecorded>,
    pub(crate) writes: u64,
    pub(crate) realized: u64,
    pub(crate) problem: Option<String>,
    /// Refused policies of the cluster feed.
    pub feed: FeedPolicies,
}

impl State {
    /// A state without inputs.
    #[must_use]
    pub fn new(settings: Settings, enforcement: Enforcement) -> Self {
        Self {
            settings,
            inputs: Inputs::new(enforcement),
            base: Base::Unknown,
            proxy: Proxy::default(),
            is_active: false,
            is_kept: false,
            kept_flags: [false; 2],
            limits: LIMITS,
            unrecorded: Vec::new(),
            writes: 0,
            realized: 0,
            problem: None,
            feed: FeedPolicies::default(),
        }
    }

    /// The rows follow the inputs, unless [`State::problem`] has a cause.
    #[must_use]
    pub const fn inputs(&self) -> &Inputs {
        &self.inputs
    }

    /// The kernel's rows, if known.
    #[must_use]
    pub fn tables(&self) -> Option<&Tables> {
        self.base.engine().map(Engine::tables)
    }

    /// Sizes of the kernel's rows, if known.
    #[must_use]
    pub fn sizes(&self) -> Option<Sizes> {
        self.base.engine().map(Engine::sizes)
    }

    /// Limits of the kernel's tables.
    #[must_use]
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The kernel has rows.
    #[must_use]
    pub const fn is_active(&self) -> bool {
        self.is_active
    }

    /// The kernel's rows follow from the inputs.
    #[must_use]
    pub const fn is_settled(&self) -> bool {
        matches!(self.base, Base::Inputs(_)) || !self.is_active
    }

    /// Number of writes of rows.
    #[must_use]
    pub const fn writes(&self) -> u64 {
        self.writes
    }

    /// Revision of the documents in force.
    #[must_use]
    pub const fn realized(&self) -> u64 {
        self.realized
    }

    /// Why the inputs are not in force.
    #[must_use]
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// The file of policies exists and is usable.
    #[must_use]
    pub const fn is_kept(&self) -> bool {
        self.is_kept
    }

    /// Marks the documents as saved.
    pub fn set_kept(&mut self) {
        self.is_kept = true;
        self.kept_flags = self.inputs.documents.flags();
    }

    /// The cluster feed has policies, or its rows were lost, and the file of policies does not say so: the next start
    /// would not know that rows are missing.
    #[must_use]
    pub fn lacks_cluster(&self) -> bool {
        self.inputs.documents.flags().into_iter().zip(self.kept_flags).any(|(now, kept)| now && !kept)
    }

    /// Redirects of the proxy.
    #[must_use]
    pub const fn redirects(&self) -> &RedirectTable {
        &self.proxy.sent
    }

    /// Acknowledgements that the proxy owes.
    #[must_use]
    pub const fn owed(&self) -> Owed {
        self.proxy.owed
    }

    /// The kernel's part of redirects may exist in part.
    #[must_use]
    pub const fn may_have_way(&self) -> bool {
        self.proxy.may_have_way
    }

    /// The kernel's part of redirects is removed.
    pub const fn remove_way(&mut self) {
        (self.proxy.has_way, self.proxy.may_have_way) = (false, false);
    }

    /// At a start: loads the saved state. `is_kept`: the file of policies exists.
    pub fn load(&mut self, inputs: Inputs, ports: Ports, is_kept: bool) {
        self.inputs = inputs;
        self.kept_flags = self.inputs.documents.flags();
        self.proxy.rounds = Rounds::new(ports.rounds.clone());
        self.proxy.has_way = !ports.listeners.is_empty();
        self.proxy.may_have_way = self.proxy.has_way;
        self.proxy.kept = ports;
        self.is_kept = is_kept;
    }

    /// At a start, before the first rows: applies an input.
    pub fn take(&mut self, input: Input) {
        drop(self.inputs.apply(input, &self.settings.services));
    }

    /// At a start, after [`State::load`]: endpoints in the kernel without a record. Rows may exist until read.
    pub fn begin(&mut self, unrecorded: Vec<Unrecorded>) {
        self.unrecorded = unrecorded;
        self.is_active = true;
    }

    /// At a start, before the first transaction: rows of the cluster feed were lost.
    pub const fn lacks_rows(&mut self) {
        self.inputs.documents.lacks_rows = true;
    }

    /// Forgets an endpoint without a record.
    pub fn forget_unrecorded(&mut self, id: EndpointId) {
        self.unrecorded.retain(|lost| lost.id != id);
    }

    /// At a start, before the first transaction. `has_rows`: an earlier agent's rows must be changed.
    pub fn start(&mut self, has_rows: bool) {
        self.is_active = has_rows || self.inputs.need_rows();
        self.realized = if self.is_active { 0 } else { self.inputs.documents.revision };
    }

    /// When a member leaves its listener or a round begins; `None` while rows are unknown.
    #[must_use]
    pub fn next_to_go(&self) -> Option<Instant> {
        let Proxy { outgoing, rounds, .. } = &self.proxy;
        outgoing.values().copied().chain(rounds.next()).min().filter(|_| self.base.engine().is_some())
    }

    /// Takes the kernel's rows, also into `next`. Returns the base, and whether rules isolate endpoints.
    pub(crate) fn take_kernel_rows(&mut self, kernel: KernelRows, next: &mut Inputs) -> (Base, bool) {
        let KernelRows { rows, addresses, peers_max } = kernel;
        self.limits.ipcache = (peers_max as usize).saturating_sub(1);
        let has_rules = |sets: &SetsRow| *sets != SetsRow::default();
        let is_any = rows.sets.values().any(has_rules);
        self.unrecorded.retain(|lost| rows.sets.get(&lost.id).is_some_and(has_rules));
        for inputs in [&mut self.inputs, next] {
            inputs.node = Arc::new(addresses.clone());
            let Inputs { members, documents, enforcement, .. } = inputs;
            // The id may have been reassigned.
            let is_new = |lost: &&Unrecorded| members.get(lost.id).is_none();
            for lost in self.unrecorded.iter().filter(is_new).collect::<Vec<_>>() {
                members.insert_unrecorded(lost.clone(), Surroundings { documents, mode: *enforcement });
            }
            if documents.is_lost() && (*enforcement == Enforcement::Never || !(is_any || documents.awaits_cluster)) {
                (documents.lost, documents.awaits_cluster, documents.lacks_rows) = (false, false, false);
                self.is_kept = false;
            }
        }
        for lost in self.unrecorded.drain(..) {
            tracing::warn!(
                endpoint = lost.id.get(),
                "its record was lost, and policy applied to it: it is isolated until it is recreated"
            );
        }
        let tables = rows::tables(&rows, &self.proxy.kept.listeners);
        let there = redirects::wanted(&tables, &self.inputs.members);
        self.proxy.sent = redirects::both(&self.proxy.sent, &there);
        (Base::Rows(self.engine(tables), Arc::new(rows.peers)), is_any)
    }

    /// The kernel's rows no longer follow from the inputs.
    pub(crate) fn rebase(&mut self) {
        self.base = match std::mem::replace(&mut self.base, Base::Unknown) {
            Base::Inputs(engine) => Base::Rows(self.engine(engine.into_tables()), Arc::default()),
            other => other,
        };
    }

    pub(crate) fn engine(&self, tables: Tables) -> Engine {
        let Settings { services, first_port, has_feed, .. } = &self.settings;
        let networks = if *has_feed { self.limits.ipcache / PARTS } else { usize::MAX };
        let engine = Engine::after(self.limits, tables).with_networks_at_most(networks);
        engine.with_rows_of(services).with_listeners_from(*first_port)
    }

    pub(crate) fn update_proxy(&mut self, mut redirects: RedirectTable, awaited: Awaited) -> ProxyUpdate {
        self.proxy.rounds.tell(&mut redirects);
        let ports = self.ports_of(&redirects);
        let redirects = (redirects != self.proxy.sent).then_some(redirects);
        if let Some(redirects) = &redirects {
            self.proxy.sent.clone_from(redirects);
        }
        ProxyUpdate { ports, redirects, awaited }
    }

    /// `None` if the file has them.
    pub(crate) fn ports_of(&self, redirects: &RedirectTable) -> Option<Ports> {
        let listeners = redirects::listeners(redirects);
        let ports = Ports { listeners, rounds: self.proxy.rounds.numbers().clone() };
        (ports != self.proxy.kept).then_some(ports)
    }

    /// For rows that lead only to `after`. Returns whether connections end.
    pub(crate) fn update_after(&mut self, after: &RedirectTable, now: Instant) -> (ProxyUpdate, bool) {
        let Self { proxy: Proxy { sent, outgoing, rounds, .. }, inputs, .. } = self;
        let mut wanted = redirects::with_outgoing(after, sent, &inputs.members, outgoing, now);
        rounds.pass(&wanted, now);
        rounds.tell(&mut wanted);
        let ends = redirects::end(sent, &wanted, &inputs.members);
        let awaited = if ends { Awaited::All } else { Awaited::Nothing };
        (self.update_proxy(wanted, awaited), ends)
    }

    pub(crate) fn set_owed(&mut self, ends: bool, answer: Result<(), ProxyError>, now: Instant) {
        self.proxy.owed = match (answer, self.proxy.owed) {
            (Ok(()), Owed::Answer { .. }) if ends => Owed::Answer { ends },
            (Ok(()), _) if ends => Owed::Ends(now + PROXY_DRAINS),
            // An earlier answer may be outstanding.
            (Ok(()), owed) => owed,
            (Err(_), owed) => Owed::Answer { ends: ends || owed.ends() },
        };
    }

    /// Realizes the revision when the proxy owes nothing. `outstanding`: unacknowledged redirects.
    pub fn look_at_owed(&mut self, outstanding: &[String], now: Instant) {
        if let Owed::Answer { ends } = self.proxy.owed {
            if !outstanding.is_empty() {
                self.problem = Some(unacknowledged(outstanding));
                return;
            }
            self.proxy.owed = if ends { Owed::Ends(now + PROXY_DRAINS) } else { Owed::Nothing };
        }
        self.proxy.owed = match self.proxy.owed {
            Owed::Ends(until) if until <= now => Owed::Nothing,
            owed => owed,
        };
        let revision = self.inputs.documents.revision;
        if self.proxy.owed != Owed::Nothing || !self.proxy.outgoing.is_empty() || self.proxy.rounds.next().is_some() {
            // Changes without a revision also end connections.
            self.realized = self.realized.min(revision.saturating_sub(1));
            let seconds = PROXY_DRAINS.as_secs() + 1;
            self.problem = Some(format!("the proxy ends connections of before the change; that takes {seconds} s"));
            return;
        }
        // Otherwise, the kernel refused later rows.
        if matches!(self.base, Base::Inputs(_)) {
            (self.realized, self.problem) = (revision, None);
        }
    }

    pub(crate) fn rows_of(&self, inputs: &Inputs, changes: &[compile::Change]) -> Vec<RowChange> {
        let Inputs { members, node, other_nodes, pod_networks, .. } = inputs;
        // Networks do not contain each other, so only the nearest can contain `net`.
        let is_of_pods = |net: &IpNet| pod_networks.range(..=*net).next_back().is_some_and(|pods| pods.contains(net));
        let owner = |net: &IpNet, identity| {
            let is_of =
                |nodes: &BTreeSet<IpAddr>| net.prefix_len() == net.max_prefix_len() && nodes.contains(&net.addr());
            match members.identity(identity) {
                Some(endpoint) => endpoint.0,
                None if is_of(node) => Identity::HOST.0,
                None if is_of(other_nodes) => Identity::REMOTE_NODE.0,
                None if self.settings.services.iter().any(|service| service.contains(net)) => {
                    Identity::WORLD.0 | PEER_SERVICE
                }
                None if is_of_pods(net) => Identity::UNKNOWN_POD.0,
                None => Identity::WORLD.0,
            }
        };
        let rows = rows::changes(changes, owner);
        match &self.base {
            Base::Rows(_, peers) => rows::without_equal(rows, peers),
            Base::Unknown | Base::Inputs(_) => rows,
        }
    }
}

fn unacknowledged(outstanding: &[String]) -> String {
    let (first, more) =
        (outstanding.first().map_or("nothing answers", String::as_str), outstanding.len().saturating_sub(1));
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!(
        "the proxy does not do what policy asks: {first}{more}; its connections are dropped, or pass if failOpen says so, until it does"
    )
}
