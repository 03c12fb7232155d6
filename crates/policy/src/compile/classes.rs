//! Peer classes: addresses with the same active atoms.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use imbl::{OrdMap, OrdSet};

use super::{
    PeerClass,
    atoms::{AtomId, Delta},
    ids::Ids,
};

/// Sorted atoms of a class.
pub(super) type Signature = Arc<[AtomId]>;

#[derive(Debug, Default)]
pub(super) struct Changed {
    pub(super) new: Vec<(PeerClass, Signature)>,
    pub(super) gone: Vec<(PeerClass, Signature)>,
}

#[derive(Debug, Clone)]
pub(super) struct Classes {
    ids: Ids,
    by_signature: OrdMap<Signature, PeerClass>,
    signatures: OrdMap<PeerClass, Signature>,
    by_atom: OrdSet<(AtomId, PeerClass)>,
}

impl Classes {
    pub(super) fn new(ids: Ids) -> Self {
        Self { ids, by_signature: OrdMap::new(), signatures: OrdMap::new(), by_atom: OrdSet::new() }
    }

    pub(super) fn settle(&mut self) {
        self.ids.settle();
    }

    pub(super) fn keep(&mut self, numbers: BTreeMap<u32, u32>) {
        self.ids.keep(numbers);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.signatures.is_empty()
    }

    pub(super) fn class(&self, signature: &Signature) -> Option<PeerClass> {
        self.by_signature.get(signature).copied()
    }

    pub(super) fn signature(&self, class: PeerClass) -> Option<&Signature> {
        self.signatures.get(&class)
    }

    pub(super) fn signatures(&self) -> impl Iterator<Item = &Signature> {
        self.signatures.values()
    }

    pub(super) fn with(&self, atom: AtomId) -> impl Iterator<Item = PeerClass> {
        self.by_atom.range((atom, PeerClass::ANY)..=(atom, PeerClass(u32::MAX))).map(|(_, class)| *class)
    }

    /// Assigns classes to the `wanted` signatures. Every address of a class in `left` now has a wanted signature or is
    /// gone.
    ///
    /// A new signature takes the class of a removed one that differs only in added or dropped atoms: remaining rule
    /// sets have none of these, so the class means the same to them.
    pub(super) fn change(&mut self, wanted: &BTreeSet<Signature>, left: &[PeerClass], delta: &Delta) -> Changed {
        let stays = |atom: &&AtomId| !delta.added.contains_key(atom) && !delta.dropped.contains_key(atom);
        let lasting = |signature: &Signature| -> Vec<AtomId> { signature.iter().filter(stays).copied().collect() };

        let mut gone: BTreeMap<Vec<AtomId>, Vec<PeerClass>> = BTreeMap::new();
        for class in left {
            if let Some(signature) = self.signatures.get(class).filter(|signature| !wanted.contains(*signature)) {
                gone.entry(lasting(signature)).or_default().push(*class);
            }
        }
        let mut changed = Changed::default();
        for signature in wanted {
            if self.by_signature.contains_key(signature) {
                continue;
            }
            let heir = gone.get_mut(&lasting(signature)).and_then(Vec::pop);
            let class = match heir {
                Some(class) => {
                    self.remove(class);
                    class
                }
                None => {
                    let class = PeerClass(self.ids.take());
                    changed.new.push((class, Arc::clone(signature)));
                    class
                }
            };
            self.by_signature.insert(Arc::clone(signature), class);
            self.signatures.insert(class, Arc::clone(signature));
            for atom in &**signature {
                self.by_atom.insert((*atom, class));
            }
        }
        for class in gone.into_values().flatten() {
            self.ids.give_back(class.0);
            changed.gone.extend(self.remove(class).map(|signature| (class, signature)));
        }
        changed
    }

    fn remove(&mut self, class: PeerClass) -> Option<Signature> {
        let signature = self.signatures.remove(&class)?;
        self.by_signature.remove(&signature);
        for atom in &*signature {
            self.by_atom.remove(&(*atom, class));
        }
        Some(signature)
    }
}
