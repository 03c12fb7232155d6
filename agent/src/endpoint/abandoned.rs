//! Endpoints whose container is gone without a DEL: plugin or runtime was killed. They are deleted after a grace time.
//!
//! Proof: no network namespace at its path, and no host side of the link. The kernel destroys a veth pair with either
//! namespace; a namespace that the agent merely cannot see still has its link.

use std::{sync::Arc, time::Duration};

use tokio::sync::mpsc::error::TrySendError;
use wharf_core::{
    finding::{EndpointProblem, Side},
    kernel::{Kernel, KernelError, LinkRef},
    plan::DeleteOptions,
    timeline::{Operation, Outcome},
};
use wharf_kit::clock;

use crate::{
    endpoint::delete,
    node::{
        endpoint::{Command, Handle, View},
        endpoints::Endpoints,
        health,
        lifecycle::Lifecycle,
    },
};

/// The controller's name.
pub const CONTROLLER: &str = "abandoned-endpoints";
/// A run looks up each link by name.
const INTERVAL: Duration = Duration::from_secs(5);
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// A failed look or delete.
#[derive(Debug, thiserror::Error)]
pub enum AbandonedError {
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Failed deletes; [`super::resume`] retries them.
    #[error("delete endpoints whose network namespace is gone: {}", .0.join("; "))]
    Delete(Vec<String>),
}

/// Interval of [`look`].
#[must_use]
pub fn interval(grace: Duration) -> Duration {
    grace.clamp(MIN_INTERVAL, INTERVAL)
}

/// Deletes endpoints without a container, after their grace time.
pub async fn look(life: &Arc<Lifecycle>) -> Result<(), AbandonedError> {
    let found = find(&life.endpoints, &*life.kernel).await;
    let now = clock::monotonic_ms();
    let grace = life.config.gone_grace;
    let is_due = |v: &View| Duration::from_millis(now.saturating_sub(v.fsm.since_ms)) >= grace;
    let due: Vec<Handle> =
        life.endpoints.registry.list().into_iter().filter(|h| h.is_abandoned() && h.shared.read(is_due)).collect();
    for handle in &due {
        let attachment = handle.shared.read(|v| v.record.attachment.to_string());
        let text = format!("no DEL came within {} s; deleted by the agent", grace.as_secs_f64());
        tracing::warn!(
            endpoint = handle.id.get(),
            epoch = handle.epoch.0,
            attachment,
            "the network namespace is gone and {text}"
        );
        handle.shared.note(Operation::Delete, "netns-gone", None, Outcome::Warning, &text);
        life.telemetry.monitor.agent(Some(handle.id), "endpoint-abandoned", format!("{attachment}: {text}"));
    }
    let delete = |handle| delete::delete(life, vec![handle], DeleteOptions::default(), delete::Answer::Finished);
    let results = futures::future::join_all(due.into_iter().map(delete)).await;
    let failure = |e: wharf_api::StepError| format!("{}: {}: {}", e.endpoint, e.step, e.message);
    let failed: Vec<String> = results.into_iter().flat_map(|result| result.errors).map(failure).collect();
    if failed.is_empty() { Ok(found?) } else { Err(AbandonedError::Delete(failed)) }
}

async fn find(endpoints: &Endpoints, kernel: &dyn Kernel) -> Result<(), KernelError> {
    // The health task owns the health endpoint.
    let is_watched = |v: &View| v.is_settled() && !health::is_reserved(&v.record.attachment);
    let idle = |h: &Handle| !endpoints.jobs.is_in_flight(h.id) && h.shared.read(is_watched);
    let handles: Vec<Handle> = endpoints.registry.list().into_iter().filter(idle).collect();
    let links: Vec<_> = handles.iter().map(|h| h.shared.read(|v| LinkRef::of(&v.record))).collect();
    let missing = kernel.observe_missing(&links).await?;
    let mut outcome = Ok(());
    for handle in handles.into_iter().filter(|h| missing.contains(&h.id)) {
        let before = handle.shared.view();
        let found = match kernel.observe_endpoint(&before.record).await {
            Ok(found) => found,
            Err(why) => {
                outcome = outcome.and(Err(why));
                continue;
            }
        };
        if !is_gone(&found) || !idle(&handle) || !handle.shared.read(|v| v.is_as(&before)) {
            continue;
        }
        match handle.mailbox.try_send(Command::Abandon) {
            Ok(()) | Err(TrySendError::Full(_) | TrySendError::Closed(_)) => {}
        }
    }
    outcome
}

fn is_gone(found: &[EndpointProblem]) -> bool {
    let netns = |p: &EndpointProblem| matches!(p, EndpointProblem::Netns { .. });
    let link = |p: &EndpointProblem| matches!(p, EndpointProblem::LinkMissing { side: Side::Node, .. });
    found.iter().any(netns) && found.iter().any(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_proofs_are_needed() {
        let netns = EndpointProblem::Netns { path: "/run/netns/c1".to_owned(), cause: "gone".to_owned() };
        let missing = |side| EndpointProblem::LinkMissing { side, name: "l".to_owned() };
        assert!(is_gone(&[missing(Side::Node), netns.clone()]));
        for found in [vec![netns.clone()], vec![missing(Side::Node)], vec![netns, missing(Side::Container)], vec![]] {
            assert!(!is_gone(&found), "{found:?}");
        }
    }
}
