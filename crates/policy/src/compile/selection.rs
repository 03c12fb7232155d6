//! Ordered policies, and the rules of a kind.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
};

use imbl::OrdMap;

use super::{
    Identity, L4, RuleIndex, Ruling, Share,
    atoms::{Atom, AtomId, Atoms},
    identities::Identities,
    ids::Ids,
    kinds::Kind,
    ports::PortList,
};
use crate::model::{
    Action, Direction, Endpoint, Enforcement, Labels, Origin, Peer, Policy, PolicyName, Port, PortRange, Protocol,
    Rule, Tier,
};
use crate::requests::Requests;

pub(super) type PortName = (Protocol, String);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Order {
    tier: Tier,
    priority: u16,
    name: PolicyName,
}

impl Order {
    fn of(policy: &Policy) -> Self {
        let priority = if policy.tier == Tier::Namespaced { 0 } else { policy.priority };
        Self { tier: policy.tier, priority, name: policy.name.clone() }
    }
}

#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) index: RuleIndex,
    pub(super) origin: Arc<Origin>,
    pub(super) admin: bool,
    pub(super) ruling: Ruling,
    pub(super) told: bool,
    /// `None` for all.
    pub(super) peers: Option<Vec<AtomId>>,
    /// `None` for all.
    pub(super) ports: Option<Ports>,
    /// `None` for all.
    pub(super) requests: Option<Arc<Requests>>,
    /// Deny rule behind a pass of the admin tier, where unknown labels decide whether the pass matches.
    doubt: Option<Arc<Prepared>>,
}

#[derive(Debug, Default)]
pub(super) struct Ports {
    pub(super) numbers: Arc<PortList>,
    pub(super) named: BTreeSet<PortName>,
}

#[derive(Debug)]
struct Entry {
    policy: Policy,
    rules: Vec<Arc<Prepared>>,
}

impl Entry {
    fn prepared(&self) -> impl Iterator<Item = &Arc<Prepared>> {
        self.rules.iter().flat_map(|rule| std::iter::once(rule).chain(&rule.doubt))
    }
}

#[derive(Debug, Clone)]
pub(super) struct Selected {
    pub(super) labels: Arc<Labels>,
    pub(super) namespace: Option<Arc<Labels>>,
    /// False if unknown labels decide whether the policy applies.
    by: BTreeMap<Arc<Order>, bool>,
}

impl Selected {
    /// `None` if the policy cannot apply.
    fn selected_by(&self, policy: &Policy) -> Option<bool> {
        let (subject, namespace) = (&policy.subject, self.namespace.as_deref());
        subject.may_select(&self.labels, namespace).then(|| subject.selects(&self.labels, namespace))
    }

    pub(super) fn is_of(&self, endpoint: &Endpoint) -> bool {
        self.labels == endpoint.labels && self.namespace == endpoint.namespace
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SetKey {
    pub(super) direction: Direction,
    pub(super) rules: Vec<RuleIndex>,
    pub(super) isolated_by: Vec<PolicyName>,
    /// Of the subject for ingress, of all peers for egress.
    pub(super) numbers: BTreeMap<PortName, Vec<u16>>,
    pub(super) share: Share,
}

#[derive(Debug, Clone)]
pub(super) struct Policies {
    orders: OrdMap<PolicyName, Arc<Order>>,
    entries: OrdMap<Arc<Order>, Arc<Entry>>,
    indices: Ids,
}

impl Policies {
    pub(super) fn new(indices: Ids) -> Self {
        Self { orders: OrdMap::new(), entries: OrdMap::new(), indices }
    }

    pub(super) fn keep(&mut self, numbers: BTreeMap<u32, u32>) {
        self.indices.keep(numbers);
    }

    pub(super) fn settle(&mut self) {
        self.indices.settle();
    }

    /// Returns identities whose rules may have changed.
    pub(super) fn set(
        &mut self,
        name: &PolicyName,
        policy: Option<Policy>,
        identities: &mut Identities,
        atoms: &mut Atoms,
        origins: &mut OrdMap<RuleIndex, Arc<Origin>>,
    ) -> BTreeSet<Identity> {
        let old = self.orders.remove(name).and_then(|order| self.entries.remove_with_key(&order));
        let new = policy.map(|policy| {
            let order = Arc::new(Order::of(&policy));
            let entry = Arc::new(self.prepare(policy, old.as_ref().map(|(_, entry)| &**entry), atoms));
            self.orders.insert(name.clone(), Arc::clone(&order));
            self.entries.insert(Arc::clone(&order), Arc::clone(&entry));
            (order, entry)
        });
        let kept: BTreeSet<_> = new.iter().flat_map(|(_, entry)| entry.prepared()).map(|rule| rule.index).collect();
        for rule in old.iter().flat_map(|(_, entry)| entry.prepared()) {
            rule.peers.iter().flatten().for_each(|atom| atoms.drop(*atom));
            if !kept.contains(&rule.index) {
                self.indices.give_back(rule.index.0);
                origins.remove(&rule.index);
            }
        }
        for rule in new.iter().flat_map(|(_, entry)| entry.prepared()) {
            if origins.get(&rule.index) != Some(&rule.origin) {
                origins.insert(rule.index, Arc::clone(&rule.origin));
            }
        }

        let subjects = [&old, &new].into_iter().flatten().map(|(_, entry)| &entry.policy.subject);
        let affected: BTreeSet<Identity> =
            subjects.flat_map(|subject| identities.perhaps_selected_by(subject)).collect();
        for id in &affected {
            let Some(identity) = identities.get_mut(*id) else { continue };
            let was = old.as_ref().and_then(|(order, _)| Some((order, *identity.by.get(order)?)));
            let is = new.as_ref().and_then(|(order, entry)| Some((order, identity.selected_by(&entry.policy)?)));
            if was != is {
                let identity = Arc::make_mut(identity);
                was.map(|(order, _)| identity.by.remove(order));
                identity.by.extend(is.map(|(order, is_sure)| (Arc::clone(order), is_sure)));
            }
        }
        affected
    }

    /// Equal rules keep their numbers.
    fn prepare(&mut self, policy: Policy, old: Option<&Entry>, atoms: &mut Atoms) -> Entry {
        let mut before: HashMap<_, VecDeque<(RuleIndex, Option<RuleIndex>)>> = HashMap::new();
        for old in old.into_iter().filter(|old| old.policy.tier == policy.tier) {
            for (rule, prepared) in old.policy.rules.iter().zip(&old.rules) {
                let doubt = prepared.doubt.as_ref().map(|doubt| doubt.index);
                before.entry(content(rule)).or_default().push_back((prepared.index, doubt));
            }
        }
        let mut rules = Vec::with_capacity(policy.rules.len());
        for rule in &policy.rules {
            let (index, doubt) = before.get_mut(&content(rule)).and_then(VecDeque::pop_front).unzip();
            let mut take = || RuleIndex(self.indices.take());
            let index = index.unwrap_or_else(&mut take);
            let doubt = passes_in_doubt(&policy, rule).then(|| doubt.flatten().unwrap_or_else(take));
            rules.push(Arc::new(Prepared::new(index, doubt, policy.tier, rule, atoms)));
        }
        drop(before);
        Entry { policy, rules }
    }

    pub(super) fn select(&self, endpoint: &Endpoint) -> Selected {
        let (labels, namespace) = (Arc::clone(&endpoint.labels), endpoint.namespace.clone());
        let mut selected = Selected { labels, namespace, by: BTreeMap::new() };
        let is_by = |(order, entry): (&Arc<Order>, &Arc<Entry>)| {
            Some((Arc::clone(order), selected.selected_by(&entry.policy)?))
        };
        selected.by = self.entries.iter().filter_map(is_by).collect();
        selected
    }

    /// In evaluation order; `None` without rules and isolation.
    pub(super) fn rules(
        &self,
        identity: &Selected,
        kind: &Kind,
        direction: Direction,
        mut numbers: impl FnMut(&PortName) -> Vec<u16>,
    ) -> Option<(SetKey, Vec<&Arc<Prepared>>)> {
        let enforcement = &kind.endpoint.enforcement;
        if *enforcement == Enforcement::Never {
            return None;
        }
        let (mut admin, mut deny, mut baseline) = (Vec::new(), Vec::new(), Vec::new());
        let (mut accept, mut with_requests, mut except) = (Vec::new(), Vec::new(), Vec::new());
        let mut isolated_by = Vec::new();
        let entries = identity.by.iter().filter_map(|(order, is_sure)| Some((self.entries.get(order)?, *is_sure)));
        for (entry, is_sure) in entries {
            let Policy { tier, isolates, .. } = &entry.policy;
            let isolates = match direction {
                Direction::Ingress => isolates.ingress,
                Direction::Egress => isolates.egress,
            };
            if *tier == Tier::Namespaced && isolates {
                isolated_by.push(entry.policy.name.clone());
            }
            for (rule, prepared) in entry.policy.rules.iter().zip(&entry.rules) {
                if rule.direction == direction {
                    match (tier, rule.action) {
                        (Tier::Admin, Action::Pass) => {
                            if is_sure {
                                admin.push(prepared);
                            }
                            if let Some(doubt) = &prepared.doubt {
                                admin.push(doubt);
                            }
                        }
                        // Unknown labels decide whether the policy applies: only its deny rules count.
                        (_, Action::Accept | Action::Pass | Action::Except) if !is_sure => {}
                        (Tier::Admin, _) => admin.push(prepared),
                        (Tier::Namespaced, Action::Deny) => deny.push(prepared),
                        (Tier::Namespaced, Action::Accept) if rule.requests.is_some() => with_requests.push(prepared),
                        (Tier::Namespaced, Action::Accept) => accept.push(prepared),
                        (Tier::Namespaced, Action::Except) => except.push(prepared),
                        (Tier::Namespaced, Action::Pass) => {}
                        (Tier::Baseline, _) => baseline.push(prepared),
                    }
                }
            }
        }
        if let Enforcement::Always(by) = enforcement {
            isolated_by.push(PolicyName::clone(by));
        }
        // Isolation precedes the baseline tier.
        if !isolated_by.is_empty() {
            baseline.clear();
        } else {
            except.clear();
        }
        let rules = [admin, deny, accept, with_requests, except, baseline].concat();
        if rules.is_empty() && isolated_by.is_empty() {
            return None;
        }
        let named = rules.iter().filter_map(|rule| rule.ports.as_ref()).flat_map(|ports| &ports.named);
        let numbers = named.map(|name| (name.clone(), numbers(name))).collect();
        let indices = rules.iter().map(|rule| rule.index).collect();
        // The agent filters DNS names; its listeners need no shares.
        let judged = rules.iter().filter_map(|rule| rule.requests.as_ref()).any(|requests| requests.names.is_empty());
        let share = if judged { kind.share() } else { Share::default() };
        Some((SetKey { direction, rules: indices, isolated_by, numbers, share }, rules))
    }
}

fn passes_in_doubt(policy: &Policy, rule: &Rule) -> bool {
    let is_in_doubt = |peer: &Peer| matches!(peer, Peer::Endpoints(selector) if selector.needs_namespace_labels());
    policy.tier == Tier::Admin
        && rule.action == Action::Pass
        && (policy.subject.needs_namespace_labels() || rule.peers.iter().flatten().any(is_in_doubt))
}

type Content<'a> = (Direction, Action, Option<&'a [Peer]>, Option<&'a [Port]>, Option<&'a Requests>);

fn content(rule: &Rule) -> Content<'_> {
    (rule.direction, rule.action, rule.peers.as_deref(), rule.ports.as_deref(), rule.requests.as_deref())
}

impl Prepared {
    fn new(index: RuleIndex, doubt: Option<RuleIndex>, tier: Tier, rule: &Rule, atoms: &mut Atoms) -> Self {
        let doubt = doubt.map(|index| {
            let rule = Rule { action: Action::Deny, ..rule.clone() };
            Arc::new(Self::new(index, None, tier, &rule, atoms))
        });
        let denies = rule.action == Action::Deny;
        let passes_last = tier == Tier::Baseline && rule.action == Action::Pass;
        let ruling = match rule.action {
            Action::Accept => Ruling::Accept,
            Action::Deny | Action::Except => Ruling::Deny,
            Action::Pass if passes_last => Ruling::Accept,
            Action::Pass => Ruling::Pass,
        };
        let atom = |peer| Atom::of(peer, denies);
        let peers = rule.peers.as_ref().and_then(|peers| peers.iter().map(atom).collect::<Option<BTreeSet<_>>>());
        let mut hold = |atom| {
            let id = atoms.intern(atom);
            atoms.hold(id);
            id
        };
        let peers = peers.map(|peers| peers.into_iter().map(&mut hold).collect());
        let (admin, told) = (tier == Tier::Admin, !passes_last);
        // Requests without ports match nothing.
        let listed = rule.ports.as_deref().or(rule.requests.as_ref().map(|_| &[][..]));
        let (origin, ports) = (Arc::new(rule.origin.clone()), listed.map(Ports::new));
        Self { index, origin, admin, ruling, told, peers, ports, requests: rule.requests.clone(), doubt }
    }
}

impl Ports {
    fn new(ports: &[Port]) -> Self {
        let mut own = Self::default();
        let mut numbers = PortList::new();
        for port in ports {
            match port {
                Port::Numbers { protocol, ports } => drop(numbers.insert(((*protocol).into(), *ports))),
                Port::Named { protocol, name } => drop(own.named.insert((*protocol, name.clone()))),
                Port::Icmp { v6, kind } => {
                    let types = kind.map_or(0..=u8::MAX, |kind| kind..=kind);
                    let range = PortRange { first: (*types.start()).into(), last: (*types.end()).into() };
                    numbers.insert((if *v6 { L4::Icmp6 } else { L4::Icmp }, range));
                }
            }
        }
        own.numbers = Arc::new(numbers);
        own
    }
}
