//! A look at what the kernel holds for an endpoint, which does not take a build under way for a fault.

use std::{pin::pin, time::Duration};

use tokio::time::{Instant, timeout_at};
use wharf_core::{
    endpoint::EndpointRecord,
    finding::{EndpointProblem, Problem, Verdict, joined, verdict},
    kernel::{Kernel, KernelError, KernelErrorKind},
};

use crate::node::{
    Node,
    endpoint::{Handle, View},
};

/// What was seen.
#[derive(Debug)]
pub struct Look {
    /// The endpoint when it was looked at.
    pub view: View,
    /// What is amiss, notices included.
    pub problems: Vec<Problem>,
    /// No build ran meanwhile, none is about to: the problems are faults. Otherwise the build may mend them.
    pub settled: bool,
}

/// Looks once.
///
/// # Errors
/// When the kernel cannot be asked.
pub async fn once<K: Kernel>(node: &Node<K>, handle: &Handle) -> Result<Look, KernelError> {
    let mut looks = each(node, std::slice::from_ref(handle)).await?;
    looks.pop().ok_or_else(|| KernelError {
        kind: KernelErrorKind::Other,
        operation: "observe endpoints",
        subject: handle.id.to_string(),
        cause: "the kernel's answer is empty".to_owned(),
    })
}

/// Looks once at several endpoints; the looks are in their order.
///
/// # Errors
/// When the kernel cannot be asked.
pub async fn each<K: Kernel>(node: &Node<K>, handles: &[Handle]) -> Result<Vec<Look>, KernelError> {
    let views: Vec<View> = handles.iter().map(|handle| handle.shared.view()).collect();
    let records: Vec<EndpointRecord> = views.iter().map(|view| view.record.clone()).collect();
    let found = node.kernel.observe_endpoints(&records).await?;
    let look = |((handle, view), found): ((&Handle, View), Vec<EndpointProblem>)| {
        let problems = joined(found).into_iter().map(|problem| Problem::Endpoint(handle.id, problem)).collect();
        let settled = view.is_settled() && handle.shared.read(|now| now.is_as(&view));
        Look { view, problems, settled }
    };
    Ok(handles.iter().zip(views).zip(found).map(look).collect())
}

/// What the kernel holds otherwise than the record asks for.
///
/// # Errors
/// When the kernel cannot be asked.
pub async fn problems_of<K: Kernel>(
    node: &Node<K>,
    record: &EndpointRecord,
) -> Result<Vec<EndpointProblem>, KernelError> {
    node.kernel.observe_endpoint(record).await.map(joined)
}

/// Looks until all is well or no build explains what is not, for as long as there is `patience`.
///
/// # Errors
/// When the kernel cannot be asked.
pub async fn settled<K: Kernel>(node: &Node<K>, handle: &Handle, patience: Duration) -> Result<Look, KernelError> {
    let until = Instant::now() + patience;
    loop {
        let mut changed = pin!(handle.shared.changed());
        // From here on every change is heard, also one that comes while the kernel is asked.
        changed.as_mut().enable();
        let look = once(node, handle).await?;
        if look.settled || verdict(&look.problems) == Verdict::Well || timeout_at(until, changed).await.is_err() {
            return Ok(look);
        }
    }
}
