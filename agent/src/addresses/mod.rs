//! Addresses: leased, given back, rested; and compared with what the node's own networks have.

pub mod pools;
pub mod resting;

use std::sync::{Arc, Mutex};

use wharf_core::{
    ids::PoolName,
    ipam::{Ipam, PoolConfig},
    overlap::Overlap,
};

use crate::{config::AgentConfig, proxy::Redirects, store::Store};

/// The node's addresses, and whom to ask about them.
pub struct Addresses<K> {
    /// Leases, rests and pools. Locked for one decision at a time.
    pub ipam: Mutex<Ipam>,
    /// Networks of the node that share addresses with pools, as they were last seen.
    overlaps: Mutex<Arc<Vec<Overlap>>>,
    /// Whose turn it is to look at resting addresses: one at a time, so that none is woken by what was seen before its
    /// last lease. Held across kernel calls and a commit, each bounded.
    checks: tokio::sync::Mutex<()>,
    pools: Vec<PoolConfig>,
    default_pool: PoolName,
    kernel: Arc<K>,
    store: Store,
    redirects: Arc<dyn Redirects>,
}

impl<K> Addresses<K> {
    /// Puts the parts together.
    #[must_use]
    pub fn new(ipam: Ipam, config: &AgentConfig, kernel: Arc<K>, store: Store, redirects: Arc<dyn Redirects>) -> Self {
        Self {
            ipam: Mutex::new(ipam),
            overlaps: Mutex::default(),
            checks: tokio::sync::Mutex::default(),
            pools: config.pools.clone(),
            default_pool: config.default_pool.clone(),
            kernel,
            store,
            redirects,
        }
    }
}
