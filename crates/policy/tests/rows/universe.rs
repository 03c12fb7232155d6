//! A small universe of labels, addresses and ports, so that random policies meet random flows often, and generators of
//! both.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;
use proptest::{
    collection::{btree_set, vec},
    option,
    prelude::*,
    sample::{select, subsequence},
};
use wharf_policy::{
    model::{
        Action, Direction, Directions, Endpoint, Enforcement, Entity, Holds, LabelOf, Labels, NAMESPACE_NAME,
        NamedPorts, Origin, Peer, Policy, PolicyName, Port, PortRange, Protocol, Requirement, Rule, Selector, Tier,
        UNKNOWN_LABELS,
    },
    names::NamePattern,
    oracle::{Destination, Flow, Names, PeerOf},
    requests::{HttpRule, Pattern, Requests, ServerName},
};

/// Networks that contain each other, endpoints, the node and addresses outside.
const NETWORKS: [&str; 18] = [
    "0.0.0.0/0",
    "0.0.0.0/1",
    "10.0.0.0/8",
    "10.0.0.0/24",
    "10.0.0.0/30",
    "10.0.0.2/32",
    "10.0.0.128/25",
    "192.0.2.0/24",
    "203.0.113.0/24",
    "203.0.113.128/25",
    "255.255.255.255/32",
    "::/0",
    "fd00::/8",
    "fd00::/125",
    "fd00::2/128",
    "2001:db8::/32",
    "2001:db8::1/128",
    "ffff::/16",
];

/// Addresses of the node; the third is between the endpoints'.
const NODE: [&str; 3] = ["192.0.2.1", "2001:db8::1", "10.0.0.9"];

/// Addresses of other nodes: in a network of containers elsewhere, one of the node and one of an endpoint.
const OTHER_NODES: [&str; 3] = ["203.0.113.128", "192.0.2.1", "10.0.0.2"];

/// Networks of containers elsewhere: around, beside and inside the networks, with addresses outside and of the node.
const PODS: [&str; 4] = ["10.0.1.0/24", "203.0.113.128/25", "2001:db8::/112", "ffff::/16"];

/// Networks of services: some networks contain them, and some exceptions.
const SERVICES: [&str; 2] = ["10.0.0.128/25", "fd00::4/126"];

/// Addresses that are nobody's, at and beside the edges of the networks.
const OUTSIDE: [&str; 14] = [
    "0.0.0.0",
    "9.255.255.255",
    "10.0.0.200",
    "10.0.1.1",
    "192.0.2.7",
    "203.0.113.7",
    "203.0.113.128",
    "255.255.255.254",
    "255.255.255.255",
    "::",
    "fd00::ff",
    "2001:db8::7",
    "2001:db9::",
    "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
];

/// Ports at which ranges begin and end.
const PORTS: [u16; 9] = [0, 1, 79, 80, 81, 443, 8080, 65534, 65535];
const KINDS: [u8; 5] = [0, 8, 128, 135, 255];
/// Names that have addresses, at times.
const NAMES: [&str; 4] = ["a.example", "b.example", "a.b.example", "other"];
/// Patterns that match none to all of them.
const PATTERNS: [&str; 7] = ["a.example", "B.example.", "*.example", "**.example", "a.*", "*", "nobody"];

const PORT_NAMES: [&str; 2] = ["web", "dns"];
const PROTOCOLS: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];

/// What the compiler is given.
#[derive(Debug, Clone)]
pub(crate) struct World {
    pub(crate) policies: BTreeMap<PolicyName, Policy>,
    pub(crate) endpoints: BTreeMap<u32, Endpoint>,
    pub(crate) node: BTreeSet<IpAddr>,
    pub(crate) other_nodes: BTreeSet<IpAddr>,
    pub(crate) pods: BTreeSet<IpNet>,
    pub(crate) names: Names,
}

impl World {
    /// The other end that has this address.
    pub(crate) fn peer(&self, address: IpAddr) -> PeerOf<'_> {
        if self.node.contains(&address) {
            return PeerOf::Node(address);
        }
        let owner = self.endpoints.values().find(|e| e.addresses.contains(&address));
        match owner {
            Some(endpoint) => PeerOf::Endpoint(endpoint, address),
            None if self.other_nodes.contains(&address) => PeerOf::OtherNode(address),
            None if self.pods.iter().any(|net| net.contains(&address)) => PeerOf::Pod(address),
            None => PeerOf::Outside(address),
        }
    }

    /// The flow that the probe describes; `None` where this world does not have its endpoint.
    pub(crate) fn flow(&self, probe: &Probe) -> Option<Flow<'_>> {
        Some(Flow {
            direction: probe.direction,
            subject: self.endpoints.get(&probe.endpoint).filter(|endpoint| !endpoint.elsewhere)?,
            peer: self.peer(probe.peer),
            destination: probe.destination,
            names: &self.names,
        })
    }
}

/// A flow by the numbers that a program sees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Probe {
    pub(crate) endpoint: u32,
    pub(crate) direction: Direction,
    pub(crate) peer: IpAddr,
    pub(crate) destination: Destination,
}

/// One change of a world.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Policy(Policy),
    NoPolicy(PolicyName),
    Endpoint(u32, Endpoint),
    NoEndpoint(u32),
    Node(BTreeSet<IpAddr>),
    OtherNodes(BTreeSet<IpAddr>),
    Pods(BTreeSet<IpNet>),
    Name(Arc<str>, BTreeSet<IpAddr>),
}

impl Step {
    pub(crate) fn apply(&self, world: &mut World) {
        match self.clone() {
            Self::Policy(policy) => drop(world.policies.insert(policy.name.clone(), policy)),
            Self::NoPolicy(name) => drop(world.policies.remove(&name)),
            Self::Endpoint(key, endpoint) => drop(world.endpoints.insert(key, endpoint)),
            Self::NoEndpoint(key) => drop(world.endpoints.remove(&key)),
            Self::Node(node) => world.node = node,
            Self::OtherNodes(nodes) => world.other_nodes = nodes,
            Self::Pods(pods) => world.pods = pods,
            Self::Name(name, addresses) => drop(world.names.insert(name, addresses)),
        }
    }
}

/// A label of namespaces, in [`crate::unknown`].
pub(crate) const TEAM: &str = "team";

/// A number for the labels and the namespace of an endpoint: the bytes of all values, which are single letters.
pub(crate) fn identity(endpoint: &Endpoint) -> u32 {
    let place = |labels: Option<&Labels>, key: &str| {
        let value = labels.and_then(|l| l.get(key)).and_then(|v| v.bytes().next());
        value.map_or(0, |byte| u32::from(byte - b'a') + 1)
    };
    let own = Some(&*endpoint.labels);
    let namespace = endpoint.namespace.as_deref();
    let places = [
        place(own, "k8s:app"),
        place(own, "k8s:tier"),
        place(own, "container:app"),
        place(namespace, NAMESPACE_NAME),
        place(namespace, TEAM),
        u32::from(namespace.is_some()),
        u32::from(namespace.is_some_and(|labels| labels.contains_key(UNKNOWN_LABELS))),
    ];
    places.iter().fold(1, |number, place| number * 8 + place)
}

/// Fixed addresses of an endpoint: one in the smallest networks for the first endpoints, others for the rest.
pub(crate) fn addresses(key: u32) -> Vec<IpAddr> {
    [format!("10.0.0.{key}"), format!("fd00::{key}")].iter().map(|a| a.parse().expect("address")).collect()
}

fn all_addresses() -> Vec<IpAddr> {
    let fixed = NODE.iter().chain(&OUTSIDE).map(|a| a.parse().expect("address"));
    fixed.chain((1..=ENDPOINTS).flat_map(addresses)).collect()
}

/// Endpoints that a world may have.
const ENDPOINTS: u32 = 6;

/// Endpoints with the given key.
pub(crate) fn endpoint(key: u32) -> impl Strategy<Value = Endpoint> {
    let value = || option::weighted(0.8, select(vec!["a", "b"]));
    let labels = (value(), value(), option::weighted(0.2, select(vec!["a", "b"])));
    let namespace = option::weighted(0.8, select(vec!["a", "b"]));
    let port = (select(&PROTOCOLS[..2]), select(&PORT_NAMES[..]), select(vec![80, 8080]));
    let ports = vec(port, 0..3);
    let own = PolicyName { kind: "own".to_owned(), namespace: String::new(), name: "isolation".to_owned() };
    let enforcement = prop_oneof![
        8 => Just(Enforcement::Default),
        1 => Just(Enforcement::Always(Arc::new(own))),
        1 => Just(Enforcement::Never),
    ];
    let of_few = (proptest::bool::weighted(0.15), proptest::bool::weighted(0.15));
    (labels, namespace, ports, of_few, enforcement).prop_map(
        move |((app, tier, other), namespace, ports, (health, elsewhere), enforcement)| Endpoint {
            addresses: addresses(key).into(),
            labels: [("k8s:app", app), ("k8s:tier", tier), ("container:app", other)]
                .into_iter()
                .filter_map(|(key, value)| Some((key.to_owned(), value?.to_owned())))
                .collect::<Labels>()
                .into(),
            namespace: namespace.map(|name| Labels::from([(NAMESPACE_NAME.to_owned(), name.to_owned())]).into()),
            ports: ports
                .into_iter()
                .map(|(protocol, name, port)| ((protocol, name.to_owned()), port))
                .collect::<NamedPorts>()
                .into(),
            health,
            elsewhere,
            enforcement,
        },
    )
}

fn selector() -> impl Strategy<Value = Selector> {
    let values = || btree_set(select(vec!["a".to_owned(), "b".to_owned()]), 1..=1);
    let holds = prop_oneof![
        4 => values().prop_map(Holds::In),
        1 => values().prop_map(Holds::NotIn),
        1 => Just(Holds::Exists),
        1 => Just(Holds::DoesNotExist),
    ];
    let key = select(vec![
        (LabelOf::Endpoint, "k8s:app"),
        (LabelOf::Endpoint, "k8s:tier"),
        (LabelOf::Endpoint, "any:app"),
        (LabelOf::Namespace, "kubernetes.io/metadata.name"),
    ]);
    let requirement = (key, holds).prop_map(|((of, key), holds)| Requirement { of, key: key.to_owned(), holds });
    btree_set(requirement, 0..=2).prop_map(Selector)
}

fn net(text: &&str) -> IpNet {
    text.parse().expect("network")
}

fn peer() -> impl Strategy<Value = Peer> {
    let network = (select(&NETWORKS[..]), subsequence(NETWORKS.to_vec(), 0..6)).prop_map(|(own, except)| {
        let own = net(&own);
        Peer::Network { net: own, except: except.iter().map(net).filter(|e| own.contains(e)).collect() }
    });
    let entity =
        select(vec![Entity::All, Entity::World, Entity::Host, Entity::Cluster, Entity::Health, Entity::RemoteNode]);
    prop_oneof![
        4 => selector().prop_map(Peer::Endpoints),
        4 => network,
        2 => entity.prop_map(Peer::Entity),
        8 => pattern().prop_map(Peer::Names),
    ]
}

fn pattern() -> impl Strategy<Value = NamePattern> {
    select(&PATTERNS[..]).prop_map(|text| NamePattern::pattern(text).expect("a pattern"))
}

/// A name, and addresses of it, so many that names share some; sometimes none.
fn named() -> impl Strategy<Value = (Arc<str>, BTreeSet<IpAddr>)> {
    (select(&NAMES[..]).prop_map(Arc::from), btree_set(select(all_addresses()), 0..16))
}

fn port() -> impl Strategy<Value = Port> {
    let numbers = (select(&PROTOCOLS[..]), select(&PORTS[..]), option::of(select(&PORTS[..]))).prop_map(
        |(protocol, first, last)| {
            let (first, last) = (first.min(last.unwrap_or(first)), first.max(last.unwrap_or(first)));
            Port::Numbers { protocol, ports: PortRange { first, last } }
        },
    );
    let named = (select(&PROTOCOLS[..2]), select(&PORT_NAMES[..]))
        .prop_map(|(protocol, name)| Port::Named { protocol, name: name.to_owned() });
    let icmp = (any::<bool>(), option::of(select(&KINDS[..]))).prop_map(|(v6, kind)| Port::Icmp { v6, kind });
    prop_oneof![5 => numbers, 3 => named, 2 => icmp]
}

fn rule(tier: Tier) -> BoxedStrategy<Rule> {
    let actions = match tier {
        Tier::Namespaced => vec![Action::Accept, Action::Accept, Action::Deny],
        Tier::Admin | Tier::Baseline => vec![Action::Accept, Action::Deny, Action::Pass],
    };
    let direction = select(vec![Direction::Ingress, Direction::Egress]);
    let peers = || option::weighted(0.7, vec(peer(), 0..4));
    let ports = option::weighted(0.6, vec(port(), 0..4));
    let any = (direction.clone(), select(actions), peers(), ports).prop_map(|(direction, action, peers, ports)| Rule {
        direction,
        action,
        peers,
        ports,
        requests: None,
        origin: origin(0),
    });
    let with_requests =
        (direction, peers(), vec(wide(), 1..3), requests()).prop_map(|(direction, peers, ports, requests)| Rule {
            direction,
            action: Action::Accept,
            peers,
            ports: Some(ports),
            requests: Some(Arc::new(requests)),
            origin: origin(0),
        });
    if tier == Tier::Namespaced { prop_oneof![any, with_requests].boxed() } else { any.boxed() }
}

/// Ports that flows ask for often, and named ones.
fn wide() -> impl Strategy<Value = Port> {
    let ranges = vec![PortRange::ALL, PortRange { first: 80, last: 8080 }, PortRange { first: 0, last: 443 }];
    let numbers =
        (select(&PROTOCOLS[..]), select(ranges)).prop_map(|(protocol, ports)| Port::Numbers { protocol, ports });
    prop_oneof![3 => numbers, 1 => port()]
}

/// Requests of so few kinds that unions meet.
fn requests() -> impl Strategy<Value = Requests> {
    let path = select(vec!["/a", "/b"])
        .prop_map(|path| HttpRule { path: Some(Pattern::Exact(path.to_owned())), ..HttpRule::default() });
    let name = select(vec!["a", "b"]).prop_map(|name| ServerName::Exact(name.to_owned()));
    let parts = (btree_set(path, 0..=2), btree_set(name, 0..=1), btree_set(pattern(), 0..=1), any::<bool>());
    parts.prop_map(|(http, server_names, names, fails_open)| Requests { http, server_names, names, fails_open })
}

pub(crate) fn origin(line: u32) -> Origin {
    Origin { file: "policies.yaml".into(), line, document: "a document".into(), field: "spec".into() }
}

/// Policies with this number in their name. Their lines are their own.
pub(crate) fn policy(number: u32) -> impl Strategy<Value = Policy> {
    let tier = select(vec![Tier::Admin, Tier::Namespaced, Tier::Namespaced, Tier::Baseline]);
    let rules = tier.prop_flat_map(|tier| (Just(tier), vec(rule(tier), 0..4)));
    let services = subsequence(SERVICES.to_vec(), 0..=SERVICES.len());
    (rules, selector(), 0u16..3, any::<(bool, bool)>(), 0u32..8, services).prop_map(
        move |((tier, mut rules), subject, priority, isolates, version, services)| {
            let services: Vec<IpNet> = services.iter().map(net).collect();
            let first = (number * 8 + version) * 100;
            for (line, rule) in (first..).zip(&mut rules) {
                rule.origin = origin(line);
            }
            let namespaced = tier == Tier::Namespaced;
            let policy = Policy {
                // Names are not in the order of the numbers.
                name: PolicyName {
                    kind: ["B", "A"][usize::from(number.is_multiple_of(2))].to_owned(),
                    namespace: String::new(),
                    name: format!("p{}", number * 7 % 10),
                },
                subject,
                tier,
                priority: if namespaced { 0 } else { priority },
                isolates: Directions { ingress: namespaced && isolates.0, egress: namespaced && isolates.1 },
                rules,
                origin: origin(first),
            };
            policy.with_exceptions_behind(&services)
        },
    )
}

/// Numbers that policies of a world have.
const POLICIES: u32 = 6;

fn some_of(addresses: &[&str]) -> impl Strategy<Value = BTreeSet<IpAddr>> + use<> {
    let addresses: Vec<IpAddr> = addresses.iter().map(|a| a.parse().expect("address")).collect();
    let most = addresses.len();
    subsequence(addresses, 0..=most).prop_map(|a| a.into_iter().collect())
}

fn nodes() -> impl Strategy<Value = BTreeSet<IpAddr>> {
    some_of(&NODE)
}

fn other_nodes() -> impl Strategy<Value = BTreeSet<IpAddr>> {
    some_of(&OTHER_NODES)
}

fn pods() -> impl Strategy<Value = BTreeSet<IpNet>> {
    let nets: Vec<IpNet> = PODS.iter().map(|net| net.parse().expect("network")).collect();
    subsequence(nets, 0..=PODS.len()).prop_map(|nets| nets.into_iter().collect())
}

/// Worlds with up to six policies and six endpoints.
pub(crate) fn world() -> impl Strategy<Value = World> {
    let policies = (0..POLICIES).map(|number| option::weighted(0.7, policy(number))).collect::<Vec<_>>();
    let endpoints = (1..=ENDPOINTS).map(|key| option::weighted(0.8, endpoint(key))).collect::<Vec<_>>();
    let names = vec(named(), 0..6);
    let peers = (nodes(), other_nodes(), pods());
    (policies, endpoints, peers, names).prop_map(|(policies, endpoints, (node, other_nodes, pods), names)| World {
        policies: policies.into_iter().flatten().map(|p| (p.name.clone(), p)).collect(),
        endpoints: (1..).zip(endpoints).filter_map(|(key, endpoint)| Some((key, endpoint?))).collect(),
        node,
        other_nodes,
        pods,
        names: names.into_iter().collect(),
    })
}

/// Changes of a world: policies that replace others or go, endpoints that come, change their labels or go, names that
/// get other addresses.
pub(crate) fn step() -> impl Strategy<Value = Step> {
    let endpoint = (1..=ENDPOINTS).prop_flat_map(|key| endpoint(key).prop_map(move |e| Step::Endpoint(key, e)));
    prop_oneof![
        4 => (0..POLICIES).prop_flat_map(policy).prop_map(Step::Policy),
        2 => (0..POLICIES).prop_flat_map(policy).prop_map(|p| Step::NoPolicy(p.name)),
        4 => endpoint,
        2 => (1..=ENDPOINTS).prop_map(Step::NoEndpoint),
        1 => nodes().prop_map(Step::Node),
        1 => other_nodes().prop_map(Step::OtherNodes),
        1 => pods().prop_map(Step::Pods),
        5 => named().prop_map(|(name, addresses)| Step::Name(name, addresses)),
    ]
}

/// Flows between all of the universe's addresses, of both families and every protocol.
pub(crate) fn probe() -> impl Strategy<Value = Probe> {
    let port =
        (select(&PROTOCOLS[..]), select(&PORTS[..])).prop_map(|(protocol, port)| Destination::Ports { protocol, port });
    let icmp = (any::<bool>(), select(&KINDS[..])).prop_map(|(v6, kind)| Destination::Icmp { v6, kind });
    let destination = prop_oneof![
        8 => port,
        3 => icmp,
        1 => select(vec![1, 6, 47, 58]).prop_map(Destination::Other),
        2 => Just(Destination::Unknown),
    ];
    let direction = select(vec![Direction::Ingress, Direction::Egress]);
    (1..=ENDPOINTS, direction, select(all_addresses()), destination)
        .prop_map(|(endpoint, direction, peer, destination)| Probe { endpoint, direction, peer, destination })
}
