//! The task that owns an endpoint.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;
use wharf_api::{LogStatus, StepError};
use wharf_core::{
    endpoint::EndpointRecord,
    plan::CreateStep,
    state::{Action, Event, Level, State},
};
use wharf_kit::{
    clock,
    telemetry::operation::{Kind, OpId},
};

use crate::{
    endpoint::{
        build,
        delete::teardown,
        error::CreateCause,
        undo::{self, Failed},
        unfinished,
    },
    node::{
        endpoint::{Command, Done, Handle, Shared, Torn},
        error::{BuildError, CommandError},
        leftovers::{Remains, Unfinished},
        lifecycle::Lifecycle,
        prepared::ProgramSet,
    },
};

const REGENERATION: &str = "regeneration";

const LABELS: (&str, &str) = ("its labels", "they are set (PATCH), or --labels-timeout-ms has passed");

pub(super) const POD_ROW: (&str, &str) =
    ("its labels, from the row of its pod in the cluster feed", "a producer sends the row, or labels are set (PATCH)");

/// Owns an endpoint.
pub struct EndpointTask {
    /// Shared part of the agent.
    pub life: Arc<Lifecycle>,
    /// State for other tasks.
    pub shared: Arc<Shared>,
    /// Set by a delete.
    pub cancel: CancellationToken,
    /// From a prepared set.
    pub prepared: bool,
    unused: Option<ProgramSet>,
    left: Vec<StepError>,
    remains: Option<Remains>,
    /// After a restart: keeps programs that equal the desired ones.
    pub keep_programs: bool,
    handle: Handle,
    mailbox: mpsc::Receiver<Command>,
    queued: Option<(Level, Instant)>,
    waiting: Vec<Done>,
    torn: Option<Box<Torn>>,
}

impl EndpointTask {
    /// For a registered endpoint.
    #[must_use]
    pub fn new(life: Arc<Lifecycle>, handle: &Handle, mailbox: mpsc::Receiver<Command>, prepared: bool) -> Self {
        Self {
            life,
            shared: Arc::clone(&handle.shared),
            cancel: handle.cancel.clone(),
            prepared,
            unused: None,
            left: Vec::new(),
            remains: None,
            keep_programs: false,
            handle: handle.clone(),
            mailbox,
            queued: None,
            waiting: Vec::new(),
            torn: None,
        }
    }

    /// The endpoint's handle.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Runs the actions of a state change; counts and logs a rejected transition.
    pub fn transition(&mut self, event: Event) -> bool {
        let now = clock::monotonic_ms();
        let step = self.shared.read(|v| v.fsm.step_with_jitter(event, now, rand::random()));
        match step {
            Ok((fsm, actions)) => {
                let state = fsm.state;
                let wait = fsm.waits_for(now);
                self.shared.update(|v| {
                    let labels = if self.life.endpoints.pods.expects_row(&v.record) { POD_ROW } else { LABELS };
                    let wait = wait.or(v.record.awaits_labels.then_some(labels)).unwrap_or_default();
                    if v.fsm.state != state {
                        v.status.since_unix_ms = clock::unix_ms();
                    }
                    v.status.failures = fsm.failures;
                    (v.status.waits_for, v.status.ends_when) = (wait.0.to_owned(), wait.1.to_owned());
                    v.fsm = fsm;
                });
                self.shared.log(LogStatus::Ok, event.name(), state.as_str());
                for action in actions {
                    self.act(action, now);
                }
                true
            }
            Err(refused) => {
                self.life.telemetry.metrics.refused_transitions.fetch_add(1, Ordering::Relaxed);
                self.shared.log(LogStatus::Warning, event.name(), refused.to_string());
                false
            }
        }
    }

    fn act(&mut self, action: Action, now_ms: u64) {
        match action {
            Action::QueueBuild { level, not_before_ms } => {
                let wait = Duration::from_millis(not_before_ms.saturating_sub(now_ms));
                self.queued = Some((level, Instant::now() + wait));
            }
            Action::CancelBuild => self.queued = None,
            Action::RunDelete | Action::PublishRemoval => {}
        }
    }

    /// Runs until the endpoint is gone or the agent ends. Work is boxed: each endpoint at rest would hold its space.
    pub async fn run(mut self) {
        self.queued = self.queued.filter(|_| self.shared.read(|v| v.fsm.state) != State::Ready);
        let life = Arc::clone(&self.life);
        Box::pin(self.catch_up()).await;
        let mut labels_due = self.labels_due();
        loop {
            let queued = self.queued;
            let permit = async {
                match queued {
                    Some((_, not_before)) => {
                        tokio::time::sleep_until(not_before).await;
                        // Here, so that the task still answers commands.
                        life.policy.started().await;
                        life.endpoints.admission.build_permits.acquire().await
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = life.tasks.halt.cancelled() => return,
                command = self.mailbox.recv() => match command {
                    Some(command) => if Box::pin(self.on_command(command)).await { return },
                    None => return,
                },
                () = tokio::time::sleep_until(labels_due.unwrap_or_else(Instant::now)), if labels_due.is_some() => {
                    labels_due = Box::pin(self.on_labels_due()).await;
                }
                permit = permit, if queued.is_some() => {
                    if let (Ok(_permit), Some((level, _))) = (permit, self.queued.take()) {
                        let span = self.handle.span(OpId::next(Kind::Regenerate));
                        Box::pin(self.on_permit(level)).instrument(span).await;
                    }
                }
            }
        }
    }

    async fn on_permit(&mut self, level: Level) {
        if !self.transition(Event::BuildStarted) {
            return;
        }
        let life = Arc::clone(&self.life);
        let _guard = life.endpoints.jobs.working_on(self.handle.id);
        let desired = self.shared.read(|v| v.status.desired_revision);
        let started = Instant::now();
        let run = life.tasks.controllers.begin_for(self.handle.id, REGENERATION);
        let result = build::build(&life, &self.shared, &self.cancel, level, self.keep_programs).await;
        self.keep_programs = false;
        life.telemetry.metrics.regeneration(level, started.elapsed(), result.is_ok());
        if result.is_ok() || !self.cancel.is_cancelled() {
            run.end(result.clone());
        }
        match result {
            Ok(()) => {
                self.shared.update(|v| {
                    v.status.phase = String::new();
                    v.status.last_error = None;
                    v.status.regenerations += 1;
                    v.status.realized_revision = desired;
                });
                self.transition(Event::BuildSucceeded);
                let what = format!("{level} in {:?}", started.elapsed());
                life.telemetry.monitor.agent(Some(self.handle.id), "endpoint-regenerated", what);
                if self.queued.is_none() {
                    self.answer_waiting(&Ok(()));
                }
            }
            Err(_) if self.cancel.is_cancelled() => {
                self.shared.update(|v| v.status.phase = String::new());
                self.transition(Event::BuildFailed);
                self.answer_waiting(&Err(CommandError::Deleted));
            }
            Err(error) => {
                tracing::warn!(endpoint = self.handle.id.get(), epoch = self.handle.epoch.0, "regenerate: {error}");
                self.shared.update(|v| {
                    v.status.phase = String::new();
                    v.status.last_error = Some(error.to_string());
                });
                self.shared.log(LogStatus::Failure, "build", error.to_string());
                self.transition(Event::BuildFailed);
                let again = self.shared.read(|v| v.fsm.not_before_ms).saturating_sub(clock::monotonic_ms());
                life.tasks.controllers.plan_for(self.handle.id, REGENERATION, Duration::from_millis(again));
                life.telemetry.monitor.agent(Some(self.handle.id), "endpoint-regeneration-failed", error.to_string());
                self.answer_waiting(&Err(error.into()));
            }
        }
    }

    fn answer_waiting(&mut self, result: &Result<(), CommandError>) {
        for done in self.waiting.drain(..) {
            done.send(result.clone()).ok(); // the client may have gone
        }
    }

    async fn on_command(&mut self, command: Command) -> bool {
        match command {
            Command::Regenerate(level, done) => {
                self.keep_programs &= level != Level::Datapath;
                self.request(level, done);
            }
            Command::Trace(on, done) => {
                self.shared.update(|v| v.trace = on);
                self.request(Level::Policy, done);
            }
            Command::Edit(edit, done) => self.on_edit(*edit, done).await,
            Command::PodRow(done) => self.on_pod_row(done).await,
            Command::Mtu(mtu, done) => drop(done.send(self.set_mtu(mtu).await)),
            Command::Abandon => self.abandon(),
            Command::Teardown(span, reply) => {
                self.answer_waiting(&Err(CommandError::Deleted));
                // The kernel may have refused the release.
                let refused = |torn: &Torn| torn.release.as_ref().and_then(|r| r.peek()).is_some_and(Result::is_err);
                let torn = match self.torn.take() {
                    Some(torn) if torn.clean && !refused(&torn) => torn,
                    _ => {
                        if self.shared.read(|v| v.fsm.state) != State::Disconnecting {
                            self.transition(Event::DeleteRequested);
                        }
                        Box::new(teardown(&self.life, &self.shared).instrument(span).await)
                    }
                };
                self.torn = Some(torn.clone());
                reply.send(*torn).ok(); // a deleter that went away left the intent; the next delete resumes
            }
            Command::Retire => return true,
            Command::Finish(span, reply) => {
                let _within = span.entered();
                self.transition(Event::DeleteFinished);
                self.gone();
                reply.send(()).ok(); // the deleter may have gone; the record is removed
                return true;
            }
        }
        false
    }

    fn abandon(&mut self) {
        let state = self.shared.read(|v| v.fsm.state);
        if self.cancel.is_cancelled() || state == State::Disconnecting || !self.transition(Event::NetnsGone) {
            return;
        }
        self.answer_waiting(&Err(CommandError::Deleted));
        let (grace, id) = (self.life.config.gone_grace, self.handle.id);
        self.shared.update(|v| {
            v.status.last_error = None;
            v.status.waits_for = "the runtime's DEL: its network namespace and its link are gone".into();
            v.status.ends_when = format!(
                "a DEL, `wharf endpoint delete {id}`, or {} s without either, when the agent deletes it (--gone-grace-ms)",
                grace.as_secs_f64()
            );
        });
        let text = "the network namespace and the link are gone, and no DEL has come";
        tracing::info!(endpoint = id.get(), epoch = self.handle.epoch.0, "{text}; waits {grace:?} for one");
        self.shared.log(LogStatus::Warning, "netns-gone", text);
        let attachment = self.shared.read(|v| v.record.attachment.to_string());
        self.life.telemetry.monitor.agent(Some(id), "endpoint-netns-gone", format!("{attachment}: {text}"));
    }

    pub(super) fn request(&mut self, level: Level, done: Done) {
        if self.transition(Event::BuildRequested(level)) {
            // Bounded by the limit on clients.
            self.waiting.push(done);
        } else {
            let state = self.shared.read(|v| v.fsm.state);
            done.send(Err(CommandError::Refused { command: "regenerate", state })).ok();
        }
    }

    /// The link's MTU first: the record's shows whether the container changed it.
    async fn set_mtu(&mut self, mtu: u32) -> Result<(), CommandError> {
        let state = self.shared.read(|v| v.fsm.state);
        if state == State::Disconnecting || state.is_terminal() {
            return Err(CommandError::Refused { command: "change MTU", state });
        }
        let life = Arc::clone(&self.life);
        let _guard = life.endpoints.jobs.working_on(self.handle.id);
        let old = self.shared.read(|v| v.record.clone());
        let step = CreateStep::EnsureConnected;
        let bound = Duration::from_millis(step.deadline_ms());
        let asked = old.clone();
        let jobs = &life.endpoints.jobs;
        let changed =
            jobs.bounded(old.id, "change-mtu", bound, move |k| async move { k.ensure_mtu(&asked, mtu).await });
        let container_mtu = changed.await.map_err(|why| BuildError::Step(step, why))?;
        let record = EndpointRecord { mtu, container_mtu, ..old.clone() };
        let change = wharf_core::store::Change::PutEndpoint(Box::new(record.clone()));
        self.life.store.commit(vec![change]).await?;
        self.shared.update(|v| v.record = record);
        self.shared.log(LogStatus::Ok, "change-mtu", format!("MTU {} -> {mtu}", old.mtu));
        Ok(())
    }

    fn gone(&mut self) {
        self.mailbox.close();
        self.life.endpoints.registry.remove(self.handle.id);
        self.life.tasks.controllers.forget(self.handle.id);
        self.life.endpoints.registry.free_id(self.handle.id);
        let what = self.shared.read(|v| v.record.attachment.to_string());
        self.life.telemetry.monitor.agent(Some(self.handle.id), "endpoint-deleted", what);
    }

    pub(super) async fn undo_create(&mut self, begun: &[CreateStep], cause: CreateCause) -> CreateCause {
        if begun.is_empty() && std::mem::take(&mut self.prepared) {
            self.unused = Some(self.shared.read(|v| ProgramSet {
                id: v.record.id,
                container_mac: v.record.container_mac,
                host_mac: v.record.host_mac,
            }));
        }
        let Failed { answer, errors, remains } =
            undo::undo(&self.life, &self.shared, self.prepared, begun, cause).await;
        (self.left, self.remains) = (errors, remains);
        self.transition(Event::CreateFailed);
        answer
    }

    /// Pending deletes get the undo's result.
    pub async fn end_after_failed_create(mut self) {
        self.mailbox.close();
        self.life.endpoints.registry.remove(self.handle.id);
        self.life.tasks.controllers.forget(self.handle.id);
        match (self.remains.take(), self.unused.take()) {
            (None, None) => self.life.endpoints.registry.free_id(self.handle.id),
            (None, Some(set)) => self.life.endpoints.prepared.give_back(set),
            (Some(remains), _) => {
                let left = Unfinished::Create(Box::new(remains));
                unfinished::keep(&self.life.endpoints.leftovers.unfinished, self.handle.id, left);
            }
        }
        while let Some(command) = self.mailbox.recv().await {
            match command {
                Command::Teardown(_, reply) => {
                    let record = self.shared.read(|v| v.record.clone());
                    let torn = Torn { record, errors: self.left.clone(), clean: self.left.is_empty(), release: None };
                    drop(reply.send(torn));
                }
                Command::Finish(_, reply) => drop(reply.send(())),
                Command::Retire | Command::Abandon => {}
                Command::Regenerate(_, done)
                | Command::Edit(_, done)
                | Command::PodRow(done)
                | Command::Trace(_, done)
                | Command::Mtu(_, done) => {
                    drop(done.send(Err(CommandError::NotCreated)));
                }
            }
        }
    }
}
