//! Undo of a failed create.

use std::{net::IpAddr, sync::Arc, time::Duration};

use tokio::time::{Instant, timeout};
use wharf_api::{LogStatus, StepError};
use wharf_core::{
    endpoint::{EndpointRecord, IpOwner},
    plan::{CreateStep, DeleteStep, UndoStep, plan_undo},
    store::{Change, Lease},
    timeline::Operation,
};
use wharf_store::Store;

use crate::{
    addresses::resting,
    endpoint::{
        error::{CreateCause, RemoveError},
        identity,
        record::{crash_point, leases, owner, removals},
        remove::{self, Subject},
    },
    node::{endpoint::Shared, leftovers::Remains, lifecycle::Lifecycle, timeline},
};

struct Undone {
    failed: Vec<(UndoStep, RemoveError)>,
    closed: bool,
}

pub(super) struct Failed {
    pub(super) answer: CreateCause,
    pub(super) errors: Vec<StepError>,
    pub(super) remains: Option<Remains>,
}

/// Undoes the begun steps; a failure leaves the intent open. `prepared`: from a prepared set.
pub(super) async fn undo(
    life: &Arc<Lifecycle>,
    shared: &Arc<Shared>,
    prepared: bool,
    begun: &[CreateStep],
    cause: CreateCause,
) -> Failed {
    let record = shared.read(|v| v.record.clone());
    shared.log(LogStatus::Failure, "create", cause.to_string());
    let mut undos = plan_undo(begun);
    if prepared && !undos.contains(&UndoStep::RemovePrograms) {
        undos.push(UndoStep::RemovePrograms);
    }
    let Undone { failed, closed } = run(life, shared, &undos).await;
    if !closed {
        life.endpoints.timelines.later(timeline::create_failed(shared));
    }
    let left = failed.iter().filter(|(undo, _)| undo.must_succeed());
    let endpoint = record.attachment.to_string();
    let errors: Vec<_> = left.map(|(undo, e)| step_error(*undo, &endpoint, e)).collect();
    let remains = (!errors.is_empty()).then(|| remains(shared, &undos, &failed));
    identity::release(&*life.endpoints.identities, record.identity).await;
    let (id, epoch) = (record.id.get(), record.epoch.0);
    tracing::warn!(endpoint = id, epoch, "{cause} (create endpoint {endpoint})");
    let answer = if failed.is_empty() {
        cause
    } else {
        CreateCause::NotUndone { cause: Box::new(cause), left: RemoveError::Undo(failed) }
    };
    Failed { answer, errors, remains }
}

/// Retries failed steps; returns the released addresses.
pub(crate) async fn again(life: &Arc<Lifecycle>, remains: &mut Remains) -> Result<Vec<IpAddr>, RemoveError> {
    let undone = run(life, &remains.shared, &remains.undos).await;
    if !undone.failed.is_empty() {
        *remains = self::remains(&remains.shared, &remains.undos, &undone.failed);
        return Err(RemoveError::Undo(undone.failed));
    }
    let releases = remains.undos.contains(&UndoStep::ReleaseLeases);
    let is_free = |ip: &IpAddr, kept: &[Lease]| releases && kept.iter().all(|lease| lease.ip != *ip);
    Ok(remains.shared.read(|v| v.record.addresses().filter(|ip| is_free(ip, &v.taken_over)).collect()))
}

fn remains(shared: &Arc<Shared>, undos: &[UndoStep], failed: &[(UndoStep, RemoveError)]) -> Remains {
    let waits = |undo: &UndoStep| matches!(undo, UndoStep::ReleaseLeases | UndoStep::CloseIntent);
    let is_left = |undo: &&UndoStep| waits(undo) || failed.iter().any(|(f, _)| f == *undo && f.must_succeed());
    Remains { shared: Arc::clone(shared), undos: undos.iter().filter(is_left).copied().collect() }
}

fn step_error(undo: UndoStep, endpoint: &str, why: &RemoveError) -> StepError {
    StepError { step: "undo-create".into(), endpoint: endpoint.to_owned(), message: format!("{undo}: {why}") }
}

async fn run(life: &Arc<Lifecycle>, shared: &Arc<Shared>, undos: &[UndoStep]) -> Undone {
    let record = shared.read(|v| v.record.clone());
    // Before the leases end in memory. Stored, because the proxy may use the addresses longer than this agent lives.
    let rests = resting::changes_of(&life.network.addresses, &leases(&record));
    let (mut failed, mut closed): (Vec<(UndoStep, RemoveError)>, _) = (Vec::new(), false);
    for undo in undos.iter().copied() {
        let all_gone = failed.iter().all(|(undo, _)| !undo.must_succeed());
        if undo == UndoStep::CloseIntent && !all_gone {
            continue;
        }
        shared.update(|v| v.begin_step(undo.name()));
        crash_point("undo", undo.name());
        let since = Instant::now();
        let result = take_back(life, shared, &record, undo, all_gone, &rests).await;
        timeline::phase(&life.telemetry.metrics, shared, Operation::Undo, undo.name(), since.elapsed(), &result);
        closed |= undo == UndoStep::CloseIntent && result.is_ok();
        if let Err(e) = result {
            shared.log(LogStatus::Failure, undo.name(), e.to_string());
            tracing::error!(
                endpoint = record.id.get(),
                epoch = record.epoch.0,
                step = undo.name(),
                "undo of a create: {e}"
            );
            failed.push((undo, e));
        }
    }
    Undone { failed, closed }
}

/// `all_gone`: every earlier step that must succeed did.
async fn take_back(
    life: &Arc<Lifecycle>,
    shared: &Shared,
    record: &EndpointRecord,
    undo: UndoStep,
    all_gone: bool,
    rests: &[Change],
) -> Result<(), RemoveError> {
    let (subject, bound) = (Subject::of(record), Duration::from_millis(undo.deadline_ms()));
    match undo {
        UndoStep::RemoveRecord => {
            let kept = shared.read(|v| v.taken_over.clone());
            let mut changes: Vec<Change> =
                kept.into_iter().map(|lease| Change::ReplaceOwnedLease(lease, owner(record))).collect();
            changes.extend(removals(&life.network.addresses, record, record.ip_owner == IpOwner::Endpoint));
            commit(&life.store, changes, bound).await
        }
        UndoStep::RemoveReachable => remove::step(life, &subject, DeleteStep::RemoveReachable).await,
        UndoStep::Detach => remove::step(life, &subject, DeleteStep::Detach).await,
        UndoStep::AwaitProxy => remove::step(life, &subject, DeleteStep::AwaitProxy).await,
        UndoStep::RemoveLink if !record.link_owner.is_wharf() => {
            remove::restore_link(&life.endpoints.jobs, &life.policy, record, bound).await
        }
        UndoStep::RemoveLink => remove::step(life, &subject, DeleteStep::RemoveLink).await,
        UndoStep::RemovePrograms => remove::step(life, &subject, DeleteStep::Unpin).await,
        UndoStep::ReleaseLeases if all_gone => {
            resting::hand_back(&life.network.addresses, &shared.read(|v| v.taken_over.clone()), &owner(record));
            resting::in_memory(&life.network.addresses, &leases(record));
            Ok(())
        }
        // A kernel object may still use the address.
        UndoStep::ReleaseLeases => Ok(()),
        UndoStep::CloseIntent => {
            let ended = timeline::create_failed(shared);
            let mut changes =
                vec![Change::RemoveIntent(record.id, record.epoch), Change::PutLife(Box::new(ended.clone()))];
            changes.extend(life.endpoints.timelines.make_room());
            changes.extend_from_slice(rests);
            commit(&life.store, changes, bound).await?;
            life.endpoints.timelines.ended(&ended);
            Ok(())
        }
    }
}

async fn commit(store: &Store, changes: Vec<Change>, bound: Duration) -> Result<(), RemoveError> {
    Ok(timeout(bound, store.commit(changes)).await.map_err(|_| RemoveError::NoAnswer(bound))??)
}
