//! A look compares an endpoint's kernel state with its record, and does not report a running build as a fault.

use std::{collections::BTreeSet, pin::pin, time::Duration};

use tokio::time::{Instant, timeout_at};
use wharf_core::{
    endpoint::EndpointRecord,
    finding::{EndpointProblem, Problem, Verdict, joined, verdict},
    ids::EndpointId,
    kernel::{Kernel, KernelError, KernelErrorKind, LinkRef},
};

use crate::node::{
    endpoint::{Handle, View},
    lifecycle::Lifecycle,
};

/// The result of a look.
#[derive(Debug)]
pub struct Look {
    /// The endpoint before the look.
    pub view: View,
    /// Problems found, notices included.
    pub problems: Vec<Problem>,
    /// No build ran during the look and none is pending: the problems are faults. Otherwise a build may repair them.
    pub settled: bool,
}

/// Looks once.
///
/// # Errors
/// When the kernel cannot be asked.
pub async fn once(kernel: &dyn Kernel, handle: &Handle) -> Result<Look, KernelError> {
    let mut looks = each(kernel, std::slice::from_ref(handle)).await?;
    looks.pop().ok_or_else(|| KernelError {
        kind: KernelErrorKind::Other,
        operation: "observe endpoints",
        subject: handle.id.to_string(),
        cause: "the kernel's answer is empty".to_owned(),
    })
}

/// Looks once at several endpoints; results are in the order of `handles`.
///
/// # Errors
/// When the kernel cannot be asked.
pub async fn each(kernel: &dyn Kernel, handles: &[Handle]) -> Result<Vec<Look>, KernelError> {
    let views: Vec<View> = handles.iter().map(|handle| handle.shared.view()).collect();
    let records: Vec<EndpointRecord> = views.iter().map(|view| view.record.clone()).collect();
    let found = kernel.observe_endpoints(&records).await?;
    let look = |((handle, view), found): ((&Handle, View), Vec<EndpointProblem>)| {
        let problems = joined(found).into_iter().map(|problem| Problem::Endpoint(handle.id, problem)).collect();
        // No build runs for a container that is gone.
        let quiet = view.is_settled() || handle.is_abandoned();
        let settled = quiet && handle.shared.read(|now| now.is_as(&view));
        Look { view, problems, settled }
    };
    Ok(handles.iter().zip(views).zip(found).map(look).collect())
}

/// The endpoints whose link is gone, for example with the container's network namespace. The leak audit finds them too,
/// but only at its next round.
///
/// # Errors
/// When the kernel cannot be asked.
pub async fn unlinked(life: &Lifecycle, handles: &[Handle]) -> Result<BTreeSet<EndpointId>, KernelError> {
    let settled = |h: &Handle| !life.jobs.is_in_flight(h.id) && h.shared.read(View::is_settled);
    let handles: Vec<&Handle> = handles.iter().filter(|h| settled(h)).collect();
    let links: Vec<_> = handles.iter().map(|h| h.shared.read(|v| LinkRef::of(&v.record))).collect();
    let missing: BTreeSet<_> = life.kernel.observe_missing(&links).await?.into_iter().collect();
    // A delete that began meanwhile explains the missing link.
    Ok(handles.iter().filter(|h| missing.contains(&h.id) && settled(h)).map(|h| h.id).collect())
}

/// Looks until there is no problem or no build explains the problems, for at most `patience`.
///
/// # Errors
/// When the kernel cannot be asked.
pub async fn settled(kernel: &dyn Kernel, handle: &Handle, patience: Duration) -> Result<Look, KernelError> {
    let until = Instant::now() + patience;
    loop {
        let mut changed = pin!(handle.shared.changed());
        // Registers for changes before the kernel is read, so none is missed.
        changed.as_mut().enable();
        let look = once(kernel, handle).await?;
        if look.settled || verdict(&look.problems) == Verdict::Well || timeout_at(until, changed).await.is_err() {
            return Ok(look);
        }
    }
}
