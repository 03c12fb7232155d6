//! Endpoints as policy sees them.

use std::{
    cmp::Ordering,
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
    model::{self, Endpoint, Labels, NamedPorts, PolicyName},
};

use crate::{documents::Documents, rows::key};

/// Kubernetes' namespace for documents without one.
const DEFAULT_NAMESPACE: &str = "default";

/// Source of pod labels.
const K8S: &str = "k8s";

/// With source [`K8S`], in Cilium-style documents.
const NAMESPACE_LABEL: &str = "io.kubernetes.pod.namespace";

const INIT: &str = "reserved:init";

/// Without a pod, they are also pod labels, the only ones that `NetworkPolicy` selects by.
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

/// A pod label cannot claim another namespace.
fn labels_elsewhere(pod: &FeedPod) -> Labels {
    let labels = pod.labels.iter().filter(|(key, _)| *key != NAMESPACE_LABEL);
    let labels = labels.map(|(key, value)| (key.as_str(), value.as_str()));
    let labels = labels.chain([(NAMESPACE_LABEL, &*pod.namespace)]).map(|(key, value)| Label {
        source: K8S.to_owned(),
        key: key.to_owned(),
        value: value.to_owned(),
    });
    let labels = security_relevant(&labels.collect()).into_iter();
    labels.map(|Label { source, key, value }| (format!("{source}:{key}"), value)).collect()
}

fn namespace_of(record: &EndpointRecord) -> String {
    let of_label = |label: &&Label| label.source == "k8s" && label.key == NAMESPACE_LABEL && !label.value.is_empty();
    let by_label = || record.labels.iter().find(of_label).map(|label| label.value.clone());
    record.pod_namespace.clone().or_else(by_label).unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned())
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Surroundings<'a> {
    pub(crate) documents: &'a Documents,
    pub(crate) mode: Enforcement,
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
            (_, Enforcement::Default) if init && !self.documents.is_empty() => always("identity", INIT),
            (_, Enforcement::Default) => model::Enforcement::Default,
        }
    }
}

fn labels_of_init() -> Arc<Labels> {
    Arc::new([(INIT.to_owned(), String::new())].into())
}

fn ports_of(record: &EndpointRecord) -> NamedPorts {
    let port =
        |(name, NamedPort { port, protocol }): (&PortName, &NamedPort)| ((*protocol, name.to_string()), port.get());
    record.all_named_ports().map(port).collect()
}

/// An endpoint in the kernel without a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unrecorded {
    pub id: EndpointId,
    /// Epoch of its link.
    pub epoch: Epoch,
    /// Its rows in `ENDPOINTS`.
    pub addresses: Vec<IpAddr>,
}

/// Endpoints, and a unique number for each label set.
#[derive(Debug, Clone, Default)]
pub struct Members {
    endpoints: OrdMap<EndpointId, Place>,
    addresses: OrdMap<(IpAddr, u16), EndpointId>,
    /// Number isolated regardless of policies.
    isolated: usize,
    numbers: OrdMap<LabelSet, u32>,
    identities: OrdMap<u32, Identity>,
    last: u32,
    /// Other nodes' containers by uid.
    elsewhere: OrdMap<Arc<str>, Elsewhere>,
    numbers_elsewhere: OrdMap<LabelSet, u32>,
    /// Label sets that pods with equal labels share.
    rows: OrdMap<RowLabels, (LabelSet, u32)>,
    /// Labels of the namespaces of `rows`.
    namespaces: OrdMap<Arc<str>, Arc<Labels>>,
    /// Size after the last cleanup.
    used: usize,
    /// Unused keys below `next_key`.
    free_keys: OrdSet<u32>,
    next_key: u32,
}

/// Above endpoint ids: this node's endpoints precede other nodes' containers.
const FIRST_KEY: u32 = 1 << 16;

/// Unused entries that need no cleanup.
const MIN_UNUSED: usize = 1_024;

/// Labels of pod and namespace.
type LabelSet = (Arc<Labels>, Option<Arc<Labels>>);

/// Labels of a row (compared by address, because rows share equal ones), and the pod's namespace.
#[derive(Debug, Clone)]
struct RowLabels(Arc<BTreeMap<String, String>>, Arc<str>);

impl RowLabels {
    fn of(pod: &FeedPod) -> Self {
        Self(Arc::clone(&pod.labels), Arc::clone(&pod.namespace))
    }
}

impl Ord for RowLabels {
    fn cmp(&self, other: &Self) -> Ordering {
        Arc::as_ptr(&self.0).cmp(&Arc::as_ptr(&other.0)).then_with(|| self.1.cmp(&other.1))
    }
}

impl PartialOrd for RowLabels {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for RowLabels {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for RowLabels {}

#[derive(Debug, Clone)]
struct Elsewhere {
    key: u32,
    pod: Arc<FeedPod>,
    member: Member,
}

/// An endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub epoch: Epoch,
    /// `None` if labels are unknown.
    pub namespace: Option<String>,
    /// Overrides the node's mode.
    pub own: Enforcement,
    init: bool,
    /// The member in the tables.
    pub member: Member,
}

impl Members {
    /// `None` if unchanged.
    pub(crate) fn insert(&mut self, record: &EndpointRecord, node: Surroundings<'_>) -> Option<Event> {
        let (health, init) = (record.identity == Identity::HEALTH, record.identity == Identity::INIT);
        // Rules about a namespace's pods require known labels.
        let namespace = (!health && !init).then(|| namespace_of(record));
        let own = record.policy_enforcement;
        let endpoint = Endpoint {
            addresses: record.addresses().collect(),
            labels: if init { labels_of_init() } else { labels_for(record).into() },
            namespace: namespace.as_deref().map(|namespace| node.documents.labels_here(namespace).into()),
            ports: ports_of(record).into(),
            health,
            elsewhere: false,
            enforcement: node.enforcement(own, init),
        };
        let place = |member| Place { epoch: record.epoch, namespace, own, init, member };
        self.put(record.id, record.identity, endpoint, place)
    }

    /// As an endpoint with unknown labels.
    pub(crate) fn insert_unrecorded(&mut self, lost: Unrecorded, node: Surroundings<'_>) {
        let own = Enforcement::Default;
        let endpoint = Endpoint {
            addresses: lost.addresses.into(),
            labels: labels_of_init(),
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

    /// `None` if unchanged. After a change of namespaces, call [`Members::renew`] first.
    pub(crate) fn put_elsewhere(&mut self, pod: Arc<FeedPod>, wanted: &Documents) -> Option<Event> {
        let ((labels, namespace), number) = self.set_of(&pod, wanted);
        let endpoint = Endpoint {
            addresses: Arc::clone(&pod.addresses),
            labels,
            namespace,
            ports: Arc::clone(&pod.named_ports),
            health: false,
            elsewhere: true,
            enforcement: model::Enforcement::Default,
        };
        let member = Member { identity: compile::Identity(number), endpoint: Arc::new(endpoint) };
        let before = self.elsewhere.get(&pod.uid);
        let key = before.map(|before| before.key).unwrap_or_else(|| {
            let free = self.free_keys.get_min().copied();
            free.unwrap_or_else(|| self.next_key.max(FIRST_KEY))
        });
        let same = before.map(|before| &before.member).filter(|before| **before == member).cloned();
        let event = same.is_none().then(|| Event::Endpoint(EndpointKey(key), member.clone()));
        self.free_keys.remove(&key);
        self.next_key = self.next_key.max(key.saturating_add(1));
        self.elsewhere.insert(Arc::clone(&pod.uid), Elsewhere { key, pod, member: same.unwrap_or(member) });
        event
    }

    fn set_of(&mut self, pod: &FeedPod, wanted: &Documents) -> (LabelSet, u32) {
        let row = RowLabels::of(pod);
        if let Some(known) = self.rows.get(&row) {
            return known.clone();
        }
        self.forget_unused();
        let namespace = self.namespaces.entry(Arc::clone(&pod.namespace));
        let namespace = Arc::clone(namespace.or_insert_with(|| wanted.labels_elsewhere(&pod.namespace).into()));
        let of = (labels_elsewhere(pod).into(), Some(namespace));
        let known = self.numbers_elsewhere.get_key_value(&of).map(|(of, number)| (of.clone(), *number));
        let known = known.unwrap_or_else(|| {
            self.last += 1;
            self.numbers_elsewhere.insert(of.clone(), self.last);
            self.identities.insert(self.last, Identity(Identity::FIRST_ELSEWHERE.0 + self.last));
            (of, self.last)
        });
        self.rows.insert(row, known.clone());
        known
    }

    /// `None` if unknown.
    pub(crate) fn remove_elsewhere(&mut self, uid: &str) -> Option<Event> {
        let gone = self.elsewhere.remove(uid)?;
        self.free_keys.insert(gone.key);
        Some(Event::NoEndpoint(EndpointKey(gone.key)))
    }

    fn number(&mut self, endpoint: &Endpoint, identity: Identity) -> u32 {
        let of = (Arc::clone(&endpoint.labels), endpoint.namespace.clone());
        if let Some(number) = self.numbers.get(&of).filter(|number| self.identities.get(*number) == Some(&identity)) {
            return *number;
        }
        self.forget_unused();
        self.last += 1;
        self.numbers.insert(of, self.last);
        self.identities.insert(self.last, identity);
        self.last
    }

    /// Removes unused label sets. Scans every container, so it waits for many new sets.
    fn forget_unused(&mut self) {
        if self.identities.len() + self.rows.len() < 2 * self.used + MIN_UNUSED {
            return;
        }
        let here = self.endpoints.values().map(|place| &place.member);
        let members = here.chain(self.elsewhere.values().map(|place| &place.member));
        let used: BTreeSet<u32> = members.map(|member| member.identity.0).collect();
        let rows: BTreeSet<RowLabels> = self.elsewhere.values().map(|place| RowLabels::of(&place.pod)).collect();
        let namespaces: BTreeSet<&Arc<str>> = rows.iter().map(|RowLabels(_, namespace)| namespace).collect();
        retain(&mut self.numbers_elsewhere, |_, number| used.contains(number));
        retain(&mut self.numbers, |_, number| used.contains(number));
        retain(&mut self.identities, |number, _| used.contains(number));
        retain(&mut self.rows, |row, _| rows.contains(row));
        retain(&mut self.namespaces, |namespace, _| namespaces.contains(namespace));
        self.used = self.identities.len() + self.rows.len();
    }

    /// An endpoint of this node.
    pub fn get(&self, id: EndpointId) -> Option<&Place> {
        self.endpoints.get(&id)
    }

    fn set(&mut self, id: EndpointId, place: Option<Place>) -> Option<Place> {
        let before = self.endpoints.remove(&id);
        for address in before.iter().flat_map(|place| &*place.member.endpoint.addresses) {
            self.addresses.remove(&(*address, id.get()));
        }
        for address in place.iter().flat_map(|place| &*place.member.endpoint.addresses) {
            self.addresses.insert((*address, id.get()), id);
        }
        self.isolated += usize::from(place.as_ref().is_some_and(is_isolated));
        self.isolated -= usize::from(before.as_ref().is_some_and(is_isolated));
        if let Some(place) = place {
            self.endpoints.insert(id, place);
        }
        before
    }

    pub(crate) fn remove(&mut self, id: EndpointId, epoch: Epoch) -> Option<Event> {
        if self.endpoints.get(&id)?.epoch != epoch {
            return None;
        }
        self.set(id, None);
        Some(Event::NoEndpoint(key(id)))
    }

    pub(crate) fn renew(&mut self, node: Surroundings<'_>) -> Vec<Event> {
        let mut changed = Vec::new();
        for (id, place) in &self.endpoints {
            let before = &place.member.endpoint;
            let namespace = place.namespace.as_deref().map(|namespace| node.documents.labels_here(namespace).into());
            let enforcement = node.enforcement(place.own, place.init);
            if (&namespace, &enforcement) != (&before.namespace, &before.enforcement) {
                changed.push((*id, place.clone(), Endpoint { namespace, enforcement, ..Endpoint::clone(before) }));
            }
        }
        let renewed = changed.into_iter().filter_map(|(id, place, endpoint)| {
            let identity = self.identity(place.member.identity)?;
            self.put(id, identity, endpoint, |member| Place { member, ..place })
        });
        let mut events: Vec<Event> = renewed.collect();
        events.extend(self.renew_elsewhere(node.documents));
        events
    }

    fn renew_elsewhere(&mut self, wanted: &Documents) -> Vec<Event> {
        let before = self.namespaces.clone();
        let mut changed = BTreeSet::new();
        for (namespace, before) in &before {
            let labels = wanted.labels_elsewhere(namespace);
            if **before != labels {
                self.namespaces.insert(Arc::clone(namespace), labels.into());
                changed.insert(Arc::clone(namespace));
            }
        }
        if changed.is_empty() {
            return Vec::new();
        }
        retain(&mut self.rows, |RowLabels(_, namespace), _| !changed.contains(namespace));
        let pods = self.elsewhere.values().map(|place| Arc::clone(&place.pod));
        let pods: Vec<Arc<FeedPod>> = pods.filter(|pod| changed.contains(&pod.namespace)).collect();
        pods.into_iter().filter_map(|pod| self.put_elsewhere(pod, wanted)).collect()
    }

    pub(crate) fn is_any_isolated(&self) -> bool {
        self.isolated > 0
    }

    /// Number of endpoints with unknown labels.
    pub fn without_labels(&self) -> usize {
        self.endpoints.values().filter(|place| place.init).count()
    }

    pub(crate) fn identity(&self, number: compile::Identity) -> Option<Identity> {
        self.identities.get(&number.0).copied()
    }

    pub fn by_address(&self, ip: IpAddr) -> Option<EndpointId> {
        self.addresses.get_next(&(ip, 0)).filter(|((address, _), _)| *address == ip).map(|(_, id)| *id)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = Event> {
        let here = self.endpoints.iter().map(|(id, place)| Event::Endpoint(key(*id), place.member.clone()));
        let elsewhere = self.elsewhere.values();
        here.chain(elsewhere.map(|place| Event::Endpoint(EndpointKey(place.key), place.member.clone())))
    }

    /// This node's endpoints.
    pub fn iter(&self) -> impl Iterator<Item = (EndpointId, &Place)> {
        self.endpoints.iter().map(|(id, place)| (*id, place))
    }
}

fn retain<K: Ord + Clone, V: Clone>(map: &mut OrdMap<K, V>, is_kept: impl Fn(&K, &V) -> bool) {
    *map = std::mem::take(map).into_iter().filter(|(key, value)| is_kept(key, value)).collect();
}

fn is_isolated(place: &Place) -> bool {
    matches!(place.member.endpoint.enforcement, model::Enforcement::Always(_))
}

#[cfg(test)]
mod tests {
    use wharf_policy::model::{NAMESPACE_NAME, UNKNOWN_LABELS};

    use super::*;

    fn labels(app: &str) -> Arc<BTreeMap<String, String>> {
        Arc::new([("app".to_owned(), app.to_owned())].into())
    }

    fn pod(uid: &str, labels: &Arc<BTreeMap<String, String>>) -> Arc<FeedPod> {
        Arc::new(FeedPod {
            uid: uid.into(),
            namespace: "shop".into(),
            name: "web".into(),
            addresses: ["10.88.0.9".parse().expect("address")].into(),
            node: "b".into(),
            labels: Arc::clone(labels),
            named_ports: Arc::default(),
        })
    }

    fn member(event: Option<Event>) -> Member {
        match event {
            Some(Event::Endpoint(_, member)) => member,
            other => panic!("{other:?}"),
        }
    }

    const fn around(wanted: &Documents) -> Surroundings<'_> {
        Surroundings { documents: wanted, mode: Enforcement::Default }
    }

    #[test]
    fn a_container_of_another_node_is_known_without_the_labels_of_its_namespace_until_they_arrive() {
        let pod = pod("one", &labels("web"));
        let mut wanted = Documents::default();
        wanted.awaits_namespaces = true;
        let mut members = Members::default();
        let first = member(members.put_elsewhere(Arc::clone(&pod), &wanted));
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
        assert!(members.put_elsewhere(pod, &wanted).is_none(), "unchanged");
    }

    #[test]
    fn containers_of_other_nodes_share_labels_and_ports() {
        let mut wanted = Documents::default();
        let mut members = Members::default();
        let web = labels("web");
        let all = |members: &Members| -> Vec<Arc<Endpoint>> {
            members.elsewhere.values().map(|place| Arc::clone(&place.member.endpoint)).collect()
        };
        let shares = |a: &Endpoint, b: &Endpoint| {
            let namespaces = a.namespace.as_ref().zip(b.namespace.as_ref());
            Arc::ptr_eq(&a.labels, &b.labels) && namespaces.is_some_and(|(a, b)| Arc::ptr_eq(a, b))
        };
        let first = member(members.put_elsewhere(pod("a", &web), &wanted));
        let second = member(members.put_elsewhere(pod("b", &web), &wanted));
        // Labels that the feed does not share, and a label outside the set.
        let mut rolled = BTreeMap::clone(&web);
        rolled.insert("pod-template-hash".to_owned(), "1".to_owned());
        let third = member(members.put_elsewhere(pod("c", &Arc::new(rolled)), &wanted));
        assert_eq!((first.identity, first.identity), (second.identity, third.identity));
        let row = pod("d", &web);
        let other = member(members.put_elsewhere(Arc::clone(&row), &wanted));
        assert!(Arc::ptr_eq(&other.endpoint.addresses, &row.addresses));
        assert!(Arc::ptr_eq(&other.endpoint.ports, &row.named_ports));
        assert!(all(&members).windows(2).all(|two| shares(&two[0], &two[1])));

        wanted.set_labels_of_cluster("shop", Some(Labels::new()));
        assert_eq!(members.renew(around(&wanted)).len(), 4);
        assert!(all(&members).windows(2).all(|two| shares(&two[0], &two[1])));
        assert!(!shares(&all(&members)[0], &first.endpoint), "the namespace has other labels");
        let elsewhere = FeedPod { namespace: "store".into(), ..FeedPod::clone(&row) };
        let moved = member(members.put_elsewhere(elsewhere.into(), &wanted));
        assert_eq!(moved.endpoint.labels.get("k8s:io.kubernetes.pod.namespace").map(String::as_str), Some("store"));
    }

    #[test]
    fn label_sets_that_no_container_has_are_removed() {
        let wanted = Documents::default();
        let mut members = Members::default();
        let kept = member(members.put_elsewhere(pod("kept", &labels("kept")), &wanted));
        for n in 0..10 * MIN_UNUSED {
            let changed =
                FeedPod { namespace: format!("ns-{n}").into(), ..FeedPod::clone(&pod("one", &labels("web"))) };
            members.put_elsewhere(changed.into(), &wanted);
            let counts = [members.rows.len(), members.numbers_elsewhere.len(), members.identities.len()];
            assert!(counts.into_iter().all(|count| count <= MIN_UNUSED), "{counts:?}");
            assert!(members.namespaces.len() <= MIN_UNUSED);
        }
        let again = member(members.put_elsewhere(pod("another", &labels("kept")), &wanted));
        assert_eq!(again.identity, kept.identity);
        assert_eq!(members.identity(kept.identity), Some(Identity(Identity::FIRST_ELSEWHERE.0 + 1)));
    }
}
