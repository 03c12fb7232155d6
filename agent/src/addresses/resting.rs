//! Addresses that were given back.
//!
//! An address rests before it is given out again, and not before nothing on the node speaks for its old owner: rows of
//! the shared maps, routes, conntrack rows (those are removed), redirects of the proxy. The checks run in the
//! background when the rest is over; when a pool has no free address left, the rest is cut short for the oldest ones and
//! the checks run at once, so an address never comes back unchecked.

use std::{net::IpAddr, time::Duration};

use tokio::time::timeout;
use wharf_core::{
    ids::Attachment,
    ipam::{IpamError, LeaseRequest, Leased, Wanted, describe_owner},
    kernel::Kernel,
    store::{Change, Lease, LeaseOwner},
};

use crate::{
    addresses::{Addresses, pools},
    clock,
    store::StoreError,
    sync::lock,
};

/// How often rested addresses are looked at.
pub const TICK: Duration = Duration::from_secs(1);
/// Addresses looked at in one tick: conntrack is read once for all of them.
const BATCH: usize = 512;
/// Addresses woken early for one request: enough for several creates that come together.
const EARLY: usize = 8;
/// Longest time for the checks of a request that waits for an address.
const EARLY_BOUND: Duration = Duration::from_secs(1);

/// Releases leases: first in the store, together with `also`, then in memory. The addresses begin to rest.
///
/// # Errors
/// When the store refuses; nothing is released then.
pub async fn release<K: Kernel>(
    addresses: &Addresses<K>,
    leases: &[Lease],
    also: Vec<Change>,
) -> Result<(), StoreError> {
    let mut changes = also;
    changes.extend(changes_of(addresses, leases));
    addresses.store.commit(changes).await?;
    in_memory(addresses, leases);
    Ok(())
}

/// The store's part of a release.
#[must_use]
pub fn changes_of<K: Kernel>(addresses: &Addresses<K>, leases: &[Lease]) -> Vec<Change> {
    let now = clock::unix_ms();
    let ipam = lock(&addresses.ipam);
    let mut changes = Vec::with_capacity(leases.len() * 2);
    for lease in leases {
        changes.push(Change::RemoveOwnedLease(lease.ip, lease.owner.clone()));
        changes.extend(ipam.peek_rest(lease.ip, &lease.owner, now).map(Change::PutRest));
    }
    changes
}

/// The memory's part of a release, after the store's.
pub fn in_memory<K: Kernel>(addresses: &Addresses<K>, leases: &[Lease]) {
    let now = clock::unix_ms();
    let mut ipam = lock(&addresses.ipam);
    for lease in leases {
        ipam.release_owned(lease.ip, &lease.owner, now);
    }
}

/// How often a request is answered with other addresses, where the node turns out to have those of before.
const TRIES: usize = 4;

/// Leases addresses that the node itself does not have; wakes resting ones when no other is free.
///
/// # Errors
/// As [`wharf_core::ipam::Ipam::lease`].
pub async fn lease<K: Kernel>(
    addresses: &Addresses<K>,
    request: &LeaseRequest,
    owner: &LeaseOwner,
) -> Result<Leased, IpamError> {
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

/// Makes the addresses that are asked for by name and that a delete kept for this attachment the new owner's, and returns
/// the leases as they were. In memory alone: the store has them when the create is committed.
pub fn take_over<K: Kernel>(
    addresses: &Addresses<K>,
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
pub fn hand_back<K: Kernel>(addresses: &Addresses<K>, kept: &[Lease], owner: &LeaseOwner) {
    let mut ipam = lock(&addresses.ipam);
    for lease in kept {
        ipam.transfer(lease.ip, owner, lease.owner.clone());
    }
}

/// As [`lease`], where the owner has some of the addresses already.
///
/// # Errors
/// As [`wharf_core::ipam::Ipam::lease`].
pub async fn lease_besides<K: Kernel>(
    addresses: &Addresses<K>,
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
        // Any of a family that the pool lacks is none.
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

/// Leases addresses, whatever the node has; wakes resting ones when no other is free.
async fn lease_any<K: Kernel>(
    addresses: &Addresses<K>,
    request: &LeaseRequest,
    owner: &LeaseOwner,
) -> Result<Leased, IpamError> {
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
        // The one before may have woken enough for two.
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

/// Whether an address that is asked for by name may end its rest now: the one who had it may have it back at once (a
/// container's network is reloaded, a pod with a fixed address comes back), others when its time is over.
fn may_return<K: Kernel>(addresses: &Addresses<K>, ip: IpAddr, owner: &LeaseOwner) -> bool {
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

/// Wakes what has rested and is spoken for by nobody.
///
/// # Errors
/// When conntrack cannot be read, or the store refuses: the addresses rest on.
pub async fn wake<K: Kernel>(addresses: &Addresses<K>) -> Result<(), String> {
    let _turn = addresses.checks.lock().await;
    let rested = lock(&addresses.ipam).rested(clock::unix_ms(), BATCH);
    if rested.is_empty() { Ok(()) } else { check_and_wake(addresses, &rested).await }
}

/// Looks at addresses that rest; those that nobody speaks for are free, in the store first: one that is given out and
/// back again at once begins a new rest, which must not be taken for the old one. The caller holds the turn, so that no
/// address is woken by what was seen before its last lease.
async fn check_and_wake<K: Kernel>(addresses: &Addresses<K>, ips: &[IpAddr]) -> Result<(), String> {
    let removed = addresses.kernel.remove_connections(ips).await.map_err(|e| e.to_string())?;
    if removed > 0 {
        tracing::debug!(removed, "removed conntrack rows of addresses that rested");
    }
    let mut clear = Vec::with_capacity(ips.len());
    for ip in ips {
        let mut speakers = addresses.kernel.observe_speakers(*ip).await.map_err(|e| e.to_string())?;
        speakers.extend(addresses.redirects.speakers(*ip));
        if speakers.is_empty() {
            clear.push(*ip);
        } else {
            lock(&addresses.ipam).block(*ip, speakers.join(", "));
        }
    }
    let changes = clear.iter().copied().map(Change::RemoveRest).collect();
    addresses.store.commit(changes).await.map_err(|e| e.to_string())?;
    let mut ipam = lock(&addresses.ipam);
    for ip in clear {
        ipam.wake(ip);
    }
    Ok(())
}
