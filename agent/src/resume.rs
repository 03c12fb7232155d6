//! Deletes that could not finish are resumed, also when nobody asks again: a runtime that has given up must not leave an
//! endpoint disconnecting for ever.

use std::{sync::Arc, time::Duration};

use wharf_core::{kernel::Kernel, state::State};

use crate::{
    endpoint::{Handle, delete},
    node::Node,
};

/// How often. Whoever deletes tries again by itself much sooner; this is for those that do not.
pub const INTERVAL: Duration = Duration::from_secs(30);

/// Resumes, one after another, every delete that ended without taking all of it away and that nothing works on.
///
/// # Errors
/// The deletes that failed again, with their steps and causes.
pub async fn resume<K: Kernel>(node: &Arc<Node<K>>) -> Result<(), String> {
    let busy = node.in_flight();
    let idle = |h: &Handle| !busy.contains(&h.id) && h.shared.read(|v| v.fsm.state) == State::Disconnecting;
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
    if failed.is_empty() { Ok(()) } else { Err(format!("deletes that cannot finish: {}", failed.join("; "))) }
}
