//! Row numbers that an engine made with [`after`](super::Engine::after) takes over: equal rows are not written again,
//! and need no second place in their table.
//!
//! | number | takes the earlier number if |
//! |---|---|
//! | rule set | most endpoints have both, the ports are equal, and most classes have equal cells |
//! | peer class | most prefixes have both, and its cells in all kept rule sets are equal |
//! | rule | both are in the same place of most cells |

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
};

use super::{Cell, Hit, PeerClass, Rows, RuleIndex, SetId, Tables};

/// Highest kept number: [`Ids`](super::ids::Ids) stores all numbers below.
const MOST: u32 = 1 << 20;

/// Earlier numbers by new number.
#[derive(Debug, Clone, Default)]
pub(super) struct Numbers {
    earlier: HashMap<u32, u32>,
    taken: HashSet<u32>,
}

/// How often two numbers are in the same place.
#[derive(Debug, Default)]
struct Votes(HashMap<(u32, u32), usize>);

impl Votes {
    /// Ignores 0: no number, or every peer.
    fn add(&mut self, new: u32, earlier: u32) {
        if new != 0 && (1..=MOST).contains(&earlier) {
            *self.0.entry((new, earlier)).or_default() += 1;
        }
    }

    fn elect(self) -> Numbers {
        let mut pairs: Vec<_> = self.0.into_iter().collect();
        pairs.sort_unstable_by_key(|(pair, votes)| (Reverse(*votes), *pair));
        let mut numbers = Numbers::default();
        for ((new, earlier), _) in pairs {
            if !numbers.earlier.contains_key(&new) && numbers.taken.insert(earlier) {
                numbers.earlier.insert(new, earlier);
            }
        }
        numbers
    }
}

impl Numbers {
    fn get(&self, new: u32) -> Option<u32> {
        self.earlier.get(&new).copied()
    }

    fn remove(&mut self, new: u32) {
        if let Some(earlier) = self.earlier.remove(&new) {
            self.taken.remove(&earlier);
        }
    }

    pub(super) fn into_map(self) -> BTreeMap<u32, u32> {
        self.earlier.into_iter().collect()
    }
}

#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Without [`SetId::DENIES`].
    pub(super) sets: Numbers,
    pub(super) classes: Numbers,
    pub(super) rules: Numbers,
}

impl Kept {
    pub(super) fn of(old: &Tables, new: &Tables) -> Option<Self> {
        let mut votes = Votes::default();
        let mut numbered = BTreeMap::new();
        for (key, after) in &new.sets {
            let Some(before) = old.sets.get(key) else { continue };
            for (before, after) in [(before.ingress, after.ingress), (before.egress, after.egress)] {
                let is_any = before != SetId::NONE && after != SetId::NONE;
                if is_any && (before.0 ^ after.0) & SetId::DENIES == 0 {
                    votes.add(number(after), number(before));
                    numbered.insert((number(after), number(before)), (after, before));
                }
            }
        }
        let sets = votes.elect();
        let pairs: BTreeMap<SetId, SetId> =
            sets.earlier.iter().filter_map(|(after, before)| numbered.get(&(*after, *before)).copied()).collect();
        let mut votes = Votes::default();
        for (net, known) in new.ipcache.iter() {
            if let Some(before) = old.ipcache.get(net) {
                votes.add(known.class.0, before.class.0);
            }
        }
        let mut kept = Self { sets, classes: votes.elect(), rules: Numbers::default() };
        let empty = Rows::default();
        let rows = |after: &SetId, before: &SetId| {
            let [new, old] = [(new, after), (old, before)].map(|(tables, set)| tables.rules.get(set));
            (new.map_or(&empty, |rows| &**rows), old.map_or(&empty, |rows| &**rows))
        };
        let mut votes = Votes::default();
        for (after, before) in &pairs {
            let (new, old) = rows(after, before);
            kept.pair_rules(new, old, &mut votes);
        }
        kept.rules = votes.elect();
        let by_earlier =
            kept.classes.earlier.iter().map(|(new, earlier)| (PeerClass(*earlier), PeerClass(*new))).collect();
        let mut differing = BTreeSet::new();
        for (after, before) in &pairs {
            let (new, old) = rows(after, before);
            match kept.differing(new, old, &by_earlier) {
                Some(classes) => differing.extend(classes),
                None => kept.sets.remove(number(*after)),
            }
        }
        differing.into_iter().for_each(|class| kept.classes.remove(class.0));
        (!kept.sets.earlier.is_empty() || !kept.classes.earlier.is_empty()).then_some(kept)
    }

    fn earlier_class(&self, class: PeerClass) -> Option<PeerClass> {
        if class == PeerClass::ANY { Some(class) } else { self.classes.get(class.0).map(PeerClass) }
    }

    fn pair_rules(&self, new: &Rows, old: &Rows, votes: &mut Votes) {
        for ((class, port), after) in &new.cells {
            let before = self.earlier_class(*class).and_then(|class| old.cells.get(&(class, *port)));
            let Some(before) = before else { continue };
            for (after, before) in [(after.admin, before.admin), (after.rest, before.rest)] {
                let rules = after.and_then(|hit| hit.rule).zip(before.and_then(|hit| hit.rule));
                if let Some((after, before)) = rules {
                    votes.add(after.0, before.0);
                }
            }
        }
    }

    /// Classes whose cells differ; `None` if the ports, the cells of any peer, or most classes differ.
    fn differing(
        &self,
        new: &Rows,
        old: &Rows,
        by_earlier: &HashMap<PeerClass, PeerClass>,
    ) -> Option<BTreeSet<PeerClass>> {
        if new.ports != old.ports {
            return None;
        }
        let mut places: BTreeMap<PeerClass, usize> = BTreeMap::new();
        let mut differing = BTreeSet::new();
        for ((class, port), cell) in &new.cells {
            let Some(earlier) = self.earlier_class(*class) else { continue };
            *places.entry(*class).or_default() += 1;
            if old.cells.get(&(earlier, *port)).is_none_or(|before| *before != self.with_earlier_rules(*cell)) {
                differing.insert(*class);
            }
        }
        let mut earlier_places: BTreeMap<PeerClass, usize> = BTreeMap::new();
        for (class, _) in old.cells.keys() {
            let new = if *class == PeerClass::ANY { Some(class) } else { by_earlier.get(class) };
            if let Some(class) = new {
                *earlier_places.entry(*class).or_default() += 1;
            }
        }
        let others = earlier_places.iter().filter(|(class, count)| places.get(class) != Some(count));
        differing.extend(others.map(|(class, _)| *class));
        let all = places.keys().chain(earlier_places.keys()).collect::<BTreeSet<_>>().len();
        (!differing.contains(&PeerClass::ANY) && differing.len() * 2 <= all).then_some(differing)
    }

    fn with_earlier_rules(&self, cell: Cell) -> Cell {
        let hit = |hit: Option<Hit>| {
            hit.map(|hit| Hit {
                // No earlier rule has this number.
                rule: hit.rule.map(|rule| RuleIndex(self.rules.get(rule.0).unwrap_or(u32::MAX))),
                ..hit
            })
        };
        Cell { admin: hit(cell.admin), rest: hit(cell.rest) }
    }
}

fn number(set: SetId) -> u32 {
    set.0 & !SetId::DENIES
}
