//! Before a create's first step: checks, then reservation of epoch, id and registry entry.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::PathBuf,
    sync::Arc,
};

use tokio::time::Instant;
use wharf_api::{ContainerRoute, LogStatus};
use wharf_core::{
    bandwidth::Bandwidth,
    endpoint::{EndpointRecord, IpOwner, LinkOwner, host_ifname},
    identity::{Identity, Label},
    identity_allocator::says_what,
    ids::{Attachment, IfIndex, MacAddr, PoolName, RuntimeName},
    ipam::Ipam,
    kernel::Kernel,
    nat::{PortMapping, PublishedPort},
    policy::Enforcement,
    sources::SourcePrefixes,
    state::{Fsm, State},
    store::LeaseOwner,
};
use wharf_kit::{clock, sync::lock};

use crate::{
    config::AgentConfig,
    endpoint::{deletions, error::CreateCause, external, task::EndpointTask},
    node::{
        endpoint::{Handle, View},
        health,
        jobs::Jobs,
        lifecycle::Lifecycle,
        prepared::{ProgramSet, random_macs},
        registry::Taken,
        sources,
    },
};

/// A parsed create request.
#[derive(Debug, Clone)]
pub struct CreateSpec {
    /// CNI key.
    pub attachment: Attachment,
    /// Network namespace.
    pub netns: PathBuf,
    /// Default pool if absent.
    pub pool: Option<PoolName>,
    /// In bytes.
    pub mtu: Option<u32>,
    /// Requested MAC.
    pub mac: Option<MacAddr>,
    /// At most one per family.
    pub ips: Vec<IpAddr>,
    pub labels: std::collections::BTreeSet<Label>,
    pub pod_name: Option<String>,
    pub pod_namespace: Option<String>,
    /// Requesting container runtime.
    pub runtime: Option<RuntimeName>,
    pub ports: Vec<PublishedPort>,
    /// The pool's setting if absent.
    pub masquerade: Option<bool>,
    /// Limits.
    pub bandwidth: Bandwidth,
    /// Sources besides its addresses.
    pub sources: SourcePrefixes,
    /// Lessor of the addresses, if not the agent.
    pub external: Option<External>,
    /// Destinations by its gateways; everything if absent.
    pub routes: Option<Vec<ContainerRoute>>,
    /// The caller's deadline.
    pub deadline: Instant,
}

/// Lessor of addresses outside the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum External {
    /// A plugin.
    Ipam {
        /// Type.
        plugin: String,
        /// At most one per family.
        gateways: Vec<IpAddr>,
    },
    /// The interface's plugin.
    Chain,
}

impl std::fmt::Display for External {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ipam { plugin, .. } => write!(f, "IPAM plugin {plugin}"),
            Self::Chain => f.write_str("the plugin that made the interface"),
        }
    }
}

pub(super) async fn reserve(life: &Arc<Lifecycle>, spec: &CreateSpec) -> Result<EndpointTask, CreateCause> {
    let a = &spec.attachment;
    deletions::serve_before_create(life, a).await?;
    // A delete is answered before names and addresses are free.
    let same = |r: &Attachment| (&r.container_id, &r.ifname) == (&a.container_id, &a.ifname);
    let same_port = |r: &EndpointRecord| r.ports.iter().any(|p| spec.ports.iter().any(|wanted| p.overlaps(wanted)));
    let concerns =
        |r: &EndpointRecord| same(&r.attachment) || r.addresses().any(|ip| spec.ips.contains(&ip)) || same_port(r);
    life.endpoints.registry.settled(concerns).await;
    if let Some(there) = life.endpoints.registry.by_interface(&a.container_id, &a.ifname) {
        return Err(taken_by(&life.endpoints.jobs, &there));
    }
    let netns = life.kernel.observe_netns(&spec.netns).await.map_err(CreateCause::Netns)?;
    let plugin = match &spec.external {
        Some(External::Chain) => {
            let link = life.kernel.observe_plugin_link(&netns, &a.ifname).await;
            Some(link.map_err(CreateCause::PluginLink)?)
        }
        _ => None,
    };
    let (ip_owner, requested) = match &spec.external {
        Some(_) => {
            external::check(&life.endpoints, &life.network.addresses, &*life.kernel, spec).await?;
            (IpOwner::External, pair(&spec.ips))
        }
        None => requested_addresses(&lock(&life.network.addresses.ipam), spec)?,
    };
    if let Some(link) = &plugin {
        if let Some(ip) = spec.ips.iter().find(|ip| !link.addresses.contains(ip)) {
            return Err(CreateCause::NotOnLink { ip: *ip, ifname: a.ifname.clone() });
        }
        if let Some(asked) = spec.mac.filter(|asked| *asked != link.container_mac) {
            return Err(CreateCause::OtherMac { asked, has: link.container_mac, ifname: a.ifname.clone() });
        }
    }
    may_masquerade(&life.config, spec)?;
    may_publish(&life.config, &*life.kernel, spec, requested).await?;
    let gateways = match &spec.external {
        Some(External::Ipam { gateways, .. }) => gateways.as_slice(),
        _ => [].as_slice(),
    };
    sources::check(life, &spec.sources, None, gateways).await?;
    let epoch = life.store.next_epoch().await?;
    let set = match (&plugin, spec.mac) {
        (None, None) => life.endpoints.prepared.take(),
        _ => None,
    };
    let (set, prepared) = match set {
        Some(set) => (set, true),
        None => {
            let taken = match life.endpoints.registry.take_id() {
                None if life.endpoints.registry.settled(|_| true).await => life.endpoints.registry.take_id(),
                taken => taken,
            };
            let id = taken.ok_or(CreateCause::NoId)?;
            let (container_mac, host_mac) = random_macs();
            let macs = plugin.as_ref().map(|link| (link.container_mac, link.host_mac));
            let (container_mac, host_mac) = macs.unwrap_or((spec.mac.unwrap_or(container_mac), host_mac));
            (ProgramSet { id, container_mac, host_mac }, false)
        }
    };
    let give_back =
        || if prepared { life.endpoints.prepared.give_back(set) } else { life.endpoints.registry.free_id(set.id) };
    let (gateway4, gateway6) = {
        let ipam = lock(&life.network.addresses.ipam);
        // Families of caller-leased addresses are known now, others after the lease. Another plugin's link keeps its
        // gateways.
        let speaks = |known: bool| plugin.is_none() && (known || ip_owner == IpOwner::Endpoint);
        (
            ipam.router4().filter(|_| speaks(requested.0.is_some())),
            ipam.router6().filter(|_| speaks(requested.1.is_some())),
        )
    };
    let (gateway4, gateway6) = match &spec.external {
        Some(External::Ipam { gateways, .. }) => {
            let (own4, own6) = pair(gateways);
            (own4.or(gateway4), own6.or(gateway6))
        }
        _ => (gateway4, gateway6),
    };
    let mut record = EndpointRecord {
        id: set.id,
        epoch,
        attachment: a.clone(),
        netns,
        pool: spec.pool.clone().unwrap_or_else(|| life.config.default_pool.clone()),
        ip_owner,
        ipv4: requested.0,
        ipv6: requested.1,
        gateway4,
        gateway6,
        host_ifname: plugin.as_ref().map_or_else(|| host_ifname(set.id, epoch), |p| p.host_ifname.clone()),
        host_ifindex: plugin.as_ref().map_or(IfIndex(0), |p| p.link.host_ifindex),
        container_ifindex: plugin.as_ref().map_or(IfIndex(0), |p| p.link.container_ifindex),
        container_mac: set.container_mac,
        host_mac: set.host_mac,
        mtu: plugin.as_ref().map_or_else(|| spec.mtu.unwrap_or_else(|| life.network.mtu()), |p| p.mtu),
        mtu_follows: plugin.is_none() && spec.mtu.is_none(),
        container_mtu: None,
        labels: spec.labels.clone(),
        identity: Identity::INIT,
        pod_name: spec.pod_name.clone(),
        pod_namespace: spec.pod_namespace.clone(),
        runtime: spec.runtime.clone(),
        created_unix_ms: clock::unix_ms(),
        ports: spec.ports.clone(),
        masquerade: spec.masquerade,
        bandwidth: spec.bandwidth,
        sources: spec.sources.clone(),
        policy_enforcement: Enforcement::Default,
        named_ports: std::collections::BTreeMap::new(),
        link_owner: plugin.map_or(LinkOwner::Wharf, |p| LinkOwner::Plugin { hooks: p.hooks }),
        // Runtimes send a pod's name without labels.
        awaits_labels: !life.config.labels_timeout.is_zero() && spec.pod_name.is_some() && !says_what(&spec.labels),
        ipam: match &spec.external {
            Some(External::Ipam { plugin, .. }) => Some(plugin.clone()),
            _ => None,
        },
        routes: spec.routes.as_ref().map(|routes| routes.iter().map(|route| route.dst).collect()),
        pod_row: None,
    };
    record.awaits_labels |= life.endpoints.pods.expects_row(&record);
    if let Err(refused) = routes_fit(&spec.routes, &record) {
        give_back();
        return Err(refused);
    }
    let (handle, mailbox) = Handle::new(View::new(record, Fsm::new_created(clock::monotonic_ms()), false));
    if let Err(taken) = life.endpoints.registry.insert(handle.clone()) {
        give_back();
        return Err(match taken {
            Taken::Interface(there) => taken_by(&life.endpoints.jobs, &there),
            Taken::Link(there) => {
                let attachment = there.shared.read(|v| v.record.attachment.clone());
                CreateCause::LinkTaken { id: there.id, attachment }
            }
            Taken::Address(ip, there) => CreateCause::AddressTaken { id: there.id, ip },
            Taken::Port(port, there) => {
                let attachment = there.shared.read(|v| v.record.attachment.clone());
                CreateCause::PortTaken { port, id: there.id, attachment }
            }
        });
    }
    let task = EndpointTask::new(Arc::clone(life), &handle, mailbox, prepared);
    task.shared.log(LogStatus::Ok, "created", a.to_string());
    Ok(task)
}

/// The node masquerades only its pools.
fn may_masquerade(config: &AgentConfig, spec: &CreateSpec) -> Result<(), CreateCause> {
    if let Some(external) = spec.external.as_ref().filter(|_| spec.masquerade == Some(true)) {
        return Err(CreateCause::ExternalNotMasqueraded { by: external.to_string() });
    }
    let name = spec.pool.as_ref().unwrap_or(&config.default_pool);
    let Some(masquerade) = config.masquerade.as_ref() else {
        return if spec.masquerade == Some(true) { Err(CreateCause::MasqueradeOff) } else { Ok(()) };
    };
    // The lease step refuses unknown pools.
    let pool = config.pools.iter().find(|pool| pool.name == *name);
    match pool {
        Some(pool) if spec.masquerade == Some(true) && !masquerade.covers(&pool.cidrs) => {
            Err(CreateCause::PoolNotMasqueraded(name.clone()))
        }
        _ => Ok(()),
    }
}

async fn may_publish(
    config: &AgentConfig,
    kernel: &dyn Kernel,
    spec: &CreateSpec,
    leased: AddressPair,
) -> Result<(), CreateCause> {
    let Some(first) = spec.ports.first() else { return Ok(()) };
    if config.masquerade.is_none() {
        return Err(CreateCause::PortsOff(*first));
    }
    let name = spec.pool.as_ref().unwrap_or(&config.default_pool);
    let pool = config.pools.iter().find(|pool| pool.name == *name);
    let of_pool = |ipv4: bool| pool.is_some_and(|p| p.cidrs.iter().any(|cidr| cidr.addr().is_ipv4() == ipv4));
    let gets = match leased {
        (None, None) => [of_pool(true), of_pool(false)],
        (v4, v6) => [v4.is_some(), v6.is_some()],
    };
    let somebody = [Ipv4Addr::UNSPECIFIED.into(), IpAddr::from(Ipv6Addr::UNSPECIFIED)];
    let families: Vec<_> = somebody.into_iter().zip(gets).filter_map(|(ip, gets)| gets.then_some(ip)).collect();
    let mut mappings = Vec::new();
    for port in &spec.ports {
        let before = mappings.len();
        mappings.extend(families.iter().filter_map(|ip| PortMapping::of(port, *ip)));
        if mappings.len() == before {
            let family = if port.host_ip.is_some_and(|ip| ip.is_ipv6()) { "IPv6" } else { "IPv4" };
            return Err(CreateCause::PortFamily(*port, family, name.clone()));
        }
    }
    kernel.observe_ports(&spec.attachment.container_id, &mappings).await.map_err(CreateCause::Ports)
}

type AddressPair = (Option<std::net::Ipv4Addr>, Option<std::net::Ipv6Addr>);

fn requested_addresses(ipam: &Ipam, spec: &CreateSpec) -> Result<(IpOwner, AddressPair), CreateCause> {
    // Also reserved during a relaunch of the health endpoint.
    let fits = |owner: &LeaseOwner| !health::holds(owner) || health::is_reserved(&spec.attachment);
    let lent = |owner: &LeaseOwner| matches!(owner, LeaseOwner::Caller { .. }) && owner.kept().is_none();
    let by_caller = |ip: &IpAddr| ipam.get(*ip).is_some_and(|l| lent(&l.owner) && fits(&l.owner));
    let leased = spec.ips.iter().filter(|ip| by_caller(ip)).count();
    if leased == 0 {
        return Ok((IpOwner::Endpoint, (None, None)));
    }
    if leased < spec.ips.len() {
        return Err(CreateCause::MixedOwners);
    }
    Ok((IpOwner::Caller, pair(&spec.ips)))
}

fn pair(ips: &[IpAddr]) -> AddressPair {
    let v4 = ips.iter().find_map(|ip| if let IpAddr::V4(a) = ip { Some(*a) } else { None });
    let v6 = ips.iter().find_map(|ip| if let IpAddr::V6(a) = ip { Some(*a) } else { None });
    (v4, v6)
}

/// Only the endpoint's gateway answers on its link.
fn routes_fit(routes: &Option<Vec<ContainerRoute>>, record: &EndpointRecord) -> Result<(), CreateCause> {
    for route in routes.iter().flatten() {
        if let (Some(asked), Some(gateway)) = (route.gw, record.gateway_of(route.dst.addr()))
            && asked != gateway
        {
            return Err(CreateCause::RouteGateway { route: route.dst, asked, gateway });
        }
    }
    routes_have_gateways(record)
}

pub(super) fn routes_have_gateways(record: &EndpointRecord) -> Result<(), CreateCause> {
    match record.routes.iter().flatten().find(|to| record.gateway_of(to.addr()).is_none()) {
        Some(route) => Err(CreateCause::RouteFamily { route: *route }),
        None => Ok(()),
    }
}

fn taken_by(jobs: &Jobs, there: &Handle) -> CreateCause {
    let (id, state, committed) = there.shared.read(|v| (v.record.id, v.fsm.state, v.committed));
    if state == State::Disconnecting && jobs.is_in_flight(there.id) {
        CreateCause::InterfaceBusy { id, doing: "deleted" }
    } else if !committed {
        CreateCause::InterfaceBusy { id, doing: "created, or taken back" }
    } else {
        CreateCause::InterfaceTaken { id, state }
    }
}
