//! An endpoint's leases, and store changes of its record.

use wharf_core::{
    endpoint::EndpointRecord,
    store::{Change, Lease, LeaseOwner},
};

use crate::addresses::{Addresses, resting};

/// Owner of an endpoint's leases.
#[must_use]
pub fn owner(record: &EndpointRecord) -> LeaseOwner {
    LeaseOwner::Attachment { attachment: record.attachment.clone(), epoch: record.epoch }
}

/// An endpoint's leases.
#[must_use]
pub fn leases(record: &EndpointRecord) -> Vec<Lease> {
    let lease =
        |ip| Lease { ip, pool: record.pool.clone(), owner: owner(record), since_unix_ms: record.created_unix_ms };
    record.addresses().map(lease).collect()
}

/// Changes that remove an endpoint.
#[must_use]
pub fn removals(addresses: &Addresses, record: &EndpointRecord, release_ips: bool) -> Vec<Change> {
    let mut changes =
        vec![Change::RemoveEndpoint(record.id, record.epoch), Change::RemoveIntent(record.id, record.epoch)];
    // Otherwise it counts against the id's next endpoint.
    changes.push(Change::RemoveRestoreFailure(record.id));
    if release_ips {
        changes.extend(resting::changes_of(addresses, &leases(record)));
    }
    changes
}

pub(super) fn crash_point(operation: &str, step: &str) {
    if wharf_crash::is_armed() {
        wharf_crash::point(&format!("{operation}/before-{step}"));
    }
}
