//! The rows of the cluster feed, and which of them are in force. Pure.
//!
//! For each kind of row, a producer sends a snapshot (begin, rows, complete) and then changes.
//!
//! - A row replaces its predecessor at once, and is *confirmed*. A refused row leaves its predecessor in force, as
//!   *stale*.
//! - A snapshot's end removes rows that it does not confirm, but not before all kinds of the stream had a complete
//!   snapshot.
//! - Rows that share an address or pod CIDR all lose it, but a confirmed row precedes a stale row, which precedes an
//!   unconfirmed row. The rest of the rows is in force, except a node without an address.
//!
//! The rows in force depend on accepted rows and these three states, not on the order of messages. Exception: of a kind
//! beyond its limit, the first rows are accepted.

mod claims;
mod limits;
mod own;
mod rows;
mod shared;
mod state;
mod table;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;

pub use self::{
    claims::Conflict,
    limits::Limits,
    own::{OwnPods, PodRef},
    rows::{FeedNamespace, FeedNode, FeedPod, FeedPolicy},
    state::{Rest, State},
};
use self::{
    rows::FeedRow as _,
    shared::Shared,
    table::{Rows, Table},
};

/// Kind of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Node,
    Pod,
    Namespace,
    /// Policies.
    Policy,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Node, Self::Pod, Self::Namespace, Self::Policy];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Node => "node",
            Self::Pod => "pod",
            Self::Namespace => "namespace",
            Self::Policy => "policy",
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Row {
    Node(FeedNode),
    Pod(FeedPod),
    Namespace(FeedNamespace),
    Policy(FeedPolicy),
}

impl Row {
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Node(_) => Kind::Node,
            Self::Pod(_) => Kind::Pod,
            Self::Namespace(_) => Kind::Namespace,
            Self::Policy(_) => Kind::Policy,
        }
    }
}

/// Identity of a row.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub kind: Kind,
    /// Unique in the kind.
    pub key: String,
}

/// A message of the producer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A snapshot begins; it replaces an incomplete one.
    Begin(Kind),
    /// A new or changed row.
    Put(Row),
    /// A removed row.
    Delete(Key),
    /// The snapshot is complete.
    Complete(Kind),
}

impl Change {
    /// Kind of the affected rows.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Begin(kind) | Self::Complete(kind) => *kind,
            Self::Put(row) => row.kind(),
            Self::Delete(key) => key.kind,
        }
    }
}

/// A row that is not wholly in force.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} {name}: {why}", key.kind)]
pub struct Refusal {
    /// The row; a long key is cut.
    pub key: Key,
    /// For operators: a pod's namespace and name, otherwise the key.
    pub name: String,
    pub why: String,
    /// An earlier row is in force.
    pub stale: bool,
    /// Another row claims an address or CIDR; the rest of the row may be in force.
    pub conflict: bool,
}

/// Why a change has no effect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// The row breaks a rule. The stream continues.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The change is invalid at this point. The caller closes the stream.
    #[error("{0}")]
    Protocol(String),
}

/// Changed rows by key; `None`: removed.
pub type Changed<R> = BTreeMap<Arc<str>, Option<Arc<R>>>;

/// Changes of the rows in force. Copies share the rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Effects {
    /// Any node changed.
    pub nodes: bool,
    /// Without addresses in conflict.
    pub pods: Changed<FeedPod>,
    pub namespaces: Changed<FeedNamespace>,
    pub policies: Changed<FeedPolicy>,
}

impl Effects {
    /// No row changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.nodes && self.pods.is_empty() && self.namespaces.is_empty() && self.policies.is_empty()
    }
}

/// Kinds whose rows are all known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Complete {
    /// Every kind, including policies.
    pub all: bool,
    /// Every kind of an opening since the agent's start, which may lack policies.
    pub rows: bool,
    pub namespaces: bool,
    /// As [`Feed::refused_namespaces`].
    pub refused_namespaces: BTreeSet<String>,
}

/// Numbers of a kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Rows in force.
    pub in_force: usize,
    /// Refused rows.
    pub refused: usize,
    /// Refused rows with a predecessor in force.
    pub stale: usize,
    /// Rows without an address or CIDR that another row claims.
    pub conflicts: usize,
    /// As [`Feed::is_complete`].
    pub complete: bool,
}

/// Numbers of every kind.
pub type Counts = BTreeMap<Kind, Count>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Waiting,
    Snapshot,
    Complete,
}

/// The state of the cluster feed.
#[derive(Debug, Clone)]
pub struct Feed {
    own: String,
    limits: Limits,
    nodes: Table<FeedNode>,
    pods: Table<FeedPod>,
    namespaces: Table<FeedNamespace>,
    policies: Table<FeedPolicy>,
    shared: Shared,
    /// By kind of the last stream.
    phases: BTreeMap<Kind, Phase>,
    is_open: bool,
    /// All kinds of the last stream were once complete.
    is_synced: bool,
    /// Of the nodes in force at the last [`Feed::take_effects`]. No pod has such an address: pods of the host's network
    /// share it.
    node_addresses: BTreeSet<IpAddr>,
    /// Pods with a node's address, by uid.
    masked: BTreeMap<Arc<str>, IpAddr>,
}

impl Feed {
    /// `own`: this node's name.
    #[must_use]
    pub fn new(own: &str, limits: Limits) -> Self {
        Self {
            own: own.to_owned(),
            limits,
            nodes: Table::new(&limits),
            pods: Table::new(&limits),
            namespaces: Table::new(&limits),
            policies: Table::new(&limits),
            shared: Shared::default(),
            phases: BTreeMap::new(),
            is_open: false,
            is_synced: false,
            node_addresses: BTreeSet::new(),
            masked: BTreeMap::new(),
        }
    }

    /// Restores a state's valid rows, unconfirmed. The next effects contain all.
    #[must_use]
    pub fn restore(own: &str, limits: Limits, state: State) -> Self {
        let mut feed = Self::new(own, limits);
        feed.nodes.restore(state.nodes, &limits);
        // The pods share equal values already.
        state.pods.iter().for_each(|pod| drop(feed.shared.pod(FeedPod::clone(pod))));
        feed.pods.restore(state.pods, &limits);
        feed.namespaces.restore(state.namespaces, &limits);
        feed.policies.restore(state.policies, &limits);
        feed
    }

    /// Opens a stream, also in place of an open one. Rows stay in force; all are unconfirmed. Rows of other kinds than
    /// `kinds` do not change during the stream.
    pub fn open(&mut self, kinds: BTreeSet<Kind>) {
        self.phases = kinds.into_iter().map(|kind| (kind, Phase::Waiting)).collect();
        self.is_open = true;
        self.is_synced = false;
        for kind in Kind::ALL {
            self.table_mut(kind).unconfirm();
        }
    }

    /// Ends the stream. Changes no row.
    pub fn close(&mut self) {
        self.is_open = false;
    }

    /// Applies a change of the open stream. A conflict is no error: see [`Feed::refused`].
    ///
    /// # Errors
    /// [`ApplyError`]; a protocol error changes nothing.
    pub fn apply(&mut self, change: Change) -> Result<(), ApplyError> {
        self.apply_unless(change, None)
    }

    /// Refuses a row that the caller cannot read. Only the row's key and name matter.
    ///
    /// # Errors
    /// Always.
    pub fn refuse(&mut self, row: Row, why: String) -> Result<(), ApplyError> {
        self.apply_unless(Change::Put(row), Some(why))
    }

    fn apply_unless(&mut self, change: Change, unreadable: Option<String>) -> Result<(), ApplyError> {
        let kind = change.kind();
        let protocol = |why: String| Err(ApplyError::Protocol(why));
        if !self.is_open {
            return protocol("no stream is open".to_owned());
        }
        let Some(phase) = self.phases.get(&kind).copied() else {
            return protocol(format!("the stream was not opened for kind {kind}"));
        };
        match change {
            Change::Begin(_) => {
                if phase != Phase::Waiting {
                    self.table_mut(kind).unconfirm();
                }
                self.phases.insert(kind, Phase::Snapshot);
            }
            Change::Complete(_) if phase == Phase::Snapshot => self.complete(kind),
            Change::Complete(_) => return protocol(format!("no snapshot of kind {kind} has begun")),
            Change::Put(_) | Change::Delete(_) if phase == Phase::Waiting => {
                return protocol(format!("a change before the snapshot of kind {kind}"));
            }
            Change::Put(row) => self.put(row, unreadable)?,
            Change::Delete(key) => {
                self.table_mut(kind).delete(&key.key, phase == Phase::Complete);
            }
        }
        Ok(())
    }

    /// Changes of the rows in force since the last call.
    #[must_use]
    pub fn take_effects(&mut self) -> Effects {
        let nodes = !self.nodes.take().is_empty();
        let mut pods = self.pods.take();
        if nodes {
            let now = self.nodes.in_force().flat_map(|node| node.addresses.iter().copied()).collect();
            let before = std::mem::replace(&mut self.node_addresses, now);
            for ip in before.symmetric_difference(&self.node_addresses) {
                if let Some(pod) = self.claimant(*ip) {
                    pods.entry(Arc::clone(&pod.uid)).or_insert_with(|| Some(Arc::clone(pod)));
                }
            }
        }
        for (uid, pod) in &mut pods {
            self.masked.remove(uid);
            let is_masked = |ip: &IpAddr| self.node_addresses.contains(ip);
            if let Some(pod) = pod
                && let Some(ip) = pod.addresses.iter().copied().find(is_masked)
            {
                let addresses = pod.addresses.iter().copied().filter(|ip| !is_masked(ip)).collect();
                *pod = Arc::new(FeedPod { addresses, ..FeedPod::clone(pod) });
                self.masked.insert(Arc::clone(uid), ip);
            }
        }
        Effects { nodes, pods, namespaces: self.namespaces.take(), policies: self.policies.take() }
    }

    /// Refused rows, and confirmed rows in conflict. After a stream or snapshot starts, a conflict is listed once its
    /// rows are put again.
    pub fn refused(&self) -> impl Iterator<Item = Refusal> {
        Kind::ALL.into_iter().flat_map(move |kind| self.refused_of(kind))
    }

    /// [`Feed::refused`], of a kind.
    pub fn refused_of(&self, kind: Kind) -> impl Iterator<Item = Refusal> {
        let masked = self.masked.iter().filter(move |_| kind == Kind::Pod).filter_map(|(uid, ip)| {
            let name = self.pods.get(uid)?.shown();
            let (key, why) = (Key { kind: Kind::Pod, key: uid.to_string() }, format!("{ip} is an address of a node"));
            Some(Refusal { key, name, why, stale: false, conflict: true })
        });
        self.table(kind).refused().chain(masked)
    }

    /// Namespaces with unknown labels: the row is refused, and no earlier one is in force.
    #[must_use]
    pub fn refused_namespaces(&self) -> BTreeSet<String> {
        self.namespaces.refused_alone().map(|name| name.to_string()).collect()
    }

    /// Numbers of every kind.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let count = |kind| Count { complete: self.is_complete(kind), ..self.table(kind).count() };
        let mut counts: Counts = Kind::ALL.into_iter().map(|kind| (kind, count(kind))).collect();
        counts.entry(Kind::Pod).or_default().conflicts += self.masked.len();
        counts
    }

    /// The kind's last snapshot in the last stream is complete.
    #[must_use]
    pub fn is_complete(&self, kind: Kind) -> bool {
        self.phases.get(&kind) == Some(&Phase::Complete)
    }

    /// Nodes in force, including this one. Except for their number, they follow [`Nodes`](crate::nodes::Nodes).
    pub fn nodes(&self) -> impl Iterator<Item = &FeedNode> {
        self.nodes.in_force().map(|node| &**node)
    }

    /// This node, if in force.
    #[must_use]
    pub fn own_node(&self) -> Option<&FeedNode> {
        self.nodes.get(&self.own).map(|node| &**node)
    }

    /// A pod in force.
    #[must_use]
    pub fn pod(&self, uid: &str) -> Option<&FeedPod> {
        self.pods.get(uid).map(|pod| &**pod)
    }

    /// The pod in force with this address.
    #[must_use]
    pub fn owner_of(&self, ip: IpAddr) -> Option<&FeedPod> {
        self.claimant(ip).filter(|_| !self.node_addresses.contains(&ip)).map(|pod| &**pod)
    }

    /// Claims of nodes or pods to this address that another row prevents.
    #[must_use]
    pub fn conflicts_at(&self, kind: Kind, ip: IpAddr) -> Vec<Conflict> {
        match kind {
            Kind::Node => self.nodes.conflicts_at(ip).collect(),
            Kind::Pod => self.pods.conflicts_at(ip).collect(),
            Kind::Namespace | Kind::Policy => Vec::new(),
        }
    }

    fn claimant(&self, ip: IpAddr) -> Option<&Arc<FeedPod>> {
        self.pods.claimant(IpNet::from(ip)).filter(|pod| pod.addresses.contains(&ip))
    }

    /// The namespace's row is in force.
    #[must_use]
    pub fn has_namespace(&self, name: &str) -> bool {
        self.namespaces.get(name).is_some()
    }

    /// Pods in force, including this node's.
    pub fn pods_in_force(&self) -> impl Iterator<Item = &FeedPod> {
        self.pods.in_force().map(|pod| &**pod)
    }

    /// The rows in force.
    #[must_use]
    pub fn state(&self) -> State {
        State {
            nodes: self.nodes.in_force().cloned().collect(),
            pods: self.pods.in_force().cloned().collect(),
            namespaces: self.namespaces.in_force().cloned().collect(),
            policies: self.policies.in_force().cloned().collect(),
        }
    }

    fn put(&mut self, row: Row, unreadable: Option<String>) -> Result<(), Refusal> {
        match row {
            Row::Node(node) => self.nodes.put(node, unreadable, &self.limits),
            Row::Pod(pod) => self.pods.put(self.shared.pod(pod), unreadable, &self.limits),
            Row::Namespace(namespace) => self.namespaces.put(namespace, unreadable, &self.limits),
            Row::Policy(policy) => self.policies.put(policy, unreadable, &self.limits),
        }
    }

    fn complete(&mut self, kind: Kind) {
        self.phases.insert(kind, Phase::Complete);
        let mut ended = vec![kind];
        if !self.is_synced {
            self.is_synced = self.phases.values().all(|phase| *phase == Phase::Complete);
            ended = if self.is_synced { self.phases.keys().copied().collect() } else { Vec::new() };
        }
        for kind in ended {
            self.table_mut(kind).sweep();
        }
    }

    fn table(&self, kind: Kind) -> &dyn Rows {
        match kind {
            Kind::Node => &self.nodes,
            Kind::Pod => &self.pods,
            Kind::Namespace => &self.namespaces,
            Kind::Policy => &self.policies,
        }
    }

    fn table_mut(&mut self, kind: Kind) -> &mut dyn Rows {
        match kind {
            Kind::Node => &mut self.nodes,
            Kind::Pod => &mut self.pods,
            Kind::Namespace => &mut self.namespaces,
            Kind::Policy => &mut self.policies,
        }
    }
}
