//! This node's object: taint, condition and annotations follow the agent's state, also after other writers. Events
//! report refused policies and agent problems.

pub mod events;
pub mod plan;

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout},
};

use self::{
    events::Events,
    plan::{GRACE, Wanted},
};
use crate::{
    api::{Api, Failure, Merge},
    metrics::Metrics,
    objects::node::Node,
    producer::AgentState,
    watch::backoff::{Delays, spread},
};

/// Between two reconciliations without a change.
const PERIOD: Duration = Duration::from_secs(120);
/// Collects changes, and bounds the requests of a conflict with another writer.
const QUIET: Duration = Duration::from_millis(200);

/// For the Events of one reconciliation: meanwhile no change of the agent's state is followed.
const EVENTS: Duration = Duration::from_secs(5);

/// The task.
#[derive(Debug)]
pub struct Reconciler {
    api: Arc<Api>,
    name: String,
    state: watch::Receiver<AgentState>,
    /// Counts changes of the object.
    own: watch::Receiver<u64>,
    events: Events,
    metrics: Arc<Metrics>,
}

/// How long each state has held; zero if it does not hold.
#[derive(Debug, Clone, Copy)]
struct Ages {
    unsettled: Duration,
    without_routes: Duration,
    settled: Duration,
}

impl Reconciler {
    /// For the node with this name.
    #[must_use]
    pub fn new(
        api: Arc<Api>,
        name: String,
        state: watch::Receiver<AgentState>,
        own: watch::Receiver<u64>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { api, events: Events::new(name.clone()), name, state, own, metrics }
    }

    /// Follows the agent until the state's sender is dropped.
    pub async fn run(mut self) {
        let mut delays = Delays::default();
        // Since the agent was last settled, or this process started.
        let (mut unsettled, mut was_settled) = (Instant::now(), false);
        let (mut without_routes, mut settled): (Option<Instant>, Option<Instant>) = (None, None);
        loop {
            self.own.mark_unchanged();
            let state = self.state.borrow_and_update().clone();
            // The preceding wait began in the earlier state.
            if state.is_settled() || was_settled {
                unsettled = Instant::now();
            }
            was_settled = state.is_settled();
            settled = was_settled.then(|| settled.unwrap_or_else(Instant::now));
            let lacks_routes = was_settled && state.condition("RoutesInForce").is_err();
            without_routes = lacks_routes.then(|| without_routes.unwrap_or_else(Instant::now));
            let age = |since: Option<Instant>| since.map_or(Duration::ZERO, |since| since.elapsed());
            let ages =
                Ages { unsettled: unsettled.elapsed(), without_routes: age(without_routes), settled: age(settled) };
            let next = match self.reconcile(&state, ages).await {
                Ok(()) => {
                    delays.reset();
                    spread(PERIOD)
                }
                // Another writer won.
                Err(failure) if failure.code() == Some(409) => delays.next(None),
                Err(failure) => {
                    let delay = delays.next(failure.retry_after());
                    tracing::warn!(?delay, "this node's object does not follow the agent: {failure}");
                    delay
                }
            };
            // Wakes at the end of the grace period.
            let grace = without_routes.unwrap_or(unsettled) + GRACE;
            let until = Instant::now() + next;
            let has_grace = lacks_routes || !state.is_settled();
            let until = if !has_grace || grace < Instant::now() { until } else { until.min(grace) };
            tokio::select! {
                () = sleep_until(until) => {}
                changed = self.state.changed() => if changed.is_err() { return },
                changed = self.own.changed() => if changed.is_err() { return },
            }
            sleep(QUIET).await;
        }
    }

    async fn reconcile(&mut self, state: &AgentState, ages: Ages) -> Result<(), Failure> {
        let path = format!("/api/v1/nodes/{}", self.name);
        let node: Node = self.api.object(&path).await?;
        let mut wanted = Wanted::new(state, ages.unsettled, ages.without_routes);
        if ages.settled < GRACE {
            // A just started agent reports its health endpoint later.
            wanted.annotations.retain(|(_, addresses)| addresses.is_some());
        }
        // The taint comes before the condition and goes after it: schedulers read both, and a webhook may refuse the
        // status.
        let comes = wanted.taint == Some(true);
        if comes {
            self.patch_object(&path, &wanted, &node).await?;
        }
        if let Some(status) = wanted.status_patch(&node, Timestamp::now()) {
            self.api.patch(&format!("{path}/status"), Merge::Strategic, &status).await?;
            self.metrics.node_patch();
            if !comes && wanted.patch(&node).is_some() {
                // The status patch changed the version.
                let node = self.api.object(&path).await?;
                self.patch_object(&path, &wanted, &node).await?;
            }
        } else if !comes {
            self.patch_object(&path, &wanted, &node).await?;
        }
        match timeout(EVENTS, self.events.report(&self.api, &node, state)).await {
            Ok(reported) => reported,
            Err(_) => {
                tracing::warn!("Events are not created within {EVENTS:?}; they are tried again");
                Ok(())
            }
        }
    }

    async fn patch_object(&self, path: &str, wanted: &Wanted, node: &Node) -> Result<(), Failure> {
        let Some(patch) = wanted.patch(node) else { return Ok(()) };
        self.api.patch(path, Merge::Json, &patch).await?;
        self.metrics.node_patch();
        tracing::info!(taint = ?wanted.taint, "this node's object follows the agent");
        Ok(())
    }
}
