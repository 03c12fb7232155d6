//! Addresses: usage of the pools, and the router's addresses.

use std::sync::Arc;

use wharf_api::{ComponentStatus, Health, IpFamily};

use super::{Source, of};
use crate::{
    addresses::pools,
    node::{lifecycle::Lifecycle, part::Fill},
    sync::lock,
};

pub(super) fn source() -> Source {
    Source {
        name: "ipam",
        look: |node| Box::pin(async move { look(&node.life) }),
        silent: |_| (Health::Degraded, "waits for the table of addresses".into()),
    }
}

fn look(life: &Lifecycle) -> Fill {
    let (pools, router) = (pools::fill(&life.addresses, life.config.masquerade.as_ref()), life.routers());
    let family = |family| if family == IpFamily::Ipv4 { "IPv4" } else { "IPv6" };
    let full: Vec<String> =
        pools.iter().filter(|p| p.used >= p.total).map(|p| format!("{} {}", p.name, family(p.family))).collect();
    let overlaps = crate::addresses::pools::told(&life.addresses);
    let mut message = match &overlaps {
        Some(overlaps) => overlaps.clone(),
        None if full.is_empty() => "addresses free in every pool".to_owned(),
        None => format!("exhausted: {}", full.join(", ")),
    };
    match lock(&life.addresses.ipam).outside().len() {
        0 => {}
        1 => message.push_str("; 1 leased address is in no pool today (`wharf ipam list`)"),
        n => message.push_str(&format!("; {n} leased addresses are in no pool today (`wharf ipam list`)")),
    }
    if let Some(why) = life.config.ipv6_off {
        message.push_str(&format!("; IPv4 alone: IPv6 is off on the node ({why})"));
    }
    let amiss = !full.is_empty() || overlaps.is_some();
    Arc::new(move |status| {
        status.ipam.clone_from(&pools);
        status.router.clone_from(&router);
        let health = of(amiss, Health::Degraded);
        status.components.push(ComponentStatus::new("ipam", health, message.clone()));
    })
}
