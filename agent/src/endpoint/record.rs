//! What an endpoint's record stands for in the store.

use wharf_core::{
    endpoint::EndpointRecord,
    kernel::Kernel,
    store::{Change, Lease, LeaseOwner},
};

use crate::addresses::{Addresses, resting};

/// The owner of an endpoint's leases.
#[must_use]
pub fn owner(record: &EndpointRecord) -> LeaseOwner {
    LeaseOwner::Attachment { attachment: record.attachment.clone(), epoch: record.epoch }
}

/// The leases an endpoint's record stands for.
#[must_use]
pub fn leases(record: &EndpointRecord) -> Vec<Lease> {
    let lease =
        |ip| Lease { ip, pool: record.pool.clone(), owner: owner(record), since_unix_ms: record.created_unix_ms };
    record.addresses().map(lease).collect()
}

/// The store's changes that remove an endpoint, with its leases or without.
#[must_use]
pub fn removals<K: Kernel>(addresses: &Addresses<K>, record: &EndpointRecord, release_ips: bool) -> Vec<Change> {
    let mut changes =
        vec![Change::RemoveEndpoint(record.id, record.epoch), Change::RemoveIntent(record.id, record.epoch)];
    // Counted against whoever has the id next, otherwise.
    changes.push(Change::RemoveRestoreFailure(record.id));
    if release_ips {
        changes.extend(resting::changes_of(addresses, &leases(record)));
    }
    changes
}

/// A crash point before a step.
pub(super) fn crash_point(operation: &str, step: &str) {
    if cfg!(feature = "crash-points") {
        wharf_crash::point(&format!("{operation}/before-{step}"));
    }
}
