//! The node's DNS cache. Times are milliseconds of one clock.
//!
//! An endpoint that receives an address of a name claims it for the TTL, between [`SHORTEST`] and [`LONGEST`]. A later
//! answer does not shorten the claim: clients keep earlier answers. A hostile server displaces no claims of endpoints
//! with fewer claims.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Duration,
};

use imbl::{OrdMap, OrdSet};
use serde::{Deserialize, Serialize};

use crate::Member;

/// Before they connect, C libraries query both families, with two attempts of 5 s (resolv.conf(5)).
pub const SHORTEST: Duration = Duration::from_secs(15);
/// RFC 8767, section 4: days to weeks.
pub const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);
/// Maximum addresses of all names.
pub const MAX_ADDRESSES: usize = 10_000;
/// Maximum claims; members can share addresses.
pub const MAX_CLAIMS: usize = 50_000;
/// Maximum claims per member.
pub const MAX_OF_MEMBER: usize = 1_000;
/// Maximum claims per member and name.
pub const MAX_OF_NAME: usize = 100;
/// 255 bytes, each as four ([`crate::wire::Question::name`]).
const MAX_TEXT: usize = 1020;
const VERSION: u32 = 2;

/// Names whose addresses changed.
pub type Changed = BTreeSet<Arc<str>>;

/// Addresses of names, by claim. Clones are cheap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cache {
    /// End per claim.
    claims: OrdMap<Claim, u64>,
    by_end: OrdSet<(u64, Claim)>,
    by_member: OrdSet<(Member, u64, Claim)>,
    counts: OrdMap<Member, usize>,
    addresses: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    name: Arc<str>,
    address: IpAddr,
    member: Member,
}

impl Claim {
    fn first(name: Arc<str>, address: Option<IpAddr>) -> Self {
        let address = address.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        Self { name, address, member: Member { id: 0, epoch: 0 } }
    }

    fn is_on_the_same(&self, other: &Self) -> bool {
        (&self.name, self.address) == (&other.name, other.address)
    }
}

/// Why a JSON value is no cache.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// Invalid structure.
    #[error("cannot read the known names: {0}; without them containers must ask again")]
    Malformed(#[from] serde_json::Error),
    /// Unsupported version.
    #[error("cannot read the known names: version {0}, not {VERSION}; without them containers must ask again")]
    Version(u32),
    /// Invalid name.
    #[error(
        "cannot read the known names: one is empty or longer than {MAX_TEXT} bytes; without them containers must ask again"
    )]
    Name,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Snapshot {
    version: u32,
    names: BTreeMap<Arc<str>, Vec<Claims>>,
}

type Claims = (u16, u64, BTreeMap<IpAddr, u64>);

impl Cache {
    /// Records an answer to a member (name in lower case, no trailing dot). Of the name, keeps the latest
    /// [`MAX_OF_NAME`] ends. Without room, removes the claims that end first, even in use: the member's beyond
    /// [`MAX_OF_MEMBER`], else of the member with the most.
    pub fn learn(
        &mut self,
        member: Member,
        name: &str,
        addresses: impl IntoIterator<Item = (IpAddr, Duration)>,
        now: u64,
    ) -> Changed {
        let mut ends = BTreeMap::new();
        for (address, ttl) in addresses {
            let end = after(now, ttl.clamp(SHORTEST, LONGEST));
            let known = ends.entry(address).or_insert(end);
            *known = end.max(*known);
        }
        self.claim(member, name, ends)
    }

    fn claim(&mut self, member: Member, name: &str, mut ends: BTreeMap<IpAddr, u64>) -> Changed {
        while ends.len() > MAX_OF_NAME {
            let first = ends.iter().map(|(address, end)| (*end, *address)).min();
            first.map(|(_, address)| ends.remove(&address));
        }
        let mut changed = Changed::new();
        let name = self.of_name(name).next().map_or_else(|| Arc::from(name), |(claim, _)| Arc::clone(&claim.name));
        for (&address, &end) in &ends {
            if self.put(Claim { name: Arc::clone(&name), address, member }, end) {
                changed.insert(Arc::clone(&name));
            }
        }
        let is_earlier =
            |claim: &&Claim| claim.member != member || claim.name != name || !ends.contains_key(&claim.address);
        let on_name: Vec<_> = self.of_member(member).filter(|claim| claim.name == name).cloned().collect();
        let excess = on_name.len().saturating_sub(MAX_OF_NAME);
        let mut gone: Vec<_> = on_name.iter().filter(is_earlier).take(excess).cloned().collect();
        loop {
            for claim in gone.drain(..) {
                if self.remove(&claim) {
                    changed.insert(claim.name);
                }
            }
            let own = self.counts.get(&member).copied().unwrap_or_default();
            let heaviest = if own > MAX_OF_MEMBER {
                Some(member)
            } else if self.addresses > MAX_ADDRESSES || self.claims.len() > MAX_CLAIMS {
                let earlier = |of: &Member, count: usize| count - if *of == member { ends.len().min(count) } else { 0 };
                self.counts.iter().max_by_key(|(of, count)| earlier(of, **count)).map(|(of, _)| *of)
            } else {
                None
            };
            gone.extend(heaviest.and_then(|of| self.of_member(of).find(is_earlier)).cloned());
            if gone.is_empty() {
                return changed;
            }
        }
    }

    /// Whether the name gains the address.
    fn put(&mut self, claim: Claim, end: u64) -> bool {
        let before = self.claims.get(&claim).copied();
        let end = before.map_or(end, |before| before.max(end));
        let is_new = self.on(&claim).next().is_none();
        match before {
            Some(before) => {
                self.by_end.remove(&(before, claim.clone()));
                self.by_member.remove(&(claim.member, before, claim.clone()));
            }
            None => *self.counts.entry(claim.member).or_default() += 1,
        }
        self.by_end.insert((end, claim.clone()));
        self.by_member.insert((claim.member, end, claim.clone()));
        self.claims.insert(claim, end);
        self.addresses += usize::from(is_new);
        is_new
    }

    /// Whether the name loses the address.
    fn remove(&mut self, claim: &Claim) -> bool {
        let Some(end) = self.claims.remove(claim) else { return false };
        self.by_end.remove(&(end, claim.clone()));
        self.by_member.remove(&(claim.member, end, claim.clone()));
        let left = self.counts.remove(&claim.member).unwrap_or_default().saturating_sub(1);
        if left > 0 {
            self.counts.insert(claim.member, left);
        }
        let is_gone = self.on(claim).next().is_none();
        self.addresses = self.addresses.saturating_sub(usize::from(is_gone));
        is_gone
    }

    /// Removes expired claims. An address's last claim stays while its use is unknown (`None`), and gains [`SHORTEST`]
    /// while in use.
    pub fn expire(&mut self, now: u64, in_use: impl Fn(IpAddr) -> Option<bool>) -> Changed {
        let mut changed = Changed::new();
        let over: Vec<_> =
            self.by_end.iter().take_while(|(end, _)| *end <= now).map(|(_, claim)| claim.clone()).collect();
        for claim in over {
            let is_last = self.on(&claim).nth(1).is_none();
            match in_use(claim.address).filter(|_| is_last) {
                Some(true) => drop(self.put(claim, after(now, SHORTEST))),
                None if is_last => {}
                _ => {
                    if self.remove(&claim) {
                        changed.insert(claim.name);
                    }
                }
            }
        }
        changed
    }

    fn on<'a>(&'a self, claim: &'a Claim) -> impl Iterator<Item = &'a Claim> {
        let first = Claim::first(Arc::clone(&claim.name), Some(claim.address));
        self.claims.range(first..).map(|(next, _)| next).take_while(|next| next.is_on_the_same(claim))
    }

    fn of_name<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a Claim, u64)> {
        let first = Claim::first(name.into(), None);
        self.claims.range(first..).map(|(claim, end)| (claim, *end)).take_while(move |(claim, _)| *claim.name == *name)
    }

    /// By end.
    fn of_member(&self, member: Member) -> impl Iterator<Item = &Claim> {
        let first = (member, 0, Claim::first("".into(), None));
        self.by_member.range(first..).take_while(move |(of, ..)| *of == member).map(|(.., claim)| claim)
    }

    /// The name's addresses with ends.
    pub fn addresses_of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (IpAddr, u64)> {
        each_address(self.of_name(name)).map(|(_, address, end)| (address, end))
    }

    /// All names and addresses, with ends.
    pub fn iter(&self) -> impl Iterator<Item = (&str, IpAddr, u64)> {
        each_address(self.claims.iter().map(|(claim, end)| (claim, *end)))
    }

    /// Addresses of expired claims, oldest first; may repeat.
    pub fn over(&self, now: u64) -> impl Iterator<Item = IpAddr> + '_ {
        self.by_end.iter().take_while(move |(end, _)| *end <= now).map(|(_, claim)| claim.address)
    }

    /// Number of addresses, per name.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.addresses
    }

    /// Whether the cache is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.addresses == 0
    }

    /// Snapshot for [`Cache::from_json`].
    ///
    /// # Errors
    /// None expected.
    pub fn to_json(&self) -> Result<serde_json::Value, serde_json::Error> {
        let mut names = BTreeMap::<_, BTreeMap<Member, BTreeMap<IpAddr, u64>>>::new();
        for (Claim { name, address, member }, end) in &self.claims {
            names.entry(Arc::clone(name)).or_default().entry(*member).or_default().insert(*address, *end);
        }
        let of = |(name, members): (_, BTreeMap<Member, _>)| {
            (name, members.into_iter().map(|(member, ends)| (member.id, member.epoch, ends)).collect())
        };
        serde_json::to_value(Snapshot { version: VERSION, names: names.into_iter().map(of).collect() })
    }

    /// Restores a snapshot, with ends up to `now` plus [`LONGEST`]. Expired claims stay until [`Cache::expire`]:
    /// connections can use them.
    ///
    /// # Errors
    /// Another version, or damage.
    pub fn from_json(value: serde_json::Value, now: u64) -> Result<Self, SnapshotError> {
        let version = value.get("version").and_then(serde_json::Value::as_u64);
        if let Some(version) = version.and_then(|version| u32::try_from(version).ok()).filter(|v| *v != VERSION) {
            return Err(SnapshotError::Version(version));
        }
        let snapshot = Snapshot::deserialize(value)?;
        let mut cache = Self::default();
        let last = after(now, LONGEST);
        for (name, members) in snapshot.names {
            if name.is_empty() || name.len() > MAX_TEXT {
                return Err(SnapshotError::Name);
            }
            for (id, epoch, mut ends) in members {
                ends.values_mut().for_each(|end| *end = last.min(*end));
                cache.claim(Member { id, epoch }, &name, ends);
            }
        }
        Ok(cache)
    }
}

fn each_address<'a>(claims: impl Iterator<Item = (&'a Claim, u64)>) -> impl Iterator<Item = (&'a str, IpAddr, u64)> {
    let mut claims = claims.peekable();
    std::iter::from_fn(move || {
        let (first, mut end) = claims.next()?;
        while let Some((_, more)) = claims.next_if(|(next, _)| next.is_on_the_same(first)) {
            end = end.max(more);
        }
        Some((&*first.name, first.address, end))
    })
}

fn after(now: u64, life: Duration) -> u64 {
    now.saturating_add(u64::try_from(life.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests;
