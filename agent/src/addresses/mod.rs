//! Leases of addresses, their rest after release, and overlaps with the node's networks.

pub mod pools;
pub mod resting;

use std::sync::{Arc, Mutex};

use wharf_core::{
    ids::PoolName,
    ipam::{Ipam, PoolConfig},
    kernel::Kernel,
    overlap::Overlap,
};
use wharf_store::Store;

use crate::{config::AgentConfig, proxy::Redirects};

/// Leases and pools.
pub struct Addresses {
    /// Locked for one decision.
    pub ipam: Mutex<Ipam>,
    overlaps: Mutex<Arc<Vec<Overlap>>>,
    /// Held during a check: an observation older than an address's last lease must not wake it.
    checks: tokio::sync::Mutex<()>,
    pools: Vec<PoolConfig>,
    announce: bool,
    default_pool: PoolName,
    kernel: Arc<dyn Kernel>,
    store: Store,
    redirects: Arc<dyn Redirects>,
}

impl Addresses {
    /// From its parts.
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
