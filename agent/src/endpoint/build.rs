//! Build: brings realized to desired.
//!
//! Level *policy* changes map rows only; level *datapath* replaces programs by one atomic update of each link and of
//! the program array. Nothing is detached, so no packet is lost or passes without policy. A failed step leaves the old
//! state in force.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use wharf_api::LogStatus;
use wharf_core::{
    endpoint::{EndpointRecord, IpOwner},
    finding::{Mender, joined},
    ids::EndpointId,
    kernel::{ConfigSpec, Kernel, KernelError, LinkRef, ProgramSpec},
    plan::CreateStep,
    state::Level,
    timeline::{Operation, Outcome},
};

use crate::{
    config::{AgentConfig, LocalDelivery},
    endpoint::record::crash_point,
    node::{endpoint::Shared, error::BuildError, lifecycle::Lifecycle},
};

/// An endpoint's configuration row; `trace_all` traces every endpoint.
#[must_use]
pub fn desired_config(
    config: &AgentConfig,
    trace_all: &AtomicBool,
    record: &EndpointRecord,
    trace: bool,
) -> ConfigSpec {
    config_of(config, record, trace || trace_all.load(Ordering::Relaxed))
}

/// A record's configuration row.
#[must_use]
pub fn config_of(config: &AgentConfig, record: &EndpointRecord, trace: bool) -> ConfigSpec {
    ConfigSpec {
        epoch: record.epoch,
        host_ifindex: record.host_ifindex,
        identity: record.identity,
        ipv4: record.ipv4,
        ipv6: record.ipv6,
        gateway4: record.gateway4,
        gateway6: record.gateway6,
        live: true,
        trace,
        local_by_stack: config.local_delivery == LocalDelivery::Stack,
        chained: !record.link_owner.is_wharf(),
        bandwidth: record.bandwidth,
        sources: record.sources.clone(),
    }
}

/// An endpoint's programs.
#[must_use]
pub fn desired_programs(config: &AgentConfig, record: &EndpointRecord) -> ProgramSpec {
    ProgramSpec {
        id: record.id,
        container_mac: record.container_mac,
        host_mac: record.host_mac,
        debug: config.debug_programs,
        keep: false,
    }
}

/// Realizes the endpoint's record; a delete ends it before the next step. With `keep_programs`, attaches equal pinned
/// programs without a load.
///
/// # Errors
/// The failed step; the last good state is in force.
pub async fn build(
    life: &Arc<Lifecycle>,
    shared: &Arc<Shared>,
    cancel: &CancellationToken,
    level: Level,
    keep_programs: bool,
) -> Result<(), BuildError> {
    let (record, trace) = shared.read(|v| (v.record.clone(), v.trace));
    let mut run = Run { life, shared, cancel, id: record.id, steps: Vec::new() };
    let since = Instant::now();
    let operation = if keep_programs { Operation::Restore } else { Operation::Regenerate };
    let result = steps(&mut run, level, keep_programs, &record, trace).await;
    let (outcome, text) = match &result {
        Ok(()) => (Outcome::Ok, format!("{level}: {}", run.steps.join(", "))),
        Err(why) => (Outcome::Failed, why.to_string()),
    };
    shared.note(operation, "build", Some(since.elapsed()), outcome, &text);
    result?;
    crash_point("regenerate", "realized");
    Ok(())
}

async fn steps(
    run: &mut Run<'_>,
    level: Level,
    keep_programs: bool,
    record: &EndpointRecord,
    trace: bool,
) -> Result<(), BuildError> {
    let life = run.life;
    if level == Level::Datapath {
        let spec = ProgramSpec { keep: keep_programs, ..desired_programs(&life.config, record) };
        run.step(CreateStep::EnsurePrograms, |k| async move { k.ensure_programs(&spec).await }).await?;
    }
    life.policy.put_endpoint(record).await?;
    let config = desired_config(&life.config, &life.telemetry.trace_all, record, trace);
    let id = record.id;
    run.step(CreateStep::EnsureConfig, move |k| async move { k.ensure_config(id, &config).await }).await?;
    if level == Level::Datapath && !(keep_programs && run.is_as_recorded(record).await) {
        let link = LinkRef::of(record);
        let mut connected =
            run.step(CreateStep::EnsureAttached, |k| async move { k.ensure_attached(&link).await }).await;
        if connected.is_ok() {
            let asked = record.clone();
            connected =
                run.step(CreateStep::EnsureConnected, |k| async move { k.ensure_connected(&asked).await }).await;
        }
        if let Err(why) = connected {
            if !has_no_interface(&*life.kernel, record).await {
                return Err(why);
            }
            // Only the audit reports a missing interface; a retry cannot restore it.
            run.shared.log(LogStatus::Warning, "build", format!("{why}; the container took its interface away"));
        }
    }
    let record = record.clone();
    run.step(CreateStep::EnsureReachable, |k| async move { k.ensure_reachable(&record).await }).await
}

async fn has_no_interface(kernel: &dyn Kernel, record: &EndpointRecord) -> bool {
    let found = kernel.observe_endpoint(record).await.map(joined);
    found.is_ok_and(|all| all.iter().any(|p| p.mender() == Mender::Container { regenerable: false }))
}

struct Run<'a> {
    life: &'a Arc<Lifecycle>,
    shared: &'a Shared,
    cancel: &'a CancellationToken,
    id: EndpointId,
    steps: Vec<String>,
}

impl Run<'_> {
    /// Cheaper than the steps that it saves. An error counts as a difference.
    async fn is_as_recorded(&mut self, record: &EndpointRecord) -> bool {
        // A look does not compare the source of routes of another IPAM's endpoints: the router's current address.
        if record.ip_owner == IpOwner::External || self.cancel.is_cancelled() {
            return false;
        }
        self.shared.update(|v| v.begin_step("observe"));
        let (asked, since) = (record.clone(), Instant::now());
        let bound = Duration::from_millis(CreateStep::EnsureConnected.deadline_ms());
        let look = |k: Arc<dyn Kernel>| async move { k.observe_endpoint(&asked).await };
        let found = self.life.endpoints.jobs.bounded(self.id, "observe", bound, look).await;
        self.life.telemetry.metrics.phase(Operation::Regenerate.name(), "observe", since.elapsed());
        self.steps.push(format!("observe {:.1} ms", since.elapsed().as_secs_f64() * 1_000.0));
        found.is_ok_and(|problems| problems.is_empty())
    }

    /// Bounded: a hanging build must not delay a delete.
    async fn step<T, F>(
        &mut self,
        step: CreateStep,
        call: impl FnOnce(Arc<dyn Kernel>) -> F + Send + 'static,
    ) -> Result<(), BuildError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, KernelError>> + Send + 'static,
    {
        if self.cancel.is_cancelled() {
            return Err(BuildError::Cancelled(step));
        }
        self.shared.update(|v| v.begin_step(step.name()));
        crash_point("regenerate", step.name());
        let (since, bound) = (Instant::now(), Duration::from_millis(step.deadline_ms()));
        let result = self.life.endpoints.jobs.bounded(self.id, step.name(), bound, call).await;
        self.life.telemetry.metrics.phase(Operation::Regenerate.name(), step.name(), since.elapsed());
        self.steps.push(format!("{step} {:.1} ms", since.elapsed().as_secs_f64() * 1_000.0));
        result.map(drop).map_err(|e| BuildError::Step(step, e))
    }
}
