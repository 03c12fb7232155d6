//! Addresses leased by another IPAM; agent and IPAM do not know each other's addresses.

use std::net::IpAddr;

use wharf_core::{
    kernel::Kernel,
    overlap::{Way, conflicts},
    plan::CreateStep,
};
use wharf_kit::sync::lock;

use crate::{
    addresses::Addresses,
    endpoint::{
        error::CreateCause,
        out_of_service,
        reserve::{CreateSpec, External},
    },
    node::{endpoints::Endpoints, sources},
};

/// Refuses addresses in use, except by endpoints: the registry refuses those.
pub(super) async fn check(
    endpoints: &Endpoints,
    addresses: &Addresses,
    kernel: &dyn Kernel,
    spec: &CreateSpec,
) -> Result<(), CreateCause> {
    let Some(external) = &spec.external else { return Ok(()) };
    let refused = |ip: IpAddr, why: String| CreateCause::External { by: external.to_string(), ip, why };
    for ip in &spec.ips {
        let (pool, lease, router) = {
            let table = lock(&addresses.ipam);
            let router = if ip.is_ipv4() { table.router4().is_some() } else { table.router6().is_some() };
            let is_held = table.get(*ip).is_some() || table.is_router(*ip);
            (table.cidrs().into_iter().find(|cidr| cidr.contains(ip)), is_held, router)
        };
        if let Some(cidr) = pool {
            return Err(refused(*ip, format!("it lies in {cidr}, a pool of the agent, which gives it out itself")));
        }
        if lease || out_of_service::holds(&endpoints.leftovers.out_of_service, *ip) {
            let why = format!("it is held for another endpoint; `wharf explain {ip}` says which");
            return Err(CreateCause::ExternalHeld { by: external.to_string(), ip: *ip, why });
        }
        if let Some((id, _)) = sources::allowed_to(&endpoints.registry, *ip).first() {
            return Err(refused(*ip, format!("endpoint {id} may send from it, because it is in a source prefix")));
        }
        let External::Ipam { gateways, .. } = external else { continue };
        if !router {
            let family = if ip.is_ipv4() { "IPv4" } else { "IPv6" };
            return Err(refused(
                *ip,
                format!("the node forwards no {family}, because no pool of the agent has {family}"),
            ));
        }
        if gateways.contains(ip) {
            return Err(refused(*ip, "it is its own gateway".to_owned()));
        }
    }
    let networks =
        kernel.observe_networks_of(&spec.ips).await.map_err(|e| CreateCause::Kernel(CreateStep::Lease, e))?;
    for (ip, network) in spec.ips.iter().zip(networks) {
        let Some(network) = network.filter(|network| conflicts(&(*ip).into(), network)) else { continue };
        let is_free = match network.way {
            // The network behind a gateway may have this host; only the operator knows.
            Way::Gateway(_) | Way::Nowhere => true,
            // Unless it is the container, the node could not reach this host on a link.
            Way::OnLink { .. } => *external == External::Chain,
            Way::Address | Way::Local => false,
        };
        if !is_free {
            return Err(refused(*ip, format!("{network} has it already")));
        }
    }
    Ok(())
}
