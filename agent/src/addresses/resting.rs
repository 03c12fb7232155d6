//! Resting addresses: released and not yet free.
//!
//! A released address rests before it is leased again, until nothing on the node uses it for its old owner: rows of
//! the shared maps, routes, proxy redirects. Conntrack rows are removed. The checks run in the background after the
//! rest. When a pool has no free address, the oldest rests are cut short and the checks run at once, so an address is
//! never leased unchecked.

use std::{net::IpAddr, time::Duration};

use tokio::time::timeout;
use wharf_core::{
    ids::Attachment,
    ipam::{IpamError, LeaseRequest, Leased, Wanted, describe_owner},
    kernel::{KernelError, NatKernel, NodeKernel},
    store::{Change, Lease, LeaseOwner},
};

use crate::{
    addresses::{Addresses, pools},
    clock,
    store::StoreError,
    sync::lock,
};

/// Interval at which rested addresses are checked.
pub const TICK: Duration = Duration::from_secs(1);
/// Addresses checked in one tick: conntrack is read once for all of them.
const BATCH: usize = 512;
/// Addresses woken early for one request: enough for several concurrent creates.
const EARLY: usize = 8;
/// Longest time for the checks of a request that waits for an address.
const EARLY_BOUND: Duration = Duration::from_secs(1);

/// Releases leases: first in the store, together with `also`, then in memory. The addresses begin to rest.
///
/// # Errors
/// When the store refuses; nothing is released then.
pub async fn release<K: NodeKernel + NatKernel>(
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
pub fn changes_of<K: NodeKernel + NatKernel>(addresses: &Addresses<K>, leases: &[Lease]) -> Vec<Change> {
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
pub fn in_memory<K: NodeKernel + NatKernel>(addresses: &Addresses<K>, leases: &[Lease]) {
    let now = clock::unix_ms();
    let mut ipam = lock(&addresses.ipam);
    for lease in leases {
        ipam.release_owned(lease.ip, &lease.owner, now);
    }
}

/// Leases tried for one request when the node itself has the leased addresses.
const TRIES: usize = 4;

/// Leases addresses that the node itself does not have; wakes resting addresses when no other is free.
///
/// # Errors
/// As [`wharf_core::ipam::Ipam::lease`].
pub async fn lease<K: NodeKernel + NatKernel>(
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

/// Transfers requested addresses that a delete kept for this attachment to the new owner; returns the leases as they
/// were. The change is in memory only; the commit of the create stores it.
pub fn take_over<K: NodeKernel + NatKernel>(
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
pub fn hand_back<K: NodeKernel + NatKernel>(addresses: &Addresses<K>, kept: &[Lease], owner: &LeaseOwner) {
    let mut ipam = lock(&addresses.ipam);
    for lease in kept {
        ipam.transfer(lease.ip, owner, lease.owner.clone());
    }
}

/// As [`lease`], when the owner already holds some of the addresses.
///
/// # Errors
/// As [`wharf_core::ipam::Ipam::lease`].
pub async fn lease_besides<K: NodeKernel + NatKernel>(
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
        // A pool without the family satisfies a request for any address of it.
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

/// Leases addresses without a check against the node; wakes resting addresses when no other is free.
async fn lease_any<K: NodeKernel + NatKernel>(
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
        // The previous holder of the lock may have woken enough addresses.
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

/// Whether a requested address may end its rest now. Its last owner may lease it at once (a container network is
/// reloaded, a pod with a fixed address returns), others after the rest.
fn may_return<K: NodeKernel + NatKernel>(addresses: &Addresses<K>, ip: IpAddr, owner: &LeaseOwner) -> bool {
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
    /// The kernel could not say what uses them.
    Kernel(#[from] KernelError),
    /// The end of a rest could not be stored.
    Store(#[from] StoreError),
}

/// Wakes rested addresses that nothing on the node uses.
///
/// # Errors
/// When conntrack cannot be read or the store refuses: the addresses keep resting.
pub async fn wake<K: NodeKernel + NatKernel>(addresses: &Addresses<K>) -> Result<(), WakeError> {
    let _turn = addresses.checks.lock().await;
    let rested = lock(&addresses.ipam).rested(clock::unix_ms(), BATCH);
    if rested.is_empty() { Ok(()) } else { check_and_wake(addresses, &rested).await }
}

/// Checks resting addresses and frees those that nothing uses. The rest is removed from the store first: an address
/// leased and released at once begins a new rest, which this removal must not hit. The caller holds the `checks`
/// lock, so no address is woken by an observation from before its last lease.
async fn check_and_wake<K: NodeKernel + NatKernel>(addresses: &Addresses<K>, ips: &[IpAddr]) -> Result<(), WakeError> {
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
