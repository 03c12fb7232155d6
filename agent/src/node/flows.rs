//! Last flow collections.

use std::{collections::VecDeque, sync::Mutex};

use wharf_core::flow::FlowUsage;
use wharf_kit::sync::lock;

/// One minute: the status shows bursts between two looks.
const KEPT: usize = 7;

/// The last collections.
#[derive(Debug, Default)]
pub struct Flows(Mutex<VecDeque<Collection>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Collection {
    /// Remaining flows, and counts.
    pub usage: FlowUsage,
    /// End, milliseconds since the Unix epoch.
    pub at_unix_ms: u64,
}

impl Flows {
    pub(crate) fn note(&self, collection: Collection) {
        let mut kept = lock(&self.0);
        kept.truncate(KEPT - 1);
        kept.push_front(collection);
    }

    /// The newest and the oldest.
    #[must_use]
    pub fn recent(&self) -> Option<(Collection, Collection)> {
        let kept = lock(&self.0);
        Some((*kept.front()?, *kept.back()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_and_the_oldest_of_a_minute() {
        let flows = Flows::default();
        assert_eq!(flows.recent(), None);
        let collection = |at_unix_ms| Collection { usage: FlowUsage::default(), at_unix_ms };
        for (n, oldest) in [(1, 1), (2, 1), (7, 1), (8, 2), (9, 3)] {
            while flows.recent().is_none_or(|(last, _)| last.at_unix_ms < n) {
                flows.note(collection(flows.recent().map_or(1, |(last, _)| last.at_unix_ms + 1)));
            }
            assert_eq!(flows.recent(), Some((collection(n), collection(oldest))));
        }
    }
}
