//! Networks that contain each other: longest-prefix look-up, and which networks of rules match an address.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;

use super::{
    EVERYWHERE,
    atoms::{Atom, AtomId},
};

/// The longest prefix that contains the address.
pub(super) fn longest<V>(map: &BTreeMap<IpNet, V>, address: IpAddr) -> Option<(&IpNet, &V)> {
    covering(map, IpNet::from(address))
}

/// The longest prefix that contains the network.
///
/// Prefixes are ordered by address, then by length, so the prefix looked for is not behind the network, and it contains
/// every prefix of the map that lies between. So it has no more bits than the network shares with the nearest prefix
/// before it.
pub(super) fn covering<V>(map: &BTreeMap<IpNet, V>, mut net: IpNet) -> Option<(&IpNet, &V)> {
    loop {
        let (nearest, value) = map.range(..=net).next_back()?;
        if nearest.contains(&net) {
            return Some((nearest, value));
        }
        let shared = match (nearest.network(), net.network()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
            _ => return None,
        };
        net = IpNet::new(net.network(), u8::try_from(shared).ok()?).ok()?.trunc();
    }
}

/// Networks and exceptions in use, and all addresses of each family, each with the atoms that match an address for
/// which it is the longest.
#[derive(Debug, Clone)]
pub(super) struct Boundaries(pub(super) Arc<BTreeMap<IpNet, Arc<[AtomId]>>>);

impl Boundaries {
    /// Those of the atoms, and `nets`.
    pub(super) fn new<'a>(nets: &[IpNet], atoms: impl Iterator<Item = (AtomId, &'a Atom)>) -> Self {
        /// Atoms that begin and end to match at a boundary.
        type Edges = (Vec<AtomId>, Vec<AtomId>);
        let always = EVERYWHERE.iter().chain(nets);
        let mut edges: BTreeMap<IpNet, Edges> = always.map(|net| (*net, Edges::default())).collect();
        for (id, atom) in atoms {
            if let Atom::Network { net, except } = atom {
                edges.entry(*net).or_default().0.push(id);
                for exception in except {
                    edges.entry(*exception).or_default().1.push(id);
                }
            }
        }
        let mut boundaries = BTreeMap::new();
        // The boundaries around the one at hand, the longest last.
        let mut around: Vec<(IpNet, Arc<[AtomId]>)> = Vec::new();
        for (net, (begin, end)) in edges {
            while around.last().is_some_and(|(outer, _)| !outer.contains(&net)) {
                around.pop();
            }
            let mut matching: BTreeSet<AtomId> =
                around.last().map(|(_, m)| m.iter().copied().collect()).unwrap_or_default();
            matching.extend(begin);
            for id in end {
                matching.remove(&id);
            }
            let matching: Arc<[AtomId]> = matching.into_iter().collect();
            around.push((net, Arc::clone(&matching)));
            boundaries.insert(net, matching);
        }
        Self(Arc::new(boundaries))
    }

    /// The network atoms that match the address.
    pub(super) fn matching(&self, address: IpAddr) -> Arc<[AtomId]> {
        longest(&self.0, address).map(|(_, matching)| Arc::clone(matching)).unwrap_or_default()
    }
}
