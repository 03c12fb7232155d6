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
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ipnet::IpNet;

use super::{
    Cell, EndpointKey, Known, PeerClass, PortClass, PortPrefix, Rows, RuleIndex, SetId, Sets, Sizes, Tables,
    networks::covering,
};
use crate::model::Origin;

/// One change of one row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
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
#[must_use]
pub fn diff(old: &Tables, new: &Tables) -> Diff {
    let mut changes = Vec::new();
    let gone = |key: &&EndpointKey| !new.sets.contains_key(key);
    changes.extend(old.sets.keys().filter(gone).map(|key| Change::DropSets(*key)));
    let origins = new.origins.iter().filter(|(rule, origin)| old.origins.get(rule) != Some(origin));
    changes.extend(origins.map(|(rule, origin)| Change::PutOrigin(*rule, Arc::clone(origin))));

    let prefixes = prefixes(old, new);
    let flips = new.sets.iter().any(|(key, sets)| old.sets.get(key).is_some_and(|old| old != sets));
    let ways: BTreeSet<Way> = prefixes.values().copied().filter(|(o, n)| flips && o != n).collect();
    let before = with_copies(old, new, &ways);

    // The copies are rows of the old state that are not there yet.
    put_rows(old, &before, &mut changes);
    let added = put_rows(&before, new, &mut changes);
    let copied = before.sets.iter().filter(|(key, sets)| old.sets.get(key) != Some(sets));
    changes.extend(copied.map(|(key, sets)| Change::PutSets(*key, *sets)));
    let (through, passing) = pass_through(&before, new, &prefixes, &ways);
    changes.extend(passing.iter().map(|((set, key), cell)| Change::PutCell(*set, *key, *cell)));

    put_addresses(old, new, &prefixes, &through, &mut changes);
    if !flips {
        drop_addresses(new, &prefixes, &mut changes);
    }
    let flipped = new.sets.iter().filter(|(key, sets)| before.sets.get(key).is_some_and(|old| old != *sets));
    changes.extend(flipped.map(|(key, sets)| Change::PutSets(*key, *sets)));
    if flips {
        let last = |(net, way)| Some((net, new.ipcache.get(net)?, through.get(way)?));
        let passed = prefixes.iter().filter_map(last).filter(|(_, known, t)| known.class != **t);
        changes.extend(passed.map(|(net, known, _)| Change::PutAddress(*net, *known)));
        drop_addresses(new, &prefixes, &mut changes);
    }
    let first = new.sets.iter().filter(|(key, _)| !old.sets.contains_key(key));
    changes.extend(first.map(|(key, sets)| Change::PutSets(*key, *sets)));

    changes.extend(passing.keys().map(|(set, key)| Change::DropCell(*set, *key)));
    drop_rows(&before, new, &mut changes);
    changes.extend(
        old.origins.keys().filter(|rule| !new.origins.contains_key(rule)).map(|rule| Change::DropOrigin(*rule)),
    );

    let first = prefixes.keys().filter(|net| !old.ipcache.contains_key(net)).count();
    let sizes = before.sizes();
    let peak = Sizes {
        ipcache: sizes.ipcache + first,
        ports: sizes.ports + added.ports,
        rules: sizes.rules + added.rules + passing.len(),
        sets: sizes.sets + new.rules.keys().filter(|set| !old.rules.contains_key(set)).count(),
    };
    Diff { changes, peak }
}

/// The prefixes with rows that differ, each with the class of its addresses (those of no longer prefix) in the old and
/// in the new state. Without an old state, the old class is the new one.
fn prefixes(old: &Tables, new: &Tables) -> BTreeMap<IpNet, Way> {
    let class = |tables: &Tables, net: &IpNet| covering(&tables.ipcache, *net).map(|(_, known)| known.class);
    let changed = new.ipcache.iter().filter(|(net, known)| old.ipcache.get(net) != Some(known)).map(|(net, _)| net);
    let gone = old.ipcache.keys().filter(|net| !new.ipcache.contains_key(net));
    let way = |net: &IpNet| {
        let after = class(new, net)?;
        Some((*net, (class(old, net).unwrap_or(after), after)))
    };
    changed.chain(gone).filter_map(way).collect()
}

fn cells_of(tables: &Tables, set: SetId, class: PeerClass) -> impl Iterator<Item = (PortClass, &Cell)> {
    let rows = tables.rules.get(&set).into_iter();
    rows.flat_map(move |rows| rows.cells.range((class, PortClass::ANY)..=(class, PortClass(u32::MAX))))
        .map(|((_, port), cell)| (*port, cell))
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
fn with_copies<'a>(old: &'a Tables, new: &Tables, ways: &BTreeSet<Way>) -> Cow<'a, Tables> {
    let mut tables = Cow::Borrowed(old);
    let mut copies: BTreeMap<SetId, SetId> = BTreeMap::new();
    let mut free = (1..).map(SetId).filter(|set| !old.rules.contains_key(set) && !new.rules.contains_key(set));
    for (key, before) in &old.sets {
        let Some(after) = new.sets.get(key) else { continue };
        let mut copy = |before: SetId, after: SetId| {
            let Some(rows) = old.rules.get(&before) else { return before };
            let stays = before != after && new.rules.contains_key(&before);
            if !stays || !ways.iter().any(|way| tells_apart(old, new, before, *way)) {
                return before;
            }
            *copies.entry(before).or_insert_with(|| {
                let copy = free.next().unwrap_or(before);
                tables.to_mut().rules.insert(copy, Arc::clone(rows));
                copy
            })
        };
        let ingress = copy(before.ingress, after.ingress);
        let sets = Sets { ingress, egress: copy(before.egress, after.egress) };
        if sets != *before {
            tables.to_mut().sets.insert(*key, sets);
        }
    }
    tables
}

/// The class that addresses of each way have during the change, and the cells that it needs.
fn pass_through(
    old: &Tables,
    new: &Tables,
    prefixes: &BTreeMap<IpNet, Way>,
    ways: &BTreeSet<Way>,
) -> (BTreeMap<Way, PeerClass>, Cells) {
    let mut through = BTreeMap::new();
    let mut cells = BTreeMap::new();
    if ways.is_empty() {
        return (through, cells);
    }
    let classes =
        |tables: &Tables| -> BTreeSet<PeerClass> { tables.ipcache.values().map(|known| known.class).collect() };
    let (before, after) = (classes(old), classes(new));
    let mut free = (1..).map(PeerClass).filter(|class| !before.contains(class) && !after.contains(class));
    let all: BTreeSet<Way> = prefixes.values().copied().collect();
    // To how many classes the addresses of a class go, and from how many they come.
    let (mut to, mut from): (BTreeMap<PeerClass, usize>, BTreeMap<PeerClass, usize>) = Default::default();
    for (o, n) in all {
        *to.entry(o).or_default() += 1;
        *from.entry(n).or_default() += 1;
    }

    let left: Vec<SetId> = old.rules.keys().filter(|set| !new.rules.contains_key(set)).copied().collect();
    let taken: Vec<SetId> = new.rules.keys().filter(|set| !old.rules.contains_key(set)).copied().collect();
    // Rule sets of both states that an endpoint takes from another one.
    let joined: BTreeSet<SetId> = new
        .sets
        .iter()
        .filter_map(|(key, sets)| Some((old.sets.get(key)?, sets)))
        .flat_map(|(before, after)| both(*before).into_iter().zip(both(*after)))
        .filter(|(before, after)| before != after && old.rules.contains_key(after))
        .map(|(_, after)| after)
        .collect();

    for way in ways {
        let (o, n) = *way;
        let only_from_o = !before.contains(&n) && from.get(&n) == Some(&1);
        let only_to_n = !after.contains(&o) && to.get(&o) == Some(&1);
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
fn put_rows(old: &Tables, new: &Tables, changes: &mut Vec<Change>) -> Sizes {
    let none = Arc::new(Rows::default());
    let mut added = Sizes::default();
    for (set, rows) in &new.rules {
        let before = old.rules.get(set).unwrap_or(&none);
        if Arc::ptr_eq(before, rows) {
            continue;
        }
        let start = changes.len();
        let ports = rows.ports.iter().filter(|(prefix, _)| !before.ports.contains_key(prefix));
        changes.extend(ports.map(|(prefix, class)| Change::PutPorts(*set, *prefix, *class)));
        added.ports += changes.len() - start;
        let start = changes.len();
        let cells = rows.cells.iter().filter(|(key, _)| !before.cells.contains_key(key));
        changes.extend(cells.map(|(key, cell)| Change::PutCell(*set, *key, *cell)));
        added.rules += changes.len() - start;
    }
    added
}

/// Rows of rule sets that are in the new tables no longer.
fn drop_rows(old: &Tables, new: &Tables, changes: &mut Vec<Change>) {
    let none = Arc::new(Rows::default());
    for (set, rows) in &old.rules {
        let after = new.rules.get(set).unwrap_or(&none);
        if Arc::ptr_eq(after, rows) {
            continue;
        }
        let cells = rows.cells.keys().filter(|key| !after.cells.contains_key(key));
        changes.extend(cells.map(|key| Change::DropCell(*set, *key)));
        let ports = rows.ports.keys().filter(|prefix| !after.ports.contains_key(prefix));
        changes.extend(ports.map(|prefix| Change::DropPorts(*set, *prefix)));
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
    let mut gone: Vec<IpNet> = prefixes.keys().filter(|net| !new.ipcache.contains_key(net)).copied().collect();
    gone.sort_by_key(IpNet::prefix_len);
    changes.extend(gone.into_iter().map(Change::DropAddress));
}
