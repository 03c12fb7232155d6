//! Calls owed to the service.
//!
//! The shim's queue has deletions. An ADD has a record until its outcome is known: after a crash, the next agent sends
//! the DEL. The holder of the attachment's turn removes records after the answer to the DEL.

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
use wharf_kit::{
    clock,
    sync::lock,
    telemetry::operation::{Kind, OpId},
};

use crate::{
    delegate::{Delegation, request, service::CallError},
    node::queue::{Cause, Deletions, QueueFailure},
};

/// Deadline of a DEL; its record outlives it.
pub const DEL_LIMIT: Duration = Duration::from_secs(10);
const AT_ONCE: usize = 8;
/// Longer than any write.
const LEFTOVER: Duration = Duration::from_secs(60);

/// Records in the run directory.
pub struct Records {
    /// Deletions of shim and agent.
    pub deletions: Deletions,
    unfinished: Queue,
    waiting: AtomicU64,
    tried: Mutex<HashSet<(String, bool)>>,
    probes: AtomicU64,
    /// Latest probe; an earlier one that ends later is ignored.
    unwritable: Mutex<(u64, Option<String>)>,
    boot_id: String,
}

impl Records {
    /// Records of a run directory.
    #[must_use]
    pub fn new(run_dir: &Path, boot_id: String) -> Self {
        Self {
            deletions: Deletions::new(run_dir),
            unfinished: Queue::unfinished(run_dir),
            waiting: AtomicU64::new(0),
            tried: Mutex::default(),
            probes: AtomicU64::new(0),
            unwritable: Mutex::default(),
            boot_id,
        }
    }

    /// Boot of the records.
    #[must_use]
    pub fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// ADDs that await a DEL.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Whether the last drain left records.
    #[must_use]
    pub fn any_waits(&self) -> bool {
        self.waiting() > 0 || self.deletions.status().0.records > 0
    }

    /// Tests whether ADDs can be recorded; otherwise none is sent.
    pub async fn probe(&self) {
        let number = self.probes.fetch_add(1, Ordering::Relaxed) + 1;
        let queue = self.unfinished.clone();
        let tried = self.deletions.blocking(move |_| queue.probe()).await;
        let mut latest = lock(&self.unwritable);
        if number > latest.0 {
            *latest = (number, tried.err().map(|why| why.to_string()));
        }
    }

    /// Why ADDs cannot be recorded.
    #[must_use]
    pub fn unwritable(&self) -> Option<String> {
        lock(&self.unwritable).1.clone()
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

    /// Records an ADD before it is sent.
    pub async fn begin(&self, a: &Attachment) -> Result<(), QueueFailure> {
        let record = self.record(a);
        self.put(&self.unfinished, record).await
    }

    /// Removes a finished ADD's record; on failure, the DEL is still owed.
    pub async fn end(&self, a: &Attachment) -> Result<(), QueueFailure> {
        self.remove(&self.unfinished, file_name(a)).await
    }

    /// Records a DEL that the service did not accept.
    pub async fn defer(&self, a: &Attachment) -> Result<(), QueueFailure> {
        let record = self.record(a);
        self.put(&self.deletions.queue, record).await
    }

    /// Removes an attachment's records after its DEL; on failure, the DEL is harmlessly repeated.
    pub async fn served(&self, a: &Attachment) -> Result<(), QueueFailure> {
        for queue in [&self.deletions.queue, &self.unfinished] {
            if is_in(queue, a) {
                self.remove(queue, file_name(a)).await?;
            }
        }
        Ok(())
    }

    /// Whether a DEL is owed: two `lstat`s in tmpfs.
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

/// Marks the run directory as delegated until [`leave`].
pub fn enter(run_dir: &Path) -> Result<(), QueueError> {
    Queue::unfinished(run_dir).ensure_directory()
}

/// Refuses a start without delegation while deletions are owed.
pub fn leave(run_dir: &Path) -> anyhow::Result<()> {
    must_owe_nothing(run_dir).context("start")?;
    let unfinished = Queue::unfinished(run_dir);
    if !unfinished.path().exists() {
        return Ok(());
    }
    std::fs::remove_dir_all(unfinished.path()).with_context(|| format!("remove {}", unfinished.path().display()))
}

/// Refuses owed deletions, or an unreadable directory.
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

fn attachment(deletion: &Deletion) -> Option<Attachment> {
    Some(Attachment {
        network: deletion.network.parse().ok()?,
        container_id: deletion.container_id.parse().ok()?,
        ifname: deletion.ifname.parse().ok()?,
    })
}

struct Owed {
    name: String,
    written_unix_ms: u64,
    attachment: Attachment,
    unfinished: bool,
}

impl Owed {
    fn file(&self) -> (String, bool) {
        (self.name.clone(), self.unfinished)
    }
}

impl Delegation {
    /// Sends owed DELs of attachments without a running operation; returns the number of remaining records. Includes
    /// earlier boots: a service may hold leases across boots.
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

    async fn serve(&self, owed: Owed, away: &AtomicBool) -> Option<Owed> {
        let a = &owed.attachment;
        let Some(_turn) = self.turns.try_take(a) else { return (!owed.unfinished).then_some(owed) };
        // A later ADD may have the attachment.
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

    /// Sends an owed DEL. The caller holds the turn.
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

#[derive(Debug, thiserror::Error)]
pub(super) enum Unsettled {
    #[error(transparent)]
    Call(#[from] CallError),
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
