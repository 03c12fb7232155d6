//! One family of a pool, and the choice of the next address.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use roaring::RoaringBitmap;

use super::{
    Family,
    rest::{Release, Rested, Resting, Sleeper, set_clock_back},
};
use crate::store::Rest;

/// Then the oldest counts as fresh: bounds memory in IPv6 pools, which never run out of fresh addresses.
const RESTED_MAX: usize = 4096;

/// IPv4 in the low 32 bits.
fn number(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => u128::from(ip.to_bits()),
        IpAddr::V6(ip) => ip.to_bits(),
    }
}

#[derive(Debug, Clone)]
enum AddressSet {
    V4(RoaringBitmap),
    /// A /64 cannot be enumerated.
    V6(BTreeSet<u128>),
}

impl AddressSet {
    fn insert(&mut self, n: u128) -> bool {
        match self {
            Self::V4(set) => u32::try_from(n).is_ok_and(|n| set.insert(n)),
            Self::V6(set) => set.insert(n),
        }
    }

    fn remove(&mut self, n: u128) -> bool {
        match self {
            Self::V4(set) => u32::try_from(n).is_ok_and(|n| set.remove(n)),
            Self::V6(set) => set.remove(&n),
        }
    }

    /// Lowest number outside the set; linear in the runs (IPv4) or addresses (IPv6) before it.
    fn first_absent(&self, from: u128, to: u128) -> Option<u128> {
        if from > to {
            return None;
        }
        let candidate = match self {
            Self::V4(set) => {
                let (from, to) = (u32::try_from(from).ok()?, u32::try_from(to).ok()?);
                let mut candidate = u64::from(from);
                let mut runs = set.range(from..=to);
                while let Some(run) = runs.next_range() {
                    if u64::from(*run.start()) > candidate {
                        break;
                    }
                    candidate = u64::from(*run.end()) + 1;
                }
                u128::from(candidate)
            }
            Self::V6(set) => {
                let mut candidate = from;
                for taken in set.range(from..=to) {
                    if *taken != candidate {
                        break;
                    }
                    candidate = candidate.checked_add(1)?;
                }
                candidate
            }
        };
        (candidate <= to).then_some(candidate)
    }
}

/// Excludes reserved addresses of the CIDR.
#[must_use]
pub fn is_leasable(cidr: &IpNet, ip: IpAddr) -> bool {
    cidr.contains(&ip) && Range::of(cidr).contains(number(ip))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    first: u128,
    last: u128,
}

impl Range {
    /// Without IPv4 network and broadcast and IPv6 subnet-router anycast addresses (RFC 4291, 2.6.1); /31 (RFC 3021)
    /// and /127 (RFC 6164) have neither.
    fn of(cidr: &IpNet) -> Self {
        let (first, last) = (number(cidr.network()), number(cidr.broadcast()));
        if cidr.max_prefix_len() - cidr.prefix_len() <= 1 {
            return Self { first, last };
        }
        match cidr {
            IpNet::V4(_) => Self { first: first + 1, last: last - 1 },
            IpNet::V6(_) => Self { first: first + 1, last },
        }
    }

    /// Including unusable addresses.
    fn whole(cidr: &IpNet) -> Self {
        Self { first: number(cidr.network()), last: number(cidr.broadcast()) }
    }

    fn contains(&self, n: u128) -> bool {
        (self.first..=self.last).contains(&n)
    }
}

#[derive(Debug, Clone)]
pub(super) struct FamilyPool {
    family: Family,
    ranges: Vec<Range>,
    /// Leased, resting or rested; next-fit skips them.
    passed_over: AddressSet,
    resting: Resting,
    rested: Rested,
    /// The node has or reaches them; next-fit skips them.
    withheld: Vec<Range>,
    /// Next-fit: a range, and a number in it.
    cursor: (usize, u128),
    used: u64,
}

impl FamilyPool {
    pub(super) fn new(family: Family, cidrs: &[IpNet]) -> Option<Self> {
        let ranges: Vec<Range> = cidrs.iter().filter(|c| Family::of(c.addr()) == family).map(Range::of).collect();
        let cursor = (0, ranges.first()?.first);
        let passed_over = match family {
            Family::Ipv4 => AddressSet::V4(RoaringBitmap::new()),
            Family::Ipv6 => AddressSet::V6(BTreeSet::new()),
        };
        Some(Self {
            family,
            ranges,
            passed_over,
            resting: Resting::default(),
            rested: Rested::default(),
            withheld: Vec::new(),
            cursor,
            used: 0,
        })
    }

    fn address(&self, n: u128) -> Option<IpAddr> {
        match self.family {
            Family::Ipv4 => u32::try_from(n).ok().map(|n| IpAddr::V4(Ipv4Addr::from_bits(n))),
            Family::Ipv6 => Some(IpAddr::V6(Ipv6Addr::from_bits(n))),
        }
    }

    pub(super) fn first(&self) -> Option<IpAddr> {
        self.ranges.first().and_then(|r| self.address(r.first))
    }

    /// Usable, whether free or not.
    pub(super) fn gives_out(&self, ip: IpAddr) -> bool {
        Family::of(ip) == self.family && self.ranges.iter().any(|r| r.contains(number(ip)))
    }

    pub(super) fn used(&self) -> u64 {
        self.used
    }

    pub(super) fn resting(&self) -> &Resting {
        &self.resting
    }

    pub(super) fn sleeper(&self, ip: IpAddr) -> Option<&Sleeper> {
        self.resting.get(number(ip)).filter(|s| s.rest.ip == ip)
    }

    /// At most `u64::MAX`.
    pub(super) fn total(&self) -> u64 {
        let total = self.ranges.iter().fold(0u128, |sum, r| sum.saturating_add((r.last - r.first).saturating_add(1)));
        u64::try_from(total).unwrap_or(u64::MAX)
    }

    /// Next fresh address from the cursor, else the oldest release.
    pub(super) fn next_free(&self) -> Option<IpAddr> {
        let rested = || self.rested.by_age().find(|n| self.withheld_at(*n).is_none());
        self.next_fresh().or_else(rested).and_then(|n| self.address(n))
    }

    pub(super) fn withhold(&mut self, nets: &[IpNet]) {
        self.withheld = nets.iter().filter(|n| Family::of(n.addr()) == self.family).map(Range::whole).collect();
    }

    /// A free address is withheld. Valid only when [`Self::next_free`] is none.
    pub(super) fn has_withheld_free(&self) -> bool {
        let free = |r: &Range| self.passed_over.first_absent(r.first, r.last).is_some();
        !self.withheld.is_empty() && (self.ranges.iter().any(free) || self.rested.by_age().next().is_some())
    }

    pub(super) fn overlaps(&self, net: &IpNet) -> bool {
        let net = Range::whole(net);
        self.ranges.iter().any(|r| r.first <= net.last && net.first <= r.last)
    }

    fn withheld_at(&self, n: u128) -> Option<&Range> {
        self.withheld.iter().find(|r| r.contains(n))
    }

    fn first_fresh(&self, mut from: u128, to: u128) -> Option<u128> {
        loop {
            let fresh = self.passed_over.first_absent(from, to)?;
            let Some(withheld) = self.withheld_at(fresh) else { return Some(fresh) };
            from = withheld.last.checked_add(1)?;
        }
    }

    fn next_fresh(&self) -> Option<u128> {
        let (at, from) = self.cursor;
        let current = self.ranges.get(at)?;
        let others = self.ranges.iter().skip(at + 1).chain(self.ranges.iter().take(at));
        self.first_fresh(from, current.last)
            .or_else(|| others.into_iter().find_map(|r| self.first_fresh(r.first, r.last)))
            .or_else(|| self.first_fresh(current.first, current.last))
    }

    /// Ends the rest. Idempotent.
    pub(super) fn take(&mut self, ip: IpAddr) {
        let n = number(ip);
        let was_ours = self.rested.remove(n) || self.resting.remove(n).is_some();
        if !self.passed_over.insert(n) && !was_ours {
            return;
        }
        self.used += 1;
        if let Some(at) = self.ranges.iter().position(|r| r.contains(n)) {
            // Past the range's end, the search continues in the next range.
            self.cursor = (at, n.saturating_add(1));
        }
    }

    pub(super) fn release(&mut self, rest: Rest, release: Release) {
        self.used = self.used.saturating_sub(1);
        self.resting.push(number(rest.ip), rest, release);
    }

    /// Free now, last in order.
    pub(super) fn release_unused(&mut self, ip: IpAddr, release: Release) {
        self.used = self.used.saturating_sub(1);
        self.push_rested(number(ip), release);
    }

    pub(super) fn claim_rest(&mut self, rest: Rest, release: Release) {
        let n = number(rest.ip);
        self.rested.remove(n);
        self.passed_over.insert(n);
        self.resting.push(n, rest, release);
    }

    pub(super) fn wake(&mut self, ip: IpAddr) -> Option<Rest> {
        let n = number(ip);
        let sleeper = self.resting.remove(n)?;
        self.push_rested(n, sleeper.release);
        Some(sleeper.rest)
    }

    pub(super) fn block(&mut self, ip: IpAddr, why: String, check: u64) -> bool {
        self.resting.block(number(ip), why, check)
    }

    pub(super) fn set_clock_back(&mut self, now_ms: u64) {
        set_clock_back(&mut self.resting, &mut self.rested, now_ms);
    }

    fn push_rested(&mut self, n: u128, release: Release) {
        if let Some(fresh) = self.rested.push(n, release, RESTED_MAX) {
            self.passed_over.remove(fresh);
        }
    }
}

#[cfg(test)]
impl FamilyPool {
    pub(super) fn kept_back(&self) -> (usize, usize) {
        let passed_over = match &self.passed_over {
            AddressSet::V4(set) => usize::try_from(set.len()).unwrap_or(usize::MAX),
            AddressSet::V6(set) => set.len(),
        };
        (self.rested.len(), passed_over)
    }
}
