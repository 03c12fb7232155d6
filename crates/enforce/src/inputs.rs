//! Inputs of policy.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use ipnet::IpNet;
use wharf_cluster::feed::FeedPod;
use wharf_core::{
    endpoint::EndpointRecord,
    ids::{EndpointId, Epoch},
    policy::Enforcement,
};
use wharf_dns::cache::{Cache, Changed};
use wharf_policy::{
    compile::{EndpointKey, Event, Member, SetId, Tables},
    model::{self, Directions, Endpoint, Origin, Policy, PolicyName, Selector, Tier},
};

use crate::{
    documents::Documents,
    members::{Members, Surroundings},
    names,
};

/// Another node's container by uid; `None`: removed.
pub type ChangedPod = (Arc<str>, Option<Arc<FeedPod>>);

/// A change of the inputs.
#[derive(Debug, Clone)]
pub enum Input {
    /// A new or changed endpoint of this node.
    Endpoint(Box<EndpointRecord>),
    /// An endpoint is gone. Another epoch changes nothing.
    NoEndpoint(EndpointId, Epoch),
    /// All policies and namespace labels. Precedes [`Input::Pods`].
    Documents(Documents),
    /// Other nodes' containers.
    Pods(Vec<ChangedPod>),
    /// All addresses of the node.
    Node(BTreeSet<IpAddr>),
    /// All addresses of other nodes.
    OtherNodes(BTreeSet<IpAddr>),
    /// All other nodes' container networks; none contains another.
    PodNetworks(BTreeSet<IpNet>),
    /// All addresses of names, and changed names.
    Names(Cache, Changed),
    /// Mode of enforcement.
    Enforcement(Enforcement),
}

/// Inputs of policy. Copies share their content.
#[derive(Debug, Clone, Default)]
pub struct Inputs {
    /// When policy is enforced.
    pub enforcement: Enforcement,
    /// Policies and namespace labels.
    pub documents: Documents,
    /// Containers.
    pub members: Members,
    /// Addresses of the node.
    pub node: Arc<BTreeSet<IpAddr>>,
    /// Other nodes' container networks.
    pub pod_networks: Arc<BTreeSet<IpNet>>,
    /// Addresses of other nodes.
    pub other_nodes: Arc<BTreeSet<IpAddr>>,
    /// Addresses of names.
    pub names: Cache,
}

impl Inputs {
    /// Inputs without content.
    #[must_use]
    pub fn new(enforcement: Enforcement) -> Self {
        Self { enforcement, ..Self::default() }
    }

    /// Returns events for an engine with the earlier inputs; `None`: rows must be computed from all inputs.
    pub fn apply(&mut self, input: Input, services: &[IpNet]) -> Option<Vec<Event>> {
        Some(match input {
            Input::Endpoint(record) => {
                let Self { members, documents, enforcement, .. } = self;
                let event = members.insert(&record, Surroundings { documents, mode: *enforcement });
                event.into_iter().collect()
            }
            Input::NoEndpoint(id, epoch) => self.members.remove(id, epoch).into_iter().collect(),
            Input::Documents(documents) => self.replace(documents, services),
            Input::Pods(pods) => {
                let Self { members, documents, .. } = self;
                let events = pods.into_iter().filter_map(|(uid, pod)| match pod {
                    Some(pod) => members.put_elsewhere(pod, documents),
                    None => members.remove_elsewhere(&uid),
                });
                events.collect()
            }
            Input::Node(node) if *self.node != node => {
                self.node = Arc::new(node.clone());
                vec![Event::Node(node)]
            }
            Input::OtherNodes(nodes) if *self.other_nodes != nodes => {
                self.other_nodes = Arc::new(nodes.clone());
                vec![Event::OtherNodes(nodes)]
            }
            Input::PodNetworks(pods) if *self.pod_networks != pods => {
                self.pod_networks = Arc::new(pods.clone());
                vec![Event::Pods(pods)]
            }
            Input::Node(_) | Input::OtherNodes(_) | Input::PodNetworks(_) => Vec::new(),
            Input::Names(names, changed) => {
                self.names = names;
                names::events(&self.names, &changed, services)
            }
            Input::Enforcement(enforcement) => {
                self.enforcement = enforcement;
                self.renew();
                return None;
            }
        })
    }

    /// Lost policies stay lost until documents replace them.
    fn replace(&mut self, mut documents: Documents, services: &[IpNet]) -> Vec<Event> {
        documents.lost &= self.documents.lost;
        documents.awaits_cluster &= self.documents.awaits_cluster;
        documents.lacks_rows &= self.documents.lacks_rows;
        let before = std::mem::replace(&mut self.documents, documents);
        let mut events = match self.enforcement {
            Enforcement::Never => Vec::new(),
            Enforcement::Default | Enforcement::Always => self.documents.events_since(&before, services),
        };
        if !self.documents.says_the_same_of_endpoints(&before) {
            events.extend(self.renew());
        }
        events
    }

    fn renew(&mut self) -> Vec<Event> {
        let Self { members, documents, enforcement, .. } = self;
        members.renew(Surroundings { documents, mode: *enforcement })
    }

    /// There is a policy, or an endpoint isolated without one.
    #[must_use]
    pub fn need_rows(&self) -> bool {
        self.enforcement == Enforcement::Always || !self.documents.is_empty() || self.members.is_any_isolated()
    }

    /// For an engine without inputs: isolates endpoints that have rules.
    pub(crate) fn isolated(&self, tables: &Tables) -> Vec<Event> {
        let name = PolicyName { kind: "start".into(), namespace: String::new(), name: "isolated".into() };
        let always = model::Enforcement::Always(Arc::new(name));
        let has_rules = |key: &EndpointKey| {
            tables.sets.get(key).is_some_and(|sets| [sets.ingress, sets.egress] != [SetId::NONE; 2])
        };
        let endpoints = self.members.all().map(|event| match event {
            Event::Endpoint(key, Member { identity, endpoint }) => {
                let enforcement = if has_rules(&key) { always.clone() } else { model::Enforcement::Default };
                let endpoint = Arc::new(Endpoint { enforcement, ..Endpoint::clone(&endpoint) });
                Event::Endpoint(key, Member { identity, endpoint })
            }
            other => other,
        });
        let node = Event::Node(BTreeSet::clone(&self.node));
        [node].into_iter().chain(endpoints).collect()
    }

    /// For an engine without inputs.
    pub(crate) fn all(&self, services: &[IpNet]) -> Vec<Event> {
        let others = Event::OtherNodes(BTreeSet::clone(&self.other_nodes));
        let pods = Event::Pods(BTreeSet::clone(&self.pod_networks));
        let mut events = vec![Event::Node(BTreeSet::clone(&self.node)), others, pods];
        if self.enforcement != Enforcement::Never {
            events.extend(self.documents.events_since(&Documents::default(), services));
        }
        if self.enforcement == Enforcement::Always {
            events.push(Event::Policy(isolates_all()));
        }
        events.extend(self.members.all());
        events.extend(names::all(&self.names, services));
        events
    }
}

/// For `--policy-enforcement always`.
fn isolates_all() -> Policy {
    let origin =
        Origin { file: "--policy-enforcement".into(), line: 0, document: "always".into(), field: String::new() };
    Policy {
        name: PolicyName { kind: "--policy-enforcement".into(), namespace: String::new(), name: "always".into() },
        subject: Selector::default(),
        tier: Tier::Namespaced,
        priority: 0,
        isolates: Directions { ingress: true, egress: true },
        rules: Vec::new(),
        origin,
    }
}
