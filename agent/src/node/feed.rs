//! Puts the rows of the cluster feed in force.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use futures::future::join_all;
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};
use wharf_cluster::feed::{Complete, Effects, FeedPod, Key, Kind, Refusal};
use wharf_core::state::State;

use super::{
    endpoint::{Command, Handle},
    error::CommandError,
    lifecycle::Lifecycle,
    network::ClusterFailure,
    pods::ChangedRow,
};
use crate::{
    cluster::feed::{Consumer, Taken, Taking},
    policy::{RefusedPolicy, error::PolicyError},
};

/// Bounds all changed pods' builds; later rows wait.
const PODS: Duration = Duration::from_secs(10);

impl Consumer for Lifecycle {
    fn take(&self, effects: Effects, complete: Complete) -> Taking<'_> {
        Box::pin(async move {
            let nodes = if effects.nodes { self.take_nodes().await } else { Ok(()) };
            let pods = self.endpoints.pods.of_own(&self.config.node_name, &effects.pods);
            // Also after a failure.
            let rows = self.take_rows(effects, complete).await;
            // After the message's policies: no endpoint may have labels without their rules. After a failure, the next
            // call takes these pods.
            let late = if rows.is_ok() { self.take_pods(pods).await } else { Vec::new() };
            if rows.is_ok() && self.policy.has_started() {
                // Labels of namespaces and pods can also lead connections to other listeners.
                self.policy.settle().await;
            }
            let refused = self.refused().await.into_iter().chain(late);
            let refused: BTreeMap<Key, Refusal> = refused.map(|refusal| (refusal.key.clone(), refusal)).collect();
            Taken {
                nodes: nodes.map_err(|why| why.to_string()),
                rows: rows.map_err(|why| why.to_string()),
                refused: refused.into_values().collect(),
            }
        })
    }

    fn refused(&self) -> Pin<Box<dyn Future<Output = Vec<Refusal>> + Send + '_>> {
        let refusal = |(key, RefusedPolicy { why, stale, conflict }): (String, _)| Refusal {
            name: key.clone(),
            key: Key { kind: Kind::Policy, key },
            why,
            stale,
            conflict,
        };
        Box::pin(async move {
            let policies = self.policy.refused_rows().await.into_iter().map(refusal);
            self.behind().into_values().chain(policies).collect()
        })
    }
}

fn not_in_force(pod: &FeedPod, handle: &Handle, why: &str) -> Refusal {
    let FeedPod { uid, namespace, name, .. } = pod;
    Refusal {
        key: Key { kind: Kind::Pod, key: uid.to_string() },
        name: format!("{namespace}/{name}"),
        why: format!("not in force at endpoint {}: {why}; it is tried again", handle.id),
        stale: true,
        conflict: false,
    }
}

async fn ask(handle: Handle, pod: Arc<FeedPod>, until: Instant) -> Option<Refusal> {
    let (done, answer) = oneshot::channel();
    let realized = async {
        handle.mailbox.send(Command::PodRow(done)).await.ok()?;
        answer.await.ok()
    };
    match timeout_at(until, realized).await {
        Ok(None | Some(Ok(()))) => None,
        Ok(Some(Err(CommandError::Deleted | CommandError::NotCreated | CommandError::Refused { .. }))) => None,
        Ok(Some(Err(why))) => Some(not_in_force(&pod, &handle, &why.to_string())),
        Err(_) => Some(not_in_force(&pod, &handle, &format!("no answer within {PODS:?}"))),
    }
}

impl Lifecycle {
    async fn take_nodes(&self) -> Result<(), ClusterFailure> {
        self.network.cluster.look().await?;
        // Also without a difference: an earlier attempt may have failed.
        self.network.put_cluster().await
    }

    /// Returns the rows not in force.
    async fn take_pods(&self, changed: Vec<ChangedRow>) -> Vec<Refusal> {
        if changed.is_empty() {
            return Vec::new();
        }
        let uids: BTreeSet<Arc<str>> = changed.iter().map(|(uid, _)| Arc::clone(uid)).collect();
        self.endpoints.pods.put(changed);
        if !self.policy.has_started() {
            // Builds wait for policy; `behind` asks endpoints whose build began without the row.
            return Vec::new();
        }
        let until = Instant::now() + PODS;
        let mut asked = Vec::new();
        for handle in self.endpoints.registry.list() {
            let (record, state, committed) = handle.shared.read(|v| (v.record.clone(), v.fsm.state, v.committed));
            let is_early = !committed && state != State::Regenerating;
            if let Some(pod) = self.endpoints.pods.row_of(&record).filter(|_| !is_early)
                && uids.contains(&pod.uid)
            {
                asked.push(ask(handle, pod, until));
            }
        }
        if asked.is_empty() {
            return Vec::new();
        }
        join_all(asked).await.into_iter().flatten().collect()
    }

    /// Endpoints retry builds themselves.
    fn behind(&self) -> BTreeMap<Key, Refusal> {
        let mut behind = BTreeMap::new();
        for handle in self.endpoints.registry.list() {
            let view = handle.shared.view();
            let is_leaving = handle.cancel.is_cancelled() || view.fsm.state == State::Disconnecting;
            let Some(pod) = self.endpoints.pods.row_of(&view.record).filter(|_| view.committed && !is_leaving) else {
                continue;
            };
            let differs = self.endpoints.pods.with_row(&view.record).is_some();
            if !differs && view.fsm.failures == 0 {
                continue;
            }
            if differs && handle.mailbox.capacity() == handle.mailbox.max_capacity() {
                let (done, _) = oneshot::channel();
                drop(handle.mailbox.try_send(Command::PodRow(done))); // a full mailbox is asked later
            }
            let why = view.status.last_error.as_deref().unwrap_or("its labels wait for the endpoint's task");
            let refusal = not_in_force(&pod, &handle, why);
            behind.insert(refusal.key.clone(), refusal);
        }
        behind
    }

    async fn take_rows(&self, effects: Effects, complete: Complete) -> Result<(), PolicyError> {
        self.policy.take_feed(&self.config.node_name, Effects { nodes: false, ..effects }, complete).await
    }
}
