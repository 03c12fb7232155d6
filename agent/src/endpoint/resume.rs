//! Deletes and undos that could not finish are resumed, also when nobody asks again: a runtime that has given up must not
//! leave an endpoint disconnecting for ever, nor an id taken.

use std::{sync::Arc, time::Duration};

use wharf_core::kernel::Kernel;

use crate::{
    endpoint::{delete, unfinished},
    node::{Node, endpoint::Handle},
};

/// How often. Whoever deletes tries again by itself much sooner; this is for those that do not.
pub const INTERVAL: Duration = Duration::from_secs(30);

/// Resumes, one after another, every delete that ended without taking all of it away, or could not even begin, and every
/// undo that failed, unless something works on it.
///
/// # Errors
/// Those that failed again, with their steps and causes.
pub async fn resume<K: Kernel>(node: &Arc<Node<K>>) -> Result<(), String> {
    let busy = node.jobs.in_flight();
    // Nothing but a delete sets the token. One whose command found no place in the mailbox has left it set, and builds
    // are refused since.
    let idle = |h: &Handle| !busy.contains(&h.id) && h.cancel.is_cancelled();
    let mut failed = Vec::new();
    for handle in node.registry.list().into_iter().filter(idle) {
        if node.stop.is_cancelled() {
            break;
        }
        let options = handle.shared.read(|v| v.delete_options);
        tracing::info!(endpoint = handle.id.get(), epoch = handle.epoch.0, "resume a delete that did not finish");
        let result = delete::delete(node, vec![handle], options).await;
        failed.extend(result.errors.into_iter().map(|e| format!("{}: {}: {}", e.endpoint, e.step, e.message)));
    }
    for id in unfinished::ids(node).into_iter().filter(|id| !busy.contains(id)) {
        if node.stop.is_cancelled() {
            break;
        }
        if let Err(why) = unfinished::finish(node, id).await {
            failed.push(format!("endpoint {id}: undo of its create: {why}"));
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("deletes and undos that cannot finish: {}", failed.join("; "))) }
}
