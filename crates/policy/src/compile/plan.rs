//! The cells of a rule set.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use imbl::OrdMap;

use super::{
    Cell, Hit, ListenerId, PortClass, PortPrefix, RuleIndex, Ruling,
    atoms::{Atom, AtomId, Atoms},
    ports::{self, PortList},
    selection::{Ports, Prepared, SetKey},
};
use crate::{
    model::{Direction, PortRange},
    requests::Requests,
};

#[derive(Debug)]
pub(super) struct Plan {
    pub(super) key: Arc<SetKey>,
    pub(super) ports: OrdMap<PortPrefix, PortClass>,
    clauses: Vec<Clause>,
    of_any: Vec<usize>,
    of_atom: BTreeMap<AtomId, Vec<usize>>,
}

#[derive(Debug)]
struct Clause {
    hit: Hit,
    admin: bool,
    /// Set even without `hit.rule`.
    rule: Option<RuleIndex>,
    /// The peer must match it, too.
    with: Option<AtomId>,
    ports: Vec<PortClass>,
    requests: Option<Arc<Requests>>,
}

#[derive(Debug, Default)]
pub(super) struct Draft {
    admin: Option<Hit>,
    rest: Option<Hit>,
    /// Decides without a better `rest`.
    redirect: Option<(Hit, Arc<Requests>)>,
}

impl Draft {
    pub(super) fn cell(self, number: impl FnOnce(Arc<Requests>) -> ListenerId) -> Cell {
        let rest = match self.redirect {
            Some((hit, requests)) if self.rest.is_none_or(|rest| hit.rank < rest.rank) => {
                let open = requests.fails_open;
                Some(Hit { ruling: Ruling::Redirect { listener: number(requests), open }, ..hit })
            }
            _ => self.rest,
        };
        Cell { admin: self.admin, rest }
    }
}

impl Plan {
    pub(super) fn new(key: Arc<SetKey>, rules: &[&Arc<Prepared>], atoms: &mut Atoms) -> Self {
        let mut lists = Lists::default();
        let mut plan =
            Self { key, ports: OrdMap::new(), clauses: Vec::new(), of_any: Vec::new(), of_atom: BTreeMap::new() };
        let mut places: Vec<Option<usize>> = Vec::new();
        let mut rank = 0;
        // Rules with requests share two ranks: specific peers, every peer.
        let mut of_requests = None;
        for rule in rules {
            let requests = rule.requests.clone();
            let own = if requests.is_some() { *of_requests.get_or_insert(rank) } else { rank };
            for (with, list) in parts(rule.ports.as_ref(), &plan.key, atoms) {
                let of_any = requests.is_some() && rule.peers.is_none() && with.is_none();
                let (rank, ruling) = (own + u32::from(of_any), rule.ruling);
                let hit = Hit { rank, ruling, rule: rule.told.then_some(rule.index) };
                let (admin, rule_index, requests) = (rule.admin, Some(rule.index), requests.clone());
                plan.add(
                    Clause { hit, admin, rule: rule_index, with, ports: Vec::new(), requests },
                    rule.peers.as_deref(),
                );
                places.push(list.map(|list| lists.place(list)));
            }
            rank = if requests.is_some() { own + 2 } else { own + 1 };
        }
        if !plan.key.isolated_by.is_empty() {
            let hit = Hit { rank, ruling: Ruling::Deny, rule: None };
            plan.add(Clause { hit, admin: false, rule: None, with: None, ports: Vec::new(), requests: None }, None);
            places.push(None);
        }

        let (prefixes, classes) = ports::classes(&lists.lists);
        plan.ports = prefixes;
        for (clause, place) in plan.clauses.iter_mut().zip(places) {
            clause.ports = match place {
                Some(place) => with_unknown(classes.get(place).cloned().unwrap_or_default()),
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

    pub(super) fn atoms(&self) -> impl Iterator<Item = AtomId> {
        self.peers().chain(self.clauses.iter().filter_map(|clause| clause.with))
    }

    pub(super) fn peers(&self) -> impl Iterator<Item = AtomId> {
        self.of_atom.keys().copied()
    }

    pub(super) fn cells_of_any(&self) -> BTreeMap<PortClass, Draft> {
        self.cells(self.of_any.iter().copied(), &[])
    }

    /// Lower bound for the cells of a class.
    pub(super) fn at_least(&self, matching: &[AtomId]) -> usize {
        self.clauses_of(matching).map(|(_, clause)| clause.ports.len()).max().unwrap_or(0)
    }

    pub(super) fn cells_of(&self, matching: &[AtomId]) -> BTreeMap<PortClass, Draft> {
        self.cells(self.clauses_of(matching).map(|(at, _)| at), &self.of_any)
    }

    /// `beside`: clauses that add their requests to a cell only if a clause of `places` has requests there.
    fn cells(&self, places: impl Iterator<Item = usize>, beside: &[usize]) -> BTreeMap<PortClass, Draft> {
        let mut cells: BTreeMap<PortClass, Draft> = BTreeMap::new();
        let mut with_requests: BTreeMap<PortClass, BTreeSet<usize>> = BTreeMap::new();
        for (at, clause) in places.filter_map(|at| Some((at, self.clauses.get(at)?))) {
            for port in &clause.ports {
                let cell = cells.entry(*port).or_default();
                let is_unknown = *port == PortClass::UNKNOWN;
                let hit =
                    if is_unknown { Hit { ruling: Ruling::DenyUnknown, rule: None, ..clause.hit } } else { clause.hit };
                if clause.requests.is_some() && !is_unknown {
                    with_requests.entry(*port).or_default().insert(at);
                    let hit = cell.redirect.take().map_or(hit, |(hit, _)| hit);
                    cell.redirect = clause.requests.clone().map(|requests| (hit, requests));
                    continue;
                }
                let best = if clause.admin { &mut cell.admin } else { &mut cell.rest };
                *best = Some(best.filter(|other| other.rank < hit.rank).unwrap_or(hit));
            }
        }
        for (port, mut places) in with_requests {
            let also = |at: &&usize| self.clauses.get(**at).is_some_and(|clause| clause.ports.contains(&port));
            places.extend(beside.iter().filter(also));
            let clauses = || places.iter().filter_map(|at| self.clauses.get(*at)).filter(|c| c.requests.is_some());
            let requests = clauses().filter_map(|clause| clause.requests.clone());
            let union = requests.reduce(|all, more| if all == more { all } else { Arc::new(all.union(&more)) });
            let first = clauses().next().and_then(|clause| clause.hit.rule);
            if let Some((cell, union)) = cells.get_mut(&port).zip(union) {
                cell.redirect = cell.redirect.take().map(|(hit, _)| (Hit { rule: first, ..hit }, union));
            }
        }
        cells
    }

    fn clauses_of(&self, matching: &[AtomId]) -> impl Iterator<Item = (usize, &Clause)> {
        let at: BTreeSet<usize> =
            matching.iter().filter_map(|atom| self.of_atom.get(atom)).flatten().copied().collect();
        let applies = |clause: &Clause| clause.with.is_none_or(|atom| matching.binary_search(&atom).is_ok());
        let clauses = at.into_iter().filter_map(|at| Some((at, self.clauses.get(at)?)));
        clauses.filter(move |(_, clause)| applies(clause))
    }

    pub(super) fn cell_counts(&self, matching: &[AtomId]) -> impl Iterator<Item = (RuleIndex, usize)> {
        self.clauses_of(matching).filter_map(|(_, clause)| Some((clause.rule?, clause.ports.len())))
    }

    pub(super) fn port_counts(&self) -> impl Iterator<Item = (RuleIndex, usize)> {
        let mut rows: BTreeMap<PortClass, usize> = BTreeMap::new();
        for class in self.ports.values() {
            *rows.entry(*class).or_default() += 1;
        }
        let count = move |clause: &Clause| clause.ports.iter().filter_map(|port| rows.get(port)).sum();
        self.clauses.iter().filter_map(move |clause| Some((clause.rule?, count(clause))))
    }

    pub(super) fn rule_peers(&self) -> impl Iterator<Item = (RuleIndex, AtomId)> {
        let rule = |at: &usize| self.clauses.get(*at).and_then(|clause| clause.rule);
        self.of_atom.iter().flat_map(move |(atom, at)| at.iter().filter_map(rule).map(|rule| (rule, *atom)))
    }
}

/// Additional atoms and port lists (`None`: all).
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
                // The peer is the receiver, and must declare the number.
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

fn with_unknown(mut ports: Vec<PortClass>) -> Vec<PortClass> {
    if !ports.is_empty() {
        ports.push(PortClass::UNKNOWN);
    }
    ports
}

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
