//! Pools of `--pools-from-cluster` follow this node's row.

use ipnet::IpNet;
use wharf_cluster::pools::Decision;
use wharf_core::{
    endpoint::IpOwner,
    ipam::{Ipam, PoolConfig, describe_owner},
    kernel::KernelError,
    overlap::at_start,
    store::LeaseOwner,
};
use wharf_kit::sync::lock;

use super::{health, lifecycle::Lifecycle};
use crate::cluster::pools::usable;

impl Lifecycle {
    /// Compares the row's pod CIDRs with the pools in use. Other usable ones restart the agent in place.
    ///
    /// # Errors
    /// The kernel cannot be read, or the pod CIDRs cannot be kept for the next start; the pools in use stay.
    pub async fn follow_row(&self) -> Result<(), String> {
        let Some(own) = self.network.cluster.own_pools() else { return Ok(()) };
        let Some(row) = self.network.cluster.own_pod_cidrs() else { return Ok(()) };
        // A restart would lose pools that the row may have again.
        let decision = if self.network.cluster.is_partial(&row) { Decision::Keep } else { own.decide(&row).await };
        match (decision, usable(&self.config, &row)) {
            (Decision::Keep, _) => own.settle(),
            (_, Err(why)) => own.refuse(&row, &why),
            (_, Ok(_)) if own.is_refused(&row) => {}
            (decision, Ok(ipam)) => {
                let unfit = self.unfit(&row, &ipam).await.map_err(|why| why.to_string())?;
                match (unfit, decision) {
                    (Some(why), _) => own.refuse(&row, &why),
                    (None, Decision::Wait(left_ms)) => own.postpone(&row, left_ms),
                    (None, _) => {
                        let what = own.restart_with(&row).await?;
                        tracing::warn!("{what}");
                        self.telemetry.monitor.agent(None, "pools-changed", what);
                    }
                }
            }
        }
        Ok(())
    }

    async fn unfit(&self, cidrs: &[IpNet], ipam: &Ipam) -> Result<Option<String>, KernelError> {
        let is_held = |owner: &LeaseOwner| *owner != LeaseOwner::Node && !health::holds(owner);
        for router in ipam.routers() {
            let lease = lock(&self.network.addresses.ipam).get(router).cloned();
            if let Some(lease) = lease.filter(|lease| is_held(&lease.owner)) {
                let owner = describe_owner(&lease.owner);
                return Ok(Some(format!("their router address {router} is leased to {owner}")));
            }
        }
        let contains = |ip: &std::net::IpAddr| cidrs.iter().any(|cidr| cidr.contains(ip));
        for handle in self.endpoints.registry.list() {
            let record = handle.shared.read(|v| v.record.clone());
            let has_router = |ip: &std::net::IpAddr| ipam.is_router(*ip) && !health::is_reserved(&record.attachment);
            if let Some(ip) = record.addresses().find(has_router) {
                return Ok(Some(format!("endpoint {} has their router address {ip}", record.id)));
            }
            if let Some(prefix) = cidrs.iter().find_map(|cidr| record.sources.overlapping(cidr)) {
                return Ok(Some(format!("endpoint {} may send from {prefix}, a source prefix", record.id)));
            }
            if record.ip_owner == IpOwner::External
                && let Some(ip) = record.addresses().find(contains)
            {
                return Ok(Some(format!("endpoint {} has the address {ip} of another IPAM", record.id)));
            }
        }
        for orphan in self.endpoints.leftovers.orphans.list() {
            if let Some((ip, _)) = orphan.rows.iter().find(|(ip, _)| !contains(ip)) {
                let id = orphan.link.id;
                return Ok(Some(format!("endpoint {id}, whose record is lost, has the address {ip} outside of them")));
            }
        }
        let seen = self.kernel.observe_networks(cidrs).await?;
        let pool = PoolConfig { name: self.config.default_pool.clone(), cidrs: cidrs.to_vec() };
        let overlaps = at_start(&[pool], &seen, self.config.announce).err();
        Ok(overlaps.and_then(|refused| refused.0.first().map(ToString::to_string)))
    }
}
