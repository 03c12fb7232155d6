//! Deletes without an endpoint in the registry succeed, and remove leftovers.

use std::{net::IpAddr, sync::Arc};

use wharf_api::{DeleteResult, StepError};
use wharf_core::{
    ids::EndpointId,
    store::{Lease, LeaseOwner},
};
use wharf_kit::sync::lock;

use crate::{
    addresses::{Addresses, resting},
    endpoint::{error::RemoveError, orphan, out_of_service, unfinished},
    node::{aside::Wanted, endpoints::Endpoints, lifecycle::Lifecycle},
};

/// Removes leftovers, if any.
pub async fn remove(life: &Arc<Lifecycle>, wanted: &Wanted) -> DeleteResult {
    let mut result = DeleteResult::default();
    let leftovers = &life.endpoints.leftovers;
    for id in leftovers.unfinished.find(wanted) {
        take_in(&mut result, id, unfinished::finish(life, id).await);
    }
    for id in leftovers.orphans.find(wanted) {
        take_in(&mut result, id, orphan::remove(life, id).await);
    }
    for id in leftovers.out_of_service.find(wanted) {
        take_in(&mut result, id, out_of_service::release(life, id).await);
    }
    let left = leases(&life.endpoints, &life.network.addresses, wanted);
    if !left.is_empty() {
        match resting::release(&life.network.addresses, &left, Vec::new()).await {
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

/// Adds `more` to `result`.
pub fn join(result: &mut DeleteResult, more: DeleteResult) {
    result.deleted.extend(more.deleted);
    result.leases_released.extend(more.leases_released);
    result.errors.extend(more.errors);
    result.kept.extend(more.kept);
}

fn take_in(result: &mut DeleteResult, id: EndpointId, outcome: Result<Vec<IpAddr>, RemoveError>) {
    match outcome {
        Ok(addresses) => {
            result.deleted.push(id.get());
            result.leases_released.extend(addresses);
        }
        Err(why) => result.errors.push(StepError {
            step: "remove-leftovers".into(),
            endpoint: id.to_string(),
            message: why.to_string(),
        }),
    }
}

fn leases(endpoints: &Endpoints, addresses: &Addresses, wanted: &Wanted) -> Vec<Lease> {
    let mut leases = lock(&addresses.ipam).of_container(&wanted.container_id);
    leases.retain(|lease| match &lease.owner {
        LeaseOwner::Attachment { attachment, epoch } => {
            wanted.fits(attachment)
                && endpoints.registry.by_interface(&attachment.container_id, &attachment.ifname).is_none()
                && !out_of_service::holds(&endpoints.leftovers.out_of_service, lease.ip)
                && !unfinished::holds(&endpoints.leftovers.unfinished, attachment, *epoch)
        }
        LeaseOwner::Caller { .. } | LeaseOwner::Node => false,
    });
    leases
}
