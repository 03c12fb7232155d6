//! What is owed to the service: deletions that it did not take, and ADDs whose end is not known.
//!
//! Deletions are in the queue that the shim writes to as well. An ADD has a record of its own from before it is sent until
//! its end is known: whatever ends the agent in between, the next one sends the DEL that it is owed. A record is removed only when the
//! service has answered the DEL, and only by who has the attachment's turn.

use std::{
    collections::HashSet,
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, bail};
use futures::{StreamExt as _, stream};
use wharf_core::ids::Attachment;
use wharf_handover::queue::{Deletion, Entry, Queue, QueueError, VERSION};

use crate::{
    clock,
    delegate::{Delegation, request, service::CallError},
    node::queue::{Cause, Deletions, QueueFailure},
    sync::lock,
    telemetry::operation::{Kind, OpId},
};

/// Deadline of a DEL. The record of one that passes it stands for it.
pub const DEL_LIMIT: Duration = Duration::from_secs(10);
/// DELs of records at once.
const AT_ONCE: usize = 8;
/// Age at which a temporary file is removed: its writer was killed, because no writer needs this long.
const LEFTOVER: Duration = Duration::from_secs(60);

/// The records.
pub struct Records {
    /// Deletions: the shim's, and the agent's own.
    pub deletions: Deletions,
    unfinished: Queue,
    /// Unfinished ADDs that wait for their DEL, as the last drain left them.
    waiting: AtomicU64,
    /// Files of the records that the service did not take since all others were tried: they come last. As many as there are records at most.
    tried: Mutex<HashSet<(String, bool)>>,
    /// Why an ADD could not be recorded when that was last tried.
    unwritable: Mutex<Option<String>>,
    boot_id: String,
}

impl Records {
    /// The records of a run directory.
    #[must_use]
    pub fn new(run_dir: &Path, boot_id: String) -> Self {
        Self {
            deletions: Deletions::new(run_dir),
            unfinished: Queue::unfinished(run_dir),
            waiting: AtomicU64::new(0),
            tried: Mutex::default(),
            unwritable: Mutex::default(),
            boot_id,
        }
    }

    /// The boot that they are of.
    #[must_use]
    pub fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// Unfinished ADDs that wait for their DEL.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Whether the last drain left something.
    #[must_use]
    pub fn any_waits(&self) -> bool {
        self.waiting() > 0 || self.deletions.status().0.records > 0
    }

    /// Tries whether an ADD could be recorded; without that none is passed on.
    pub async fn probe(&self) {
        let queue = self.unfinished.clone();
        let tried = self.deletions.blocking(move |_| queue.probe()).await;
        *lock(&self.unwritable) = tried.err().map(|why| why.to_string());
    }

    /// Why an ADD could not be recorded.
    #[must_use]
    pub fn unwritable(&self) -> Option<String> {
        lock(&self.unwritable).clone()
    }

    fn record(&self, a: &Attachment) -> Deletion {
        Deletion {
            version: VERSION,
            network: a.network.to_string(),
            container_id: a.container_id.to_string(),
            ifname: a.ifname.to_string(),
            endpoint: None,
            boot_id: self.boot_id.clone(),
            written_unix_ms: clock::unix_ms(),
            canary: None,
        }
    }

    /// Records an ADD that is about to be sent.
    ///
    /// # Errors
    /// When the file system refuses, or there are as many as there may be.
    pub async fn begin(&self, a: &Attachment) -> Result<(), QueueFailure> {
        let record = self.record(a);
        self.put(&self.unfinished, record).await
    }

    /// The ADD has ended: nothing is owed.
    ///
    /// # Errors
    /// When the file system refuses; the DEL is owed then.
    pub async fn end(&self, a: &Attachment) -> Result<(), QueueFailure> {
        self.remove(&self.unfinished, file_name(a)).await
    }

    /// Records a DEL that the service did not take.
    ///
    /// # Errors
    /// When the file system refuses, or there are as many as there may be.
    pub async fn defer(&self, a: &Attachment) -> Result<(), QueueFailure> {
        let record = self.record(a);
        self.put(&self.deletions.queue, record).await
    }

    /// The service has answered a DEL of the attachment.
    ///
    /// # Errors
    /// When the file system refuses; the DEL is sent again then, which does no harm.
    pub async fn served(&self, a: &Attachment) -> Result<(), QueueFailure> {
        for queue in [&self.deletions.queue, &self.unfinished] {
            if is_in(queue, a) {
                self.remove(queue, file_name(a)).await?;
            }
        }
        Ok(())
    }

    /// Whether a DEL of the attachment is owed. Costs two `lstat`s in the run directory (tmpfs).
    #[must_use]
    pub fn is_owed(&self, a: &Attachment) -> bool {
        [&self.deletions.queue, &self.unfinished].into_iter().any(|queue| is_in(queue, a))
    }

    async fn put(&self, queue: &Queue, record: Deletion) -> Result<(), QueueFailure> {
        let queue = queue.clone();
        self.deletions.blocking(move |_| queue.put(&record).map(drop)).await
    }

    async fn remove(&self, queue: &Queue, name: String) -> Result<(), QueueFailure> {
        let queue = queue.clone();
        self.deletions.blocking(move |_| queue.remove(&name)).await
    }

    async fn list(&self, queue: &Queue) -> Result<Vec<Entry>, QueueFailure> {
        let queue = queue.clone();
        let list = move |_: &Queue| {
            queue.sweep(LEFTOVER)?;
            queue.list()
        };
        self.deletions.blocking(list).await
    }

    async fn set_aside(&self, queue: &Queue, name: String) -> Result<(), QueueFailure> {
        let queue = queue.clone();
        self.deletions.blocking(move |_| queue.set_aside(&name)).await
    }
}

/// Makes the directory of unfinished ADDs: it marks the run directory as one of this mode, until [`leave`].
///
/// # Errors
/// When the file system refuses.
pub fn enter(run_dir: &Path) -> Result<(), QueueError> {
    Queue::unfinished(run_dir).ensure_directory()
}

/// Gives the run directory to an agent of the other mode, which would take deletions that wait here for its own and drop them.
///
/// # Errors
/// When the service is owed something, or a directory cannot be read or removed.
pub fn leave(run_dir: &Path) -> anyhow::Result<()> {
    must_owe_nothing(run_dir).context("start")?;
    let unfinished = Queue::unfinished(run_dir);
    if !unfinished.path().exists() {
        return Ok(());
    }
    // What is in there was set aside.
    std::fs::remove_dir_all(unfinished.path()).with_context(|| format!("remove {}", unfinished.path().display()))
}

/// Refuses where deletions wait for the service.
///
/// # Errors
/// The service is owed something, or a directory cannot be read.
pub fn must_owe_nothing(run_dir: &Path) -> anyhow::Result<()> {
    let unfinished = Queue::unfinished(run_dir);
    if !unfinished.path().exists() {
        return Ok(());
    }
    let owed = unfinished.list()?.iter().chain(&Queue::new(run_dir).list()?).filter(|entry| !entry.is_canary()).count();
    if owed > 0 {
        bail!(
            "deletions ({owed}) wait in {} for the service of --delegate; start with it until `wharf status` counts none, or drop \
             them with `wharf-agent cleanup --force`",
            run_dir.display()
        );
    }
    Ok(())
}

fn file_name(a: &Attachment) -> String {
    Queue::file_name(a.network.as_str(), a.container_id.as_str(), a.ifname.as_str())
}

fn is_in(queue: &Queue, a: &Attachment) -> bool {
    queue.contains(a.network.as_str(), a.container_id.as_str(), a.ifname.as_str())
}

/// The attachment that a record names; its parser has checked the names.
fn attachment(deletion: &Deletion) -> Option<Attachment> {
    Some(Attachment {
        network: deletion.network.parse().ok()?,
        container_id: deletion.container_id.parse().ok()?,
        ifname: deletion.ifname.parse().ok()?,
    })
}

/// One record to be served.
struct Owed {
    name: String,
    written_unix_ms: u64,
    attachment: Attachment,
    unfinished: bool,
}

impl Owed {
    /// Its file's name, and in which directory it is.
    fn file(&self) -> (String, bool) {
        (self.name.clone(), self.unfinished)
    }
}

impl Delegation {
    /// Sends the DELs that are owed; returns how many records stay. Records of attachments that an operation is under way about are
    /// left to it.
    ///
    /// Records of an earlier boot are served too: the service may hold leases across it.
    ///
    /// # Errors
    /// When a directory cannot be read.
    pub async fn drain(&self, cause: Cause) -> Result<usize, QueueFailure> {
        use tracing::Instrument as _;
        self.drain_once(cause).instrument(OpId::next(Kind::Drain).span()).await
    }

    async fn drain_once(&self, cause: Cause) -> Result<usize, QueueFailure> {
        let records = &self.records;
        let _turn = records.deletions.turn().await;
        let (mut owed, mut unusable, mut problem) = (Vec::new(), 0, None);
        for (queue, unfinished) in [(&records.deletions.queue, false), (&records.unfinished, true)] {
            for Entry { name, written_unix_ms, content } in records.list(queue).await? {
                let deletion = match content {
                    Ok(deletion) => deletion,
                    Err(why) => {
                        tracing::warn!(file = name, "deletion record: {why}; it is put aside");
                        unusable += 1;
                        problem = records.set_aside(queue, name).await.err().or(problem);
                        continue;
                    }
                };
                if let Some(nonce) = &deletion.canary {
                    records.deletions.canary_came(nonce, cause);
                    records.remove(queue, name).await?;
                    records.deletions.count_served();
                } else if let Some(attachment) = attachment(&deletion) {
                    owed.push(Owed { name, written_unix_ms, attachment, unfinished });
                }
            }
        }
        wharf_crash::point("delegate/drain/after-list");
        {
            let mut tried = lock(&records.tried);
            let there: HashSet<_> = owed.iter().map(Owed::file).collect();
            tried.retain(|file| there.contains(file));
            if owed.iter().all(|owed: &Owed| tried.contains(&owed.file())) {
                tried.clear();
            }
            owed.sort_by_key(|owed| tried.contains(&owed.file()));
        }
        // After the first that does not reach the service the others are left to the next drain.
        let away = AtomicBool::new(false);
        let served = stream::iter(owed).map(|owed| self.serve(owed, &away)).buffer_unordered(AT_ONCE);
        let stay: Vec<Owed> = served.filter_map(std::future::ready).collect().await;
        let unfinished = stay.iter().filter(|owed| owed.unfinished).count();
        records.waiting.store(unfinished as u64, Ordering::Relaxed);
        let deletions: Vec<_> =
            stay.iter().filter(|owed| !owed.unfinished).map(|owed| (owed.name.clone(), owed.written_unix_ms)).collect();
        let unfinished_queue = records.unfinished.clone();
        let count = move |queue: &Queue| Ok(queue.aside()?.len() + unfinished_queue.aside()?.len());
        let aside = records.deletions.blocking(count).await? as u64;
        records.deletions.drained(&deletions, unusable, aside);
        problem.map_or(Ok(stay.len()), Err)
    }

    /// Serves one record; returns it if it stays.
    async fn serve(&self, owed: Owed, away: &AtomicBool) -> Option<Owed> {
        let a = &owed.attachment;
        // An ADD under way has a record, and its end removes it.
        let Some(_turn) = self.turns.try_take(a) else { return (!owed.unfinished).then_some(owed) };
        // Since the list was made, an operation may have ended that served it; the attachment may be a later ADD's now.
        if !self.records.is_owed(a) {
            return None;
        }
        if away.load(Ordering::Relaxed) {
            return Some(owed);
        }
        match self.settle(a).await {
            Ok(()) => {
                self.records.deletions.count_served();
                None
            }
            Err(error) => {
                if matches!(&error, Unsettled::Call(error) if error.is_away()) {
                    away.store(true, Ordering::Relaxed);
                }
                lock(&self.records.tried).insert(owed.file());
                tracing::warn!(attachment = %a, "deletion record: {error}; it is tried again");
                Some(owed)
            }
        }
    }

    /// Sends the DEL that an attachment is owed, if one is. The caller has its turn.
    ///
    /// # Errors
    /// When the service does not take it, or a record stays.
    pub(super) async fn settle(&self, a: &Attachment) -> Result<(), Unsettled> {
        if !self.records.is_owed(a) {
            return Ok(());
        }
        match self.ask(self.service.del(request::key(a), DEL_LIMIT)).await {
            Ok(()) => {}
            Err(error) if error.is_unknown() => {}
            Err(error) => return Err(error.into()),
        }
        wharf_crash::point("delegate/settle/after-del");
        Ok(self.records.served(a).await?)
    }
}

/// Why a DEL is still owed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unsettled {
    /// The service.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The records.
    #[error(transparent)]
    Records(#[from] QueueFailure),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_directory_is_left_when_nothing_is_owed() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let (run_dir, marked) = (dir.path(), || dir.path().join("unfinished-adds").exists());
        let owed = Deletion {
            version: VERSION,
            network: "harbour".into(),
            container_id: "web".into(),
            ifname: "eth0".into(),
            endpoint: None,
            boot_id: "8f3a4a4e-0000-4000-8000-000000000001".into(),
            written_unix_ms: 1,
            canary: None,
        };
        let queue = Queue::new(run_dir);
        // A deletion of the other mode's own is no reason.
        let name = queue.put(&owed)?;
        leave(run_dir)?;
        enter(run_dir)?;
        assert!(format!("{:#}", leave(run_dir).unwrap_err()).contains("deletions (1) wait"));
        queue.remove(&name)?;
        let name = Queue::unfinished(run_dir).put(&owed)?;
        assert!(leave(run_dir).is_err() && marked());
        Queue::unfinished(run_dir).set_aside(&name)?;
        leave(run_dir)?;
        assert!(!marked());
        Ok(())
    }
}
