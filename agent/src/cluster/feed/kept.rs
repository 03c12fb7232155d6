//! The rows in a file of the state directory, for the next start.

use std::{collections::BTreeSet, io, path::Path};

use serde::{Deserialize, Serialize};
use wharf_cluster::feed::{Change, Feed, Kind, Limits, State};
use wharf_kit::{kept, sync::lock};

use super::{ClusterFeed, Known};
use crate::cluster::blocking;

/// Bytes of the file.
const MAX_FILE: u64 = 1 << 30;

/// State of the file.
#[derive(Default)]
pub(super) struct File {
    boot_id: String,
    /// The last rows that were written, and the flags of [`Kept`] in their order.
    written: Option<(State, [bool; 3])>,
    /// Of the last write.
    revision: u64,
    /// Why the last write failed.
    pub(super) not_kept: Option<String>,
    /// Why the file of the last start is not used, or lacks rows. Until a producer has sent every row again.
    pub(super) set_aside: Option<String>,
}

/// Content of the file.
#[derive(Serialize, Deserialize)]
struct Kept {
    /// Pods of another boot are gone.
    boot_id: String,
    producer: Option<String>,
    cluster: String,
    /// The producer had sent every namespace. An agent of an earlier version did not write it.
    #[serde(default = "is_of_earlier_version")]
    has_namespaces: bool,
    /// The producer had sent every policy, as `has_namespaces`.
    #[serde(default = "is_of_earlier_version")]
    has_policies: bool,
    /// The producer had sent every row, as `has_namespaces`.
    #[serde(default = "is_of_earlier_version")]
    is_complete: bool,
    state: State,
}

const fn is_of_earlier_version() -> bool {
    true
}

/// Rows of the file, in force until a producer sends others.
struct Restored {
    feed: Feed,
    producer: Option<String>,
    cluster: String,
    has_namespaces: bool,
    has_policies: bool,
    is_complete: bool,
    /// Every row of the file follows the rules of this agent.
    is_whole: bool,
    /// The file has exactly these rows.
    is_written: bool,
}

impl ClusterFeed {
    /// At a start: takes the rows of the file, which the next [`ClusterFeed::take`] puts in force. A damaged file is
    /// set aside.
    pub(in crate::cluster) async fn load(&self, boot_id: &str) {
        let (path, own, boot) = (self.kept.clone(), self.own.clone(), boot_id.to_owned());
        let found = blocking(move || read(&path, &own, &boot)).await;
        let mut inner = lock(&self.inner);
        boot_id.clone_into(&mut inner.file.boot_id);
        match found {
            Ok(None) => {}
            Ok(Some(restored)) => {
                let Restored { feed, producer, cluster, has_namespaces, has_policies, is_complete, .. } = restored;
                inner.feed = feed;
                (inner.has_namespaces, inner.has_policies) = (has_namespaces, has_policies);
                inner.file.written =
                    restored.is_written.then(|| (inner.feed.state(), [has_namespaces, has_policies, is_complete]));
                (inner.producer, inner.cluster) = (producer, Some(cluster));
                inner.known = if is_complete { Known::Kept } else { Known::Part };
                inner.file.set_aside = (!is_complete).then(|| {
                    let file = self.kept.display();
                    format!("not every row of the cluster feed is in {file}; a producer must send the rows again")
                });
            }
            Err(why) => {
                tracing::error!("{why}");
                inner.file.set_aside = Some(why);
            }
        }
    }

    /// Writes rows that have changed.
    ///
    /// # Errors
    /// The file system's; the next call tries again.
    pub async fn keep(&self) -> Result<(), String> {
        let _one = self.writing.lock().await;
        let (kept, revision) = {
            let mut inner = lock(&self.inner);
            let Some(cluster) = inner.cluster.clone() else { return Ok(()) };
            if inner.revision == inner.file.revision {
                return Ok(());
            }
            let state = inner.feed.state();
            // Refused rows are not kept: at a start, their namespaces are as unknown as all without a row.
            let has_namespaces = inner.has_namespaces && inner.feed.refused_namespaces().is_empty();
            let flags = [has_namespaces, inner.has_policies, inner.known != Known::Part];
            let is_written = |(rows, written): &(State, [bool; 3])| (rows, *written) == (&state, flags);
            if inner.file.written.as_ref().is_some_and(is_written) {
                inner.file.revision = inner.revision;
                return Ok(());
            }
            let (boot_id, producer) = (inner.file.boot_id.clone(), inner.producer.clone());
            let [has_namespaces, has_policies, is_complete] = flags;
            (Kept { boot_id, producer, cluster, has_namespaces, has_policies, is_complete, state }, inner.revision)
        };
        let flags = [kept.has_namespaces, kept.has_policies, kept.is_complete];
        let (path, state) = (self.kept.clone(), (kept.state.clone(), flags));
        let written = blocking(move || write(&path, &kept)).await;
        let mut inner = lock(&self.inner);
        match written {
            Ok(()) => {
                inner.file.written = Some(state);
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

fn write(path: &Path, kept: &Kept) -> io::Result<()> {
    kept::write_by(path, |file| serde_json::to_writer(file, kept).map_err(io::Error::other))
}

fn read(path: &Path, own: &str, boot_id: &str) -> Result<Option<Restored>, String> {
    let kept = kept::read(path, MAX_FILE).and_then(|bytes| bytes.map(|bytes| parse(&bytes)).transpose());
    match kept {
        Ok(kept) => Ok(kept.map(|kept| restore(kept, own, boot_id))),
        Err(why) => Err(set_aside(path, &why)),
    }
}

fn parse(bytes: &[u8]) -> io::Result<Kept> {
    serde_json::from_slice(bytes).map_err(io::Error::other)
}

fn restore(kept: Kept, own: &str, boot_id: &str) -> Restored {
    let Kept { boot_id: written, producer, cluster, has_namespaces, has_policies, is_complete, state } = kept;
    let feed = Feed::restore(own, Limits::default(), state.clone());
    let is_whole = feed.state() == state;
    let is_of_boot = written == boot_id;
    let feed = if is_of_boot { feed } else { Feed::restore(own, Limits::default(), without_pods(feed)) };
    let [has_namespaces, has_policies, is_complete] =
        [has_namespaces, has_policies, is_complete].map(|flag| flag && is_whole);
    let is_written = is_whole && is_of_boot;
    Restored { feed, producer, cluster, has_namespaces, has_policies, is_complete, is_whole, is_written }
}

/// For the fuzz target: reads the content of a file, and returns the content that the agent writes after such a start,
/// and whether every row of the file follows the rules.
///
/// # Errors
/// The content is damaged.
pub fn rewrite(bytes: &[u8], own: &str, boot_id: &str) -> io::Result<(Vec<u8>, bool)> {
    let restored = restore(parse(bytes)?, own, boot_id);
    let Restored { feed, producer, cluster, has_namespaces, has_policies, is_complete, is_whole, .. } = restored;
    let (boot_id, state) = (boot_id.to_owned(), feed.state());
    let kept = Kept { boot_id, producer, cluster, has_namespaces, has_policies, is_complete, state };
    Ok((serde_json::to_vec(&kept).map_err(io::Error::other)?, is_whole))
}

/// Renames a damaged file. Returns a message for the status.
fn set_aside(path: &Path, why: &io::Error) -> String {
    let what = format!("read the rows of the cluster feed in {}: {why}", path.display());
    match kept::set_aside(path) {
        Ok(aside) => format!("{what}; the file is now {}, and a producer must send the rows again", aside.display()),
        Err(why) => format!("{what}; set the file aside: {why}"),
    }
}

/// As after an empty snapshot of pods.
fn without_pods(mut feed: Feed) -> State {
    feed.open(BTreeSet::from([Kind::Pod]));
    for change in [Change::Begin(Kind::Pod), Change::Complete(Kind::Pod)] {
        if let Err(why) = feed.apply(change) {
            tracing::error!("remove the pods of an earlier boot: {why}");
        }
    }
    feed.state()
}
