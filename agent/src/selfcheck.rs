//! The self-check: compares the verdicts of an endpoint's pinned programs on test packets with the desired state.
//!
//! Each endpoint is checked once per interval. A mismatch that a second check confirms raises an alarm, whose begin and
//! end are reported once, and which requests one regeneration of the datapath.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc::error::TrySendError, oneshot},
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use wharf_api::{ComponentStatus, Health, LogStatus, SelfCheck, SelfCheckAlarm, SelfCheckCase};
use wharf_core::{
    ids::EndpointId,
    kernel::{ConfigSpec, Kernel, KernelError, KernelErrorKind},
    selfcheck::{Case, CaseResult, Judged, Kind, cases, policy_cases},
    state::{Level, State},
};
use wharf_kit::clock;

use crate::{
    config::AgentConfig,
    endpoint::build::desired_config,
    node::{
        endpoint::{Command, Handle, View},
        endpoints::Endpoints,
        lifecycle::Lifecycle,
        self_checks::{Lane, PACE, SelfChecks},
        telemetry::Telemetry,
    },
    policy::{Policy, Probes},
};

/// Controller name.
pub const CONTROLLER: &str = "endpoint-selfcheck";
const GATHER: Duration = Duration::from_millis(500);
const LOOKS: usize = 4;
const PEERS: usize = 16;
/// A batch normally takes a millisecond.
const BATCH_LIMIT: Duration = Duration::from_secs(5);
const TURN_LIMIT: Duration = Duration::from_secs(2);
/// Below the limit of a controller's run.
const REGENERATION_LIMIT: Duration = Duration::from_secs(30);

/// Why a check failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The kernel refused to run packets.
    #[error("check endpoint {0}: {1}")]
    Kernel(String, #[source] KernelError),
    /// No answer in time.
    #[error("check endpoint {0}: no answer within {BATCH_LIMIT:?}")]
    TimedOut(String),
    /// Empty answer.
    #[error("check endpoint {0}: the kernel's answer is empty")]
    Empty(EndpointId),
}

/// Runs until the agent stops.
pub async fn watch(life: Arc<Lifecycle>, results: Arc<SelfChecks>) {
    let (checker, tasks) = (Checker::new(&life, &results), &life.tasks);
    let interval = life.config.selfcheck_interval;
    loop {
        let round = Instant::now();
        let handles = life.endpoints.registry.list();
        results.keep(&handles.iter().map(|h| (h.id, h.epoch)).collect());
        life.telemetry.metrics.self_checks_failing(results.failing());
        // One more pause separates the rounds.
        let pause = (interval / u32::try_from(handles.len() + 1).unwrap_or(u32::MAX)).max(PACE);
        // Batched: wake-ups cost more than checks.
        let together = usize::try_from(GATHER.as_millis() / pause.as_millis().max(1)).unwrap_or(1).max(1);
        for handles in handles.chunks(together) {
            let pause = pause * u32::try_from(handles.len()).unwrap_or(1);
            tokio::select! {
                () = tasks.stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            let run = tasks.controllers.begin(CONTROLLER);
            let result = checker.visit_each(handles).await;
            if let Err(why) = &result {
                tracing::warn!(controller = CONTROLLER, "{why}");
            }
            run.end(result);
            tasks.controllers.plan(CONTROLLER, interval, pause);
        }
        tasks.controllers.plan(CONTROLLER, interval, (round + interval).saturating_duration_since(Instant::now()));
        tokio::select! {
            () = tasks.stop.cancelled() => return,
            () = tokio::time::sleep_until(round + interval) => {}
        }
    }
}

/// A check's context.
pub struct Checker<'a> {
    endpoints: &'a Endpoints,
    kernel: &'a dyn Kernel,
    policy: &'a Policy,
    config: &'a AgentConfig,
    telemetry: &'a Telemetry,
    stop: &'a CancellationToken,
    results: &'a SelfChecks,
}

struct Question {
    handle: Handle,
    view: View,
    peer: Option<(Handle, View)>,
    cases: Arc<[Case]>,
    rules: u64,
}

type Answer = Result<Vec<CaseResult>, KernelError>;

impl<'a> Checker<'a> {
    /// Stores results in `results`.
    pub fn new(life: &'a Lifecycle, results: &'a SelfChecks) -> Self {
        let Lifecycle { config, kernel, policy, endpoints, telemetry, tasks, .. } = life;
        Self { endpoints, kernel: &**kernel, policy, config, telemetry, stop: &tasks.stop, results }
    }

    async fn visit_each(&self, handles: &[Handle]) -> Result<(), CheckError> {
        let _turn = self.results.turn(Lane::Background).await;
        let mut questions = Vec::with_capacity(handles.len());
        for handle in handles {
            questions.extend(self.question(handle).await);
        }
        if questions.is_empty() {
            return Ok(());
        }
        let mut outcome = Ok(());
        let answers = self.put(&questions).await?;
        for (question, answer) in questions.into_iter().zip(answers) {
            let handle = question.handle.clone();
            match self.judge(question, answer, Lane::Background).await {
                Ok(None) => {}
                Ok(Some(found)) if found.iter().all(|j| j.same) => {
                    self.telemetry.metrics.self_check();
                    self.note(&handle, &found);
                }
                Ok(Some(_)) | Err(_) => outcome = self.visit(&handle).await.and(outcome),
            }
        }
        outcome
    }

    /// Checks an endpoint, and raises or ends its alarm.
    pub async fn visit(&self, handle: &Handle) -> Result<(), CheckError> {
        let Some(found) = self.check(handle, Lane::Background).await? else { return Ok(()) };
        if self.note(handle, &found) {
            return Ok(());
        }
        self.raise_alarm(handle, &found);
        if let Err(why) = self.policy.put_right().await {
            tracing::warn!(endpoint = handle.id.get(), "self-check: write the rules of policy again: {why}");
        }
        if self.mend(handle).await
            && let Some(found) = self.check(handle, Lane::Background).await?
        {
            self.note(handle, &found);
        }
        Ok(())
    }

    /// Checks for a client, without pacing; without a turn, returns the last result.
    pub async fn ask(&self, handle: &Handle, lane: Lane) -> SelfCheck {
        let error = match timeout(TURN_LIMIT, self.check(handle, lane)).await {
            Ok(Ok(Some(found))) => {
                self.note(handle, &found);
                None
            }
            Ok(Ok(None)) => None,
            Ok(Err(why)) => Some(why.to_string()),
            Err(_) => Some(format!("no turn within {TURN_LIMIT:?}: others ask too; this is what was found last")),
        };
        SelfCheck { error, ..self.results.last(handle.id, handle.epoch) }
    }

    /// Until two runs agree. `None` if they never do, or the endpoint is in flight.
    async fn check(&self, handle: &Handle, lane: Lane) -> Result<Option<Vec<Judged>>, CheckError> {
        let mut before: Option<BTreeSet<String>> = None;
        for _ in 0..LOOKS {
            let Some(found) = self.look(handle, lane).await? else { return Ok(None) };
            let amiss: BTreeSet<String> = found.iter().filter(|j| !j.same).map(|j| j.name.clone()).collect();
            if amiss.is_empty() || before.as_ref() == Some(&amiss) {
                self.telemetry.metrics.self_check();
                return Ok(Some(found));
            }
            before = Some(amiss);
        }
        Ok(None)
    }

    async fn question(&self, handle: &Handle) -> Option<Question> {
        let view = self.settled(handle)?;
        let peer = self.peer_of(handle.id);
        let desired = self.desired(&view);
        let mut cases = cases(&view.record, &desired, peer.as_ref().map(|(_, v)| &v.record));
        let Probes { probes, stamp: rules } = self.policy.probes(&view.record).await;
        cases.extend(policy_cases(&view.record, &desired, &probes));
        Some(Question { handle: handle.clone(), view, peer, cases: cases.into(), rules })
    }

    fn desired(&self, view: &View) -> ConfigSpec {
        desired_config(self.config, &self.telemetry.trace_all, &view.record, view.trace)
    }

    async fn put(&self, questions: &[Question]) -> Result<Vec<Answer>, CheckError> {
        let checks: Vec<_> = questions.iter().map(|q| (q.handle.id, Arc::clone(&q.cases))).collect();
        let ids = || questions.iter().map(|q| q.handle.id.to_string()).collect::<Vec<_>>().join(", ");
        match timeout(BATCH_LIMIT, self.kernel.observe_verdicts(&checks)).await {
            Ok(answers) => answers.map_err(|e| CheckError::Kernel(ids(), e)),
            Err(_) => Err(CheckError::TimedOut(ids())),
        }
    }

    async fn look(&self, handle: &Handle, lane: Lane) -> Result<Option<Vec<Judged>>, CheckError> {
        let turn = self.results.turn(lane).await;
        let Some(question) = self.question(handle).await else { return Ok(None) };
        let answer = self.put(std::slice::from_ref(&question)).await?.pop();
        drop(turn);
        match answer {
            Some(answer) => self.judge(question, answer, lane).await,
            None => Err(CheckError::Empty(handle.id)),
        }
    }

    async fn judge(&self, asked: Question, answer: Answer, lane: Lane) -> Result<Option<Vec<Judged>>, CheckError> {
        let Question { handle, view, peer, cases, rules } = asked;
        if !self.unchanged(&handle, &view) || self.policy.stamp().await != rules {
            return Ok(None);
        }
        let results = match answer {
            Err(e) if matches!(e.kind, KernelErrorKind::NotFound | KernelErrorKind::Conflict) => {
                let (name, expected) = ("maps".to_owned(), "pinned, of this version's layout".to_owned());
                return Ok(Some(vec![Judged { name, expected, got: e.to_string(), same: false }]));
            }
            Err(e) => return Err(CheckError::Kernel(handle.id.to_string(), e)),
            Ok(results) => results,
        };
        let judged: Vec<(Kind, Judged)> = cases.iter().zip(&results).map(|(c, r)| (c.kind, c.judge(r))).collect();
        let peer_amiss = judged.iter().any(|(kind, j)| *kind == Kind::ToPeer && !j.same);
        let counts = match peer {
            Some((peer, view)) if peer_amiss => self.is_well(peer, view, lane).await,
            _ => true,
        };
        Ok(Some(judged.into_iter().filter(|(kind, _)| counts || *kind != Kind::ToPeer).map(|(_, j)| j).collect()))
    }

    /// Whether the peer passes its own cases; otherwise it may cause the mismatch.
    async fn is_well(&self, handle: Handle, view: View, lane: Lane) -> bool {
        let alone = Question {
            cases: cases(&view.record, &self.desired(&view), None).into(),
            handle,
            view,
            peer: None,
            rules: 0,
        };
        let _turn = self.results.turn(lane).await;
        let answer = self.put(std::slice::from_ref(&alone)).await;
        let all_same = |results: &[CaseResult]| alone.cases.iter().zip(results).all(|(c, r)| c.judge(r).same);
        matches!(answer.as_deref(), Ok([Ok(results)]) if all_same(results))
            && self.unchanged(&alone.handle, &alone.view)
    }

    fn settled(&self, handle: &Handle) -> Option<View> {
        let view = handle.shared.view();
        let quiet = view.committed && view.fsm.state == State::Ready && !self.endpoints.jobs.is_in_flight(handle.id);
        quiet.then_some(view)
    }

    fn unchanged(&self, handle: &Handle, before: &View) -> bool {
        handle.shared.read(|v| v.is_as(before))
            && !self.endpoints.jobs.is_in_flight(handle.id)
            && self.endpoints.registry.get(handle.id).is_some_and(|now| now.epoch == handle.epoch)
    }

    fn peer_of(&self, id: EndpointId) -> Option<(Handle, View)> {
        let mut at = id;
        for _ in 0..PEERS {
            let handle = self.endpoints.registry.next_after(at).filter(|h| h.id != id)?;
            if let Some(view) = self.settled(&handle) {
                return Some((handle, view));
            }
            at = handle.id;
        }
        None
    }

    /// True for a match, which ends an alarm.
    fn note(&self, handle: &Handle, found: &[Judged]) -> bool {
        let well = found.iter().all(|j| j.same);
        let case = |j: &Judged| SelfCheckCase {
            name: j.name.clone(),
            expected: j.expected.clone(),
            got: j.got.clone(),
            ok: j.same,
        };
        self.results.update(handle, |row| {
            row.seen.state = if well { Health::Ok } else { Health::Failing };
            row.seen.checked_unix_ms = Some(clock::unix_ms());
            row.seen.cases = found.iter().map(case).collect();
        });
        if well {
            self.end_alarm(handle);
        }
        well
    }

    fn raise_alarm(&self, handle: &Handle, found: &[Judged]) {
        let begins = self.results.update(handle, |row| {
            let begins = row.seen.alarm.is_none();
            if begins {
                row.seen.alarm = Some(SelfCheckAlarm { since_unix_ms: clock::unix_ms(), done: String::new() });
                row.asked = false;
            }
            begins
        });
        if begins {
            self.telemetry.metrics.self_check_alarm();
            self.telemetry.metrics.self_checks_failing(self.results.failing());
            let message = words(found);
            tracing::error!(endpoint = handle.id.get(), epoch = handle.epoch.0, "self-check: {message}");
            handle.shared.log(LogStatus::Failure, "self-check", message.clone());
            self.telemetry.monitor.agent(Some(handle.id), "self-check-alarm", message);
        }
    }

    fn end_alarm(&self, handle: &Handle) {
        let Some(alarm) = self.results.update(handle, |row| row.seen.alarm.take()) else { return };
        self.telemetry.metrics.self_checks_failing(self.results.failing());
        let lasted = clock::unix_ms().saturating_sub(alarm.since_unix_ms);
        let message = format!("as desired again after {lasted} ms; {}", alarm.done);
        tracing::info!(endpoint = handle.id.get(), epoch = handle.epoch.0, "self-check: {message}");
        handle.shared.log(LogStatus::Ok, "self-check", message.clone());
        self.telemetry.monitor.agent(Some(handle.id), "self-check-ended", message);
    }

    /// Once per alarm; true if it succeeded.
    async fn mend(&self, handle: &Handle) -> bool {
        if self.results.update(handle, |row| row.asked) {
            return false;
        }
        let done = |what: String, asked: bool| {
            self.results.update(handle, |row| {
                row.asked = asked;
                if let Some(alarm) = &mut row.seen.alarm {
                    alarm.done = what;
                }
            });
        };
        let (reply, answer) = oneshot::channel();
        match handle.mailbox.try_send(Command::Regenerate(Level::Datapath, reply)) {
            Ok(()) => done("asked for a regeneration of the datapath, which runs".into(), true),
            Err(TrySendError::Full(_)) => {
                done("no regeneration yet: the endpoint has too much to do, it is asked again".into(), false);
                return false;
            }
            Err(TrySendError::Closed(_)) => return false,
        }
        let result = tokio::select! {
            () = self.stop.cancelled() => return false,
            result = timeout(REGENERATION_LIMIT, answer) => result,
        };
        let (ended, what) = match result {
            Ok(Ok(Ok(()))) => (true, "regenerated the datapath".to_owned()),
            Ok(Ok(Err(why))) => (false, format!("asked for a regeneration of the datapath, which failed: {why}")),
            Ok(Err(_)) => return false, // the endpoint is gone
            Err(_) => {
                let limit = REGENERATION_LIMIT;
                (false, format!("asked for a regeneration of the datapath, which has not ended in {limit:?}"))
            }
        };
        done(what, true);
        ended
    }
}

fn words(found: &[Judged]) -> String {
    let amiss: Vec<&Judged> = found.iter().filter(|j| !j.same).collect();
    let first = amiss.first().map(|j| format!("{}: expected {}; got {}", j.name, j.expected, j.got));
    let more = amiss.len().saturating_sub(1);
    let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
    format!("{}{more}", first.unwrap_or_default())
}

/// Why the node fails: every checked endpoint has an alarm, or more than half of them and at least two.
#[must_use]
pub fn of_node(results: &SelfChecks) -> Option<String> {
    let (failing, checked, _) = results.summary();
    let count = failing.len() as u64;
    let first = failing.first().filter(|_| is_of_node(count, checked))?;
    Some(format!("{count} of {checked} endpoints are not as desired; see `wharf endpoint health {first}`"))
}

const fn is_of_node(failing: u64, checked: u64) -> bool {
    let are_all = failing > 0 && failing >= checked;
    are_all || (failing >= 2 && failing * 2 > checked)
}

#[must_use]
pub fn component(results: &SelfChecks, interval: Duration) -> ComponentStatus {
    let (failing, checked, oldest) = results.summary();
    let (health, message) = if let [first, ..] = failing.as_slice() {
        let shown: Vec<String> = failing.iter().take(3).map(ToString::to_string).collect();
        let (n, shown) = (failing.len(), shown.join(", "));
        (Health::Degraded, format!("{n} not as desired: {shown}; see `wharf endpoint health {first}`"))
    } else if interval.is_zero() {
        (Health::Ok, "off".to_owned())
    } else if checked == 0 {
        (Health::Ok, format!("no endpoint checked yet, each every {} s", interval.as_secs_f64()))
    } else {
        let age = clock::unix_ms().saturating_sub(oldest) / 1_000;
        (Health::Ok, format!("{checked} endpoints as desired, looked at within {age} s"))
    };
    ComponentStatus::new("self-check", health, message)
}

#[cfg(test)]
mod tests {
    use super::is_of_node;

    #[test]
    fn a_node_fails_with_all_or_with_most_of_its_endpoints() {
        for (failing, checked, expected) in [
            (0, 0, false),
            (0, 1, false),
            (1, 1, true),
            (1, 2, false),
            (2, 2, true),
            (1, 3, false),
            (2, 3, true),
            (2, 4, false),
            (3, 4, true),
        ] {
            assert_eq!(is_of_node(failing, checked), expected, "{failing} of {checked}");
        }
    }
}
