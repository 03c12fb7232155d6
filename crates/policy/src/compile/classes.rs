//! Peer classes: addresses that the same active atoms match.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    PeerClass,
    atoms::{AtomId, Delta},
    ids::Ids,
};

/// The active atoms that match an address, in order.
pub(super) type Signature = Arc<[AtomId]>;

/// Numbers the signatures.
///
/// A signature that was there keeps its class. Another one takes the class of a signature that is gone if the two
/// differ only in atoms that were added or dropped: rule sets that stay in use have none of those atoms, so the class
/// means the same to them.
pub(super) fn number(
    old: &BTreeMap<Signature, PeerClass>,
    wanted: BTreeSet<Signature>,
    delta: &Delta,
    ids: &mut Ids,
) -> BTreeMap<Signature, PeerClass> {
    let stays = |atom: &&AtomId| !delta.added.contains_key(atom) && !delta.dropped.contains_key(atom);
    let lasting = |signature: &Signature| -> Vec<AtomId> { signature.iter().filter(stays).copied().collect() };

    let mut gone: BTreeMap<Vec<AtomId>, Vec<PeerClass>> = BTreeMap::new();
    for (signature, class) in old.iter().filter(|(signature, _)| !wanted.contains(*signature)) {
        gone.entry(lasting(signature)).or_default().push(*class);
    }
    let mut classes = BTreeMap::new();
    for signature in wanted {
        let known = old.get(&signature).copied();
        let heir = || gone.get_mut(&lasting(&signature)).and_then(Vec::pop);
        let class = known.or_else(heir).unwrap_or_else(|| PeerClass(ids.take()));
        classes.insert(signature, class);
    }
    gone.into_values().flatten().for_each(|class| ids.give_back(class.0));
    classes
}
