//! The pools of `--pools-from-cluster`.
//!
//! A start uses the pod CIDRs of this node's entry in the cluster file, else the last start's, kept in the state
//! directory. When the row changes, the agent writes that file and restarts in place. The file keeps the previous pools
//! until a start with the new ones has succeeded: a start that refuses or fails with the new pools falls back to them.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use wharf_cluster::pools::{Decision, decide};
use wharf_core::ipam::{Ipam, PoolConfig};
use wharf_kit::{clock, kept, sync::lock};

use super::{blocking, overlap, read};
use crate::config::{AgentConfig, FromCluster};

/// Name of the controller.
pub const CONTROLLER: &str = "pools-from-cluster";
/// Interval of comparisons of row and pools.
pub const INTERVAL: Duration = Duration::from_secs(2);

/// For the same refused pod CIDRs; a check reads every route.
const CHECKS: Duration = Duration::from_secs(10);
const FILE: &str = "pools.json";
const VERSION: u32 = 1;
/// Bytes of the file.
const MAX_FILE: u64 = 4_096;
const EARLIER: &str = "the last successful start";

#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    version: u32,
    /// Detects a copy of another node's state directory.
    node: String,
    cidrs: Vec<IpNet>,
    /// Pools in use when `cidrs` were written; empty after a successful start with `cidrs`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    previous: Vec<IpNet>,
    /// A start with `cidrs` has not succeeded yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    tried: bool,
    boot_id: String,
    /// Milliseconds since that boot at the last change.
    changed_ms: u64,
}

impl Kept {
    fn new(node: String, cidrs: Vec<IpNet>, previous: Vec<IpNet>, boot_id: String) -> Self {
        Self { version: VERSION, node, cidrs, previous, tried: false, boot_id, changed_ms: clock::boot_ms() }
    }

    fn last_in_use(&self) -> &[IpNet] {
        if self.previous.is_empty() { &self.cidrs } else { &self.previous }
    }
}

/// The pools' state for the status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PoolsView {
    /// Source of the pools in use; empty without pools.
    pub source: String,
    /// Pod CIDRs of the row for the next restart.
    pub pending: Option<String>,
    /// Why pod CIDRs are not used.
    pub refused: Option<String>,
}

/// Pools in use, and the row's other pod CIDRs.
#[derive(Debug)]
pub struct OwnPools {
    file: PathBuf,
    node: String,
    in_use: Vec<IpNet>,
    restart: CancellationToken,
    view: Mutex<PoolsView>,
    /// The pod CIDRs of the last refusal, and its time.
    refused: Mutex<Option<(Vec<IpNet>, Instant)>>,
}

impl OwnPools {
    pub(super) fn new(config: &AgentConfig) -> Option<Self> {
        let FromCluster { source, problem, .. } = config.pools_from_cluster.clone()?;
        Some(Self {
            file: config.state_dir.join(FILE),
            node: config.node_name.clone(),
            in_use: in_use(config),
            restart: CancellationToken::new(),
            view: Mutex::new(PoolsView { source, pending: None, refused: problem }),
            refused: Mutex::default(),
        })
    }

    /// State for the status.
    #[must_use]
    pub fn view(&self) -> PoolsView {
        lock(&self.view).clone()
    }

    /// Why the node has no pools.
    #[must_use]
    pub fn missing(&self) -> Option<String> {
        let why = || lock(&self.view).refused.clone();
        self.in_use.is_empty().then(|| why().unwrap_or_else(|| "this node's row has no pod CIDRs yet".to_owned()))
    }

    /// The row has other, not refused pod CIDRs: the pools may belong to another node.
    #[must_use]
    pub fn outdated(&self, row: &[IpNet]) -> Option<String> {
        let is_refused = || lock(&self.refused).as_ref().is_some_and(|(refused, _)| refused == row);
        let is_outdated = decide(row, &self.in_use, None) != Decision::Keep && !is_refused();
        is_outdated.then(|| format!("this node's row has the pod CIDRs {}, and the pools in use are others", list(row)))
    }

    /// Returns when the agent must restart in place.
    pub async fn restarts(&self) {
        self.restart.cancelled().await;
    }

    /// Decides about the row's pod CIDRs, by the time of the last change in the file.
    pub async fn decide(&self, row: &[IpNet]) -> Decision {
        if self.restart.is_cancelled() || decide(row, &self.in_use, None) == Decision::Keep {
            return Decision::Keep;
        }
        let (file, node) = (self.file.clone(), self.node.clone());
        let since = blocking(move || {
            let kept = read_kept(&file, &node).ok()??;
            let is_of_boot = kept.boot_id == clock::boot_id().ok()?;
            clock::boot_ms().checked_sub(kept.changed_ms).filter(|_| is_of_boot)
        });
        decide(row, &self.in_use, since.await)
    }

    /// The row has the pools in use, or no pod CIDRs.
    pub fn settle(&self) {
        *lock(&self.refused) = None;
        self.show(None, None);
    }

    /// The row is used in `left_ms` milliseconds.
    pub fn postpone(&self, row: &[IpNet], left_ms: u64) {
        *lock(&self.refused) = None;
        let text = format!("the pod CIDRs {} of this node's row are used in {} s", list(row), left_ms.div_ceil(1_000));
        self.show(Some(text), None);
    }

    /// The row is refused; the pools in use stay.
    pub fn refuse(&self, row: &[IpNet], why: &str) {
        *lock(&self.refused) = Some((row.to_vec(), Instant::now()));
        self.show(None, Some(format!("the pod CIDRs {} of this node's row cannot be its pools: {why}", list(row))));
    }

    /// The row was refused less than 10 s ago.
    #[must_use]
    pub fn is_refused(&self, row: &[IpNet]) -> bool {
        lock(&self.refused).as_ref().is_some_and(|(refused, at)| refused == row && at.elapsed() < CHECKS)
    }

    /// Keeps the pod CIDRs for the next start and restarts the agent; returns a message.
    ///
    /// # Errors
    /// The file cannot be written; the pools in use stay.
    pub async fn restart_with(&self, row: &[IpNet]) -> Result<String, String> {
        *lock(&self.refused) = None;
        let (file, node) = (self.file.clone(), self.node.clone());
        let (cidrs, previous) = (row.to_vec(), self.in_use.clone());
        let written = blocking(move || write(&file, &Kept::new(node, cidrs, previous, clock::boot_id()?))).await;
        if let Err(why) = written {
            let why = format!("keep the pod CIDRs of this node's row in {}: {why}", self.file.display());
            self.show(None, Some(why.clone()));
            return Err(why);
        }
        let in_use = if self.in_use.is_empty() { "none".to_owned() } else { list(&self.in_use) };
        self.restart.cancel();
        Ok(format!("pools {in_use} -> {}: the pod CIDRs of this node's row; the agent restarts in place", list(row)))
    }

    fn show(&self, pending: Option<String>, refused: Option<String>) {
        let mut view = lock(&self.view);
        if let Some(why) = refused.as_ref().filter(|_| view.refused != refused) {
            tracing::warn!("{why}");
        }
        (view.pending, view.refused) = (pending, refused);
    }
}

/// Sets the pools of a start, without changing files or reading the node's networks.
pub fn resolve(config: &mut AgentConfig) {
    if config.pools_from_cluster.is_none() {
        return;
    }
    let file = config.state_dir.join(FILE);
    let (kept, mut problem) = match read_kept(&file, &config.node_name) {
        Ok(kept) => (kept, None),
        Err(why) => (None, Some(format!("read the pools of the last start in {}: {why}", file.display()))),
    };
    let last_in_use = kept.as_ref().map(|kept| kept.last_in_use().to_vec());
    let failed = kept.as_ref().filter(|kept| kept.tried).map(|kept| kept.cidrs.clone());
    let entry = config.cluster_file.as_deref().and_then(|path| read(path, &config.node_name).ok());
    let entry = entry.and_then(|(_, nodes)| Some(nodes.get(&config.node_name)?.pod_cidrs.clone()));
    let sources = [
        (entry, "this node's entry in the cluster file"),
        (kept.map(|kept| kept.cidrs), "this node's last row"),
        (last_in_use.clone(), EARLIER),
    ];
    let mut source = String::new();
    for (cidrs, name) in sources {
        let Some(cidrs) = cidrs.filter(|cidrs| !cidrs.is_empty()) else { continue };
        let checked = if failed.as_ref() == Some(&cidrs) {
            Err("the last start with them has failed, and its log has the cause".to_owned())
        } else {
            usable(config, &cidrs).map(drop)
        };
        match checked {
            Ok(()) => {
                config.set_pools(cidrs);
                source = name.to_owned();
                break;
            }
            Err(why) => {
                let why = format!("the pod CIDRs {} of {name} cannot be the pools: {why}", list(&cidrs));
                problem = Some(problem.unwrap_or(why));
            }
        }
    }
    let pools = in_use(config);
    let earlier = last_in_use.filter(|cidrs| *cidrs != pools && usable(config, cidrs).is_ok()).unwrap_or_default();
    config.pools_from_cluster = Some(FromCluster { source, problem, earlier });
}

/// Replaces refused pools of [`resolve`] by the pools last in use; false without any.
#[must_use]
pub fn fall_back(config: &mut AgentConfig, why: &str) -> bool {
    let Some(FromCluster { source, problem, earlier }) = config.pools_from_cluster.clone() else { return false };
    if earlier.is_empty() {
        return false;
    }
    let refused = format!("the pod CIDRs {} of {source} cannot be the pools: {why}", list(&in_use(config)));
    let why = problem.into_iter().chain([refused]).collect::<Vec<_>>().join("; ");
    tracing::error!("{why}; the agent starts with the pools that were last in use, {}", list(&earlier));
    let why = format!("{why}; the pools that were last in use stay");
    config.set_pools(earlier);
    let source = EARLIER.to_owned();
    config.pools_from_cluster = Some(FromCluster { source, problem: Some(why), earlier: Vec::new() });
    true
}

/// For pools of [`resolve`] that overlap a network of the node: falls back to the pools last in use, or none.
pub fn refuse(config: &mut AgentConfig, why: &str) {
    if fall_back(config, why) {
        return;
    }
    let why = format!("the pod CIDRs {} of this node cannot be its pools: {why}", list(&in_use(config)));
    tracing::error!("{why}; the agent starts without pools");
    config.set_pools(Vec::new());
    config.pools_from_cluster = Some(FromCluster { problem: Some(why), ..FromCluster::default() });
}

/// Records a start with untried pools, before its objects: if it fails, the next start falls back.
pub fn note_attempt(config: &AgentConfig, boot_id: &str) {
    let Some(FromCluster { earlier, .. }) = config.pools_from_cluster.as_ref().filter(|from| !from.earlier.is_empty())
    else {
        return;
    };
    let file = config.state_dir.join(FILE);
    let kept = Kept::new(config.node_name.clone(), in_use(config), earlier.clone(), boot_id.to_owned());
    if let Err(why) = write(&file, &Kept { tried: true, ..kept }) {
        tracing::warn!(
            "note the start with new pools in {}: {why}; if it fails, the next start uses them again",
            file.display()
        );
    }
}

/// Keeps the pools of a successful start and drops the previous ones. Sets a damaged file aside.
pub fn keep_at_start(config: &AgentConfig, boot_id: &str) {
    if config.pools_from_cluster.is_none() {
        return;
    }
    let (file, in_use) = (config.state_dir.join(FILE), in_use(config));
    let kept = match read_kept(&file, &config.node_name) {
        Ok(kept) => kept,
        Err(why) => {
            set_aside(&file, &why);
            None
        }
    };
    if in_use.is_empty() {
        return;
    }
    let now = match kept {
        Some(kept) if kept.cidrs == in_use && kept.previous.is_empty() => return,
        Some(kept) if kept.cidrs == in_use => Kept { previous: Vec::new(), tried: false, ..kept },
        _ => Kept::new(config.node_name.clone(), in_use, Vec::new(), boot_id.to_owned()),
    };
    if let Err(why) = write(&file, &now) {
        tracing::warn!(
            "keep the pools in {}: {why}; the next start without the cluster file would use the former content",
            file.display()
        );
    }
}

/// Checks CIDRs as pools, without the node's networks.
///
/// # Errors
/// Why they cannot be pools.
pub fn usable(config: &AgentConfig, cidrs: &[IpNet]) -> Result<Ipam, String> {
    let pool = PoolConfig { name: config.default_pool.clone(), cidrs: cidrs.to_vec() };
    let ipam = Ipam::new(vec![pool], config.default_pool.clone()).map_err(|why| why.to_string())?;
    if let Some(services) = config.service_cidr.iter().find(|net| cidrs.iter().any(|cidr| overlap(cidr, net))) {
        return Err(format!("they overlap the addresses of services {services} (--service-cidr)"));
    }
    let v6 = cidrs.iter().find(|cidr| cidr.addr().is_ipv6());
    if let (Some(cidr), Some(why)) = (v6, wharf_datapath::ipv6_off()) {
        return Err(format!("{cidr} cannot be used: IPv6 is off on this node ({why})"));
    }
    Ok(ipam)
}

fn in_use(config: &AgentConfig) -> Vec<IpNet> {
    config.pools.iter().flat_map(|pool| pool.cidrs.iter().copied()).collect()
}

fn list(cidrs: &[IpNet]) -> String {
    cidrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn read_kept(file: &Path, node: &str) -> io::Result<Option<Kept>> {
    kept::read(file, MAX_FILE)?.map(|bytes| parse(&bytes, node)).transpose()
}

fn parse(bytes: &[u8], node: &str) -> io::Result<Kept> {
    let kept: Kept = serde_json::from_slice(bytes)?;
    match kept.version {
        VERSION if kept.node == node => Ok(kept),
        VERSION => Err(io::Error::other(format!("it is of node {:?}, and this is {node}", kept.node))),
        other => Err(io::Error::other(format!("it has version {other}, and this agent knows {VERSION}"))),
    }
}

fn write(file: &Path, kept: &Kept) -> io::Result<()> {
    kept::write(file, content(kept)?.as_bytes())
}

fn content(kept: &Kept) -> io::Result<String> {
    Ok(serde_json::to_string_pretty(kept)? + "\n")
}

/// For the fuzz target: reads a file's content; returns it as the agent writes it, and the pod CIDRs.
///
/// # Errors
/// The content is damaged, or of another node or version.
pub fn rewrite(bytes: &[u8], node: &str) -> io::Result<(String, Vec<IpNet>)> {
    let kept = parse(bytes, node)?;
    Ok((content(&kept)?, kept.cidrs))
}

fn set_aside(file: &Path, why: &io::Error) {
    let what = format!("read the pools of the last start in {}: {why}", file.display());
    match kept::set_aside(file) {
        Ok(aside) => tracing::error!("{what}; the file is now {}", aside.display()),
        Err(why) => tracing::error!("{what}; set the file aside: {why}"),
    }
}

#[cfg(test)]
#[path = "pools_tests.rs"]
mod tests;
