//! Records out of service.
//!
//! A record that could not be brought back at three starts in a row is set aside: its id and addresses stay reserved,
//! what the kernel holds for it stays as it is, and it is shown in `wharf status` and `wharf audit`. It goes when its
//! container is deleted, or by `wharf audit --repair`. One that cannot be read is treated so from the first start on; until
//! the third its row stays where it is, for an agent that may be able to read it.

use std::{net::IpAddr, sync::Arc, time::Duration};

use tokio::time::timeout;
use wharf_core::{
    endpoint::{EndpointRecord, parse_host_ifname},
    ids::{Attachment, EndpointId, Epoch, IfName},
    kernel::{Kernel, LinkRef},
    plan::DeleteStep,
    store::{Change, Lease, LeaseOwner, OutOfService},
};

use crate::{
    addresses::resting,
    endpoint::remove::{self, Subject},
    node::{Node, aside::Wanted},
    sync::lock,
};

/// Starts at which a record may fail before it is taken out of service.
pub const PATIENCE: u32 = 3;

/// The record, if it can be read at all.
#[must_use]
pub fn record_of(out_of_service: &OutOfService) -> Option<EndpointRecord> {
    serde_json::from_str::<EndpointRecord>(&out_of_service.record).ok().filter(|r| r.id == out_of_service.id)
}

/// Puts records that the store has out of service into the tables: reserved, and nothing else.
pub fn hold<K: Kernel>(node: &Node<K>, out_of_service: Vec<OutOfService>) {
    for q in out_of_service {
        node.registry.claim_id(q.id);
        tracing::warn!(endpoint = q.id.get(), "a record is out of service: {}", q.why);
        let attachment = attachment_of(node, &q);
        lock(&node.out_of_service).put(q.id, attachment, q);
    }
}

/// Ids of records that are meant.
pub fn find<K: Kernel>(node: &Node<K>, wanted: &Wanted) -> Vec<EndpointId> {
    lock(&node.out_of_service).find(wanted)
}

/// Whose it is: the record says so, or the leases of its addresses where that cannot be read.
pub fn attachment_of<K: Kernel>(node: &Node<K>, out_of_service: &OutOfService) -> Option<Attachment> {
    if let Some(record) = record_of(out_of_service) {
        return Some(record.attachment);
    }
    let ipam = lock(&node.addresses.ipam);
    out_of_service.addresses.iter().find_map(|ip| match &ipam.get(*ip)?.owner {
        LeaseOwner::Attachment { attachment, .. } => Some(attachment.clone()),
        LeaseOwner::Caller { .. } | LeaseOwner::Node => None,
    })
}

/// Whose they are, as far as it can be told.
pub fn attachments<K: Kernel>(node: &Node<K>) -> Vec<Attachment> {
    lock(&node.out_of_service).attachments().cloned().collect()
}

/// Does one of them hold this address?
pub fn holds<K: Kernel>(node: &Node<K>, ip: IpAddr) -> bool {
    lock(&node.out_of_service).iter().any(|q| q.addresses.contains(&ip))
}

/// Removes what the kernel holds for such a record, then its leases and the record itself. Returns the addresses that
/// are free of it.
///
/// # Errors
/// What could not be removed and why; the record stays out of service then.
pub async fn release<K: Kernel>(node: &Arc<Node<K>>, id: EndpointId) -> Result<Vec<IpAddr>, String> {
    let Some(out_of_service) = lock(&node.out_of_service).get(id).cloned() else { return Ok(Vec::new()) };
    let _guard = node.jobs.working_on(id);
    let addresses = out_of_service.addresses.clone();
    let subject = match record_of(&out_of_service) {
        Some(record) => Subject::of(&record),
        None => remnant(node, id).await?,
    };
    remove::all(node, &subject).await?;
    let leases: Vec<Lease> = {
        let ipam = lock(&node.addresses.ipam);
        let ours = |l: &&Lease| matches!(l.owner, LeaseOwner::Attachment { .. });
        addresses.iter().filter_map(|ip| ipam.get(*ip).filter(ours).cloned()).collect()
    };
    resting::release(&node.addresses, &leases, vec![Change::RemoveOutOfService(id)])
        .await
        .map_err(|e| e.to_string())?;
    lock(&node.out_of_service).remove(id);
    node.registry.free_id(id);
    Ok(leases.iter().map(|l| l.ip).collect())
}

/// The record cannot be read, but everything of an endpoint carries its id.
async fn remnant<K: Kernel>(node: &Arc<Node<K>>, id: EndpointId) -> Result<Subject, String> {
    let bound = Duration::from_millis(DeleteStep::Detach.deadline_ms());
    let dump = timeout(bound, node.kernel.dump())
        .await
        .map_err(|_| format!("dump kernel state: no answer within {bound:?}"))?;
    let dump = dump.map_err(|e| e.to_string())?;
    let of_id = |name: &str| parse_host_ifname(name).filter(|(of, _)| *of == id);
    let links = dump.links.iter().filter_map(|l| {
        let (_, low) = of_id(&l.name)?;
        let host_ifname = IfName::parse(&l.name).ok()?;
        Some(LinkRef { id, epoch: Epoch(u64::from(low)), host_ifname, host_ifindex: Some(l.ifindex), container: None })
    });
    let rows = dump.endpoint_rows.iter().filter(|r| r.endpoint_id == u32::from(id.get()));
    Ok(Subject::Remnant { id, links: links.collect(), rows: rows.map(|r| (r.address, r.epoch)).collect() })
}
