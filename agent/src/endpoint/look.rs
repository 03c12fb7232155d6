//! Compares an endpoint's kernel state with its record.

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
    jobs::Jobs,
};

/// Result of a look.
#[derive(Debug)]
pub struct Look {
    /// The endpoint before the look.
    pub view: View,
    /// With notices.
    pub problems: Vec<Problem>,
    /// No build, which may repair the problems, ran or is pending.
    pub settled: bool,
}

/// Looks at one endpoint.
pub async fn once(kernel: &dyn Kernel, handle: &Handle) -> Result<Look, KernelError> {
    let mut looks = each(kernel, std::slice::from_ref(handle)).await?;
    looks.pop().ok_or_else(|| KernelError {
        kind: KernelErrorKind::Other,
        operation: "observe endpoints",
        subject: handle.id.to_string(),
        cause: "the kernel's answer is empty".to_owned(),
    })
}

/// Looks at several endpoints, in the order of `handles`.
pub async fn each(kernel: &dyn Kernel, handles: &[Handle]) -> Result<Vec<Look>, KernelError> {
    let views: Vec<View> = handles.iter().map(|handle| handle.shared.view()).collect();
    let records: Vec<EndpointRecord> = views.iter().map(|view| view.record.clone()).collect();
    let found = kernel.observe_endpoints(&records).await?;
    let look = |((handle, view), found): ((&Handle, View), Vec<EndpointProblem>)| {
        let problems = joined(found).into_iter().map(|problem| Problem::Endpoint(handle.id, problem)).collect();
        let quiet = view.is_settled() || handle.is_abandoned();
        let settled = quiet && handle.shared.read(|now| now.is_as(&view));
        Look { view, problems, settled }
    };
    Ok(handles.iter().zip(views).zip(found).map(look).collect())
}

/// Endpoints whose link is gone.
pub async fn unlinked(
    kernel: &dyn Kernel,
    jobs: &Jobs,
    handles: &[Handle],
) -> Result<BTreeSet<EndpointId>, KernelError> {
    let settled = |h: &Handle| !jobs.is_in_flight(h.id) && h.shared.read(View::is_settled);
    let handles: Vec<&Handle> = handles.iter().filter(|h| settled(h)).collect();
    let links: Vec<_> = handles.iter().map(|h| h.shared.read(|v| LinkRef::of(&v.record))).collect();
    let missing: BTreeSet<_> = kernel.observe_missing(&links).await?.into_iter().collect();
    Ok(handles.iter().filter(|h| missing.contains(&h.id) && settled(h)).map(|h| h.id).collect())
}

/// Looks until no build explains the problems, at most for `patience`.
pub async fn settled(kernel: &dyn Kernel, handle: &Handle, patience: Duration) -> Result<Look, KernelError> {
    let until = Instant::now() + patience;
    loop {
        let mut changed = pin!(handle.shared.changed());
        // Before the read, so that no change is missed.
        changed.as_mut().enable();
        let look = once(kernel, handle).await?;
        if look.settled || verdict(&look.problems) == Verdict::Well || timeout_at(until, changed).await.is_err() {
            return Ok(look);
        }
    }
}
