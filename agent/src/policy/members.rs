//! Endpoints as policy sees them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use imbl::{OrdMap, OrdSet};
use wharf_cluster::feed::FeedPod;
use wharf_core::{
    endpoint::EndpointRecord,
    identity::{Identity, Label},
    identity_allocator::security_relevant,
    ids::{EndpointId, Epoch, PortName},
    policy::{Enforcement, NamedPort},
};
use wharf_policy::{
    compile::{self, EndpointKey, Event, Member},
    model::{self, Endpoint, Labels, PolicyName, Protocol},
};

use super::{documents::Documents, rows::key};

/// Of documents that name none (Kubernetes).
const DEFAULT_NAMESPACE: &str = "default";

/// Source of labels of pods.
const K8S: &str = "k8s";

/// Source [`K8S`], in Cilium-style documents.
const NAMESPACE_LABEL: &str = "io.kubernetes.pod.namespace";

const INIT: &str = "reserved:init";

/// Labels that policy selects by; without a pod, also as pod labels, the only ones of `NetworkPolicy`.
fn labels_for(record: &EndpointRecord) -> Labels {
    let mut labels = Labels::new();
    for Label { source, key, value } in security_relevant(&record.labels) {
        if record.pod_name.is_none() && matches!(source.as_str(), "cni" | "container") {
            labels.entry(format!("k8s:{key}")).or_insert_with(|| value.clone());
        }
        labels.insert(format!("{source}:{key}"), value);
    }
    labels
}

/// From the ADD or a label.
fn namespace_of(record: &EndpointRecord) -> String {
    let of_label = |label: &&Label| label.source == "k8s" && label.key == NAMESPACE_LABEL && !label.value.is_empty();
    let by_label = || record.labels.iter().find(of_label).map(|label| label.value.clone());
    record.pod_namespace.clone().or_else(by_label).unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned())
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Surroundings<'a> {
    pub(super) wanted: &'a Documents,
    pub(super) mode: Enforcement,
}

impl Surroundings<'_> {
    /// `init`: the labels are unknown, and policies may isolate.
    fn enforcement(self, own: Enforcement, init: bool) -> model::Enforcement {
        let always = |kind: &str, name: &str| {
            let (kind, name) = (kind.to_owned(), name.to_owned());
            model::Enforcement::Always(Arc::new(PolicyName { kind, namespace: String::new(), name }))
        };
        match (self.mode, own) {
            (Enforcement::Never, _) => model::Enforcement::Default,
            (_, Enforcement::Never) => model::Enforcement::Never,
            (_, Enforcement::Always) => always("policy-enforcement of the endpoint", "always"),
            (_, Enforcement::Default) if init && !self.wanted.is_empty() => always("identity", INIT),
            (_, Enforcement::Default) => model::Enforcement::Default,
        }
    }
}

fn ports_of(record: &EndpointRecord) -> BTreeMap<(Protocol, String), u16> {
    let port =
        |(name, NamedPort { port, protocol }): (&PortName, &NamedPort)| ((*protocol, name.to_string()), port.get());
    record.all_named_ports().map(port).collect()
}

/// An endpoint in the kernel without a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unrecorded {
    /// Endpoint id.
    pub id: EndpointId,
    /// Epoch of its link.
    pub epoch: Epoch,
    /// Its rows in `ENDPOINTS`.
    pub addresses: Vec<IpAddr>,
}

/// Endpoints, and a number for each set of labels; numbers are not reused.
#[derive(Debug, Clone, Default)]
pub(super) struct Members {
    endpoints: OrdMap<EndpointId, Place>,
    addresses: OrdMap<(IpAddr, u16), EndpointId>,
    /// Isolated regardless of policies.
    isolated: usize,
    numbers: OrdMap<Arc<(Labels, Option<Labels>)>, u32>,
    identities: OrdMap<u32, Identity>,
    last: u32,
    /// Containers of other nodes, by uid.
    elsewhere: OrdMap<Arc<str>, Elsewhere>,
    numbers_elsewhere: OrdMap<Arc<(Labels, Option<Labels>)>, u32>,
    /// Keys below `next_key` that no container has.
    free_keys: OrdSet<u32>,
    next_key: u32,
}

/// Keys of containers of other nodes are above every endpoint id, so that an endpoint of this node takes precedence.
const FIRST_KEY: u32 = 1 << 16;

/// A container of another node.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Elsewhere {
    key: u32,
    namespace: String,
    member: Member,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) epoch: Epoch,
    pub(super) namespace: Option<String>,
    /// Overrides the node's mode.
    pub(super) own: Enforcement,
    init: bool,
    pub(super) member: Member,
}

impl Members {
    /// `None` if unchanged.
    pub(super) fn insert(&mut self, record: &EndpointRecord, node: Surroundings<'_>) -> Option<Event> {
        let (health, init) = (record.identity == Identity::HEALTH, record.identity == Identity::INIT);
        // Rules about pods of a namespace require known labels.
        let namespace = (!health && !init).then(|| namespace_of(record));
        let own = record.policy_enforcement;
        let endpoint = Endpoint {
            addresses: record.addresses().collect(),
            labels: if init { [(INIT.to_owned(), String::new())].into() } else { labels_for(record) },
            namespace: namespace.as_deref().map(|namespace| node.wanted.labels_here(namespace)),
            ports: ports_of(record),
            health,
            elsewhere: false,
            enforcement: node.enforcement(own, init),
        };
        let place = |member| Place { epoch: record.epoch, namespace, own, init, member };
        self.put(record.id, record.identity, endpoint, place)
    }

    /// An endpoint whose record was lost, as one whose labels are not known yet.
    pub(super) fn insert_unrecorded(&mut self, lost: Unrecorded, node: Surroundings<'_>) {
        let own = Enforcement::Default;
        let endpoint = Endpoint {
            addresses: lost.addresses,
            labels: [(INIT.to_owned(), String::new())].into(),
            enforcement: node.enforcement(own, true),
            ..Endpoint::default()
        };
        let place = |member| Place { epoch: lost.epoch, namespace: None, own, init: true, member };
        self.put(lost.id, Identity::INIT, endpoint, place);
    }

    fn put(
        &mut self,
        id: EndpointId,
        identity: Identity,
        endpoint: Endpoint,
        place: impl FnOnce(Member) -> Place,
    ) -> Option<Event> {
        let number = self.number(&endpoint, identity);
        let member = Member { identity: compile::Identity(number), endpoint: Arc::new(endpoint) };
        let place = place(member.clone());
        let before = self.set(id, Some(place.clone()));
        (before != Some(place)).then(|| Event::Endpoint(key(id), member))
    }

    /// A container of another node; `None` if unchanged.
    pub(super) fn put_elsewhere(&mut self, uid: &str, pod: &FeedPod, node: Surroundings<'_>) -> Option<Event> {
        // A label of the pod cannot claim another namespace.
        let labels = pod.labels.iter().filter(|(key, _)| *key != NAMESPACE_LABEL);
        let labels = labels.map(|(key, value)| (K8S, key.as_str(), value.as_str()));
        let labels = labels.chain([(K8S, NAMESPACE_LABEL, pod.namespace.as_str())]).map(|(source, key, value)| Label {
            source: source.to_owned(),
            key: key.to_owned(),
            value: value.to_owned(),
        });
        let labels = security_relevant(&labels.collect());
        let endpoint = Endpoint {
            addresses: pod.addresses.clone(),
            labels: labels.into_iter().map(|Label { source, key, value }| (format!("{source}:{key}"), value)).collect(),
            namespace: Some(node.wanted.labels_elsewhere(&pod.namespace)),
            ports: pod.named_ports.clone(),
            elsewhere: true,
            ..Endpoint::default()
        };
        self.set_elsewhere(uid, pod.namespace.clone(), endpoint)
    }

    fn set_elsewhere(&mut self, uid: &str, namespace: String, endpoint: Endpoint) -> Option<Event> {
        let of = Arc::new((endpoint.labels.clone(), endpoint.namespace.clone()));
        let number = self.numbers_elsewhere.get(&of).copied().unwrap_or_else(|| {
            self.forget_unused();
            self.last += 1;
            self.numbers_elsewhere.insert(of, self.last);
            self.identities.insert(self.last, Identity(Identity::FIRST_ELSEWHERE.0 + self.last));
            self.last
        });
        let member = Member { identity: compile::Identity(number), endpoint: Arc::new(endpoint) };
        let before = self.elsewhere.get(uid);
        let key = before.map(|before| before.key).unwrap_or_else(|| {
            let free = self.free_keys.get_min().copied();
            free.unwrap_or_else(|| self.next_key.max(FIRST_KEY))
        });
        let place = Elsewhere { key, namespace, member: member.clone() };
        if before == Some(&place) {
            return None;
        }
        self.free_keys.remove(&key);
        self.next_key = self.next_key.max(key.saturating_add(1));
        self.elsewhere.insert(uid.into(), place);
        Some(Event::Endpoint(EndpointKey(key), member))
    }

    /// `None` for an unknown one.
    pub(super) fn remove_elsewhere(&mut self, uid: &str) -> Option<Event> {
        let gone = self.elsewhere.remove(uid)?;
        self.free_keys.insert(gone.key);
        Some(Event::NoEndpoint(EndpointKey(gone.key)))
    }

    fn number(&mut self, endpoint: &Endpoint, identity: Identity) -> u32 {
        let of = Arc::new((endpoint.labels.clone(), endpoint.namespace.clone()));
        if let Some(number) = self.numbers.get(&of).filter(|number| self.identities.get(*number) == Some(&identity)) {
            return *number;
        }
        self.forget_unused();
        self.last += 1;
        self.numbers.insert(of, self.last);
        self.identities.insert(self.last, identity);
        self.last
    }

    fn forget_unused(&mut self) {
        if self.identities.len() < 2 * (self.endpoints.len() + self.elsewhere.len()) + 64 {
            return;
        }
        let here = self.endpoints.values().map(|place| &place.member);
        let members = here.chain(self.elsewhere.values().map(|place| &place.member));
        let used: BTreeSet<u32> = members.map(|member| member.identity.0).collect();
        let elsewhere = std::mem::take(&mut self.numbers_elsewhere).into_iter();
        self.numbers_elsewhere = elsewhere.filter(|(_, n)| used.contains(n)).collect();
        self.numbers = std::mem::take(&mut self.numbers).into_iter().filter(|(_, n)| used.contains(n)).collect();
        self.identities = std::mem::take(&mut self.identities).into_iter().filter(|(n, _)| used.contains(n)).collect();
    }

    pub(super) fn get(&self, id: EndpointId) -> Option<&Place> {
        self.endpoints.get(&id)
    }

    pub(super) fn put_back(&mut self, id: EndpointId, before: Option<Place>) {
        self.set(id, before);
    }

    fn set(&mut self, id: EndpointId, place: Option<Place>) -> Option<Place> {
        let before = self.endpoints.remove(&id);
        for address in before.iter().flat_map(|place| &place.member.endpoint.addresses) {
            self.addresses.remove(&(*address, id.get()));
        }
        for address in place.iter().flat_map(|place| &place.member.endpoint.addresses) {
            self.addresses.insert((*address, id.get()), id);
        }
        self.isolated += usize::from(place.as_ref().is_some_and(is_isolated));
        self.isolated -= usize::from(before.as_ref().is_some_and(is_isolated));
        if let Some(place) = place {
            self.endpoints.insert(id, place);
        }
        before
    }

    pub(super) fn remove(&mut self, id: EndpointId, epoch: Epoch) -> Option<Event> {
        if self.endpoints.get(&id)?.epoch != epoch {
            return None;
        }
        self.set(id, None);
        Some(Event::NoEndpoint(key(id)))
    }

    pub(super) fn renew(&mut self, node: Surroundings<'_>) -> Vec<Event> {
        let mut changed = Vec::new();
        for (id, place) in &self.endpoints {
            let before = &place.member.endpoint;
            let namespace = place.namespace.as_deref().map(|namespace| node.wanted.labels_here(namespace));
            let enforcement = node.enforcement(place.own, place.init);
            if (&namespace, &enforcement) != (&before.namespace, &before.enforcement) {
                changed.push((*id, place.clone(), Endpoint { namespace, enforcement, ..Endpoint::clone(before) }));
            }
        }
        let mut changed_elsewhere = Vec::new();
        for (uid, Elsewhere { namespace, member, .. }) in &self.elsewhere {
            let labels = Some(node.wanted.labels_elsewhere(namespace));
            if member.endpoint.namespace != labels {
                let endpoint = Endpoint { namespace: labels, ..Endpoint::clone(&member.endpoint) };
                changed_elsewhere.push((Arc::clone(uid), namespace.clone(), endpoint));
            }
        }
        let renewed = changed.into_iter().filter_map(|(id, place, endpoint)| {
            let identity = self.identity(place.member.identity)?;
            self.put(id, identity, endpoint, |member| Place { member, ..place })
        });
        let mut events: Vec<Event> = renewed.collect();
        for (uid, namespace, endpoint) in changed_elsewhere {
            events.extend(self.set_elsewhere(&uid, namespace, endpoint));
        }
        events
    }

    pub(super) fn is_any_isolated(&self) -> bool {
        self.isolated > 0
    }

    pub(super) fn without_labels(&self) -> usize {
        self.endpoints.values().filter(|place| place.init).count()
    }

    pub(super) fn identity(&self, number: compile::Identity) -> Option<Identity> {
        self.identities.get(&number.0).copied()
    }

    pub(super) fn by_address(&self, ip: IpAddr) -> Option<EndpointId> {
        self.addresses.get_next(&(ip, 0)).filter(|((address, _), _)| *address == ip).map(|(_, id)| *id)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = Event> {
        let here = self.endpoints.iter().map(|(id, place)| Event::Endpoint(key(*id), place.member.clone()));
        let elsewhere = self.elsewhere.values();
        here.chain(elsewhere.map(|place| Event::Endpoint(EndpointKey(place.key), place.member.clone())))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (EndpointId, &Place)> {
        self.endpoints.iter().map(|(id, place)| (*id, place))
    }
}

fn is_isolated(place: &Place) -> bool {
    matches!(place.member.endpoint.enforcement, model::Enforcement::Always(_))
}

#[cfg(test)]
mod tests {
    use wharf_policy::model::{NAMESPACE_NAME, UNKNOWN_LABELS};

    use super::*;

    const fn around(wanted: &Documents) -> Surroundings<'_> {
        Surroundings { wanted, mode: Enforcement::Default }
    }

    #[test]
    fn a_container_of_another_node_is_known_without_the_labels_of_its_namespace_until_they_arrive() {
        let pod = FeedPod {
            uid: "one".to_owned(),
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            addresses: vec!["10.88.0.9".parse().expect("address")],
            node: "b".to_owned(),
            labels: BTreeMap::from([("app".to_owned(), "web".to_owned())]).into(),
            named_ports: BTreeMap::new(),
        };
        let mut wanted = Documents::default();
        wanted.awaits_namespaces = true;
        let mut members = Members::default();
        let member = |event: Option<Event>| match event {
            Some(Event::Endpoint(_, member)) => member,
            other => panic!("{other:?}"),
        };
        let first = member(members.put_elsewhere("one", &pod, around(&wanted)));
        let namespace = first.endpoint.namespace.clone().expect("a namespace");
        assert_eq!(namespace.keys().collect::<Vec<_>>(), [UNKNOWN_LABELS, NAMESPACE_NAME]);
        assert_eq!(first.endpoint.addresses, pod.addresses);
        wanted.set_labels_of_cluster("shop", Some(BTreeMap::from([("team".to_owned(), "red".to_owned())])));
        let second = member(members.renew(around(&wanted)).pop());
        let namespace = second.endpoint.namespace.clone().expect("a namespace");
        assert_eq!(namespace.keys().collect::<Vec<_>>(), [NAMESPACE_NAME, "team"]);
        assert_ne!(first.identity, second.identity);
        assert_eq!(second.endpoint.addresses, pod.addresses);
        wanted.awaits_namespaces = false;
        assert!(members.renew(around(&wanted)).is_empty(), "it was known already");
    }
}
