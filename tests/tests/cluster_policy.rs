//! Policy between two nodes: every connection between their pods and a host outside, compared with a plain evaluation
//! of the policies.

#[path = "policy/pods.rs"]
#[allow(dead_code, reason = "shared with the tests of policy")]
mod pods;

use std::{collections::BTreeMap, net::IpAddr, thread};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::{Value, json};
use wharf_feed::v1;
use wharf_tests::{
    cluster::{Feeds, NAMES, Nodes, address, pool},
    feed::{delete, namespace, pod_with, policy},
    process::ip,
    space::Space,
    wait,
};

use crate::pods::{Ask, DENIED, Pod, answers_every_error};

/// Ports of each pod. The named port `web` is one of them.
const PORTS: [u16; 2] = [7_001, 7_002];
const ASKS: [Ask; 3] = [Ask::Tcp(PORTS[0]), Ask::Tcp(PORTS[1]), Ask::Udp(PORTS[0])];
/// Namespace, name, number of the node, and number of the port `web`. The label `app` is the name.
const PODS: [(&str, &str, usize, u16); 6] = [
    ("x", "a", 0, PORTS[0]),
    ("x", "b", 1, PORTS[1]),
    ("x", "c", 1, PORTS[0]),
    ("y", "a", 1, PORTS[0]),
    ("y", "b", 0, PORTS[1]),
    ("y", "c", 0, PORTS[0]),
];
/// The switch of both nodes.
const OUTSIDE: [&str; 2] = ["198.51.100.254", "2001:db8:7::fe"];

/// A selector of pods or namespaces.
#[derive(Debug, Clone, Copy)]
enum Labels {
    All,
    Is(&'static str, &'static str),
    IsNot(&'static str, &'static str),
}
use Labels::{All, Is, IsNot};

impl Labels {
    fn select(self, labels: &BTreeMap<&str, &str>) -> bool {
        match self {
            All => true,
            Is(key, value) => labels.get(key) == Some(&value),
            IsNot(key, value) => labels.get(key) != Some(&value),
        }
    }

    fn json(self) -> Value {
        match self {
            All => json!({}),
            Is(key, value) => json!({"matchLabels": {key: value}}),
            IsNot(key, value) => json!({"matchExpressions": [{"key": key, "operator": "NotIn", "values": [value]}]}),
        }
    }
}

#[derive(Debug)]
enum Peer {
    /// Of the policy's namespace.
    Pods(Labels),
    Namespaces(Labels),
    /// Namespaces, and pods of them.
    Both(Labels, Labels),
    Block(String),
    /// A network without a part of it.
    Except(String, String),
}
use Peer::{Block, Both, Except, Namespaces, Pods};

impl Peer {
    fn json(&self) -> Value {
        match self {
            Pods(pods) => json!({"podSelector": pods.json()}),
            Namespaces(namespaces) => json!({"namespaceSelector": namespaces.json()}),
            Both(namespaces, pods) => json!({"namespaceSelector": namespaces.json(), "podSelector": pods.json()}),
            Block(cidr) => json!({"ipBlock": {"cidr": cidr}}),
            Except(cidr, part) => json!({"ipBlock": {"cidr": cidr, "except": [part]}}),
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Port {
    Tcp(u16),
    Udp(u16),
    /// The named port `web`.
    Web,
}

impl Port {
    fn json(self) -> Value {
        match self {
            Self::Tcp(port) => json!({"port": port, "protocol": "TCP"}),
            Self::Udp(port) => json!({"port": port, "protocol": "UDP"}),
            Self::Web => json!({"port": "web"}),
        }
    }
}

/// Without ports: all.
#[derive(Debug)]
struct Rule(Vec<Peer>, Vec<Port>);

impl Rule {
    fn json(&self, peers: &str) -> Value {
        let Self(all, ports) = self;
        let mut rule = json!({peers: all.iter().map(Peer::json).collect::<Vec<_>>()});
        if !ports.is_empty() {
            rule["ports"] = ports.iter().map(|port| port.json()).collect();
        }
        rule
    }
}

/// A policy of one direction.
#[derive(Debug)]
struct Policy {
    namespace: &'static str,
    name: &'static str,
    subject: Labels,
    ingress: bool,
    rules: Vec<Rule>,
}

impl Policy {
    fn row(&self) -> v1::Change {
        let (kind, rules, peers) =
            if self.ingress { ("Ingress", "ingress", "from") } else { ("Egress", "egress", "to") };
        let all: Vec<Value> = self.rules.iter().map(|rule| rule.json(peers)).collect();
        let text = json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"namespace": self.namespace, "name": self.name},
            "spec": {"podSelector": self.subject.json(), "policyTypes": [kind], rules: all},
        });
        policy(&self.key(), &text.to_string())
    }

    fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

const fn ingress(namespace: &'static str, name: &'static str, subject: Labels, rules: Vec<Rule>) -> Policy {
    Policy { namespace, name, subject, ingress: true, rules }
}

const fn egress(namespace: &'static str, name: &'static str, subject: Labels, rules: Vec<Rule>) -> Policy {
    Policy { namespace, name, subject, ingress: false, rules }
}

/// A pod, or the host outside of the cluster.
struct Actor {
    /// With its namespace; the host has none.
    pod: Option<(&'static str, &'static str)>,
    node: usize,
    labels: BTreeMap<&'static str, &'static str>,
    web: Option<u16>,
    addresses: [IpAddr; 2],
}

impl Actor {
    fn name(&self) -> String {
        self.pod.map_or_else(|| "outside".to_owned(), |(namespace, name)| format!("{namespace}/{name}"))
    }
}

/// What the policies are about, as the test knows it.
struct Table {
    actors: Vec<Actor>,
    namespaces: BTreeMap<&'static str, BTreeMap<&'static str, &'static str>>,
}

fn is_in(ip: IpAddr, cidr: &str) -> Result<bool> {
    let (net, length) = cidr.split_once('/').context("a network")?;
    let bits = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => u128::from(ip.to_bits()) << 96,
        IpAddr::V6(ip) => ip.to_bits(),
    };
    let (net, length): (IpAddr, u32) = (net.parse()?, length.parse()?);
    let differs = bits(ip) ^ bits(net);
    Ok(ip.is_ipv4() == net.is_ipv4() && differs.checked_shr(128 - length).unwrap_or_default() == 0)
}

impl Table {
    fn is_peer(&self, of: &Policy, peer: &Peer, other: &Actor, ip: IpAddr) -> Result<bool> {
        let in_namespace = |wanted: &dyn Fn(&str) -> bool| other.pod.is_some_and(|(namespace, _)| wanted(namespace));
        let by_labels =
            |wanted: Labels| in_namespace(&|name| self.namespaces.get(name).is_some_and(|of| wanted.select(of)));
        Ok(match peer {
            Pods(pods) => in_namespace(&|name| name == of.namespace) && pods.select(&other.labels),
            Namespaces(namespaces) => by_labels(*namespaces),
            Both(namespaces, pods) => by_labels(*namespaces) && pods.select(&other.labels),
            Block(cidr) => is_in(ip, cidr)?,
            Except(cidr, part) => is_in(ip, cidr)? && !is_in(ip, part)?,
        })
    }

    /// By the rules of one end about one direction. `server` has the named ports.
    fn permits(&self, all: &[Policy], own: &Actor, other: &Actor, is_server: bool, flow: (Ask, usize)) -> Result<bool> {
        let (ask, family) = flow;
        let Some((namespace, _)) = own.pod else { return Ok(true) };
        let is_mine = |of: &&Policy| of.namespace == namespace && of.subject.select(&own.labels);
        let mine: Vec<&Policy> = all.iter().filter(|of| of.ingress == is_server).filter(is_mine).collect();
        let web = if is_server { own.web } else { other.web };
        let has = |port: &Port| match (*port, ask) {
            (Port::Tcp(port), Ask::Tcp(asked)) | (Port::Udp(port), Ask::Udp(asked)) => port == asked,
            (Port::Web, Ask::Tcp(asked)) => web == Some(asked),
            _ => false,
        };
        for of in &mine {
            for Rule(peers, ports) in &of.rules {
                if !ports.is_empty() && !ports.iter().any(has) {
                    continue;
                }
                for peer in peers {
                    if self.is_peer(of, peer, other, other.addresses[family])? {
                        return Ok(true);
                    }
                }
            }
        }
        Ok(mine.is_empty())
    }

    fn passes(&self, all: &[Policy], from: &Actor, to: &Actor, flow: (Ask, usize)) -> Result<bool> {
        Ok(self.permits(all, from, to, false, flow)? && self.permits(all, to, from, true, flow)?)
    }

    fn relabel(&mut self, namespace: &str, name: &str, labels: BTreeMap<&'static str, &'static str>) {
        let is_it = |actor: &&mut Actor| actor.pod.is_some_and(|pod| pod == (namespace, name));
        self.actors.iter_mut().filter(is_it).for_each(|actor| actor.labels.clone_from(&labels));
    }

    /// Rows of namespaces and pods.
    fn rows(&self) -> Vec<v1::Change> {
        let pairs =
            |labels: &BTreeMap<&'static str, &'static str>| labels.iter().map(|(k, v)| (*k, *v)).collect::<Vec<_>>();
        let namespaces = self.namespaces.iter().map(|(name, labels)| namespace(name, &pairs(labels)));
        let pod = |actor: &Actor| {
            let (namespace, name) = actor.pod?;
            let ports: Vec<_> = actor.web.iter().map(|port| ("web", *port)).collect();
            let addresses = actor.addresses.map(|ip| ip.to_string());
            // Before its ADD, a pod has none.
            let addresses: Vec<&str> = addresses.iter().map(String::as_str).filter(|ip| *ip != "::").collect();
            let uid = format!("{namespace}-{name}");
            Some(pod_with(&uid, (namespace, name), NAMES[actor.node], &addresses, &pairs(&actor.labels), &ports))
        };
        namespaces.chain(self.actors.iter().filter_map(pod)).collect()
    }
}

/// Two nodes with pods.
struct Scene<'a> {
    joined: &'a Nodes,
    /// In the order of [`PODS`].
    pods: Vec<Pod>,
    feeds: Feeds,
    table: Table,
    in_force: Vec<Policy>,
}

impl<'a> Scene<'a> {
    fn start(joined: &'a Nodes) -> Result<Self> {
        let unknown = IpAddr::from([0_u16; 8]);
        let actor = |(namespace, name, node, web): (&'static str, &'static str, usize, u16)| Actor {
            pod: Some((namespace, name)),
            node,
            labels: BTreeMap::from([("app", name)]),
            web: Some(web),
            addresses: [unknown; 2],
        };
        let namespaces = [("x", "red"), ("y", "blue")].map(|(name, team)| (name, BTreeMap::from([("team", team)])));
        let mut table = Table { actors: PODS.map(actor).into(), namespaces: namespaces.into() };
        let mut feeds = Feeds::start(joined, table.rows())?;
        let add = |(namespace, name, node, _): (&str, &str, usize, u16)| {
            Pod::without_labels(&joined.nodes[node], namespace, name)
        };
        let pods = PODS.into_iter().map(add).collect::<Result<Vec<_>>>()?;
        for (actor, pod) in table.actors.iter_mut().zip(&pods) {
            actor.addresses = pod.end.both()?;
        }
        feeds.send(&table.rows())?;
        let outside = joined.switch()?;
        answers_every_error(outside)?;
        for n in 0..joined.nodes.len() {
            ip(outside, &format!("route add {} via {}", pool(n, false), address(n, false)))?;
            ip(outside, &format!("-6 route add {} via {}", pool(n, true), address(n, true)))?;
        }
        let addresses = [OUTSIDE[0].parse()?, OUTSIDE[1].parse()?];
        table.actors.push(Actor { pod: None, node: joined.nodes.len(), labels: BTreeMap::new(), web: None, addresses });
        Ok(Self { joined, pods, feeds, table, in_force: Vec::new() })
    }

    fn address(&self, of: (&str, &str), family: usize) -> Result<IpAddr> {
        let actor = self.table.actors.iter().find(|actor| actor.pod == Some(of));
        Ok(actor.with_context(|| format!("no pod {of:?}"))?.addresses[family])
    }

    fn space(&self, number: usize) -> Result<&Space> {
        self.pods.get(number).map_or_else(|| self.joined.switch(), Pod::space)
    }

    /// Replaces the policies in force.
    fn enforce(&mut self, policies: Vec<Policy>) -> Result<()> {
        let gone = self.in_force.iter().map(|of| delete("policy", &of.key()));
        let changes: Vec<v1::Change> = gone.chain(policies.iter().map(Policy::row)).collect();
        self.feeds.send(&changes)?;
        self.in_force = policies;
        Ok(())
    }

    /// Every flow passes or not as the table says. Returns the numbers of flows between the nodes that do and do not.
    fn compare(&self, when: &str) -> Result<[usize; 2]> {
        let (mut probes, mut between_nodes) = (Vec::new(), [0; 2]);
        for (i, from) in self.table.actors.iter().enumerate() {
            for (_, to) in self.table.actors.iter().enumerate().filter(|(j, _)| *j != i) {
                for flow in ASKS.into_iter().flat_map(|ask| [(ask, 0), (ask, 1)]) {
                    let expected = self.table.passes(&self.in_force, from, to, flow)?;
                    if from.pod.is_some() && to.pod.is_some() && from.node != to.node {
                        between_nodes[usize::from(!expected)] += 1;
                    }
                    probes.push((self.space(i)?, from.name(), to.name(), flow.0, to.addresses[flow.1], expected));
                }
            }
        }
        let wrong: Vec<String> = thread::scope(|scope| {
            let probe = |(space, from, to, ask, at, expected): (&Space, String, String, Ask, IpAddr, bool)| {
                let patience = if expected { wait::PATIENCE } else { DENIED };
                let flow = || format!("{from} to {to} at {at}, {ask:?}");
                let passes = ask.is_answered(space, at, patience).with_context(flow)?;
                ensure!(passes == expected, "{}: passes: {passes}", flow());
                Ok(())
            };
            let all: Vec<_> = probes.into_iter().map(|one| scope.spawn(move || probe(one))).collect();
            let ended = all.into_iter().map(|one| one.join().unwrap_or_else(|_| Err(anyhow!("a probe panicked"))));
            ended.filter_map(|outcome| outcome.err().map(|e| format!("{e:#}"))).collect()
        });
        ensure!(wrong.is_empty(), "{when}: {:#?}\n{}", self.in_force, wrong.join("\n"));
        Ok(between_nodes)
    }

    /// As [`Self::compare`]; some flows between the nodes pass, and some do not.
    fn compare_both(&self, when: &str) -> Result<()> {
        let [passed, denied] = self.compare(when)?;
        ensure!(passed >= 10 && denied >= 10, "{when}: {passed} flows pass and {denied} do not");
        Ok(())
    }
}

fn single(ip: IpAddr) -> String {
    format!("{ip}/{}", if ip.is_ipv4() { 32 } else { 128 })
}

fn ingress_policies(scene: &Scene<'_>) -> Result<Vec<Policy>> {
    let outside = || OUTSIDE.map(|ip| ip.parse().map(|ip| Block(single(ip))));
    let [v4, v6] = outside();
    let one = single(scene.address(("x", "b"), 0)?);
    let blocks = vec![Except(pool(1, false), one), Block(pool(1, true))];
    let [first, second] = PORTS;
    Ok(vec![
        ingress("x", "nothing", Is("app", "c"), vec![]),
        ingress("x", "pods", Is("app", "a"), vec![Rule(vec![Pods(Is("app", "b"))], vec![Port::Tcp(first)])]),
        ingress(
            "x",
            "outside",
            Is("app", "b"),
            vec![Rule(vec![v4?, v6?, Pods(All)], vec![Port::Udp(first), Port::Tcp(second)])],
        ),
        ingress("y", "namespaces", Is("app", "a"), vec![Rule(vec![Namespaces(Is("team", "red"))], vec![])]),
        ingress(
            "y",
            "both",
            Is("app", "b"),
            vec![Rule(vec![Both(Is("team", "red"), IsNot("app", "a"))], vec![Port::Web])],
        ),
        ingress("y", "blocks", Is("app", "c"), vec![Rule(blocks, vec![])]),
    ])
}

fn egress_policies() -> Vec<Policy> {
    let beyond = vec![Except("0.0.0.0/0".to_owned(), pool(0, false)), Block("::/0".to_owned())];
    vec![
        egress("x", "nothing", All, vec![]),
        egress("x", "named", Is("app", "a"), vec![Rule(vec![Namespaces(Is("team", "blue"))], vec![Port::Web])]),
        egress("x", "beyond", Is("app", "b"), vec![Rule(beyond, vec![])]),
        egress("y", "pods", Is("app", "b"), vec![Rule(vec![Pods(Is("app", "a"))], vec![Port::Tcp(PORTS[0])])]),
        egress("y", "nothing", Is("app", "c"), vec![]),
        ingress("y", "ingress", Is("app", "a"), vec![Rule(vec![Both(All, Is("app", "b"))], vec![])]),
    ]
}

fn tables(joined: &Nodes) -> Result<()> {
    let mut scene = Scene::start(joined)?;
    let [_, denied] = scene.compare("without policies")?;
    ensure!(denied == 0, "{denied} flows do not pass without policies");
    scene.enforce(ingress_policies(&scene)?)?;
    scene.compare_both("ingress")?;
    // The rules stay, and select others.
    scene.table.namespaces.insert("y", BTreeMap::from([("team", "red")]));
    scene.table.relabel("x", "b", BTreeMap::from([("app", "c")]));
    scene.table.relabel("y", "c", BTreeMap::from([("app", "b"), ("tier", "front")]));
    scene.feeds.send(&scene.table.rows())?;
    scene.compare_both("other labels")?;
    scene.table.namespaces.insert("y", BTreeMap::from([("team", "blue")]));
    scene.table.relabel("x", "b", BTreeMap::from([("app", "b")]));
    scene.table.relabel("y", "c", BTreeMap::from([("app", "c")]));
    let rows = scene.table.rows();
    scene.feeds.send(&rows)?;
    scene.enforce(egress_policies())?;
    scene.compare_both("egress")?;
    scene.enforce(Vec::new())?;
    scene.compare("without policies again")?;
    let Scene { pods, feeds, .. } = scene;
    drop(feeds);
    pods.iter().zip(PODS).try_for_each(|(pod, (_, _, node, _))| joined.nodes[node].detach(&pod.end))
}

fn hold(routing: &str) -> Result<()> {
    let mut joined = Nodes::join(2, routing)?;
    joined.set_feed();
    joined.nodes.iter_mut().try_for_each(wharf_tests::Node::start_agent)?;
    joined.run(|joined| tables(joined))?.end()
}

#[test]
fn policy_between_nodes_is_as_a_plain_evaluation_says_over_native_routes() -> Result<()> {
    hold("native")
}

#[test]
fn policy_between_nodes_is_as_a_plain_evaluation_says_over_the_overlay() -> Result<()> {
    hold("overlay")
}
