//! Gives changed rows to the consumer.

use std::{sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;
use wharf_cluster::feed::{Effects, FeedPod};
use wharf_core::state::retry_delay_ms;
use wharf_kit::{controller::Controllers, sync::lock};

use super::{CONTROLLER, ClusterFeed, Consumer, Known, LONGEST_RETRY, Taken, merge};

impl ClusterFeed {
    /// Gives the consumer the changed rows.
    ///
    /// # Errors
    /// The consumer's, or the rows cannot be kept: the changes are repeated by the next call.
    pub async fn take(&self, consumer: &dyn Consumer) -> Result<(), String> {
        let (effects, mark, known, complete, is_news) = {
            let mut inner = lock(&self.inner);
            let effects = inner.feed.take_effects();
            let mut all = std::mem::take(&mut inner.left);
            merge(&mut all, effects);
            let complete = inner.complete();
            let is_known_news = inner.known > inner.taken.0;
            all.nodes |= is_known_news && inner.known == Known::Sent;
            let is_news = is_known_news || complete != inner.taken.1;
            (all, inner.processed, inner.known, complete, is_news)
        };
        if !effects.is_empty() || is_news {
            if !effects.policies.is_empty() || !effects.namespaces.is_empty() {
                // First: no start may have older policies than the kernel.
                let kept = self.keep().await;
                // Before the first stream, the file has these rows.
                if let Err(why) = kept
                    && lock(&self.inner).stream > 0
                {
                    return self.take_without_policies(consumer, effects, why).await;
                }
            }
            let again = effects.clone();
            let Taken { nodes, rows, refused } = consumer.take(effects, complete.clone()).await;
            let mut inner = lock(&self.inner);
            inner.revision += 1;
            inner.left.nodes = again.nodes && nodes.is_err();
            if rows.is_err() {
                inner.left = Effects { nodes: inner.left.nodes, ..again };
            }
            inner.unfit = refused;
            inner.not_taken = nodes.and(rows).err();
            if let Some(why) = &inner.not_taken {
                return Err(why.clone());
            }
            inner.taken = (known, complete);
        }
        self.in_force.send_replace(mark);
        Ok(())
    }

    /// The feed's file cannot be written (`why`): policies, namespaces and this node's pods, which have no labels
    /// before their rules, wait.
    async fn take_without_policies(&self, consumer: &dyn Consumer, all: Effects, why: String) -> Result<(), String> {
        let is_of_own = |pod: &Option<Arc<FeedPod>>| pod.as_ref().is_some_and(|pod| pod.is_of(&self.own));
        let (waiting, pods) = all.pods.into_iter().partition(|(_, pod)| is_of_own(pod));
        let now = Effects { nodes: all.nodes, pods, ..Effects::default() };
        let mut left = Effects { nodes: false, pods: waiting, ..all };
        if !now.is_empty() {
            let complete = lock(&self.inner).taken.1.clone();
            let again = now.clone();
            let Taken { nodes, rows, refused } = consumer.take(now, complete).await;
            left.nodes = again.nodes && nodes.is_err();
            if rows.is_err() {
                left.pods.extend(again.pods);
            }
            let mut inner = lock(&self.inner);
            inner.revision += 1;
            inner.unfit = refused;
        }
        let mut inner = lock(&self.inner);
        inner.left = left;
        inner.not_taken = Some(why.clone());
        Err(why)
    }

    /// Updates the consumer's refused rows, which others can change.
    pub async fn look(&self, consumer: &dyn Consumer) {
        let refused = consumer.refused().await;
        let mut inner = lock(&self.inner);
        if inner.unfit != refused {
            inner.unfit = refused;
            inner.revision += 1;
        }
    }

    /// Gives the consumer each change until `stop`.
    pub async fn follow(&self, consumer: &dyn Consumer, controllers: &Controllers, stop: &CancellationToken) {
        self.changed.notify_one();
        let mut failed = 0;
        loop {
            let retry = retry_delay_ms(u32::try_from(failed).unwrap_or(u32::MAX), rand::random());
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.changed.notified() => {}
                () = tokio::time::sleep(Duration::from_millis(retry).min(LONGEST_RETRY)), if failed > 0 => {}
            }
            let run = controllers.begin(CONTROLLER);
            let result = self.take(consumer).await;
            if let Err(why) = &result {
                tracing::warn!(controller = CONTROLLER, "{why}");
            }
            failed = run.end(result);
        }
    }
}
