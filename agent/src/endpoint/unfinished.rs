//! Unfinished undos: of creates and of program preparations that failed.
//!
//! The id stays taken, addresses stay leased and the intent stays open until the undo succeeds. It is retried every
//! 30 s ([`crate::endpoint::resume`]) and by a delete of its container.

use std::{net::IpAddr, sync::Arc};

use wharf_core::{
    ids::{Attachment, EndpointId, Epoch},
    kernel::Kernel,
};

use crate::{
    endpoint::{error::RemoveError, undo},
    node::{Node, aside::Wanted, leftovers::Unfinished},
    sync::lock,
};

/// Keeps an undo that failed; its id stays taken.
pub fn keep<K: Kernel>(node: &Node<K>, id: EndpointId, left: Unfinished) {
    let attachment = match &left {
        Unfinished::Programs => None,
        Unfinished::Create(remains) => Some(remains.shared.read(|v| v.record.attachment.clone())),
    };
    lock(&node.unfinished).put(id, attachment, left);
}

/// Ids of all unfinished undos.
pub fn ids<K: Kernel>(node: &Node<K>) -> Vec<EndpointId> {
    lock(&node.unfinished).ids().collect()
}

/// Ids of the unfinished undos that match.
pub fn find<K: Kernel>(node: &Node<K>, wanted: &Wanted) -> Vec<EndpointId> {
    lock(&node.unfinished).find(wanted)
}

/// Attachments of the unfinished creates.
pub fn attachments<K: Kernel>(node: &Node<K>) -> Vec<Attachment> {
    lock(&node.unfinished).attachments().cloned().collect()
}

/// Whether an unfinished undo holds the leases of this attachment and epoch.
pub fn holds<K: Kernel>(node: &Node<K>, attachment: &Attachment, epoch: Epoch) -> bool {
    let all = lock(&node.unfinished);
    all.find(&Wanted::of(attachment)).into_iter().any(|id| match all.get(id) {
        Some(Unfinished::Create(remains)) => remains.shared.read(|v| v.record.epoch) == epoch,
        Some(Unfinished::Programs) | None => false,
    })
}

/// Finishes the undo of an id and frees the id. Returns the released addresses.
///
/// # Errors
/// The steps that failed and why; the undo stays unfinished.
pub async fn finish<K: Kernel>(node: &Arc<Node<K>>, id: EndpointId) -> Result<Vec<IpAddr>, RemoveError> {
    let _working = node.jobs.working_on(id);
    let Some(mut work) = Work::take(node, id) else { return Ok(Vec::new()) };
    let released = match &mut work.left {
        Some(Unfinished::Create(remains)) => undo::again(node, remains).await?,
        _ => {
            node.jobs.remove_programs(id).await?;
            Vec::new()
        }
    };
    work.left = None;
    tracing::info!(endpoint = id.get(), "an undo that had failed is finished");
    Ok(released)
}

/// An undo taken out of the table by its one worker. When dropped before its end, it returns to the table.
struct Work<K: Kernel> {
    node: Arc<Node<K>>,
    id: EndpointId,
    left: Option<Unfinished>,
}

impl<K: Kernel> Work<K> {
    fn take(node: &Arc<Node<K>>, id: EndpointId) -> Option<Self> {
        let left = lock(&node.unfinished).remove(id)?;
        Some(Self { node: Arc::clone(node), id, left: Some(left) })
    }
}

impl<K: Kernel> Drop for Work<K> {
    fn drop(&mut self) {
        match self.left.take() {
            Some(left) => keep(&self.node, self.id, left),
            None => self.node.registry.free_id(self.id),
        }
    }
}
