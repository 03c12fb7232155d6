//! State shared by the agent's tasks.

pub mod aside;
pub mod clients;
pub mod edit;
pub mod endpoint;
pub mod endpoints;
pub mod error;
pub mod feed;
pub mod flows;
pub mod health;
pub mod jobs;
pub mod leftovers;
pub mod lifecycle;
pub mod locks;
pub mod looks;
pub mod network;
pub mod part;
pub mod pods;
pub mod pools;
pub mod prepared;
pub mod queue;
pub mod registry;
pub mod self_checks;
pub mod sources;
pub mod telemetry;
pub mod timeline;

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, atomic::AtomicBool},
    time::Instant,
};

use tokio::sync::mpsc;
use wharf_core::{identities::Identities, ipam::Ipam, kernel::Kernel};
use wharf_kit::pulse::Pulses;
use wharf_store::Store;

use crate::{
    commands::{Commands, Ended, Mode},
    config::AgentConfig,
    findings::Left,
    node::{
        clients::Clients, flows::Flows, health::Health, lifecycle::Lifecycle, looks::Looks, part::Parts,
        self_checks::SelfChecks,
    },
    proxy::Redirects,
};

/// The whole agent, for the composition root and modules that answer requests.
pub struct Node {
    /// The life of endpoints.
    pub life: Arc<Lifecycle>,
    /// CNI commands.
    pub commands: Arc<Commands>,
    /// The health endpoint.
    pub health: Arc<Health>,
    /// Self-checks of endpoints.
    pub self_checks: Arc<SelfChecks>,
    /// Last collections.
    pub flows: Arc<Flows>,
    /// Clients with an exhausted share.
    pub proxy_clients: Arc<Clients>,
    /// Findings of the last leak audit; `None` before the first.
    pub audit_findings: Mutex<Option<Left>>,
    /// Permits for reads of the kernel.
    pub looks: Looks,
    /// Settings changed at run time.
    pub changed_settings: Mutex<BTreeSet<&'static str>>,
    /// Set once restore is done.
    pub serving: AtomicBool,
    /// Heartbeats.
    pub pulses: Pulses,
    /// Parts of the status.
    pub parts: Parts,
    /// Start of the agent.
    pub started: Instant,
}

impl Node {
    /// From its parts.
    #[must_use]
    pub fn new(
        config: AgentConfig,
        kernel: Arc<dyn Kernel>,
        store: Store,
        ipam: Ipam,
        redirects: Arc<dyn Redirects>,
        identities: Arc<dyn Identities>,
        exporter: Option<mpsc::Sender<Arc<Ended>>>,
    ) -> Arc<Self> {
        let health = Arc::new(Health::new(&config));
        let life = Arc::new(Lifecycle::new(config, kernel, store, ipam, redirects, identities));
        let commands = Arc::new(Commands::new(Mode::Own, Arc::clone(&life.telemetry.metrics.commands), exporter));
        Arc::new(Self {
            commands,
            health,
            life,
            self_checks: Arc::default(),
            flows: Arc::default(),
            proxy_clients: Arc::default(),
            audit_findings: Mutex::default(),
            looks: Looks::default(),
            changed_settings: Mutex::default(),
            serving: AtomicBool::new(false),
            pulses: Pulses::default(),
            parts: Parts::default(),
            started: Instant::now(),
        })
    }
}
