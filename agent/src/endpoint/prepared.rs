//! Program sets loaded ahead of need.
//!
//! Verifying an endpoint's three programs is the largest part of an ADD. Their constants are an id and a MAC pair,
//! which the agent chooses, so a controller keeps loaded and pinned sets for creates.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use wharf_core::{
    kernel::{Kernel, ProgramSpec, Programs},
    plan::CreateStep,
};

use crate::{
    endpoint::unfinished,
    node::{
        error::JobError,
        jobs::InFlight,
        leftovers::Unfinished,
        lifecycle::Lifecycle,
        prepared::{ProgramSet, random_macs},
    },
};

/// Loads sets up to the target number.
///
/// # Errors
/// A set does not load; others stay.
pub async fn refill(life: &Arc<Lifecycle>) -> Result<(), LoadError> {
    loop {
        let (ready, target) = life.prepared.fill();
        if ready >= target || life.tasks.stop.is_cancelled() {
            return Ok(());
        }
        if life.registry.is_full() || life.memory.admit().is_err() {
            return Ok(());
        }
        quiet(life).await;
        let (set, _, _guard) = load(life).await?;
        life.prepared.add(set);
    }
}

/// Waits for a moment without creates: verifying a set takes 3 ms of CPU time. At most a quarter of the target left
/// ends the wait: creates would have to verify programs.
async fn quiet(life: &Arc<Lifecycle>) {
    const QUIET: Duration = Duration::from_millis(50);
    loop {
        let (ready, target) = life.prepared.fill();
        if ready <= target / 4 || life.tasks.stop.is_cancelled() {
            return;
        }
        let seen = life.gate.offered.load(Ordering::Relaxed);
        tokio::select! {
            () = life.tasks.stop.cancelled() => return,
            () = tokio::time::sleep(QUIET) => {}
        }
        let idle = life.gate.has_no_creates();
        if idle && life.gate.offered.load(Ordering::Relaxed) == seen {
            return;
        }
    }
}

/// The guard keeps the id in flight.
pub type Loaded = (ProgramSet, Programs, InFlight);

/// A failed load.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// No id.
    #[error("every endpoint id is in use")]
    NoId,
    /// The kernel.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The kernel, and the cleanup.
    #[error("{0}; and undoing it: {1} (it is tried again)")]
    NotUndone(JobError, JobError),
}

/// Loads a set under a new id. The caller keeps the guard until the set is in the table: the audit reports unexplained
/// pins.
///
/// # Errors
/// No id, or no programs; a failed cleanup is retried.
pub async fn load(life: &Arc<Lifecycle>) -> Result<Loaded, LoadError> {
    let id = life.registry.take_id().ok_or(LoadError::NoId)?;
    let guard = life.jobs.working_on(id);
    let (container_mac, host_mac) = random_macs();
    let spec = ProgramSpec { id, container_mac, host_mac, debug: life.config.debug_programs, keep: false };
    let load = |kernel: Arc<dyn Kernel>| async move { kernel.ensure_programs(&spec).await };
    let (step, bound) = (CreateStep::EnsurePrograms, Duration::from_millis(CreateStep::EnsurePrograms.deadline_ms()));
    match life.jobs.bounded(id, step.name(), bound, load).await {
        Ok(programs) => Ok((ProgramSet { id, container_mac, host_mac }, programs, guard)),
        Err(error) => {
            if let Err(undo) = life.jobs.remove_programs(id).await {
                unfinished::keep(&life.unfinished, id, Unfinished::Programs);
                return Err(LoadError::NotUndone(error, undo));
            }
            life.registry.free_id(id);
            Err(error.into())
        }
    }
}

/// Unpins ready sets at a graceful stop.
pub async fn drain(life: &Arc<Lifecycle>) {
    loop {
        let Some(set) = life.prepared.take() else { return };
        match life.jobs.remove_programs(set.id).await {
            Ok(()) => life.registry.free_id(set.id),
            // The next start removes pins without a record.
            Err(error) => tracing::warn!(endpoint = set.id.get(), "unpin prepared programs: {error}"),
        }
    }
}
