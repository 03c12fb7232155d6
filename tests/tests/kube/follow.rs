//! One node, objects of each kind, packets, and programs that are away.

use std::{fs, net::SocketAddr};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use wharf_api::ClusterPodsQuery;
use wharf_kube::source::Source;
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    echo::{self, EchoServer},
    kube::{
        Program,
        objects::{self, namespace},
        serve,
        server::{Fault, Server},
        streams::WatchFault,
    },
    process::ip,
    wait,
};

/// As of [`NodeConfig::default`].
const OWN: &str = "quay";
const TAINT: &str = "wharf.dev/agent-not-ready";

fn start(node: &Node, server: SocketAddr) -> Result<Program> {
    Program::start(node, OWN, &node.dirs().root.join("feed/feed.sock"), server)
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

/// `wharf cluster feed` shows the state of a watch and the cause of a failure.
fn watches_are_shown(node: &Node, server: &Server) -> Result<()> {
    let becomes = |what: &str, state: &str| {
        wait::until(what, || {
            let shown = node.wharf(&["cluster", "feed"])?.stdout;
            let line = shown.lines().find(|line| line.starts_with("NetworkPolicy "));
            Ok(line.is_some_and(|line| line.contains(state)).then_some(()))
        })
    };
    becomes("a watch", "  watching  ")?;
    // Each list after a growing delay.
    (0..6).for_each(|_| server.fail("/networkpolicies?limit=", Fault::Status(403, None)));
    server.break_watches(WatchFault::Error(410));
    becomes("a watch that fails", "answers 403")?;
    server.heal();
    becomes("the watch again", "  watching  ")
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
    let program = start(node, address)?;
    // The row of the node has the pools, and the agent's report the node's addresses.
    wait::until("a node without the taint", || Ok(is_schedulable(&server).then_some(())))?;
    let own = server.object(Source::Node, OWN).context("the node")?;
    let routers = own.pointer("/metadata/annotations/wharf.dev~1router-addresses");
    ensure!(routers == Some(&json!("10.91.0.1")), "{own}");
    ensure!(node.wharf(&["explain", "10.88.0.9"])?.stdout.contains("far"), "a pod of another node");

    watches_are_shown(node, &server)?;
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
    // A refused policy leaves the earlier one in force, and has an Event.
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
    let program = start(node, address)?;
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
