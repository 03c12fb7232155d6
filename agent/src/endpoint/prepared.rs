//! Program sets loaded ahead of need.
//!
//! Verifying three programs is the largest part of an ADD. The agent chooses their constants, an id and a MAC pair, so
//! a controller keeps pinned sets for creates.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio_util::sync::CancellationToken;
use wharf_core::{
    kernel::{Kernel, ProgramSpec, Programs},
    plan::CreateStep,
};

use crate::{
    config::AgentConfig,
    endpoint::unfinished,
    node::{
        endpoints::Endpoints,
        error::JobError,
        jobs::InFlight,
        leftovers::Unfinished,
        lifecycle::Lifecycle,
        prepared::{ProgramSet, random_macs},
    },
};

/// Loads sets up to the target number; an error leaves the others.
pub async fn refill(life: &Lifecycle) -> Result<(), LoadError> {
    let (endpoints, stop) = (&life.endpoints, &life.tasks.stop);
    loop {
        let (ready, target) = endpoints.prepared.fill();
        if ready >= target || stop.is_cancelled() {
            return Ok(());
        }
        if endpoints.registry.is_full() || endpoints.admission.memory.admit().is_err() {
            return Ok(());
        }
        quiet(endpoints, stop).await;
        let (set, _, _guard) = load(endpoints, &life.config).await?;
        endpoints.prepared.add(set);
    }
}

/// Verifying a set takes 3 ms of CPU time. Ends at a quarter of the target, because creates would verify programs.
async fn quiet(endpoints: &Endpoints, stop: &CancellationToken) {
    const QUIET: Duration = Duration::from_millis(50);
    loop {
        let (ready, target) = endpoints.prepared.fill();
        if ready <= target / 4 || stop.is_cancelled() {
            return;
        }
        let seen = endpoints.admission.gate.offered.load(Ordering::Relaxed);
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(QUIET) => {}
        }
        let idle = endpoints.admission.gate.has_no_creates();
        if idle && endpoints.admission.gate.offered.load(Ordering::Relaxed) == seen {
            return;
        }
    }
}

/// The guard keeps the id in flight.
pub type Loaded = (ProgramSet, Programs, InFlight);

/// A failed load.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("every endpoint id is in use")]
    NoId,
    /// The kernel.
    #[error(transparent)]
    Job(#[from] JobError),
    /// Kernel call and cleanup.
    #[error("{0}; and undoing it: {1} (it is tried again)")]
    NotUndone(JobError, JobError),
}

/// Loads a set under a new id. The caller keeps the guard until the set is in the table: the audit reports unexplained
/// pins.
///
/// # Errors
/// No id, or no programs; a failed cleanup is retried.
pub async fn load(endpoints: &Endpoints, config: &AgentConfig) -> Result<Loaded, LoadError> {
    let id = endpoints.registry.take_id().ok_or(LoadError::NoId)?;
    let guard = endpoints.jobs.working_on(id);
    let (container_mac, host_mac) = random_macs();
    let spec = ProgramSpec { id, container_mac, host_mac, debug: config.debug_programs, keep: false };
    let load = |kernel: Arc<dyn Kernel>| async move { kernel.ensure_programs(&spec).await };
    let (step, bound) = (CreateStep::EnsurePrograms, Duration::from_millis(CreateStep::EnsurePrograms.deadline_ms()));
    match endpoints.jobs.bounded(id, step.name(), bound, load).await {
        Ok(programs) => Ok((ProgramSet { id, container_mac, host_mac }, programs, guard)),
        Err(error) => {
            if let Err(undo) = endpoints.jobs.remove_programs(id).await {
                unfinished::keep(&endpoints.leftovers.unfinished, id, Unfinished::Programs);
                return Err(LoadError::NotUndone(error, undo));
            }
            endpoints.registry.free_id(id);
            Err(error.into())
        }
    }
}

/// Unpins ready sets at a graceful stop.
pub async fn drain(endpoints: &Endpoints) {
    loop {
        let Some(set) = endpoints.prepared.take() else { return };
        match endpoints.jobs.remove_programs(set.id).await {
            Ok(()) => endpoints.registry.free_id(set.id),
            Err(error) => tracing::warn!(endpoint = set.id.get(), "unpin prepared programs: {error}"),
        }
    }
}
