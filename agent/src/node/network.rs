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

/// Controller that repairs the node's objects.
pub const CONTROLLER: &str = "node-datapath";

/// Container addresses, routes to other nodes, masquerading: the parts of [`NodeSpec`].
pub struct NodeNetwork {
    /// Leases and pools.
    pub addresses: Addresses,
    /// The other nodes.
    pub cluster: Cluster,
    /// MTU of links without a requested one.
    pub mtu: Mutex<NodeMtu>,
    turns: Turns,
    config: Arc<AgentConfig>,
    kernel: Arc<dyn Kernel>,
    policy: Arc<Policy>,
}

/// Held while the wanted state is read and applied: no older state follows a newer one. No task holds both.
#[derive(Default)]
struct Turns {
    /// For the node's objects: one kernel call, whose netlink requests have a time limit.
    node: tokio::sync::Mutex<()>,
    /// For other nodes in policy: the wait for policy's lock, and one change. Routes do not wait for it.
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
            // Also without an overlay route of this node: other nodes may have one.
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

    /// Loads the nodes before the node's objects are made; see [`Cluster::load`].
    pub async fn load_cluster(&self, boot_id: &str) -> Result<(), ClusterError> {
        let left = if self.cluster.feed().is_some() { self.kernel.observe_peers().await? } else { Vec::new() };
        self.cluster.load(boot_id, left).await
    }

    /// Follows the cluster's nodes. After an error, the next restoration of the node's objects, or of policy, retries.
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

    /// Puts the cluster's nodes in force. Errors as [`NodeNetwork::follow_cluster`].
    pub async fn put_cluster(&self) -> Result<(), ClusterFailure> {
        // First: policy must never take another node's container for the world.
        let policy = self.set_cluster().await;
        // Before the routes: no connection over a new route may be masqueraded.
        let masquerade = self.ensure_nat().await;
        // Also after other failures.
        let kernel = self.ensure_node().await.and(masquerade);
        match (policy, kernel) {
            (Ok(()), kernel) => kernel.map_err(ClusterFailure::Kernel),
            (Err(policy), Ok(())) => Err(ClusterFailure::Policy(policy)),
            (Err(policy), Err(kernel)) => {
                Err(ClusterFailure::Both { policy: Box::new(policy), kernel: Box::new(kernel) })
            }
        }
    }

    /// Makes or repairs the node's objects. Unmade routes to other nodes are no error ([`Cluster::missing_routes`]).
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
    pub async fn ensure_nat(&self) -> Result<(), KernelError> {
        let _turn = self.turns.node.lock().await;
        self.kernel.ensure_nat(&self.spec()).await
    }

    /// Gives policy the other nodes and their container networks.
    pub async fn set_cluster(&self) -> Result<(), PolicyError> {
        let _turn = self.turns.policy.lock().await;
        let cluster = self.cluster.in_force();
        let others = cluster.nodes.iter().filter(|node| node.name != self.config.node_name);
        // A node's own overlay connections have its router address. Collected: an iterator of closures hides from the
        // compiler that the future is `Send`.
        let refused = routes::refused(&cluster.destinations);
        let is_routed = |address: &&IpAddr| !refused.iter().any(|cidr| cidr.contains(*address));
        let of = |node: &NodeRow| -> Vec<IpAddr> {
            let routers = node.router_addresses.iter().filter(is_routed);
            node.addresses.iter().chain(routers).copied().collect()
        };
        let addresses: Vec<IpAddr> = others.flat_map(of).collect();
        self.policy.set_cluster(routes::peers(&cluster.destinations), addresses).await
    }

    /// Derives new links' MTU from the uplinks. Returns former and new MTU; an error keeps the former.
    pub async fn observe_mtu(&self) -> Result<(NodeMtu, NodeMtu), KernelError> {
        let uplinks = match self.config.mtu {
            Some(_) => Vec::new(),
            None => self.kernel.observe_uplinks().await?,
        };
        let now = NodeMtu::of(self.config.mtu, &uplinks);
        Ok((std::mem::replace(&mut *lock(&self.mtu), now.clone()), now))
    }

    /// MTU of links without a requested one, bytes.
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
