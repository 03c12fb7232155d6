//! State that the life of endpoints needs.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64},
    },
};

use tokio::sync::Semaphore;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use wharf_cluster::{
    nodes::NodeRow,
    routes::{self, Destination},
};
use wharf_core::{
    identities::Identities,
    ipam::Ipam,
    kernel::{Kernel, KernelError, NextHop, NodeSpec, OverlaySpec},
    mtu::NodeMtu,
    nat::OverlayPort,
    store::OutOfService,
};
use wharf_kit::{controller::Controllers, gate::Gate, sync::lock};
use wharf_store::Store;

use crate::{
    addresses::Addresses,
    cluster::{Cluster, InForce},
    config::{AgentConfig, LocalDelivery},
    memory::Memory,
    metrics::Metrics,
    monitor::Monitor,
    node::{
        aside::Aside,
        jobs::Jobs,
        leftovers::{Orphan, Unfinished},
        pods::Pods,
        prepared::Prepared,
        queue::Deletions,
        registry::Registry,
        timeline::Timelines,
    },
    policy::{Policy, error::PolicyError},
    proxy::Redirects,
};

/// Name of the controller that repairs the node's objects.
pub const CONTROLLER: &str = "node-datapath";

/// One for each agent.
pub struct Lifecycle {
    /// Settings.
    pub config: AgentConfig,
    /// The kernel.
    pub kernel: Arc<dyn Kernel>,
    /// The store.
    pub store: Store,
    /// Addresses.
    pub addresses: Addresses,
    /// The other nodes.
    pub cluster: Cluster,
    /// Rows of this node's pods.
    pub pods: Pods,
    turns: Turns,
    /// Of links without a requested MTU.
    pub mtu: Mutex<NodeMtu>,
    /// Allocates identities.
    pub identities: Arc<dyn Identities>,
    /// Endpoints.
    pub registry: Registry,
    /// Sets ahead of need.
    pub prepared: Prepared,
    /// One at a time for each endpoint.
    pub jobs: Arc<Jobs>,
    /// Network policy.
    pub policy: Policy,
    /// The proxy.
    pub proxy: Proxy,
    /// Admits creates.
    pub gate: Arc<Gate>,
    /// Regenerations at once: the number of cores, at least 2.
    pub build_permits: Semaphore,
    /// Memory, and its limit.
    pub memory: Memory,
    /// Traces every endpoint's forwarded packets.
    pub trace_all: AtomicBool,
    /// Deletion records.
    pub deletions: Deletions,
    /// Orphans.
    pub orphans: Aside<Orphan>,
    /// Records out of service.
    pub out_of_service: Aside<OutOfService>,
    /// By id.
    pub unfinished: Aside<Unfinished>,
    /// Timelines of ended endpoints.
    pub timelines: Timelines,
    /// Events.
    pub monitor: Monitor,
    /// Metrics.
    pub metrics: Metrics,
    /// Of the agent.
    pub tasks: Tasks,
}

/// With counts of completions.
pub struct Proxy {
    /// Redirects.
    pub redirects: Arc<dyn Redirects>,
    /// Awaited completions.
    pub pending: AtomicU64,
    /// Completions past their bound.
    pub timed_out: AtomicU64,
}

/// Order of the changes of several tasks: locked while the wanted state is read and applied, so that no older state
/// follows a newer one. No task locks both at once.
#[derive(Default)]
struct Turns {
    /// Of the node's objects: for one kernel call, whose netlink requests have a time limit.
    node: tokio::sync::Mutex<()>,
    /// Of the other nodes in policy: for the wait for policy's lock, and one change. Routes do not wait for it.
    policy: tokio::sync::Mutex<()>,
}

/// Why routes or rows do not follow the cluster's nodes.
#[derive(Debug, thiserror::Error)]
pub enum ClusterFailure {
    /// Networks, routes or the firewall.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Rows of policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// Both.
    #[error("{policy}; {kernel}")]
    Both {
        /// Rows of policy.
        policy: Box<PolicyError>,
        /// Networks, routes or the firewall.
        kernel: Box<KernelError>,
    },
}

/// Cheap to clone.
#[derive(Clone, Default)]
pub struct Tasks {
    /// Deletes, controllers, readers; awaited at a stop.
    pub operations: TaskTracker,
    /// End after the operations, which need them.
    pub endpoints: TaskTracker,
    /// Controllers.
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
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let tasks = Tasks::default();
        let addresses = Addresses::new(ipam, &config, Arc::clone(&kernel), store.clone(), Arc::clone(&redirects));
        Self {
            addresses,
            cluster: Cluster::new(&config, Arc::clone(&kernel)),
            pods: Pods::new(config.cluster_feed.is_some()),
            turns: Turns::default(),
            mtu: Mutex::new(NodeMtu::of(config.mtu, &[])),
            deletions: Deletions::new(&config.run_dir),
            jobs: Jobs::new(Arc::clone(&kernel), tasks.operations.clone()),
            prepared: Prepared::new(config.prepared_programs),
            policy: Policy::new(&config, Arc::clone(&kernel), Arc::clone(&redirects)),
            config,
            kernel,
            store,
            identities,
            registry: Registry::default(),
            proxy: Proxy { redirects, pending: AtomicU64::new(0), timed_out: AtomicU64::new(0) },
            gate: Arc::default(),
            build_permits: Semaphore::new(cores.max(2)),
            memory: Memory::default(),
            trace_all: AtomicBool::new(false),
            orphans: Aside::default(),
            out_of_service: Aside::default(),
            unfinished: Aside::default(),
            timelines: Timelines::default(),
            monitor: Monitor::default(),
            metrics: Metrics::default(),
            tasks,
        }
    }

    /// The node's datapath.
    #[must_use]
    pub fn spec(&self) -> NodeSpec {
        self.spec_with(&self.cluster.in_force())
    }

    fn spec_with(&self, cluster: &InForce) -> NodeSpec {
        let mut masquerade = self.config.masquerade.clone();
        if let Some(masquerade) = &mut masquerade {
            masquerade.excluded.extend(routes::peers(&cluster.destinations));
            let others = cluster.nodes.iter().filter(|node| node.name != self.config.node_name);
            let nodes: BTreeSet<IpAddr> = others.flat_map(|node| node.addresses.iter().copied()).collect();
            // Also without an overlay route of this node: the other nodes may have one.
            let has_others = !nodes.is_empty();
            masquerade.overlay = has_others.then_some(OverlayPort { port: self.config.overlay_port, nodes });
        }
        let overlay = {
            let config = &self.config;
            routes::overlay(&cluster.nodes, &config.node_name, config.routing, &cluster.destinations)
        };
        let is_over_ipv6 = |to: &Destination| matches!(to.via, Ok(NextHop::Overlay { remote, .. }) if remote.is_ipv6());
        let overlay = overlay.map(|nodes| OverlaySpec {
            vni: self.config.overlay_vni,
            port: self.config.overlay_port,
            mtu: OverlaySpec::mtu_within(self.mtu(), cluster.destinations.iter().any(is_over_ipv6)),
            nodes,
        });
        let ipam = lock(&self.addresses.ipam);
        NodeSpec {
            router4: ipam.router4(),
            router6: ipam.router6(),
            former_routers: ipam.former_routers().to_vec(),
            cidrs: ipam.cidrs(),
            peers: [routes::routes(&cluster.destinations), cluster.trials.clone()].concat(),
            overlay,
            mtu: self.mtu(),
            masquerade,
            local_by_stack: self.config.local_delivery == LocalDelivery::Stack,
            announce: self.config.announce,
            redirects: self.policy.uses_proxy(),
        }
    }

    /// Follows the cluster's nodes.
    ///
    /// # Errors
    /// The kernel's: the next restoration of the node's objects, or of policy, tries again.
    pub async fn follow_cluster(&self) -> Result<(), ClusterFailure> {
        let followed = match self.cluster.look().await {
            Ok(true) => self.put_cluster().await,
            Ok(false) => Ok(()),
            Err(why) => Err(ClusterFailure::Kernel(why)),
        };
        // After the routes, which do not wait for the disk. Also after a failure.
        self.cluster.keep_refusals().await;
        followed
    }

    /// Puts the cluster's nodes in force.
    ///
    /// # Errors
    /// As [`Lifecycle::follow_cluster`].
    pub async fn put_cluster(&self) -> Result<(), ClusterFailure> {
        // First, so that policy never takes a container of another node for the world.
        let policy = self.set_cluster().await;
        // Before the routes, so that no connection over a new one is masqueraded.
        let masquerade = self.ensure_nat().await;
        // Also after a failure of the others: routes do not wait for their repair.
        let kernel = self.ensure_node().await.and(masquerade);
        match (policy, kernel) {
            (Ok(()), kernel) => kernel.map_err(ClusterFailure::Kernel),
            (Err(policy), Ok(())) => Err(ClusterFailure::Policy(policy)),
            (Err(policy), Err(kernel)) => {
                Err(ClusterFailure::Both { policy: Box::new(policy), kernel: Box::new(kernel) })
            }
        }
    }

    /// Makes or repairs the node's objects. Routes to other nodes that cannot be made are no error:
    /// [`Cluster::missing_routes`].
    ///
    /// # Errors
    /// The kernel's.
    pub async fn ensure_node(&self) -> Result<(), KernelError> {
        let _turn = self.turns.node.lock().await;
        let cluster = self.cluster.in_force();
        match self.kernel.ensure_node(&self.spec_with(&cluster)).await {
            Ok(missing) => {
                self.cluster.note_applied(cluster, Ok(missing));
                Ok(())
            }
            Err(why) => {
                self.cluster.note_applied(cluster, Err(why.to_string()));
                Err(why)
            }
        }
    }

    /// Makes or repairs masquerading, forwarding and announcements.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn ensure_nat(&self) -> Result<(), KernelError> {
        let _turn = self.turns.node.lock().await;
        self.kernel.ensure_nat(&self.spec()).await
    }

    /// Tells policy of the other nodes and the networks of their containers.
    ///
    /// # Errors
    /// Policy's.
    pub async fn set_cluster(&self) -> Result<(), PolicyError> {
        let _turn = self.turns.policy.lock().await;
        let cluster = self.cluster.in_force();
        let others = cluster.nodes.iter().filter(|node| node.name != self.config.node_name);
        // A node's own connections over the overlay have its router address. Collected: with an iterator of closures,
        // the compiler cannot see that the future is `Send`.
        let refused = routes::refused(&cluster.destinations);
        let is_routed = |address: &&IpAddr| !refused.iter().any(|cidr| cidr.contains(*address));
        let of = |node: &NodeRow| -> Vec<IpAddr> {
            let routers = node.router_addresses.iter().filter(is_routed);
            node.addresses.iter().chain(routers).copied().collect()
        };
        let addresses: Vec<IpAddr> = others.flat_map(of).collect();
        self.policy.set_cluster(routes::peers(&cluster.destinations), addresses).await
    }

    /// In bytes, without a requested MTU.
    #[must_use]
    pub fn mtu(&self) -> u32 {
        lock(&self.mtu).bytes
    }

    /// IPv4 first.
    #[must_use]
    pub fn routers(&self) -> Vec<IpAddr> {
        lock(&self.addresses.ipam).routers()
    }
}
