//! Deletes of what the registry does not know.
//!
//! To a runtime such a delete succeeds, and mostly there is nothing to do. But something may be left under that
//! container's name all the same: an endpoint whose record was lost, a record that was taken out of service, leases
//! whose endpoint is gone. The delete that comes for it is the moment to let it go, because no other will come.

use std::{net::IpAddr, sync::Arc, time::Duration};

use wharf_api::{DeleteResult, StepError};
use wharf_core::{
    ids::{Attachment, ContainerId, EndpointId, IfName, NetworkName},
    kernel::Kernel,
    plan::DeleteStep,
    store::{Lease, LeaseOwner},
};

use crate::{node::Node, orphan, quarantine, resting, sync::lock, unfinished};

/// What the removal of leftovers is called among the steps of an endpoint.
pub const STEP: &str = "remove-leftovers";
/// How long it may take: what the kernel's part of a delete may.
pub const BOUND: Duration = Duration::from_millis(
    DeleteStep::Detach.deadline_ms()
        + DeleteStep::RemoveReachable.deadline_ms()
        + DeleteStep::Unpin.deadline_ms()
        + DeleteStep::RemoveLink.deadline_ms(),
);

/// Whose leftovers are meant.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Any network when absent.
    pub network: Option<NetworkName>,
    /// Container.
    pub container_id: ContainerId,
    /// Any interface when absent.
    pub ifname: Option<IfName>,
}

impl Wanted {
    /// One attachment.
    #[must_use]
    pub fn of(a: &Attachment) -> Self {
        Self { network: Some(a.network.clone()), container_id: a.container_id.clone(), ifname: Some(a.ifname.clone()) }
    }

    /// Is this attachment meant?
    #[must_use]
    pub fn fits(&self, a: &Attachment) -> bool {
        self.container_id == a.container_id
            && self.network.as_ref().is_none_or(|n| *n == a.network)
            && self.ifname.as_ref().is_none_or(|i| *i == a.ifname)
    }
}

/// Removes what is left under the name. Nothing found is a success with nothing in it.
pub async fn remove<K: Kernel>(node: &Arc<Node<K>>, wanted: &Wanted) -> DeleteResult {
    let mut result = DeleteResult::default();
    for id in unfinished::find(node, wanted) {
        take_in(&mut result, id, unfinished::finish(node, id).await);
    }
    for id in orphan::find(node, wanted) {
        take_in(&mut result, id, orphan::remove(node, id).await);
    }
    for id in quarantine::find(node, wanted) {
        take_in(&mut result, id, quarantine::release(node, id).await);
    }
    let left = leases(node, wanted);
    if !left.is_empty() {
        match resting::release(node, &left, Vec::new()).await {
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
        Err(message) => result.errors.push(StepError { step: STEP.into(), endpoint: id.to_string(), message }),
    }
}

/// Leases in that name which no endpoint, no create, no undo and no record out of service stands for.
fn leases<K: Kernel>(node: &Node<K>, wanted: &Wanted) -> Vec<Lease> {
    let mut leases = lock(&node.ipam).of_container(&wanted.container_id);
    leases.retain(|lease| match &lease.owner {
        LeaseOwner::Attachment { attachment, epoch } => {
            wanted.fits(attachment)
                && node.registry.by_interface(&attachment.container_id, &attachment.ifname).is_none()
                && !quarantine::holds(node, lease.ip)
                && !unfinished::holds(node, attachment, *epoch)
        }
        LeaseOwner::Caller { .. } | LeaseOwner::Node => false,
    });
    leases
}
