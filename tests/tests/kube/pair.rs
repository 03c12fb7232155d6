//! Two nodes with the agent and `wharf-kube`, and an API server with TLS and a bearer token.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::IpAddr,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use wharf_api::{ClusterPod, ClusterPodsQuery, PodCidrState};
use wharf_feed::v1::row::Row;
use wharf_kube::source::Source;
use wharf_tests::{
    Node,
    cluster::{self, NAMES, Nodes},
    kube::{
        Program,
        objects::{self, Id},
        serve_at,
        server::Server,
        streams::WatchFault,
        tls::{Authority, Secrets, kubeconfig},
    },
    scratch,
};

/// Nodes of the cluster: [`NAMES`].
pub(crate) const NODES: usize = 2;
/// Of the switch between the nodes.
const ADDRESS: &str = "198.51.100.254";
/// After the last fault: a delay of at most 30 s, a list within 60 s, the agent's delay of a snapshot of 10 s, and the
/// slowness of a busy machine.
const LIMIT: Duration = Duration::from_secs(110);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(100);

/// The programs, and the objects of their API server.
pub(crate) struct Pair {
    cluster: Nodes,
    programs: [Option<Program>; NODES],
    pub(crate) server: Server,
    secrets: Secrets,
    /// Has the certificate authority and the token.
    directory: PathBuf,
    config: String,
    rotations: u32,
    _runtime: Runtime,
}

impl Pair {
    /// With running programs and the objects of their nodes.
    pub(crate) fn start() -> Result<Self> {
        let mut cluster = Nodes::join(NODES, "auto")?;
        let file = format!("--cluster-file={}", cluster.file.display());
        for node in &mut cluster.nodes {
            let feed = format!("--cluster-feed={}", node.dirs().root.join("feed").display());
            node.set_flag(&file, false);
            // No pools of the node's own settings.
            cluster::set_pools(node, NAMES.len());
            node.set_flag(&feed, true);
            node.set_flag("--pools-from-cluster", true);
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let (server, authority) = (Server::start(), Authority::make());
        let secrets = Secrets::new(authority.acceptor(ADDRESS), "token");
        let at = serve_at(cluster.switch()?, ADDRESS.parse()?, &runtime, &server, Some(secrets.clone()))?;
        let directory = scratch::fresh_dir("kube")?;
        let [ca, token] = ["ca.pem", "token"].map(|file| directory.join(file));
        let config = kubeconfig(&format!("https://{at}"), Some([&ca, &token]));
        let programs = [const { None }; NODES];
        let mut pair = Self { cluster, programs, server, secrets, directory, config, rotations: 0, _runtime: runtime };
        pair.replace("ca.pem", authority.root())?;
        pair.replace("token", "token")?;
        // A program finds a later definition after half a minute.
        pair.server.define(Source::CiliumNetworkPolicy, true);
        for n in 0..NODES {
            pair.server.put(node_object(n));
            pair.start_agent(n)?;
            pair.start_program(n)?;
        }
        Ok(pair)
    }

    fn node(&self, n: usize) -> Result<&Node> {
        self.cluster.nodes.get(n).context("a node")
    }

    pub(crate) fn kill_program(&mut self, n: usize) {
        self.programs[n] = None;
    }

    pub(crate) fn start_program(&mut self, n: usize) -> Result<()> {
        let node = self.node(n)?;
        let feed = node.dirs().root.join("feed/feed.sock");
        self.programs[n] = Some(Program::start_with(node, NAMES[n], &feed, &self.config)?);
        Ok(())
    }

    pub(crate) fn kill_agent(&mut self, n: usize) -> Result<()> {
        self.cluster.nodes.get_mut(n).context("a node")?.kill_agent()
    }

    pub(crate) fn start_agent(&mut self, n: usize) -> Result<()> {
        self.cluster.nodes.get_mut(n).context("a node")?.start_agent()
    }

    /// A server that starts again with a certificate of another authority and another token; the files follow.
    pub(crate) fn rotate(&mut self) -> Result<()> {
        self.rotations += 1;
        let (authority, token) = (Authority::make(), format!("token-{}", self.rotations));
        self.secrets.set_acceptor(authority.acceptor(ADDRESS));
        self.secrets.set_token(&token);
        self.server.break_watches(WatchFault::Cut);
        self.replace("ca.pem", authority.root())?;
        self.replace("token", &token)
    }

    /// As a kubelet replaces files of a pod: no reader sees a part.
    fn replace(&self, file: &str, text: &str) -> Result<()> {
        let (path, new) = (self.directory.join(file), self.directory.join("new"));
        fs::write(&new, text).context("write a file")?;
        fs::rename(&new, &path).with_context(|| format!("replace {}", path.display()))
    }

    /// Waits until both agents have exactly the rows of the server's objects.
    pub(crate) fn settle(&self) -> Result<()> {
        let end = Instant::now() + LIMIT;
        loop {
            let mut differences = self.differences();
            if differences.is_empty() {
                differences = self.unknown_routers();
            }
            if differences.is_empty() {
                break;
            }
            let requests = self.server.last_requests();
            ensure!(Instant::now() < end, "after {LIMIT:?}: {differences:#?}; the last requests: {requests:#?}");
            thread::sleep(PAUSE);
        }
        let forbidden = self.server.forbidden();
        ensure!(forbidden.is_empty(), "{forbidden:?}");
        Ok(())
    }

    fn differences(&self) -> Vec<String> {
        let mut differences = Vec::new();
        for (node, name) in self.cluster.nodes.iter().zip(NAMES) {
            // Read each time: `wharf-kube` writes annotations to the nodes' objects.
            let expected = expected(&self.server.objects(), name);
            let found = found(node).unwrap_or_else(|why| BTreeSet::from([format!("{why:#}")]));
            differences.extend(expected.difference(&found).map(|row| format!("{name} lacks {row}")));
            differences.extend(found.difference(&expected).map(|row| format!("{name} has {row}")));
        }
        differences
    }

    /// Router addresses that the other node does not know. Its row of the node has them, and its list of nodes does not.
    fn unknown_routers(&self) -> Vec<String> {
        let mut unknown = Vec::new();
        for (node, name) in self.cluster.nodes.iter().zip(NAMES) {
            for (n, other) in NAMES.into_iter().enumerate().take(NODES).filter(|(_, other)| *other != name) {
                for address in routers(n) {
                    match is_router(node, other, &address) {
                        Ok(true) => {}
                        Ok(false) => unknown.push(format!("{name} lacks the router address {address} of {other}")),
                        Err(why) => unknown.push(format!("{name}: {why:#}")),
                    }
                }
            }
        }
        unknown
    }

    /// Logs of the programs.
    pub(crate) fn print_logs(&self) {
        for (node, name) in self.cluster.nodes.iter().zip(NAMES) {
            let kube = fs::read_to_string(node.dirs().root.join("wharf-kube.log")).unwrap_or_default();
            eprintln!("---- log of the agent of {name}\n{}---- log of wharf-kube of {name}\n{kube}", node.log());
        }
        eprintln!("---- end of the logs");
    }

    /// Ends the programs; the nodes must be clean.
    pub(crate) fn end(self) -> Result<()> {
        let Self { cluster, programs, .. } = self;
        drop(programs);
        cluster.end()
    }
}

/// The object of node `n`.
pub(crate) fn node_object(n: usize) -> (Source, Value) {
    let (source, mut object) = objects::node(NAMES[n], "", "");
    let both = |of: fn(usize, bool) -> String| [of(n, false), of(n, true)];
    let addresses = both(cluster::address).map(|address| json!({"type": "InternalIP", "address": address}));
    object["status"]["addresses"] = json!(addresses);
    object["spec"]["podCIDRs"] = json!(both(cluster::pool));
    (source, object)
}

/// What the agent of this node shows if the rows of the objects are in force.
fn expected(objects: &BTreeMap<Id, Value>, own: &str) -> BTreeSet<String> {
    let parsed = |texts: &[String]| -> Vec<IpAddr> { texts.iter().filter_map(|text| text.parse().ok()).collect() };
    let lines = objects::rows(objects, own).into_iter().flat_map(|(.., row)| match row {
        Row::Node(node) => {
            let (is_own, name) = (node.name == own, node.name);
            let state = if is_own { PodCidrState::Own } else { PodCidrState::InForce };
            let cidrs: Vec<_> = node.pod_cidrs.into_iter().map(|cidr| (cidr, state)).collect();
            let routers = is_own.then(|| router_line(parsed(&node.router_addresses)));
            [node_line(&name, is_own, &parsed(&node.addresses), &cidrs)].into_iter().chain(routers).collect()
        }
        Row::Namespace(mut namespace) => {
            namespace.labels.insert("kubernetes.io/metadata.name".to_owned(), namespace.name.clone());
            vec![format!("namespace {} {:?}", namespace.name, namespace.labels)]
        }
        Row::Pod(pod) => {
            let addresses = parsed(&pod.addresses);
            let (uid, namespace, name, node) = (pod.uid, pod.namespace, pod.name, pod.node);
            vec![format!("{:?}", ClusterPod { uid, namespace, name, node, addresses, labels: pod.labels })]
        }
        Row::Policy(policy) => {
            let document: Value = serde_json::from_str(&policy.text).unwrap_or_default();
            let label = ["podSelector", "endpointSelector"]
                .iter()
                .find_map(|selector| document.pointer(&format!("/spec/{selector}/matchLabels/app"))?.as_str());
            let count = |direction: &str| document["spec"][direction].as_array().map_or(0, Vec::len);
            let label = format!("app={}", label.unwrap_or_default());
            vec![policy_line(&policy.key, &label, count("ingress"), count("egress"))]
        }
    });
    let watches = Source::ALL.into_iter().map(|source| {
        let is_absent = matches!(source, Source::ClusterNetworkPolicy | Source::CiliumClusterwideNetworkPolicy);
        format!("watch {source} {}", if is_absent { "absent" } else { "watching" })
    });
    lines.chain(watches).chain([feed(true, true, 0)]).collect()
}

/// What the agent shows.
fn found(node: &Node) -> Result<BTreeSet<String>> {
    let (status, view, pods, namespaces, policies) = node.ask(async |client| {
        let pods = client.cluster_pods(&ClusterPodsQuery::default()).await?;
        let (namespaces, policies) = (client.namespaces().await?, client.policies().await?);
        Ok((client.status().await?, client.cluster().await?, pods, namespaces, policies))
    })?;
    let of_feed = view.feed.context("no feed")?;
    let is_complete = of_feed.rows.iter().all(|rows| rows.complete);
    let mut lines = BTreeSet::from([
        feed(of_feed.connected_since_unix_ms.is_some(), is_complete, of_feed.refused_total),
        router_line(status.router),
    ]);
    lines.extend(of_feed.watches.into_iter().map(|watch| format!("watch {} {}", watch.name, watch.state)));
    lines.extend(view.nodes.into_iter().map(|node| {
        let cidrs: Vec<_> = node.pod_cidrs.into_iter().map(|cidr| (cidr.cidr, cidr.state)).collect();
        node_line(&node.name, node.own, &node.addresses, &cidrs)
    }));
    lines.extend(pods.pods.into_iter().map(|pod| format!("{pod:?}")));
    lines
        .extend(namespaces.into_iter().map(|namespace| format!("namespace {} {:?}", namespace.name, namespace.labels)));
    for policy in policies.policies {
        let key = format!("{} {}/{}", policy.kind, policy.namespace.unwrap_or_default(), policy.name);
        // `k8s:app=l1, in namespace shop`
        let label = policy.subject.split([':', ',']).find(|word| word.starts_with("app=")).unwrap_or_default();
        let [ingress, egress] = [policy.ingress_rules, policy.egress_rules].map(usize::try_from);
        lines.insert(policy_line(&key, label, ingress?, egress?));
    }
    Ok(lines)
}

fn feed(is_connected: bool, is_complete: bool, refused: u64) -> String {
    format!("feed: connected {is_connected}, complete {is_complete}, {refused} refused")
}

fn node_line(name: &str, is_own: bool, addresses: &[IpAddr], cidrs: &[(String, PodCidrState)]) -> String {
    format!("node {name}, own {is_own}: {addresses:?}, {cidrs:?}")
}

fn router_line(mut addresses: Vec<IpAddr>) -> String {
    addresses.sort();
    format!("router addresses {addresses:?}")
}

/// Router addresses of node `n`: the first addresses of its pools.
fn routers(n: usize) -> [String; 2] {
    [format!("10.87.{n}.1"), format!("fd87:0:0:{}::1", n + 1)]
}

/// Whether the agent has the router address from the row of the other node.
fn is_router(node: &Node, other: &str, address: &str) -> Result<bool> {
    let shown = node.ask(async |client| client.explain(address).await)?;
    let has = |name: &str, text: &str| shown.facts.iter().any(|fact| fact.name == name && fact.value.contains(text));
    Ok(has("node", other) && has("role", "router address"))
}

fn policy_line(key: &str, label: &str, ingress: usize, egress: usize) -> String {
    format!("policy {key} for {label}: {ingress} ingress rules, {egress} egress rules")
}
