//! The cluster feed: a producer reports nodes, pods, namespaces and policies on the socket of `--cluster-feed`.
//!
//! | file | content |
//! |---|---|
//! | `server` | the socket and the gRPC service |
//! | `session` | a producer's stream: its messages and the answers |
//! | `taking` | changed rows to the consumer |
//! | `rows` | messages to rows: hostile input |
//! | `kept` | the file of the state directory |
//! | `view` | the feed for API and status |
//! | `replay` | a stream without a connection, for the fuzz target |
//!
//! [`wharf_cluster::feed`] decides which rows are in force. Streams put rows there, a part of a message at a time, and
//! read nothing meanwhile. A [`Consumer`] takes the rows that have changed since its last turn.

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
    feed::{ApplyError, Change, Complete, Effects, Feed, FeedPod, Kind, Limits, Refusal},
    nodes::NodeRow,
};
use wharf_feed::v1;
use wharf_kit::{clock, socket::Reach, sync::lock};

use self::rows::Read;

/// Name that the documentation gives to the directory of the socket, in the run directory.
pub const DIRECTORY: &str = "feed";
/// Name of the controller that puts rows in force.
pub const CONTROLLER: &str = "cluster-feed";
/// Name of the controller that writes the rows.
pub const KEEP_CONTROLLER: &str = "cluster-feed-state";
/// Of writes, so that a file is at most 5 s old.
pub const KEEP_INTERVAL: Duration = Duration::from_secs(4);
/// Name of the controller that tells the producer of the node.
pub const REPORT_CONTROLLER: &str = "cluster-feed-report";
/// Of reports.
pub const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// Least time between two snapshots of a kind.
const SNAPSHOTS: Duration = Duration::from_secs(10);
/// Other users of the feed wait for so long, and for the last change.
const PART: Duration = Duration::from_millis(5);
/// Least time between two openings: each one compares every row.
const OPENINGS: Duration = Duration::from_secs(1);
/// Rows of a list for the producer.
const MAX_LISTED: usize = 1_024;
/// Rows that the consumer has failed to take; streams wait beyond.
const MAX_LEFT: usize = 1 << 19;
/// Between two attempts of the consumer.
const LONGEST_RETRY: Duration = Duration::from_secs(10);

/// What a [`Consumer`] has taken.
#[derive(Debug)]
pub struct Taken {
    /// Why the nodes are not in force.
    pub nodes: Result<(), String>,
    /// Why the other rows are not in force.
    pub rows: Result<(), String>,
    /// All rows that it refuses, with earlier ones.
    pub refused: Vec<Refusal>,
}

/// A call of [`Consumer::take`].
pub type Taking<'a> = Pin<Box<dyn Future<Output = Taken> + Send + 'a>>;

/// Puts rows in force.
pub trait Consumer: Send + Sync {
    /// Returns when kernel, routes and proxy have the changes. After an error, the next call has the same changes
    /// again, with later ones. A row that fails alone is no error, but refused. `complete`: with these changes.
    fn take(&self, effects: Effects, complete: Complete) -> Taking<'_>;

    /// All rows that it refuses now.
    fn refused(&self) -> Pin<Box<dyn Future<Output = Vec<Refusal>> + Send + '_>>;
}

/// What the agent knows of the cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Known {
    /// Perhaps not every row.
    #[default]
    Part,
    /// The rows of the last start.
    Kept,
    /// A producer has sent every row.
    Sent,
}

/// A message of a stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Mark {
    stream: u64,
    sequence: u64,
}

/// The feed of `--cluster-feed`.
pub struct ClusterFeed {
    own: String,
    socket: PathBuf,
    group: Option<String>,
    kept: PathBuf,
    inner: Mutex<Inner>,
    /// Wakes the consumer's task.
    changed: Notify,
    /// Last message whose rows the consumer has taken.
    in_force: watch::Sender<Mark>,
    report: watch::Sender<v1::Report>,
    reach: Reach,
    /// One message is read at a time, also of ended streams: other users of blocking threads must not wait.
    reading: Arc<Semaphore>,
    /// False from [`ClusterFeed::load`] to the end of [`ClusterFeed::load_rest`].
    restored: watch::Sender<bool>,
    /// One write of the file at a time. Held while the file is written.
    writing: tokio::sync::Mutex<()>,
}

struct Inner {
    feed: Feed,
    holder: Option<Holder>,
    /// Number of the last stream.
    stream: u64,
    /// Of the last stream.
    producer: Option<String>,
    /// Of the last stream, and of the rows.
    cluster: Option<String>,
    /// Of the last stream.
    kinds: BTreeSet<Kind>,
    /// Watches of the connected producer.
    watches: Vec<FeedWatch>,
    /// Last begin of a snapshot.
    begun: BTreeMap<Kind, Instant>,
    processed: Mark,
    /// Last opening.
    opened: Option<Instant>,
    known: Known,
    /// A producer, or the one before the last start, has sent every namespace. A stream without this kind has sent them
    /// with its last row.
    has_namespaces: bool,
    /// A producer whose stream has policies, or the one before the last start, has sent every row.
    has_policies: bool,
    /// `known` and [`Inner::complete`], as the consumer knows them.
    taken: (Known, Complete),
    /// Rows that the consumer refuses.
    unfit: Vec<Refusal>,
    /// Changes that the consumer has failed to take.
    left: Effects,
    /// Why the consumer has failed.
    not_taken: Option<String>,
    /// Grows with each change of rows and refusals.
    revision: u64,
    file: kept::File,
}

/// The connected producer.
struct Holder {
    stream: u64,
    producer: String,
    since_unix_ms: u64,
    replaced: CancellationToken,
}

/// A checked opening.
#[derive(Clone)]
struct Opening {
    producer: String,
    cluster: String,
    kinds: BTreeSet<Kind>,
}

/// A stream that has the feed until it is dropped or replaced.
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

/// A message in progress.
struct Work {
    sequence: u64,
    changes: std::vec::IntoIter<Read>,
    /// A snapshot that began too early.
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

/// Why a stream is not open.
#[derive(Debug)]
enum NotOpen {
    /// The last opening was too recent.
    Later(Instant),
    /// Cause.
    Rejected(String),
}

/// Result of a part of a message.
enum Step {
    /// Changes remain.
    More,
    /// The next change is not allowed before this time.
    Wait(Instant),
    /// The message is processed.
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

    /// Nodes in force, and whether the producer has sent every row of every kind.
    pub(super) fn nodes(&self) -> (Vec<NodeRow>, bool) {
        let inner = lock(&self.inner);
        let rows = inner.feed.nodes().map(NodeRow::from);
        (rows.collect(), inner.kinds.contains(&Kind::Node) && inner.is_synced())
    }

    /// Pod CIDRs of this node's row; `None` until a producer has sent every row, and without a row: kept rows may be
    /// older than the pools in use.
    pub(super) fn own_pod_cidrs(&self) -> Option<Vec<IpNet>> {
        let inner = lock(&self.inner);
        let is_known = inner.known == Known::Sent && inner.kinds.contains(&Kind::Node);
        inner.feed.own_node().filter(|_| is_known).map(|node| node.pod_cidrs.clone())
    }

    /// This node's row, if it is not in force as it was sent.
    pub(super) fn own_refusal(&self) -> Option<Refusal> {
        lock(&self.inner).feed.refused_of(Kind::Node).find(|refusal| refusal.key.key == self.own)
    }

    /// The nodes of the start are in force.
    pub(super) fn nodes_are_taken(&self) {
        let mut inner = lock(&self.inner);
        let effects = inner.feed.take_effects();
        merge(&mut inner.left, Effects { nodes: false, ..effects });
    }

    /// Accepts an opening.
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

    /// Ends a stream; its rows stay.
    fn close(&self, stream: u64) {
        let mut inner = lock(&self.inner);
        if let Some(holder) = inner.holder.take_if(|holder| holder.stream == stream) {
            inner.feed.close();
            inner.watches.clear();
            let Holder { producer, .. } = holder;
            tracing::info!(producer, "the producer of the cluster feed is gone; its rows stay in force");
        }
    }

    /// Replaces the state of the watches, unless the stream is replaced.
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

    /// The consumer fails for too many rows.
    fn is_full(&self) -> bool {
        let inner = lock(&self.inner);
        let Effects { pods, namespaces, policies, .. } = &inner.left;
        pods.len() + namespaces.len() + policies.len() > MAX_LEFT
    }

    fn revision(&self) -> u64 {
        lock(&self.inner).revision
    }

    /// At most `most` rows that are not in force as they were sent, and the number of all.
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
            namespaces: self.has_namespaces,
            refused_namespaces: self.feed.refused_namespaces(),
        }
    }

    /// Every kind of the last stream is complete.
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
        }
        self.has_namespaces |= completes && (self.feed.is_complete(Kind::Namespace) || self.is_synced());
        Ok(())
    }

    /// Policies first, then nodes: lists are cut, and a tenant may have many pods.
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

/// `newer` takes precedence.
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
