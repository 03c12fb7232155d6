//! Deletion records of CNI shims that cannot reach the agent.
//!
//! The watch precedes the first listing, so no record is missed; a slow tick lists again, for failed deletes and lost
//! events. A delete precedes the removal of its record. At start the agent writes a canary record as a shim would;
//! `wharf status` reports it if no inotify event delivers it.

use std::{convert::Infallible, io, path::PathBuf, sync::Arc, time::Duration};

use futures::{FutureExt as _, StreamExt as _};
use inotify::{EventMask, Inotify, WatchMask};
use tracing::Instrument as _;
use wharf_core::{
    ids::{Attachment, ContainerId, IfName, NetworkName},
    plan::DeleteOptions,
};
use wharf_handover::queue::{Deletion, Queue};
use wharf_kit::{
    clock,
    controller::Controllers,
    telemetry::operation::{Kind, OpId},
};

use crate::{
    endpoint::{delete, error::CreateCause, unknown},
    node::{
        aside::Wanted,
        endpoint::Handle,
        lifecycle::{Lifecycle, Tasks},
        queue::{Cause, Deletions, QueueFailure},
        registry::Registry,
    },
};

/// Controller name; the watchdog checks it.
pub const CONTROLLER: &str = "deletion-queue";
/// Longest wait after a lost event.
const TICK: Duration = Duration::from_secs(10);
const WATCH_AGAIN: Duration = Duration::from_secs(3);
/// An older temporary file is from a killed writer.
const LEFTOVER: Duration = Duration::from_secs(60);

/// Serves all records; returns how many stay.
pub async fn drain(life: &Arc<Lifecycle>, cause: Cause) -> Result<usize, QueueFailure> {
    drain_once(life, cause).instrument(OpId::next(Kind::Drain).span()).await
}

async fn drain_once(life: &Arc<Lifecycle>, cause: Cause) -> Result<usize, QueueFailure> {
    let _turn = life.endpoints.deletions.turn().await;
    let entries = life
        .endpoints
        .deletions
        .blocking(|queue| {
            queue.sweep(LEFTOVER)?;
            queue.list()
        })
        .await?;
    let (mut asked, mut unusable, mut problems) = (Vec::new(), 0, Vec::new());
    for entry in entries {
        match entry.content {
            Ok(deletion) => asked.push((entry.name, entry.written_unix_ms, deletion)),
            Err(why) => {
                tracing::warn!(file = entry.name, "deletion record: {why}; it is put aside");
                unusable += 1;
                let name = entry.name;
                if let Err(error) = life.endpoints.deletions.blocking(move |queue| queue.set_aside(&name)).await {
                    problems.push(error);
                }
            }
        }
    }
    wharf_crash::point("drain/after-list");
    let stay = serve(life, asked, cause).await;
    let aside = life.endpoints.deletions.blocking(Queue::aside).await?.len() as u64;
    life.endpoints.deletions.drained(&stay, unusable, aside);
    match problems.into_iter().next() {
        Some(problem) => Err(problem),
        None => Ok(stay.len()),
    }
}

/// Serves an attachment's record before its create: it must not delete the new endpoint.
pub async fn serve_before_create(life: &Arc<Lifecycle>, a: &Attachment) -> Result<(), CreateCause> {
    let (network, container, ifname) = (a.network.as_str(), a.container_id.as_str(), a.ifname.as_str());
    if !life.endpoints.deletions.queue.contains(network, container, ifname) {
        return Ok(());
    }
    if let Err(why) = drain(life, Cause::Event).await {
        tracing::warn!("drain the deletion queue: {why}");
    }
    if life.endpoints.deletions.queue.contains(network, container, ifname) {
        return Err(CreateCause::DeletePending);
    }
    Ok(())
}

/// Returns the records that stay.
async fn serve(life: &Arc<Lifecycle>, asked: Vec<(String, u64, Deletion)>, cause: Cause) -> Vec<(String, u64)> {
    let (mut stay, mut done) = (Vec::new(), Vec::new());
    let (mut known, mut handles): (Vec<(String, u64, Handle)>, Vec<Handle>) = (Vec::new(), Vec::new());
    for (name, written, deletion) in asked {
        if let Some(nonce) = &deletion.canary {
            life.endpoints.deletions.canary_came(nonce, cause);
            done.push((name, written));
        } else if deletion.boot_id != life.store.boot_id() {
            done.push((name, written));
        } else {
            match find(&life.endpoints.registry, &deletion) {
                Found::Endpoint(handle) => {
                    handles.push((*handle).clone());
                    known.push((name, written, *handle));
                }
                Found::Other => done.push((name, written)),
                Found::Nothing(attachment) => {
                    let result = unknown::remove(life, &Wanted::of(&attachment)).await;
                    for e in &result.errors {
                        tracing::warn!(step = e.step, %attachment, "deletion record: {}", e.message);
                    }
                    let list = if result.errors.is_empty() { &mut done } else { &mut stay };
                    list.push((name, written));
                }
            }
        }
    }
    for e in delete::delete(life, handles, DeleteOptions::default(), delete::Answer::Finished).await.errors {
        tracing::warn!(endpoint = e.endpoint, step = e.step, "deletion record: {}", e.message);
    }
    wharf_crash::point("drain/after-delete");
    for (name, written, handle) in known {
        if life.endpoints.registry.get(handle.id).is_none_or(|there| there.epoch != handle.epoch) {
            done.push((name, written));
        } else {
            stay.push((name, written));
        }
    }
    for (name, written) in done {
        let (file, removed) = (name.clone(), life.endpoints.deletions.blocking(move |queue| queue.remove(&name)).await);
        if let Err(error) = removed {
            tracing::warn!(file, "{error}");
            stay.push((file, written));
        } else {
            life.endpoints.deletions.count_served();
        }
        wharf_crash::point("drain/after-remove");
    }
    stay
}

enum Found {
    Endpoint(Box<Handle>),
    /// The interface has another endpoint than the recorded one, or the record has invalid names.
    Other,
    Nothing(Attachment),
}

fn find(registry: &Registry, deletion: &Deletion) -> Found {
    let parsed = (
        NetworkName::parse(&deletion.network),
        ContainerId::parse(&deletion.container_id),
        IfName::parse(&deletion.ifname),
    );
    let (Ok(network), Ok(container_id), Ok(ifname)) = parsed else {
        return Found::Other;
    };
    match registry.by_interface(&container_id, &ifname) {
        None => Found::Nothing(Attachment { network, container_id, ifname }),
        Some(handle) => {
            let same_network = handle.shared.read(|v| v.record.attachment.network == network);
            let same_epoch = deletion.endpoint.as_ref().is_none_or(|e| e.epoch == handle.epoch.0);
            if same_network && same_epoch { Found::Endpoint(Box::new(handle)) } else { Found::Other }
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum WatchError {
    #[error(transparent)]
    Queue(#[from] QueueFailure),
    #[error("watch {path}: {1}", path = .0.display())]
    Inotify(PathBuf, #[source] io::Error),
    #[error("the directory was removed or moved")]
    Moved,
    #[error("its events ended")]
    Ended,
}

/// Serves the queue until the agent stops.
pub async fn watch(life: Arc<Lifecycle>) {
    let drains = |cause| {
        let life = Arc::clone(&life);
        async move { drain(&life, cause).await }
    };
    follow(&life.endpoints.deletions, life.store.boot_id(), &life.tasks, drains).await;
}

/// Calls `drain` for changes of the directory and at a slow tick.
pub async fn follow<F>(deletions: &Deletions, boot_id: &str, tasks: &Tasks, drain: impl Fn(Cause) -> F + Sync)
where
    F: Future<Output = Result<usize, QueueFailure>> + Send,
{
    let watched = Watched { deletions, boot_id, controllers: &tasks.controllers, drain };
    let mut canary_sent = false;
    loop {
        let result = tokio::select! {
            () = tasks.stop.cancelled() => return,
            result = watched.once(&mut canary_sent) => result,
        };
        let Err(why) = result;
        tasks.controllers.record(CONTROLLER, Err(&why));
        tracing::warn!("watch the deletion queue: {why}; it is set up again");
        tokio::select! {
            () = tasks.stop.cancelled() => return,
            () = tokio::time::sleep(WATCH_AGAIN) => {}
        }
    }
}

struct Watched<'a, D> {
    deletions: &'a Deletions,
    boot_id: &'a str,
    controllers: &'a Controllers,
    drain: D,
}

impl<D, F> Watched<'_, D>
where
    D: Fn(Cause) -> F + Sync,
    F: Future<Output = Result<usize, QueueFailure>> + Send,
{
    async fn once(&self, canary_sent: &mut bool) -> Result<Infallible, WatchError> {
        self.deletions.blocking(|queue| queue.ensure_directory()).await?;
        let path = self.deletions.queue.path();
        let failed = |e| WatchError::Inotify(path.to_owned(), e);
        let inotify = Inotify::init().map_err(failed)?;
        let wanted = WatchMask::MOVED_TO
            | WatchMask::CLOSE_WRITE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        inotify.watches().add(path, wanted).map_err(failed)?;
        let mut events = inotify.into_event_stream([0_u8; 4096]).map_err(failed)?;
        self.look(Cause::Tick).await;
        if !*canary_sent {
            *canary_sent = true;
            send_canary(self.deletions, self.boot_id).await;
        }
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        tick.reset();
        loop {
            tokio::select! {
                event = events.next() => match event {
                    Some(Ok(event)) => {
                        let mut gone = is_end(&event);
                        while let Some(Some(more)) = events.next().now_or_never() {
                            gone |= is_end(&more.map_err(failed)?);
                        }
                        if gone {
                            return Err(WatchError::Moved);
                        }
                        self.look(Cause::Event).await;
                    }
                    Some(Err(error)) => return Err(failed(error)),
                    None => return Err(WatchError::Ended),
                },
                _ = tick.tick() => {
                    self.look(Cause::Tick).await;
                    if self.deletions.canary_failed() {
                        send_canary(self.deletions, self.boot_id).await;
                    }
                }
            }
        }
    }

    async fn look(&self, cause: Cause) {
        let run = self.controllers.begin(CONTROLLER);
        let result = (self.drain)(cause).await;
        if let Err(why) = &result {
            tracing::warn!("drain the deletion queue: {why}");
        }
        run.end(result.map(drop));
        self.controllers.plan(CONTROLLER, TICK, TICK);
    }
}

fn is_end<S>(event: &inotify::Event<S>) -> bool {
    event.mask.intersects(EventMask::IGNORED | EventMask::DELETE_SELF | EventMask::MOVE_SELF)
}

async fn send_canary(deletions: &Deletions, boot_id: &str) {
    let nonce = format!("{:016x}", rand::random::<u64>());
    let deletion = Deletion {
        version: 1,
        network: "canary".into(),
        container_id: "canary".into(),
        ifname: "canary".into(),
        endpoint: None,
        boot_id: boot_id.to_owned(),
        written_unix_ms: clock::unix_ms(),
        canary: Some(nonce.clone()),
    };
    deletions.canary_sent(Ok(nonce));
    if let Err(why) = deletions.blocking(move |queue| queue.put(&deletion).map(drop)).await {
        tracing::warn!("send the canary through the deletion queue: {why}");
        deletions.canary_sent(Err(why));
    }
}
