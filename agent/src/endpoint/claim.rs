//! A new endpoint until its creator accepts it.

use std::sync::Arc;

use wharf_api::LogStatus;

use crate::{
    endpoint::delete,
    node::{
        endpoint::{Handle, api_endpoint},
        lifecycle::Lifecycle,
    },
};

/// Deletes the endpoint when dropped: no caller knows it.
pub(super) struct Claim {
    endpoint: Option<(Arc<Lifecycle>, Handle)>,
    answer: wharf_api::Endpoint,
}

impl Claim {
    pub(super) fn new(life: &Arc<Lifecycle>, handle: Handle) -> Self {
        let answer = handle.shared.read(|view| api_endpoint(view, life.config.masquerade.is_some()));
        Self { endpoint: Some((Arc::clone(life), handle)), answer }
    }

    pub(super) fn accept(mut self) -> wharf_api::Endpoint {
        self.endpoint = None;
        self.answer.clone()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let Some((life, handle)) = self.endpoint.take() else { return };
        // The agent ends; after the restart, the runtime's DEL deletes the endpoint.
        if tokio::runtime::Handle::try_current().is_ok() {
            handle.shared.log(LogStatus::Warning, "unclaimed", "the caller went away before the answer; taken back");
            delete::spawn_unclaimed(&life, handle);
        }
    }
}
