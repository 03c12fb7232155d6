//! Delete, in the order of the plan.
//!
//! *Teardown* of each endpoint: detach programs, remove rows, await the proxy, unpin, remove the link; a failed step
//! does not stop the others. *Release* of all: when the kernel has released their links, one transaction removes
//! addresses and records. An endpoint with kernel leftovers keeps record, addresses and id for the next delete: no
//! address is leased while the kernel uses it for its old owner.

use std::{sync::Arc, time::Duration};

use futures::future::join_all;
use tokio::{
    sync::oneshot,
    time::{Instant, timeout, timeout_at},
};
use wharf_api::{DeleteResult, LogStatus, StepError};
use wharf_core::{
    endpoint::EndpointRecord,
    ipam::Ipam,
    kernel::Kernel,
    plan::{DeleteOptions, DeleteStep, TEARDOWN_BOUND},
    store::{Change, Intent, Lease, LeaseOwner},
    timeline::{DELETE_BEGINS, Operation, Outcome},
};
use wharf_kit::{
    sync::lock,
    telemetry::operation::{self, Kind, OpId},
};
use wharf_store::Store;

use crate::{
    addresses::resting,
    endpoint::{
        error::RemoveError,
        identity,
        record::{crash_point, leases, owner, removals},
        remove::{self, Subject},
    },
    metrics::Metrics,
    node::{
        endpoint::{Command, Handle, Shared, Torn, View},
        lifecycle::Lifecycle,
        timeline,
    },
};

/// When a delete is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Endpoints are unreachable and unlisted. Links and records go 15 ms or more later;
    /// [`crate::node::registry::Registry::settled`] waits for them.
    Unlisted,
    /// Addresses and records are gone.
    Finished,
}

/// Deletes endpoints; a client's disconnect does not interrupt it.
pub async fn delete(
    life: &Arc<Lifecycle>,
    mut handles: Vec<Handle>,
    options: DeleteOptions,
    when: Answer,
) -> DeleteResult {
    let leave = |h: &Handle| life.endpoints.registry.is_leaving(h);
    if when == Answer::Unlisted {
        handles.retain(|h| !leave(h));
    } else if handles.iter().any(leave) {
        life.endpoints.registry.settled(|_| true).await;
        handles.retain(|h| !h.mailbox.is_closed());
    }
    if handles.is_empty() {
        return DeleteResult::default();
    }
    let what = handles.iter().map(|h| h.id.to_string()).collect::<Vec<_>>().join(", ");
    let (reply, answer) = oneshot::channel();
    let owned = Arc::clone(life);
    let op = OpId::current_or_next(Kind::Delete);
    let span = match handles.as_slice() {
        [one] => one.span(op),
        _ => op.span(),
    };
    let work = async move { delete_all(&owned, handles, options, when, |result| drop(reply.send(result))).await };
    life.tasks.operations.spawn(operation::within(op, span, work));
    answer.await.unwrap_or_else(|_| {
        let message = "its task ended without an answer; the next delete resumes".to_owned();
        let error = StepError { step: DeleteStep::RefuseWork.name().into(), endpoint: what, message };
        DeleteResult { errors: vec![error], ..DeleteResult::default() }
    })
}

/// Deletes an endpoint whose creator left.
pub fn spawn_unclaimed(life: &Arc<Lifecycle>, handle: Handle) {
    let owned = Arc::clone(life);
    let op = OpId::next(Kind::Delete);
    let span = handle.span(op);
    let log = |result: DeleteResult| {
        for e in result.errors {
            tracing::error!(endpoint = e.endpoint, step = e.step, "take back an unclaimed endpoint: {}", e.message);
        }
    };
    let work = async move { delete_all(&owned, vec![handle], DeleteOptions::default(), Answer::Finished, log).await };
    life.tasks.operations.spawn(operation::within(op, span, work));
}

async fn delete_all(
    life: &Arc<Lifecycle>,
    handles: Vec<Handle>,
    options: DeleteOptions,
    when: Answer,
    answer: impl FnOnce(DeleteResult),
) {
    let mut result = DeleteResult::default();
    let _guards: Vec<_> = handles.iter().map(|h| life.endpoints.jobs.working_on(h.id)).collect();
    let _deletes = life.endpoints.admission.gate.deletes(handles.len());
    let started = Instant::now();
    let torn = tear_down(&life.store, &life.telemetry.metrics, handles, options, started, &mut result).await;
    match when {
        Answer::Unlisted => {
            let _leaving: Vec<_> = torn.iter().map(|(handle, _)| life.endpoints.registry.leaves(handle)).collect();
            result.deleted.extend(torn.iter().map(|(handle, _)| handle.id.get()));
            let mut later = DeleteResult::default();
            life.telemetry.metrics.operation(Operation::Delete.name(), started.elapsed(), result.errors.is_empty());
            answer(result);
            release(life, torn, options, started, &mut later).await;
            for e in later.errors {
                tracing::error!(endpoint = e.endpoint, step = e.step, "delete, after its answer: {}", e.message);
            }
        }
        Answer::Finished => {
            release(life, torn, options, started, &mut result).await;
            life.telemetry.metrics.operation(Operation::Delete.name(), started.elapsed(), result.errors.is_empty());
            answer(result);
        }
    }
}

async fn tear_down(
    store: &Store,
    metrics: &Metrics,
    handles: Vec<Handle>,
    options: DeleteOptions,
    started: Instant,
    result: &mut DeleteResult,
) -> Vec<(Handle, Torn)> {
    for handle in &handles {
        handle.shared.update(|v| v.delete_options = options);
        handle.cancel.cancel();
    }
    let intent = Intent::Delete { no_ip_release: options.no_ip_release };
    crash_point("delete", DeleteStep::WriteIntent.name());
    let committed = handles.iter().filter(|h| h.shared.read(|v| v.committed));
    let intents: Vec<_> = committed.map(|h| Change::PutIntent(h.id, h.epoch, intent.clone())).collect();
    let intended = store.commit(intents).await;
    let (outcome, text) = match (&intended, options.no_ip_release) {
        (Err(error), _) => (Outcome::Failed, error.to_string()),
        (Ok(()), true) => (Outcome::Ok, "its addresses stay leased".to_owned()),
        (Ok(()), false) => (Outcome::Ok, String::new()),
    };
    let took = started.elapsed();
    metrics.phase(Operation::Delete.name(), DeleteStep::WriteIntent.name(), took);
    handles.iter().for_each(|h| h.shared.note(Operation::Delete, DELETE_BEGINS, Some(took), outcome, &text));
    if let Err(error) = intended {
        // A restore after a crash finishes the delete but loses NoIPRelease.
        handles.iter().for_each(|h| result.errors.push(step_error(h, DeleteStep::WriteIntent, error.to_string())));
    }

    let until = started + TEARDOWN_BOUND;
    let mut asked = Vec::with_capacity(handles.len());
    for handle in handles {
        let (reply, answer) = oneshot::channel();
        let span = handle.span(OpId::current_or_next(Kind::Delete));
        match timeout_at(until, handle.mailbox.send(Command::Teardown(span, reply))).await {
            Ok(Ok(())) => asked.push((handle, answer)),
            Ok(Err(_)) => {}
            Err(_) => result.errors.push(still_busy(&handle)),
        }
    }
    let mut clean = Vec::with_capacity(asked.len());
    for (handle, answer) in asked {
        match timeout_at(until, answer).await {
            Ok(Ok(torn)) => {
                result.errors.extend(torn.errors.iter().cloned());
                if torn.clean {
                    clean.push((handle, torn));
                }
            }
            Ok(Err(_)) => {}
            Err(_) => result.errors.push(still_busy(&handle)),
        }
    }
    clean
}

async fn release(
    life: &Arc<Lifecycle>,
    torn: Vec<(Handle, Torn)>,
    options: DeleteOptions,
    started: Instant,
    result: &mut DeleteResult,
) {
    crash_point("delete", DeleteStep::AwaitKernel.name());
    let (mut clean, mut changes, mut lives) = (Vec::new(), Vec::new(), Vec::new());
    let released =
        join_all(torn.iter().map(|(handle, torn)| await_kernel(&life.telemetry.metrics, handle, torn))).await;
    if life.policy.proxy.redirects.count() > 0 {
        end_proxy_connections(&*life.kernel, &torn).await;
    }
    forget_flows(&*life.kernel, &torn).await;
    for ((handle, torn), released) in torn.into_iter().zip(released) {
        if let Err(why) = released {
            handle.shared.update(awaits_another);
            result.errors.push(step_error(&handle, DeleteStep::AwaitKernel, why.to_string()));
            continue;
        }
        let releases = options.releases_ips(&torn.record);
        changes.extend(removals(&life.network.addresses, &torn.record, releases));
        let kept = if releases { Vec::new() } else { kept_leases(&lock(&life.network.addresses.ipam), &torn.record) };
        let old = owner(&torn.record);
        changes.extend(kept.iter().map(|lease| Change::ReplaceOwnedLease(lease.clone(), old.clone())));
        // The undo writes a failed create's timeline.
        let ended = handle.shared.read(|v| v.committed).then(|| timeline::deleted(&handle.shared, started.elapsed()));
        if let Some(ended) = &ended {
            changes.push(Change::PutLife(Box::new(ended.clone())));
            changes.extend(life.endpoints.timelines.make_room());
        }
        lives.extend(ended);
        clean.push((handle, torn, kept));
    }

    crash_point("delete", DeleteStep::RemoveRecord.name());
    clean.iter().for_each(|(handle, ..)| handle.shared.update(|v| v.begin_step(DeleteStep::RemoveRecord.name())));
    let since = Instant::now();
    let removed = life.store.commit(changes).await;
    life.telemetry.metrics.phase(Operation::Delete.name(), DeleteStep::RemoveRecord.name(), since.elapsed());
    if let Err(error) = removed {
        for (handle, ..) in &clean {
            let why = error.to_string();
            handle.shared.note(Operation::Delete, DeleteStep::RemoveRecord.name(), None, Outcome::Failed, &why);
            handle.shared.update(awaits_another);
            result.errors.push(step_error(handle, DeleteStep::RemoveRecord, why));
        }
        return;
    }
    lives.iter().for_each(|ended| life.endpoints.timelines.ended(ended));
    let gone: Vec<_> = clean.iter().map(|(_, torn, _)| torn.record.attachment.clone()).collect();
    for (handle, torn, kept) in clean {
        let owner = owner(&torn.record);
        if options.releases_ips(&torn.record) {
            resting::in_memory(&life.network.addresses, &leases(&torn.record));
        }
        {
            let mut ipam = lock(&life.network.addresses.ipam);
            for lease in kept {
                ipam.transfer(lease.ip, &owner, lease.owner);
            }
        }
        let (reply, answer) = oneshot::channel();
        let span = handle.span(OpId::current_or_next(Kind::Delete));
        if handle.mailbox.send(Command::Finish(span, reply)).await.is_ok() {
            answer.await.ok(); // an ended task needs no `Finish`
        }
        result.deleted.push(handle.id.get());
    }
    crash_point("delete", "forget-queued");
    life.endpoints.deletions.served(&gone).await;
}

async fn await_kernel(metrics: &Metrics, handle: &Handle, torn: &Torn) -> Result<(), RemoveError> {
    let Some(release) = &torn.release else { return Ok(()) };
    let (step, since) = (DeleteStep::AwaitKernel.name(), Instant::now());
    handle.shared.update(|v| v.begin_step(step));
    let result = remove::await_kernel(release).await;
    timeline::phase(metrics, &handle.shared, Operation::Delete, step, since.elapsed(), &result);
    result
}

/// Otherwise they count for the address's next owner. [`resting`] retries before the next lease.
async fn end_proxy_connections(kernel: &dyn Kernel, torn: &[(Handle, Torn)]) {
    let ips: Vec<_> = torn.iter().flat_map(|(_, torn)| torn.record.addresses()).collect();
    let bound = Duration::from_millis(DeleteStep::AwaitKernel.deadline_ms());
    match timeout(bound, kernel.end_proxy_connections(&ips)).await {
        Ok(Ok(ended)) => tracing::debug!(ended, "ended connections of the proxies"),
        Ok(Err(e)) => tracing::warn!("connections of deleted clients stay open in the proxies: {e}"),
        Err(_) => tracing::warn!("connections of deleted clients stay open in the proxies: not listed in {bound:?}"),
    }
}

/// Clients must reach the published ports' next owners. [`resting`] retries before the next lease.
async fn forget_flows(kernel: &dyn Kernel, torn: &[(Handle, Torn)]) {
    let published = torn.iter().filter(|(_, torn)| !torn.record.ports.is_empty());
    let ips: Vec<_> = published.flat_map(|(_, torn)| torn.record.addresses()).collect();
    if ips.is_empty() {
        return;
    }
    let bound = Duration::from_millis(DeleteStep::AwaitKernel.deadline_ms());
    match timeout(bound, kernel.remove_connections(&ips)).await {
        Ok(Ok(removed)) => tracing::debug!(removed, "removed conntrack rows of published ports"),
        Ok(Err(e)) => tracing::warn!("clients of ports that were taken back may get no answer: {e}"),
        Err(_) => tracing::warn!(
            "clients of ports that were taken back may get no answer: conntrack was not read in {bound:?}"
        ),
    }
}

/// Teardown, in the endpoint's task.
pub async fn teardown(life: &Arc<Lifecycle>, shared: &Arc<Shared>) -> Torn {
    let record = shared.read(|v| v.record.clone());
    let subject = Subject::of(&record);
    let (mut errors, mut clean) = (Vec::new(), true);
    let begins = |step: DeleteStep| {
        shared.update(|v| v.begin_step(step.name()));
        crash_point("delete", step.name());
    };
    let ended = |step: DeleteStep, took: Duration, result: Result<(), RemoveError>| {
        let name = step.name();
        timeline::phase(&life.telemetry.metrics, shared, Operation::Delete, name, took, &result);
        let Err(why) = result else { return shared.log(LogStatus::Ok, name, format!("{took:?}")) };
        let message = why.to_string();
        tracing::error!(endpoint = record.id.get(), epoch = record.epoch.0, step = name, "delete: {message}");
        shared.log(LogStatus::Failure, name, message.clone());
        // No retry by another delete: the addresses rest until the proxy has forgotten them.
        if step != DeleteStep::AwaitProxy {
            errors.push(StepError { step: name.into(), endpoint: record.attachment.to_string(), message });
        }
        clean &= !step.must_succeed();
    };
    let release = remove::teardown(life, &subject, begins, ended).await;
    if clean {
        identity::release(&*life.endpoints.identities, record.identity).await;
    }
    shared.update(|v| {
        v.status.phase = String::new();
        if !clean {
            awaits_another(v);
        }
    });
    Torn { record, errors, clean, release }
}

fn awaits_another(v: &mut View) {
    v.status.phase = String::new();
    v.status.waits_for = "another delete".into();
    v.status.ends_when = format!(
        "a delete whose steps all succeed: the runtime's next DEL, `wharf endpoint delete {}`, or the agent's own try every \
         30 s",
        v.record.id
    );
}

/// NoIPRelease: leases pass to a caller name kept for the attachment, until `DELETE /v1/ipam/{ip}` or its next create.
fn kept_leases(ipam: &Ipam, record: &EndpointRecord) -> Vec<Lease> {
    let old = owner(record);
    let held = record.addresses().filter_map(|ip| ipam.get(ip).filter(|l| l.owner == old).cloned());
    let kept = LeaseOwner::kept_for(&record.attachment);
    held.map(|lease| Lease { owner: kept.clone(), ..lease }).collect()
}

fn still_busy(handle: &Handle) -> StepError {
    let phase = handle.shared.read(|v| v.status.phase.clone());
    let message = format!("still busy with {phase:?} after {TEARDOWN_BOUND:?}; the next delete resumes");
    step_error(handle, DeleteStep::RefuseWork, message)
}

fn step_error(handle: &Handle, step: DeleteStep, message: String) -> StepError {
    let endpoint = handle.shared.read(|v| v.record.attachment.to_string());
    StepError { step: step.name().into(), endpoint, message }
}
