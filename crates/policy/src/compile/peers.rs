//! The other ends of packets: longest-prefix rows of addresses, and their classes.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;

use super::{
    Known, PeerClass,
    atoms::{AtomId, Atoms, Delta},
    classes::{self, Signature},
    ids::Ids,
    kinds::{Kinds, Owner},
    networks::Boundaries,
};

/// What the class of a row depends on: whose its addresses are, and the network atoms that match them.
type Pair = (Owner, Arc<[AtomId]>);

/// The rows of addresses.
#[derive(Debug, Clone)]
pub(super) struct Peers {
    /// Networks that have a row in any case.
    own: Arc<[IpNet]>,
    boundaries: Boundaries,
    rows: BTreeMap<IpNet, Pair>,
    /// The class of each pair, and the number of its rows.
    pairs: BTreeMap<Pair, (PeerClass, usize)>,
    /// The active atoms, other than networks, that match each owner, in order.
    owners: BTreeMap<Owner, Vec<AtomId>>,
    classes: BTreeMap<Signature, PeerClass>,
    ids: Ids,
}

/// What changed.
#[derive(Debug, Default)]
pub(super) struct Changed {
    /// Classes that were not there.
    pub(super) new: Vec<(PeerClass, Signature)>,
    /// Classes that are there no longer.
    pub(super) gone: Vec<PeerClass>,
}

impl Peers {
    pub(super) fn new(ids: Ids) -> Self {
        let boundaries = Boundaries::new(&[], std::iter::empty());
        let (own, rows, pairs, owners, classes) = Default::default();
        Self { own, boundaries, rows, pairs, owners, classes, ids }
    }

    pub(super) fn with_rows_of(self, nets: &[IpNet]) -> Self {
        Self { own: nets.iter().map(IpNet::trunc).collect(), ..self }
    }

    /// The rows of classes that were given back are gone.
    pub(super) fn settle(&mut self) {
        self.ids.settle();
    }

    pub(super) fn classes(&self) -> &BTreeMap<Signature, PeerClass> {
        &self.classes
    }

    /// Brings the rows and classes up to date, and `ipcache` with them.
    pub(super) fn update(
        &mut self,
        delta: &Delta,
        touched: &BTreeSet<IpAddr>,
        atoms: &Atoms,
        kinds: &Kinds,
        ipcache: &mut BTreeMap<IpNet, Known>,
    ) -> Changed {
        let rebuild = delta.networks() || self.rows.is_empty();
        let mut renumber = !delta.is_empty();
        if rebuild {
            self.boundaries = Boundaries::new(&self.own, atoms.active());
            (self.rows, self.pairs) = Default::default();
            for (net, matching) in &*Arc::clone(&self.boundaries.0) {
                self.set(*net, Some((Owner::Outside, Arc::clone(matching))));
            }
            for address in kinds.addresses() {
                self.set(address.into(), self.pair(address, kinds));
            }
            renumber = true;
        } else {
            for address in touched {
                renumber |= self.set((*address).into(), self.pair(*address, kinds));
            }
        }
        if !renumber {
            for net in touched.iter().map(|address| IpNet::from(*address)) {
                match self.known(&net, kinds) {
                    Some(known) => drop(ipcache.insert(net, known)),
                    None => drop(ipcache.remove(&net)),
                }
            }
            return Changed::default();
        }
        self.match_owners(delta, atoms, kinds);
        let changed = self.number(delta);
        *ipcache = self.rows.keys().filter_map(|net| Some((*net, self.known(net, kinds)?))).collect();
        changed
    }

    /// The pair of an address with a row of its own.
    fn pair(&self, address: IpAddr, kinds: &Kinds) -> Option<Pair> {
        let matching = || self.boundaries.matching(address);
        match kinds.owner(address) {
            Owner::Outside => self.boundaries.0.contains_key(&address.into()).then(|| (Owner::Outside, matching())),
            owner => Some((owner, matching())),
        }
    }

    /// Sets a row. True if the pair is new or has no row left.
    fn set(&mut self, net: IpNet, pair: Option<Pair>) -> bool {
        let mut changed = false;
        if let Some(pair) = &pair {
            let (_, rows) = self.pairs.entry(pair.clone()).or_insert((PeerClass::ANY, 0));
            changed |= *rows == 0;
            *rows += 1;
        }
        let old = match pair {
            Some(pair) => self.rows.insert(net, pair),
            None => self.rows.remove(&net),
        };
        if let Some(old) = old
            && let Some((_, rows)) = self.pairs.get_mut(&old)
        {
            *rows -= 1;
            if *rows == 0 {
                self.pairs.remove(&old);
                changed = true;
            }
        }
        changed
    }

    fn known(&self, net: &IpNet, kinds: &Kinds) -> Option<Known> {
        let pair = self.rows.get(net)?;
        let (class, _) = self.pairs.get(pair)?;
        let (identity, _) = kinds.known(pair.0)?;
        Some(Known { identity, class: *class })
    }

    /// Finds the atoms that match the owners: for owners that were known, of those that were added alone.
    fn match_owners(&mut self, delta: &Delta, atoms: &Atoms, kinds: &Kinds) {
        let owners: BTreeSet<Owner> = self.pairs.keys().map(|(owner, _)| *owner).collect();
        self.owners.retain(|owner, matching| {
            let Some((_, known)) = owners.contains(owner).then(|| kinds.known(*owner)).flatten() else { return false };
            matching.retain(|atom| !delta.dropped.contains_key(atom));
            matching.extend(delta.added.iter().filter(|(_, atom)| atom.matches(known)).map(|(id, _)| *id));
            matching.sort_unstable();
            true
        });
        for owner in owners {
            if let Some((_, known)) = kinds.known(owner) {
                let matching = || atoms.active().filter(|(_, atom)| atom.matches(known)).map(|(id, _)| id).collect();
                self.owners.entry(owner).or_insert_with(matching);
            }
        }
    }

    fn number(&mut self, delta: &Delta) -> Changed {
        let signature = |(owner, networks): &Pair| -> Signature {
            let mut atoms: Vec<AtomId> =
                self.owners.get(owner).into_iter().flatten().chain(&**networks).copied().collect();
            atoms.sort_unstable();
            atoms.into()
        };
        let signatures: Vec<Signature> = self.pairs.keys().map(signature).collect();
        let numbered = classes::number(&self.classes, signatures.iter().cloned().collect(), delta, &mut self.ids);
        for ((class, _), signature) in self.pairs.values_mut().zip(&signatures) {
            *class = numbered.get(signature).copied().unwrap_or(PeerClass::ANY);
        }
        let old = std::mem::replace(&mut self.classes, numbered);
        let (before, after): (BTreeSet<_>, BTreeSet<_>) = (old.values().collect(), self.classes.values().collect());
        let new = self.classes.iter().filter(|(_, class)| !before.contains(class));
        Changed {
            new: new.map(|(signature, class)| (*class, Arc::clone(signature))).collect(),
            gone: before.difference(&after).map(|class| **class).collect(),
        }
    }
}
