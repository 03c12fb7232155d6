//! The cluster feed's rows of this node's pods, for their endpoints.

use std::sync::{Arc, Mutex};

use tokio::sync::Notify;
use wharf_cluster::feed::{Changed, FeedPod, OwnPods, PodRef};
use wharf_core::endpoint::{EndpointRecord, PodRow};
use wharf_kit::sync::lock;

/// A row by the pod's uid; `None`: gone.
pub type ChangedRow = (Arc<str>, Option<Arc<FeedPod>>);

/// Rows that the feed's consumer has put in force.
#[derive(Default)]
pub struct Pods {
    has_feed: bool,
    /// Held for look-ups only.
    rows: Mutex<OwnPods>,
    changed: Notify,
}

impl Pods {
    /// Without rows.
    #[must_use]
    pub fn new(has_feed: bool) -> Self {
        Self { has_feed, ..Self::default() }
    }

    /// Whether the endpoint's labels come from a row: it has a pod, and there is a feed.
    #[must_use]
    pub fn expects_row(&self, record: &EndpointRecord) -> bool {
        self.has_feed && pod_of(record).is_some()
    }

    /// Changes of pods of node `own`.
    #[must_use]
    pub fn of_own(&self, own: &str, pods: &Changed<FeedPod>) -> Vec<ChangedRow> {
        let rows = lock(&self.rows);
        let of_node = pods.iter().map(|(uid, pod)| (uid, pod.as_ref().filter(|pod| pod.is_of(own))));
        let concerned = of_node.filter(|(uid, pod)| pod.is_some() || rows.get(uid).is_some());
        concerned.map(|(uid, pod)| (Arc::clone(uid), pod.cloned())).collect()
    }

    /// Puts or removes rows.
    pub fn put(&self, changed: Vec<ChangedRow>) {
        let mut rows = lock(&self.rows);
        for (uid, pod) in changed {
            rows.put(&uid, pod);
        }
        drop(rows);
        self.changed.notify_waiters();
    }

    /// The row of an endpoint's pod.
    #[must_use]
    pub fn row_of(&self, record: &EndpointRecord) -> Option<Arc<FeedPod>> {
        lock(&self.rows).row_of(pod_of(record)?).cloned()
    }

    /// The record with its pod's row; `None` if unchanged.
    #[must_use]
    pub fn with_row(&self, record: &EndpointRecord) -> Option<EndpointRecord> {
        let row = PodRow::from(&**lock(&self.rows).row_of(pod_of(record)?)?);
        let mut changed = record.clone();
        changed.set_pod_row(row);
        (changed != *record).then_some(changed)
    }

    /// Waits for a row that changes the record.
    pub async fn arrives(&self, record: &EndpointRecord) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Before the look, so that no change is missed.
            changed.as_mut().enable();
            if self.with_row(record).is_some() {
                return;
            }
            changed.await;
        }
    }
}

fn pod_of(record: &EndpointRecord) -> Option<PodRef<'_>> {
    Some(PodRef {
        namespace: record.pod_namespace.as_deref()?,
        name: record.pod_name.as_deref()?,
        uid: record.pod_uid(),
        row: record.pod_row.as_ref().map(|row| row.uid.as_str()),
    })
}
