//! One rule set: its rules with the port classes that they contain, and its cells for any class of peers.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use imbl::OrdMap;

use super::{
    Cell, Hit, PortClass, PortPrefix, RuleIndex, Ruling,
    atoms::{Atom, AtomId, Atoms},
    ports::{self, PortList},
    selection::{Ports, Prepared, SetKey},
};
use crate::model::{Direction, PortRange};

/// A rule set in use.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) key: Arc<SetKey>,
    pub(super) ports: OrdMap<PortPrefix, PortClass>,
    clauses: Vec<Clause>,
    /// Clauses for every peer.
    of_any: Vec<usize>,
    /// Clauses by the atoms of which a peer must match one.
    of_atom: BTreeMap<AtomId, Vec<usize>>,
}

/// A rule, or the part of it that is about one list of ports.
#[derive(Debug)]
struct Clause {
    hit: Hit,
    admin: bool,
    /// The rule, also where `hit` does not name it.
    rule: Option<RuleIndex>,
    /// An atom that the peer must match as well.
    with: Option<AtomId>,
    ports: Vec<PortClass>,
}

impl Plan {
    /// Activates the atoms of the rules.
    pub(super) fn new(key: Arc<SetKey>, rules: &[&Arc<Prepared>], atoms: &mut Atoms) -> Self {
        let mut lists = Lists::default();
        let mut plan =
            Self { key, ports: OrdMap::new(), clauses: Vec::new(), of_any: Vec::new(), of_atom: BTreeMap::new() };
        // For each clause the place of its list of ports; `None` for every destination.
        let mut places: Vec<Option<usize>> = Vec::new();
        let mut rank = 0;
        for rule in rules {
            let hit = Hit { rank, ruling: rule.ruling, rule: rule.told.then_some(rule.index) };
            for (with, list) in parts(rule.ports.as_ref(), &plan.key, atoms) {
                let rule_index = Some(rule.index);
                plan.add(
                    Clause { hit, admin: rule.admin, rule: rule_index, with, ports: Vec::new() },
                    rule.peers.as_deref(),
                );
                places.push(list.map(|list| lists.place(list)));
            }
            rank += 1;
        }
        if !plan.key.isolated_by.is_empty() {
            let hit = Hit { rank, ruling: Ruling::Deny, rule: None };
            plan.add(Clause { hit, admin: false, rule: None, with: None, ports: Vec::new() }, None);
            places.push(None);
        }

        let (prefixes, classes) = ports::classes(&lists.lists);
        plan.ports = prefixes;
        for (clause, place) in plan.clauses.iter_mut().zip(places) {
            clause.ports = match place {
                Some(place) => classes.get(place).cloned().unwrap_or_default(),
                None => vec![PortClass::ANY],
            };
        }
        plan.atoms().for_each(|atom| atoms.activate(atom));
        plan
    }

    fn add(&mut self, clause: Clause, peers: Option<&[AtomId]>) {
        let at = self.clauses.len();
        match (peers, clause.with) {
            (Some(peers), _) => peers.iter().for_each(|atom| self.of_atom.entry(*atom).or_default().push(at)),
            (None, Some(atom)) => self.of_atom.entry(atom).or_default().push(at),
            (None, None) => self.of_any.push(at),
        }
        self.clauses.push(clause);
    }

    /// The atoms that tell peers apart; some may come twice.
    pub(super) fn atoms(&self) -> impl Iterator<Item = AtomId> {
        self.peers().chain(self.clauses.iter().filter_map(|clause| clause.with))
    }

    /// Atoms of which every peer that has cells of its own matches one.
    pub(super) fn peers(&self) -> impl Iterator<Item = AtomId> {
        self.of_atom.keys().copied()
    }

    /// The cells of [`super::PeerClass::ANY`].
    pub(super) fn cells_of_any(&self) -> BTreeMap<PortClass, Cell> {
        cells(self.of_any.iter().filter_map(|at| self.clauses.get(*at)))
    }

    /// A class of peers that these atoms match has no fewer cells than this.
    pub(super) fn at_least(&self, matching: &[AtomId]) -> usize {
        self.clauses_of(matching).map(|clause| clause.ports.len()).max().unwrap_or(0)
    }

    /// The cells of a class of peers that these atoms, in order, match.
    pub(super) fn cells_of(&self, matching: &[AtomId]) -> BTreeMap<PortClass, Cell> {
        cells(self.clauses_of(matching))
    }

    fn clauses_of(&self, matching: &[AtomId]) -> impl Iterator<Item = &Clause> {
        let at: BTreeSet<usize> =
            matching.iter().filter_map(|atom| self.of_atom.get(atom)).flatten().copied().collect();
        let applies = |clause: &&Clause| clause.with.is_none_or(|atom| matching.binary_search(&atom).is_ok());
        at.into_iter().filter_map(|at| self.clauses.get(at)).filter(applies)
    }

    /// Rules with the number of cells that each needs for a class of peers.
    pub(super) fn cell_counts(&self, matching: &[AtomId]) -> impl Iterator<Item = (RuleIndex, usize)> {
        self.clauses_of(matching).filter_map(|clause| Some((clause.rule?, clause.ports.len())))
    }

    /// Rules with the number of port rows that each needs.
    pub(super) fn port_counts(&self) -> impl Iterator<Item = (RuleIndex, usize)> {
        let mut rows: BTreeMap<PortClass, usize> = BTreeMap::new();
        for class in self.ports.values() {
            *rows.entry(*class).or_default() += 1;
        }
        let count = move |clause: &Clause| clause.ports.iter().filter_map(|port| rows.get(port)).sum();
        self.clauses.iter().filter_map(move |clause| Some((clause.rule?, count(clause))))
    }

    /// Rules with each of their peers.
    pub(super) fn rule_peers(&self) -> impl Iterator<Item = (RuleIndex, AtomId)> {
        let rule = |at: &usize| self.clauses.get(*at).and_then(|clause| clause.rule);
        self.of_atom.iter().flat_map(move |(atom, at)| at.iter().filter_map(rule).map(|rule| (rule, *atom)))
    }
}

fn cells<'a>(clauses: impl Iterator<Item = &'a Clause>) -> BTreeMap<PortClass, Cell> {
    let mut cells: BTreeMap<PortClass, Cell> = BTreeMap::new();
    for clause in clauses {
        for port in &clause.ports {
            let cell = cells.entry(*port).or_default();
            let best = if clause.admin { &mut cell.admin } else { &mut cell.rest };
            *best = Some(best.filter(|other| other.rank < clause.hit.rank).unwrap_or(clause.hit));
        }
    }
    cells
}

/// The parts of a rule: an atom that the peer must match as well, and a list of ports, `None` for every destination.
fn parts(ports: Option<&Ports>, key: &SetKey, atoms: &mut Atoms) -> Vec<(Option<AtomId>, Option<Arc<PortList>>)> {
    let Some(ports) = ports else { return vec![(None, None)] };
    let mut parts = Vec::new();
    let mut numbers = Arc::clone(&ports.numbers);
    for name in &ports.named {
        for number in key.numbers.get(name).into_iter().flatten().copied() {
            let port = (name.0.into(), PortRange { first: number, last: number });
            if key.direction == Direction::Ingress {
                Arc::make_mut(&mut numbers).insert(port);
            } else {
                // The receiver is the peer: the number counts for those that declare it.
                let declares = Atom::Declares { protocol: name.0, name: name.1.clone(), number };
                parts.push((Some(atoms.intern(declares)), Some(Arc::new([port].into()))));
            }
        }
    }
    if !numbers.is_empty() {
        parts.push((None, Some(numbers)));
    }
    parts
}

/// Lists of ports, each once.
#[derive(Default)]
struct Lists {
    lists: Vec<Arc<PortList>>,
    places: BTreeMap<Arc<PortList>, usize>,
}

impl Lists {
    fn place(&mut self, list: Arc<PortList>) -> usize {
        *self.places.entry(list).or_insert_with_key(|list| {
            self.lists.push(Arc::clone(list));
            self.lists.len() - 1
        })
    }
}
