//! This node's part of the cluster's network.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::{Arc, Mutex},
};

use wharf_cluster::{
    nodes::NodeRow,
    routes::{self, Destination},
};
use wharf_core::{
    kernel::{Kernel, KernelError, NextHop, NodeSpec, OverlaySpec},
    mtu::NodeMtu,
    nat::OverlayPort,
};
use wharf_kit::sync::lock;

use crate::{
    addresses::Addresses,
    cluster::{Cluster, ClusterError, InForce},
    config::{AgentConfig, LocalDelivery},
    policy::{Policy, error::PolicyError},
};

/// Name of the controller that repairs the node's objects.
pub const CONTROLLER: &str = "node-datapath";

/// Addresses of this node's containers, routes to other nodes, masquerading: what [`NodeSpec`] is made of.
pub struct NodeNetwork {
    /// Leases and pools.
    pub addresses: Addresses,
    /// The other nodes.
    pub cluster: Cluster,
    /// Of links without a requested MTU.
    pub mtu: Mutex<NodeMtu>,
    turns: Turns,
    config: Arc<AgentConfig>,
    kernel: Arc<dyn Kernel>,
    policy: Arc<Policy>,
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

impl NodeNetwork {
    /// Before [`NodeNetwork::load_cluster`].
    #[must_use]
    pub fn new(config: Arc<AgentConfig>, kernel: Arc<dyn Kernel>, policy: Arc<Policy>, addresses: Addresses) -> Self {
        Self {
            addresses,
            cluster: Cluster::new(&config, Arc::clone(&kernel)),
            mtu: Mutex::new(NodeMtu::of(config.mtu, &[])),
            turns: Turns::default(),
            config,
            kernel,
            policy,
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

    /// At a start, before the node's objects are made.
    ///
    /// # Errors
    /// The file of nodes is refused and no earlier text of it is kept; or the kernel cannot be read.
    pub async fn load_cluster(&self, boot_id: &str) -> Result<(), ClusterError> {
        // No node is known yet that explains them.
        let left = if self.cluster.feed().is_some() { self.kernel.observe_peers().await? } else { Vec::new() };
        self.cluster.load(boot_id, left).await
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
    /// As [`NodeNetwork::follow_cluster`].
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

    /// Derives new links' MTU from the uplinks. Returns the former one and the new one.
    ///
    /// # Errors
    /// The kernel's; the MTU stays.
    pub async fn observe_mtu(&self) -> Result<(NodeMtu, NodeMtu), KernelError> {
        let uplinks = match self.config.mtu {
            Some(_) => Vec::new(),
            None => self.kernel.observe_uplinks().await?,
        };
        let now = NodeMtu::of(self.config.mtu, &uplinks);
        Ok((std::mem::replace(&mut *lock(&self.mtu), now.clone()), now))
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
