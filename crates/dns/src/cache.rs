//! What the node knows of names: their addresses, each with its end. Pure: every time is given in, as Unix time in milliseconds.
//!
//! An address of a name lives from the answer that gave it for as long as that answer says, but at least [`SHORTEST`] and at most
//! [`LONGEST`]. A later answer without the address does not end it, and no answer shortens its life, because clients keep what they were told.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};

/// Shortest life of an address, whatever its TTL is. The C library of a client asks for both families, gives each of two attempts 5 s
/// (resolv.conf(5)) and connects when both are answered; until then what came first must stay.
pub const SHORTEST: Duration = Duration::from_secs(15);
/// Longest life of an address, whatever its TTL is (RFC 8767, section 4: a cap of days to weeks).
pub const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);
/// Addresses of all names.
pub const MAX_ADDRESSES: usize = 10_000;
/// Addresses of one name.
pub const MAX_OF_NAME: usize = 100;
/// Longest text of a name: 255 bytes, each written as four (see [`crate::wire::Question::name`]).
const MAX_TEXT: usize = 1020;
/// Version of what [`Cache::to_json`] writes.
const VERSION: u32 = 1;

/// Names whose addresses are others than before.
pub type Changed = BTreeSet<Arc<str>>;

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cache {
    names: BTreeMap<Arc<str>, BTreeMap<IpAddr, u64>>,
    addresses: BTreeMap<IpAddr, BTreeSet<Arc<str>>>,
    /// The same once more, by end.
    ends: BTreeSet<(u64, Arc<str>, IpAddr)>,
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
    names: BTreeMap<Arc<str>, BTreeMap<IpAddr, u64>>,
}

impl Cache {
    /// Takes note of an answer: addresses of a name (lower case, no last dot) and for how long they may be kept. Of more than
    /// [`MAX_OF_NAME`] those that end last are kept. Where there is no room, those of earlier answers go, the ones that end first, also if
    /// connections use them.
    pub fn learn(&mut self, name: &str, addresses: impl IntoIterator<Item = (IpAddr, Duration)>, now: u64) -> Changed {
        let mut ends = BTreeMap::new();
        for (address, ttl) in addresses {
            let end = after(now, ttl.clamp(SHORTEST, LONGEST));
            let known = ends.entry(address).or_insert(end);
            *known = end.max(*known);
        }
        self.insert(name, ends)
    }

    fn insert(&mut self, name: &str, mut ends: BTreeMap<IpAddr, u64>) -> Changed {
        while ends.len() > MAX_OF_NAME {
            let first = ends.iter().map(|(address, end)| (*end, *address)).min();
            first.map(|(_, address)| ends.remove(&address));
        }
        let mut changed = Changed::new();
        if ends.is_empty() {
            return changed;
        }
        let name = self.names.get_key_value(name).map_or_else(|| Arc::from(name), |(name, _)| Arc::clone(name));
        let known = self.names.entry(Arc::clone(&name)).or_default();
        for (&address, &end) in &ends {
            let before = known.get(&address).copied();
            let end = before.map_or(end, |before| before.max(end));
            known.insert(address, end);
            if let Some(before) = before {
                self.ends.remove(&(before, Arc::clone(&name), address));
            } else {
                self.addresses.entry(address).or_default().insert(Arc::clone(&name));
                changed.insert(Arc::clone(&name));
            }
            self.ends.insert((end, Arc::clone(&name), address));
        }
        let excess = known.len().saturating_sub(MAX_OF_NAME);
        let mut earlier: Vec<_> = known.iter().filter(|(address, _)| !ends.contains_key(address)).collect();
        earlier.sort_by_key(|(address, end)| (**end, **address));
        let gone: Vec<_> = earlier.into_iter().take(excess).map(|(address, _)| *address).collect();
        for address in gone {
            self.remove(&name, address);
        }
        while self.ends.len() > MAX_ADDRESSES {
            let of_this_answer = |of: &str, address| *of == *name && ends.contains_key(address);
            let first = self.ends.iter().find(|(_, of, address)| !of_this_answer(of, address)).cloned();
            let Some((_, of, address)) = first else { break };
            self.remove(&of, address);
            changed.insert(of);
        }
        changed
    }

    /// Takes away the addresses whose time is over, but for those that connections use: they have another [`SHORTEST`].
    pub fn expire(&mut self, now: u64, in_use: impl Fn(IpAddr) -> bool) -> Changed {
        let mut changed = Changed::new();
        let over: Vec<_> = self.ends.iter().take_while(|(end, ..)| *end <= now).cloned().collect();
        for (end, name, address) in over {
            if in_use(address) {
                let later = after(now, SHORTEST);
                self.ends.remove(&(end, Arc::clone(&name), address));
                self.ends.insert((later, Arc::clone(&name), address));
                self.names.entry(name).or_default().insert(address, later);
            } else {
                self.remove(&name, address);
                changed.insert(name);
            }
        }
        changed
    }

    fn remove(&mut self, name: &Arc<str>, address: IpAddr) {
        if let Some(known) = self.names.get_mut(name) {
            if let Some(end) = known.remove(&address) {
                self.ends.remove(&(end, Arc::clone(name), address));
            }
            if known.is_empty() {
                self.names.remove(name);
            }
        }
        if let Some(names) = self.addresses.get_mut(&address) {
            names.remove(name);
            if names.is_empty() {
                self.addresses.remove(&address);
            }
        }
    }

    /// The addresses of a name, and when each ends.
    pub fn addresses_of(&self, name: &str) -> impl Iterator<Item = (IpAddr, u64)> + '_ {
        self.names.get(name).into_iter().flatten().map(|(address, end)| (*address, *end))
    }

    /// The names that have an address.
    pub fn names_of(&self, address: IpAddr) -> impl Iterator<Item = &str> {
        self.addresses.get(&address).into_iter().flatten().map(AsRef::as_ref)
    }

    /// Everything, by name and address: name, address, and when that ends.
    pub fn iter(&self) -> impl Iterator<Item = (&str, IpAddr, u64)> {
        self.names.iter().flat_map(|(name, ends)| ends.iter().map(move |(address, end)| (&**name, *address, *end)))
    }

    /// The addresses whose time is over, the longest over first; one that two names have may come twice.
    pub fn over(&self, now: u64) -> impl Iterator<Item = IpAddr> + '_ {
        self.ends.iter().take_while(move |(end, ..)| *end <= now).map(|(_, _, address)| *address)
    }

    /// Addresses of all names together: one that two names have counts twice.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether no name is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// What is known, for a later [`Cache::from_json`].
    ///
    /// # Errors
    ///
    /// None that is known: names and addresses are texts.
    pub fn to_json(&self) -> Result<serde_json::Value, serde_json::Error> {
        serde_json::to_value(Snapshot { version: VERSION, names: self.names.clone() })
    }

    /// What was known. Nothing lives longer from `now` on than [`LONGEST`], whatever the clock was before; what has ended meanwhile is there until
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
        for (name, mut ends) in snapshot.names {
            if name.is_empty() || name.len() > MAX_TEXT {
                return Err(SnapshotError::Name);
            }
            let last = after(now, LONGEST);
            ends.values_mut().for_each(|end| *end = last.min(*end));
            cache.insert(&name, ends);
        }
        Ok(cache)
    }
}

fn after(now: u64, life: Duration) -> u64 {
    now.saturating_add(u64::try_from(life.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests;
