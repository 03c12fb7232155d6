//! Status for `wharf status`, `GET /v1/healthz` and gauges of `/metrics`.
//!
//! [`Source`]s are observed separately, within a common [`PATIENCE`]: a hang makes only its part stale.

mod address;
mod checks;
pub mod cluster;
mod controllers;
mod datapath;
mod endpoints;
pub mod feed;
mod flows;
mod nat;
mod policy;
pub mod process;
mod proxy;
mod records;
mod store;

use std::{
    collections::BTreeMap,
    future::Future,
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use wharf_api::{
    AdmissionStatus, AgentStatus, ComponentStatus, DeletionQueueStatus, Health, KernelStatus, MetricRow, NetworkStatus,
    PreparedStatus, ProxyStatus,
};
use wharf_core::kernel::KernelError;
use wharf_kit::sync::lock;

use crate::{
    config::LocalDelivery,
    node::{
        Node,
        part::{Fill, Reading},
    },
};

/// For all parts together; an idle node needs a millisecond.
pub const PATIENCE: Duration = Duration::from_millis(1_500);

/// An observation in progress.
pub type Looking = Pin<Box<dyn Future<Output = Fill> + Send>>;

/// A part of the status.
pub struct Source {
    /// Component or part.
    pub name: &'static str,
    /// May block.
    pub look: fn(Arc<Node>) -> Looking,
    /// What a silent source waits for; must not block.
    pub silent: fn(&Node) -> (Health, String),
}

fn sources() -> [Source; 14] {
    [
        store::source(),
        datapath::source(),
        nat::source(),
        flows::source(),
        policy::source(),
        proxy::source(),
        address::source(),
        cluster::source(),
        endpoints::source(),
        controllers::source(),
        records::source(),
        process::source(),
        checks::health_endpoint(),
        checks::programs(),
    ]
}

/// The status. Takes little more than [`PATIENCE`].
pub async fn status(node: &Arc<Node>) -> AgentStatus {
    let until = tokio::time::Instant::now() + PATIENCE;
    let mut status = beginning(node);
    let sources = sources();
    let readings = futures::future::join_all(sources.iter().map(|source| read(node, source, until))).await;
    let mut stale = 0;
    for (source, reading) in sources.iter().zip(readings) {
        stale += u64::from(!matches!(reading, Reading::Fresh(_)));
        put(&mut status, source.name, reading, || (source.silent)(node));
    }
    node.parts.stale.store(stale, Ordering::Relaxed);
    status.overall = status.components.iter().map(|c| c.health).max().unwrap_or(Health::Ok);
    status
}

async fn read(node: &Arc<Node>, source: &Source, until: tokio::time::Instant) -> Reading<Fill> {
    let look = || (source.look)(Arc::clone(node));
    node.parts.part(source.name).read(&node.parts.runtime(), until, look).await
}

/// What the store waits for, if silent at `until`.
pub async fn store_waits_for(node: &Arc<Node>, until: tokio::time::Instant) -> Option<String> {
    let source = store::source();
    match read(node, &source, until).await {
        Reading::Fresh(_) => None,
        Reading::Stale { .. } | Reading::Unknown { .. } => Some((source.silent)(node).1),
    }
}

fn beginning(node: &Node) -> AgentStatus {
    let features = node.life.kernel.features();
    AgentStatus {
        overall: Health::Ok,
        serving: process::serves(node),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        abi_version: wharf_common::abi::version(),
        node_name: node.life.config.node_name.clone(),
        pid: std::process::id(),
        uptime_ms: millis(node.started.elapsed()),
        router: Vec::new(),
        kernel: KernelStatus {
            release: features.release.clone(),
            attach_mode: features.attach_mode.to_string(),
            features: datapath::features(features),
        },
        network: NetworkStatus {
            device_mode: features.device_mode.to_string(),
            routing: if node.life.config.local_delivery == LocalDelivery::Stack {
                "the node's stack and routes, also between local endpoints".into()
            } else if features.redirect_peer {
                "redirect-peer between local endpoints, else the node's routes".into()
            } else {
                "the node's routes".into()
            },
            masquerading: "not known".into(),
            connections: None,
            flows: None,
            mtu: lock(&node.life.network.mtu).to_string(),
        },
        components: process::components(node),
        controllers: Vec::new(),
        controllers_total: 0,
        controllers_unwell: 0,
        ipam: Vec::new(),
        endpoints: BTreeMap::new(),
        stuck: Vec::new(),
        quarantined: Vec::new(),
        deletion_queue: DeletionQueueStatus::default(),
        commands: node.commands.status(),
        admission: AdmissionStatus::default(),
        audit_findings: None,
        refused_transitions: node.life.telemetry.metrics.refused_transitions.load(Ordering::Relaxed),
        bpf_maps: Vec::new(),
        prepared: PreparedStatus::default(),
        proxy: ProxyStatus::default(),
        delegate: None,
        resident_bytes: 0,
        from_admin: false,
    }
}

fn put(status: &mut AgentStatus, name: &str, reading: Reading<Fill>, silent: impl Fn() -> (Health, String)) {
    let (age, waiting) = match reading {
        Reading::Fresh(fill) => return fill(status),
        Reading::Stale { value, age, waiting } => {
            let first = status.components.len();
            value(status);
            let (health, why) = silent();
            let stale = status.components.get_mut(first..).unwrap_or_default();
            for component in stale.iter_mut() {
                component.health = component.health.max(health).max(Health::Degraded);
                component.message = format!("{}; no answer for {}: {why}", component.message, seconds(waiting));
                component.stale_ms = Some(millis(age));
                component.without_containers = None;
            }
            if !stale.is_empty() {
                return;
            }
            (age, waiting)
        }
        Reading::Unknown { waiting } => (waiting, waiting),
    };
    let (health, why) = silent();
    let message = format!("not known: no answer for {}: {why}", seconds(waiting));
    status.components.push(ComponentStatus {
        stale_ms: Some(millis(age)),
        ..ComponentStatus::new(name, health.max(Health::Degraded), message)
    });
}

/// No counters.
#[derive(Debug, thiserror::Error)]
pub enum CountersError {
    /// The kernel's error.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The kernel has never answered.
    #[error("read counters: the kernel has not answered for {}", seconds(*.0))]
    Silent(Duration),
}

/// All counters, possibly stale.
pub async fn counters(node: &Arc<Node>) -> Result<Vec<MetricRow>, CountersError> {
    let until = tokio::time::Instant::now() + PATIENCE;
    let look = || {
        let node = Arc::clone(node);
        async move {
            let life = &node.life;
            datapath::verdicts(&*life.kernel, &life.endpoints.registry, &life.telemetry.metrics).await
        }
    };
    match node.parts.counters.read(&node.parts.runtime(), until, look).await {
        Reading::Fresh(rows) | Reading::Stale { value: rows, .. } => Ok(rows?),
        Reading::Unknown { waiting } => Err(CountersError::Silent(waiting)),
    }
}

pub use datapath::{api_map, verdicts};

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// `12 s`; `340 ms` below two seconds.
fn seconds(time: Duration) -> String {
    if time < Duration::from_secs(2) { format!("{} ms", time.as_millis()) } else { format!("{} s", time.as_secs()) }
}

fn of(bad: bool, worse: Health) -> Health {
    if bad { worse } else { Health::Ok }
}

#[cfg(test)]
mod tests;
