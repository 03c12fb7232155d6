//! State of policy, and the rows of a change.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;
use tokio::time::Instant;
use wharf_cluster::feed::FeedPod;
use wharf_common::{SetsRow, policy::PEER_SERVICE};
use wharf_core::{
    endpoint::EndpointRecord,
    identity::Identity,
    ids::{EndpointId, Epoch},
    policy::{Enforcement, PolicyRows},
};
use wharf_dns::cache::Cache;
use wharf_policy::{
    compile::{Engine, Event, Limits, Sizes, Tables},
    model::{Directions, Origin, Policy as Document, PolicyName, Selector, Tier},
};

use super::{
    Change, Computed, Guard, directory,
    documents::{Documents, FeedRows, RefusedPolicy},
    error::PolicyError,
    limits::LIMITS,
    members::{Members, Surroundings, Unrecorded},
    names,
    redirects::{Outgoing, Owed, Ports},
    rounds::Rounds,
    rows,
};
use crate::proxy::Wanted;

pub(super) struct Inner {
    pub(super) enforcement: Enforcement,
    pub(super) wanted: Documents,
    pub(super) members: Members,
    /// Until the kernel's rows are read.
    pub(super) unrecorded: Vec<Unrecorded>,
    pub(super) node: BTreeSet<IpAddr>,
    /// Networks of containers of other nodes.
    pub(super) pods: BTreeSet<IpNet>,
    /// Addresses of other nodes.
    pub(super) other_nodes: BTreeSet<IpAddr>,
    pub(super) names: Cache,
    /// Their file is out of date.
    pub(super) names_stale: bool,
    /// There was a policy since the agent's start, or rows then.
    pub(super) active: bool,
    pub(super) kept: bool,
    /// Of the kernel's tables.
    pub(super) limits: Limits,
    /// The kernel's rows, if known.
    pub(super) engine: Option<Engine>,
    pub(super) kept_ports: Ports,
    pub(super) rounds: Rounds,
    pub(super) told: Wanted,
    /// Members in `told` that rows no longer lead to.
    pub(super) outgoing: Outgoing,
    pub(super) left_proxy: Option<Instant>,
    /// Used by other programs: no new listener gets one.
    pub(super) taken: Arc<BTreeSet<u16>>,
    pub(super) owed: Owed,
    pub(super) writes: u64,
    pub(super) realized: u64,
    pub(super) problem: Option<String>,
    pub(super) files: directory::Files,
    /// Why the directory's policies do not fit, with change count, wanted revision and `writes`.
    pub(super) too_large: Option<((u64, u64, u64), PolicyError)>,
    /// Rows of the cluster feed that do not fit, or that the proxy refuses.
    pub(super) unfit: FeedRows,
    /// Limits and numbers of rows at the last attempt with the unfit rows, and its time.
    pub(super) tried: Option<(Limits, Sizes, Instant)>,
    /// Rows of the cluster feed for the next attempts; the last one first.
    pub(super) waiting: Vec<FeedRows>,
    /// Kept rows of the cluster feed that this version cannot read: their policies count as lost.
    pub(super) unreadable: BTreeSet<String>,
    pub(super) refused_rows: BTreeMap<String, RefusedPolicy>,
}

impl Inner {
    pub(super) fn new(enforcement: Enforcement) -> Self {
        Self {
            enforcement,
            wanted: Documents::default(),
            members: Members::default(),
            unrecorded: Vec::new(),
            node: BTreeSet::new(),
            pods: BTreeSet::new(),
            other_nodes: BTreeSet::new(),
            names: Cache::default(),
            names_stale: false,
            active: false,
            kept: false,
            limits: LIMITS,
            engine: None,
            kept_ports: Ports::default(),
            rounds: Rounds::default(),
            told: Wanted::new(),
            outgoing: Outgoing::new(),
            left_proxy: None,
            taken: Arc::default(),
            owed: Owed::Nothing,
            writes: 0,
            realized: 0,
            problem: None,
            files: directory::Files::default(),
            too_large: None,
            unfit: FeedRows::new(),
            tried: None,
            waiting: Vec::new(),
            unreadable: BTreeSet::new(),
            refused_rows: BTreeMap::new(),
        }
    }

    pub(super) fn is_needed(&self) -> bool {
        self.enforcement == Enforcement::Always || !self.wanted.is_empty() || self.members.is_any_isolated()
    }

    /// `None` if unchanged.
    pub(super) fn put(&mut self, record: &EndpointRecord) -> Option<Event> {
        let Self { members, wanted, enforcement, .. } = self;
        let event = members.insert(record, Surroundings { wanted, mode: *enforcement });
        self.active |= self.is_needed();
        event
    }

    /// `None` if it is not there.
    pub(super) fn remove(&mut self, id: EndpointId, epoch: Epoch) -> Option<Event> {
        self.unrecorded.retain(|lost| lost.id != id);
        self.members.remove(id, epoch)
    }

    /// A container of another node; `None` removes it. `None` if unchanged.
    pub(super) fn put_elsewhere(&mut self, uid: &str, pod: Option<Arc<FeedPod>>) -> Option<Event> {
        match pod {
            Some(pod) => self.members.put_elsewhere(pod, &self.wanted),
            None => self.members.remove_elsewhere(uid),
        }
    }

    /// Isolates endpoints without a record that have rules in the kernel: with their labels, the agent has lost what
    /// may reach them.
    pub(super) fn isolate_unrecorded(&mut self, rows: &PolicyRows) {
        let Self { members, wanted, enforcement, unrecorded, .. } = self;
        let has_rules = |id| rows.sets.get(&id).is_some_and(|sets| *sets != SetsRow::default());
        for lost in std::mem::take(unrecorded).into_iter().filter(|lost| has_rules(lost.id)) {
            tracing::warn!(
                endpoint = lost.id.get(),
                "its record was lost, and policy applied to it: it is isolated until it is recreated"
            );
            members.insert_unrecorded(lost, Surroundings { wanted, mode: *enforcement });
        }
    }

    pub(super) fn renew(&mut self) -> Vec<Event> {
        let Self { members, wanted, enforcement, .. } = self;
        members.renew(Surroundings { wanted, mode: *enforcement })
    }

    pub(super) fn all(&self, services: &[IpNet]) -> Vec<Event> {
        let others = Event::OtherNodes(self.other_nodes.clone());
        let mut events = vec![Event::Node(self.node.clone()), others, Event::Pods(self.pods.clone())];
        if self.enforcement != Enforcement::Never {
            events.extend(self.wanted.events_since(&Documents::default(), services));
        }
        if self.enforcement == Enforcement::Always {
            events.push(Event::Policy(isolates_all()));
        }
        events.extend(self.members.all());
        events.extend(names::all(&self.names, services));
        events
    }

    pub(super) fn tables(&self) -> Option<&Tables> {
        self.engine.as_ref().map(Engine::tables)
    }

    /// When the next member leaves or round begins; `None` while the kernel's rows are unknown.
    pub(super) fn next_to_go(&self) -> Option<Instant> {
        self.outgoing.values().copied().chain(self.rounds.next()).min().filter(|_| self.engine.is_some())
    }
}

/// One new endpoint that differs from a known one only by address: cheap at any table size.
pub(super) fn is_quick(engine: &Engine, events: &[Event]) -> bool {
    match events {
        [Event::Endpoint(key, member)] => engine.knows(*key, member) && !engine.tables().sets.contains_key(key),
        _ => false,
    }
}

pub(super) fn advance(inner: Guard, mut engine: Engine, events: Vec<Event>, services: &[IpNet]) -> (Guard, Computed) {
    let before = engine.tables().clone();
    let result = engine.apply(events).map(|changes| {
        // They do not contain each other, so only the nearest can contain the network.
        let is_of_pods = |net: &IpNet| inner.pods.range(..=*net).next_back().is_some_and(|pods| pods.contains(net));
        let owner = |net: &IpNet, of| {
            let is_of =
                |nodes: &BTreeSet<IpAddr>| net.prefix_len() == net.max_prefix_len() && nodes.contains(&net.addr());
            match inner.members.identity(of) {
                Some(endpoint) => endpoint.0,
                None if is_of(&inner.node) => Identity::HOST.0,
                None if is_of(&inner.other_nodes) => Identity::REMOTE_NODE.0,
                None if services.iter().any(|service| service.contains(net)) => Identity::WORLD.0 | PEER_SERVICE,
                None if is_of_pods(net) => Identity::UNKNOWN_POD.0,
                None => Identity::WORLD.0,
            }
        };
        rows::changes(&changes, owner)
    });
    let computed = result.map(|rows| {
        let moved = before.moved(engine.tables());
        Some(Change { engine, rows, moved })
    });
    (inner, computed.map_err(PolicyError::Rows))
}

/// For `--policy-enforcement always`.
fn isolates_all() -> Document {
    let origin =
        Origin { file: "--policy-enforcement".into(), line: 0, document: "always".into(), field: String::new() };
    Document {
        name: PolicyName { kind: "--policy-enforcement".into(), namespace: String::new(), name: "always".into() },
        subject: Selector::default(),
        tier: Tier::Namespaced,
        priority: 0,
        isolates: Directions { ingress: true, egress: true },
        rules: Vec::new(),
        origin,
    }
}

#[cfg(test)]
mod tests {
    use super::{super::limits::PARTS, *};

    #[test]
    fn networks_in_rules_leave_room_for_every_node_and_pod_of_the_feed() {
        let feed = wharf_cluster::feed::Limits::default();
        assert!(LIMITS.ipcache - LIMITS.ipcache / PARTS >= feed.addresses + feed.node_addresses);
    }
}
