//! Quarantine: a released address is free after its rest, once checks find no reference on the node. The caller checks
//! and reports with [`Ipam::wake`] or [`Ipam::block`]. Without free addresses a rest may end early ([`Ipam::early`]),
//! but never without checks.

use std::net::IpAddr;

use super::{Family, FamilyPool, Ipam, IpamError, LeaseRequest, Wanted, describe_owner, index_of, rest::Release};
use crate::store::{Lease, LeaseOwner, Rest};

pub(super) const DEFAULT_REST_MS: u64 = 30_000;
/// Milliseconds: smaller steps back are a reordering of threads.
const CLOCK_SLACK_MS: u64 = 1_000;

/// A resting address, for status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestView {
    pub rest: Rest,
    /// References found by the last check, if any.
    pub blocked: Option<String>,
}

impl Ipam {
    /// Milliseconds; an address also rests until the checks ran.
    pub fn set_rest(&mut self, rest_ms: u64) {
        self.rest_ms = rest_ms;
    }

    /// At most a full rest, even after the clock was set back.
    pub(super) fn rest_left_ms(&self, rest: &Rest, now_ms: u64) -> u64 {
        rest.since_unix_ms.saturating_add(self.rest_ms).saturating_sub(now_ms).min(self.rest_ms)
    }

    /// The rest of [`Self::release_owned`]: the store is written first. `None` without a lease.
    #[must_use]
    pub fn peek_rest(&self, ip: IpAddr, owner: &LeaseOwner, now_ms: u64) -> Option<Rest> {
        let lease = self.leases.get(&ip).filter(|l| l.owner == *owner && l.owner != LeaseOwner::Node)?;
        // Addresses outside all pools are not leased again.
        self.pool_of(ip)?;
        Some(rest_of(lease, now_ms))
    }

    /// Releases an address of any owner into its rest. `None` for an unleased or router address.
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

    /// A late release does not affect the next owner.
    pub fn release_owned(&mut self, ip: IpAddr, owner: &LeaseOwner, now_ms: u64) -> Option<(Lease, Rest)> {
        if self.leases.get(&ip)?.owner != *owner {
            return None;
        }
        self.release(ip, now_ms)
    }

    /// Releases without a rest: for a lease without an answer and without a step that may pass the address to kernel or
    /// proxy.
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

    /// Restores a rest under the pool that contains the address now.
    ///
    /// # Errors
    /// The rest is obsolete: [`IpamError::AlreadyLeased`], or [`IpamError::NotInPool`] after a configuration change.
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

    /// Oldest release first.
    #[must_use]
    pub fn resting(&self) -> Vec<RestView> {
        let mut all: Vec<_> = self.families().flat_map(|f| f.resting().all()).collect();
        all.sort_by_key(|s| s.release);
        all.into_iter().map(|s| RestView { rest: s.rest.clone(), blocked: s.why().map(str::to_owned) }).collect()
    }

    /// Addresses to check: first those never checked by release, then others by check.
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

    /// Only the checks remain.
    pub fn has_rested(&mut self, ip: IpAddr, now_ms: u64) -> bool {
        let (now_ms, rest_ms) = (self.on_clock(now_ms), self.rest_ms);
        let release = self.family_of(ip).and_then(|f| f.sleeper(ip)).map(|s| s.release);
        release.is_some_and(|(since_ms, _)| since_ms.saturating_add(rest_ms) <= now_ms)
    }

    /// Addresses whose rest may end early for a refused request: the exact address, or at most `limit` of each
    /// exhausted family.
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

    /// After the checks: the address is free, after earlier releases.
    pub fn wake(&mut self, ip: IpAddr) -> Option<Rest> {
        self.family_of(ip)?.wake(ip)
    }

    /// After a failed check; the next comes after all others.
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

    /// Monotonic unless the clock was set back.
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
