//! What the node knows of names: their addresses, each with its end. Pure: every time is given in, as milliseconds of one clock.
//!
//! An endpoint that is told an address of a name claims it from the answer on for as long as the answer says, but at least [`SHORTEST`] and at
//! most [`LONGEST`]. A later answer without the address does not end the claim, and no answer shortens it, because clients keep what they were
//! told. An address of a name is known as long as one endpoint claims it.
//!
//! Bounds are those of claims, so that an endpoint that fills the cache from a server of its own takes nothing away from the others.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Duration,
};

use imbl::{OrdMap, OrdSet};
use serde::{Deserialize, Serialize};

use crate::Member;

/// Shortest life of a claim, whatever the TTL is. The C library of a client asks for both families, gives each of two attempts 5 s
/// (resolv.conf(5)) and connects when both are answered; until then what came first must stay.
pub const SHORTEST: Duration = Duration::from_secs(15);
/// Longest life of a claim, whatever the TTL is (RFC 8767, section 4: a cap of days to weeks).
pub const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);
/// Addresses of all names.
pub const MAX_ADDRESSES: usize = 10_000;
/// Claims of all members: the same addresses may be claimed by many.
pub const MAX_CLAIMS: usize = 50_000;
/// Claims of one member.
pub const MAX_OF_MEMBER: usize = 1_000;
/// Claims of one member on one name.
pub const MAX_OF_NAME: usize = 100;
/// Longest text of a name: 255 bytes, each written as four (see [`crate::wire::Question::name`]).
const MAX_TEXT: usize = 1020;
/// Version of what [`Cache::to_json`] writes.
const VERSION: u32 = 2;

/// Names whose addresses are others than before.
pub type Changed = BTreeSet<Arc<str>>;

/// See the module. A copy costs nothing: it shares what is equal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cache {
    /// Each claim, and when it ends.
    claims: OrdMap<Claim, u64>,
    /// The same by end, and by member and end.
    by_end: OrdSet<(u64, Claim)>,
    by_member: OrdSet<(Member, u64, Claim)>,
    /// Claims of each member that has any.
    counts: OrdMap<Member, usize>,
    /// Addresses of all names.
    addresses: usize,
}

/// A member was told an address of a name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    name: Arc<str>,
    address: IpAddr,
    member: Member,
}

impl Claim {
    /// What comes before all claims on the name, and on the address where it is given.
    fn first(name: Arc<str>, address: Option<IpAddr>) -> Self {
        let address = address.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        Self { name, address, member: Member { id: 0, epoch: 0 } }
    }

    fn is_on_the_same(&self, other: &Self) -> bool {
        (&self.name, self.address) == (&other.name, other.address)
    }
}

/// Why a JSON value is not what [`Cache::to_json`] wrote.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// Another shape.
    #[error("cannot read the known names: {0}; without them containers must ask again")]
    Malformed(#[from] serde_json::Error),
    /// Another version.
    #[error("cannot read the known names: version {0}, not {VERSION}; without them containers must ask again")]
    Version(u32),
    /// A name that none can be.
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

/// The claims of a member on a name: id, epoch, and the end of each address.
type Claims = (u16, u64, BTreeMap<IpAddr, u64>);

impl Cache {
    /// Takes note of an answer to a member: addresses of a name (lower case, no last dot) and for how long they may be kept. Of more than
    /// [`MAX_OF_NAME`] those that end last are kept. Where there is no room, earlier claims go, also if connections use the address: the
    /// member's own beyond [`MAX_OF_MEMBER`], otherwise those of the member that has most; those that end first.
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

    /// Makes a claim, or a claim longer; whether the address is new to the name.
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

    /// Takes a claim away; whether the name does not have the address any more.
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

    /// Takes away the claims whose time is over. The last one on an address stays where nobody knows whether connections use the address
    /// (`None`), and has another [`SHORTEST`] where they do.
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

    /// The claims on the address of this one, itself included.
    fn on<'a>(&'a self, claim: &'a Claim) -> impl Iterator<Item = &'a Claim> {
        let first = Claim::first(Arc::clone(&claim.name), Some(claim.address));
        self.claims.range(first..).map(|(next, _)| next).take_while(|next| next.is_on_the_same(claim))
    }

    fn of_name<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a Claim, u64)> {
        let first = Claim::first(name.into(), None);
        self.claims.range(first..).map(|(claim, end)| (claim, *end)).take_while(move |(claim, _)| *claim.name == *name)
    }

    /// The claims of a member, by end.
    fn of_member(&self, member: Member) -> impl Iterator<Item = &Claim> {
        let first = (member, 0, Claim::first("".into(), None));
        self.by_member.range(first..).take_while(move |(of, ..)| *of == member).map(|(.., claim)| claim)
    }

    /// The addresses of a name, and when each ends.
    pub fn addresses_of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (IpAddr, u64)> {
        each_address(self.of_name(name)).map(|(_, address, end)| (address, end))
    }

    /// Everything, by name and address: name, address, and when that ends.
    pub fn iter(&self) -> impl Iterator<Item = (&str, IpAddr, u64)> {
        each_address(self.claims.iter().map(|(claim, end)| (claim, *end)))
    }

    /// The addresses of claims whose time is over, the longest over first; one may come more than once.
    pub fn over(&self, now: u64) -> impl Iterator<Item = IpAddr> + '_ {
        self.by_end.iter().take_while(move |(end, _)| *end <= now).map(|(_, claim)| claim.address)
    }

    /// Addresses of all names together: one that two names have counts twice.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.addresses
    }

    /// Whether no name is known.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.addresses == 0
    }

    /// What is known, for a later [`Cache::from_json`].
    ///
    /// # Errors
    ///
    /// None that is known: names and addresses are texts.
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

    /// What was known. Nothing lives longer from `now` on than [`LONGEST`]; what has ended meanwhile is there until
    /// [`Cache::expire`], because connections may use it.
    ///
    /// # Errors
    ///
    /// The value is not of this version, or damaged.
    pub fn from_json(value: serde_json::Value, now: u64) -> Result<Self, SnapshotError> {
        // The version is read first: another one may have another shape.
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

/// Each address once, with the end of the claim that ends last.
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
