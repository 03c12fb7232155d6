//! A released address rests.
//!
//! It is free again when its rest is over and the checks found nobody on the node who speaks for its old owner. Time is
//! kept here; the checks are the caller's, who reports what they found with [`Ipam::wake`] or [`Ipam::block`]. When no
//! address is free the rest may be cut short ([`Ipam::early`]), the checks never.

use std::net::IpAddr;

use super::{Family, FamilyPool, Ipam, IpamError, LeaseRequest, Wanted, describe_owner, index_of, rest::Release};
use crate::store::{Lease, LeaseOwner, Rest};

/// How long an address rests where nobody said otherwise, milliseconds.
pub(super) const DEFAULT_REST_MS: u64 = 30_000;
/// A clock that goes back by less than this, milliseconds, was read by two threads that came in the other order.
const CLOCK_SLACK_MS: u64 = 1_000;

/// An address that rests, for status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestView {
    /// The rest.
    pub rest: Rest,
    /// What still spoke for the address when it was last looked at; none when nothing did, or nobody looked yet.
    pub blocked: Option<String>,
}

impl Ipam {
    /// Sets how long an address rests at least, milliseconds (30,000 when never set). With 0 it rests until the checks
    /// were made.
    pub fn set_rest(&mut self, rest_ms: u64) {
        self.rest_ms = rest_ms;
    }

    /// What [`Self::release_owned`] would make, without doing it: the store comes first. `None` where it would release
    /// nothing.
    #[must_use]
    pub fn peek_rest(&self, ip: IpAddr, owner: &LeaseOwner, now_ms: u64) -> Option<Rest> {
        let lease = self.leases.get(&ip).filter(|l| l.owner == *owner && l.owner != LeaseOwner::Node)?;
        // What no pool gives out any more has nobody to rest for.
        self.pool_of(ip)?;
        Some(rest_of(lease, now_ms))
    }

    /// Gives an address back, whoever holds it; it rests from now on. `None` when nobody holds it, and for the router's,
    /// which stays. `now_ms`: milliseconds since the Unix epoch.
    pub fn release(&mut self, ip: IpAddr, now_ms: u64) -> Option<(Lease, Rest)> {
        if self.leases.get(&ip)?.owner == LeaseOwner::Node {
            return None;
        }
        let lease = self.unfile(ip)?;
        let rest = rest_of(&lease, now_ms);
        let release = self.next_release(now_ms);
        if let Some(pool) = self.family_of(ip) {
            pool.release(rest.clone(), release);
        }
        Some((lease, rest))
    }

    /// Gives an address back if this owner holds it: a late release never takes the address of the one who came after.
    pub fn release_owned(&mut self, ip: IpAddr, owner: &LeaseOwner, now_ms: u64) -> Option<(Lease, Rest)> {
        if self.leases.get(&ip)?.owner != *owner {
            return None;
        }
        self.release(ip, now_ms)
    }

    /// Gives an address back, if this owner holds it, without a rest. Right only where nobody can have learned of the
    /// lease: nothing was answered, and no step was begun that might write the address into the kernel or hand it to the
    /// proxy. Where in doubt, [`Self::release_owned`].
    pub fn release_unused(&mut self, ip: IpAddr, owner: &LeaseOwner) -> Option<Lease> {
        if *owner == LeaseOwner::Node || self.leases.get(&ip)?.owner != *owner {
            return None;
        }
        let lease = self.unfile(ip)?;
        let release = self.next_release(self.latest_ms);
        if let Some(pool) = self.family_of(ip) {
            pool.release_unused(ip, release);
        }
        Some(lease)
    }

    /// Goes on with a rest that was stored, filed under the pool whose CIDR holds the address today.
    ///
    /// # Errors
    /// When there is nothing to rest, so that the stored rest is to be forgotten: [`IpamError::AlreadyLeased`] (a lease
    /// comes before a rest), [`IpamError::NotInPool`] (the pools' configuration was changed).
    pub fn claim_rest(&mut self, rest: Rest) -> Result<(), IpamError> {
        if let Some(held) = self.leases.get(&rest.ip) {
            return Err(IpamError::AlreadyLeased { ip: rest.ip, owner: held.owner.clone() });
        }
        let Some(name) = self.pool_of(rest.ip).map(|(_, name)| name.clone()) else {
            return Err(self.not_in_pool(rest.ip, rest.pool));
        };
        self.latest_ms = self.latest_ms.max(rest.since_unix_ms);
        self.turns += 1;
        let release = (rest.since_unix_ms, self.turns);
        if let Some(pool) = self.family_of(rest.ip) {
            pool.claim_rest(Rest { pool: name, ..rest }, release);
        }
        Ok(())
    }

    /// Addresses that rest, the longest released first.
    #[must_use]
    pub fn resting(&self) -> Vec<RestView> {
        let mut all: Vec<_> = self.families().flat_map(|f| f.resting().all()).collect();
        all.sort_by_key(|s| s.release);
        all.into_iter().map(|s| RestView { rest: s.rest.clone(), blocked: s.why().map(str::to_owned) }).collect()
    }

    /// At most `limit` addresses whose rest is over and which wait for the checks: the longest released first; after
    /// them those that a check found spoken for, the one that was looked at longest ago first.
    pub fn rested(&mut self, now_ms: u64, limit: usize) -> Vec<IpAddr> {
        let now_ms = self.on_clock(now_ms);
        let is_over = |release: Release| release.0.saturating_add(self.rest_ms) <= now_ms;
        let mut over: Vec<(Release, IpAddr)> = Vec::new();
        for family in self.families() {
            let oldest = family.resting().unblocked().map(|s| (s.release, s.rest.ip));
            over.extend(oldest.take_while(|(release, _)| is_over(*release)).take(limit));
        }
        over.sort_unstable();
        let mut blocked: Vec<(u64, IpAddr)> = Vec::new();
        if over.len() < limit {
            for family in self.families() {
                let tried = family.resting().blocked().filter(|(_, s)| is_over(s.release));
                blocked.extend(tried.map(|(check, s)| (check, s.rest.ip)).take(limit));
            }
        }
        blocked.sort_unstable();
        let (over, blocked) = (over.into_iter().map(|(_, ip)| ip), blocked.into_iter().map(|(_, ip)| ip));
        over.chain(blocked).take(limit).collect()
    }

    /// Whether the rest of an address is over, so that only the checks are left. False when it does not rest.
    pub fn has_rested(&mut self, ip: IpAddr, now_ms: u64) -> bool {
        let (now_ms, rest_ms) = (self.on_clock(now_ms), self.rest_ms);
        let release = self.family_of(ip).and_then(|f| f.sleeper(ip)).map(|s| s.release);
        release.is_some_and(|(since_ms, _)| since_ms.saturating_add(rest_ms) <= now_ms)
    }

    /// Addresses whose rest may be cut short for a request that [`Self::lease`] refused: the one it names, if that rests;
    /// of each family of which it takes any and none is free, at most `limit`, in the order of [`Self::rested`]. Empty
    /// where waking would not help.
    #[must_use]
    pub fn early(&self, request: &LeaseRequest, limit: usize) -> Vec<IpAddr> {
        let name = request.pool.as_ref().unwrap_or(&self.default_pool);
        let Some(pool) = index_of(&self.pools, name).ok().and_then(|index| self.pools.get(index)) else {
            return Vec::new();
        };
        let mut candidates = early_of(pool.family(Family::Ipv4), request.ipv4, limit);
        candidates.extend(early_of(pool.family(Family::Ipv6), request.ipv6, limit));
        candidates
    }

    /// Ends a rest: the checks found nobody who speaks for the address. It is free, and given out after those that were
    /// released before it. `None` when it does not rest.
    pub fn wake(&mut self, ip: IpAddr) -> Option<Rest> {
        self.family_of(ip)?.wake(ip)
    }

    /// Notes what still speaks for an address that rests; it rests on, and is looked at again after all others. False
    /// when it does not rest.
    pub fn block(&mut self, ip: IpAddr, why: impl Into<String>) -> bool {
        self.turns += 1;
        let check = self.turns;
        self.family_of(ip).is_some_and(|pool| pool.block(ip, why.into(), check))
    }

    fn families(&self) -> impl Iterator<Item = &FamilyPool> {
        self.pools.iter().flat_map(|p| [p.v4.as_ref(), p.v6.as_ref()]).flatten()
    }

    fn family_of(&mut self, ip: IpAddr) -> Option<&mut FamilyPool> {
        let (index, _) = self.pool_of(ip)?;
        self.pools.get_mut(index)?.family_mut(Family::of(ip))
    }

    fn next_release(&mut self, now_ms: u64) -> Release {
        self.turns += 1;
        (self.on_clock(now_ms), self.turns)
    }

    /// The time to reckon with: never before one that was reckoned with already, unless the clock was set back.
    fn on_clock(&mut self, now_ms: u64) -> u64 {
        if now_ms.saturating_add(CLOCK_SLACK_MS) < self.latest_ms {
            for pool in &mut self.pools {
                pool.v4.iter_mut().chain(pool.v6.iter_mut()).for_each(|f| f.set_clock_back(now_ms));
            }
            self.latest_ms = now_ms;
        }
        self.latest_ms = self.latest_ms.max(now_ms);
        self.latest_ms
    }
}

fn rest_of(lease: &Lease, now_ms: u64) -> Rest {
    Rest { ip: lease.ip, pool: lease.pool.clone(), last_owner: describe_owner(&lease.owner), since_unix_ms: now_ms }
}

fn early_of<A: Into<IpAddr>>(family: Option<&FamilyPool>, wanted: Wanted<A>, limit: usize) -> Vec<IpAddr> {
    let Some(family) = family else { return Vec::new() };
    match wanted {
        Wanted::None => Vec::new(),
        Wanted::Exact(ip) => family.sleeper(ip.into()).map(|s| s.rest.ip).into_iter().collect(),
        Wanted::Any if family.next_free().is_some() => Vec::new(),
        Wanted::Any => {
            let resting = family.resting();
            let blocked = resting.blocked().map(|(_, s)| s);
            resting.unblocked().chain(blocked).take(limit).map(|s| s.rest.ip).collect()
        }
    }
}
