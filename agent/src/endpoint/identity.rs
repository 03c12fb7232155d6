//! The identity of an endpoint: waited for, within bounds, and given back. What gives identities may be another machine.

use std::{collections::BTreeSet, time::Duration};

use tokio::time::timeout;
use wharf_core::{
    endpoint::EndpointRecord,
    identity::{Identity, Label},
    kernel::Kernel,
    state::{Event, State},
};

use crate::{
    endpoint::task::EndpointTask,
    node::{error::CommandError, lifecycle::Lifecycle},
};

/// How long new labels wait for their identity. Clients of the API wait 30 s and more.
pub const BOUND: Duration = Duration::from_secs(10);
/// How long a delete, or an endpoint of a start, waits.
const SHORT_BOUND: Duration = Duration::from_secs(1);

/// Gives a reference back.
pub async fn release<K: Kernel>(life: &Lifecycle<K>, identity: Identity) {
    if timeout(SHORT_BOUND, life.identities.release(identity)).await.is_err() {
        tracing::warn!(%identity, "release identity: no answer within {SHORT_BOUND:?}; its number stays in use");
    }
}

/// The identity of a restored endpoint: the one that it had, or another where that one stands for other labels.
pub async fn restored<K: Kernel>(life: &Lifecycle<K>, record: &EndpointRecord) -> Identity {
    let endpoint = record.id.get();
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
}
