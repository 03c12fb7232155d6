//! Leases, releases, rests, and overlaps with the node's networks.

pub mod pools;
pub mod resting;

use std::sync::{Arc, Mutex};

use wharf_core::{
    ids::PoolName,
    ipam::{Ipam, PoolConfig},
    kernel::Kernel,
    overlap::Overlap,
};

use crate::{config::AgentConfig, proxy::Redirects, store::Store};

/// Addresses, with the kernel, store and proxy of the checks.
pub struct Addresses {
    /// Leases, rests and pools. Locked for one decision at a time.
    pub ipam: Mutex<Ipam>,
    /// Overlaps of pools, as last observed.
    overlaps: Mutex<Arc<Vec<Overlap>>>,
    /// Serializes checks, so that no address is woken by an observation from before its last lease. Held across
    /// kernel calls and a commit, each bounded.
    checks: tokio::sync::Mutex<()>,
    pools: Vec<PoolConfig>,
    /// The node announces the pools' addresses.
    announce: bool,
    default_pool: PoolName,
    kernel: Arc<dyn Kernel>,
    store: Store,
    redirects: Arc<dyn Redirects>,
}

impl Addresses {
    /// Combines the parts.
    #[must_use]
    pub fn new(
        ipam: Ipam,
        config: &AgentConfig,
        kernel: Arc<dyn Kernel>,
        store: Store,
        redirects: Arc<dyn Redirects>,
    ) -> Self {
        Self {
            ipam: Mutex::new(ipam),
            overlaps: Mutex::default(),
            checks: tokio::sync::Mutex::default(),
            pools: config.pools.clone(),
            announce: config.announce,
            default_pool: config.default_pool.clone(),
            kernel,
            store,
            redirects,
        }
    }
}
