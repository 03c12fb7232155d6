//! Messages of a producer of the cluster feed.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use prost::Message as _;
use wharf_agent::cluster::feed::rows::{Read, read};
use wharf_cluster::{
    feed::{ApplyError, Changed, Effects, Feed, FeedNamespace, FeedPod, FeedPolicy, Kind, Limits, Refusal},
    nodes::{MAX_NODES, NodeRow, Nodes},
};
use wharf_feed::v1;

/// Maximum bytes of a refusal's cause.
const MAX_CAUSE: usize = 2_048;

/// Applies messages, each after its length, to a feed; length 0 begins a new stream.
pub fn run(mut bytes: &[u8]) {
    let limits = Limits {
        nodes: 8,
        pods: 8,
        namespaces: 4,
        policies: 4,
        policy_bytes: 1_024,
        labels: 4,
        addresses: 16,
        node_addresses: 12,
        bytes: 4_096,
    };
    let mut feed = Feed::new("a", limits);
    let mut told = Told::default();
    feed.open(Kind::ALL.into_iter().collect());
    while !bytes.is_empty() {
        let Ok(message) = v1::Changes::decode_length_delimited(&mut bytes) else { return };
        if message.changes.is_empty() {
            feed.open(Kind::ALL.into_iter().collect());
            continue;
        }
        let Ok(changes) = read(message) else { return };
        for change in changes {
            let applied = match change {
                Read::Change(change) => feed.apply(change),
                Read::Unreadable(row, why) => feed.refuse(row, why),
            };
            match applied {
                Ok(()) => {}
                Err(ApplyError::Refused(refusal)) => sound(&refusal),
                Err(ApplyError::Protocol(why)) => assert!(!why.is_empty()),
            }
        }
        told.take(feed.take_effects());
        check(&feed, &told);
    }
    feed.refused().for_each(|refusal| sound(&refusal));
    let state = feed.state();
    assert_eq!(Feed::restore("a", limits, state.clone()).state(), state);
}

fn sound(refusal: &Refusal) {
    let words = refusal.to_string();
    assert!(!refusal.why.is_empty() && words.len() <= MAX_CAUSE, "{words}");
    assert!(!words.chars().any(char::is_control), "{words:?}");
}

/// Rows in force according to the effects.
#[derive(Default)]
struct Told {
    pods: BTreeMap<Arc<str>, Arc<FeedPod>>,
    namespaces: BTreeMap<Arc<str>, Arc<FeedNamespace>>,
    policies: BTreeMap<Arc<str>, Arc<FeedPolicy>>,
}

impl Told {
    fn take(&mut self, effects: Effects) {
        let Effects { pods, namespaces, policies, .. } = effects;
        put(&mut self.pods, pods);
        put(&mut self.namespaces, namespaces);
        put(&mut self.policies, policies);
    }
}

fn put<R>(all: &mut BTreeMap<Arc<str>, Arc<R>>, changed: Changed<R>) {
    for (key, value) in changed {
        match value {
            Some(value) => drop(all.insert(key, value)),
            None => assert!(all.remove(&key).is_some(), "{key} was not in force"),
        }
    }
}

fn check(feed: &Feed, told: &Told) {
    let nodes: Vec<NodeRow> = feed.nodes().map(NodeRow::from).collect();
    assert!(nodes.len() <= MAX_NODES);
    let nodes = Nodes::new(nodes).expect("the rules of nodes");
    let is_of_node = |address: &IpAddr| nodes.iter().any(|node| node.addresses.contains(address));
    let mut owned = BTreeSet::new();
    for pod in feed.pods_in_force() {
        let addresses: Vec<IpAddr> = pod.addresses.iter().copied().filter(|address| !is_of_node(address)).collect();
        for address in &addresses {
            assert!(owned.insert(*address), "{address} has two owners");
            assert_eq!(feed.owner_of(*address), Some(pod));
        }
        assert_eq!(told.pods.get(&pod.uid).map(|pod| &*pod.addresses), Some(&*addresses));
    }
    let counts = feed.counts();
    let of_effects = [told.pods.len(), told.namespaces.len(), told.policies.len()];
    assert_eq!([Kind::Pod, Kind::Namespace, Kind::Policy].map(|kind| counts[&kind].in_force), of_effects);
}
