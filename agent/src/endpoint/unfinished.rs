//! Unfinished undos of creates and program preparations.
//!
//! They keep id, leases and intent. [`crate::endpoint::resume`] and deletes of the container retry them.

use std::{net::IpAddr, sync::Arc};

use wharf_core::ids::{Attachment, EndpointId, Epoch};

use crate::{
    endpoint::{error::RemoveError, undo},
    node::{
        aside::{Aside, Wanted},
        endpoints::Endpoints,
        leftovers::Unfinished,
        lifecycle::Lifecycle,
    },
};

/// Keeps a failed undo and its id.
pub fn keep(unfinished: &Aside<Unfinished>, id: EndpointId, left: Unfinished) {
    let attachment = match &left {
        Unfinished::Programs => None,
        Unfinished::Create(remains) => Some(remains.shared.read(|v| v.record.attachment.clone())),
    };
    unfinished.put(id, attachment, left);
}

/// Whether an undo holds this endpoint's leases.
pub fn holds(unfinished: &Aside<Unfinished>, attachment: &Attachment, epoch: Epoch) -> bool {
    unfinished.find(&Wanted::of(attachment)).into_iter().any(|id| match unfinished.get(id) {
        Some(Unfinished::Create(remains)) => remains.shared.read(|v| v.record.epoch) == epoch,
        Some(Unfinished::Programs) | None => false,
    })
}

/// Finishes an undo; returns the released addresses.
///
/// # Errors
/// Failed steps; the undo stays.
pub async fn finish(life: &Arc<Lifecycle>, id: EndpointId) -> Result<Vec<IpAddr>, RemoveError> {
    let _alone = life.endpoints.leftovers.removals.acquire(id).await;
    let _working = life.endpoints.jobs.working_on(id);
    let Some(mut work) = Work::take(&life.endpoints, id) else { return Ok(Vec::new()) };
    let released = match &mut work.left {
        Some(Unfinished::Create(remains)) => undo::again(life, remains).await?,
        _ => {
            life.endpoints.jobs.remove_programs(id).await?;
            Vec::new()
        }
    };
    work.left = None;
    tracing::info!(endpoint = id.get(), "an undo that had failed is finished");
    Ok(released)
}

/// Stays in the table during the work, so that no delete releases its leases.
struct Work<'a> {
    endpoints: &'a Endpoints,
    id: EndpointId,
    left: Option<Unfinished>,
}

impl<'a> Work<'a> {
    fn take(endpoints: &'a Endpoints, id: EndpointId) -> Option<Self> {
        let left = endpoints.leftovers.unfinished.get(id)?;
        Some(Self { endpoints, id, left: Some(left) })
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        match self.left.take() {
            Some(left) => keep(&self.endpoints.leftovers.unfinished, self.id, left),
            None => {
                self.endpoints.leftovers.unfinished.remove(self.id);
                self.endpoints.registry.free_id(self.id);
            }
        }
    }
}
