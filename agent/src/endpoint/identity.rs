//! The identity of an endpoint: waited for, within bounds, and given back. What gives identities may be another machine.

use std::time::Duration;

use tokio::time::timeout;
use wharf_core::{endpoint::EndpointRecord, identity::Identity};

use crate::node::lifecycle::Lifecycle;

/// How long new labels wait for their identity. Clients of the API wait 30 s and more.
pub const BOUND: Duration = Duration::from_secs(10);
/// How long a delete, or an endpoint of a start, waits.
const SHORT_BOUND: Duration = Duration::from_secs(1);

/// Gives a reference back.
pub async fn release(life: &Lifecycle, identity: Identity) {
    if timeout(SHORT_BOUND, life.identities.release(identity)).await.is_err() {
        tracing::warn!(%identity, "release identity: no answer within {SHORT_BOUND:?}; its number stays in use");
    }
}

/// The identity of a restored endpoint: the one that it had, or another where that one stands for other labels.
pub async fn restored(life: &Lifecycle, record: &EndpointRecord) -> Identity {
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
