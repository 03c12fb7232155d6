//! Deletes of what the registry does not know.
//!
//! To a runtime such a delete succeeds, and mostly there is nothing to do. But something may be left under that
//! container's name all the same: an endpoint whose record was lost, a record that was taken out of service, leases
//! whose endpoint is gone. The delete that comes for it is the moment to let it go, because no other will come.

use std::{net::IpAddr, sync::Arc};

use wharf_api::{DeleteResult, StepError};
use wharf_core::{
    ids::EndpointId,
    kernel::Kernel,
    store::{Lease, LeaseOwner},
};

use crate::{
    addresses::resting,
    endpoint::{orphan, out_of_service, unfinished},
    node::{Node, aside::Wanted},
    sync::lock,
};

/// Removes what is left under the name. Nothing found is a success with nothing in it.
pub async fn remove<K: Kernel>(node: &Arc<Node<K>>, wanted: &Wanted) -> DeleteResult {
    let mut result = DeleteResult::default();
    for id in unfinished::find(node, wanted) {
        take_in(&mut result, id, unfinished::finish(node, id).await);
    }
    for id in orphan::find(node, wanted) {
        take_in(&mut result, id, orphan::remove(node, id).await);
    }
    for id in out_of_service::find(node, wanted) {
        take_in(&mut result, id, out_of_service::release(node, id).await);
    }
    let left = leases(node, wanted);
    if !left.is_empty() {
        match resting::release(&node.addresses, &left, Vec::new()).await {
            Ok(()) => result.leases_released.extend(left.iter().map(|l| l.ip)),
            Err(error) => result.errors.push(StepError {
                step: "release-ips".into(),
                endpoint: wanted.container_id.to_string(),
                message: error.to_string(),
            }),
        }
    }
    result
}

/// [`remove`], added to what else a request has done.
pub async fn remove_into<K: Kernel>(node: &Arc<Node<K>>, wanted: &Wanted, result: &mut DeleteResult) {
    join(result, remove(node, wanted).await);
}

/// Adds one result to another.
pub fn join(result: &mut DeleteResult, more: DeleteResult) {
    result.deleted.extend(more.deleted);
    result.leases_released.extend(more.leases_released);
    result.errors.extend(more.errors);
}

fn take_in(result: &mut DeleteResult, id: EndpointId, outcome: Result<Vec<IpAddr>, String>) {
    match outcome {
        Ok(addresses) => {
            result.deleted.push(id.get());
            result.leases_released.extend(addresses);
        }
        Err(message) => {
            result.errors.push(StepError { step: "remove-leftovers".into(), endpoint: id.to_string(), message })
        }
    }
}

/// Leases in that name which no endpoint, no create, no undo and no record out of service stands for.
fn leases<K: Kernel>(node: &Node<K>, wanted: &Wanted) -> Vec<Lease> {
    let mut leases = lock(&node.addresses.ipam).of_container(&wanted.container_id);
    leases.retain(|lease| match &lease.owner {
        LeaseOwner::Attachment { attachment, epoch } => {
            wanted.fits(attachment)
                && node.registry.by_interface(&attachment.container_id, &attachment.ifname).is_none()
                && !out_of_service::holds(node, lease.ip)
                && !unfinished::holds(node, attachment, *epoch)
        }
        LeaseOwner::Caller { .. } | LeaseOwner::Node => false,
    });
    leases
}
