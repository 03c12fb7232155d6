//! The cluster's nodes, from `--cluster-file` or the [`feed`], and this node's routes to their containers.
//!
//! A changed file is taken when two successive looks read the same text: it may be half-written. A refused or missing
//! file changes nothing. The state directory keeps the last good text for a start whose file is refused.

pub mod feed;
mod paths;
pub mod pools;
mod refusals;
pub mod unknown;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use tokio::{sync::watch, time::Instant};
use wharf_cluster::{
    feed::Kind,
    file::{self, MAX_FILE},
    nodes::Nodes,
    paths::{Detours, Verdicts},
    routes::{self, Destination, Routing, Unrouted},
};
use wharf_core::{
    ipam::PoolConfig,
    kernel::{Kernel, KernelError, MissingRoute, PeerRoute},
};
use wharf_kit::{kept, sync::lock};

use self::{feed::ClusterFeed, pools::OwnPools, refusals::RefusalsFile, unknown::Networks};
use crate::config::AgentConfig;

/// Name of the controller.
pub const CONTROLLER: &str = "cluster";
/// Interval of looks at the file.
pub const INTERVAL: Duration = Duration::from_secs(2);
/// Interval of plans without changed nodes: this node's networks may have changed. A plan reads every route.
const PLANS: Duration = Duration::from_secs(10);
const NAMED: usize = 8;

/// Why the cluster's nodes are unknown.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ClusterError {
    /// The file is refused.
    #[error("cluster file {}: {why}", path.display())]
    File {
        path: PathBuf,
        /// With a line number if there is one.
        why: String,
    },
    /// This node's networks cannot be read.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Nodes and routes in force, with problems.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InForce {
    /// All nodes, including this one.
    pub nodes: Nodes,
    /// Pod CIDRs of other nodes.
    pub destinations: Vec<Destination>,
    /// Near nodes reached by the overlay.
    pub detours: Detours,
    /// Trial routes to router addresses.
    pub trials: Vec<PeerRoute>,
    /// CIDRs of pools without a route of another node.
    pub outside: Vec<IpNet>,
    /// Addresses of this node's row that the node lacks.
    pub absent: Vec<IpAddr>,
    /// Why file or feed are not fully in force.
    pub refused: Option<String>,
    /// Why the text is not kept for the next start.
    pub not_kept: Option<String>,
}

/// The cluster of `--cluster-file` or `--cluster-feed`; otherwise without nodes.
pub struct Cluster {
    path: Option<PathBuf>,
    feed: Option<Arc<ClusterFeed>>,
    own: String,
    routing: Routing,
    kept: PathBuf,
    refusals: RefusalsFile,
    pools: Vec<PoolConfig>,
    services: Vec<IpNet>,
    own_pools: Option<OwnPools>,
    kernel: Arc<dyn Kernel>,
    /// One look at a time. Held while file and kernel are read, which the caller bounds.
    looks: tokio::sync::Mutex<Looks>,
    in_force: watch::Sender<Arc<InForce>>,
    /// Held for look-ups only.
    applied: Mutex<Applied>,
    /// Held for look-ups only.
    networks: Mutex<Networks>,
}

#[derive(Default)]
struct Applied {
    in_force: Option<Arc<InForce>>,
    missing: Vec<MissingRoute>,
    failed: Option<String>,
}

/// Routes of [`InForce`] missing in the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MissingRoutes {
    /// Nodes and a cause; `None` if no route is missing.
    pub why: Option<String>,
    /// There are routes to other nodes, and the kernel has none.
    pub all: bool,
}

impl Applied {
    fn missing(&self) -> MissingRoutes {
        if let Some(why) = &self.failed {
            return MissingRoutes { why: Some(format!("routes to other nodes may be missing: {why}")), all: false };
        }
        let missing: BTreeMap<IpNet, &str> = self.missing.iter().map(|route| (route.to, &*route.why)).collect();
        let routed = self.in_force.iter().flat_map(|applied| &applied.destinations).filter(|to| to.via.is_ok());
        let (lacking, there): (Vec<_>, Vec<_>) = routed.partition(|to| missing.contains_key(&to.cidr));
        let why = lacking.first().map(|first| {
            let nodes: BTreeSet<&str> = lacking.iter().map(|to| to.node.as_str()).collect();
            let named = nodes.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
            let more = match nodes.len().saturating_sub(NAMED) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let cause = missing.get(&first.cidr).copied().unwrap_or_default();
            format!("the kernel has no route to containers of the nodes {named}{more}: {cause}")
        });
        MissingRoutes { all: why.is_some() && there.is_empty(), why }
    }
}

#[derive(Default)]
struct Looks {
    text: Option<String>,
    seen: Option<String>,
    planned: Option<Instant>,
    not_kept: Option<String>,
    /// Routes of an earlier start without a row; they stay until the feed has every row.
    left: Vec<Destination>,
    verdicts: Verdicts,
}

/// Node name for [`Looks::left`].
const EARLIER: &str = "of an earlier start";

struct Plan {
    destinations: Vec<Destination>,
    detours: Detours,
    trials: Vec<PeerRoute>,
    absent: Vec<IpAddr>,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    file: PathBuf,
    text: String,
}

impl Cluster {
    /// Before [`Cluster::load`].
    #[must_use]
    pub fn new(config: &AgentConfig, kernel: Arc<dyn Kernel>) -> Self {
        let unread = |path: &PathBuf| format!("cluster file {}: it is not read yet", path.display());
        let before = InForce { refused: config.cluster_file.as_ref().map(unread), ..InForce::default() };
        let feed = |directory: &PathBuf| {
            let group = config.cluster_feed_group.clone();
            Arc::new(ClusterFeed::new(&config.node_name, directory, group, &config.state_dir))
        };
        Self {
            path: config.cluster_file.clone(),
            feed: config.cluster_feed.as_ref().map(feed),
            own: config.node_name.clone(),
            routing: config.routing,
            kept: config.state_dir.join("cluster.json"),
            refusals: RefusalsFile::new(&config.state_dir),
            pools: config.pools.clone(),
            services: config.service_cidr.clone(),
            own_pools: OwnPools::new(config),
            kernel,
            looks: tokio::sync::Mutex::default(),
            in_force: watch::Sender::new(Arc::new(before)),
            applied: Mutex::default(),
            networks: Mutex::default(),
        }
    }

    /// The cluster file, if set.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The feed, if set.
    #[must_use]
    pub fn feed(&self) -> Option<&Arc<ClusterFeed>> {
        self.feed.as_ref()
    }

    /// The pools of `--pools-from-cluster`, if set.
    #[must_use]
    pub fn own_pools(&self) -> Option<&OwnPools> {
        self.own_pools.as_ref()
    }

    /// Pod CIDRs of this node's row; `None` while unknown.
    #[must_use]
    pub fn own_pod_cidrs(&self) -> Option<Vec<IpNet>> {
        match &self.feed {
            Some(feed) => feed.own_pod_cidrs(),
            None => self.in_force().nodes.get(&self.own).map(|row| row.pod_cidrs.clone()),
        }
    }

    /// Why no container can have an address of this node's pools.
    #[must_use]
    pub fn without_pools(&self) -> Option<String> {
        let own = self.own_pools()?;
        let by_row = || {
            let row = self.own_pod_cidrs()?;
            own.outdated(&row).or_else(|| self.contested(&row))
        };
        own.missing().or_else(|| self.taken()).or_else(by_row)
    }

    fn taken(&self) -> Option<String> {
        self.in_force().destinations.iter().find_map(|Destination { node, cidr, via }| match via {
            Err(Unrouted::Pool(pool)) => {
                Some(format!("pool {pool} overlaps the pod CIDR {cidr} of node {node}, whose containers may use it"))
            }
            _ => None,
        })
    }

    /// Pod CIDRs that another row also claims belong to neither.
    fn contested(&self, row: &[IpNet]) -> Option<String> {
        let refused =
            self.feed.as_ref().filter(|_| row.is_empty())?.own_refusal().filter(|refused| refused.conflict)?;
        Some(format!("this node's row has no pod CIDRs in force: {}", refused.why))
    }

    /// The row lacks pools in use, has no other pod CIDRs, and may be incomplete: another row claims the missing ones,
    /// its last update is refused, or a snapshot of the nodes is incomplete.
    #[must_use]
    pub fn is_partial(&self, row: &[IpNet]) -> bool {
        let Some(feed) = &self.feed else { return false };
        let pools: BTreeSet<&IpNet> = self.pools.iter().flat_map(|pool| &pool.cidrs).collect();
        if row.len() >= pools.len() || !row.iter().all(|cidr| pools.contains(cidr)) {
            return false;
        }
        let view = feed.view();
        let is_complete = view.rows.iter().any(|rows| rows.kind == Kind::Node.to_string() && rows.complete);
        !is_complete || feed.own_refusal().is_some()
    }

    /// State in force; without nodes before [`Cluster::load`].
    #[must_use]
    pub fn in_force(&self) -> Arc<InForce> {
        Arc::clone(&self.in_force.borrow())
    }

    /// Records an attempt to apply nodes and routes. `made`: routes that cannot be made.
    pub fn note_applied(&self, applied: Arc<InForce>, made: Result<Vec<MissingRoute>, String>) {
        let mut last = lock(&self.applied);
        match made {
            Ok(missing) => *last = Applied { in_force: Some(applied), missing, failed: None },
            Err(why) => last.failed = Some(why),
        }
    }

    /// Missing routes of the last attempt.
    #[must_use]
    pub fn missing_routes(&self) -> MissingRoutes {
        lock(&self.applied).missing()
    }

    /// Changes of nodes and routes in force.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<Arc<InForce>> {
        self.in_force.subscribe()
    }

    /// Loads the nodes before the node's objects are made. `left`: the kernel's routes to other nodes, of which the
    /// feed keeps those that it neither explains nor replaces.
    ///
    /// # Errors
    /// The file is refused and no earlier text of it is kept; or the kernel cannot be read.
    pub async fn load(&self, boot_id: &str, left: Vec<PeerRoute>) -> Result<(), ClusterError> {
        self.restore_refusals().await;
        if let Some(feed) = &self.feed {
            feed.load(boot_id).await;
            let mut left = left;
            left.retain(|route| !self.pools.iter().flat_map(|pool| &pool.cidrs).any(|pool| overlap(pool, &route.to)));
            let destination =
                |route: PeerRoute| Destination { node: EARLIER.to_owned(), cidr: route.to, via: Ok(route.via) };
            self.looks.lock().await.left = left.into_iter().map(destination).collect();
            self.look_at_feed(feed).await?;
            feed.nodes_are_taken();
            return Ok(());
        }
        let Some(path) = self.path.clone() else { return Ok(()) };
        let mut looks = self.looks.lock().await;
        let (found, kept) = (self.read(&path).await, self.read_kept(&path).await);
        let (text, nodes, refused) = match (found, kept) {
            (Ok((text, nodes)), kept) => {
                if kept.is_none_or(|(kept, _)| kept != text) {
                    looks.not_kept = self.keep(&path, &text).await;
                }
                (text, nodes, None)
            }
            (Err(why), Some((text, nodes))) => (text, nodes, Some(self.refuse(path, why))),
            (Err(why), None) => return Err(ClusterError::File { path, why }),
        };
        looks.text = Some(text);
        let plan = self.plan(&nodes, &mut looks.verdicts).await?;
        looks.planned = Some(Instant::now());
        self.put(nodes, plan, refused, looks.not_kept.clone());
        Ok(())
    }

    /// Follows file or feed, and this node's networks. True if nodes or routes may have changed.
    ///
    /// # Errors
    /// The kernel cannot be read; the earlier state stays.
    pub async fn look(&self) -> Result<bool, KernelError> {
        if let Some(feed) = &self.feed {
            return self.look_at_feed(feed).await;
        }
        let Some(path) = self.path.clone() else { return Ok(false) };
        let mut looks = self.looks.lock().await;
        let before = self.in_force();
        let seen = looks.seen.take();
        let (mut taken, mut refused) = (None, None);
        match self.read(&path).await {
            Ok((text, _)) if looks.text.as_ref() == Some(&text) => {}
            Ok((text, nodes)) if seen.as_ref() == Some(&text) => taken = Some((text, nodes)),
            Ok((text, _)) => {
                refused.clone_from(&before.refused);
                looks.seen = Some(text);
            }
            Err(why) => refused = Some(self.refuse(path.clone(), why)),
        }
        let is_due = looks.planned.is_none_or(|at| at.elapsed() >= PLANS);
        if taken.is_none() && !is_due && refused == before.refused {
            return Ok(false);
        }
        let nodes = taken.as_ref().map_or(&before.nodes, |(_, nodes)| nodes).clone();
        let plan = self.plan(&nodes, &mut looks.verdicts).await?;
        looks.planned = Some(Instant::now());
        match (taken, &looks.text) {
            (Some((text, _)), _) => {
                looks.not_kept = self.keep(&path, &text).await;
                tracing::info!(file = %path.display(), "the cluster's nodes are read again");
                looks.text = Some(text);
            }
            (None, Some(text)) if looks.not_kept.is_some() => looks.not_kept = self.keep(&path, text).await,
            (None, _) => {}
        }
        let changed = plan.destinations != before.destinations || plan.trials != before.trials || nodes != before.nodes;
        self.put(nodes, plan, refused, looks.not_kept.clone());
        Ok(changed)
    }

    async fn look_at_feed(&self, feed: &ClusterFeed) -> Result<bool, KernelError> {
        let mut looks = self.looks.lock().await;
        let before = self.in_force();
        let (rows, is_synced) = feed.nodes();
        let (nodes, mut refused) = match Nodes::new(rows) {
            Ok(nodes) => (nodes, None),
            Err(why) => {
                let why = format!("the nodes of the cluster feed are refused: {why}; the earlier ones stay in force");
                (before.nodes.clone(), Some(why))
            }
        };
        if refused.is_none() && is_synced && nodes.get(&self.own).is_none() {
            refused = Some(format!("the cluster feed has no node with the name {}, as this one has", self.own));
        }
        let releases = is_synced && !looks.left.is_empty();
        if releases {
            looks.left.clear();
        }
        let is_due = looks.planned.is_none_or(|at| at.elapsed() >= PLANS);
        if !is_due && !releases && nodes == before.nodes && refused == before.refused {
            return Ok(false);
        }
        if refused != before.refused
            && let Some(why) = &refused
        {
            tracing::warn!("{why}");
        }
        let mut plan = self.plan(&nodes, &mut looks.verdicts).await?;
        looks.planned = Some(Instant::now());
        if !looks.left.is_empty() {
            let explained = outermost(plan.destinations.iter().map(|to| to.cidr));
            let unexplained = looks.left.iter().filter(|left| !overlaps_any(&explained, left.cidr)).cloned();
            plan.destinations.extend(unexplained);
        }
        let changed = plan.destinations != before.destinations || plan.trials != before.trials || nodes != before.nodes;
        self.put(nodes, plan, refused, None);
        Ok(changed)
    }

    fn refuse(&self, path: PathBuf, why: String) -> String {
        let refused = format!("{}; the nodes of the last good file stay in force", ClusterError::File { path, why });
        if self.in_force().refused.as_ref() != Some(&refused) {
            tracing::warn!("{refused}");
        }
        refused
    }

    async fn plan(&self, nodes: &Nodes, verdicts: &mut Verdicts) -> Result<Plan, KernelError> {
        let seen = self.kernel.observe_networks(&routes::watched(nodes, &self.own)).await?.foreign;
        let row = nodes.get(&self.own);
        let absent = row.map(|row| routes::absent(row, &seen)).unwrap_or_default();
        // An address that the node does not have yet may arrive later. Without a row, the last verdicts stay.
        if let Some(row) = row {
            verdicts.follow(nodes, &row.addresses);
        }
        let detours = verdicts.detours();
        let destinations =
            routes::destinations(nodes, &self.own, self.routing, &detours, &self.pools, &self.services, &seen);
        let on_trial = verdicts.trials();
        let trials = if on_trial.is_empty() {
            Vec::new()
        } else {
            let overlaid =
                routes::destinations(nodes, &self.own, self.routing, &on_trial, &self.pools, &self.services, &seen);
            Verdicts::trial_routes(nodes, &on_trial, &overlaid)
        };
        Ok(Plan { destinations, detours, trials, absent })
    }

    fn put(&self, nodes: Nodes, plan: Plan, refused: Option<String>, not_kept: Option<String>) {
        let Plan { destinations, detours, trials, absent } = plan;
        let outside = nodes.get(&self.own).map(|row| routes::pools_outside(row, &self.pools)).unwrap_or_default();
        let before = self.in_force();
        let now = InForce { nodes, destinations, detours, trials, outside, absent, refused, not_kept };
        if *before == now {
            return;
        }
        let known: BTreeMap<IpNet, &Destination> = before.destinations.iter().map(|to| (to.cidr, to)).collect();
        for to in now.destinations.iter().filter(|to| known.get(&to.cidr) != Some(to)) {
            match &to.via {
                Ok(via) => tracing::info!(node = to.node, "route to {} {via}", to.cidr),
                Err(why) => tracing::warn!(node = to.node, "no route to {}: {why}", to.cidr),
            }
        }
        self.in_force.send_replace(Arc::new(now));
    }

    async fn read(&self, path: &Path) -> Result<(String, Nodes), String> {
        let (path, own) = (path.to_owned(), self.own.clone());
        blocking(move || read(&path, &own)).await
    }

    async fn read_kept(&self, path: &Path) -> Option<(String, Nodes)> {
        let (path, from, own) = (path.to_owned(), self.kept.clone(), self.own.clone());
        blocking(move || {
            let bytes = kept::read(&from, 6 * MAX_FILE as u64 + 4_096).ok().flatten()?;
            let kept: Kept = serde_json::from_slice(&bytes).ok().filter(|kept: &Kept| kept.file == path)?;
            let nodes = parse(&kept.text, &own).ok()?;
            Some((kept.text, nodes))
        })
        .await
    }

    /// The next look retries.
    async fn keep(&self, path: &Path, text: &str) -> Option<String> {
        let (to, kept) = (self.kept.clone(), Kept { file: path.to_owned(), text: text.to_owned() });
        let written = blocking(move || {
            let bytes = serde_json::to_vec(&kept).map_err(std::io::Error::other)?;
            kept::write(&to, &bytes)
        });
        let why = written.await.err()?;
        let file = self.kept.display();
        let why = format!(
            "keep the cluster's nodes in {file}: {why}; a start whose cluster file is refused would use older nodes"
        );
        tracing::warn!("{why}");
        Some(why)
    }
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

fn outermost(cidrs: impl Iterator<Item = IpNet>) -> BTreeSet<IpNet> {
    let sorted: BTreeSet<IpNet> = cidrs.map(|cidr| cidr.trunc()).collect();
    let mut outermost = BTreeSet::new();
    for cidr in sorted {
        if !outermost.last().is_some_and(|outer: &IpNet| outer.contains(&cidr)) {
            outermost.insert(cidr);
        }
    }
    outermost
}

/// No CIDR of `outermost` contains another, so only the nearest two can overlap.
fn overlaps_any(outermost: &BTreeSet<IpNet>, cidr: IpNet) -> bool {
    let cidr = cidr.trunc();
    let (before, after) = (outermost.range(..cidr).next_back(), outermost.range(cidr..).next());
    before.into_iter().chain(after).any(|other| overlap(other, &cidr))
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))
}

fn read(path: &Path, own: &str) -> Result<(String, Nodes), String> {
    let bytes = kept::read(path, MAX_FILE as u64).map_err(|e| e.to_string())?;
    let bytes = bytes.ok_or_else(|| "there is no such file".to_owned())?;
    let text = String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())?;
    let nodes = parse(&text, own)?;
    Ok((text, nodes))
}

fn parse(text: &str, own: &str) -> Result<Nodes, String> {
    let nodes = file::parse(text).map_err(|e| e.to_string())?;
    if nodes.get(own).is_none() {
        return Err(format!("no node is named {own}, as this one is; name its row so, or set --node-name"));
    }
    Ok(nodes)
}

/// Whether a start without a kept text can use the file.
///
/// # Errors
/// The file is refused.
pub fn check(path: &Path, own: &str) -> Result<(), ClusterError> {
    read(path, own).map(drop).map_err(|why| ClusterError::File { path: path.to_owned(), why })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlap_with_any_of_many_cidrs_is_found() {
        let nets = |texts: &[&str]| -> Vec<IpNet> { texts.iter().map(|net| net.parse().expect("network")).collect() };
        let all = nets(&["10.1.2.0/24", "10.1.0.0/16", "10.1.2.128/25", "10.3.0.0/16", "fd00:1::/64", "10.2.9.0/24"]);
        let outermost = outermost(all.iter().copied());
        assert!(outermost.iter().copied().eq(nets(&["10.1.0.0/16", "10.2.9.0/24", "10.3.0.0/16", "fd00:1::/64"])));
        for cidr in nets(&[
            "0.0.0.0/0",
            "10.0.0.0/8",
            "10.0.0.0/16",
            "10.1.0.0/16",
            "10.1.2.3/32",
            "10.1.3.0/24",
            "10.1.255.255/32",
            "10.2.0.0/16",
            "10.2.0.0/24",
            "10.4.0.0/16",
            "::/0",
            "fd00:1::1/128",
            "fd00:2::/64",
        ]) {
            let is_found = all.iter().any(|other| overlap(other, &cidr));
            assert_eq!(overlaps_any(&outermost, cidr), is_found, "{cidr}");
        }
    }
}
