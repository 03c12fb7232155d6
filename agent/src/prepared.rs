//! Program sets verified ahead of need.
//!
//! Verifying an endpoint's three programs is the largest part of an ADD, and nothing in them depends on the container:
//! their constants are the endpoint's id and MAC pair, which the agent chooses. So a controller keeps some loaded and
//! pinned under ids of their own, and a create takes one. With none ready, the create loads its own; nothing waits.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use tokio::sync::Notify;
use wharf_core::{
    ids::{EndpointId, MacAddr},
    kernel::{Kernel, ProgramSpec, Programs},
    plan::CreateStep,
};

use crate::{
    node::{InFlight, Node},
    sync::lock,
    unfinished::{self, Unfinished},
};

/// A loaded and pinned program set that no endpoint has yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgramSet {
    /// The id it is pinned under, taken in the registry.
    pub id: EndpointId,
    /// Constant of its programs.
    pub container_mac: MacAddr,
    /// Constant of its programs.
    pub host_mac: MacAddr,
}

/// The sets that are ready. At most `target`, by the controller's own bound.
pub struct Prepared {
    ready: Mutex<VecDeque<ProgramSet>>,
    taken: Notify,
    target: usize,
}

impl Prepared {
    /// None ready yet.
    #[must_use]
    pub fn new(target: usize) -> Self {
        Self { ready: Mutex::default(), taken: Notify::new(), target }
    }

    /// Takes one, if any is ready.
    pub fn take(&self) -> Option<ProgramSet> {
        let set = lock(&self.ready).pop_front();
        self.taken.notify_one();
        set
    }

    /// Gives one back that was not used.
    pub fn give_back(&self, set: ProgramSet) {
        lock(&self.ready).push_front(set);
    }

    /// Ids of those that are ready.
    #[must_use]
    pub fn ids(&self) -> BTreeSet<EndpointId> {
        lock(&self.ready).iter().map(|s| s.id).collect()
    }

    /// How many are ready, and how many are wanted.
    #[must_use]
    pub fn fill(&self) -> (usize, usize) {
        (lock(&self.ready).len(), self.target)
    }

    /// Waits until one was taken.
    pub async fn taken(&self) {
        self.taken.notified().await;
    }
}

/// A random pair of locally administered unicast addresses (IEEE 802: bit 1 of the first octet set, bit 0 clear).
#[must_use]
pub fn random_macs() -> (MacAddr, MacAddr) {
    let one = || {
        let mut mac: [u8; 6] = rand::random();
        mac[0] = (mac[0] | 0x02) & 0xfe;
        MacAddr(mac)
    };
    (one(), one())
}

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
        lock(&node.prepared.ready).push_back(set);
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
    let guard = node.working_on(id);
    let (container_mac, host_mac) = random_macs();
    let spec = ProgramSpec { id, container_mac, host_mac, debug: node.config.debug_programs, keep: false };
    let load = |kernel: Arc<K>| async move { kernel.ensure_programs(&spec).await };
    let (step, bound) = (CreateStep::EnsurePrograms, Duration::from_millis(CreateStep::EnsurePrograms.deadline_ms()));
    match node.bounded_job(id, step.name(), bound, load).await {
        Ok(programs) => Ok((ProgramSet { id, container_mac, host_mac }, programs, guard)),
        Err(error) => {
            if let Err(undo) = unfinished::remove_programs(node, id).await {
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
        let Some(set) = lock(&node.prepared.ready).pop_front() else { return };
        match unfinished::remove_programs(node, set.id).await {
            Ok(()) => node.registry.free_id(set.id),
            // The next start finds its pins without a record and removes them.
            Err(error) => tracing::warn!(endpoint = set.id.get(), "unpin prepared programs: {error}"),
        }
    }
}
