use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use imbl::OrdMap;

use super::atoms::{Atom, AtomId, Delta};
use crate::names::NamePattern;

const FIRST: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
const LAST: IpAddr = IpAddr::V6(Ipv6Addr::from_bits(u128::MAX));

#[derive(Debug, Clone, Default)]
pub(super) struct Names {
    addresses: OrdMap<Arc<str>, Arc<BTreeSet<IpAddr>>>,
    patterns: OrdMap<AtomId, NamePattern>,
    /// Number of names per pattern and address.
    matched: OrdMap<(AtomId, IpAddr), usize>,
    touched: BTreeSet<(AtomId, IpAddr)>,
}

#[derive(Debug)]
pub(super) struct Named {
    pub(super) atom: AtomId,
    pub(super) address: IpAddr,
    pub(super) matches: bool,
}

impl Names {
    pub(super) fn set(&mut self, name: Arc<str>, addresses: BTreeSet<IpAddr>) {
        let patterns = self.patterns.iter().filter(|(_, pattern)| pattern.matches(&name));
        let patterns: Vec<AtomId> = patterns.map(|(id, _)| *id).collect();
        let new = Arc::new(addresses);
        let old =
            if new.is_empty() { self.addresses.remove(&name) } else { self.addresses.insert(name, Arc::clone(&new)) };
        let old = old.unwrap_or_default();
        for id in patterns {
            new.difference(&old).for_each(|address| self.join(id, *address));
            old.difference(&new).for_each(|address| self.leave(id, *address));
        }
    }

    fn join(&mut self, id: AtomId, address: IpAddr) {
        *self.matched.entry((id, address)).or_default() += 1;
        self.touched.insert((id, address));
    }

    fn leave(&mut self, id: AtomId, address: IpAddr) {
        match self.matched.get_mut(&(id, address)) {
            Some(names) if *names > 1 => *names -= 1,
            _ => drop(self.matched.remove(&(id, address))),
        }
        self.touched.insert((id, address));
    }

    pub(super) fn settle(&mut self, delta: &Delta) -> Vec<Named> {
        for id in delta.dropped.keys().filter(|id| self.patterns.contains_key(*id)).collect::<Vec<_>>() {
            self.patterns.remove(id);
            for key in self.matched_by(*id).collect::<Vec<_>>() {
                self.matched.remove(&key);
                self.touched.insert(key);
            }
        }
        for (id, atom) in &delta.added {
            let Atom::Names(pattern) = &**atom else { continue };
            self.patterns.insert(*id, pattern.clone());
            let known = self.addresses.clone();
            let matching: Vec<_> = if pattern.is_name() {
                known.get(pattern.as_str()).into_iter().collect()
            } else {
                known.iter().filter(|(name, _)| pattern.matches(name)).map(|(_, addresses)| addresses).collect()
            };
            matching.into_iter().flat_map(|addresses| &**addresses).for_each(|address| self.join(*id, *address));
        }
        let touched = std::mem::take(&mut self.touched).into_iter();
        let named = |(atom, address)| Named { atom, address, matches: self.matched.contains_key(&(atom, address)) };
        touched.map(named).collect()
    }

    pub(super) fn is_pattern(&self, id: AtomId) -> bool {
        self.patterns.contains_key(&id)
    }

    /// 0 if the pattern is inactive.
    pub(super) fn addresses_of(&self, id: AtomId) -> usize {
        self.matched_by(id).count()
    }

    fn matched_by(&self, id: AtomId) -> impl Iterator<Item = (AtomId, IpAddr)> {
        self.matched.range((id, FIRST)..=(id, LAST)).map(|(key, _)| *key)
    }
}
