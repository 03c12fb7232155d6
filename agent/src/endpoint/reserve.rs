//! What a create does before its first step: checks without side effects, then the reservations that keep others from
//! its name, its id and its addresses.

use std::{net::IpAddr, path::PathBuf, sync::Arc};

use tokio::{sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;
use wharf_api::{EndpointStatus, LogStatus};
use wharf_core::{
    endpoint::{EndpointRecord, IpOwner, host_ifname},
    identity::Label,
    ids::{Attachment, IfIndex, MacAddr, PoolName},
    kernel::Kernel,
    plan::DeleteOptions,
    state::{Fsm, State},
    store::LeaseOwner,
};

use crate::{
    clock,
    endpoint::{deletions, error::CreateCause, task::EndpointTask},
    node::{
        Node,
        endpoint::{Handle, MAILBOX, Shared, View},
        health,
        prepared::{ProgramSet, random_macs},
        registry::Taken,
    },
    sync::lock,
};

/// What a create asks for, parsed.
#[derive(Debug, Clone)]
pub struct CreateSpec {
    /// CNI key.
    pub attachment: Attachment,
    /// The container's network namespace.
    pub netns: PathBuf,
    /// Pool; the default one when absent.
    pub pool: Option<PoolName>,
    /// MTU, bytes.
    pub mtu: u32,
    /// MAC asked for.
    pub mac: Option<MacAddr>,
    /// Addresses asked for, at most one of each family.
    pub ips: Vec<IpAddr>,
    /// Labels.
    pub labels: std::collections::BTreeSet<Label>,
    /// Pod name.
    pub pod_name: Option<String>,
    /// Pod namespace.
    pub pod_namespace: Option<String>,
    /// When the caller gives up.
    pub deadline: Instant,
}

/// Checks that have no side effect, then the reservations: epoch, id, identity, registry entry.
pub(super) async fn reserve<K: Kernel>(node: &Arc<Node<K>>, spec: &CreateSpec) -> Result<EndpointTask<K>, CreateCause> {
    let a = &spec.attachment;
    deletions::settle(node, a).await?;
    // A delete is answered before the name and the addresses of its endpoint are free.
    let same = |r: &Attachment| (&r.container_id, &r.ifname) == (&a.container_id, &a.ifname);
    node.registry.settled(|r| same(&r.attachment) || r.addresses().any(|ip| spec.ips.contains(&ip))).await;
    if let Some(there) = node.registry.by_interface(&a.container_id, &a.ifname) {
        return Err(taken_by(node, &there));
    }
    let netns = node.kernel.observe_netns(&spec.netns).await.map_err(CreateCause::Netns)?;
    let (ip_owner, requested) = requested_addresses(node, spec)?;
    let epoch = node.store.next_epoch().await?;
    let set = match spec.mac {
        None => node.prepared.take(),
        Some(_) => None,
    };
    let (set, prepared) = match set {
        Some(set) => (set, true),
        None => {
            let taken = match node.registry.take_id() {
                None if node.registry.settled(|_| true).await => node.registry.take_id(),
                taken => taken,
            };
            let id = taken.ok_or(CreateCause::NoId)?;
            let (container_mac, host_mac) = random_macs();
            (ProgramSet { id, container_mac: spec.mac.unwrap_or(container_mac), host_mac }, false)
        }
    };
    let give_back = || if prepared { node.prepared.give_back(set) } else { node.registry.free_id(set.id) };
    let identity = match lock(&node.identities).acquire(&spec.labels) {
        Ok(identity) => identity,
        Err(e) => {
            give_back();
            return Err(e.into());
        }
    };
    let (gateway4, gateway6) = {
        let ipam = lock(&node.addresses.ipam);
        // The families of caller-leased addresses are known here; those of other addresses after the lease step.
        let speaks = |known: bool| known || ip_owner == IpOwner::Endpoint;
        (
            ipam.router4().filter(|_| speaks(requested.0.is_some())),
            ipam.router6().filter(|_| speaks(requested.1.is_some())),
        )
    };
    let record = EndpointRecord {
        id: set.id,
        epoch,
        attachment: a.clone(),
        netns,
        pool: spec.pool.clone().unwrap_or_else(|| node.config.default_pool.clone()),
        ip_owner,
        ipv4: requested.0,
        ipv6: requested.1,
        gateway4,
        gateway6,
        host_ifname: host_ifname(set.id, epoch),
        host_ifindex: IfIndex(0),
        container_ifindex: IfIndex(0),
        container_mac: set.container_mac,
        host_mac: set.host_mac,
        mtu: spec.mtu,
        labels: spec.labels.clone(),
        identity,
        pod_name: spec.pod_name.clone(),
        pod_namespace: spec.pod_namespace.clone(),
        created_unix_ms: clock::unix_ms(),
    };
    let view = View {
        record,
        fsm: Fsm::new_created(clock::monotonic_ms()),
        status: EndpointStatus::default(),
        step_since: Instant::now(),
        trace: false,
        committed: false,
        delete_options: DeleteOptions::default(),
        taken_over: Vec::new(),
    };
    let (sender, mailbox) = mpsc::channel(MAILBOX);
    let handle =
        Handle { id: set.id, epoch, mailbox: sender, shared: Shared::new(view), cancel: CancellationToken::new() };
    if let Err(taken) = node.registry.insert(handle.clone()) {
        give_back();
        lock(&node.identities).release(identity);
        return Err(match taken {
            Taken::Interface(there) => taken_by(node, &there),
            Taken::Address(ip, there) => CreateCause::AddressTaken { id: there.id, ip },
        });
    }
    let task = EndpointTask::new(Arc::clone(node), &handle, mailbox, prepared);
    task.shared.log(LogStatus::Ok, "created", format!("{a}, identity {identity}"));
    Ok(task)
}

/// At most one address of each family.
type AddressPair = (Option<std::net::Ipv4Addr>, Option<std::net::Ipv6Addr>);

/// The owner of the requested addresses, and the addresses themselves when the caller leased them before.
fn requested_addresses<K: Kernel>(node: &Node<K>, spec: &CreateSpec) -> Result<(IpOwner, AddressPair), CreateCause> {
    let ipam = lock(&node.addresses.ipam);
    // Leases of the health endpoint are reserved for it, also while it is relaunched.
    let fits = |owner: &LeaseOwner| !health::holds(owner) || health::is_reserved(&spec.attachment);
    // A lease that an earlier delete kept does not count as the caller's; the lease step may take it over.
    let lent = |owner: &LeaseOwner| matches!(owner, LeaseOwner::Caller { .. }) && owner.kept().is_none();
    let by_caller = |ip: &IpAddr| ipam.get(*ip).is_some_and(|l| lent(&l.owner) && fits(&l.owner));
    let leased = spec.ips.iter().filter(|ip| by_caller(ip)).count();
    if leased == 0 {
        return Ok((IpOwner::Endpoint, (None, None)));
    }
    if leased < spec.ips.len() {
        return Err(CreateCause::MixedOwners);
    }
    let v4 = spec.ips.iter().find_map(|ip| if let IpAddr::V4(a) = ip { Some(*a) } else { None });
    let v6 = spec.ips.iter().find_map(|ip| if let IpAddr::V6(a) = ip { Some(*a) } else { None });
    Ok((IpOwner::Caller, (v4, v6)))
}

/// The error for an interface that has an endpoint.
fn taken_by<K: Kernel>(node: &Node<K>, there: &Handle) -> CreateCause {
    let (id, state, committed) = there.shared.read(|v| (v.record.id, v.fsm.state, v.committed));
    if state == State::Disconnecting && node.jobs.is_in_flight(there.id) {
        CreateCause::InterfaceBusy { id, doing: "deleted" }
    } else if !committed {
        CreateCause::InterfaceBusy { id, doing: "created, or taken back" }
    } else {
        CreateCause::InterfaceTaken { id, state }
    }
}
