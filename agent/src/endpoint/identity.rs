//! The identity of an endpoint: waited for, within bounds, and given back. What gives identities may be another machine.

use std::{collections::BTreeSet, time::Duration};

use tokio::time::{Instant, timeout};
use wharf_api::LogStatus;
use wharf_core::{
    endpoint::EndpointRecord,
    identity::{Identity, Label},
    kernel::Kernel,
    state::{Event, Level, State},
};

use crate::{
    endpoint::task::EndpointTask,
    node::{edit::Edit, error::CommandError, lifecycle::Lifecycle},
};

/// How long new labels wait for their identity. Clients of the API wait 30 s and more.
pub const BOUND: Duration = Duration::from_secs(10);
/// How long a delete, or an endpoint of a start, waits.
const SHORT_BOUND: Duration = Duration::from_secs(1);

/// Pause before labels that came too late are taken for all again, after a failure.
const AGAIN: Duration = Duration::from_secs(5);

/// Gives a reference back.
pub async fn release<K: Kernel>(life: &Lifecycle<K>, identity: Identity) {
    if timeout(SHORT_BOUND, life.identities.release(identity)).await.is_err() {
        tracing::warn!(%identity, "release identity: no answer within {SHORT_BOUND:?}; its number stays in use");
    }
}

/// The identity of a restored endpoint: the one that it had, or another where that one stands for other labels.
pub async fn restored<K: Kernel>(life: &Lifecycle<K>, record: &EndpointRecord) -> Identity {
    let endpoint = record.id.get();
    if record.awaits_labels {
        return Identity::INIT;
    }
    let Err(error) = life.identities.claim(record.identity, &record.labels) else { return record.identity };
    tracing::warn!(endpoint, "restore identity: {error}");
    let why = match timeout(SHORT_BOUND, life.identities.acquire(&record.labels)).await {
        Ok(Ok(identity)) => return identity,
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {SHORT_BOUND:?}"),
    };
    tracing::error!(endpoint, "restore identity: {why}; the endpoint keeps {}", record.identity);
    record.identity
}

impl<K: Kernel> EndpointTask<K> {
    /// Waits for the identity of new labels. Those of before stay in force meanwhile; a delete ends the wait.
    pub(super) async fn identity_of(&mut self, labels: &BTreeSet<Label>) -> Result<Identity, CommandError> {
        // Another state does not change: a rebuild after a restart is still to come.
        let waits = self.shared.read(|v| matches!(v.fsm.state, State::Ready | State::WaitingToRegenerate));
        if waits {
            self.transition(Event::IdentityLost);
        }
        let acquired = tokio::select! {
            biased;
            () = self.cancel.cancelled() => return Err(CommandError::Deleted),
            acquired = timeout(BOUND, self.life.identities.acquire(labels)) => acquired,
        };
        if waits {
            // Also without a new one: the endpoint has that of before.
            self.transition(Event::IdentityResolved);
        }
        Ok(acquired.map_err(|_| CommandError::NoIdentity(BOUND))??)
    }

    /// When the labels of an endpoint that awaits them count as known. Counted from the end of its create, and anew from each start of
    /// the agent: no clock is kept that outlives it.
    pub(super) fn labels_due(&self) -> Option<Instant> {
        self.shared.read(|v| v.record.awaits_labels).then(|| Instant::now() + self.life.config.labels_timeout)
    }

    /// No labels came: those that the endpoint has are all. The answer is when that is tried again.
    pub(super) async fn on_labels_due(&mut self) -> Option<Instant> {
        let record = self.shared.read(|v| v.record.clone());
        if !record.awaits_labels || self.cancel.is_cancelled() {
            return None;
        }
        match self.edit(Edit::labels(record.labels)).await {
            Ok(()) => {
                self.transition(Event::BuildRequested(Level::Policy));
                None
            }
            Err(why) => {
                self.shared.log(LogStatus::Warning, "labels", format!("{why}; it is tried again in {AGAIN:?}"));
                Some(Instant::now() + AGAIN)
            }
        }
    }
}
