//! `wharf-kube` and the agent together, against the scripted API server of `kube/tests`.

#![allow(
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "as in the suite of wharf-kube, whose modules it has"
)]
#![allow(dead_code, reason = "of those modules it needs less")]

#[path = "../../kube/tests/suite/common/objects.rs"]
mod objects;
#[path = "../../kube/tests/suite/common/patch.rs"]
mod patch;
#[path = "../../kube/tests/suite/common/rbac.rs"]
mod rbac;
#[path = "../../kube/tests/suite/common/server.rs"]
mod server;
#[path = "../../kube/tests/suite/common/streams.rs"]
mod streams;

use std::{
    fs::{self, File},
    net::{SocketAddr, TcpListener},
    process::{Child, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use wharf_api::ClusterPodsQuery;
use wharf_kube::source::Source;
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    echo::{self, EchoServer},
    process::{bin, command_in, ip},
    wait,
};

use self::{objects::namespace, server::Server};

/// As of [`NodeConfig::default`].
const OWN: &str = "quay";
const TAINT: &str = "wharf.dev/agent-not-ready";

/// The program; ended when dropped.
struct Program(Child);

impl Program {
    fn start(node: &Node, server: SocketAddr) -> Result<Self> {
        let root = &node.dirs().root;
        let kubeconfig = root.join("kubeconfig");
        let text = format!(
            "apiVersion: v1\nkind: Config\nclusters: [{{name: c, cluster: {{server: \"http://{server}\"}}}}]\n\
             users: [{{name: u, user: {{token: secret}}}}]\ncontexts: [{{name: x, context: {{cluster: c, user: u}}}}]\n\
             current-context: x\n"
        );
        fs::write(&kubeconfig, text).context("write the kubeconfig")?;
        let mut command = command_in(node.space(), bin("wharf-kube")?)?;
        command.arg(format!("--node-name={OWN}"));
        command.arg(format!("--feed={}", root.join("feed/feed.sock").display()));
        command.arg(format!("--kubeconfig={}", kubeconfig.display()));
        let log = File::options().create(true).append(true).open(root.join("wharf-kube.log"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        Ok(Self(command.spawn().context("start wharf-kube")?))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Serves in the node's namespace while the runtime lives.
fn serve(node: &Node, runtime: &Runtime, server: &Server) -> Result<SocketAddr> {
    let listener = node.space().run(|| TcpListener::bind("127.0.0.1:0"))?.context("bind the API server")?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let server = server.clone();
    let answer = move |request: axum::extract::Request| {
        let server = server.clone();
        async move {
            let (parts, body) = request.into_parts();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap_or_default();
            let target = parts.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
            match server.answer(parts.method, target, body).await {
                Ok(answer) => answer.map(axum::body::Body::new),
                Err(_) => streams::status(500, None).map(axum::body::Body::new),
            }
        }
    };
    let _inside = runtime.enter();
    let listener = tokio::net::TcpListener::from_std(listener)?;
    runtime.spawn(async { axum::serve(listener, axum::Router::new().fallback(answer)).await });
    Ok(address)
}

fn node(name: &str, address: &str, cidr: &str) -> (Source, Value) {
    let (source, mut node) = objects::node(name, address, cidr);
    if name == OWN {
        node["spec"]["taints"] = json!([{"key": TAINT, "effect": "NoSchedule"}]);
    }
    (source, node)
}

/// Of namespace `shop`; its uid is of the API.
fn pod(name: &str, node: &str, address: Option<&str>, app: &str) -> (Source, Value) {
    let (source, mut pod) = objects::pod(name, &uid(name), address, app);
    pod["spec"]["nodeName"] = json!(node);
    (source, pod)
}

fn uid(name: &str) -> String {
    let number: u64 = name.bytes().map(u64::from).sum();
    format!("00000000-0000-0000-0000-{number:012}")
}

/// Only containers with `app: web` reach those with `app: db`.
fn policy() -> (Source, Value) {
    let select = |app: &str| json!({"matchLabels": {"app": app}});
    let spec = json!({"podSelector": select("db"), "ingress": [{"from": [{"podSelector": select("web")}]}]});
    let metadata = json!({"name": "db", "namespace": "shop", "uid": "p1", "managedFields": [{"manager": "kubectl"}]});
    (Source::NetworkPolicy, json!({"metadata": metadata, "spec": spec}))
}

/// As a kubelet's runtime adds the pod.
fn add(node: &Node, sandbox: &Sandbox) -> Result<Attached> {
    let (name, conf) = (sandbox.name(), node.netconf());
    let args = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={name};K8S_POD_UID={}", uid(name));
    let add = node.cni("ADD").of(name, sandbox.path(), "eth0").conf(&conf).env("CNI_ARGS", &args).run()?;
    let (container, netns) = (name.to_owned(), sandbox.path().to_owned());
    Ok(Attached { container, netns, ifname: "eth0".to_owned(), conf, result: add.result()? })
}

fn is_schedulable(server: &Server) -> bool {
    let Some(node) = server.object(Source::Node, OWN) else { return false };
    let taints = node.pointer("/spec/taints").and_then(Value::as_array).cloned().unwrap_or_default();
    let conditions = node.pointer("/status/conditions").and_then(Value::as_array).cloned().unwrap_or_default();
    let is_up = |condition: &Value| condition.get("reason") == Some(&json!("WharfIsUp"));
    !taints.iter().any(|taint| taint.get("key") == Some(&json!(TAINT))) && conditions.iter().any(is_up)
}

fn await_pods(node: &Node, names: &[&str]) -> Result<()> {
    wait::until_equal("the pods that the agent knows", &names.iter().map(ToString::to_string).collect(), || {
        let pods = node.ask(async |client| client.cluster_pods(&ClusterPodsQuery::default()).await)?.pods;
        let mut names: Vec<String> = pods.into_iter().map(|pod| pod.name).collect();
        names.sort();
        Ok(names)
    })
}

fn follow(node: &mut Node, runtime: &Runtime) -> Result<()> {
    let server = Server::start();
    let address = serve(node, runtime, &server)?;
    let objects = [
        self::node(OWN, "198.51.100.1", "10.91.0.0/24"),
        self::node("b", "198.51.100.2", "10.88.0.0/24"),
        namespace("shop", "x"),
        policy(),
        pod("far", "b", Some("10.88.0.9"), "web"),
        pod("db", OWN, None, "db"),
    ];
    objects.into_iter().for_each(|object| server.put(object));
    ensure!(!is_schedulable(&server), "before wharf-kube runs");
    let program = Program::start(node, address)?;
    // The row of the node has the pools, and the agent's report the node's addresses.
    wait::until("a node without the taint", || Ok(is_schedulable(&server).then_some(())))?;
    let own = server.object(Source::Node, OWN).context("the node")?;
    let routers = own.pointer("/metadata/annotations/wharf.dev~1router-addresses");
    ensure!(routers == Some(&json!("10.91.0.1")), "{own}");
    ensure!(node.wharf(&["explain", "10.88.0.9"])?.stdout.contains("far"), "a pod of another node");

    let (db, client) = (node.sandbox("db")?, node.sandbox("client")?);
    server.put(pod("client", OWN, None, "other"));
    await_pods(node, &["client", "db", "far"])?;
    let ends = [add(node, &db)?, add(node, &client)?];
    let labels = node.endpoint(&ends[0])?.labels;
    ensure!(labels.iter().any(|label| label == "k8s:app=db"), "at the ADD: {labels:?}");
    let of_db = EchoServer::start(db.space()?)?;
    let to = of_db.tcp_at(ends[0].v4()?.into());
    let is_open = || anyhow::Ok(echo::tcp(client.space()?, to, 10).is_ok());
    let becomes = |open: bool, what: &str| wait::until(what, || Ok((is_open()? == open).then_some(())));
    ensure!(!is_open()?, "a client without the label");
    server.put(pod("client", OWN, None, "web"));
    becomes(true, "the label of the client")?;
    // A policy that nobody accepts leaves the earlier one in force, and is told.
    let (source, mut wrong) = policy();
    wrong["spec"]["ingress"] = json!([{"por": 1}]);
    server.put((source, wrong));
    wait::until("the Event", || {
        Ok(server.events().iter().any(|event| event["reason"] == "PolicyRefused").then_some(()))
    })?;
    ensure!(is_open()?, "the earlier policy");
    server.put(policy());

    // Changes while the program, and then the agent, is away.
    drop(program);
    server.put(pod("client", OWN, None, "other"));
    server.delete(Source::Pod, "shop/far");
    let program = Program::start(node, address)?;
    becomes(false, "the change while wharf-kube was away")?;
    await_pods(node, &["client", "db"])?;
    node.kill_agent()?;
    server.put(pod("client", OWN, None, "web"));
    server.put(pod("near", "b", Some("10.88.0.10"), "web"));
    node.start_agent()?;
    becomes(true, "the change while the agent was away")?;
    await_pods(node, &["client", "db", "near"])?;
    server.put(pod("client", OWN, None, "other"));
    becomes(false, "a client without the label")?;
    server.delete(Source::NetworkPolicy, "shop/db");
    wait::until("no policy", || {
        Ok(node.ask(async |client| client.policies().await)?.policies.is_empty().then_some(()))
    })?;
    becomes(true, "containers without a policy")?;
    ensure!(server.forbidden().is_empty(), "{:?}", server.forbidden());
    drop(program);
    ends.iter().try_for_each(|end| node.detach(end))
}

#[test]
fn a_node_of_a_cluster_follows_the_api() -> Result<()> {
    let mut node = Node::without_agent(NodeConfig::default())?;
    for command in [
        "link add up0 type veth peer name up1",
        "addr add 198.51.100.1/24 dev up0",
        "link set up0 up",
        "link set up1 up",
        "link set lo up",
    ] {
        ip(node.space(), command)?;
    }
    let feed = format!("--cluster-feed={}", node.dirs().root.join("feed").display());
    node.set_flag(&feed, true);
    node.set_flag("--pools-from-cluster", true);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let outcome = node.start_agent().and_then(|()| follow(&mut node, &runtime)).and_then(|()| node.finish());
    if outcome.is_err() {
        let kube = fs::read_to_string(node.dirs().root.join("wharf-kube.log")).unwrap_or_default();
        eprintln!("---- log of the agent\n{}---- log of wharf-kube\n{kube}---- end of the logs", node.log());
    }
    outcome
}
