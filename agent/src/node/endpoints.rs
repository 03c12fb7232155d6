//! Endpoints of this node, and their remains.

use std::sync::Arc;

use tokio::sync::Semaphore;
use wharf_core::{identities::Identities, kernel::Kernel, store::OutOfService};
use wharf_kit::gate::Gate;

use crate::{
    config::AgentConfig,
    memory::Memory,
    node::{
        aside::Aside,
        jobs::Jobs,
        leftovers::{Orphan, Unfinished},
        lifecycle::Tasks,
        locks::EndpointLocks,
        pods::Pods,
        prepared::Prepared,
        queue::Deletions,
        registry::Registry,
        timeline::Timelines,
    },
};

/// Endpoints from create to the last trace.
pub struct Endpoints {
    /// Endpoints by id and interface.
    pub registry: Registry,
    /// Limits on creates and builds.
    pub admission: Admission,
    /// Program sets ahead of need.
    pub prepared: Prepared,
    /// Kernel calls, one at a time per endpoint.
    pub jobs: Arc<Jobs>,
    /// Rows of this node's pods.
    pub pods: Pods,
    /// Allocates identities for labels.
    pub identities: Arc<dyn Identities>,
    /// Deletion records.
    pub deletions: Deletions,
    /// Remains of endpoints outside the registry.
    pub leftovers: Leftovers,
    /// Timelines of ended endpoints.
    pub timelines: Timelines,
}

/// Limits on creates and builds.
pub struct Admission {
    /// Admits creates.
    pub gate: Arc<Gate>,
    /// Memory, and its limit.
    pub memory: Memory,
    /// Concurrent regenerations: the number of cores, at least 2.
    pub build_permits: Semaphore,
}

impl Default for Admission {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        Self { gate: Arc::default(), memory: Memory::default(), build_permits: Semaphore::new(cores.max(2)) }
    }
}

/// Remains of endpoints outside the registry.
#[derive(Default)]
pub struct Leftovers {
    /// Links without a record.
    pub orphans: Aside<Orphan>,
    /// Records out of service.
    pub out_of_service: Aside<OutOfService>,
    /// Failed undos.
    pub unfinished: Aside<Unfinished>,
    /// One removal at a time per id: the first one frees it. Held across bounded kernel calls.
    pub removals: EndpointLocks,
}

impl Endpoints {
    /// Without endpoints.
    #[must_use]
    pub fn new(config: &AgentConfig, kernel: &Arc<dyn Kernel>, identities: Arc<dyn Identities>, tasks: &Tasks) -> Self {
        Self {
            registry: Registry::default(),
            admission: Admission::default(),
            prepared: Prepared::new(config.prepared_programs),
            jobs: Jobs::new(Arc::clone(kernel), tasks.operations.clone()),
            pods: Pods::new(config.cluster_feed.is_some()),
            identities,
            deletions: Deletions::new(&config.run_dir),
            leftovers: Leftovers::default(),
            timelines: Timelines::default(),
        }
    }
}
