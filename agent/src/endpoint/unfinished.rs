//! What could not be undone: creates and loads ahead of need that failed and whose undo failed too.
//!
//! The id stays taken, addresses stay leased and the intent stays open until nothing is left of it. The rest of the undo
//! is tried again every 30 s ([`crate::endpoint::resume`]) and when the delete of its container comes.

use std::{net::IpAddr, sync::Arc};

use wharf_core::{
    ids::{Attachment, EndpointId, Epoch},
    kernel::Kernel,
};

use crate::{
    endpoint::undo,
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

/// The ids of all.
pub fn ids<K: Kernel>(node: &Node<K>) -> Vec<EndpointId> {
    lock(&node.unfinished).ids().collect()
}

/// The ids of those that are meant.
pub fn find<K: Kernel>(node: &Node<K>, wanted: &Wanted) -> Vec<EndpointId> {
    lock(&node.unfinished).find(wanted)
}

/// Whose they are.
pub fn attachments<K: Kernel>(node: &Node<K>) -> Vec<Attachment> {
    lock(&node.unfinished).attachments().cloned().collect()
}

/// Whether the leases of this attachment and epoch wait for the end of an undo.
pub fn holds<K: Kernel>(node: &Node<K>, attachment: &Attachment, epoch: Epoch) -> bool {
    let all = lock(&node.unfinished);
    all.find(&Wanted::of(attachment)).into_iter().any(|id| match all.get(id) {
        Some(Unfinished::Create(remains)) => remains.shared.read(|v| v.record.epoch) == epoch,
        Some(Unfinished::Programs) | None => false,
    })
}

/// Takes back what is left under an id and frees the id. Returns the addresses that are free of it.
///
/// # Errors
/// What could not be taken back and why; it stays unfinished then.
pub async fn finish<K: Kernel>(node: &Arc<Node<K>>, id: EndpointId) -> Result<Vec<IpAddr>, String> {
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

/// An undo that somebody is at: it is nobody else's meanwhile. Dropped before its end, it is unfinished again.
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
