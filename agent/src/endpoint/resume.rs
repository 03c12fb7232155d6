//! Resumes failed deletes and undos: a runtime may stop retrying.

use std::{sync::Arc, time::Duration};

use crate::{
    endpoint::{delete, unfinished},
    node::{endpoint::Handle, lifecycle::Lifecycle},
};

/// Interval of [`resume`]; clients retry sooner.
pub const INTERVAL: Duration = Duration::from_secs(30);

/// Operations that failed again.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("deletes and undos that cannot finish: {}", .0.join("; "))]
pub struct Unfinished(Vec<String>);

/// Resumes deletes and undos, unless their id is in flight.
pub async fn resume(life: &Arc<Lifecycle>) -> Result<(), Unfinished> {
    let busy = life.endpoints.jobs.in_flight();
    // Only deletes cancel, even if the mailbox is full.
    let idle = |h: &Handle| !busy.contains(&h.id) && h.cancel.is_cancelled();
    let mut failed = Vec::new();
    for handle in life.endpoints.registry.list().into_iter().filter(idle) {
        if life.tasks.stop.is_cancelled() {
            break;
        }
        let options = handle.shared.read(|v| v.delete_options);
        tracing::info!(endpoint = handle.id.get(), epoch = handle.epoch.0, "resume a delete that did not finish");
        let result = delete::delete(life, vec![handle], options, delete::Answer::Finished).await;
        failed.extend(result.errors.into_iter().map(|e| format!("{}: {}: {}", e.endpoint, e.step, e.message)));
    }
    for id in life.endpoints.leftovers.unfinished.ids().into_iter().filter(|id| !busy.contains(id)) {
        if life.tasks.stop.is_cancelled() {
            break;
        }
        if let Err(why) = unfinished::finish(life, id).await {
            failed.push(format!("endpoint {id}: undo of its create: {why}"));
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(Unfinished(failed)) }
}
