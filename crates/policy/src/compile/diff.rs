//! Row changes between two states.
//!
//! After every prefix of the changes, the decision about every flow of an endpoint in both states is the old or the new
//! one. So a flow that both states deny never passes.
//!
//! **Correctness.** A decision depends on the endpoint's rule set, the class of the longest prefix of the peer's
//! address, and cells that never change their value.
//!
//! - *Longest prefixes.* New prefixes are added longest first, old ones removed shortest first: an address has its old
//!   class until its prefix changes.
//! - *Classes.* A new class gets its cells in every rule set before an address has the class; an old one loses them
//!   after the last address.
//! - *Endpoints that change rule set while classes change.* An old rule set has no cells for new classes, a new one
//!   none for old classes. Addresses that move from class `o` to class `n` first take a class `t` that means `o` to old
//!   rule sets and `n` to new ones; then the endpoints change rule sets; then the addresses take `n`. A new class with
//!   addresses from only one `o` serves as its `t`, and so does an old one whose addresses all move to one `n`.
//!
//! In a rule set that only some endpoints leave, `t` would need both meanings: these endpoints first take a copy, which
//! counts as old.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use imbl::{OrdMap, ordmap::DiffItem};
use ipnet::IpNet;

use super::{
    Cell, EndpointKey, Known, Listener, ListenerId, PeerClass, PortClass, PortPrefix, Rows, RuleIndex, SetId, Sets,
    Sizes, Tables, networks::covering,
};
use crate::model::Origin;

/// A change of one row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Add a listener; its cells wait for the proxy.
    PutListener(ListenerId, Arc<Listener>),
    /// Remove a listener without cells.
    DropListener(ListenerId),
    /// Add or replace a rule's origin.
    PutOrigin(RuleIndex, Arc<Origin>),
    /// Remove a rule's origin.
    DropOrigin(RuleIndex),
    /// Set an endpoint's rule sets.
    PutSets(EndpointKey, Sets),
    /// Remove an endpoint, before all other changes.
    DropSets(EndpointKey),
    /// Add or change a prefix.
    PutAddress(IpNet, Known),
    /// Remove a prefix.
    DropAddress(IpNet),
    /// Add a port prefix.
    PutPorts(SetId, PortPrefix, PortClass),
    /// Remove a port prefix.
    DropPorts(SetId, PortPrefix),
    /// Add a cell.
    PutCell(SetId, (PeerClass, PortClass), Cell),
    /// Remove a cell.
    DropCell(SetId, (PeerClass, PortClass)),
}

/// Ordered changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diff {
    /// In sequence.
    pub changes: Vec<Change>,
    /// Maximum row counts during the changes.
    pub peak: Sizes,
}

/// Old and new class.
type Way = (PeerClass, PeerClass);

struct Prefix {
    /// `(new, new)` if no old prefix covered it.
    way: Way,
    before: Option<Known>,
    after: Option<Known>,
}

type Cells = BTreeMap<(SetId, (PeerClass, PortClass)), Cell>;

/// Changes from `old` to `new`, which the same [`Engine`](super::Engine) or its successor
/// ([`after`](super::Engine::after)) made. From a copy, the cost is proportional to the difference.
#[must_use]
pub fn diff(old: &Tables, new: &Tables) -> Diff {
    between(old, old.sizes(), new)
}

pub(super) fn between(old: &Tables, sizes: Sizes, new: &Tables) -> Diff {
    let mut changes = Vec::new();
    let (endpoints, origins) = (Differing::of(&old.sets, &new.sets), Differing::of(&old.origins, &new.origins));
    changes.extend(endpoints.gone.iter().map(|(key, _)| Change::DropSets(**key)));
    let listeners = Differing::of(&old.listeners, &new.listeners);
    changes.extend(listeners.new.iter().map(|(id, listener)| Change::PutListener(**id, Arc::clone(listener))));
    let put = origins.new.iter().copied().chain(origins.changed.iter().map(|(rule, _, origin)| (*rule, *origin)));
    changes.extend(put.map(|(rule, origin)| Change::PutOrigin(*rule, Arc::clone(origin))));

    let prefixes = prefixes(old, new);
    let sets_change = !endpoints.changed.is_empty();
    let ways: BTreeSet<Way> =
        prefixes.values().map(|prefix| prefix.way).filter(|(o, n)| sets_change && o != n).collect();
    let before = with_copies(old, new, &endpoints, &ways);

    let copied = put_rows(&Differing::of(&old.rules, &before.rules), &mut changes);
    let rules = Differing::of(&before.rules, &new.rules);
    let added = put_rows(&rules, &mut changes);
    let changed = Differing::of(&old.sets, &before.sets).changed;
    changes.extend(changed.into_iter().map(|(key, _, sets)| Change::PutSets(*key, *sets)));
    let (through, passing) = pass_through(&before, new, &rules, &prefixes, &ways);
    changes.extend(passing.iter().map(|((set, key), cell)| Change::PutCell(*set, *key, *cell)));

    put_addresses(&prefixes, &through, &mut changes);
    if !sets_change {
        drop_addresses(&prefixes, &mut changes);
    }
    let flipped = Differing::of(&before.sets, &new.sets).changed;
    changes.extend(flipped.into_iter().map(|(key, _, sets)| Change::PutSets(*key, *sets)));
    if sets_change {
        let passed = prefixes.iter().filter_map(|(net, Prefix { way, after, .. })| {
            let (known, class) = ((*after)?, through.get(way)?);
            (known.class != *class).then_some(Change::PutAddress(*net, known))
        });
        changes.extend(passed);
        drop_addresses(&prefixes, &mut changes);
    }
    changes.extend(endpoints.new.iter().map(|(key, sets)| Change::PutSets(**key, **sets)));

    changes.extend(passing.keys().map(|(set, key)| Change::DropCell(*set, *key)));
    drop_rows(&rules, &mut changes);
    changes.extend(listeners.gone.iter().map(|(id, _)| Change::DropListener(**id)));
    changes.extend(origins.gone.iter().map(|(rule, _)| Change::DropOrigin(**rule)));

    let peak = Sizes {
        ipcache: sizes.ipcache + prefixes.values().filter(|prefix| prefix.before.is_none()).count(),
        ports: sizes.ports + copied.ports + added.ports,
        rules: sizes.rules + copied.rules + added.rules + passing.len(),
        sets: before.rules.len() + rules.new.len(),
        listeners: sizes.listeners + listeners.new.len(),
    };
    Diff { changes, peak }
}

struct Differing<'a, K, V> {
    new: Vec<(&'a K, &'a V)>,
    gone: Vec<(&'a K, &'a V)>,
    changed: Vec<(&'a K, &'a V, &'a V)>,
}

impl<'a, K: Ord, V: PartialEq> Differing<'a, K, V> {
    fn of(old: &'a OrdMap<K, V>, new: &'a OrdMap<K, V>) -> Self {
        let mut differing = Self { new: Vec::new(), gone: Vec::new(), changed: Vec::new() };
        for item in old.diff(new) {
            match item {
                DiffItem::Add(key, value) => differing.new.push((key, value)),
                DiffItem::Remove(key, value) => differing.gone.push((key, value)),
                DiffItem::Update { old: (key, before), new: (_, after) } => {
                    differing.changed.push((key, before, after))
                }
            }
        }
        differing
    }
}

fn prefixes(old: &Tables, new: &Tables) -> BTreeMap<IpNet, Prefix> {
    let class = |tables: &Tables, net: &IpNet| covering(&tables.ipcache, *net).map(|(_, known)| known.class);
    let prefix = |item| {
        let (net, before, after) = match item {
            DiffItem::Add(net, known) => (net, None, Some(*known)),
            DiffItem::Remove(net, known) => (net, Some(*known), None),
            DiffItem::Update { old: (net, before), new: (_, after) } => (net, Some(*before), Some(*after)),
        };
        let of = |known: Option<Known>, tables| known.map(|known| known.class).or_else(|| class(tables, net));
        let n = of(after, new)?;
        Some((*net, Prefix { way: (of(before, old).unwrap_or(n), n), before, after }))
    };
    old.ipcache.diff(&new.ipcache).filter_map(prefix).collect()
}

fn cells_of(tables: &Tables, set: SetId, class: PeerClass) -> impl Iterator<Item = (PortClass, &Cell)> {
    tables.rules.get(&set).into_iter().flat_map(move |rows| rows.cells_of(class))
}

/// The set has other cells for the new class than for the old one.
fn tells_apart(old: &Tables, new: &Tables, set: SetId, (o, n): Way) -> bool {
    !cells_of(old, set, o).eq(cells_of(new, set, n))
}

fn both(sets: Sets) -> [SetId; 2] {
    [sets.ingress, sets.egress]
}

/// Copies remaining rule sets that distinguish a way, for the endpoints that leave them.
fn with_copies(
    old: &Tables,
    new: &Tables,
    endpoints: &Differing<'_, EndpointKey, Sets>,
    ways: &BTreeSet<Way>,
) -> Tables {
    let mut tables = old.clone();
    let mut copies: BTreeMap<SetId, SetId> = BTreeMap::new();
    let last = old.rules.get_max().into_iter().chain(new.rules.get_max()).map(|(set, _)| set.0).max();
    let mut free = (last.unwrap_or(0)..=u32::MAX).skip(1).map(SetId);
    for (key, before, after) in &endpoints.changed {
        let mut copy = |before: SetId, after: SetId| {
            if before == after || !new.rules.contains_key(&before) {
                return before;
            }
            *copies.entry(before).or_insert_with(|| {
                let Some(rows) = old.rules.get(&before) else { return before };
                if !ways.iter().any(|way| tells_apart(old, new, before, *way)) {
                    return before;
                }
                let copy = free.next().unwrap_or(before);
                tables.rules.insert(copy, Arc::clone(rows));
                copy
            })
        };
        let ingress = copy(before.ingress, after.ingress);
        let sets = Sets { ingress, egress: copy(before.egress, after.egress) };
        if sets != **before {
            tables.sets.insert(**key, sets);
        }
    }
    tables
}

/// The class `t` of each way, and the cells of these classes ([module](self)).
fn pass_through(
    old: &Tables,
    new: &Tables,
    rules: &Differing<'_, SetId, Arc<Rows>>,
    prefixes: &BTreeMap<IpNet, Prefix>,
    ways: &BTreeSet<Way>,
) -> (BTreeMap<Way, PeerClass>, Cells) {
    let mut through = BTreeMap::new();
    let mut cells = BTreeMap::new();
    if ways.is_empty() {
        return (through, cells);
    }
    let of_addresses = [&old.ipcache, &new.ipcache].into_iter().filter_map(|rows| rows.classes().next_back());
    // An interrupted change leaves cells of unused classes.
    let earlier = rules.gone.iter().map(|(_, rows)| *rows).chain(rules.changed.iter().map(|(_, before, _)| *before));
    let of_cells = earlier.filter_map(|rows| rows.last_class());
    let last = of_addresses.chain(of_cells).max();
    let mut free = (last.map_or(0, |class| class.0)..=u32::MAX).skip(1).map(PeerClass);
    let all: BTreeSet<Way> = prefixes.values().map(|prefix| prefix.way).collect();
    let (mut ways_from, mut ways_to): (BTreeMap<PeerClass, usize>, BTreeMap<PeerClass, usize>) = Default::default();
    for (o, n) in all {
        *ways_from.entry(o).or_default() += 1;
        *ways_to.entry(n).or_default() += 1;
    }

    let left: Vec<SetId> = rules.gone.iter().map(|(set, _)| **set).collect();
    let taken: Vec<SetId> = rules.new.iter().map(|(set, _)| **set).collect();
    // Old rule sets that an endpoint newly takes.
    let joined: BTreeSet<SetId> = Differing::of(&old.sets, &new.sets)
        .changed
        .into_iter()
        .flat_map(|(_, before, after)| both(*before).into_iter().zip(both(*after)))
        .filter(|(before, after)| before != after && old.rules.contains_key(after))
        .map(|(_, after)| after)
        .collect();

    for way in ways {
        let (o, n) = *way;
        let only_from_o = old.ipcache.users(n) == 0 && ways_to.get(&n) == Some(&1);
        let only_to_n = new.ipcache.users(o) == 0 && ways_from.get(&o) == Some(&1);
        let mut copy = |tables: &Tables, sets: &mut dyn Iterator<Item = SetId>, from: PeerClass, to: PeerClass| {
            for set in sets {
                cells.extend(cells_of(tables, set, from).map(|(port, cell)| ((set, (to, port)), *cell)));
            }
        };
        let t = if only_from_o {
            copy(old, &mut left.iter().copied(), o, n);
            n
        } else if only_to_n && !joined.iter().any(|set| tells_apart(old, new, *set, *way)) {
            copy(new, &mut taken.iter().copied(), n, o);
            o
        } else {
            let t = free.next().unwrap_or(n);
            copy(old, &mut left.iter().copied(), o, t);
            copy(new, &mut new.rules.keys().copied(), n, t);
            t
        };
        through.insert(*way, t);
    }
    (through, cells)
}

fn put_rows(rules: &Differing<'_, SetId, Arc<Rows>>, changes: &mut Vec<Change>) -> Sizes {
    let none = Rows::default();
    let mut added = Sizes::default();
    let new = rules.new.iter().map(|(set, rows)| (**set, &none, &***rows));
    for (set, before, after) in
        new.chain(rules.changed.iter().map(|(set, before, after)| (**set, &***before, &***after)))
    {
        let ports = Differing::of(&before.ports, &after.ports).new;
        let cells = Differing::of(&before.cells, &after.cells).new;
        added.ports += ports.len();
        added.rules += cells.len();
        changes.extend(ports.into_iter().map(|(prefix, class)| Change::PutPorts(set, *prefix, *class)));
        changes.extend(cells.into_iter().map(|(key, cell)| Change::PutCell(set, *key, *cell)));
    }
    added
}

fn drop_rows(rules: &Differing<'_, SetId, Arc<Rows>>, changes: &mut Vec<Change>) {
    let none = Rows::default();
    let gone = rules.gone.iter().map(|(set, rows)| (**set, &***rows, &none));
    for (set, before, after) in
        gone.chain(rules.changed.iter().map(|(set, before, after)| (**set, &***before, &***after)))
    {
        let cells = Differing::of(&before.cells, &after.cells).gone;
        let ports = Differing::of(&before.ports, &after.ports).gone;
        changes.extend(cells.into_iter().map(|(key, _)| Change::DropCell(set, *key)));
        changes.extend(ports.into_iter().map(|(prefix, _)| Change::DropPorts(set, *prefix)));
    }
}

/// Prefixes on a way take the intermediate class.
fn put_addresses(prefixes: &BTreeMap<IpNet, Prefix>, through: &BTreeMap<Way, PeerClass>, changes: &mut Vec<Change>) {
    let mut added = Vec::new();
    let mut changed = Vec::new();
    for (net, Prefix { way, before, after }) in prefixes {
        let class = through.get(way).copied();
        match (*before, *after) {
            (None, Some(known)) => added.push((*net, Known { class: class.unwrap_or(known.class), ..known })),
            (Some(before), Some(after)) => {
                let known = Known { class: class.unwrap_or(after.class), ..after };
                if known != before {
                    changed.push((*net, known));
                }
            }
            (Some(before), None) => {
                changed.extend(class.filter(|c| *c != before.class).map(|class| (*net, Known { class, ..before })))
            }
            (None, None) => {}
        }
    }
    added.sort_by_key(|(net, _)| std::cmp::Reverse(net.prefix_len()));
    changes.extend(added.into_iter().chain(changed).map(|(net, known)| Change::PutAddress(net, known)));
}

fn drop_addresses(prefixes: &BTreeMap<IpNet, Prefix>, changes: &mut Vec<Change>) {
    let gone = prefixes.iter().filter(|(_, prefix)| prefix.after.is_none());
    let mut gone: Vec<IpNet> = gone.map(|(net, _)| *net).collect();
    gone.sort_by_key(IpNet::prefix_len);
    changes.extend(gone.into_iter().map(Change::DropAddress));
}
