//! The leases and store changes that belong to an endpoint's record.

use wharf_core::{
    endpoint::EndpointRecord,
    store::{Change, Lease, LeaseOwner},
};

use crate::addresses::{Addresses, resting};

/// The owner of an endpoint's leases.
#[must_use]
pub fn owner(record: &EndpointRecord) -> LeaseOwner {
    LeaseOwner::Attachment { attachment: record.attachment.clone(), epoch: record.epoch }
}

/// The leases of an endpoint's addresses.
#[must_use]
pub fn leases(record: &EndpointRecord) -> Vec<Lease> {
    let lease =
        |ip| Lease { ip, pool: record.pool.clone(), owner: owner(record), since_unix_ms: record.created_unix_ms };
    record.addresses().map(lease).collect()
}

/// The store changes that remove an endpoint, with or without its leases.
#[must_use]
pub fn removals(addresses: &Addresses, record: &EndpointRecord, release_ips: bool) -> Vec<Change> {
    let mut changes =
        vec![Change::RemoveEndpoint(record.id, record.epoch), Change::RemoveIntent(record.id, record.epoch)];
    // A restore failure left behind would count against the next endpoint with this id.
    changes.push(Change::RemoveRestoreFailure(record.id));
    if release_ips {
        changes.extend(resting::changes_of(addresses, &leases(record)));
    }
    changes
}

/// A crash point before a step.
pub(super) fn crash_point(operation: &str, step: &str) {
    if wharf_crash::is_armed() {
        wharf_crash::point(&format!("{operation}/before-{step}"));
    }
}
