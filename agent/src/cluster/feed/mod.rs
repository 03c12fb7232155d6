//! The cluster feed: a producer reports nodes, pods, namespaces and policies on the socket of `--cluster-feed`.
//!
//! [`wharf_cluster::feed`] decides which rows are in force. Streams add rows, one part of a message at a time, and read
//! nothing meanwhile. A [`Consumer`] takes the rows changed since its last turn.

pub mod kept;
pub mod replay;
pub mod rows;
pub mod server;
mod session;
mod taking;
#[cfg(test)]
mod tests;
mod view;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use ipnet::IpNet;
use tokio::{
    sync::{Notify, Semaphore, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use wharf_api::FeedWatch;
use wharf_cluster::{
    feed::{ApplyError, Change, Complete, Conflict, Effects, Feed, FeedPod, Kind, Limits, Refusal},
    nodes::NodeRow,
};
use wharf_feed::v1;
use wharf_kit::{clock, socket::Reach, sync::lock};

use self::rows::Read;

/// Documented name of the socket's directory, in the run directory.
pub const DIRECTORY: &str = "feed";
/// Controller that puts rows in force.
pub const CONTROLLER: &str = "cluster-feed";
/// Controller that writes the rows.
pub const KEEP_CONTROLLER: &str = "cluster-feed-state";
/// Interval of writes: a file is at most 5 s old.
pub const KEEP_INTERVAL: Duration = Duration::from_secs(4);
/// Controller that reports the node to the producer.
pub const REPORT_CONTROLLER: &str = "cluster-feed-report";
pub const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// Minimum time between snapshots of a kind.
const SNAPSHOTS: Duration = Duration::from_secs(10);
/// Other users of the feed wait for a part of a message, and for its last change.
const PART: Duration = Duration::from_millis(5);
/// Minimum time between openings, which compare every row.
const OPENINGS: Duration = Duration::from_secs(1);
const MAX_LISTED: usize = 1_024;
/// Rows that the consumer has failed to take; streams wait beyond.
const MAX_LEFT: usize = 1 << 19;
const LONGEST_RETRY: Duration = Duration::from_secs(10);

/// Result of [`Consumer::take`].
#[derive(Debug)]
pub struct Taken {
    /// Why nodes are not in force.
    pub nodes: Result<(), String>,
    /// Why other rows are not in force.
    pub rows: Result<(), String>,
    /// All rows that the consumer refuses.
    pub refused: Vec<Refusal>,
}

/// A call of [`Consumer::take`].
pub type Taking<'a> = Pin<Box<dyn Future<Output = Taken> + Send + 'a>>;

/// Puts rows in force.
pub trait Consumer: Send + Sync {
    /// Returns when kernel, routes and proxy have the changes. After an error, the next call repeats them, with later
    /// ones. A row that fails alone is refused, which is no error. `complete`: with these changes.
    fn take(&self, effects: Effects, complete: Complete) -> Taking<'_>;

    /// Rows refused now.
    fn refused(&self) -> Pin<Box<dyn Future<Output = Vec<Refusal>> + Send + '_>>;
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Known {
    /// Possibly not every row.
    #[default]
    Part,
    /// Rows of the last start.
    Kept,
    /// A producer has sent every row.
    Sent,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Mark {
    stream: u64,
    sequence: u64,
}

pub struct ClusterFeed {
    own: String,
    socket: PathBuf,
    group: Option<String>,
    kept: PathBuf,
    inner: Mutex<Inner>,
    changed: Notify,
    in_force: watch::Sender<Mark>,
    report: watch::Sender<v1::Report>,
    reach: Reach,
    /// One message at a time, to leave blocking threads to other users.
    reading: Arc<Semaphore>,
    /// False between [`ClusterFeed::load`] and the end of [`ClusterFeed::load_rest`].
    restored: watch::Sender<bool>,
    /// Held while the file is written.
    writing: tokio::sync::Mutex<()>,
}

struct Inner {
    feed: Feed,
    holder: Option<Holder>,
    stream: u64,
    producer: Option<String>,
    cluster: Option<String>,
    kinds: BTreeSet<Kind>,
    watches: Vec<FeedWatch>,
    begun: BTreeMap<Kind, Instant>,
    processed: Mark,
    opened: Option<Instant>,
    known: Known,
    /// A producer, or the one before the last start, has sent every namespace. A stream without this kind has sent them
    /// with its last row.
    has_namespaces: bool,
    /// A producer whose stream has policies has sent every row, possibly before the last start.
    has_policies: bool,
    /// A producer whose stream has every kind has sent every row since the boot, possibly before the last start.
    has_all: bool,
    /// `known` and [`Inner::complete`] that the consumer has.
    taken: (Known, Complete),
    unfit: Vec<Refusal>,
    left: Effects,
    not_taken: Option<String>,
    revision: u64,
    file: kept::File,
}

struct Holder {
    stream: u64,
    producer: String,
    since_unix_ms: u64,
    replaced: CancellationToken,
}

#[derive(Clone)]
struct Opening {
    producer: String,
    cluster: String,
    kinds: BTreeSet<Kind>,
}

/// An open stream, until dropped or replaced.
struct Open {
    feed: Arc<ClusterFeed>,
    stream: u64,
    replaced: CancellationToken,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.feed.close(self.stream);
    }
}

struct Work {
    sequence: u64,
    changes: std::vec::IntoIter<Read>,
    begin: Option<Kind>,
    refused: Vec<v1::RefusedRow>,
    unlisted: u64,
}

impl Work {
    fn new(sequence: u64, changes: Vec<Read>) -> Self {
        Self { sequence, changes: changes.into_iter(), begin: None, refused: Vec::new(), unlisted: 0 }
    }

    fn next_change(&mut self) -> Option<Read> {
        self.begin.take().map(|kind| Read::Change(Change::Begin(kind))).or_else(|| self.changes.next())
    }

    fn refuse(&mut self, refusal: Refusal) {
        if self.refused.len() < MAX_LISTED {
            self.refused.push(refused_row(refusal));
        } else {
            self.unlisted += 1;
        }
    }
}

#[derive(Debug)]
enum NotOpen {
    Later(Instant),
    Rejected(String),
}

enum Step {
    More,
    Wait(Instant),
    Done(v1::Processed),
}

impl ClusterFeed {
    pub(super) fn new(own: &str, directory: &Path, group: Option<String>, state_dir: &Path) -> Self {
        let inner = Inner {
            feed: Feed::new(own, Limits::default()),
            holder: None,
            stream: 0,
            producer: None,
            cluster: None,
            kinds: BTreeSet::new(),
            watches: Vec::new(),
            begun: BTreeMap::new(),
            processed: Mark::default(),
            opened: None,
            known: Known::Part,
            has_namespaces: false,
            has_policies: false,
            has_all: false,
            taken: (Known::Part, Complete::default()),
            unfit: Vec::new(),
            left: Effects::default(),
            not_taken: None,
            revision: 0,
            file: kept::File::default(),
        };
        Self {
            own: own.to_owned(),
            socket: directory.join(wharf_feed::SOCKET),
            group,
            kept: state_dir.join("feed.json"),
            inner: Mutex::new(inner),
            changed: Notify::new(),
            in_force: watch::Sender::new(Mark::default()),
            report: watch::Sender::new(v1::Report::default()),
            reach: Reach::default(),
            reading: Arc::new(Semaphore::new(1)),
            restored: watch::Sender::new(true),
            writing: tokio::sync::Mutex::default(),
        }
    }

    /// Sends a changed report to the producer.
    pub fn report(&self, report: v1::Report) {
        self.report.send_if_modified(|last| {
            let differs = *last != report;
            if differs {
                *last = report;
            }
            differs
        });
    }

    /// The pod in force with this address, and whether its namespace has a row.
    #[must_use]
    pub fn owner_of(&self, ip: IpAddr) -> Option<(FeedPod, bool)> {
        let inner = lock(&self.inner);
        let pod = inner.feed.owner_of(ip)?;
        Some((pod.clone(), inner.feed.has_namespace(&pod.namespace)))
    }

    /// Claims to this address that another row prevents.
    #[must_use]
    pub fn conflicts_at(&self, kind: Kind, ip: IpAddr) -> Vec<Conflict> {
        lock(&self.inner).feed.conflicts_at(kind, ip)
    }

    /// Nodes in force, and whether every row of every kind was sent.
    pub(super) fn nodes(&self) -> (Vec<NodeRow>, bool) {
        let inner = lock(&self.inner);
        let rows = inner.feed.nodes().map(NodeRow::from);
        (rows.collect(), inner.kinds.contains(&Kind::Node) && inner.is_synced())
    }

    /// `None` until a producer has sent every row, and without a row: kept rows may be older than the pools in use.
    pub(super) fn own_pod_cidrs(&self) -> Option<Vec<IpNet>> {
        let inner = lock(&self.inner);
        let is_known = inner.known == Known::Sent && inner.kinds.contains(&Kind::Node);
        inner.feed.own_node().filter(|_| is_known).map(|node| node.pod_cidrs.clone())
    }

    /// No kind of the last opening lacks rows: a producer has sent every row, in this stream or in an earlier one since
    /// the boot.
    #[must_use]
    pub fn has_every_row(&self) -> bool {
        let inner = lock(&self.inner);
        inner.has_all || inner.is_synced()
    }

    /// This node's row, if not fully in force.
    pub(super) fn own_refusal(&self) -> Option<Refusal> {
        lock(&self.inner).feed.refused_of(Kind::Node).find(|refusal| refusal.key.key == self.own)
    }

    pub(super) fn nodes_are_taken(&self) {
        let mut inner = lock(&self.inner);
        let effects = inner.feed.take_effects();
        merge(&mut inner.left, Effects { nodes: false, ..effects });
    }

    fn open(self: &Arc<Self>, opening: &Opening) -> Result<Open, NotOpen> {
        let Opening { producer, cluster, kinds } = opening.clone();
        let mut inner = lock(&self.inner);
        let is_other = |there: &&String| **there != cluster && inner.has_rows();
        let rejected = |why| Err(NotOpen::Rejected(why));
        if let Some(there) = inner.cluster.as_ref().filter(is_other) {
            return rejected(format!(
                "the agent has rows of cluster {there:?}, not of {cluster:?}; to change the cluster, stop the agent and remove {}",
                self.kept.display()
            ));
        }
        if let Some(holder) = &inner.holder
            && holder.producer != producer
        {
            return rejected(format!("producer {:?} has the feed; end it first", holder.producer));
        }
        let now = Instant::now();
        if let Some(until) = inner.opened.map(|last| last + OPENINGS).filter(|until| *until > now) {
            return Err(NotOpen::Later(until));
        }
        inner.opened = Some(now);
        if let Some(holder) = &inner.holder {
            holder.replaced.cancel();
        }
        tracing::info!(producer, cluster, "a producer has the cluster feed");
        let replaced = CancellationToken::new();
        inner.stream += 1;
        let stream = inner.stream;
        let since_unix_ms = clock::unix_ms();
        inner.holder = Some(Holder { stream, producer: producer.clone(), since_unix_ms, replaced: replaced.clone() });
        (inner.producer, inner.cluster) = (Some(producer), Some(cluster));
        inner.kinds.clone_from(&kinds);
        inner.watches.clear();
        inner.processed = Mark { stream, sequence: 0 };
        inner.revision += 1;
        inner.feed.open(kinds);
        Ok(Open { feed: Arc::clone(self), stream, replaced })
    }

    fn close(&self, stream: u64) {
        let mut inner = lock(&self.inner);
        if let Some(holder) = inner.holder.take_if(|holder| holder.stream == stream) {
            inner.feed.close();
            inner.watches.clear();
            let Holder { producer, .. } = holder;
            tracing::info!(producer, "the producer of the cluster feed is gone; its rows stay in force");
        }
    }

    fn set_watches(&self, stream: u64, watches: Vec<FeedWatch>) {
        let mut inner = lock(&self.inner);
        if inner.holder.as_ref().is_some_and(|holder| holder.stream == stream) {
            inner.watches = watches;
        }
    }

    /// Applies the next part of a message. May take long.
    fn apply(&self, stream: u64, work: &mut Work) -> Result<Step, Status> {
        let step = {
            let mut inner = lock(&self.inner);
            if inner.holder.as_ref().is_none_or(|holder| holder.stream != stream) {
                return Err(replaced());
            }
            inner.apply(stream, work)
        };
        self.changed.notify_one();
        step
    }

    fn is_full(&self) -> bool {
        let inner = lock(&self.inner);
        let Effects { pods, namespaces, policies, .. } = &inner.left;
        pods.len() + namespaces.len() + policies.len() > MAX_LEFT
    }

    fn revision(&self) -> u64 {
        lock(&self.inner).revision
    }

    /// At most `most` rows, and the number of all.
    fn refused(&self, most: usize) -> (Vec<Refusal>, usize) {
        let inner = lock(&self.inner);
        (inner.refused().take(most).collect(), inner.refused_total())
    }
}

impl Inner {
    fn has_rows(&self) -> bool {
        self.feed.counts().values().any(|count| count.in_force > 0)
    }

    fn complete(&self) -> Complete {
        Complete {
            all: self.has_policies,
            rows: self.known == Known::Sent,
            namespaces: self.has_namespaces,
            refused_namespaces: self.feed.refused_namespaces(),
        }
    }

    fn is_synced(&self) -> bool {
        !self.kinds.is_empty() && self.kinds.iter().all(|kind| self.feed.is_complete(*kind))
    }

    fn apply(&mut self, stream: u64, work: &mut Work) -> Result<Step, Status> {
        self.revision += 1;
        let until = Instant::now() + PART;
        loop {
            let Some(read) = work.next_change() else {
                let sequence = work.sequence;
                self.processed = Mark { stream, sequence };
                let (refused, unlisted) = (std::mem::take(&mut work.refused), work.unlisted);
                return Ok(Step::Done(v1::Processed { sequence, refused, unlisted }));
            };
            if let Read::Change(Change::Begin(kind)) = &read {
                let now = Instant::now();
                let due = self.begun.get(kind).map(|last| *last + SNAPSHOTS);
                if let Some(due) = due.filter(|due| *due > now) {
                    work.begin = Some(*kind);
                    return Ok(Step::Wait(due));
                }
                self.begun.insert(*kind, now);
            }
            self.change(read, work)?;
            if Instant::now() >= until {
                return Ok(Step::More);
            }
        }
    }

    fn change(&mut self, read: Read, work: &mut Work) -> Result<(), Status> {
        let completes = matches!(read, Read::Change(Change::Complete(_)));
        let applied = match read {
            Read::Change(change) => self.feed.apply(change),
            Read::Unreadable(row, why) => self.feed.refuse(row, why),
        };
        match applied {
            Ok(()) => {}
            Err(ApplyError::Refused(refusal)) => work.refuse(refusal),
            Err(ApplyError::Protocol(why)) => return Err(Status::invalid_argument(why)),
        }
        if completes && self.is_synced() {
            self.file.set_aside = None;
            self.known = Known::Sent;
            self.has_policies |= self.kinds.contains(&Kind::Policy);
            self.has_all |= Kind::ALL.iter().all(|kind| self.kinds.contains(kind));
        }
        self.has_namespaces |= completes && (self.feed.is_complete(Kind::Namespace) || self.is_synced());
        Ok(())
    }

    /// Policies first, then nodes: the list is cut, and a tenant may have many pods.
    fn refused(&self) -> impl Iterator<Item = Refusal> {
        let of_kind = move |kind: Kind| {
            let unfit = self.unfit.iter().filter(move |refusal| refusal.key.kind == kind);
            self.feed.refused_of(kind).chain(unfit.cloned())
        };
        [Kind::Policy, Kind::Node, Kind::Namespace, Kind::Pod].into_iter().flat_map(of_kind)
    }

    fn refused_total(&self) -> usize {
        let counts = self.feed.counts();
        counts.values().map(|count| count.refused + count.conflicts).sum::<usize>() + self.unfit.len()
    }
}

fn merge(older: &mut Effects, newer: Effects) {
    let Effects { nodes, mut pods, mut namespaces, mut policies } = newer;
    older.nodes |= nodes;
    older.pods.append(&mut pods);
    older.namespaces.append(&mut namespaces);
    older.policies.append(&mut policies);
}

fn replaced() -> Status {
    Status::aborted("another stream of this producer has the feed")
}

fn refused_row(refusal: Refusal) -> v1::RefusedRow {
    let Refusal { key, name, why, stale, conflict } = refusal;
    v1::RefusedRow { kind: key.kind.to_string(), key: key.key, name, reason: why, stale, conflict }
}
