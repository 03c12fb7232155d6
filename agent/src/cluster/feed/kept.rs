//! The rows in a file of the state directory, for the next start.
//!
//! The file has two JSON documents: `Head` with the nodes, and the other rows. A start reads the first before the agent
//! serves, and the second before policy's first rows. Nothing is written between.

use std::{
    fs::File as Opened,
    io::{self, BufRead, BufReader, Write},
    path::Path,
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use wharf_cluster::feed::{Effects, Feed, FeedNode, Limits, State};
use wharf_kit::{kept, sync::lock};

use super::{ClusterFeed, Known, merge};
use crate::cluster::blocking;

/// Bytes of the file.
const MAX_FILE: u64 = 1 << 30;

#[derive(Default)]
pub(super) struct File {
    boot_id: String,
    written: Option<(State, [bool; 4])>,
    revision: u64,
    unread: Option<Unread<BufReader<Opened>>>,
    pub(super) not_kept: Option<String>,
    /// Why the last start's file is not used or lacks rows, until a producer has sent every row again.
    pub(super) set_aside: Option<String>,
    /// The last file could not be read, at this start or at one that ended early.
    is_lost: bool,
}

/// The first document of the file.
#[derive(Serialize, Deserialize)]
struct Head {
    /// Pods of another boot are gone.
    boot_id: String,
    producer: Option<String>,
    cluster: String,
    /// Every namespace was sent. Earlier versions did not write the flags.
    #[serde(default = "is_of_earlier_version")]
    has_namespaces: bool,
    #[serde(default = "is_of_earlier_version")]
    has_policies: bool,
    #[serde(default = "is_of_earlier_version")]
    is_complete: bool,
    /// Every row of every kind was sent since the boot. Absent in older files, whose pods may be a part.
    #[serde(default)]
    has_all: bool,
    /// Earlier versions wrote `state`.
    nodes: Option<Vec<Arc<FeedNode>>>,
    #[serde(default, skip_serializing)]
    state: Option<State>,
}

const fn is_of_earlier_version() -> bool {
    true
}

impl Head {
    fn new(boot_id: String, producer: Option<String>, cluster: String, flags: [bool; 4], state: &State) -> Self {
        let ([has_namespaces, has_policies, is_complete, has_all], nodes) = (flags, Some(state.nodes().to_vec()));
        Self { boot_id, producer, cluster, has_namespaces, has_policies, is_complete, has_all, nodes, state: None }
    }

    const fn flags(&self) -> [bool; 4] {
        [self.has_namespaces, self.has_policies, self.is_complete, self.has_all]
    }
}

struct Unread<R> {
    head: Head,
    nodes: Vec<Arc<FeedNode>>,
    file: R,
}

/// Rows in force until a producer sends others.
struct Restored {
    feed: Feed,
    state: State,
    flags: [bool; 4],
    /// Every row follows this agent's rules.
    is_whole: bool,
    is_written: bool,
}

impl ClusterFeed {
    /// Reads the file's nodes at a start; the next [`ClusterFeed::take`] puts them in force. Sets a damaged file aside.
    pub(in crate::cluster) async fn load(&self, boot_id: &str) {
        let (path, own) = (self.kept.clone(), self.own.clone());
        self.restored.send_replace(false);
        let found = blocking(move || match Unread::open(&path) {
            Ok(Some(unread)) => Ok((false, Some((unread.nodes_alone(&own), unread)))),
            Ok(None) => Ok((kept::aside(&path).exists(), None)),
            Err(why) => Err(set_aside(&path, &why)),
        })
        .await;
        let mut inner = lock(&self.inner);
        boot_id.clone_into(&mut inner.file.boot_id);
        match found {
            Ok((is_lost, None)) => {
                inner.file.is_lost = is_lost;
                self.restored.send_replace(true);
            }
            Ok((_, Some((feed, unread)))) => {
                inner.feed = feed;
                (inner.producer, inner.cluster) = (unread.head.producer.clone(), Some(unread.head.cluster.clone()));
                inner.file.unread = Some(unread);
            }
            Err((why, _)) => {
                tracing::error!("{why}");
                (inner.file.set_aside, inner.file.is_lost) = (Some(why), true);
                self.restored.send_replace(true);
            }
        }
    }

    /// Reads the file's other rows, before policy's first rows and before a stream. If they are damaged, the file is
    /// set aside and the nodes stay.
    pub async fn load_rest(&self) {
        let (unread, boot_id) = {
            let mut inner = lock(&self.inner);
            (inner.file.unread.take(), inner.file.boot_id.clone())
        };
        let Some(unread) = unread else { return };
        let (path, own) = (self.kept.clone(), self.own.clone());
        let found = blocking(move || match unread.restore(&own, &boot_id) {
            Ok(mut restored) => Ok((restored.feed.take_effects(), restored)),
            Err(why) => Err(set_aside(&path, &why)),
        })
        .await;
        let mut inner = lock(&self.inner);
        match found {
            Ok((effects, Restored { feed, state, flags, is_written, .. })) => {
                let nodes = inner.feed.take_effects().nodes;
                inner.feed = feed;
                merge(&mut inner.left, Effects { nodes, ..effects });
                let [has_namespaces, has_policies, is_complete, has_all] = flags;
                (inner.has_namespaces, inner.has_policies, inner.has_all) = (has_namespaces, has_policies, has_all);
                inner.file.written = is_written.then_some((state, flags));
                inner.known = if is_complete { Known::Kept } else { Known::Part };
                inner.file.set_aside = (!is_complete).then(|| {
                    let file = self.kept.display();
                    format!("not every row of the cluster feed is in {file}; a producer must send the rows again")
                });
            }
            Err((why, is_aside)) => {
                tracing::error!("{why}");
                (inner.file.set_aside, inner.file.is_lost) = (Some(why), true);
                // The nodes are in no file. A damaged file that could not be renamed stays.
                inner.revision += u64::from(is_aside);
            }
        }
        self.restored.send_replace(true);
    }

    /// Rows of the last start could not be read.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        lock(&self.inner).file.is_lost
    }

    /// Returns after [`ClusterFeed::load_rest`]; at once without a file.
    pub async fn restored(&self) {
        drop(self.restored.subscribe().wait_for(|restored| *restored).await);
    }

    pub(super) fn restoring(&self) -> Option<String> {
        let is_restored = *self.restored.borrow();
        (!is_restored).then(|| format!("the rows of the cluster feed are being read from {}", self.kept.display()))
    }

    /// Writes changed rows; after a failure, the next call retries.
    pub async fn keep(&self) -> Result<(), String> {
        let _one = self.writing.lock().await;
        let (head, state, revision) = {
            let mut inner = lock(&self.inner);
            let Some(cluster) = inner.cluster.clone() else { return Ok(()) };
            // Until then, the file has more rows than `inner`.
            let is_restored = *self.restored.borrow();
            if !is_restored || inner.revision == inner.file.revision {
                return Ok(());
            }
            let state = inner.feed.state();
            // Refused rows are not kept: at a start, their namespaces are unknown.
            let has_namespaces = inner.has_namespaces && inner.feed.refused_namespaces().is_empty();
            let flags = [has_namespaces, inner.has_policies, inner.known != Known::Part, inner.has_all];
            let is_written = |(rows, written): &(State, [bool; 4])| (rows, *written) == (&state, flags);
            if inner.file.written.as_ref().is_some_and(is_written) {
                inner.file.revision = inner.revision;
                return Ok(());
            }
            let (boot_id, producer) = (inner.file.boot_id.clone(), inner.producer.clone());
            (Head::new(boot_id, producer, cluster, flags, &state), state, inner.revision)
        };
        let (path, flags) = (self.kept.clone(), head.flags());
        let written = blocking(move || {
            kept::write_by(&path, |file| write(file, &head, &state))?;
            Ok::<State, io::Error>(state)
        });
        let written = written.await;
        let mut inner = lock(&self.inner);
        match written {
            Ok(state) => {
                inner.file.written = Some((state, flags));
                inner.file.revision = revision;
                inner.file.not_kept = None;
                Ok(())
            }
            Err(why) => {
                let file = self.kept.display();
                let why = format!(
                    "keep the rows of the cluster feed in {file}: {why}; until it is written, changed policies and \
                     namespaces do not take effect, and a start uses older rows"
                );
                inner.file.not_kept = Some(why.clone());
                Err(why)
            }
        }
    }
}

impl Unread<BufReader<Opened>> {
    fn open(path: &Path) -> io::Result<Option<Self>> {
        kept::open(path, MAX_FILE)?.map(|file| Self::new(BufReader::new(file))).transpose()
    }
}

impl<R: BufRead> Unread<R> {
    fn new(mut file: R) -> io::Result<Self> {
        let mut reader = serde_json::Deserializer::from_reader(&mut file);
        let head = Head::deserialize(&mut reader)?;
        let nodes = match (&head.nodes, &head.state) {
            (Some(nodes), None) => nodes.clone(),
            (None, Some(state)) => {
                reader.end()?;
                state.nodes().to_vec()
            }
            _ => return Err(io::Error::other("its first document must have either nodes or a state")),
        };
        Ok(Self { head, nodes, file })
    }

    fn nodes_alone(&self, own: &str) -> Feed {
        Feed::restore(own, Limits::default(), State::default().with_nodes(self.nodes.clone()))
    }

    fn restore(self, own: &str, boot_id: &str) -> io::Result<Restored> {
        let Self { head, nodes, mut file } = self;
        let (flags, is_of_boot) = (head.flags(), head.boot_id == boot_id);
        let state = match head.state {
            Some(state) => state,
            None => {
                let mut bytes = Vec::new();
                file.read_to_end(&mut bytes)?;
                serde_json::from_slice::<State>(&bytes)
                    .map_err(|why| io::Error::other(format!("its second document: {why}")))?
                    .with_nodes(nodes)
            }
        };
        let mut feed = Feed::restore(own, Limits::default(), state.clone());
        let mut in_force = feed.state();
        let is_whole = in_force == state;
        if !is_of_boot {
            feed = Feed::restore(own, Limits::default(), in_force.without_pods());
            in_force = feed.state();
        }
        let is_written = is_whole && is_of_boot;
        let [has_namespaces, has_policies, is_complete, has_all] = flags.map(|flag| flag && is_whole);
        // The pods of another boot are forgotten.
        let flags = [has_namespaces, has_policies, is_complete, has_all && is_of_boot];
        Ok(Restored { feed, state: in_force, flags, is_whole, is_written })
    }
}

fn write(file: &mut impl Write, head: &Head, state: &State) -> io::Result<()> {
    serde_json::to_writer(&mut *file, head)?;
    file.write_all(b"\n")?;
    Ok(serde_json::to_writer(file, &state.rest())?)
}

/// For the fuzz target: reads a file's content; returns what the agent writes after such a start, and whether every row
/// follows the rules.
pub fn rewrite(bytes: &[u8], own: &str, boot_id: &str) -> io::Result<(Vec<u8>, bool)> {
    let unread = Unread::new(bytes)?;
    let (producer, cluster) = (unread.head.producer.clone(), unread.head.cluster.clone());
    let Restored { state, flags, is_whole, .. } = unread.restore(own, boot_id)?;
    let mut written = Vec::new();
    write(&mut written, &Head::new(boot_id.to_owned(), producer, cluster, flags, &state), &state)?;
    Ok((written, is_whole))
}

fn set_aside(path: &Path, why: &io::Error) -> (String, bool) {
    let what = format!("read the rows of the cluster feed in {}: {why}", path.display());
    match kept::set_aside(path) {
        Ok(aside) => {
            (format!("{what}; the file is now {}, and a producer must send the rows again", aside.display()), true)
        }
        Err(why) => (format!("{what}; set the file aside: {why}"), false),
    }
}
