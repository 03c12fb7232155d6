//! Nested networks and longest-prefix look-up.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use imbl::{OrdMap, OrdSet};
use ipnet::IpNet;

use super::{
    EVERYWHERE,
    atoms::{Atom, AtomId, Delta},
    classes::Signature,
    names::Named,
};

pub(super) fn longest<V: Clone>(map: &OrdMap<IpNet, V>, address: IpAddr) -> Option<(&IpNet, &V)> {
    covering(map, IpNet::from(address))
}

/// Longest prefix that contains the network.
///
/// Prefixes are sorted by address, then length, so it precedes the network, and contains every prefix between. It has
/// no more bits than the network shares with the nearest preceding prefix.
pub(super) fn covering<V: Clone>(map: &OrdMap<IpNet, V>, mut net: IpNet) -> Option<(&IpNet, &V)> {
    loop {
        let (nearest, value) = map.get_prev(&net)?;
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Edge {
    Begin(AtomId),
    End(AtomId),
}

/// Networks, exceptions, names' addresses, both families, with the atoms that match outside longer boundaries.
#[derive(Debug, Clone)]
pub(super) struct Boundaries {
    nets: OrdMap<IpNet, Signature>,
    edges: OrdSet<(IpNet, Edge)>,
    always: Arc<BTreeSet<IpNet>>,
    /// Networks of containers elsewhere.
    pods: Arc<BTreeSet<IpNet>>,
}

#[derive(Debug, Default)]
pub(super) struct Moved {
    /// Added, removed, or with other atoms.
    pub(super) nets: Vec<IpNet>,
    /// Disjoint; contain all of `nets`.
    pub(super) within: Vec<IpNet>,
}

impl Boundaries {
    pub(super) fn new(own: &[IpNet]) -> Self {
        let always: BTreeSet<IpNet> = EVERYWHERE.into_iter().chain(own.iter().map(IpNet::trunc)).collect();
        let nets = always.iter().map(|net| (*net, Signature::default())).collect();
        Self { nets, edges: OrdSet::new(), always: Arc::new(always), pods: Arc::default() }
    }

    /// Returns changed networks.
    pub(super) fn set_pods(&mut self, pods: BTreeSet<IpNet>) -> BTreeSet<IpNet> {
        let changed = self.pods.symmetric_difference(&pods).copied().collect();
        self.pods = Arc::new(pods);
        changed
    }

    pub(super) fn is_of_pods(&self, net: &IpNet) -> bool {
        // None contains another: only the nearest can contain the network.
        self.pods.range(..=*net).next_back().is_some_and(|pods| pods.contains(net))
    }

    pub(super) fn within(&self, net: IpNet) -> impl Iterator<Item = IpNet> {
        self.nets.range(net..=IpNet::from(net.broadcast())).map(|(net, _)| *net)
    }

    pub(super) fn contains(&self, net: &IpNet) -> bool {
        self.nets.contains_key(net)
    }

    pub(super) fn nets(&self) -> impl Iterator<Item = IpNet> {
        self.nets.keys().copied()
    }

    pub(super) fn matching(&self, net: IpNet) -> Signature {
        covering(&self.nets, net).map(|(_, matching)| Arc::clone(matching)).unwrap_or_default()
    }

    /// `pods`: the result of [`Self::set_pods`].
    pub(super) fn update(&mut self, delta: &Delta, named: &[Named], pods: &BTreeSet<IpNet>) -> Moved {
        let mut touched = pods.clone();
        for (net, edge) in delta.dropped.iter().flat_map(|(id, atom)| edges(*id, atom)) {
            self.edges.remove(&(net, edge));
            touched.insert(net);
        }
        for (net, edge) in delta.added.iter().flat_map(|(id, atom)| edges(*id, atom)) {
            self.edges.insert((net, edge));
            touched.insert(net);
        }
        for Named { atom, address, matches } in named {
            let edge = (IpNet::from(*address), Edge::Begin(*atom));
            touched.insert(edge.0);
            if *matches {
                self.edges.insert(edge);
            } else {
                self.edges.remove(&edge);
            }
        }
        let mut moved = Moved::default();
        // A network precedes its subnetworks.
        for net in touched {
            if !moved.within.last().is_some_and(|outer| outer.contains(&net)) {
                self.renew(net, &mut moved.nets);
                moved.within.push(net);
            }
        }
        moved
    }

    fn renew(&mut self, net: IpNet, moved: &mut Vec<IpNet>) {
        let last = IpNet::from(net.broadcast());
        let mut wanted: BTreeMap<IpNet, Vec<Edge>> =
            self.always.range(net..=last).chain(self.pods.range(net..=last)).map(|net| (*net, Vec::new())).collect();
        for (at, edge) in self.edges.range((net, Edge::Begin(AtomId::FIRST))..=(last, Edge::End(AtomId::LAST))) {
            wanted.entry(*at).or_default().push(*edge);
        }
        let gone: Vec<IpNet> =
            self.nets.range(net..=last).map(|(net, _)| *net).filter(|net| !wanted.contains_key(net)).collect();
        for net in gone {
            self.nets.remove(&net);
            moved.push(net);
        }
        let outside = net.supernet().map(|outer| self.matching(outer)).unwrap_or_default();
        let mut around: Vec<(IpNet, Signature)> = Vec::new();
        for (net, edges) in wanted {
            while around.last().is_some_and(|(outer, _)| !outer.contains(&net)) {
                around.pop();
            }
            let outer = around.last().map_or(&outside, |(_, matching)| matching);
            let matching = if edges.is_empty() { Arc::clone(outer) } else { crossing(outer, &edges) };
            around.push((net, Arc::clone(&matching)));
            if self.nets.get(&net) != Some(&matching) {
                self.nets.insert(net, matching);
                moved.push(net);
            }
        }
    }
}

fn crossing(outside: &[AtomId], edges: &[Edge]) -> Signature {
    let mut matching: BTreeSet<AtomId> = outside.iter().copied().collect();
    for edge in edges {
        match edge {
            Edge::Begin(id) => drop(matching.insert(*id)),
            Edge::End(id) => drop(matching.remove(id)),
        }
    }
    matching.into_iter().collect()
}

fn edges(id: AtomId, atom: &Atom) -> impl Iterator<Item = (IpNet, Edge)> {
    let network = match atom {
        Atom::Network { net, except } => Some((net, except)),
        _ => None,
    };
    network.into_iter().flat_map(move |(net, except)| {
        let end = move |exception: &IpNet| (*exception, Edge::End(id));
        std::iter::once((*net, Edge::Begin(id))).chain(except.iter().map(end))
    })
}
