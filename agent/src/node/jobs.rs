//! Kernel calls for an endpoint, one at a time.
//!
//! A kernel call continues after its bound; a late load could pin programs that a concurrent delete has just unpinned.
//! So each call runs to completion in a task that holds its id's turn; the id's next call waits within its bound. The
//! audit skips ids in flight.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    sync::OwnedMutexGuard,
    task::JoinHandle,
    time::{Instant, timeout_at},
};
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;
use wharf_core::{
    ids::EndpointId,
    kernel::{Kernel, KernelError, KernelErrorKind},
    plan::UndoStep,
};
use wharf_kit::sync::lock;

use crate::node::{error::JobError, locks::EndpointLocks};

/// Ids in flight, and their kernel calls.
pub struct Jobs {
    kernel: Arc<dyn Kernel>,
    /// Awaited at a stop.
    tasks: TaskTracker,
    turns: EndpointLocks,
    running: Mutex<BTreeMap<EndpointId, Job>>,
    /// Number of guards per id: a delete may start before a build has ended.
    in_flight: Mutex<BTreeMap<EndpointId, u32>>,
}

/// A running call.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// The step's name.
    pub step: &'static str,
    /// When it began.
    pub since: Instant,
}

impl Jobs {
    /// `tasks` tracks the calls.
    #[must_use]
    pub fn new(kernel: Arc<dyn Kernel>, tasks: TaskTracker) -> Arc<Self> {
        let (turns, running, in_flight) = Default::default();
        Arc::new(Self { kernel, tasks, turns, running, in_flight })
    }

    /// Keeps an id in flight while the guard lives.
    #[must_use]
    pub fn working_on(self: &Arc<Self>, id: EndpointId) -> InFlight {
        *lock(&self.in_flight).entry(id).or_default() += 1;
        InFlight { jobs: Arc::clone(self), id }
    }

    /// Whether work on the id runs.
    #[must_use]
    pub fn is_in_flight(&self, id: EndpointId) -> bool {
        lock(&self.in_flight).contains_key(&id)
    }

    /// Ids in flight.
    #[must_use]
    pub fn in_flight(&self) -> BTreeSet<EndpointId> {
        lock(&self.in_flight).keys().copied().collect()
    }

    /// Running calls by endpoint id.
    #[must_use]
    pub fn running(&self) -> BTreeMap<EndpointId, Job> {
        lock(&self.running).clone()
    }

    /// Runs an endpoint's only kernel call, to completion even if the future is dropped.
    pub async fn run<T, F>(
        self: &Arc<Self>,
        id: EndpointId,
        step: &'static str,
        call: impl FnOnce(Arc<dyn Kernel>) -> F + Send + 'static,
    ) -> Result<T, KernelError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, KernelError>> + Send + 'static,
    {
        let turn = self.turns.acquire(id).await;
        ended(self.begin(id, step, turn, call).await, id, step)
    }

    /// [`Self::run`] with a bound.
    pub async fn bounded<T, F>(
        self: &Arc<Self>,
        id: EndpointId,
        step: &'static str,
        bound: Duration,
        call: impl FnOnce(Arc<dyn Kernel>) -> F + Send + 'static,
    ) -> Result<T, JobError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, KernelError>> + Send + 'static,
    {
        let until = Instant::now() + bound;
        let Ok(turn) = timeout_at(until, self.turns.acquire(id)).await else {
            let running = lock(&self.running).get(&id).map(|job| (job.step, job.since.elapsed()));
            return Err(JobError::NotBegun { bound, running });
        };
        match timeout_at(until, self.begin(id, step, turn, call)).await {
            Ok(result) => Ok(ended(result, id, step)?),
            Err(_) => Err(JobError::NoAnswer(bound)),
        }
    }

    /// Unpins an id's programs.
    pub async fn remove_programs(self: &Arc<Self>, id: EndpointId) -> Result<(), JobError> {
        let (step, bound) = (UndoStep::RemovePrograms.name(), UndoStep::RemovePrograms.deadline_ms());
        let call = move |kernel: Arc<dyn Kernel>| async move { kernel.remove_programs(id).await };
        self.bounded(id, step, Duration::from_millis(bound), call).await.map(drop)
    }

    fn begin<T, F>(
        self: &Arc<Self>,
        id: EndpointId,
        step: &'static str,
        turn: OwnedMutexGuard<()>,
        call: impl FnOnce(Arc<dyn Kernel>) -> F,
    ) -> JoinHandle<Result<T, KernelError>>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, KernelError>> + Send + 'static,
    {
        let working = self.working_on(id);
        let running = Running { jobs: Arc::clone(self), id };
        lock(&self.running).insert(id, Job { step, since: Instant::now() });
        let call = call(Arc::clone(&self.kernel));
        let job = async move {
            // Dropped in this order: the entry is removed before the turn passes on.
            let _held = (running, turn, working);
            call.await
        };
        self.tasks.spawn(job.in_current_span())
    }
}

/// See [`Jobs::working_on`].
pub struct InFlight {
    jobs: Arc<Jobs>,
    id: EndpointId,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut in_flight = lock(&self.jobs.in_flight);
        if let Some(works) = in_flight.get_mut(&self.id) {
            *works -= 1;
            if *works == 0 {
                in_flight.remove(&self.id);
            }
        }
    }
}

struct Running {
    jobs: Arc<Jobs>,
    id: EndpointId,
}

impl Drop for Running {
    fn drop(&mut self) {
        lock(&self.jobs.running).remove(&self.id);
    }
}

fn ended<T>(
    joined: Result<Result<T, KernelError>, tokio::task::JoinError>,
    id: EndpointId,
    step: &'static str,
) -> Result<T, KernelError> {
    joined.unwrap_or_else(|error| {
        let (subject, cause) = (format!("endpoint {id}"), error.to_string());
        Err(KernelError { operation: step, subject, cause, kind: KernelErrorKind::Other })
    })
}
