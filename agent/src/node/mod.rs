//! The state that the agent's tasks share, and its invariants. This module starts no tasks and does not depend on its
//! users.

pub mod aside;
pub mod endpoint;
pub mod error;
pub mod health;
pub mod jobs;
pub mod leftovers;
pub mod part;
pub mod prepared;
pub mod queue;
pub mod registry;
pub mod self_checks;
pub mod timeline;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Instant,
};

use tokio::sync::Semaphore;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use wharf_core::{
    identity_allocator::IdentityAllocator,
    ipam::Ipam,
    kernel::{CounterRow, Kernel, NodeSpec},
    store::OutOfService,
};
use wharf_datapath::LinuxKernel;

use crate::{
    addresses::Addresses,
    config::AgentConfig,
    controller::Controllers,
    findings::Left,
    gate::Gate,
    memory::Memory,
    metrics::Metrics,
    monitor::Monitor,
    node::{
        aside::Aside,
        health::Health,
        jobs::Jobs,
        leftovers::{Orphan, Unfinished},
        part::Parts,
        prepared::Prepared,
        queue::Deletions,
        registry::Registry,
        self_checks::SelfChecks,
        timeline::Timelines,
    },
    proxy::Redirects,
    pulse::Pulses,
    store::Store,
    sync::lock,
};

/// Kernel looks that may run at once: a look continues until the kernel answers, even when its client went away.
pub const LOOKS: usize = 4;

/// Everything the tasks share; one for each agent.
pub struct Node<K: Kernel> {
    /// Settings.
    pub config: AgentConfig,
    /// The kernel.
    pub kernel: Arc<K>,
    /// The store.
    pub store: Store,
    /// Addresses.
    pub addresses: Addresses<K>,
    /// Identities. Locked for one decision at a time.
    pub identities: Mutex<IdentityAllocator>,
    /// Endpoints.
    pub registry: Registry,
    /// Program sets verified ahead of need.
    pub prepared: Prepared,
    /// Events.
    pub monitor: Monitor,
    /// Controllers.
    pub controllers: Controllers,
    /// Metrics.
    pub metrics: Metrics,
    /// The proxy.
    pub redirects: Arc<dyn Redirects>,
    /// Regenerations that may run at once: the cores, at least 2.
    pub build_permits: Semaphore,
    /// Which creates may run.
    pub gate: Arc<Gate>,
    /// Creates asked for since start.
    pub creates: AtomicU64,
    /// Findings that the last leak audit left; none before the first audit.
    pub audit_findings: Mutex<Option<Left>>,
    /// Operations (deletes, controllers, readers): awaited at a stop.
    pub tasks: TaskTracker,
    /// Endpoint tasks: ended after the operations, which need them.
    pub endpoints: TaskTracker,
    /// Set when the agent stops: no new work.
    pub stop: CancellationToken,
    /// Set when the operations have ended: endpoint tasks end, and the endpoints stay in the kernel.
    pub halt: CancellationToken,
    /// Set once restore is done.
    pub serving: AtomicBool,
    /// Forwarded packets of every endpoint are traced.
    pub trace_all: AtomicBool,
    /// Settings that were changed while the agent runs.
    pub changed_settings: Mutex<BTreeSet<&'static str>>,
    /// State transitions refused since start.
    pub refused_transitions: AtomicU64,
    /// Proxy completions awaited now, and timed out.
    pub completions: Completions,
    /// Counters of deleted endpoints, so that the node's totals never decrease.
    pub past_counters: Mutex<BTreeMap<(String, String), (u64, u64)>>,
    /// The health endpoint.
    pub health: Health,
    /// Deletion records of shims that found no agent.
    pub deletions: Deletions,
    /// Endpoints whose records were lost.
    pub orphans: Mutex<Aside<Orphan>>,
    /// Records out of service.
    pub out_of_service: Mutex<Aside<OutOfService>>,
    /// Permits for kernel looks of explanations.
    pub looks: Arc<Semaphore>,
    /// Timelines of endpoints that have ended.
    pub timelines: Timelines,
    /// Unfinished undos by the id that they keep taken; bounded by the number of ids.
    pub unfinished: Mutex<Aside<Unfinished>>,
    /// Kernel calls for endpoints.
    pub jobs: Arc<Jobs<K>>,
    /// Self-checks of endpoints.
    pub self_checks: SelfChecks,
    /// Signs of life.
    pub pulses: Pulses,
    /// The process's memory, and what its control group allows.
    pub memory: Memory,
    /// The parts of the status, with the last answer of each.
    pub parts: Parts,
    /// When the agent started.
    pub started: Instant,
}

/// The node on a real kernel: what REST serves.
pub type LinuxNode = Node<LinuxKernel>;

/// Proxy completions, counted.
#[derive(Debug, Default)]
pub struct Completions {
    /// Awaited now.
    pub pending: AtomicU64,
    /// Not given within their bound.
    pub timed_out: AtomicU64,
}

impl<K: Kernel> Node<K> {
    /// Puts the parts together.
    #[must_use]
    pub fn new(config: AgentConfig, kernel: K, store: Store, ipam: Ipam, redirects: Arc<dyn Redirects>) -> Arc<Self> {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let (kernel, tasks) = (Arc::new(kernel), TaskTracker::new());
        let addresses = Addresses::new(ipam, &config, Arc::clone(&kernel), store.clone(), Arc::clone(&redirects));
        Arc::new(Self {
            addresses,
            health: Health::new(&config),
            deletions: Deletions::new(&config.run_dir),
            orphans: Mutex::default(),
            out_of_service: Mutex::default(),
            looks: Arc::new(Semaphore::new(LOOKS)),
            timelines: Timelines::default(),
            unfinished: Mutex::default(),
            jobs: Jobs::new(Arc::clone(&kernel), tasks.clone()),
            prepared: Prepared::new(config.prepared_programs),
            config,
            kernel,
            store,
            identities: Mutex::new(IdentityAllocator::new()),
            registry: Registry::default(),
            monitor: Monitor::default(),
            controllers: Controllers::default(),
            metrics: Metrics::default(),
            redirects,
            build_permits: Semaphore::new(cores.max(2)),
            gate: Arc::default(),
            creates: AtomicU64::new(0),
            audit_findings: Mutex::default(),
            tasks,
            endpoints: TaskTracker::new(),
            stop: CancellationToken::new(),
            halt: CancellationToken::new(),
            serving: AtomicBool::new(false),
            trace_all: AtomicBool::new(false),
            changed_settings: Mutex::default(),
            refused_transitions: AtomicU64::new(0),
            completions: Completions::default(),
            past_counters: Mutex::default(),
            self_checks: SelfChecks::default(),
            pulses: Pulses::default(),
            memory: Memory::default(),
            parts: Parts::default(),
            started: Instant::now(),
        })
    }

    /// The node's own part of the datapath.
    #[must_use]
    pub fn spec(&self) -> NodeSpec {
        let ipam = lock(&self.addresses.ipam);
        NodeSpec { router4: ipam.router4(), router6: ipam.router6(), cidrs: ipam.cidrs(), mtu: self.config.mtu }
    }

    /// Router addresses, IPv4 first.
    #[must_use]
    pub fn routers(&self) -> Vec<IpAddr> {
        let ipam = lock(&self.addresses.ipam);
        ipam.router4().map(IpAddr::V4).into_iter().chain(ipam.router6().map(IpAddr::V6)).collect()
    }

    /// Adds a deleted endpoint's last counters to the node's totals.
    pub fn keep_counters(&self, rows: &[CounterRow]) {
        let mut past = lock(&self.past_counters);
        for row in rows {
            let total = past.entry((row.direction.clone(), row.reason.clone())).or_default();
            total.0 += row.packets;
            total.1 += row.bytes;
        }
    }
}
