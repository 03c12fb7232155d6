//! The addresses of one family in one pool: which are taken, which comes next.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use roaring::RoaringBitmap;

use super::Family;

/// How many released addresses are kept back at least before one is given out again, where the pool is that large.
/// Bounds the memory that releases cost in an IPv6 pool, which never runs out of fresh ones.
const RESTING_MAX: usize = 4096;

/// Addresses as numbers: IPv4 in the low 32 bits.
fn number(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => u128::from(ip.to_bits()),
        IpAddr::V6(ip) => ip.to_bits(),
    }
}

/// A set of addresses of one family.
#[derive(Debug, Clone)]
enum AddressSet {
    /// Dense pools: a bitmap costs bits, not entries.
    V4(RoaringBitmap),
    /// Sparse by nature: a /64 cannot be enumerated.
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

    /// Lowest number from `from` to `to` (both included) that is not in the set. Costs as much as there are runs of
    /// taken addresses (IPv4) or taken addresses (IPv6) before it.
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
                    // Past the last address there is: the comparison with `to` below says none.
                    candidate = candidate.checked_add(1)?;
                }
                candidate
            }
        };
        (candidate <= to).then_some(candidate)
    }
}

/// The usable addresses of a CIDR, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    first: u128,
    last: u128,
}

impl Range {
    /// Leaves out the network and broadcast addresses of IPv4, and the subnet-router anycast address of IPv6 (RFC 4291
    /// section 2.6.1). Point-to-point prefixes (/31 by RFC 3021, /127 by RFC 6164) have neither.
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

    fn contains(&self, n: u128) -> bool {
        (self.first..=self.last).contains(&n)
    }
}

/// Released addresses that are not given out while there are fresh ones, oldest release first.
#[derive(Debug, Clone, Default)]
struct Resting {
    by_release: BTreeMap<u64, u128>,
    release_of: HashMap<u128, u64>,
    releases: u64,
}

impl Resting {
    /// Adds an address; returns the one that has rested longest when there are too many.
    fn push(&mut self, n: u128) -> Option<u128> {
        self.releases += 1;
        self.by_release.insert(self.releases, n);
        self.release_of.insert(n, self.releases);
        if self.by_release.len() <= RESTING_MAX {
            return None;
        }
        let (_, oldest) = self.by_release.pop_first()?;
        self.release_of.remove(&oldest);
        Some(oldest)
    }

    fn remove(&mut self, n: u128) -> bool {
        match self.release_of.remove(&n) {
            Some(release) => self.by_release.remove(&release).is_some(),
            None => false,
        }
    }

    fn oldest(&self) -> Option<u128> {
        self.by_release.first_key_value().map(|(_, n)| *n)
    }
}

/// One family of a pool.
#[derive(Debug, Clone)]
pub(super) struct FamilyPool {
    family: Family,
    ranges: Vec<Range>,
    /// Given out or resting: what next-fit passes over.
    passed_over: AddressSet,
    resting: Resting,
    /// Where next-fit goes on: a range, and a number in it.
    cursor: (usize, u128),
    used: u64,
}

impl FamilyPool {
    /// `None` when none of the CIDRs is of this family.
    pub(super) fn new(family: Family, cidrs: &[IpNet]) -> Option<Self> {
        let ranges: Vec<Range> = cidrs.iter().filter(|c| Family::of(c.addr()) == family).map(Range::of).collect();
        let cursor = (0, ranges.first()?.first);
        let passed_over = match family {
            Family::Ipv4 => AddressSet::V4(RoaringBitmap::new()),
            Family::Ipv6 => AddressSet::V6(BTreeSet::new()),
        };
        Some(Self { family, ranges, passed_over, resting: Resting::default(), cursor, used: 0 })
    }

    fn address(&self, n: u128) -> Option<IpAddr> {
        match self.family {
            Family::Ipv4 => u32::try_from(n).ok().map(|n| IpAddr::V4(Ipv4Addr::from_bits(n))),
            Family::Ipv6 => Some(IpAddr::V6(Ipv6Addr::from_bits(n))),
        }
    }

    /// First usable address of the first CIDR.
    pub(super) fn first(&self) -> Option<IpAddr> {
        self.ranges.first().and_then(|r| self.address(r.first))
    }

    /// True when the address is one that this pool gives out, taken or not.
    pub(super) fn gives_out(&self, ip: IpAddr) -> bool {
        Family::of(ip) == self.family && self.ranges.iter().any(|r| r.contains(number(ip)))
    }

    /// Addresses given out.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// Addresses there are, at most the greatest `u64`.
    pub(super) fn total(&self) -> u64 {
        let total = self.ranges.iter().fold(0u128, |sum, r| sum.saturating_add((r.last - r.first).saturating_add(1)));
        u64::try_from(total).unwrap_or(u64::MAX)
    }

    /// The address that comes next, not taken yet: a fresh one from the cursor on and around, else the one that was
    /// released longest ago.
    pub(super) fn next_free(&self) -> Option<IpAddr> {
        self.next_fresh().or_else(|| self.resting.oldest()).and_then(|n| self.address(n))
    }

    fn next_fresh(&self) -> Option<u128> {
        let (at, from) = self.cursor;
        let current = self.ranges.get(at)?;
        let others = self.ranges.iter().skip(at + 1).chain(self.ranges.iter().take(at));
        self.passed_over
            .first_absent(from, current.last)
            .or_else(|| others.into_iter().find_map(|r| self.passed_over.first_absent(r.first, r.last)))
            .or_else(|| self.passed_over.first_absent(current.first, current.last))
    }

    /// Takes an address, whether it was chosen or named. One that is taken already stays so.
    pub(super) fn take(&mut self, ip: IpAddr) {
        let n = number(ip);
        let rested = self.resting.remove(n);
        if !self.passed_over.insert(n) && !rested {
            return;
        }
        self.used += 1;
        if let Some(at) = self.ranges.iter().position(|r| r.contains(n)) {
            // At the end of a range the search finds nothing there and goes on with the next.
            self.cursor = (at, n.saturating_add(1));
        }
    }

    /// Lets an address rest; it must be taken.
    pub(super) fn release(&mut self, ip: IpAddr) {
        self.used = self.used.saturating_sub(1);
        if let Some(rested) = self.resting.push(number(ip)) {
            self.passed_over.remove(rested);
        }
    }
}

#[cfg(test)]
impl FamilyPool {
    /// Addresses that rest, and addresses that next-fit passes over.
    pub(super) fn kept_back(&self) -> (usize, usize) {
        let passed_over = match &self.passed_over {
            AddressSet::V4(set) => usize::try_from(set.len()).unwrap_or(usize::MAX),
            AddressSet::V6(set) => set.len(),
        };
        (self.resting.by_release.len(), passed_over)
    }
}
