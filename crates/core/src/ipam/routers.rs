//! The node's addresses in the pools: gateways of endpoints.

use std::net::IpAddr;

use super::Ipam;
use crate::{
    ids::PoolName,
    store::{Lease, LeaseOwner},
};

impl Ipam {
    /// Without pools, every lease is refused.
    #[must_use]
    pub fn without_pools(default_pool: PoolName) -> Self {
        Self::of(Vec::new(), default_pool)
    }

    /// Router addresses, IPv4 first.
    #[must_use]
    pub fn routers(&self) -> Vec<IpAddr> {
        self.router4.map(IpAddr::V4).into_iter().chain(self.router6.map(IpAddr::V6)).collect()
    }

    /// Router addresses from before a change of the default pool, which endpoints have as gateways.
    #[must_use]
    pub fn former_routers(&self) -> &[IpAddr] {
        &self.former_routers
    }

    /// A router address of now or before.
    #[must_use]
    pub fn is_router(&self, ip: IpAddr) -> bool {
        self.routers().contains(&ip) || self.former_routers.contains(&ip)
    }

    /// Keeps a router address from before a change of the default pool. No endpoint gets it.
    pub fn keep_router(&mut self, ip: IpAddr) {
        if self.is_router(ip) {
            return;
        }
        self.former_routers.push(ip);
        if let Some((index, pool)) = self.pool_of(ip).map(|(index, pool)| (index, pool.clone())) {
            self.insert(index, Lease { ip, pool, owner: LeaseOwner::Node, since_unix_ms: 0 });
        }
    }
}
