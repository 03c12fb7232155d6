//! Current waits for the proxy.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use wharf_core::ids::EndpointId;
use wharf_kit::{clock, sync::lock};

/// A wait for the proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Awaited {
    pub listener: String,
    /// Endpoint whose removal waits; `None`: a change of policy.
    pub endpoint: Option<EndpointId>,
    /// Start, Unix time, milliseconds.
    pub since_unix_ms: u64,
    /// Maximum, if known here.
    pub at_most: Option<Duration>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Waits {
    /// Held for single map operations.
    all: Arc<Mutex<(u64, BTreeMap<u64, Awaited>)>>,
}

#[derive(Debug)]
pub(super) struct Waiting {
    waits: Waits,
    number: u64,
}

impl Waits {
    pub(super) fn begin(&self, listener: String, endpoint: Option<EndpointId>, at_most: Option<Duration>) -> Waiting {
        let mut all = lock(&self.all);
        let (next, waits) = &mut *all;
        let number = *next;
        *next += 1;
        waits.insert(number, Awaited { listener, endpoint, since_unix_ms: clock::unix_ms(), at_most });
        Waiting { waits: self.clone(), number }
    }

    pub(super) fn list(&self) -> Vec<Awaited> {
        lock(&self.all).1.values().cloned().collect()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        lock(&self.waits.all).1.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_told_until_it_ends() {
        let waits = Waits::default();
        let id = EndpointId::try_from(7).ok();
        let first = waits.begin("ingress-15000".into(), None, Some(Duration::from_millis(500)));
        let second = waits.begin("egress-15001".into(), id, None);
        let told = |waits: &Waits| waits.list().into_iter().map(|w| (w.listener, w.endpoint)).collect::<Vec<_>>();
        assert_eq!(told(&waits), [("ingress-15000".into(), None), ("egress-15001".into(), id)]);
        drop(first);
        assert_eq!(told(&waits), [("egress-15001".into(), id)]);
        drop(second);
        assert_eq!(told(&waits), []);
    }
}
