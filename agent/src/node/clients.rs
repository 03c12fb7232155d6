//! Proxy clients with an exhausted share of connections.

use std::{collections::BTreeMap, sync::Mutex, time::Duration};

use tokio::time::Instant;
use wharf_core::ids::EndpointId;
use wharf_kit::sync::lock;

/// After a client's last count.
const TOLD: Duration = Duration::from_secs(60);

/// Clients with the time of the last count that found them.
#[derive(Debug, Default)]
pub struct Clients(Mutex<BTreeMap<EndpointId, Instant>>);

impl Clients {
    pub(crate) fn note(&self, spent: Vec<EndpointId>, now: Instant) {
        let mut told = lock(&self.0);
        told.retain(|_, at| now.saturating_duration_since(*at) < TOLD);
        told.extend(spent.into_iter().map(|id| (id, now)));
    }

    /// In the last minute.
    pub fn spent(&self, now: Instant) -> Vec<EndpointId> {
        let is_recent = |at: &Instant| now.saturating_duration_since(*at) < TOLD;
        lock(&self.0).iter().filter(|(_, at)| is_recent(at)).map(|(id, _)| *id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_told_for_a_minute() {
        let (clients, id, began) = (Clients::default(), EndpointId::try_from(7).expect("an id"), Instant::now());
        clients.note(vec![id], began);
        clients.note(Vec::new(), began + TOLD / 2);
        assert_eq!(clients.spent(began + TOLD / 2), [id]);
        assert_eq!(clients.spent(began + TOLD), []);
    }
}
