//! The self-check of endpoints: runs test packets through the pinned programs and compares the verdicts with the
//! desired state.
//!
//! The checks are spread over the interval, and each endpoint is checked once in it. A mismatch raises an alarm only
//! when nothing worked on the endpoint meanwhile and a second look shows the same. The begin and the end of an alarm
//! are reported once: in the endpoint's log, the monitor, the agent's log, status and metrics. Each alarm requests
//! one regeneration of the datapath.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc::error::TrySendError, oneshot},
    time::{Instant, timeout},
};
use wharf_api::{ComponentStatus, Health, LogStatus, SelfCheck, SelfCheckAlarm, SelfCheckCase};
use wharf_core::{
    ids::EndpointId,
    kernel::{Kernel, KernelError, KernelErrorKind},
    selfcheck::{Case, CaseResult, Judged, Kind, cases},
    state::{Level, State},
};

use crate::{
    clock,
    endpoint::build::desired_config,
    node::{
        Node,
        endpoint::{Command, Handle, View},
        self_checks::PACE,
    },
};

/// Name of the controller.
pub const CONTROLLER: &str = "endpoint-selfcheck";
/// Endpoints whose checks fall within this time are checked in one batch.
const GATHER: Duration = Duration::from_millis(500);
/// Maximum number of looks at an endpoint until two in a row agree.
const LOOKS: usize = 4;
/// Endpoints tried as the peer of a test packet.
const PEERS: usize = 16;
/// Bound of a batch, which normally takes a millisecond.
const BATCH_LIMIT: Duration = Duration::from_secs(5);
/// How long a client waits for its turn behind other clients.
const TURN_LIMIT: Duration = Duration::from_secs(2);
/// How long an alarm waits for its regeneration: less than the limit of a controller's run.
const REGENERATION_LIMIT: Duration = Duration::from_secs(30);

/// Why endpoints could not be checked. It says nothing about the endpoints.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The kernel refused to run the test packets of these endpoints.
    #[error("check endpoint {0}: {1}")]
    Kernel(String, #[source] KernelError),
    /// No answer in time for these endpoints.
    #[error("check endpoint {0}: no answer within {BATCH_LIMIT:?}")]
    TimedOut(String),
    /// The answer has no result.
    #[error("check endpoint {0}: the kernel's answer is empty")]
    Empty(EndpointId),
}

/// Runs until the agent stops.
pub async fn watch<K: Kernel>(node: Arc<Node<K>>) {
    let interval = node.config.selfcheck_interval;
    loop {
        let round = Instant::now();
        let handles = node.registry.list();
        node.self_checks.keep(&handles.iter().map(|h| (h.id, h.epoch)).collect());
        node.metrics.self_checks_failing(node.self_checks.failing());
        // The extra pause separates the last check of a round from the first of the next.
        let pause = (interval / u32::try_from(handles.len() + 1).unwrap_or(u32::MAX)).max(PACE);
        // With many endpoints, several share a batch: a wake-up for each would cost more than its check.
        let together = usize::try_from(GATHER.as_millis() / pause.as_millis().max(1)).unwrap_or(1).max(1);
        for handles in handles.chunks(together) {
            let pause = pause * u32::try_from(handles.len()).unwrap_or(1);
            tokio::select! {
                () = node.stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            let run = node.controllers.begin(CONTROLLER);
            let result = visit_each(&node, handles).await;
            if let Err(why) = &result {
                tracing::warn!(controller = CONTROLLER, "{why}");
            }
            run.end(result);
            node.controllers.plan(CONTROLLER, interval, pause);
        }
        node.controllers.plan(CONTROLLER, interval, (round + interval).saturating_duration_since(Instant::now()));
        tokio::select! {
            () = node.stop.cancelled() => return,
            () = tokio::time::sleep_until(round + interval) => {}
        }
    }
}

/// Checks endpoints in one batch, then checks each mismatching endpoint again by itself.
async fn visit_each<K: Kernel>(node: &Arc<Node<K>>, handles: &[Handle]) -> Result<(), CheckError> {
    node.self_checks.turn().await;
    let questions: Vec<Question> = handles.iter().filter_map(|handle| Question::of(node, handle)).collect();
    if questions.is_empty() {
        return Ok(());
    }
    let mut outcome = Ok(());
    let answers = put(node, &questions).await?;
    for (question, answer) in questions.into_iter().zip(answers) {
        let handle = question.handle.clone();
        match judge(node, question, answer).await {
            Ok(None) => {}
            Ok(Some(found)) if found.iter().all(|j| j.same) => {
                node.metrics.self_check();
                note(node, &handle, &found);
                end_alarm(node, &handle);
            }
            Ok(Some(_)) | Err(_) => outcome = visit(node, &handle).await.and(outcome),
        }
    }
    outcome
}

/// Checks an endpoint, and raises or ends its alarm.
///
/// # Errors
/// When the kernel could not be read; this is no finding about the endpoint.
pub async fn visit<K: Kernel>(node: &Arc<Node<K>>, handle: &Handle) -> Result<(), CheckError> {
    let Some(found) = check(node, handle).await? else { return Ok(()) };
    note(node, handle, &found);
    if found.iter().all(|j| j.same) {
        end_alarm(node, handle);
        return Ok(());
    }
    raise_alarm(node, handle, &found);
    if !mend(node, handle).await {
        return Ok(());
    }
    // A check right after the regeneration ends the alarm without waiting for the next round.
    if let Some(found) = check(node, handle).await? {
        note(node, handle, &found);
        if found.iter().all(|j| j.same) {
            end_alarm(node, handle);
        }
    }
    Ok(())
}

/// Checks an endpoint for a client; returns the last result when the client gets no turn in time.
pub async fn ask<K: Kernel>(node: &Arc<Node<K>>, handle: &Handle) -> SelfCheck {
    let error = match timeout(TURN_LIMIT, check(node, handle)).await {
        Ok(Ok(Some(found))) => {
            note(node, handle, &found);
            // The alarm must not outlive a result that the client sees.
            if found.iter().all(|j| j.same) {
                end_alarm(node, handle);
            }
            None
        }
        Ok(Ok(None)) => None,
        Ok(Err(why)) => Some(why.to_string()),
        Err(_) => Some(format!("no turn within {TURN_LIMIT:?}: others ask too; this is what was found last")),
    };
    SelfCheck { error, ..node.self_checks.last(handle.id, handle.epoch) }
}

/// Looks until two looks in a row agree or one shows no mismatch. `None` when they never agree or the endpoint is in
/// flight.
async fn check<K: Kernel>(node: &Arc<Node<K>>, handle: &Handle) -> Result<Option<Vec<Judged>>, CheckError> {
    let mut before: Option<BTreeSet<String>> = None;
    for _ in 0..LOOKS {
        let Some(found) = look(node, handle).await? else { return Ok(None) };
        let amiss: BTreeSet<String> = found.iter().filter(|j| !j.same).map(|j| j.name.clone()).collect();
        if amiss.is_empty() || before.as_ref() == Some(&amiss) {
            node.metrics.self_check();
            return Ok(Some(found));
        }
        before = Some(amiss);
    }
    Ok(None)
}

/// The test packets for an endpoint's programs.
struct Question {
    handle: Handle,
    /// The view of the endpoint before the check.
    view: View,
    /// The peer of some test packets.
    peer: Option<(Handle, View)>,
    cases: Arc<[Case]>,
}

impl Question {
    /// The question for an endpoint in its current state; none while the endpoint is in flight.
    fn of<K: Kernel>(node: &Node<K>, handle: &Handle) -> Option<Self> {
        let view = settled(node, handle)?;
        let peer = peer_of(node, handle.id);
        let config = desired_config(node, &view.record, view.trace);
        let cases = cases(&view.record, &config, peer.as_ref().map(|(_, v)| &v.record)).into();
        Some(Self { handle: handle.clone(), view, peer, cases })
    }
}

type Answer = Result<Vec<CaseResult>, KernelError>;

/// Runs the test packets of each endpoint. The caller has waited for its turn.
async fn put<K: Kernel>(node: &Node<K>, questions: &[Question]) -> Result<Vec<Answer>, CheckError> {
    let checks: Vec<_> = questions.iter().map(|q| (q.handle.id, Arc::clone(&q.cases))).collect();
    let ids = || questions.iter().map(|q| q.handle.id.to_string()).collect::<Vec<_>>().join(", ");
    match timeout(BATCH_LIMIT, node.kernel.observe_verdicts(&checks)).await {
        Ok(answers) => answers.map_err(|e| CheckError::Kernel(ids(), e)),
        Err(_) => Err(CheckError::TimedOut(ids())),
    }
}

/// Runs one batch of test packets for an endpoint.
async fn look<K: Kernel>(node: &Node<K>, handle: &Handle) -> Result<Option<Vec<Judged>>, CheckError> {
    node.self_checks.turn().await;
    let Some(question) = Question::of(node, handle) else { return Ok(None) };
    let answer = put(node, std::slice::from_ref(&question)).await?.pop();
    match answer {
        Some(answer) => judge(node, question, answer).await,
        None => Err(CheckError::Empty(handle.id)),
    }
}

/// Compares an answer with the desired state; none when something worked on the endpoint meanwhile.
async fn judge<K: Kernel>(node: &Node<K>, asked: Question, answer: Answer) -> Result<Option<Vec<Judged>>, CheckError> {
    let Question { handle, view, peer, cases } = asked;
    // A concurrent change may explain any mismatch.
    if !unchanged(node, &handle, &view) {
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
        Some((peer, view)) if peer_amiss => is_well(node, peer, view).await,
        _ => true,
    };
    Ok(Some(judged.into_iter().filter(|(kind, _)| counts || *kind != Kind::ToPeer).map(|(_, j)| j).collect()))
}

/// True when the peer passes its own cases and is not in flight. Only then does a mismatch in a peer case count
/// against the checked endpoint; otherwise the peer's own check reports it.
async fn is_well<K: Kernel>(node: &Node<K>, handle: Handle, view: View) -> bool {
    let config = desired_config(node, &view.record, view.trace);
    let alone = Question { cases: cases(&view.record, &config, None).into(), handle, view, peer: None };
    node.self_checks.turn().await;
    let answer = put(node, std::slice::from_ref(&alone)).await;
    let all_same = |results: &[CaseResult]| alone.cases.iter().zip(results).all(|(c, r)| c.judge(r).same);
    matches!(answer.as_deref(), Ok([Ok(results)]) if all_same(results)) && unchanged(node, &alone.handle, &alone.view)
}

/// The view of an endpoint that is ready and not in flight.
fn settled<K: Kernel>(node: &Node<K>, handle: &Handle) -> Option<View> {
    let view = handle.shared.view();
    let quiet = view.committed && view.fsm.state == State::Ready && !node.jobs.is_in_flight(handle.id);
    quiet.then_some(view)
}

/// True when nothing has worked on the endpoint since `before`.
fn unchanged<K: Kernel>(node: &Node<K>, handle: &Handle, before: &View) -> bool {
    let same = |v: &View| {
        v.fsm == before.fsm && v.status.regenerations == before.status.regenerations && v.record == before.record
    };
    handle.shared.read(same)
        && !node.jobs.is_in_flight(handle.id)
        && node.registry.get(handle.id).is_some_and(|now| now.epoch == handle.epoch)
}

/// The peer for an endpoint: the next one by id that is settled. None when the next [`PEERS`] are all busy; the next
/// round tries again.
fn peer_of<K: Kernel>(node: &Node<K>, id: EndpointId) -> Option<(Handle, View)> {
    let mut at = id;
    for _ in 0..PEERS {
        let handle = node.registry.next_after(at).filter(|h| h.id != id)?;
        if let Some(view) = settled(node, &handle) {
            return Some((handle, view));
        }
        at = handle.id;
    }
    None
}

fn note<K: Kernel>(node: &Node<K>, handle: &Handle, found: &[Judged]) {
    let well = found.iter().all(|j| j.same);
    let case = |j: &Judged| SelfCheckCase {
        name: j.name.clone(),
        expected: j.expected.clone(),
        got: j.got.clone(),
        ok: j.same,
    };
    node.self_checks.update(handle, |row| {
        row.seen.state = if well { Health::Ok } else { Health::Failing };
        row.seen.checked_unix_ms = Some(clock::unix_ms());
        row.seen.cases = found.iter().map(case).collect();
    });
}

/// The first mismatch in words, and the number of further ones.
fn words(found: &[Judged]) -> String {
    let amiss: Vec<&Judged> = found.iter().filter(|j| !j.same).collect();
    let first = amiss.first().map(|j| format!("{}: expected {}; got {}", j.name, j.expected, j.got));
    let more = amiss.len().saturating_sub(1);
    let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
    format!("{}{more}", first.unwrap_or_default())
}

fn raise_alarm<K: Kernel>(node: &Node<K>, handle: &Handle, found: &[Judged]) {
    let begins = node.self_checks.update(handle, |row| {
        let begins = row.seen.alarm.is_none();
        if begins {
            row.seen.alarm = Some(SelfCheckAlarm { since_unix_ms: clock::unix_ms(), done: String::new() });
            row.asked = false;
        }
        begins
    });
    if begins {
        node.metrics.self_check_alarm();
        node.metrics.self_checks_failing(node.self_checks.failing());
        let message = words(found);
        tracing::error!(endpoint = handle.id.get(), epoch = handle.epoch.0, "self-check: {message}");
        handle.shared.log(LogStatus::Failure, "self-check", message.clone());
        node.monitor.agent(Some(handle.id), "self-check-alarm", message);
    }
}

fn end_alarm<K: Kernel>(node: &Node<K>, handle: &Handle) {
    let Some(alarm) = node.self_checks.update(handle, |row| row.seen.alarm.take()) else { return };
    node.metrics.self_checks_failing(node.self_checks.failing());
    let lasted = clock::unix_ms().saturating_sub(alarm.since_unix_ms);
    let message = format!("as desired again after {lasted} ms; {}", alarm.done);
    tracing::info!(endpoint = handle.id.get(), epoch = handle.epoch.0, "self-check: {message}");
    handle.shared.log(LogStatus::Ok, "self-check", message.clone());
    node.monitor.agent(Some(handle.id), "self-check-ended", message);
}

/// Requests a regeneration, once in each alarm. True when it succeeded.
async fn mend<K: Kernel>(node: &Node<K>, handle: &Handle) -> bool {
    if node.self_checks.update(handle, |row| row.asked) {
        return false;
    }
    let done = |what: String, asked: bool| {
        node.self_checks.update(handle, |row| {
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
        () = node.stop.cancelled() => return false,
        result = timeout(REGENERATION_LIMIT, answer) => result,
    };
    match result {
        Ok(Ok(Ok(()))) => {
            done("regenerated the datapath".into(), true);
            true
        }
        Ok(Ok(Err(why))) => {
            done(format!("asked for a regeneration of the datapath, which failed: {why}"), true);
            false
        }
        Ok(Err(_)) => false, // the endpoint is gone
        Err(_) => {
            let what =
                format!("asked for a regeneration of the datapath, which has not ended in {REGENERATION_LIMIT:?}");
            done(what, true);
            false
        }
    }
}

/// The self-checks in status.
#[must_use]
pub fn component<K: Kernel>(node: &Node<K>) -> ComponentStatus {
    let interval = node.config.selfcheck_interval;
    let (failing, checked, oldest) = node.self_checks.summary();
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
    ComponentStatus { name: "self-check".to_owned(), health, message, stale_ms: None }
}
