//! Kernel calls for an endpoint, one at a time.
//!
//! A kernel call cannot be cancelled: it continues after its bound. If the next step ran beside it, a late load could
//! pin programs that a delete had just unpinned. Each call therefore runs to its end as its own task and holds the
//! turn of its endpoint id. The next call for that id waits for the turn within its own bound; its error names the
//! running call. The id is in flight meanwhile, so the audit leaves it out. A delete that failed this way is resumed
//! later.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, Weak},
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

use crate::{node::error::JobError, sync::lock};

/// Endpoint ids in flight, and the kernel calls made for them.
pub struct Jobs {
    kernel: Arc<dyn Kernel>,
    /// Runs the calls; awaited at a stop.
    tasks: TaskTracker,
    /// Turns of the ids with a running call. A turn is held across the call by design, so the next call waits. An
    /// entry lives as long as a task holds or awaits the turn.
    turns: Mutex<BTreeMap<EndpointId, Weak<Turn>>>,
    running: Mutex<BTreeMap<EndpointId, Job>>,
    /// Ids in flight with the number of guards: a delete may start before a build has ended.
    in_flight: Mutex<BTreeMap<EndpointId, u32>>,
}

type Turn = tokio::sync::Mutex<()>;

/// A kernel call under way.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// Name of the step.
    pub step: &'static str,
    /// When it began.
    pub since: Instant,
}

impl Jobs {
    /// A table without calls. `tasks`: where calls run.
    #[must_use]
    pub fn new(kernel: Arc<dyn Kernel>, tasks: TaskTracker) -> Arc<Self> {
        let (turns, running, in_flight) = (Mutex::default(), Mutex::default(), Mutex::default());
        Arc::new(Self { kernel, tasks, turns, running, in_flight })
    }

    /// Marks an id as in flight until the guard is dropped.
    #[must_use]
    pub fn working_on(self: &Arc<Self>, id: EndpointId) -> InFlight {
        *lock(&self.in_flight).entry(id).or_default() += 1;
        InFlight { jobs: Arc::clone(self), id }
    }

    /// True while a create, build, delete or refill works on the id.
    #[must_use]
    pub fn is_in_flight(&self, id: EndpointId) -> bool {
        lock(&self.in_flight).contains_key(&id)
    }

    /// Ids in flight (create, build, delete, refill): the audit leaves them out.
    #[must_use]
    pub fn in_flight(&self) -> BTreeSet<EndpointId> {
        lock(&self.in_flight).keys().copied().collect()
    }

    /// The calls that are under way, by endpoint id.
    #[must_use]
    pub fn running(&self) -> BTreeMap<EndpointId, Job> {
        lock(&self.running).clone()
    }

    async fn turn(&self, id: EndpointId) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = lock(&self.turns);
            let there = turns.get(&id).and_then(Weak::upgrade);
            there.unwrap_or_else(|| {
                let turn = Arc::new(Turn::default());
                turns.retain(|_, turn| turn.strong_count() > 0);
                turns.insert(id, Arc::downgrade(&turn));
                turn
            })
        };
        turn.lock_owned().await
    }

    /// Runs a kernel call as the only one for its endpoint id. Once begun, the call runs to its end, even if the
    /// returned future is dropped.
    ///
    /// # Errors
    /// The call's own.
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
        let turn = self.turn(id).await;
        ended(self.begin(id, step, turn, call).await, id, step)
    }

    /// [`Self::run`] with a bound on the wait.
    ///
    /// # Errors
    /// The error of the call, or a timeout: the call did not end in time, or another call for the id still ran.
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
        let Ok(turn) = timeout_at(until, self.turn(id)).await else {
            let running = lock(&self.running).get(&id).map(|job| (job.step, job.since.elapsed()));
            return Err(JobError::NotBegun { bound, running });
        };
        match timeout_at(until, self.begin(id, step, turn, call)).await {
            Ok(result) => Ok(ended(result, id, step)?),
            Err(_) => Err(JobError::NoAnswer(bound)),
        }
    }

    /// Unpins the programs of an id without an endpoint.
    ///
    /// # Errors
    /// As [`Self::bounded`].
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
            // Dropped in reverse: the turn passes on when nothing tells of this call any more.
            let _held = (running, turn, working);
            call.await
        };
        self.tasks.spawn(job.in_current_span())
    }
}

/// Guard of an id in flight; see [`Jobs::working_on`].
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

/// Removes the entry of a running call when the call ends, also by a panic.
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
