//! Orphans: endpoints whose records were lost.
//!
//! Their containers run under policy, so they stay: ids reserved, addresses leased under the link's name. The runtime's
//! DEL finds the attachment in the link's mark and removes the orphan; so does `wharf audit --repair`.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use wharf_core::{
    endpoint::{LinkOwner, parse_host_ifname},
    ids::{Attachment, ContainerId, EndpointId, Epoch, IfName, NetworkName},
    kernel::{KernelDump, LinkRef, LinkRow},
    store::{Change, Lease, LeaseOwner, Snapshot},
};
use wharf_kit::{clock, sync::lock};
use wharf_names::mark::Mark;

use crate::{
    addresses::{Addresses, resting},
    config::AgentConfig,
    endpoint::{
        error::RemoveError,
        remove::{self, Subject},
    },
    node::{aside::Aside, leftovers::Orphan, lifecycle::Lifecycle, registry::Registry},
};

/// Closes other plugins' links without a record: their policy is unknown.
pub async fn close(life: &Arc<Lifecycle>, dump: &KernelDump) {
    let links = match life.kernel.observe_plugin_links().await {
        Ok(links) => links,
        Err(error) => {
            tracing::error!(
                "look for chained containers without a record: {error}; they keep the programs that they have"
            );
            return;
        }
    };
    let registry = &life.endpoints.registry;
    for link in links.into_iter().filter(|link| registry.get(link.id).is_none_or(|there| there.epoch != link.epoch)) {
        let (number, host) = (link.id.get(), link.host_ifname.clone());
        let rows = dump.endpoint_rows.iter().filter(|row| Some(row.ifindex) == link.host_ifindex);
        let rows = rows.map(|row| (row.address, row.epoch)).collect();
        let is_reused = registry.get(link.id).is_some()
            || dump.links.iter().filter_map(|l| parse_host_ifname(&l.name)).any(|(id, _)| id == link.id);
        let removed = match is_reused {
            true => life.kernel.remove_attached(&link).await.map_err(RemoveError::from),
            false => remove::all(life, &Subject::Remnant { id: link.id, links: vec![link], rows }).await,
        };
        match removed {
            Ok(()) => tracing::warn!(
                endpoint = number,
                "the record of the container behind link {host} of another plugin was lost: it is closed until it is recreated"
            ),
            Err(error) => tracing::error!(endpoint = number, "close link {host} of another plugin: {error}"),
        }
    }
}

/// Keeps every orphan; removes unused program sets.
pub async fn keep(life: &Arc<Lifecycle>, dump: &KernelDump) {
    let mut living = BTreeSet::new();
    let mut held = Vec::new();
    for link in &dump.links {
        let Some(mut orphan) = orphan(dump, link) else { continue };
        let id = orphan.link.id;
        living.insert(id);
        // An earlier start did not commit `LossHandled`.
        if life.endpoints.registry.get(id).is_some() || life.endpoints.leftovers.orphans.get(id).is_some() {
            continue;
        }
        life.endpoints.registry.claim_id(id);
        for (ip, _) in &orphan.rows {
            let change = hold(&life.network.addresses, &life.config, *ip, &link.name);
            orphan.held.extend(change.is_some().then_some(*ip));
            held.extend(change);
        }
        set_aside(&life.endpoints.leftovers.orphans, orphan);
    }
    tracing::warn!(
        links = living.len(),
        "the records of this boot were lost; containers keep their network, and `wharf audit` shows them"
    );
    held.push(Change::LossHandled);
    if let Err(error) = life.store.commit(held).await {
        tracing::warn!("hold the addresses of lost endpoints: {error}; the next start tries again");
    }
    for (directory, _) in &dump.pins {
        let Ok(id) = directory.parse::<EndpointId>() else { continue };
        if !living.contains(&id)
            && life.endpoints.registry.get(id).is_none()
            && let Err(error) = life.kernel.remove_programs(id).await
        {
            tracing::warn!(endpoint = id.get(), "remove programs that nothing uses: {error}");
        }
    }
}

/// Finds an earlier start's orphans by their leases.
pub fn recognise(registry: &Registry, orphans: &Aside<Orphan>, dump: &KernelDump, leases: &[Lease]) {
    let mut held: BTreeMap<&str, Vec<IpAddr>> = BTreeMap::new();
    for lease in leases {
        if let Some(link) = lease.owner.link_without_record() {
            held.entry(link).or_default().push(lease.ip);
        }
    }
    for link in &dump.links {
        let Some(addresses) = held.remove(link.name.as_str()) else { continue };
        let Some(orphan) = orphan(dump, link) else { continue };
        registry.claim_id(orphan.link.id);
        set_aside(orphans, Orphan { held: addresses, ..orphan });
    }
}

fn set_aside(orphans: &Aside<Orphan>, orphan: Orphan) {
    orphans.put(orphan.link.id, orphan.attachment.clone(), orphan);
}

fn orphan(dump: &KernelDump, link: &LinkRow) -> Option<Orphan> {
    let (id, low) = parse_host_ifname(&link.name)?;
    let host_ifname = IfName::parse(&link.name).ok()?;
    // The name does not prove Wharf's link. Earlier versions wrote marks without an owner.
    let alias = link.alias.as_deref().filter(|alias| alias.starts_with(&format!("wharf:{id}:")))?;
    // A foreign alias: id and epoch must match the link's name.
    let mark = Mark::parse(alias);
    let mark = mark.filter(|m| m.id == id.get() && m.epoch & 0xffff_ffff == u64::from(low));
    let epoch = Epoch(mark.as_ref().map_or(u64::from(low), |m| m.epoch));
    let attachment = mark.as_ref().and_then(Mark::attachment).and_then(|(network, container_id, ifname)| {
        Some(Attachment {
            network: NetworkName::parse(network).ok()?,
            container_id: ContainerId::parse(container_id).ok()?,
            ifname: IfName::parse(ifname).ok()?,
        })
    });
    let rows = dump.endpoint_rows.iter().filter(|r| r.ifindex == link.ifindex).map(|r| (r.address, r.epoch)).collect();
    let link =
        LinkRef { id, epoch, host_ifname, host_ifindex: Some(link.ifindex), container: None, owner: LinkOwner::Wharf };
    Some(Orphan { link, attachment, rows, held: Vec::new() })
}

/// Kernel endpoints without record or intent.
pub fn unrecorded<'a>(dump: &'a KernelDump, snapshot: &'a Snapshot) -> impl Iterator<Item = Orphan> + 'a {
    let recorded = snapshot.endpoints.iter().map(|r| (r.id, r.epoch));
    let known: BTreeSet<_> = recorded.chain(snapshot.intents.iter().map(|(id, epoch, _)| (*id, *epoch))).collect();
    let orphans = dump.links.iter().filter_map(|link| orphan(dump, link));
    orphans.filter(move |o| !known.contains(&(o.link.id, o.link.epoch)))
}

/// Removes an orphan; returns the released addresses.
///
/// # Errors
/// What stays; the next delete retries.
pub async fn remove(life: &Arc<Lifecycle>, id: EndpointId) -> Result<Vec<IpAddr>, RemoveError> {
    let _alone = life.endpoints.leftovers.removals.acquire(id).await;
    let Some(orphan) = life.endpoints.leftovers.orphans.get(id) else { return Ok(Vec::new()) };
    let _guard = life.endpoints.jobs.working_on(id);
    let owner = LeaseOwner::lost_record(orphan.link.host_ifname.as_str());
    let held = orphan.held.clone();
    remove::all(life, &Subject::Remnant { id, links: vec![orphan.link], rows: orphan.rows }).await?;
    let leases: Vec<Lease> = {
        let ipam = lock(&life.network.addresses.ipam);
        let ours = |l: &&Lease| l.owner == owner;
        held.iter().filter_map(|ip| ipam.get(*ip).filter(ours).cloned()).collect()
    };
    resting::release(&life.network.addresses, &leases, Vec::new()).await?;
    life.endpoints.leftovers.orphans.remove(id);
    life.endpoints.registry.free_id(id);
    Ok(leases.iter().map(|l| l.ip).collect())
}

/// Removes orphans without a link, which no delete will; continues after a failure and returns the first.
pub async fn forget_gone(life: &Arc<Lifecycle>) -> Result<(), RemoveError> {
    if life.endpoints.leftovers.orphans.list().is_empty() {
        return Ok(());
    }
    let dump = life.kernel.dump().await?;
    let living: BTreeSet<u32> = dump.links.iter().map(|l| l.ifindex.0).collect();
    let is_gone = |o: &&Orphan| o.link.host_ifindex.is_some_and(|index| !living.contains(&index.0));
    let gone: Vec<EndpointId> =
        life.endpoints.leftovers.orphans.list().iter().filter(is_gone).map(|o| o.link.id).collect();
    let mut result = Ok(());
    for id in gone {
        if life.tasks.stop.is_cancelled() {
            break;
        }
        result = result.and(remove(life, id).await.map(drop));
    }
    result
}

/// Leases in memory; returns the store's change.
fn hold(addresses: &Addresses, config: &AgentConfig, ip: IpAddr, link: &str) -> Option<Change> {
    let pool = config.pools.iter().find(|p| p.cidrs.iter().any(|c| c.contains(&ip)));
    let pool = pool.map_or(&config.default_pool, |pool| &pool.name).clone();
    let owner = LeaseOwner::lost_record(link);
    let lease = Lease { ip, pool, owner, since_unix_ms: clock::unix_ms() };
    let mut ipam = lock(&addresses.ipam);
    match ipam.claim(lease.clone()) {
        Ok(()) => Some(Change::PutLease(lease)),
        Err(_) if ipam.keep_outside(lease.clone()) => Some(Change::PutLease(lease)),
        Err(error) => {
            tracing::warn!(%ip, link, "hold the address of a lost endpoint: {error}");
            None
        }
    }
}
