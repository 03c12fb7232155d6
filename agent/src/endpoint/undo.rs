//! The undo of a create that failed.

use std::{net::IpAddr, sync::Arc, time::Duration};

use tokio::time::{Instant, timeout};
use wharf_api::{ApiError, LogStatus, StepError};
use wharf_core::{
    endpoint::{EndpointRecord, IpOwner},
    kernel::{Kernel, LinkRef},
    plan::{CreateStep, UndoStep, plan_undo},
    state::Event,
    store::{Change, Lease},
    timeline::Operation,
};

use crate::{
    endpoint::{
        create::{crash_point, leases, owner, removals},
        task::EndpointTask,
        view::Shared,
    },
    node::Node,
    resting,
    sync::lock,
    timeline, unfinished,
};

/// What the undo of a create has not taken back.
#[derive(Debug, Clone)]
pub struct Remains {
    pub(crate) shared: Arc<Shared>,
    undos: Vec<UndoStep>,
}

/// How an undo ended.
struct Undone {
    /// Steps that failed, and why.
    failed: Vec<(UndoStep, String)>,
    /// The intent is closed.
    closed: bool,
}

/// Undoes what was begun and says what failed. Undo steps that fail are named too; the intent then stays open, and what
/// is left is the task's to hand on.
pub(super) async fn fail<K: Kernel>(task: &mut EndpointTask<K>, begun: &[CreateStep], cause: ApiError) -> ApiError {
    task.shared.log(LogStatus::Failure, "create", cause.message.clone());
    let record = task.shared.read(|v| v.record.clone());
    let node = Arc::clone(&task.node);
    let mut undos = plan_undo(begun);
    if task.prepared && !undos.contains(&UndoStep::RemovePrograms) {
        undos.push(UndoStep::RemovePrograms);
    }
    let Undone { failed, closed } = run(&node, &task.shared, &undos).await;
    if !closed {
        // Nothing of its own is committed for it any more.
        node.timelines.later(timeline::create_failed(&task.shared));
    }
    // An intent that could not be closed names only this epoch; it holds nothing of the id.
    let left = failed.iter().filter(|(undo, _)| *undo != UndoStep::CloseIntent);
    let endpoint = record.attachment.to_string();
    task.left = left.map(|(undo, e)| step_error(*undo, &endpoint, e)).collect();
    if !task.left.is_empty() {
        task.remains = Some(remains(&task.shared, &undos, &failed));
    }
    lock(&node.identities).release(record.identity);
    task.transition(Event::CreateFailed);
    tracing::warn!(endpoint = record.id.get(), epoch = record.epoch.0, code = ?cause.code, "{}", cause.message);
    if failed.is_empty() {
        cause
    } else {
        ApiError { message: format!("{}; and undoing it: {}", cause.message, in_words(&failed)), ..cause }
    }
}

/// Takes up an undo that failed where it failed. Returns the addresses that are free now.
///
/// # Errors
/// What failed again and why; `remains` is what is left then.
pub(crate) async fn again<K: Kernel>(node: &Arc<Node<K>>, remains: &mut Remains) -> Result<Vec<IpAddr>, String> {
    let undone = run(node, &remains.shared, &remains.undos).await;
    if !undone.failed.is_empty() {
        *remains = self::remains(&remains.shared, &remains.undos, &undone.failed);
        return Err(in_words(&undone.failed));
    }
    let releases = remains.undos.contains(&UndoStep::ReleaseLeases);
    let is_free = |ip: &IpAddr, kept: &[Lease]| releases && kept.iter().all(|lease| lease.ip != *ip);
    Ok(remains.shared.read(|v| v.record.addresses().filter(|ip| is_free(ip, &v.taken_over)).collect()))
}

/// What is left when these steps failed: they, and those that wait for all the others.
fn remains(shared: &Arc<Shared>, undos: &[UndoStep], failed: &[(UndoStep, String)]) -> Remains {
    let waits = |undo: &UndoStep| matches!(undo, UndoStep::ReleaseLeases | UndoStep::CloseIntent);
    let is_left = |undo: &&UndoStep| waits(undo) || failed.iter().any(|(f, _)| f == *undo);
    Remains { shared: Arc::clone(shared), undos: undos.iter().filter(is_left).copied().collect() }
}

fn in_words(failed: &[(UndoStep, String)]) -> String {
    failed.iter().map(|(undo, e)| format!("{undo}: {e}")).collect::<Vec<_>>().join("; ")
}

fn step_error(undo: UndoStep, endpoint: &str, why: &str) -> StepError {
    StepError { step: "undo-create".into(), endpoint: endpoint.to_owned(), message: format!("{undo}: {why}") }
}

async fn run<K: Kernel>(node: &Arc<Node<K>>, shared: &Arc<Shared>, undos: &[UndoStep]) -> Undone {
    let record = shared.read(|v| v.record.clone());
    let (mut failed, mut closed) = (Vec::new(), false);
    for undo in undos.iter().copied() {
        if undo == UndoStep::CloseIntent && !failed.is_empty() {
            continue;
        }
        crash_point("undo", undo.name());
        let since = Instant::now();
        let result = take_back(node, shared, &record, undo, failed.is_empty()).await;
        let why = result.as_ref().err().map(String::as_str);
        timeline::phase(node, shared, Operation::Undo, undo.name(), since.elapsed(), why);
        closed |= undo == UndoStep::CloseIntent && result.is_ok();
        if let Err(e) = result {
            shared.log(LogStatus::Failure, undo.name(), e.clone());
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

/// One step of an undo; `all_gone` when those before have left nothing.
async fn take_back<K: Kernel>(
    node: &Arc<Node<K>>,
    shared: &Shared,
    record: &EndpointRecord,
    undo: UndoStep,
    all_gone: bool,
) -> Result<(), String> {
    let (id, step, bound) = (record.id, undo.name(), Duration::from_millis(undo.deadline_ms()));
    let (record, link) = (record.clone(), LinkRef::of(record));
    match undo {
        UndoStep::RemoveRecord => {
            let kept = shared.read(|v| v.taken_over.clone());
            let mut changes: Vec<Change> =
                kept.into_iter().map(|lease| Change::ReplaceOwnedLease(lease, owner(&record))).collect();
            changes.extend(removals(node, &record, record.ip_owner == IpOwner::Endpoint));
            commit(node, changes, bound).await
        }
        UndoStep::RemoveReachable => {
            node.bounded_job(id, step, bound, |k| async move { k.remove_reachable(&record).await }).await
        }
        UndoStep::Detach => node.bounded_job(id, step, bound, |k| async move { k.remove_attached(&link).await }).await,
        UndoStep::RemoveLink => node.bounded_job(id, step, bound, |k| async move { k.remove_link(&link).await }).await,
        UndoStep::RemovePrograms => unfinished::remove_programs(node, id).await,
        UndoStep::ReleaseLeases if all_gone => {
            resting::hand_back(node, &shared.read(|v| v.taken_over.clone()), &owner(&record));
            resting::in_memory(node, &leases(&record));
            Ok(())
        }
        // Something of it may still speak with the address: it is given back when nothing is left.
        UndoStep::ReleaseLeases => Ok(()),
        UndoStep::CloseIntent => {
            let life = timeline::create_failed(shared);
            let mut changes = vec![Change::RemoveIntent(id, record.epoch), Change::PutLife(Box::new(life.clone()))];
            changes.extend(node.timelines.make_room());
            commit(node, changes, bound).await?;
            node.timelines.ended(&life);
            Ok(())
        }
    }
}

async fn commit<K: Kernel>(node: &Node<K>, changes: Vec<Change>, bound: Duration) -> Result<(), String> {
    match timeout(bound, node.store.commit(changes)).await {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err(format!("no answer within {bound:?}")),
    }
}
