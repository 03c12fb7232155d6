//! Atoms: the distinct peers of rules.

use std::{collections::BTreeMap, collections::BTreeSet, sync::Arc};

use imbl::{OrdMap, OrdSet};
use ipnet::IpNet;

use crate::{
    model::{Endpoint, Entity, Peer, Protocol, Selector},
    names::NamePattern,
};

/// Atom number; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct AtomId(u64);

impl AtomId {
    pub(super) const FIRST: Self = Self(0);
    pub(super) const LAST: Self = Self(u64::MAX);
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Atom {
    /// Selected for any values of unknown labels.
    Selector(Selector),
    /// Selected for some values of unknown labels.
    MaySelect(Selector),
    /// Exceptions do not match.
    Network { net: IpNet, except: BTreeSet<IpNet> },
    /// Address of a matching name.
    Names(NamePattern),
    /// Not [`Entity::All`], which needs no atom.
    Entity(Entity),
    /// Endpoints that declare the port.
    Declares { protocol: Protocol, name: String, number: u16 },
}

#[derive(Debug, Clone, Copy)]
pub(super) enum OwnerOf<'a> {
    Endpoint(&'a Endpoint),
    Node,
    OtherNode,
    Outside,
}

impl Atom {
    /// `None` for every packet.
    pub(super) fn of(peer: &Peer, denies: bool) -> Option<Self> {
        match peer {
            Peer::Entity(Entity::All) => None,
            Peer::Entity(entity) => Some(Self::Entity(*entity)),
            Peer::Endpoints(selector) if denies && selector.needs_namespace_labels() => {
                Some(Self::MaySelect(selector.clone()))
            }
            Peer::Endpoints(selector) => Some(Self::Selector(selector.clone())),
            Peer::Names(pattern) => Some(Self::Names(pattern.clone())),
            Peer::Network { net, except } => {
                let net = net.trunc();
                // An exception can contain the network, or be disjoint.
                let within = |e: &IpNet| if e.contains(&net) { Some(net) } else { net.contains(e).then(|| e.trunc()) };
                Some(Self::Network { net, except: except.iter().filter_map(within).collect() })
            }
        }
    }

    /// False for networks and names, which match by address.
    pub(super) fn matches(&self, owner: OwnerOf<'_>) -> bool {
        match (self, owner) {
            (Self::Selector(selector), OwnerOf::Endpoint(e)) => selector.selects(&e.labels, e.namespace.as_deref()),
            (Self::MaySelect(selector), OwnerOf::Endpoint(e)) => selector.may_select(&e.labels, e.namespace.as_deref()),
            (Self::Declares { protocol, name, number }, OwnerOf::Endpoint(e)) => {
                e.ports.get(&(*protocol, name.clone())) == Some(number)
            }
            (Self::Entity(Entity::Cluster), OwnerOf::Endpoint(_) | OwnerOf::OtherNode)
            | (Self::Entity(Entity::RemoteNode), OwnerOf::OtherNode)
            | (Self::Entity(Entity::Host), OwnerOf::Node)
            | (Self::Entity(Entity::World), OwnerOf::Outside) => true,
            (Self::Entity(Entity::Health), OwnerOf::Endpoint(e)) => e.health,
            _ => false,
        }
    }

    const fn is_of_addresses(&self) -> bool {
        matches!(self, Self::Network { .. } | Self::Names(_))
    }

    /// Number of longest-prefix rows; [`super::names`] counts the rows of DNS names.
    pub(super) fn networks(&self) -> usize {
        if let Self::Network { except, .. } = self { 1 + except.len() } else { 0 }
    }
}

/// Atoms of rule sets in use are active: they distinguish classes.
#[derive(Debug, Clone, Default)]
pub(super) struct Atoms {
    ids: OrdMap<Arc<Atom>, AtomId>,
    entries: OrdMap<AtomId, Entry>,
    of_owners: OrdSet<AtomId>,
    next: u64,
    /// Counts changed since [`Atoms::settle`].
    touched: BTreeSet<AtomId>,
}

#[derive(Debug, Clone)]
struct Entry {
    atom: Arc<Atom>,
    holders: usize,
    users: usize,
    /// At the last [`Atoms::settle`].
    active: bool,
}

#[derive(Debug, Default)]
pub(super) struct Delta {
    pub(super) added: BTreeMap<AtomId, Arc<Atom>>,
    pub(super) dropped: BTreeMap<AtomId, Arc<Atom>>,
}

impl Atoms {
    /// Valid until the next `settle`, then while held or active.
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

    pub(super) fn hold(&mut self, id: AtomId) {
        self.count(id, |entry| entry.holders += 1);
    }

    pub(super) fn drop(&mut self, id: AtomId) {
        self.count(id, |entry| entry.holders -= 1);
    }

    pub(super) fn activate(&mut self, id: AtomId) {
        self.count(id, |entry| entry.users += 1);
    }

    pub(super) fn deactivate(&mut self, id: AtomId) {
        self.count(id, |entry| entry.users -= 1);
    }

    fn count(&mut self, id: AtomId, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.entries.get_mut(&id) {
            change(entry);
            self.touched.insert(id);
        }
    }

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

    pub(super) fn of_owners(&self) -> impl Iterator<Item = (AtomId, &Atom)> {
        self.of_owners.iter().filter_map(|id| Some((*id, self.get(*id)?)))
    }
}
