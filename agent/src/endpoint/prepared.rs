//! Program sets verified ahead of need.
//!
//! Verifying an endpoint's three programs is the largest part of an ADD, and nothing in them depends on the container:
//! their constants are the endpoint's id and MAC pair, which the agent chooses. So a controller keeps some loaded and
//! pinned under ids of their own, and a create takes one. With none ready, the create loads its own; nothing waits.

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
        Node,
        jobs::InFlight,
        leftovers::Unfinished,
        prepared::{ProgramSet, random_macs},
    },
};

/// Loads sets until as many are ready as wanted.
///
/// # Errors
/// When one does not load; what was loaded stays.
pub async fn refill<K: Kernel>(node: &Arc<Node<K>>) -> Result<(), String> {
    loop {
        let (ready, target) = node.prepared.fill();
        if ready >= target || node.stop.is_cancelled() {
            return Ok(());
        }
        // Every id is an endpoint's, or its memory is all used up: a create loads its own when there is room again.
        if node.registry.is_full() || node.memory.admit().is_err() {
            return Ok(());
        }
        quiet(node).await;
        let (set, _, _guard) = load(node).await?;
        node.prepared.add(set);
    }
}

/// Waits for a moment without creates. Verifying takes three milliseconds of a processor: taken during a burst of creates
/// it would slow down the very requests it is to make fast. When few sets are left it is done all the same, because the
/// next creates would have to do it themselves.
async fn quiet<K: Kernel>(node: &Arc<Node<K>>) {
    const QUIET: Duration = Duration::from_millis(50);
    loop {
        let (ready, target) = node.prepared.fill();
        if ready <= target / 4 || node.stop.is_cancelled() {
            return;
        }
        let seen = node.creates.load(Ordering::Relaxed);
        tokio::select! {
            () = node.stop.cancelled() => return,
            () = tokio::time::sleep(QUIET) => {}
        }
        let idle = node.gate.has_no_creates();
        if idle && node.creates.load(Ordering::Relaxed) == seen {
            return;
        }
    }
}

/// A set, what the kernel says of it, and the guard of its id.
pub type Loaded<K> = (ProgramSet, Programs, InFlight<K>);

/// Loads one set under an id of its own, which counts as worked on while the guard lives: keep it until the set has its
/// place, or the audit would meet pins that nobody explains.
///
/// # Errors
/// When there is no id, or the programs do not load; then nothing is left of it.
pub async fn load<K: Kernel>(node: &Arc<Node<K>>) -> Result<Loaded<K>, String> {
    let id = node.registry.take_id().ok_or("every endpoint id is in use")?;
    let guard = node.jobs.working_on(id);
    let (container_mac, host_mac) = random_macs();
    let spec = ProgramSpec { id, container_mac, host_mac, debug: node.config.debug_programs, keep: false };
    let load = |kernel: Arc<K>| async move { kernel.ensure_programs(&spec).await };
    let (step, bound) = (CreateStep::EnsurePrograms, Duration::from_millis(CreateStep::EnsurePrograms.deadline_ms()));
    match node.jobs.bounded(id, step.name(), bound, load).await {
        Ok(programs) => Ok((ProgramSet { id, container_mac, host_mac }, programs, guard)),
        Err(error) => {
            if let Err(undo) = node.jobs.remove_programs(id).await {
                unfinished::keep(node, id, Unfinished::Programs);
                return Err(format!("{error}; and undoing it: {undo} (it is tried again)"));
            }
            node.registry.free_id(id);
            Err(error)
        }
    }
}

/// Unpins every set that is ready; at a graceful stop.
pub async fn drain<K: Kernel>(node: &Arc<Node<K>>) {
    loop {
        let Some(set) = node.prepared.take() else { return };
        match node.jobs.remove_programs(set.id).await {
            Ok(()) => node.registry.free_id(set.id),
            // The next start finds its pins without a record and removes them.
            Err(error) => tracing::warn!(endpoint = set.id.get(), "unpin prepared programs: {error}"),
        }
    }
}
