//! Atoms: the peers of rules, each once, and what they match.

use std::{collections::BTreeMap, collections::BTreeSet, sync::Arc};

use imbl::{OrdMap, OrdSet};
use ipnet::IpNet;

use crate::{
    model::{Endpoint, Entity, Peer, Protocol, Selector},
    names::NamePattern,
};

/// An atom. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct AtomId(u64);

impl AtomId {
    pub(super) const FIRST: Self = Self(0);
    pub(super) const LAST: Self = Self(u64::MAX);
}

/// A predicate over the other end of a packet.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Atom {
    /// An endpoint that the selector selects.
    Selector(Selector),
    /// An address of the network and of none of the exceptions.
    Network { net: IpNet, except: BTreeSet<IpNet> },
    /// An address of a name that matches.
    Names(NamePattern),
    /// Anything but [`Entity::All`], which is no atom: it matches every packet.
    Entity(Entity),
    /// An endpoint that declares the port.
    Declares { protocol: Protocol, name: String, number: u16 },
}

/// Whose an address is.
#[derive(Debug, Clone, Copy)]
pub(super) enum OwnerOf<'a> {
    Endpoint(&'a Endpoint),
    Node,
    Outside,
}

impl Atom {
    /// The atom of a peer; `None` for the peer that matches every packet.
    pub(super) fn of(peer: &Peer) -> Option<Self> {
        match peer {
            Peer::Entity(Entity::All) => None,
            Peer::Entity(entity) => Some(Self::Entity(*entity)),
            Peer::Endpoints(selector) => Some(Self::Selector(selector.clone())),
            Peer::Names(pattern) => Some(Self::Names(pattern.clone())),
            Peer::Network { net, except } => {
                let net = net.trunc();
                // An exception around the network leaves nothing of it; one beside it means nothing.
                let within = |e: &IpNet| if e.contains(&net) { Some(net) } else { net.contains(e).then(|| e.trunc()) };
                Some(Self::Network { net, except: except.iter().filter_map(within).collect() })
            }
        }
    }

    /// Whether it matches an address for what its owner is. Networks and names match for the address: see [`super::networks`].
    pub(super) fn matches(&self, owner: OwnerOf<'_>) -> bool {
        match (self, owner) {
            (Self::Selector(selector), OwnerOf::Endpoint(e)) => selector.selects(&e.labels, e.namespace.as_ref()),
            (Self::Declares { protocol, name, number }, OwnerOf::Endpoint(e)) => {
                e.ports.get(&(*protocol, name.clone())) == Some(number)
            }
            (Self::Entity(Entity::Cluster), OwnerOf::Endpoint(_))
            | (Self::Entity(Entity::Host), OwnerOf::Node)
            | (Self::Entity(Entity::World), OwnerOf::Outside) => true,
            (Self::Entity(Entity::Health), OwnerOf::Endpoint(e)) => e.health,
            _ => false,
        }
    }

    /// Whether it matches for the address, whoever owns it.
    const fn is_of_addresses(&self) -> bool {
        matches!(self, Self::Network { .. } | Self::Names(_))
    }

    /// Longest-prefix rows that it needs; of names, those of their addresses come to it: see [`super::names`].
    pub(super) fn networks(&self) -> usize {
        if let Self::Network { except, .. } = self { 1 + except.len() } else { 0 }
    }
}

/// The atoms of all rules. Those of rule sets in use are active: they tell peer classes apart.
#[derive(Debug, Clone, Default)]
pub(super) struct Atoms {
    ids: OrdMap<Arc<Atom>, AtomId>,
    entries: OrdMap<AtomId, Entry>,
    /// The active atoms that match for the owner of an address.
    of_owners: OrdSet<AtomId>,
    next: u64,
    /// Atoms whose counts changed since the last [`Atoms::settle`].
    touched: BTreeSet<AtomId>,
}

#[derive(Debug, Clone)]
struct Entry {
    atom: Arc<Atom>,
    /// Rules that have it.
    holders: usize,
    /// Rule sets in use that have it.
    users: usize,
    /// Was active at the last [`Atoms::settle`].
    active: bool,
}

/// Atoms that became active or stopped being so.
#[derive(Debug, Default)]
pub(super) struct Delta {
    pub(super) added: BTreeMap<AtomId, Arc<Atom>>,
    pub(super) dropped: BTreeMap<AtomId, Arc<Atom>>,
}

impl Atoms {
    /// The identifier of an atom, kept until the next `settle`, and after it while the atom is held or active.
    pub(super) fn intern(&mut self, atom: Atom) -> AtomId {
        let id = self.ids.get(&atom).copied().unwrap_or_else(|| {
            let (id, atom) = (AtomId(self.next), Arc::new(atom));
            self.next += 1;
            self.ids.insert(Arc::clone(&atom), id);
            self.entries.insert(id, Entry { atom, holders: 0, users: 0, active: false });
            id
        });
        self.touched.insert(id);
        id
    }

    /// A rule has the atom.
    pub(super) fn hold(&mut self, id: AtomId) {
        self.count(id, |entry| entry.holders += 1);
    }

    /// A rule that has it is gone.
    pub(super) fn drop(&mut self, id: AtomId) {
        self.count(id, |entry| entry.holders -= 1);
    }

    /// A rule set in use has the atom.
    pub(super) fn activate(&mut self, id: AtomId) {
        self.count(id, |entry| entry.users += 1);
    }

    /// A rule set that has it is in use no longer.
    pub(super) fn deactivate(&mut self, id: AtomId) {
        self.count(id, |entry| entry.users -= 1);
    }

    fn count(&mut self, id: AtomId, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.entries.get_mut(&id) {
            change(entry);
            self.touched.insert(id);
        }
    }

    /// Forgets atoms that nothing holds, and tells which atoms became active or stopped being so.
    pub(super) fn settle(&mut self) -> Delta {
        let mut delta = Delta::default();
        for id in std::mem::take(&mut self.touched) {
            let Some(entry) = self.entries.get_mut(&id) else { continue };
            let (before, after) = (entry.active, entry.users > 0);
            entry.active = after;
            let atom = Arc::clone(&entry.atom);
            if entry.holders + entry.users == 0 {
                self.ids.remove(&atom);
                self.entries.remove(&id);
            }
            match (before, after) {
                (false, true) => {
                    if !atom.is_of_addresses() {
                        self.of_owners.insert(id);
                    }
                    delta.added.insert(id, atom);
                }
                (true, false) => {
                    self.of_owners.remove(&id);
                    delta.dropped.insert(id, atom);
                }
                _ => {}
            }
        }
        delta
    }

    pub(super) fn get(&self, id: AtomId) -> Option<&Atom> {
        self.entries.get(&id).map(|entry| &*entry.atom)
    }

    /// The active atoms that match addresses for what their owner is, in order.
    pub(super) fn of_owners(&self) -> impl Iterator<Item = (AtomId, &Atom)> {
        self.of_owners.iter().filter_map(|id| Some((*id, self.get(*id)?)))
    }
}
