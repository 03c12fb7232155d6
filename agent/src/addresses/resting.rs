//! Resting addresses: released and not yet free.
//!
//! An address rests until no shared map, route or proxy redirect uses it for its old owner. An exhausted pool checks
//! its oldest rests early: no address is leased unchecked.

use std::{net::IpAddr, time::Duration};

use tokio::time::timeout;
use wharf_core::{
    ids::Attachment,
    ipam::{IpamError, LeaseRequest, Leased, Wanted, describe_owner},
    kernel::KernelError,
    store::{Change, Lease, LeaseOwner},
};
use wharf_kit::{clock, sync::lock};
use wharf_store::StoreError;

use crate::addresses::{Addresses, pools};

/// Interval of the checks.
pub const TICK: Duration = Duration::from_secs(1);
const BATCH: usize = 512;
/// Addresses woken early for one request.
const EARLY: usize = 8;
const EARLY_BOUND: Duration = Duration::from_secs(1);

/// Releases leases in the store, with `also`, then in memory.
pub async fn release(addresses: &Addresses, leases: &[Lease], also: Vec<Change>) -> Result<(), StoreError> {
    let mut changes = also;
    changes.extend(changes_of(addresses, leases));
    addresses.store.commit(changes).await?;
    in_memory(addresses, leases);
    Ok(())
}

/// The store changes of a release.
#[must_use]
pub fn changes_of(addresses: &Addresses, leases: &[Lease]) -> Vec<Change> {
    let now = clock::unix_ms();
    let ipam = lock(&addresses.ipam);
    let mut changes = Vec::with_capacity(leases.len() * 2);
    for lease in leases {
        changes.push(Change::RemoveOwnedLease(lease.ip, lease.owner.clone()));
        changes.extend(ipam.peek_rest(lease.ip, &lease.owner, now).map(Change::PutRest));
    }
    changes
}

/// The memory part of a release, after the store's.
pub fn in_memory(addresses: &Addresses, leases: &[Lease]) {
    let now = clock::unix_ms();
    let mut ipam = lock(&addresses.ipam);
    for lease in leases {
        ipam.release_owned(lease.ip, &lease.owner, now);
    }
}

const TRIES: usize = 4;

/// Leases addresses that the node does not have; wakes resting ones if necessary.
pub async fn lease(addresses: &Addresses, request: &LeaseRequest, owner: &LeaseOwner) -> Result<Leased, IpamError> {
    for _ in 0..TRIES {
        let leased = lease_any(addresses, request, owner).await?;
        if !pools::is_taken_by_node(addresses, &leased, owner).await {
            return Ok(leased);
        }
    }
    Err(IpamError::Withheld {
        pool: request.pool.clone().unwrap_or_else(|| addresses.default_pool.clone()),
        why: pools::told(addresses).unwrap_or_default(),
    })
}

/// Moves addresses that a delete kept for the attachment to the new owner, in memory. Returns the old leases.
pub fn take_over(
    addresses: &Addresses,
    request: &LeaseRequest,
    attachment: &Attachment,
    owner: &LeaseOwner,
) -> Vec<Lease> {
    let kept = LeaseOwner::kept_for(attachment);
    let mut ipam = lock(&addresses.ipam);
    let pool = request.pool.clone().unwrap_or_else(|| ipam.default_pool().clone());
    let exact = [exact(request.ipv4).map(IpAddr::V4), exact(request.ipv6).map(IpAddr::V6)].into_iter().flatten();
    let held: Vec<Lease> =
        exact.filter_map(|ip| ipam.get(ip).filter(|l| l.owner == kept && l.pool == pool).cloned()).collect();
    for lease in &held {
        ipam.transfer(lease.ip, &kept, owner.clone());
    }
    held
}

/// Undoes [`take_over`].
pub fn hand_back(addresses: &Addresses, kept: &[Lease], owner: &LeaseOwner) {
    let mut ipam = lock(&addresses.ipam);
    for lease in kept {
        ipam.transfer(lease.ip, owner, lease.owner.clone());
    }
}

/// [`lease`] for an owner that holds some addresses.
pub async fn lease_besides(
    addresses: &Addresses,
    held: &[Lease],
    request: &LeaseRequest,
    owner: &LeaseOwner,
) -> Result<Leased, IpamError> {
    let Some(first) = held.first() else { return lease(addresses, request, owner).await };
    let (mut ipv4, mut ipv6) = (None, None);
    for lease in held {
        match lease.ip {
            IpAddr::V4(ip) => ipv4 = Some(ip),
            IpAddr::V6(ip) => ipv6 = Some(ip),
        }
    }
    let mut leased = Leased { ipv4, ipv6, pool: first.pool.clone() };
    let other = LeaseRequest {
        ipv4: if ipv4.is_some() { Wanted::None } else { request.ipv4 },
        ipv6: if ipv6.is_some() { Wanted::None } else { request.ipv6 },
        ..request.clone()
    };
    let any = other.ipv4 == Wanted::Any || other.ipv6 == Wanted::Any;
    match lease(addresses, &other, owner).await {
        Ok(more) => (leased.ipv4, leased.ipv6) = (ipv4.or(more.ipv4), ipv6.or(more.ipv6)),
        Err(IpamError::NothingWanted { .. }) => {}
        Err(IpamError::FamilyNotInPool { .. }) if any => {}
        Err(error) => return Err(error),
    }
    Ok(leased)
}

fn exact<A>(wanted: Wanted<A>) -> Option<A> {
    match wanted {
        Wanted::Exact(address) => Some(address),
        Wanted::Any | Wanted::None => None,
    }
}

async fn lease_any(addresses: &Addresses, request: &LeaseRequest, owner: &LeaseOwner) -> Result<Leased, IpamError> {
    let lease = || lock(&addresses.ipam).lease(request, owner.clone(), clock::unix_ms());
    let first = lease();
    let Err(IpamError::Exhausted { .. } | IpamError::Resting { .. }) = first else { return first };
    if let Err(IpamError::Resting { ip, .. }) = &first
        && !may_return(addresses, *ip, owner)
    {
        return first;
    }
    let woken = timeout(EARLY_BOUND, async {
        let _turn = addresses.checks.lock().await;
        let again = lease();
        let Err(IpamError::Exhausted { .. } | IpamError::Resting { .. }) = again else { return again };
        let candidates = lock(&addresses.ipam).early(request, EARLY);
        if candidates.is_empty() {
            return again;
        }
        if let Err(error) = check_and_wake(addresses, &candidates).await {
            tracing::warn!("look at resting addresses: {error}");
        }
        lease()
    });
    woken.await.unwrap_or_else(|_| {
        tracing::warn!("resting addresses could not be looked at within {EARLY_BOUND:?}");
        first
    })
}

/// The last owner may lease an address at once, as for a reloaded network or a pod's fixed address.
fn may_return(addresses: &Addresses, ip: IpAddr, owner: &LeaseOwner) -> bool {
    let (view, has_rested) = {
        let mut ipam = lock(&addresses.ipam);
        let Some(view) = ipam.resting().into_iter().find(|r| r.rest.ip == ip) else { return true };
        (view, ipam.has_rested(ip, clock::unix_ms()))
    };
    let is_same = match owner {
        LeaseOwner::Attachment { attachment, .. } => view.rest.last_owner.starts_with(&format!("{attachment} ")),
        LeaseOwner::Caller { .. } | LeaseOwner::Node => view.rest.last_owner == describe_owner(owner),
    };
    is_same || has_rested
}

/// Why addresses could not be woken.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub enum WakeError {
    Kernel(#[from] KernelError),
    Store(#[from] StoreError),
}

/// Wakes rested, unused addresses.
///
/// # Errors
/// Kernel or store; the addresses keep resting.
pub async fn wake(addresses: &Addresses) -> Result<(), WakeError> {
    let _turn = addresses.checks.lock().await;
    let rested = lock(&addresses.ipam).rested(clock::unix_ms(), BATCH);
    if rested.is_empty() { Ok(()) } else { check_and_wake(addresses, &rested).await }
}

/// The store removes rests first: an address that is leased and released at once begins a new rest, which must stay.
/// The caller holds `checks`.
async fn check_and_wake(addresses: &Addresses, ips: &[IpAddr]) -> Result<(), WakeError> {
    addresses.kernel.end_proxy_connections(ips).await?;
    let removed = addresses.kernel.remove_connections(ips).await?;
    if removed > 0 {
        tracing::debug!(removed, "removed conntrack rows of addresses that rested");
    }
    let mut clear = Vec::with_capacity(ips.len());
    for ip in ips {
        let mut speakers = addresses.kernel.observe_speakers(*ip).await?;
        speakers.extend(addresses.redirects.speakers(*ip));
        if speakers.is_empty() {
            clear.push(*ip);
        } else {
            lock(&addresses.ipam).block(*ip, speakers.join(", "));
        }
    }
    let changes = clear.iter().copied().map(Change::RemoveRest).collect();
    addresses.store.commit(changes).await?;
    let mut ipam = lock(&addresses.ipam);
    for ip in clear {
        ipam.wake(ip);
    }
    Ok(())
}
