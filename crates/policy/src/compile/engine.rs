//! Keeps the tables of policies and endpoints that change.
//!
//! What is kept, and what makes it be computed again:
//!
//! | kept | computed again |
//! |---|---|
//! | which policies select an identity | for a policy that changes; for an identity that is new |
//! | the rule sets of a kind of endpoint (identity, declared ports, health, enforcement, share) | if a policy that selects it changes |
//! | a rule set's port classes | never: other rules, or other numbers of its named ports, are another rule set |
//! | which atoms match an identity | for atoms that are new in the rule sets in use |
//! | networks that contain each other | for networks that come into use or go out of it, and those that they contain |
//! | the addresses that a pattern of names matches | of a name, if it has other addresses; of all names, if the pattern comes into use |
//! | the class of an address | if it is new or has another owner, or if other atoms match it |
//! | the cells of a rule set and a peer class | never: the class is another one if atoms of the rule set match it differently |
//!
//! An endpoint of a known kind, with addresses that no rule names, needs nothing of it. An address that a pattern begins to match needs one row, unless
//! it is the first one of its class. A name that no pattern in use matches changes no row.
//!
//! What is kept is in maps that share what is equal, so a change is made in a copy and costs what it changes; a refused one is forgotten with
//! the copy.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;

use super::{
    Cell, Change, EndpointKey, Limits, Listener, Member, PeerClass, PortClass, Rows, RuleIndex, SetId, Sets, Share,
    Sizes, Table, Tables, TooLarge,
    atoms::{Atom, AtomId, Atoms},
    classes::Changed,
    diff::between,
    ids::Ids,
    kinds::{IdentityInUse, Kinds, Touched},
    limits::largest,
    listeners::Listeners,
    peers::Peers,
    plan::{Draft, Plan},
    selection::{Policies, PortName},
    sets::RuleSets,
};
use crate::{
    model::{Direction, Policy, PolicyName},
    requests::Requests,
};

/// A change of what the tables are made from.
#[derive(Debug, Clone)]
pub enum Event {
    /// A policy, in place of the one of its name.
    Policy(Policy),
    /// The policy is gone.
    NoPolicy(PolicyName),
    /// An endpoint, in place of the one with its key.
    Endpoint(EndpointKey, Member),
    /// The endpoint is gone.
    NoEndpoint(EndpointKey),
    /// The addresses of the node.
    Node(BTreeSet<IpAddr>),
    /// The addresses that a name of DNS (in lower case, without a last dot) has from now on, in place of those before; without any, it is
    /// forgotten.
    Name(Arc<str>, BTreeSet<IpAddr>),
}

/// The events are refused, all of them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The rows do not fit.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// An identity stands for two sets of labels.
    #[error(transparent)]
    Identity(#[from] IdentityInUse),
}

/// The tables, and what is needed to change them.
#[derive(Debug, Clone)]
pub struct Engine {
    limits: Limits,
    tables: Tables,
    sizes: Sizes,
    policies: Policies,
    kinds: Kinds,
    atoms: Atoms,
    sets: RuleSets,
    peers: Peers,
    listeners: Listeners,
}

impl Engine {
    /// Without policies and endpoints. Its tables begin empty: the first changes lead from nothing to the first tables.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self::after(limits, Tables::default())
    }

    /// Takes the place of the engine that made `tables`, perhaps not to the end of a change: the first changes lead from them to the
    /// tables of the first events, whose identifiers are others.
    #[must_use]
    pub fn after(limits: Limits, tables: Tables) -> Self {
        Self {
            limits,
            policies: Policies::new(Ids::beside(tables.origins.keys().map(|rule| rule.0))),
            kinds: Kinds::default(),
            atoms: Atoms::default(),
            sets: RuleSets::new(Ids::beside(tables.rules.keys().map(|set| set.0))),
            peers: Peers::new(Ids::beside(tables.classes().map(|class| class.0))),
            listeners: Listeners::of(&tables.listeners),
            sizes: tables.sizes(),
            tables,
        }
    }

    /// Gives these networks rows of their own, whatever the rules say of them. Before the first events.
    #[must_use]
    pub fn with_rows_of(mut self, nets: &[IpNet]) -> Self {
        self.peers = self.peers.with_rows_of(nets);
        self
    }

    /// Takes the numbers of listeners that are new from this one on. Before the first events.
    #[must_use]
    pub fn with_listeners_from(mut self, first: u16) -> Self {
        self.listeners = self.listeners.from(first);
        self
    }

    /// Gives no new listener one of these numbers.
    #[must_use]
    pub fn without_listeners(mut self, avoided: Arc<BTreeSet<u16>>) -> Self {
        self.listeners = self.listeners.without(avoided);
        self
    }

    /// The tables of all events so far.
    #[must_use]
    pub const fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Number of rows of each table.
    #[must_use]
    pub const fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// The tables, without the engine.
    #[must_use]
    pub fn into_tables(self) -> Tables {
        self.tables
    }

    /// Whether there is an endpoint that policy cannot tell from this one but by its addresses. Then one more costs a few
    /// rows, whatever there is.
    #[must_use]
    pub fn knows(&self, key: EndpointKey, member: &Member) -> bool {
        self.kinds.knows(key, member)
    }

    /// Takes in the events as one change. The answer leads from the tables before to the tables after; identifiers that
    /// it removes are used again by later calls, so changes are carried out in order and completely.
    ///
    /// # Errors
    /// The rows do not fit, or two endpoints with different labels have one identity. Then nothing has changed.
    pub fn apply(&mut self, events: impl IntoIterator<Item = Event>) -> Result<Vec<Change>, Refused> {
        let mut next = self.clone();
        if let Some(beyond) = next.build(events)?.beyond(&self.limits) {
            return Err(next.too_large(beyond, false).into());
        }
        let diff = between(&self.tables, self.sizes, &next.tables);
        if let Some(beyond) = diff.peak.beyond(&self.limits) {
            return Err(next.too_large(beyond, true).into());
        }
        // No number is taken before the next call, and the changes have been carried out by then.
        next.policies.settle();
        next.sets.settle();
        next.peers.settle();
        next.listeners.settle();
        *self = next;
        Ok(diff.changes)
    }

    /// Makes the tables after the events. If they have more cells than fit, they are not complete, and the answer has a
    /// lower bound of the number that is needed.
    fn build(&mut self, events: impl IntoIterator<Item = Event>) -> Result<Sizes, IdentityInUse> {
        if self.peers.classes.is_empty() {
            // The first time: the tables are empty, or those of another engine.
            (self.tables, self.sizes) = Default::default();
        }
        let mut touched = Touched::default();
        for event in events {
            match event {
                Event::Policy(policy) => self.policy(&policy.name.clone(), Some(policy), &mut touched),
                Event::NoPolicy(name) => self.policy(&name, None, &mut touched),
                Event::Endpoint(key, member) => self.kinds.insert(key, member, &self.policies, &mut touched)?,
                Event::NoEndpoint(key) => self.kinds.remove(key, &mut touched),
                Event::Node(node) => self.kinds.set_node(node, &mut touched),
                Event::Name(name, addresses) => self.peers.names.set(name, addresses),
            }
        }
        let gone = self.choose_sets(&mut touched);
        let delta = self.atoms.settle();
        let Self { peers, atoms, kinds, tables, .. } = self;
        let changed = peers.update(&delta, &touched, atoms, kinds, &mut tables.ipcache);
        let cells = self.fill_sets(&gone, &changed);
        (self.tables.listeners, self.tables.redirects) = self.listeners.sweep();
        for key in touched.members {
            match self.kinds.sets(key) {
                Some(sets) => drop(self.tables.sets.insert(key, sets)),
                None => drop(self.tables.sets.remove(&key)),
            }
        }
        let Tables { ipcache, rules, listeners, .. } = &self.tables;
        self.sizes = Sizes { ipcache: ipcache.len(), sets: rules.len(), listeners: listeners.len(), ..self.sizes };
        Ok(Sizes { rules: cells, ..self.sizes })
    }

    fn policy(&mut self, name: &PolicyName, policy: Option<Policy>, touched: &mut Touched) {
        let Self { policies, kinds, atoms, tables, .. } = self;
        let affected = policies.set(name, policy, &mut kinds.identities, atoms, &mut tables.origins);
        touched.kinds.extend(affected.into_iter().flat_map(|identity| kinds.of_identity(identity)));
    }

    /// Finds the rule sets of the kinds whose rules may be others. The answer has those that are in use no longer.
    fn choose_sets(&mut self, touched: &mut Touched) -> Vec<SetId> {
        let Self { policies, kinds, atoms, sets, .. } = self;
        touched.kinds.extend(touched.names.iter().flat_map(|name| sets.senders_to(name)));
        for id in &touched.kinds {
            let Some(kind) = kinds.get(*id) else { continue };
            let Some(selected) = kinds.selected(kind) else { continue };
            let own = |name: &PortName| kind.endpoint.ports.get(name).copied().into_iter().collect();
            let ingress = policies.rules(selected, kind, Direction::Ingress, own);
            let egress = policies.rules(selected, kind, Direction::Egress, |name| kinds.numbers(name));
            let new = Sets { ingress: sets.acquire(*id, ingress, atoms), egress: sets.acquire(*id, egress, atoms) };
            let Some(kind) = kinds.get_mut(*id) else { continue };
            let old = std::mem::replace(&mut kind.sets, new);
            let left =
                [(old.ingress, new.ingress), (old.egress, new.egress)].into_iter().filter(|(old, new)| old != new);
            touched.released.extend(left.map(|(old, _)| (old, *id)));
            if old != new {
                touched.members.extend(kinds.members_of(*id));
            }
        }
        let released: BTreeSet<SetId> = touched.released.iter().map(|(set, _)| *set).collect();
        touched.released.drain(..).for_each(|(set, kind)| sets.release(set, kind));
        sets.sweep(released, atoms)
    }

    /// Makes the rows of new rule sets, and those of new classes in the others. The answer is the number of cells; if
    /// it is more than fit, it is a lower bound, and most are not made: a few rules can ask for more cells than the
    /// node has memory for.
    fn fill_sets(&mut self, gone: &[SetId], changed: &Changed) -> usize {
        let Self { sets, peers, tables, limits, sizes, listeners, .. } = self;
        for (set, rows) in gone.iter().filter_map(|set| Some((*set, tables.rules.remove(set)?))) {
            rows.cells.values().for_each(|cell| listeners.release(set, cell));
            sizes.ports -= rows.ports.len();
            sizes.rules -= rows.cells.len();
        }
        for (class, signature) in &changed.gone {
            for set in sets.matched_by(signature) {
                let Some(rows) = tables.rules.get_mut(&set) else { continue };
                let gone: Vec<PortClass> = rows.cells_of(*class).map(|(port, _)| port).collect();
                sizes.rules -= gone.len();
                for port in gone {
                    if let Some(cell) = Arc::make_mut(rows).cells.remove(&(*class, port)) {
                        listeners.release(set, &cell);
                    }
                }
            }
        }
        let mut needed = sizes.rules;
        let mut cells = |listeners: &mut Listeners, (set, plan): (SetId, &Plan), class, signature: &[AtomId]| {
            needed += plan.at_least(signature);
            if needed > limits.rules {
                return Vec::new();
            }
            let cells = plan.cells_of(signature);
            needed += cells.len() - plan.at_least(signature);
            numbered(listeners, (set, plan), class, cells)
        };
        for (class, signature) in &changed.new {
            for set in sets.matched_by(signature) {
                let (Some(plan), Some(rows)) = (sets.plan(set), tables.rules.get_mut(&set)) else { continue };
                let cells = cells(listeners, (set, plan), *class, signature);
                sizes.rules += cells.len();
                if !cells.is_empty() {
                    Arc::make_mut(rows).cells.extend(cells);
                }
            }
        }
        for set in sets.take_new() {
            let Some(plan) = sets.plan(set) else { continue };
            let classes: BTreeSet<PeerClass> = plan.peers().flat_map(|atom| peers.classes.with(atom)).collect();
            let mut all = numbered(listeners, (set, plan), PeerClass::ANY, plan.cells_of_any());
            for class in classes {
                let Some(signature) = peers.classes.signature(class) else { continue };
                all.extend(cells(listeners, (set, plan), class, signature));
            }
            let (ports, isolated_by) = (plan.ports.clone(), plan.key.isolated_by.clone());
            let rows = Rows { ports, cells: all.into_iter().collect(), isolated_by };
            sizes.ports += rows.ports.len();
            sizes.rules += rows.cells.len();
            tables.rules.insert(set, Arc::new(rows));
        }
        needed.max(sizes.rules)
    }

    fn too_large(&self, (table, needed, limit): (Table, usize, usize), during: bool) -> TooLarge {
        let plans = || self.sets.plans();
        let peers = || plans().flat_map(Plan::rule_peers).collect::<BTreeSet<_>>().into_iter();
        let networks = |atom| self.atoms.get(atom).map_or(0, Atom::networks) + self.peers.names.addresses_of(atom);
        let counts: Vec<(RuleIndex, usize)> = match table {
            Table::Ipcache => peers().map(|(rule, atom)| (rule, networks(atom))).collect(),
            Table::Ports => plans().flat_map(Plan::port_counts).collect(),
            Table::Rules => {
                let signatures = || self.peers.classes.signatures();
                plans().flat_map(|plan| signatures().flat_map(|signature| plan.cell_counts(signature))).collect()
            }
            Table::Sets | Table::Listeners => plans().flat_map(|plan| &plan.key.rules).map(|rule| (*rule, 1)).collect(),
        };
        TooLarge { table, needed, limit, during, largest: largest(counts, &self.tables.origins) }
    }
}

/// The cells of a class, with the numbers of their listeners.
fn numbered(
    listeners: &mut Listeners,
    (set, plan): (SetId, &Plan),
    class: PeerClass,
    drafts: BTreeMap<PortClass, Draft>,
) -> Vec<((PeerClass, PortClass), Cell)> {
    let listener = |requests: Arc<Requests>| {
        let share = if requests.names.is_empty() { plan.key.share } else { Share::default() };
        Listener { direction: plan.key.direction, requests, share }
    };
    let mut cell = |draft: Draft| draft.cell(|requests| listeners.acquire(set, listener(requests)));
    drafts.into_iter().map(|(port, draft)| ((class, port), cell(draft))).collect()
}
