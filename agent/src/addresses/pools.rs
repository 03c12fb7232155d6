//! Overlaps of pools with the node's networks: an overlap refuses the start; a later one is logged and its addresses
//! are withheld.

use std::{net::IpAddr, sync::Arc};

use anyhow::Context;
use ipnet::IpNet;
use wharf_api::{IpFamily, PoolView};
use wharf_core::{
    finding::NodeProblem,
    ipam::Leased,
    kernel::KernelError,
    nat::Masquerade,
    overlap::{Overlap, at_start, overlaps},
    store::LeaseOwner,
};
use wharf_kit::sync::lock;

use crate::{addresses::Addresses, config::AgentConfig};

/// Refuses pools that overlap a network of the node, at start.
pub fn check(config: &AgentConfig) -> anyhow::Result<()> {
    let cidrs: Vec<IpNet> = config.pools.iter().flat_map(|p| p.cidrs.iter().copied()).collect();
    let seen = wharf_datapath::observe_networks(&cidrs).context("look at the node's addresses and routes")?;
    at_start(&config.pools, &seen, config.announce)?;
    Ok(())
}

/// Withholds addresses of the node's networks.
pub async fn look(addresses: &Addresses) -> Result<(), KernelError> {
    let cidrs = lock(&addresses.ipam).cidrs();
    let seen = addresses.kernel.observe_networks(&cidrs).await?;
    apply(addresses, overlaps(&addresses.pools, &seen.foreign, addresses.announce));
    Ok(())
}

fn apply(addresses: &Addresses, now: Vec<Overlap>) {
    lock(&addresses.ipam).withhold(now.iter().map(Overlap::withheld).collect());
    let before = std::mem::replace(&mut *lock(&addresses.overlaps), Arc::new(now.clone()));
    for overlap in now.iter().filter(|o| !before.contains(o)) {
        tracing::warn!("{overlap}: addresses that both have are given to no container");
    }
    for overlap in before.iter().filter(|o| !now.contains(o)) {
        tracing::info!("{overlap}: no longer so");
    }
}

/// Releases a lease whose address the node has or directly reaches; returns whether it did.
pub async fn is_taken_by_node(addresses: &Addresses, leased: &Leased, owner: &LeaseOwner) -> bool {
    let ips: Vec<IpAddr> = leased.ipv4.map(IpAddr::V4).into_iter().chain(leased.ipv6.map(IpAddr::V6)).collect();
    let mut found = Vec::new();
    match addresses.kernel.observe_networks_of(&ips).await {
        Ok(networks) => {
            networks
                .iter()
                .for_each(|network| found.extend(overlaps(&addresses.pools, network.as_slice(), addresses.announce)));
        }
        Err(error) => tracing::warn!(?ips, "{error}; whether the node has them is not known"),
    }
    if found.is_empty() {
        return false;
    }
    let mut ipam = lock(&addresses.ipam);
    for ip in ips {
        ipam.release_unused(ip, owner);
    }
    drop(ipam);
    let mut all = Vec::clone(&lock(&addresses.overlaps));
    all.extend(found.into_iter().filter(|o| !all.contains(o)).collect::<Vec<_>>());
    apply(addresses, all);
    true
}

/// As audit problems.
#[must_use]
pub fn problems(addresses: &Addresses) -> Vec<NodeProblem> {
    lock(&addresses.overlaps).iter().cloned().map(NodeProblem::PoolOverlap).collect()
}

/// In words.
#[must_use]
pub fn told(addresses: &Addresses) -> Option<String> {
    let overlaps = Arc::clone(&lock(&addresses.overlaps));
    match overlaps.as_slice() {
        [] => None,
        [one] => Some(one.to_string()),
        [first, rest @ ..] => Some(format!("{first}; and {} more (`wharf audit`)", rest.len())),
    }
}

/// Pools with their usage.
#[must_use]
pub fn fill(addresses: &Addresses, masquerade: Option<&Masquerade>) -> Vec<PoolView> {
    let usage = lock(&addresses.ipam).usage();
    usage
        .into_iter()
        .map(|u| PoolView {
            name: u.pool.to_string(),
            family: if u.v6 { IpFamily::Ipv6 } else { IpFamily::Ipv4 },
            cidrs: u.cidrs.iter().map(ToString::to_string).collect(),
            used: u.used,
            resting: u.resting,
            total: u.total,
            masquerade: Some(masquerade.is_some_and(|m| m.covers(&u.cidrs))),
        })
        .collect()
}
