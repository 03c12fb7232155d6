//! Records out of service.
//!
//! A record whose restore failed at three starts in a row keeps id, addresses and kernel objects until a delete or
//! `wharf audit --repair`. An unreadable record stays in the store until the third start, for an agent that can read
//! it.

use std::{net::IpAddr, sync::Arc, time::Duration};

use tokio::time::timeout;
use wharf_core::{
    endpoint::{EndpointRecord, LinkOwner, parse_host_ifname},
    ids::{Attachment, EndpointId, Epoch, IfName},
    kernel::{Kernel, KernelError, KernelErrorKind, LinkRef},
    plan::DeleteStep,
    store::{Change, Lease, LeaseOwner, OutOfService},
};
use wharf_kit::sync::lock;

use crate::{
    addresses::{Addresses, resting},
    endpoint::{
        error::RemoveError,
        remove::{self, Subject},
    },
    node::{aside::Aside, endpoints::Endpoints, lifecycle::Lifecycle},
};

/// Failed starts before a record is out of service.
pub const PATIENCE: u32 = 3;

/// The record, if readable.
#[must_use]
pub fn record_of(out_of_service: &OutOfService) -> Option<EndpointRecord> {
    serde_json::from_str::<EndpointRecord>(&out_of_service.record).ok().filter(|r| r.id == out_of_service.id)
}

/// Reserves the records' ids.
pub fn hold(endpoints: &Endpoints, addresses: &Addresses, out_of_service: Vec<OutOfService>) {
    for q in out_of_service {
        endpoints.registry.claim_id(q.id);
        tracing::warn!(endpoint = q.id.get(), "a record is out of service: {}", q.why);
        let attachment = attachment_of(addresses, &q);
        endpoints.leftovers.out_of_service.put(q.id, attachment, q);
    }
}

/// From the record or its leases.
pub fn attachment_of(addresses: &Addresses, out_of_service: &OutOfService) -> Option<Attachment> {
    if let Some(record) = record_of(out_of_service) {
        return Some(record.attachment);
    }
    let ipam = lock(&addresses.ipam);
    out_of_service.addresses.iter().find_map(|ip| match &ipam.get(*ip)?.owner {
        LeaseOwner::Attachment { attachment, .. } => Some(attachment.clone()),
        LeaseOwner::Caller { .. } | LeaseOwner::Node => None,
    })
}

/// Whether a record holds the address.
pub fn holds(out_of_service: &Aside<OutOfService>, ip: IpAddr) -> bool {
    out_of_service.list().iter().any(|q| q.addresses.contains(&ip))
}

/// Removes kernel objects, leases and record; returns the released addresses.
///
/// # Errors
/// What stays, with the record.
pub async fn release(life: &Arc<Lifecycle>, id: EndpointId) -> Result<Vec<IpAddr>, RemoveError> {
    let _alone = life.endpoints.leftovers.removals.acquire(id).await;
    let Some(out_of_service) = life.endpoints.leftovers.out_of_service.get(id) else { return Ok(Vec::new()) };
    let _guard = life.endpoints.jobs.working_on(id);
    let addresses = out_of_service.addresses.clone();
    let subject = match record_of(&out_of_service) {
        Some(record) => Subject::of(&record),
        None => remnant(&*life.kernel, id).await?,
    };
    remove::all(life, &subject).await?;
    let leases: Vec<Lease> = {
        let ipam = lock(&life.network.addresses.ipam);
        let ours = |l: &&Lease| matches!(l.owner, LeaseOwner::Attachment { .. });
        addresses.iter().filter_map(|ip| ipam.get(*ip).filter(ours).cloned()).collect()
    };
    resting::release(&life.network.addresses, &leases, vec![Change::RemoveOutOfService(id)]).await?;
    life.endpoints.leftovers.out_of_service.remove(id);
    life.endpoints.registry.free_id(id);
    Ok(leases.iter().map(|l| l.ip).collect())
}

async fn remnant(kernel: &dyn Kernel, id: EndpointId) -> Result<Subject, RemoveError> {
    let bound = Duration::from_millis(DeleteStep::Detach.deadline_ms());
    let dump = timeout(bound, kernel.dump()).await.map_err(|_| KernelError {
        operation: "dump",
        subject: "kernel state".to_owned(),
        cause: format!("no answer within {bound:?}"),
        kind: KernelErrorKind::Other,
    })??;
    let of_id = |name: &str| parse_host_ifname(name).filter(|(of, _)| *of == id);
    let links = dump.links.iter().filter_map(|l| {
        let (_, low) = of_id(&l.name)?;
        let host_ifname = IfName::parse(&l.name).ok()?;
        Some(LinkRef {
            id,
            epoch: Epoch(u64::from(low)),
            host_ifname,
            host_ifindex: Some(l.ifindex),
            container: None,
            owner: LinkOwner::Wharf,
        })
    });
    let rows = dump.endpoint_rows.iter().filter(|r| r.endpoint_id == u32::from(id.get()));
    Ok(Subject::Remnant { id, links: links.collect(), rows: rows.map(|r| (r.address, r.epoch)).collect() })
}
