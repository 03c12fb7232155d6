//! Verdicts on direct paths to other nodes, which `health::paths` probes.

use std::{net::IpAddr, sync::Arc};

use wharf_cluster::{
    paths::{Path, Probed},
    routes::Routing,
};
use wharf_kit::sync::lock;

use super::Cluster;

impl Cluster {
    /// Whether routes depend on probes of direct paths.
    #[must_use]
    pub fn probes_paths(&self) -> bool {
        self.routing == Routing::Auto && (self.path.is_some() || self.feed.is_some())
    }

    /// Direct paths without a verdict whose routes the kernel has. `routers`: router addresses of this node.
    pub async fn open_paths(&self, routers: &[IpAddr]) -> Vec<Path> {
        let looks = self.looks.lock().await;
        let in_force = self.in_force();
        if !lock(&self.applied).in_force.as_ref().is_some_and(|applied| Arc::ptr_eq(applied, &in_force)) {
            return Vec::new();
        }
        looks.verdicts.open(&in_force.nodes, &in_force.destinations, &in_force.trials, routers)
    }

    /// Takes probe results. The next look puts new verdicts in force.
    pub async fn judge_paths(&self, probed: &[Probed]) {
        let mut looks = self.looks.lock().await;
        let before = looks.verdicts.detours();
        if !looks.verdicts.judge(&self.in_force().nodes, probed) {
            return;
        }
        looks.planned = None;
        let now = looks.verdicts.detours();
        for (node, why) in now.iter().filter(|(node, why)| before.get(*node) != Some(why)) {
            tracing::info!(node, "packets to its containers take the overlay: {why}");
        }
        for node in before.keys().filter(|node| !now.contains_key(*node)) {
            tracing::info!(node, "packets to its containers take the direct path");
        }
    }
}
