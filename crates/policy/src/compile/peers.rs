//! Address rows and their classes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use imbl::OrdMap;
use ipnet::IpNet;

use super::{
    Identity, Ipcache, Known, PeerClass,
    atoms::{AtomId, Atoms, Delta},
    classes::{Changed, Classes, Signature},
    ids::Ids,
    kinds::{Kinds, Owner, Touched},
    names::Names,
    networks::Boundaries,
};

#[derive(Debug, Clone)]
pub(super) struct Peers {
    boundaries: Boundaries,
    pods: BTreeSet<IpNet>,
    pub(super) names: Names,
    /// Sorted; without networks and names.
    owners: OrdMap<Owner, Signature>,
    pub(super) classes: Classes,
}

impl Peers {
    pub(super) fn new(ids: Ids) -> Self {
        Self {
            boundaries: Boundaries::new(&[]),
            pods: BTreeSet::new(),
            names: Names::default(),
            owners: OrdMap::new(),
            classes: Classes::new(ids),
        }
    }

    pub(super) fn with_rows_of(self, nets: &[IpNet]) -> Self {
        Self { boundaries: Boundaries::new(nets), ..self }
    }

    pub(super) fn set_pods(&mut self, pods: BTreeSet<IpNet>) {
        self.pods.extend(self.boundaries.set_pods(pods));
    }

    pub(super) fn settle(&mut self) {
        self.classes.settle();
    }

    pub(super) fn update(
        &mut self,
        delta: &Delta,
        touched: &Touched,
        atoms: &Atoms,
        kinds: &Kinds,
        ipcache: &mut Ipcache,
    ) -> Changed {
        let first = self.classes.is_empty();
        let mut nets: BTreeSet<IpNet> = touched.addresses.iter().map(|address| IpNet::from(*address)).collect();
        let pods = std::mem::take(&mut self.pods);
        let moved = self.boundaries.update(delta, &self.names.settle(delta), &pods);
        nets.extend(moved.nets);
        nets.extend(pods.into_iter().flat_map(|net| self.boundaries.within(net)));
        // At first, every address is touched.
        let within = moved.within.into_iter().filter(|_| !first);
        nets.extend(within.flat_map(|net| kinds.addresses_in(net)).map(IpNet::from));
        for owner in self.match_owners(first, delta, touched, atoms, kinds) {
            match owner {
                Owner::Outside => nets.extend(self.boundaries.nets()),
                _ => nets.extend(kinds.addresses_of(owner).into_iter().map(IpNet::from)),
            }
        }

        let mut leaving: BTreeMap<PeerClass, usize> = BTreeMap::new();
        let mut wanted = BTreeSet::new();
        let mut rows = Vec::new();
        for net in nets {
            if let Some(known) = ipcache.get(&net) {
                *leaving.entry(known.class).or_default() += 1;
            }
            let row = self.row(net, kinds);
            wanted.extend(row.iter().map(|(_, signature)| Arc::clone(signature)));
            rows.push((net, row));
        }
        let left: Vec<PeerClass> = leaving
            .into_iter()
            .filter(|(class, rows)| ipcache.users(*class) == *rows)
            .map(|(class, _)| class)
            .collect();
        let changed = self.classes.change(&wanted, &left, delta);
        for (net, row) in rows {
            let class = |signature: &Signature| self.classes.class(signature).unwrap_or(PeerClass::ANY);
            match row.map(|(identity, signature)| Known { identity, class: class(&signature) }) {
                Some(known) if ipcache.get(&net) == Some(&known) => {}
                Some(known) => drop(ipcache.insert(net, known)),
                None => drop(ipcache.remove(&net)),
            }
        }
        changed
    }

    /// `None` if the network needs no row.
    fn row(&self, net: IpNet, kinds: &Kinds) -> Option<(Identity, Signature)> {
        let owner = if net.prefix_len() == net.max_prefix_len() { kinds.owner(net.addr()) } else { Owner::Outside };
        if owner == Owner::Outside && !self.boundaries.contains(&net) {
            return None;
        }
        let is_of_pods = owner == Owner::Outside && self.boundaries.is_of_pods(&net);
        let identity = if is_of_pods { Identity::ELSEWHERE } else { kinds.known(owner)?.0 };
        let mut networks = self.boundaries.matching(net);
        if (owner != Owner::Outside || is_of_pods) && networks.iter().any(|atom| self.names.is_pattern(*atom)) {
            networks = networks.iter().copied().filter(|atom| !self.names.is_pattern(*atom)).collect();
        }
        // A container elsewhere is not the world.
        let Some(own) = self.owners.get(&owner).filter(|own| !own.is_empty() && !is_of_pods) else {
            return Some((identity, networks));
        };
        if networks.is_empty() {
            return Some((identity, Arc::clone(own)));
        }
        let mut all: Vec<AtomId> = own.iter().chain(&*networks).copied().collect();
        all.sort_unstable();
        Some((identity, all.into()))
    }

    /// Returns owners with other matches, without new kinds: their addresses are all touched.
    fn match_owners(
        &mut self,
        first: bool,
        delta: &Delta,
        touched: &Touched,
        atoms: &Atoms,
        kinds: &Kinds,
    ) -> BTreeSet<Owner> {
        for kind in &touched.gone {
            self.owners.remove(&Owner::Endpoint(*kind));
        }
        let mut changes: BTreeMap<Owner, BTreeSet<AtomId>> = BTreeMap::new();
        for (id, atom) in delta.added.iter().chain(&delta.dropped) {
            for owner in kinds.matched_by(atom) {
                changes.entry(owner).or_default().insert(*id);
            }
        }
        let mut changed = BTreeSet::new();
        for (owner, ids) in changes {
            let Some(own) = self.owners.get_mut(&owner) else { continue };
            let stay = own.iter().filter(|id| !ids.contains(id));
            let added = ids.iter().filter(|id| delta.added.contains_key(id));
            let mut atoms: Vec<AtomId> = stay.chain(added).copied().collect();
            atoms.sort_unstable();
            *own = atoms.into();
            changed.insert(owner);
        }
        let new = touched.new.iter().map(|kind| Owner::Endpoint(*kind));
        for owner in new.chain([Owner::Node, Owner::OtherNode, Owner::Outside].into_iter().filter(|_| first)) {
            if let Some((_, known)) = kinds.known(owner) {
                let matching = atoms.of_owners().filter(|(_, atom)| atom.matches(known)).map(|(id, _)| id).collect();
                self.owners.insert(owner, matching);
                if !matches!(owner, Owner::Endpoint(_)) {
                    changed.insert(owner);
                }
            }
        }
        changed
    }
}
