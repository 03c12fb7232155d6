//! Reports steps that overran their deadline, until they end.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use wharf_api::{LogStatus, StuckStep};
use wharf_core::{
    ids::EndpointId,
    plan::{CreateStep, DeleteStep},
};

use crate::node::{jobs::Jobs, lifecycle::Lifecycle, registry::Registry};

/// Check interval.
pub const TICK: Duration = Duration::from_secs(1);
/// The step's timeout is reported first.
const GRACE_MS: u64 = 1_000;

/// By endpoint.
#[must_use]
pub fn stuck(registry: &Registry, jobs: &Jobs, proxy_timeout: Duration) -> Vec<StuckStep> {
    let mut found = Vec::new();
    for handle in jobs.in_flight().into_iter().filter_map(|id| registry.get(id)) {
        handle.shared.read(|v| {
            if v.status.phase.is_empty() {
                return;
            }
            let for_ms = u64::try_from(v.step_since.elapsed().as_millis()).unwrap_or(u64::MAX);
            let bound_ms = bound_ms(proxy_timeout, &v.status.phase);
            if for_ms > bound_ms.saturating_add(GRACE_MS) {
                found.push(StuckStep {
                    endpoint: handle.id.get(),
                    attachment: v.record.attachment.to_string(),
                    step: v.status.phase.clone(),
                    for_ms,
                    bound_ms,
                });
            }
        });
    }
    for (id, job) in jobs.running() {
        let for_ms = u64::try_from(job.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (endpoint, bound_ms) = (id.get(), bound_ms(proxy_timeout, job.step));
        let is_named = found.iter().any(|s| s.endpoint == endpoint && s.step == job.step);
        if for_ms > bound_ms.saturating_add(GRACE_MS) && !is_named {
            let of = registry.get(id).map(|h| h.shared.read(|v| v.record.attachment.to_string()));
            let attachment = of.unwrap_or_else(|| "no endpoint".to_owned());
            found.push(StuckStep { endpoint, attachment, step: job.step.to_owned(), for_ms, bound_ms });
        }
    }
    found
}

fn bound_ms(proxy_timeout: Duration, step: &str) -> u64 {
    if step == DeleteStep::AwaitProxy.name() {
        return u64::try_from(proxy_timeout.as_millis()).unwrap_or(u64::MAX);
    }
    let create = CreateStep::ALL.into_iter().filter(|s| s.name() == step).map(CreateStep::deadline_ms);
    let delete = DeleteStep::ALL.into_iter().filter(|s| s.name() == step).map(DeleteStep::deadline_ms);
    create.chain(delete).max().unwrap_or(CreateStep::EnsurePrograms.deadline_ms())
}

/// Reports each stuck step once, until the agent stops.
pub async fn watch(life: Arc<Lifecycle>) {
    let mut told: BTreeSet<(u16, String)> = BTreeSet::new();
    loop {
        let found = stuck(&life.endpoints.registry, &life.endpoints.jobs, life.config.proxy_timeout);
        for s in &found {
            if told.insert((s.endpoint, s.step.clone())) {
                let what = format!("step {} has not ended for {} ms, its bound is {} ms", s.step, s.for_ms, s.bound_ms);
                tracing::error!(endpoint = s.endpoint, attachment = s.attachment, "stuck: {what}");
                let id = EndpointId::try_from(s.endpoint).ok();
                if let Some(handle) = id.and_then(|id| life.endpoints.registry.get(id)) {
                    handle.shared.log(LogStatus::Failure, "stuck", what.clone());
                    life.telemetry.monitor.agent(Some(handle.id), "endpoint-stuck", what);
                }
            }
        }
        told.retain(|(endpoint, step)| found.iter().any(|s| s.endpoint == *endpoint && s.step == *step));
        tokio::select! {
            () = life.tasks.stop.cancelled() => return,
            () = tokio::time::sleep(TICK) => {}
        }
    }
}
