//! An endpoint's identity, possibly from another machine.

use std::time::Duration;

use tokio::time::timeout;
use wharf_core::{endpoint::EndpointRecord, identities::Identities, identity::Identity};

/// For new labels. API clients wait 30 s or more.
pub const BOUND: Duration = Duration::from_secs(10);
/// For a delete, and each endpoint at a start.
const SHORT_BOUND: Duration = Duration::from_secs(1);

/// Releases a reference.
pub async fn release(identities: &dyn Identities, identity: Identity) {
    if timeout(SHORT_BOUND, identities.release(identity)).await.is_err() {
        tracing::warn!(%identity, "release identity: no answer within {SHORT_BOUND:?}; its number stays in use");
    }
}

/// A restored endpoint's identity: the old one, unless it has other labels.
pub async fn restored(identities: &dyn Identities, record: &EndpointRecord) -> Identity {
    let endpoint = record.id.get();
    if record.awaits_labels {
        return Identity::INIT;
    }
    let Err(error) = identities.claim(record.identity, &record.labels) else { return record.identity };
    tracing::warn!(endpoint, "restore identity: {error}");
    let why = match timeout(SHORT_BOUND, identities.acquire(&record.labels)).await {
        Ok(Ok(identity)) => return identity,
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {SHORT_BOUND:?}"),
    };
    tracing::error!(endpoint, "restore identity: {why}; the endpoint keeps {}", record.identity);
    record.identity
}
