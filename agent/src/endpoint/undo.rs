//! The undo of a create that failed.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, timeout};
use wharf_api::{ApiError, LogStatus, StepError};
use wharf_core::{
    endpoint::{EndpointRecord, IpOwner},
    kernel::Kernel,
    plan::{CreateStep, UndoStep, plan_undo},
    state::Event,
    store::Change,
    timeline::Operation,
};

use crate::{
    endpoint::{
        create::{crash_point, leases, link_ref, removals},
        task::EndpointTask,
        view::Shared,
    },
    node::Node,
    resting,
    sync::lock,
    timeline,
};

/// Undoes what was begun and says what failed. Undo steps that fail are named too; the intent then stays open, and the
/// next start undoes what is left.
pub(super) async fn fail<K: Kernel>(task: &mut EndpointTask<K>, begun: &[CreateStep], cause: ApiError) -> ApiError {
    task.shared.log(LogStatus::Failure, "create", cause.message.clone());
    let record = task.shared.read(|v| v.record.clone());
    let node = Arc::clone(&task.node);
    let mut undos = plan_undo(begun);
    if task.prepared && !undos.contains(&UndoStep::RemovePrograms) {
        undos.push(UndoStep::RemovePrograms);
    }
    let (mut failed, mut closed) = (Vec::<String>::new(), false);
    for undo in undos {
        if undo == UndoStep::CloseIntent && !failed.is_empty() {
            continue;
        }
        crash_point("undo", undo.name());
        let bound = Duration::from_millis(undo.deadline_ms());
        let since = Instant::now();
        let work = take_back(&node, &task.shared, &record, undo, failed.is_empty());
        let result = timeout(bound, work).await.unwrap_or_else(|_| Err(format!("no answer within {bound:?}")));
        let why = result.as_ref().err().map(String::as_str);
        timeline::phase(&node, &task.shared, Operation::Undo, undo.name(), since.elapsed(), why);
        closed |= undo == UndoStep::CloseIntent && result.is_ok();
        if let Err(e) = result {
            task.shared.log(LogStatus::Failure, undo.name(), e.clone());
            tracing::error!(
                endpoint = record.id.get(),
                epoch = record.epoch.0,
                step = undo.name(),
                "undo of a create: {e}"
            );
            failed.push(format!("{undo}: {e}"));
            // An intent that could not be closed names only this epoch; it holds nothing of the id.
            if undo != UndoStep::CloseIntent {
                let endpoint = record.attachment.to_string();
                task.left.push(StepError { step: "undo-create".into(), endpoint, message: format!("{undo}: {e}") });
            }
        }
    }
    if !closed {
        // Nothing of its own is committed for it any more.
        node.timelines.later(timeline::create_failed(&task.shared));
    }
    lock(&node.identities).release(record.identity);
    task.transition(Event::CreateFailed);
    tracing::warn!(endpoint = record.id.get(), epoch = record.epoch.0, code = ?cause.code, "{}", cause.message);
    if failed.is_empty() {
        cause
    } else {
        ApiError { message: format!("{}; and undoing it: {}", cause.message, failed.join("; ")), ..cause }
    }
}

/// One step of an undo; `all_gone` when those before have left nothing.
async fn take_back<K: Kernel>(
    node: &Node<K>,
    shared: &Shared,
    record: &EndpointRecord,
    undo: UndoStep,
    all_gone: bool,
) -> Result<(), String> {
    let result = match undo {
        UndoStep::RemoveRecord => {
            let removals = removals(node, record, record.ip_owner == IpOwner::Endpoint);
            return node.store.commit(removals).await.map_err(|e| e.to_string());
        }
        UndoStep::RemoveReachable => node.kernel.remove_reachable(record).await,
        UndoStep::Detach => node.kernel.remove_attached(&link_ref(record)).await,
        UndoStep::RemoveLink => node.kernel.remove_link(&link_ref(record)).await,
        UndoStep::RemovePrograms => node.kernel.remove_programs(record.id).await.map(drop),
        UndoStep::ReleaseLeases if all_gone => {
            resting::in_memory(node, &leases(record));
            Ok(())
        }
        // Something of it may still speak with the address: kept until the next start has cleaned up.
        UndoStep::ReleaseLeases => Ok(()),
        UndoStep::CloseIntent => {
            let life = timeline::create_failed(shared);
            let mut changes =
                vec![Change::RemoveIntent(record.id, record.epoch), Change::PutLife(Box::new(life.clone()))];
            changes.extend(node.timelines.make_room());
            node.store.commit(changes).await.map_err(|e| e.to_string())?;
            node.timelines.ended(&life);
            return Ok(());
        }
    };
    result.map_err(|e| e.to_string())
}
