//! Addresses: usage of the pools, and the router's addresses.

use std::sync::Arc;

use wharf_api::{ComponentStatus, Health, IpFamily};
use wharf_kit::sync::lock;

use super::{Source, of};
use crate::{
    addresses::pools,
    cluster::pools::{OwnPools, PoolsView},
    config::AgentConfig,
    node::{network::NodeNetwork, part::Fill},
};

pub(super) fn source() -> Source {
    Source {
        name: "ipam",
        look: |node| Box::pin(async move { look(&node.life.network, &node.life.config) }),
        silent: |_| (Health::Degraded, "waits for the table of addresses".into()),
    }
}

fn look(network: &NodeNetwork, config: &AgentConfig) -> Fill {
    let (pools, router) = (pools::fill(&network.addresses, config.masquerade.as_ref()), network.routers());
    let family = |family| if family == IpFamily::Ipv4 { "IPv4" } else { "IPv6" };
    let full: Vec<String> =
        pools.iter().filter(|p| p.used >= p.total).map(|p| format!("{} {}", p.name, family(p.family))).collect();
    let own = network.cluster.own_pools();
    let (missing, PoolsView { source, pending, refused }) =
        (own.and_then(OwnPools::missing), own.map(OwnPools::view).unwrap_or_default());
    let refuses = network.cluster.without_pools().filter(|_| missing.is_none());
    let overlaps = crate::addresses::pools::told(&network.addresses);
    let mut message = match (&missing, &overlaps) {
        (Some(why), _) => format!("no pools: {why}"),
        (None, Some(overlaps)) => overlaps.clone(),
        (None, None) if full.is_empty() => "addresses free in every pool".to_owned(),
        (None, None) => format!("exhausted: {}", full.join(", ")),
    };
    match lock(&network.addresses.ipam).outside().len() {
        0 => {}
        1 => message.push_str("; 1 leased address is in no pool today (`wharf ipam list`)"),
        n => message.push_str(&format!("; {n} leased addresses are in no pool today (`wharf ipam list`)")),
    }
    if let Some(why) = config.ipv6_off {
        message.push_str(&format!("; IPv4 alone: IPv6 is off on the node ({why})"));
    }
    if !source.is_empty() {
        message.push_str(&format!("; pools of {source}"));
    }
    for what in pending.iter().chain(refused.iter().filter(|_| missing.is_none())) {
        message.push_str(&format!("; {what}"));
    }
    if let Some(why) = &refuses {
        message.push_str(&format!("; ADD fails: {why}"));
    }
    // The pools in use serve containers: a refused row does not make the node unready.
    let of_pools = match missing {
        Some(_) => Health::Failing,
        None => of(!full.is_empty() || overlaps.is_some(), Health::Degraded),
    };
    let health = of_pools.max(of(refused.is_some() || refuses.is_some(), Health::Degraded));
    Arc::new(move |status| {
        status.ipam.clone_from(&pools);
        status.router.clone_from(&router);
        let component = ComponentStatus::new("ipam", health, message.clone());
        status.components.push(component.by_containers(of_pools));
    })
}
