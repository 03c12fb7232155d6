//! Restore at a start, while pinned programs keep traffic flowing.
//!
//! Order: claim leases, insert all endpoints, undo interrupted creates, delete endpoints that are dead or in deletion,
//! queue rebuilds, remove unexplained kernel objects.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{Arc, Mutex},
};

use anyhow::Context as _;
use wharf_api::LogStatus;
use wharf_core::{
    endpoint::{EndpointRecord, IpOwner, LinkOwner, host_ifname, parse_host_ifname},
    ids::{Attachment, EndpointId, Epoch},
    ipam::Ipam,
    kernel::{KernelDump, LinkRef},
    plan::DeleteOptions,
    state::{Event, Fsm},
    store::{Change, Intent, OutOfService, RestoreFailure, Snapshot},
};

use wharf_kit::{clock, sync::lock};
use wharf_names::mark::Mark;

use crate::{
    audit, cluster,
    config::AgentConfig,
    endpoint::{delete, identity, orphan, out_of_service, task::EndpointTask},
    node::{
        endpoint::{Command, Handle, View},
        health,
        lifecycle::Lifecycle,
        registry::Registry,
        timeline,
    },
    policy::Unrecorded,
};

const DELETE_FIRST: &str = "start with the pools of before, or delete the endpoint first";

/// Pools that would cut off living endpoints, which keep their gateway.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("start with these pools: {why}; {remedy}")]
pub struct Unfit {
    /// Endpoint, address and cause.
    pub why: String,
    remedy: &'static str,
}

/// Pools that fit the start's endpoints. With `--pools-from-cluster`, the pools last in use replace unfit ones, and the
/// node keeps its endpoints' gateways.
///
/// # Errors
/// [`Unfit`] without such pools; the pools conflict.
pub fn with_fitting_pools(
    snapshot: &Snapshot,
    dump: &KernelDump,
    config: AgentConfig,
    ipam: Ipam,
) -> anyhow::Result<(AgentConfig, Ipam)> {
    let (mut config, mut ipam) = with_ipv6_of(snapshot, config, ipam)?;
    loop {
        if config.pools_from_cluster.is_some() {
            keep_gateways(snapshot, &mut ipam);
        }
        let Err(unfit) = fits(snapshot, dump, &ipam) else {
            if let Some(masquerade) = &mut config.masquerade {
                // Packets of these containers are masqueraded, and packets from outside with their addresses dropped.
                let pools = ipam.cidrs();
                let own = snapshot.endpoints.iter().filter(|r| r.ip_owner != IpOwner::External);
                let outside = |ip: &IpAddr| !pools.iter().any(|pool| pool.contains(ip));
                let lives = |r: &&EndpointRecord| dump.links.iter().any(|l| l.ifindex == r.host_ifindex);
                let moved = own.filter(|r| r.addresses().any(|ip| outside(&ip))).filter(lives);
                masquerade.former = moved.flat_map(EndpointRecord::addresses).filter(outside).collect();
            }
            return Ok((config, ipam));
        };
        // Overlaps of the earlier pools with the node's networks are acceptable: their addresses are withheld.
        if !cluster::pools::fall_back(&mut config, &unfit.why) {
            return Err(unfit.into());
        }
        ipam = config.ipam().context("use the pools that were last in use")?;
    }
}

/// Refuses settings that would cut off living endpoints, with the remedy.
pub fn fits(snapshot: &Snapshot, dump: &KernelDump, ipam: &Ipam) -> Result<(), Unfit> {
    let pools = ipam.cidrs();
    // In a pool of an earlier agent of this boot; others are another IPAM's.
    let served = |ip: &IpAddr| dump.routes.iter().any(|r| r.ifindex.is_none() && r.destination.contains(ip));
    let outside = |ip: &IpAddr| !pools.iter().any(|pool| pool.contains(ip)) && served(ip);
    for orphan in orphan::unrecorded(dump, snapshot) {
        if let Some((ip, _)) = orphan.rows.iter().find(|(ip, _)| outside(ip)) {
            let why = format!(
                "endpoint {} (link {}), whose record is lost, has the address {ip}, which no pool has",
                orphan.link.id, orphan.link.host_ifname,
            );
            return Err(Unfit { why, remedy: "start with the pools of before, or delete its container first" });
        }
    }
    for record in snapshot.endpoints.iter().filter(|r| r.ip_owner == IpOwner::External) {
        let pool = |ip: &IpAddr| pools.iter().find(|pool| pool.contains(ip));
        if let Some((ip, pool)) = record.addresses().find_map(|ip| Some((ip, pool(&ip)?))) {
            let why = format!(
                "endpoint {} ({}) has the address {ip} of IPAM plugin {}, which lies in {pool} and would be given out \
                 again",
                record.id,
                record.attachment,
                record.ipam.as_deref().unwrap_or("(unknown)"),
            );
            return Err(Unfit { why, remedy: DELETE_FIRST });
        }
    }
    // The health endpoint gets another address.
    let containers = || snapshot.endpoints.iter().filter(|r| !health::is_reserved(&r.attachment));
    let with_router = |r: &EndpointRecord| Some((r.id, r.addresses().find(|ip| ipam.is_router(*ip))?));
    if let Some((id, ip)) = containers().find_map(with_router) {
        let why = format!("endpoint {id} has the address {ip}, which is a router address with these pools");
        return Err(Unfit { why, remedy: DELETE_FIRST });
    }
    let stranger = containers().find(|r| own_gateways(r).any(|gateway| !ipam.is_router(gateway)));
    let Some(record) = stranger else { return Ok(()) };
    let (router4, router6) = (ipam.router4(), ipam.router6());
    let show = |v4: Option<Ipv4Addr>, v6: Option<Ipv6Addr>| {
        let all: Vec<String> = v4.map(|a| a.to_string()).into_iter().chain(v6.map(|a| a.to_string())).collect();
        all.join(", ")
    };
    let why = format!(
        "endpoint {} ({}) has the gateway {}, the default pool now makes it {}",
        record.id,
        record.attachment,
        show(record.gateway4, record.gateway6),
        show(router4, router6)
    );
    let remedy = "start with the pools of before, delete the endpoints that are there, and change the pools then";
    Err(Unfit { why, remedy })
}

/// Gateways that are the node's addresses; another IPAM's are not.
fn own_gateways(record: &EndpointRecord) -> impl Iterator<Item = IpAddr> + use<> {
    let (v4, v6) = if record.ip_owner == IpOwner::External { (None, None) } else { (record.gateway4, record.gateway6) };
    v4.map(IpAddr::V4).into_iter().chain(v6.map(IpAddr::V6))
}

/// With `--pools-from-cluster`, keeps the gateways of the node's endpoints.
pub fn keep_gateways(snapshot: &Snapshot, ipam: &mut Ipam) {
    let kept = snapshot.endpoints.iter().filter(|record| !health::is_reserved(&record.attachment));
    for gateway in kept.flat_map(own_gateways) {
        if !ipam.is_router(gateway) {
            tracing::info!(%gateway, "endpoints have a gateway of former pools; the node keeps its address");
            ipam.keep_router(gateway);
        }
    }
}

/// With IPv6 off, keeps the default pool's IPv6 CIDR for restored endpoints.
pub fn with_ipv6_of(snapshot: &Snapshot, mut config: AgentConfig, ipam: Ipam) -> anyhow::Result<(AgentConfig, Ipam)> {
    let Some(why) = config.ipv6_off else { return Ok((config, ipam)) };
    let Some(record) = snapshot.endpoints.iter().find(|r| r.ipv6.is_some() && r.ip_owner != IpOwner::External) else {
        tracing::warn!("IPv6 is off on this node ({why}): containers get IPv4 addresses alone until the next start");
        return Ok((config, ipam));
    };
    tracing::warn!(
        endpoint = record.id.get(),
        "IPv6 is off on this node ({why}), but there are endpoints with IPv6 addresses: the IPv6 pool stays, and new \
         endpoints fail until IPv6 is on or they are deleted and the agent is restarted"
    );
    config.keep_ipv6();
    let ipam = config.ipam().context("keep the IPv6 pool")?;
    Ok((config, ipam))
}

/// Restores the store's endpoints. Failures are counted, logged and left to the audit: one endpoint must not stop the
/// agent. With `lost`, kernel objects stay (see [`orphan`]).
pub async fn restore(life: &Arc<Lifecycle>, snapshot: Snapshot, lost: bool) -> anyhow::Result<()> {
    let dump = life.kernel.dump().await?;
    life.store.skip_epochs(last_epoch(&dump));
    wharf_crash::point("restore/after-dump");
    let of_plugins = snapshot.endpoints.iter().filter(|r| !r.link_owner.is_wharf());
    let of_plugins: Vec<LinkRef> = of_plugins.map(LinkRef::of).collect();
    let gone = match of_plugins.is_empty() {
        true => Vec::new(),
        false => life.kernel.observe_missing(&of_plugins).await?,
    };
    let links: HashMap<&str, u32> = dump.links.iter().map(|l| (l.name.as_str(), l.ifindex.0)).collect();
    let mut changes = Vec::new();
    timeline::load(&life.endpoints.timelines, &life.store, &snapshot).await;
    orphan::recognise(&life.endpoints.registry, &life.endpoints.leftovers.orphans, &dump, &snapshot.leases);
    let unrecorded: Vec<Unrecorded> = orphan::unrecorded(&dump, &snapshot)
        .map(|o| Unrecorded {
            id: o.link.id,
            epoch: o.link.epoch,
            addresses: o.rows.iter().map(|(ip, _)| *ip).collect(),
        })
        .collect();
    let unclaimed = claim_addresses(&mut lock(&life.network.addresses.ipam), &snapshot, &links, &mut changes);
    let out_of_service = unreadable(&life.endpoints.registry, &snapshot, &dump, &mut changes);
    out_of_service::hold(&life.endpoints, &life.network.addresses, snapshot.out_of_service.clone());

    let interrupted: HashMap<(EndpointId, Epoch), bool> = snapshot
        .intents
        .iter()
        .filter_map(|(id, epoch, intent)| match intent {
            Intent::Delete { no_ip_release } => Some(((*id, *epoch), *no_ip_release)),
            Intent::Create { .. } => None,
        })
        .collect();
    let (mut living, mut dead) = (Vec::new(), Vec::new());
    for record in snapshot.endpoints.iter().cloned() {
        let alive = match record.link_owner {
            LinkOwner::Wharf => {
                links.get(record.host_ifname.as_str()) == Some(&record.host_ifindex.0) || is_renamed(&dump, &record)
            }
            LinkOwner::Plugin { .. } => !gone.contains(&record.id),
        };
        // The health endpoint's process ended with the previous agent, even if the namespace exists.
        let alive = alive && !health::is_reserved(&record.attachment);
        let delete_asked = interrupted.get(&(record.id, record.epoch)).copied();
        let leases_lost = record.addresses().any(|ip| unclaimed.contains(&ip));
        let Some((task, handle, renumbered)) = insert(life, record).await else { continue };
        if renumbered {
            changes.push(Change::PutEndpoint(Box::new(handle.shared.read(|v| v.record.clone()))));
        }
        match (alive, delete_asked) {
            (true, None) => living.push(task),
            (alive, asked) => {
                let why = if alive { "its delete was interrupted" } else { "its link is gone" };
                task.shared.log(LogStatus::Warning, "restore", why);
                dead.push((task, handle, DeleteOptions { no_ip_release: asked.unwrap_or(false) || leases_lost }));
            }
        }
    }
    tracing::info!(living = living.len(), dead = dead.len(), intents = snapshot.intents.len(), "restoring");

    let failed_before: HashMap<EndpointId, u32> = snapshot.failures.iter().map(|(id, f)| (*id, f.times)).collect();
    for task in &living {
        if failed_before.contains_key(&task.handle().id) {
            changes.push(Change::RemoveRestoreFailure(task.handle().id));
        }
    }
    changes.extend(dead.iter().map(|(_, handle, _)| failure(handle.id, &failed_before, "the agent ended over it")));
    if let Err(error) = life.store.commit(changes).await {
        tracing::warn!("restore: {error}; what it tells is in force all the same");
    }
    out_of_service::hold(&life.endpoints, &life.network.addresses, out_of_service);
    if !lost {
        life.endpoints.registry.set_restored();
    }
    wharf_crash::point("restore/after-claims");
    for (id, epoch, intent) in snapshot.intents {
        if let Intent::Create { attachment, link, .. } = intent {
            undo_create(life, id, epoch, &attachment, link.map(|link| *link)).await;
        }
    }
    wharf_crash::point("restore/after-undo");
    clean_up(life, dead, &failed_before).await;
    wharf_crash::point("restore/after-clean-up");
    // All endpoints before any rebuild, which would remove rows of missing ones.
    let records = life.endpoints.registry.list();
    let records = records.iter().map(|handle| handle.shared.read(|v| v.record.clone()));
    life.policy.begin(records, unrecorded).await;
    let rebuilt: Vec<EndpointId> = living.iter().map(|t| t.handle().id).collect();
    for mut task in living {
        task.keep_programs = true;
        task.transition(Event::RestoreStarted);
        life.tasks.endpoints.spawn(task.run());
    }
    if lost {
        orphan::close(life, &dump).await;
    }
    if lost && !dump.links.is_empty() {
        orphan::keep(life, &dump).await;
    } else {
        remove_unexplained(life, &rebuilt).await;
        if lost && let Err(error) = life.store.commit(vec![Change::LossHandled]).await {
            tracing::warn!("restore: note that no endpoint is without a record: {error}; the next start looks again");
        }
    }
    life.endpoints.registry.set_restored();
    wharf_crash::point("restore/after-unexplained");
    Ok(())
}

fn is_renamed(dump: &KernelDump, record: &EndpointRecord) -> bool {
    dump.links.iter().filter(|l| l.ifindex == record.host_ifindex).any(|link| {
        let mark = link.alias.as_deref().and_then(Mark::parse);
        mark.is_some_and(|m| m.id == record.id.get() && m.epoch == record.epoch.0)
    })
}

/// Returns failed addresses, which this node must not release.
fn claim_addresses(
    ipam: &mut Ipam,
    snapshot: &Snapshot,
    links: &HashMap<&str, u32>,
    changes: &mut Vec<Change>,
) -> Vec<IpAddr> {
    let mut unclaimed = Vec::new();
    for lease in &snapshot.leases {
        if lease.owner.link_without_record().is_some_and(|link| !links.contains_key(link)) {
            changes.push(Change::RemoveLease(lease.ip));
        } else if let Err(error) = ipam.claim(lease.clone()) {
            if ipam.keep_outside(lease.clone()) {
                tracing::warn!(ip = %lease.ip, "no pool has this leased address today; its owner keeps it");
                continue;
            }
            tracing::warn!(ip = %lease.ip, "restore lease: {error}");
            unclaimed.push(lease.ip);
        }
    }
    for rest in &snapshot.resting {
        if let Err(error) = ipam.claim_rest(rest.clone()) {
            tracing::debug!(ip = %rest.ip, "forget a rest: {error}");
            changes.push(Change::RemoveRest(rest.ip));
        }
    }
    unclaimed
}

/// In memory at once, in the store at the last allowed failure.
fn unreadable(
    registry: &Registry,
    snapshot: &Snapshot,
    dump: &KernelDump,
    changes: &mut Vec<Change>,
) -> Vec<OutOfService> {
    let failed_before: HashMap<EndpointId, u32> = snapshot.failures.iter().map(|(id, f)| (*id, f.times)).collect();
    let mut out_of_service = Vec::new();
    for (key, text, why) in &snapshot.unreadable {
        let Ok(id) = EndpointId::try_from(*key) else {
            tracing::error!("restore: the record filed under {key} has no valid id: {why}");
            continue;
        };
        registry.claim_id(id);
        tracing::error!(endpoint = id.get(), "restore: {why}");
        let rows = dump.endpoint_rows.iter().filter(|r| r.endpoint_id == u32::from(id.get()));
        let taken = OutOfService {
            id,
            record: text.clone(),
            addresses: rows.map(|r| r.address).collect(),
            why: why.clone(),
            since_unix_ms: clock::unix_ms(),
        };
        if failed_before.get(&id).map_or(1, |times| times + 1) < out_of_service::PATIENCE {
            changes.push(failure(id, &failed_before, why));
        } else {
            changes.push(Change::TakeOutOfService(Box::new(taken.clone())));
        }
        out_of_service.push(taken);
    }
    out_of_service
}

fn failure(id: EndpointId, before: &HashMap<EndpointId, u32>, why: &str) -> Change {
    let times = before.get(&id).map_or(1, |times| times.saturating_add(1));
    Change::PutRestoreFailure(id, RestoreFailure { times, why: why.to_owned() })
}

/// After consecutive failed starts, an endpoint goes out of service.
async fn clean_up(
    life: &Arc<Lifecycle>,
    dead: Vec<(EndpointTask, Handle, DeleteOptions)>,
    failed_before: &HashMap<EndpointId, u32>,
) {
    let mut to_delete = Vec::new();
    for (task, handle, options) in dead {
        life.tasks.endpoints.spawn(task.run());
        to_delete.push((handle, options));
    }
    let mut failed: HashMap<String, String> = HashMap::new();
    for options in [DeleteOptions { no_ip_release: false }, DeleteOptions { no_ip_release: true }] {
        let handles: Vec<Handle> = to_delete.iter().filter(|(_, o)| *o == options).map(|(h, _)| h.clone()).collect();
        for error in delete::delete(life, handles, options, delete::Answer::Finished).await.errors {
            tracing::warn!(endpoint = error.endpoint, step = error.step, "restore: delete: {}", error.message);
            failed.insert(error.endpoint, format!("{}: {}", error.step, error.message));
        }
    }
    let mut changes = Vec::new();
    for (handle, _) in to_delete {
        let record = handle.shared.read(|v| v.record.clone());
        let still_there = life.endpoints.registry.get(handle.id).is_some_and(|there| there.epoch == handle.epoch);
        if !still_there {
            changes.push(Change::RemoveRestoreFailure(handle.id));
            continue;
        }
        let why = failed.get(&record.attachment.to_string()).cloned().unwrap_or_else(|| "it did not end".into());
        if failed_before.get(&handle.id).map_or(1, |times| times + 1) < out_of_service::PATIENCE {
            changes.push(failure(handle.id, failed_before, &why));
            continue;
        }
        let record_text = match serde_json::to_string(&record) {
            Ok(text) => text,
            Err(error) => {
                tracing::error!(endpoint = handle.id.get(), "restore: write its record down: {error}");
                continue;
            }
        };
        let taken = OutOfService {
            id: handle.id,
            record: record_text,
            addresses: record.addresses().collect(),
            why: format!("its delete failed at {} starts; last: {why}", out_of_service::PATIENCE),
            since_unix_ms: clock::unix_ms(),
        };
        changes.push(Change::RemoveIntent(handle.id, handle.epoch));
        changes.push(Change::TakeOutOfService(Box::new(taken.clone())));
        life.endpoints.registry.remove(handle.id);
        if handle.mailbox.try_send(Command::Retire).is_err() {
            tracing::warn!(
                endpoint = handle.id.get(),
                "restore: the task of a record out of service runs on to the agent's end"
            );
        }
        out_of_service::hold(&life.endpoints, &life.network.addresses, vec![taken]);
    }
    if let Err(error) = life.store.commit(changes).await {
        tracing::warn!("restore: {error}; failures are counted anew at the next start");
    }
}

/// A store that was not lost has a higher one.
fn last_epoch(dump: &KernelDump) -> Epoch {
    // A higher value is foreign, and would use up the epochs.
    const BEYOND: u64 = 1 << 48;
    let links = dump.links.iter().filter_map(|l| parse_host_ifname(&l.name)).map(|(_, low)| u64::from(low));
    Epoch(links.chain(dump.endpoint_rows.iter().map(|r| r.epoch.0)).filter(|e| *e < BEYOND).max().unwrap_or(0))
}

/// The flag: its identity is new. `None`: conflicting records.
async fn insert(life: &Arc<Lifecycle>, mut record: EndpointRecord) -> Option<(EndpointTask, Handle, bool)> {
    let (id, epoch) = (record.id, record.epoch);
    if !life.endpoints.registry.claim_id(id) {
        tracing::error!(
            endpoint = id.get(),
            epoch = epoch.0,
            "restore: two records have this id; the later one is left out"
        );
        return None;
    }
    let identity = identity::restored(&*life.endpoints.identities, &record).await;
    let renumbered = std::mem::replace(&mut record.identity, identity) != identity;
    let mut view = View::new(record, Fsm::new_restored(clock::monotonic_ms()), true);
    view.status.since_unix_ms = clock::unix_ms();
    let (handle, mailbox) = Handle::new(view);
    if let Some(before) = life.endpoints.timelines.take(id, epoch) {
        handle.shared.adopt(before);
    }
    if life.endpoints.registry.insert(handle.clone()).is_err() {
        tracing::error!(
            endpoint = id.get(),
            epoch = epoch.0,
            "restore: two records have this attachment; the later one is left out"
        );
        return None;
    }
    Some((EndpointTask::new(Arc::clone(life), &handle, mailbox, false), handle, renumbered))
}

/// By epoch: the id may be reused.
async fn undo_create(
    life: &Arc<Lifecycle>,
    id: EndpointId,
    epoch: Epoch,
    attachment: &Attachment,
    link: Option<LinkRef>,
) {
    let removed = match link {
        Some(link) => life.kernel.remove_from_plugin_link(&link).await,
        None => {
            let (host_ifname, owner) = (host_ifname(id, epoch), LinkOwner::Wharf);
            let link = LinkRef { id, epoch, host_ifname, host_ifindex: None, container: None, owner };
            life.kernel.remove_link(&link).await
        }
    };
    if let Err(error) = removed {
        tracing::warn!(endpoint = id.get(), epoch = epoch.0, "restore: undo a create: {error}; its intent stays open");
        return;
    }
    let ended = timeline::interrupted(id, epoch, attachment);
    let changes = vec![Change::RemoveIntent(id, epoch), Change::PutLife(Box::new(ended.clone()))];
    match life.store.commit(changes).await {
        Ok(()) => {
            life.endpoints.timelines.ended(&ended);
            tracing::info!(endpoint = id.get(), epoch = epoch.0, "restore: undid an interrupted create");
        }
        Err(error) => tracing::warn!(endpoint = id.get(), epoch = epoch.0, "restore: close intent: {error}"),
    }
}

/// Prepared program sets, and rows of interrupted creates.
async fn remove_unexplained(life: &Arc<Lifecycle>, rebuilding: &[EndpointId]) {
    let mut guards: Vec<_> = rebuilding.iter().map(|id| life.endpoints.jobs.working_on(*id)).collect();
    let kept = life.endpoints.leftovers.orphans.ids().into_iter().chain(life.endpoints.leftovers.out_of_service.ids());
    guards.extend(kept.map(|id| life.endpoints.jobs.working_on(id)));
    match audit::audit(life, &Mutex::default(), true).await {
        Ok(report) => {
            for f in report.findings.into_iter().filter(|f| f.repair.as_deref() != Some("mended")) {
                let repair = f.repair.unwrap_or_else(|| "left alone".into());
                tracing::info!(object = f.object, subject = f.subject, "restore: {}: {repair}", f.problem);
            }
        }
        Err(error) => tracing::warn!("restore: audit: {error}"),
    }
    drop(guards);
}
