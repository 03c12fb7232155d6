//! The changes of rows that lead from one state to another.
//!
//! At every prefix of the changes, the decision about every flow of an endpoint that both states have is that of the
//! old tables or that of the new ones. So nothing passes that both deny.
//!
//! **Why.** What is decided depends on the endpoint's rule set, on the class of the longest prefix of the peer's
//! address, and on cells that never change their value. Three things are taken care of:
//!
//! - *Longest prefixes.* New prefixes come longest first, and old ones go shortest first. Until a prefix is changed,
//!   added or removed its addresses have their old class; from then on they have their new one.
//! - *Classes.* No cell of a class in use is written. A new class has its cells in every rule set before an address has
//!   the class, and an old one loses them after no address has it.
//! - *Endpoints with another rule set, while classes change too.* An old rule set has no cells for new classes, nor a
//!   new one for old classes. So for the time of the change addresses that go from class `o` to class `n` have a class
//!   `t` that means `o` to the old rule sets and `n` to the new ones. First the addresses take `t`, which changes
//!   nothing for rule sets that are left; then the endpoints change their rule sets; then the addresses take `n`. A new
//!   class that only `o` leads to serves as its own `t`, and so does an old one that leads only to `n`.
//!
//! A rule set that one endpoint leaves and others keep would have to mean both by `t`: the endpoint takes a copy of it
//! beforehand, which is an old rule set.

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

/// One change of one row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A listener is new. Cells lead to it when the proxy has it.
    PutListener(ListenerId, Arc<Listener>),
    /// No cell leads to the listener.
    DropListener(ListenerId),
    /// A rule's origin is new or another.
    PutOrigin(RuleIndex, Arc<Origin>),
    /// The rule is gone.
    DropOrigin(RuleIndex),
    /// An endpoint takes its rule sets.
    PutSets(EndpointKey, Sets),
    /// The endpoint is gone. The first of all changes: its programs decide nothing any more.
    DropSets(EndpointKey),
    /// A prefix is new or has another class or identity.
    PutAddress(IpNet, Known),
    /// The prefix is gone.
    DropAddress(IpNet),
    /// A new prefix of ports.
    PutPorts(SetId, PortPrefix, PortClass),
    /// The prefix is gone.
    DropPorts(SetId, PortPrefix),
    /// A new cell.
    PutCell(SetId, (PeerClass, PortClass), Cell),
    /// The cell is gone.
    DropCell(SetId, (PeerClass, PortClass)),
}

/// Changes, in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diff {
    /// To be carried out one after the other.
    pub changes: Vec<Change>,
    /// The most rows that there are at any time.
    pub peak: Sizes,
}

/// The class of an address before and after.
type Way = (PeerClass, PeerClass);
/// Cells of any rule set.
type Cells = BTreeMap<(SetId, (PeerClass, PortClass)), Cell>;

/// Leads from `old` to `new`, which is made from it by the same [`Engine`](super::Engine) or by one that comes
/// [`after`](super::Engine::after): a rule set or class that both have means the same in both.
///
/// Where `new` was made from a copy of `old`, this costs what differs.
#[must_use]
pub fn diff(old: &Tables, new: &Tables) -> Diff {
    between(old, old.sizes(), new)
}

/// As [`diff`], where the sizes of the old tables are known.
pub(super) fn between(old: &Tables, sizes: Sizes, new: &Tables) -> Diff {
    let mut changes = Vec::new();
    let (endpoints, origins) = (Differing::of(&old.sets, &new.sets), Differing::of(&old.origins, &new.origins));
    changes.extend(endpoints.gone.iter().map(|(key, _)| Change::DropSets(**key)));
    let listeners = Differing::of(&old.listeners, &new.listeners);
    changes.extend(listeners.new.iter().map(|(id, listener)| Change::PutListener(**id, Arc::clone(listener))));
    let put = origins.new.iter().copied().chain(origins.others.iter().map(|(rule, _, origin)| (*rule, *origin)));
    changes.extend(put.map(|(rule, origin)| Change::PutOrigin(*rule, Arc::clone(origin))));

    let prefixes = prefixes(old, new);
    let flips = !endpoints.others.is_empty();
    let ways: BTreeSet<Way> = prefixes.values().copied().filter(|(o, n)| flips && o != n).collect();
    let before = with_copies(old, new, &endpoints, &ways);

    // The copies are rows of the old state that are not there yet.
    let copied = put_rows(&Differing::of(&old.rules, &before.rules), &mut changes);
    let rules = Differing::of(&before.rules, &new.rules);
    let added = put_rows(&rules, &mut changes);
    let others = Differing::of(&old.sets, &before.sets).others;
    changes.extend(others.into_iter().map(|(key, _, sets)| Change::PutSets(*key, *sets)));
    let (through, passing) = pass_through(&before, new, &rules, &prefixes, &ways);
    changes.extend(passing.iter().map(|((set, key), cell)| Change::PutCell(*set, *key, *cell)));

    put_addresses(old, new, &prefixes, &through, &mut changes);
    if !flips {
        drop_addresses(new, &prefixes, &mut changes);
    }
    let flipped = Differing::of(&before.sets, &new.sets).others;
    changes.extend(flipped.into_iter().map(|(key, _, sets)| Change::PutSets(*key, *sets)));
    if flips {
        let last = |(net, way)| Some((net, new.ipcache.get(net)?, through.get(way)?));
        let passed = prefixes.iter().filter_map(last).filter(|(_, known, t)| known.class != **t);
        changes.extend(passed.map(|(net, known, _)| Change::PutAddress(*net, *known)));
        drop_addresses(new, &prefixes, &mut changes);
    }
    changes.extend(endpoints.new.iter().map(|(key, sets)| Change::PutSets(**key, **sets)));

    changes.extend(passing.keys().map(|(set, key)| Change::DropCell(*set, *key)));
    drop_rows(&rules, &mut changes);
    changes.extend(listeners.gone.iter().map(|(id, _)| Change::DropListener(**id)));
    changes.extend(origins.gone.iter().map(|(rule, _)| Change::DropOrigin(**rule)));

    let peak = Sizes {
        ipcache: sizes.ipcache + prefixes.keys().filter(|net| !old.ipcache.contains_key(*net)).count(),
        ports: sizes.ports + copied.ports + added.ports,
        rules: sizes.rules + copied.rules + added.rules + passing.len(),
        sets: before.rules.len() + rules.new.len(),
        listeners: sizes.listeners + listeners.new.len(),
    };
    Diff { changes, peak }
}

/// What two maps do not share, each part in the order of the keys.
struct Differing<'a, K, V> {
    new: Vec<(&'a K, &'a V)>,
    gone: Vec<(&'a K, &'a V)>,
    /// The value before and after.
    others: Vec<(&'a K, &'a V, &'a V)>,
}

impl<'a, K: Ord, V: PartialEq> Differing<'a, K, V> {
    fn of(old: &'a OrdMap<K, V>, new: &'a OrdMap<K, V>) -> Self {
        let mut differing = Self { new: Vec::new(), gone: Vec::new(), others: Vec::new() };
        for item in old.diff(new) {
            match item {
                DiffItem::Add(key, value) => differing.new.push((key, value)),
                DiffItem::Remove(key, value) => differing.gone.push((key, value)),
                DiffItem::Update { old: (key, before), new: (_, after) } => differing.others.push((key, before, after)),
            }
        }
        differing
    }
}

/// The prefixes with rows that differ, each with the class of its addresses (those of no longer prefix) in the old and
/// in the new state. Without an old state, the old class is the new one.
fn prefixes(old: &Tables, new: &Tables) -> BTreeMap<IpNet, Way> {
    let class = |tables: &Tables, net: &IpNet| covering(&tables.ipcache, *net).map(|(_, known)| known.class);
    let rows = Differing::of(&old.ipcache, &new.ipcache);
    let nets = rows.new.iter().chain(&rows.gone).map(|(net, _)| **net);
    let way = |net: IpNet| {
        let after = class(new, &net)?;
        Some((net, (class(old, &net).unwrap_or(after), after)))
    };
    nets.chain(rows.others.iter().map(|(net, ..)| **net)).filter_map(way).collect()
}

fn cells_of(tables: &Tables, set: SetId, class: PeerClass) -> impl Iterator<Item = (PortClass, &Cell)> {
    tables.rules.get(&set).into_iter().flat_map(move |rows| rows.cells_of(class))
}

/// Whether a rule set of both states tells the two ends of a way apart.
fn tells_apart(old: &Tables, new: &Tables, set: SetId, (o, n): Way) -> bool {
    !cells_of(old, set, o).eq(cells_of(new, set, n))
}

fn both(sets: Sets) -> [SetId; 2] {
    [sets.ingress, sets.egress]
}

/// The old tables, in which endpoints that leave a rule set that stays have a copy of it, if it tells the ends of a way
/// apart.
fn with_copies(
    old: &Tables,
    new: &Tables,
    endpoints: &Differing<'_, EndpointKey, Sets>,
    ways: &BTreeSet<Way>,
) -> Tables {
    let mut tables = old.clone();
    // For each rule set that an endpoint leaves, the copy; itself if it needs none.
    let mut copies: BTreeMap<SetId, SetId> = BTreeMap::new();
    let last = old.rules.get_max().into_iter().chain(new.rules.get_max()).map(|(set, _)| set.0).max();
    let mut free = (last.unwrap_or(0)..=u32::MAX).skip(1).map(SetId);
    for (key, before, after) in &endpoints.others {
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

/// The class that addresses of each way have during the change, and the cells that it needs.
fn pass_through(
    old: &Tables,
    new: &Tables,
    rules: &Differing<'_, SetId, Arc<Rows>>,
    prefixes: &BTreeMap<IpNet, Way>,
    ways: &BTreeSet<Way>,
) -> (BTreeMap<Way, PeerClass>, Cells) {
    let mut through = BTreeMap::new();
    let mut cells = BTreeMap::new();
    if ways.is_empty() {
        return (through, cells);
    }
    let of_addresses = [&old.ipcache, &new.ipcache].into_iter().filter_map(|rows| rows.classes().next_back());
    // Of a change that was cut off, cells may be left with classes that no address has. All of its rule sets are gone in the new state.
    let of_cells = rules.gone.iter().filter_map(|(_, rows)| rows.last_class());
    let last = of_addresses.chain(of_cells).max();
    let mut free = (last.map_or(0, |class| class.0)..=u32::MAX).skip(1).map(PeerClass);
    let all: BTreeSet<Way> = prefixes.values().copied().collect();
    // To how many classes the addresses of a class go, and from how many they come.
    let (mut to, mut from): (BTreeMap<PeerClass, usize>, BTreeMap<PeerClass, usize>) = Default::default();
    for (o, n) in all {
        *to.entry(o).or_default() += 1;
        *from.entry(n).or_default() += 1;
    }

    let left: Vec<SetId> = rules.gone.iter().map(|(set, _)| **set).collect();
    let taken: Vec<SetId> = rules.new.iter().map(|(set, _)| **set).collect();
    // Rule sets of both states that an endpoint takes from another one.
    let joined: BTreeSet<SetId> = Differing::of(&old.sets, &new.sets)
        .others
        .into_iter()
        .flat_map(|(_, before, after)| both(*before).into_iter().zip(both(*after)))
        .filter(|(before, after)| before != after && old.rules.contains_key(after))
        .map(|(_, after)| after)
        .collect();

    for way in ways {
        let (o, n) = *way;
        let only_from_o = old.ipcache.users(n) == 0 && from.get(&n) == Some(&1);
        let only_to_n = new.ipcache.users(o) == 0 && to.get(&o) == Some(&1);
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

/// New rows of rule sets; the answer is their number.
fn put_rows(rules: &Differing<'_, SetId, Arc<Rows>>, changes: &mut Vec<Change>) -> Sizes {
    let none = Rows::default();
    let mut added = Sizes::default();
    let new = rules.new.iter().map(|(set, rows)| (**set, &none, &***rows));
    for (set, before, after) in
        new.chain(rules.others.iter().map(|(set, before, after)| (**set, &***before, &***after)))
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

/// Rows of rule sets that are in the new tables no longer.
fn drop_rows(rules: &Differing<'_, SetId, Arc<Rows>>, changes: &mut Vec<Change>) {
    let none = Rows::default();
    let gone = rules.gone.iter().map(|(set, rows)| (**set, &***rows, &none));
    for (set, before, after) in
        gone.chain(rules.others.iter().map(|(set, before, after)| (**set, &***before, &***after)))
    {
        let cells = Differing::of(&before.cells, &after.cells).gone;
        let ports = Differing::of(&before.ports, &after.ports).gone;
        changes.extend(cells.into_iter().map(|(key, _)| Change::DropCell(set, *key)));
        changes.extend(ports.into_iter().map(|(prefix, _)| Change::DropPorts(set, *prefix)));
    }
}

/// Prefixes that are new, the longest first, then those whose class or identity is another. Those on a way take the
/// class for the time of the change.
fn put_addresses(
    old: &Tables,
    new: &Tables,
    prefixes: &BTreeMap<IpNet, Way>,
    through: &BTreeMap<Way, PeerClass>,
    changes: &mut Vec<Change>,
) {
    let mut added = Vec::new();
    let mut changed = Vec::new();
    for (net, way) in prefixes {
        let (before, after) = (old.ipcache.get(net), new.ipcache.get(net));
        let class = through.get(way).copied();
        match (before, after) {
            (None, Some(known)) => added.push((*net, Known { class: class.unwrap_or(known.class), ..*known })),
            (Some(before), Some(after)) => {
                let known = Known { class: class.unwrap_or(after.class), ..*after };
                if known != *before {
                    changed.push((*net, known));
                }
            }
            (Some(before), None) => {
                changed.extend(class.filter(|c| *c != before.class).map(|class| (*net, Known { class, ..*before })))
            }
            (None, None) => {}
        }
    }
    added.sort_by_key(|(net, _)| std::cmp::Reverse(net.prefix_len()));
    changes.extend(added.into_iter().chain(changed).map(|(net, known)| Change::PutAddress(net, known)));
}

/// Prefixes that are gone, the shortest first.
fn drop_addresses(new: &Tables, prefixes: &BTreeMap<IpNet, Way>, changes: &mut Vec<Change>) {
    let mut gone: Vec<IpNet> = prefixes.keys().filter(|net| !new.ipcache.contains_key(*net)).copied().collect();
    gone.sort_by_key(IpNet::prefix_len);
    changes.extend(gone.into_iter().map(Change::DropAddress));
}
