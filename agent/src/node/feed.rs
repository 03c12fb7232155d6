//! Puts the rows of the cluster feed in force.

use std::pin::Pin;

use wharf_cluster::feed::{Effects, Key, Kind, Refusal};
use wharf_core::{finding::NodeProblem, kernel::PeerRoute};

use super::lifecycle::{ClusterFailure, Lifecycle};
use crate::{
    cluster::{
        ClusterError,
        feed::{Consumer, Taken, Taking},
    },
    policy::{RefusedPolicy, error::PolicyError},
};

impl Consumer for Lifecycle {
    fn take(&self, effects: Effects, is_whole: bool) -> Taking<'_> {
        Box::pin(async move {
            let nodes = if effects.nodes { self.take_nodes().await } else { Ok(()) };
            // Also after a failure: policy does not wait for routes.
            let rows = self.take_rows(effects, is_whole).await;
            Taken {
                nodes: nodes.map_err(|why| why.to_string()),
                rows: rows.map_err(|why| why.to_string()),
                refused: self.refused().await,
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
        Box::pin(async move { self.policy.refused_rows().await.into_iter().map(refusal).collect() })
    }
}

impl Lifecycle {
    /// At a start, before the node's objects are made.
    ///
    /// # Errors
    /// The file of nodes is refused and no earlier text of it is kept; or the kernel cannot be read.
    pub async fn load_cluster(&self, boot_id: &str) -> Result<(), ClusterError> {
        let left = if self.cluster.feed().is_some() { self.routes_left().await? } else { Vec::new() };
        self.cluster.load(boot_id, left).await
    }

    /// Routes to other nodes that no known node explains.
    async fn routes_left(&self) -> Result<Vec<PeerRoute>, ClusterError> {
        let left = |problem: NodeProblem| match problem {
            NodeProblem::PeerRoute { to, expected: None, found: Some(via) } => Some(PeerRoute { to, via }),
            _ => None,
        };
        Ok(self.kernel.observe_node(&self.spec()).await?.into_iter().filter_map(left).collect())
    }

    /// Nodes: routes, masquerading and the networks of their containers.
    async fn take_nodes(&self) -> Result<(), ClusterFailure> {
        self.cluster.look().await?;
        // Also if the look finds no difference: an earlier attempt may have failed after it.
        self.put_cluster().await
    }

    /// Pods, namespaces and policies.
    async fn take_rows(&self, effects: Effects, is_whole: bool) -> Result<(), PolicyError> {
        self.policy.take_feed(&self.config.node_name, Effects { nodes: false, ..effects }, is_whole).await
    }
}
