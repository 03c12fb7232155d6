//! The rows in a file of the state directory, for the next start.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use wharf_cluster::feed::{Change, Feed, Kind, Limits, State};

use super::{ClusterFeed, Known};
use crate::{cluster::blocking, kept, sync::lock};

/// Bytes of the file.
const MAX_FILE: u64 = 1 << 30;

/// State of the file.
#[derive(Default)]
pub(super) struct File {
    boot_id: String,
    /// The last rows that were written.
    written: Option<State>,
    /// Of the last write.
    revision: u64,
    /// Why the last write failed.
    pub(super) not_kept: Option<String>,
    /// Why the file of the last start is not used. Until a producer has sent every row again.
    pub(super) set_aside: Option<String>,
}

/// Content of the file.
#[derive(Serialize, Deserialize)]
struct Kept {
    /// Pods of another boot are gone.
    boot_id: String,
    producer: Option<String>,
    cluster: String,
    state: State,
}

/// Rows of the file, in force until a producer sends others.
struct Restored {
    feed: Feed,
    producer: Option<String>,
    cluster: String,
    /// Every row of the file follows the rules of this agent.
    is_whole: bool,
}

impl ClusterFeed {
    /// At a start: takes the rows of the file, which the next [`ClusterFeed::take`] puts in force. A damaged file is set
    /// aside.
    pub(in crate::cluster) async fn load(&self, boot_id: &str) {
        let (path, own, boot) = (self.kept.clone(), self.own.clone(), boot_id.to_owned());
        let found = blocking(move || read(&path, &own, &boot)).await;
        let mut inner = lock(&self.inner);
        boot_id.clone_into(&mut inner.file.boot_id);
        match found {
            Ok(None) => {}
            Ok(Some(Restored { feed, producer, cluster, is_whole })) => {
                inner.feed = feed;
                (inner.producer, inner.cluster) = (producer, Some(cluster));
                inner.known = if is_whole { Known::Kept } else { Known::Part };
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
            if inner.file.written.as_ref() == Some(&state) {
                inner.file.revision = inner.revision;
                return Ok(());
            }
            let (boot_id, producer) = (inner.file.boot_id.clone(), inner.producer.clone());
            (Kept { boot_id, producer, cluster, state }, inner.revision)
        };
        let (path, state) = (self.kept.clone(), kept.state.clone());
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
                let why = format!("keep the rows of the cluster feed in {file}: {why}; a start would use older rows");
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
    let kept = kept::read(path, MAX_FILE).and_then(|bytes| {
        let parsed = bytes.map(|bytes| serde_json::from_slice::<Kept>(&bytes)).transpose();
        parsed.map_err(io::Error::other)
    });
    let Kept { boot_id: written, producer, cluster, state } = match kept {
        Ok(Some(kept)) => kept,
        Ok(None) => return Ok(None),
        Err(why) => return Err(set_aside(path, &why)),
    };
    let feed = Feed::restore(own, Limits::default(), state.clone());
    let is_whole = feed.state() == state;
    let feed = if written == boot_id { feed } else { Feed::restore(own, Limits::default(), without_pods(feed)) };
    Ok(Some(Restored { feed, producer, cluster, is_whole }))
}

/// Renames a damaged file. Returns a message for the status.
fn set_aside(path: &Path, why: &io::Error) -> String {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".damaged");
    let aside = PathBuf::from(aside);
    let what = format!("read the rows of the cluster feed in {}: {why}", path.display());
    match fs::rename(path, &aside) {
        Ok(()) => format!("{what}; the file is now {}, and a producer must send the rows again", aside.display()),
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
