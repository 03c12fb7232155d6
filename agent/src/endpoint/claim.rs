//! A new endpoint on its way to whoever asked for it.

use std::sync::Arc;

use wharf_api::LogStatus;
use wharf_core::kernel::Kernel;

use crate::{
    endpoint::delete,
    node::{
        Node,
        endpoint::{Handle, api_endpoint},
    },
};

/// An endpoint that nobody has accepted yet. Dropped unaccepted, wherever it got to (the caller is gone before the
/// answer, or between the answer and its reading), the endpoint is taken back: nobody knows of it, so nobody would ever
/// delete it.
pub(super) struct Claim<K: Kernel> {
    endpoint: Option<(Arc<Node<K>>, Handle)>,
    answer: wharf_api::Endpoint,
}

impl<K: Kernel> Claim<K> {
    pub(super) fn new(node: &Arc<Node<K>>, handle: Handle) -> Self {
        let answer = handle.shared.read(api_endpoint);
        Self { endpoint: Some((Arc::clone(node), handle)), answer }
    }

    /// The caller has it; from here on it is the caller's to delete.
    pub(super) fn accept(mut self) -> wharf_api::Endpoint {
        self.endpoint = None;
        self.answer.clone()
    }
}

impl<K: Kernel> Drop for Claim<K> {
    fn drop(&mut self) {
        let Some((node, handle)) = self.endpoint.take() else { return };
        // Without a runtime the agent itself is gone; the record stays, and the runtime's DEL, which follows every ADD,
        // finds the endpoint after the restart.
        if tokio::runtime::Handle::try_current().is_ok() {
            handle.shared.log(LogStatus::Warning, "unclaimed", "the caller went away before the answer; taken back");
            delete::spawn_unclaimed(&node, handle);
        }
    }
}
