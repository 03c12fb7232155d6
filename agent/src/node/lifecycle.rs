//! Shared part of the agent for the life of endpoints.

use std::sync::Arc;

use tokio_util::{sync::CancellationToken, task::TaskTracker};
use wharf_core::{identities::Identities, ipam::Ipam, kernel::Kernel};
use wharf_kit::controller::Controllers;
use wharf_store::Store;

use crate::{
    addresses::Addresses,
    config::AgentConfig,
    node::{endpoints::Endpoints, network::NodeNetwork, telemetry::Telemetry},
    policy::Policy,
    proxy::Redirects,
};

/// One per agent. A function that needs only some parts takes these.
pub struct Lifecycle {
    /// Settings.
    pub config: Arc<AgentConfig>,
    pub kernel: Arc<dyn Kernel>,
    pub store: Store,
    /// Addresses, other nodes and routes.
    pub network: NodeNetwork,
    /// Network policy, and the proxy that enforces a part of it.
    pub policy: Arc<Policy>,
    /// Endpoints and their remains.
    pub endpoints: Endpoints,
    /// Events and metrics.
    pub telemetry: Telemetry,
    /// Tasks and stop signals.
    pub tasks: Tasks,
}

/// Cheap to clone.
#[derive(Clone, Default)]
pub struct Tasks {
    /// Deletes, controllers, readers; awaited at a stop.
    pub operations: TaskTracker,
    /// End after the operations, which need them.
    pub endpoints: TaskTracker,
    pub controllers: Controllers,
    /// No new work.
    pub stop: CancellationToken,
    /// After the operations: endpoint tasks end, endpoints stay in the kernel.
    pub halt: CancellationToken,
}

impl Lifecycle {
    /// From its parts.
    #[must_use]
    pub fn new(
        config: AgentConfig,
        kernel: Arc<dyn Kernel>,
        store: Store,
        ipam: Ipam,
        redirects: Arc<dyn Redirects>,
        identities: Arc<dyn Identities>,
    ) -> Self {
        let (config, tasks) = (Arc::new(config), Tasks::default());
        let addresses = Addresses::new(ipam, &config, Arc::clone(&kernel), store.clone(), Arc::clone(&redirects));
        let policy = Arc::new(Policy::new(&config, Arc::clone(&kernel), redirects));
        Self {
            network: NodeNetwork::new(Arc::clone(&config), Arc::clone(&kernel), Arc::clone(&policy), addresses),
            endpoints: Endpoints::new(&config, &kernel, identities, &tasks),
            telemetry: Telemetry::default(),
            config,
            kernel,
            store,
            policy,
            tasks,
        }
    }
}
