//! Maintains the tables while policies and endpoints change. The maps are persistent: a change works on a copy, and is
//! discarded when refused.
//!
//! A change recomputes only the rule sets, matches and classes that depend on it.

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
    kept::Kept,
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

/// An input change.
#[derive(Debug, Clone)]
pub enum Event {
    /// Insert or replace, by name.
    Policy(Policy),
    /// Remove a policy.
    NoPolicy(PolicyName),
    /// Insert or replace, by key.
    Endpoint(EndpointKey, Member),
    /// Remove an endpoint.
    NoEndpoint(EndpointKey),
    /// Replace the node's addresses.
    Node(BTreeSet<IpAddr>),
    /// Replace the addresses of other nodes.
    OtherNodes(BTreeSet<IpAddr>),
    /// Replace the networks of containers elsewhere; none contains another. Their addresses are outside, but not the
    /// world's, and have no names.
    Pods(BTreeSet<IpNet>),
    /// Lower case, without a trailing dot; without addresses, the name is removed.
    Name(Arc<str>, BTreeSet<IpAddr>),
}

/// All events of a call are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The rows exceed the limits.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// One identity has different labels.
    #[error(transparent)]
    Identity(#[from] IdentityInUse),
}

/// Tables, and the state to change them.
#[derive(Debug, Clone)]
pub struct Engine {
    limits: Limits,
    most_networks: usize,
    tables: Tables,
    sizes: Sizes,
    /// Networks and exceptions of rules in use.
    networks: usize,
    policies: Policies,
    kinds: Kinds,
    atoms: Atoms,
    sets: RuleSets,
    peers: Peers,
    listeners: Listeners,
}

impl Engine {
    /// Engine with empty tables.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self::after(limits, Tables::default())
    }

    /// Continues another engine's `tables`, perhaps in the middle of a change.
    #[must_use]
    pub fn after(limits: Limits, tables: Tables) -> Self {
        Self {
            limits,
            most_networks: usize::MAX,
            networks: 0,
            policies: Policies::new(Ids::beside(tables.origins.keys().map(|rule| rule.0))),
            kinds: Kinds::default(),
            atoms: Atoms::default(),
            sets: RuleSets::new(Ids::beside(tables.rules.keys().map(|set| set.0 & !SetId::DENIES))),
            peers: Peers::new(Ids::beside(tables.classes().map(|class| class.0))),
            listeners: Listeners::of(&tables.listeners),
            sizes: tables.sizes(),
            tables,
        }
    }

    /// Adds rows for networks without rules. Precedes all events.
    #[must_use]
    pub fn with_rows_of(mut self, nets: &[IpNet]) -> Self {
        self.peers = self.peers.with_rows_of(nets);
        self
    }

    /// Limits the networks and exceptions of rules.
    #[must_use]
    pub fn with_networks_at_most(mut self, most: usize) -> Self {
        self.most_networks = most;
        self
    }

    /// Lowest listener port. Precedes all events.
    #[must_use]
    pub fn with_listeners_from(mut self, first: u16) -> Self {
        self.listeners = self.listeners.from(first);
        self
    }

    /// New listeners avoid these ports.
    #[must_use]
    pub fn without_listeners(mut self, avoided: Arc<BTreeSet<u16>>) -> Self {
        self.listeners = self.listeners.without(avoided);
        self
    }

    /// After all events.
    #[must_use]
    pub const fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Row counts.
    #[must_use]
    pub const fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Tables without the engine.
    #[must_use]
    pub fn into_tables(self) -> Tables {
        self.tables
    }

    /// Whether another endpoint differs only in addresses.
    #[must_use]
    pub fn knows(&self, key: EndpointKey, member: &Member) -> bool {
        self.kinds.knows(key, member)
    }

    /// Applies the events as one change. The caller must apply all row changes in order: later calls reuse identifiers.
    ///
    /// # Errors
    /// The rows exceed the limits, or one identity has different labels. Nothing has changed.
    pub fn apply(&mut self, events: impl IntoIterator<Item = Event>) -> Result<Vec<Change>, Refused> {
        let mut next = self.clone();
        let events: Vec<Event> = events.into_iter().collect();
        let again = if self.follows_other_tables() { events.clone() } else { Vec::new() };
        let sizes = next.build(events)?;
        let (networks, most) = (next.networks, self.most_networks);
        let beyond = (networks > most).then_some((Table::Networks, networks, most));
        if let Some(beyond) = beyond.or_else(|| sizes.beyond(&self.limits)) {
            return Err(next.too_large(beyond, false).into());
        }
        if self.follows_other_tables()
            && let Some(kept) = Kept::of(&self.tables, &next.tables)
        {
            next = self.clone().keep(kept);
            next.build(again)?;
        }
        let diff = between(&self.tables, self.sizes, &next.tables);
        if let Some(beyond) = diff.peak.beyond(&self.limits) {
            return Err(next.too_large(beyond, true).into());
        }
        next.policies.settle();
        next.sets.settle();
        next.peers.settle();
        next.listeners.settle();
        *self = next;
        Ok(diff.changes)
    }

    fn follows_other_tables(&self) -> bool {
        self.peers.classes.is_empty() && self.sizes != Sizes::default()
    }

    /// The next build must have the same events.
    fn keep(mut self, kept: Kept) -> Self {
        self.policies.keep(kept.rules.into_map());
        self.sets.keep(kept.sets.into_map());
        self.peers.classes.keep(kept.classes.into_map());
        self
    }

    fn build(&mut self, events: impl IntoIterator<Item = Event>) -> Result<Sizes, IdentityInUse> {
        if self.peers.classes.is_empty() {
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
                Event::OtherNodes(nodes) => self.kinds.set_other_nodes(nodes, &mut touched),
                Event::Pods(pods) => self.peers.set_pods(pods),
                Event::Name(name, addresses) => self.peers.names.set(name, addresses),
            }
        }
        let gone = self.choose_sets(&mut touched);
        let delta = self.atoms.settle();
        let networks = |atoms: &BTreeMap<AtomId, Arc<Atom>>| atoms.values().map(|atom| atom.networks()).sum::<usize>();
        self.networks = self.networks + networks(&delta.added) - networks(&delta.dropped);
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

    fn choose_sets(&mut self, touched: &mut Touched) -> Vec<SetId> {
        let Self { policies, kinds, atoms, sets, .. } = self;
        touched.kinds.extend(touched.names.iter().flat_map(|name| sets.senders_to(name)));
        for id in &touched.kinds {
            let Some(kind) = kinds.get(*id).filter(|kind| !kind.is_elsewhere()) else { continue };
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

    /// Returns the number of cells. Above the limit, it is a lower bound without new cells: memory is bounded.
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
            Table::Ipcache | Table::Networks => peers().map(|(rule, atom)| (rule, networks(atom))).collect(),
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
