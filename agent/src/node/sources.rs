//! Checks source prefixes against addresses of this node and its endpoints.

use std::net::IpAddr;

use ipnet::IpNet;
use wharf_core::{ids::EndpointId, overlap::Way, sources::SourcePrefixes};
use wharf_kit::sync::lock;

use crate::node::{endpoint::View, error::SourcesRefusal, lifecycle::Lifecycle, registry::Registry};

/// Refuses prefixes that contain addresses of pools, services, other nodes' containers, gateways, the node or endpoints
/// other than `own`. Prefixes of two endpoints may overlap: both may use one virtual address.
pub(crate) async fn check(
    life: &Lifecycle,
    sources: &SourcePrefixes,
    own: Option<EndpointId>,
    gateways: &[IpAddr],
) -> Result<(), SourcesRefusal> {
    if sources.is_empty() {
        return Ok(());
    }
    let refuse = |net: IpNet, with: &dyn Fn() -> String| match sources.overlapping(&net) {
        Some(prefix) => Err(SourcesRefusal::Taken { prefix, with: with() }),
        None => Ok(()),
    };
    let (pools, routers) = {
        let ipam = lock(&life.network.addresses.ipam);
        let current = [ipam.router4().map(IpAddr::V4), ipam.router6().map(IpAddr::V6)];
        let routers: Vec<IpAddr> = current.into_iter().flatten().chain(ipam.former_routers().iter().copied()).collect();
        (ipam.cidrs(), routers)
    };
    for net in pools {
        refuse(net, &|| format!("{net}, a pool of the agent"))?;
    }
    for net in &life.config.service_cidr {
        refuse(*net, &|| format!("{net}, a range of services (--service-cidr)"))?;
    }
    for to in &life.network.cluster.in_force().destinations {
        refuse(to.cidr, &|| format!("{}, the network of containers of node {}", to.cidr, to.node))?;
    }
    for ip in gateways.iter().copied().chain(routers) {
        refuse(ip.into(), &|| format!("the gateway {ip}"))?;
    }
    for handle in life.endpoints.registry.list().into_iter().filter(|handle| Some(handle.id) != own) {
        for ip in handle.shared.read(|v| v.record.addresses()) {
            refuse(ip.into(), &|| format!("the address {ip} of endpoint {}", handle.id))?;
        }
    }
    let prefixes: Vec<IpNet> = sources.iter().copied().collect();
    let networks = life.kernel.observe_networks(&prefixes).await?.foreign;
    for network in networks.iter().filter(|network| matches!(network.way, Way::Address | Way::Local)) {
        refuse(network.net, &|| network.to_string())?;
    }
    Ok(())
}

/// Endpoints whose prefixes contain the address, with the prefixes in words.
#[must_use]
pub fn allowed_to(registry: &Registry, address: IpAddr) -> Vec<(EndpointId, String)> {
    let of = |v: &View| {
        let r = &v.record;
        r.sources.contains(address).then(|| (r.id, format!("{}, {}", r.attachment, in_words(&r.sources))))
    };
    registry.list().iter().filter_map(|handle| handle.shared.read(of)).collect()
}

/// `source prefixes 10.200.0.0/16, fd00:9::/64`.
#[must_use]
pub fn in_words(sources: &SourcePrefixes) -> String {
    let prefixes: Vec<String> = sources.iter().map(ToString::to_string).collect();
    format!("source prefixes {}", if prefixes.is_empty() { "none".to_owned() } else { prefixes.join(", ") })
}
