//! `--cluster-feed`: a producer reports nodes, pods, namespaces and policies.

#[path = "feed/faults.rs"]
mod faults;
#[path = "feed/streams.rs"]
mod streams;

use std::{
    fs,
    io::ErrorKind,
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tonic::{Code, Status};
use wharf_feed::v1;
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    echo::EchoServer,
    feed::{Producer, begin, complete, delete, namespace, node as peer, node_with_routers, opening, pod, policy},
    process::ip,
    space::Space,
    wait,
};

/// Name of the node, as of [`NodeConfig::default`].
const OWN: &str = "quay";
const KINDS: [&str; 4] = ["node", "pod", "namespace", "policy"];
/// Networks of the node's own pools.
const POOLS: [&str; 2] = ["10.87.0.0/16", "fd57:4a7f:e8f::/64"];
/// Rows in force after the first snapshot of a test, as of [`rows`].
const FULL: [u64; 4] = [2, 1, 1, 1];
const TO_B: &str = "10.88.0.0/24 via 198.51.100.2";

/// How long a connection that must not be made is waited for: TCP repeats its first packet after a second.
const DENIED: Duration = Duration::from_millis(1_300);

const DENY: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: web, namespace: shop}\n\
                    spec: {podSelector: {}}\n";

/// A node on a network of its own, with an agent that has a feed.
fn fed(body: impl FnOnce(&mut Node, &Path) -> Result<()>) -> Result<()> {
    let mut node = Node::without_agent(NodeConfig::default())?;
    for command in [
        "link add up0 type veth peer name up1",
        "addr add 198.51.100.1/24 dev up0",
        "link set up0 up",
        "link set up1 up",
    ] {
        ip(node.space(), command)?;
    }
    let directory = node.dirs().root.join("feed");
    node.set_flag(&format!("--cluster-feed={}", directory.display()), true);
    let outcome = (|| {
        node.start_agent()?;
        body(&mut node, &directory.join("feed.sock"))?;
        node.finish()
    })();
    if outcome.is_err() {
        eprintln!("---- log of the agent\n{}---- end of the log", node.log());
    }
    outcome
}

fn kube(socket: &Path) -> Result<Producer> {
    Producer::opened(socket, opening("kube", "one", OWN, &KINDS))
}

fn own_node() -> v1::Change {
    peer(OWN, &["198.51.100.1"], &POOLS)
}

fn node_b() -> v1::Change {
    peer("b", &["198.51.100.2"], &["10.88.0.0/24"])
}

/// A snapshot of every kind with these rows.
fn snapshot(producer: &mut Producer, rows: Vec<v1::Change>) -> Result<v1::Processed> {
    let begins = KINDS.into_iter().map(begin);
    let changes = begins.chain(rows).chain(KINDS.into_iter().map(complete)).collect();
    let processed = producer.send(changes)?;
    producer.settle()?;
    Ok(processed)
}

/// Destinations and next hops of the routes to other nodes, without the unreachable routes behind them.
fn routes(node: &Node) -> Result<Vec<String>> {
    let all = ip(node.space(), "-4 route show proto 88")?;
    let all = all.lines().filter(|line| !line.starts_with("unreachable "));
    Ok(all.map(|line| line.split_whitespace().take(3).collect::<Vec<_>>().join(" ")).collect())
}

fn view(node: &Node) -> Result<wharf_api::ClusterFeed> {
    node.ask(async |client| client.cluster().await)?.feed.context("no feed")
}

/// Rows in force, by kind.
fn rows(node: &Node) -> Result<Vec<u64>> {
    let rows = view(node)?.rows;
    // While a start reads the rows of a kind, there is no number of them.
    Ok(KINDS.iter().filter_map(|kind| Some(rows.iter().find(|row| row.kind == *kind)?.in_force)).collect())
}

fn component(node: &Node) -> Result<(String, String)> {
    let status: Value = serde_json::from_str(&node.wharf(&["status", "-o", "json"])?.stdout)?;
    let rows = status["components"].as_array().context("components")?;
    let row = rows.iter().find(|row| row["name"] == "cluster").context("no cluster in the status")?;
    let text = |name: &str| row[name].as_str().unwrap_or_default().to_owned();
    Ok((text("health"), text("message")))
}

fn file(node: &Node) -> PathBuf {
    node.dirs().state.join("feed.json")
}

fn code(result: Result<Option<v1::agent_message::Body>>) -> Result<Code> {
    let error = result.err().context("the stream continues")?;
    Ok(error.downcast_ref::<Status>().with_context(|| format!("{error:#}"))?.code())
}

#[test]
fn an_opening_that_the_agent_cannot_serve_is_rejected_with_the_reason() -> Result<()> {
    fed(|node, socket| {
        let mode = |path: &Path| fs::metadata(path).map(|meta| meta.permissions().mode() & 0o777);
        let directory = socket.parent().context("a directory")?;
        ensure!(mode(socket)? == 0o600 && mode(directory)? == 0o700, "modes without a group");
        for (asked, why) in [
            (opening("kube", "one", "other", &KINDS), "the rows are for node \"other\", and this node is \"quay\""),
            (
                opening("kube", "one", OWN, &["node", "service", "slice"]),
                "does not know the kinds \"service\", \"slice\"",
            ),
            (opening("kube", "one", OWN, &["node", "node"]), "each once"),
            (opening("", "one", OWN, &KINDS), "producer must have"),
        ] {
            let (mut producer, reason) = Producer::open(socket, asked)?;
            ensure!(reason.as_ref().is_some_and(|reason| reason.contains(why)), "{reason:?}, not {why}");
            ensure!(producer.answer()?.is_none(), "the stream continues");
        }
        let mut hasty = Producer::connect(socket)?;
        hasty.say(v1::producer_message::Body::Changes(v1::Changes { changes: Vec::new() }))?;
        ensure!(code(hasty.answer())? == Code::InvalidArgument, "without an opening");
        let mut early = Producer::opened(socket, opening("kube", "one", OWN, &KINDS))?;
        let error = early.send(vec![node_b()]).expect_err("before a snapshot");
        ensure!(format!("{error:#}").contains("before the snapshot of kind node"), "{error:#}");
        drop(early);
        for flags in [&["--cluster-file=/nodes.toml"] as &[&str], &["--cluster-file=/nodes.toml", "--check-config"]] {
            let refused = node.run_agent_to_end(flags)?;
            let told = refused.stderr.contains("leave one of the two out");
            ensure!(refused.code() == 3 && told, "{}", refused.describe());
        }
        // With a group, and not in a directory with something else.
        node.stop_agent()?;
        node.set_flag("--cluster-feed-group=daemon", true);
        fs::write(directory.join("note"), "")?;
        let refused = node.run_agent_to_end(&[])?;
        ensure!(
            refused.code() != 0 && refused.stderr.contains("for the socket alone: it has note"),
            "{}",
            refused.describe()
        );
        ensure!(mode(directory)? == 0o700, "the mode of a directory that is not the agent's alone is changed");
        fs::remove_file(directory.join("note"))?;
        node.start_agent()?;
        ensure!(mode(socket)? == 0o660 && mode(directory)? == 0o750, "modes with a group");
        let group = fs::metadata(socket)?.gid();
        ensure!(group != 0 && fs::metadata(directory)?.gid() == group, "group {group}");
        Ok(())
    })
}

/// A connection, also a refused one: packets go there and back.
fn reaches(from: &Space, to: SocketAddr) -> Result<bool> {
    match from.run(|| TcpStream::connect_timeout(&to, DENIED))? {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => Ok(false),
        Err(error) => Err(error).context("connect"),
    }
}

/// Two containers of the namespace `default`.
struct Two {
    client: Sandbox,
    _server: Sandbox,
    echo: EchoServer,
    to: IpAddr,
    ends: [Attached; 2],
}

impl Two {
    fn start(node: &Node) -> Result<Self> {
        let (client, server) = (node.sandbox("client")?, node.sandbox("server")?);
        let ends = [node.attach(&client)?, node.attach(&server)?];
        let echo = EchoServer::start(server.space()?)?;
        let to = ends[1].v4()?.into();
        Ok(Self { client, _server: server, echo, to, ends })
    }

    fn end(self, node: &Node) -> Result<()> {
        self.ends.iter().try_for_each(|end| node.detach(end))
    }

    fn is_open(&self) -> Result<bool> {
        reaches(self.client.space()?, self.echo.tcp_at(self.to))
    }

    /// Datagrams that arrive while something else happens.
    fn datagrams_during(&self, body: impl FnOnce() -> Result<()>) -> Result<u64> {
        let (done, before) = (AtomicBool::new(false), self.echo.datagrams());
        let to = self.echo.udp_at(self.to);
        thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let socket = self.client.space()?.run(|| UdpSocket::bind("0.0.0.0:0"))??;
                while !done.load(Ordering::Relaxed) {
                    // A refusal is an answer to an earlier one.
                    socket.send_to(b"?", to).ok();
                    thread::sleep(Duration::from_millis(1));
                }
                anyhow::Ok(())
            });
            let result = body();
            done.store(true, Ordering::Relaxed);
            sending.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            result
        })?;
        Ok(self.echo.datagrams() - before)
    }
}

fn deny_all() -> String {
    DENY.replace("namespace: shop", "namespace: default")
}

#[test]
fn policies_hold_over_restarts_and_over_the_loss_of_the_rows() -> Result<()> {
    fed(|node, socket| {
        let two = Two::start(node)?;
        ensure!(two.is_open()?, "without a policy");
        let mut producer = kube(socket)?;
        snapshot(&mut producer, vec![own_node(), node_b(), namespace("default", &[]), policy("all", &deny_all())])?;
        ensure!(!two.is_open()?, "with a policy");
        drop(producer);

        // Not one packet passes while the agent is away, starts, and takes the rows of its file.
        let passed = two.datagrams_during(|| {
            for _ in 0..2 {
                node.kill_agent()?;
                node.start_agent()?;
                node.await_rebuilt()?;
            }
            Ok(())
        })?;
        ensure!(passed == 0 && !two.is_open()?, "{passed} datagrams passed over restarts");

        // Without the file, too: gone or damaged.
        for damaged in [false, true] {
            let passed = two.datagrams_during(|| {
                node.kill_agent()?;
                if damaged {
                    fs::write(file(node), "{")?
                } else {
                    fs::remove_file(file(node))?
                }
                node.start_agent()
            })?;
            ensure!(passed == 0 && !two.is_open()?, "{passed} datagrams passed without the rows");
            let late = node.sandbox("late")?;
            let refused = node.attach(&late).err().context("a container is added without its policies")?;
            ensure!(format!("{refused:#}").contains("rows of the cluster feed are lost"), "{refused:#}");
            let mut producer = kube(socket)?;
            let rows = vec![own_node(), node_b(), namespace("default", &[]), policy("all", &deny_all())];
            snapshot(&mut producer, rows)?;
            ensure!(!two.is_open()?, "with the rows again");
            let end = node.attach(&late)?;
            node.detach(&end)?;
        }
        let mut producer = kube(socket)?;
        snapshot(&mut producer, vec![own_node(), namespace("default", &[])])?;
        ensure!(two.is_open()?, "without the policy again");
        // Nothing is awaited any more.
        drop(producer);
        node.kill_agent()?;
        fs::remove_file(file(node))?;
        node.start_agent()?;
        ensure!(two.is_open()?, "a feed without policies");
        two.end(node)
    })
}

/// Rules that are not the feed's need its pods and nodes, too.
#[test]
fn rules_about_containers_of_other_nodes_stay_when_the_rows_are_lost() -> Result<()> {
    const ALLOW: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: all, namespace: default}\n\
                         spec: {podSelector: {}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchLabels: {app: far}}}]}]}\n";
    fed(|node, socket| {
        let two = Two::start(node)?;
        let document = node.dirs().root.join("all.yaml");
        fs::write(&document, ALLOW)?;
        let far = || pod("far", "b", &["10.88.0.5"], &[("app", "far")]);
        let rows = || vec![own_node(), node_b(), namespace("default", &[]), namespace("shop", &[]), far()];
        snapshot(&mut kube(socket)?, rows())?;
        node.wharf(&["policy", "import", document.to_str().context("path")?])?.ok()?;
        let before = node.ask(async |client| client.map("IPCACHE").await)?.rows;
        for text in ["{", ""] {
            // The whole file, and its second document.
            wait::until("the file", || Ok(file(node).exists().then_some(())))?;
            node.kill_agent()?;
            let kept = fs::read_to_string(file(node))?;
            let nodes = kept.find("}{").or_else(|| kept.find("}\n{")).context("no second document")?;
            fs::write(file(node), if text.is_empty() { &kept[..=nodes] } else { text })?;
            node.start_agent()?;
            ensure!(node.ask(async |client| client.map("IPCACHE").await)?.rows == before, "other rows after {text:?}");
            // The damaged file is not there at a second start.
            node.kill_agent()?;
            node.start_agent()?;
            ensure!(
                node.ask(async |client| client.map("IPCACHE").await)?.rows == before,
                "other rows after two starts"
            );
            let late = node.sandbox("late")?;
            let refused = node.attach(&late).err().context("a container is added without the rows")?;
            ensure!(format!("{refused:#}").contains("rows of the cluster feed are lost"), "{refused:#}");
            // A producer that has no policies.
            let kinds = &KINDS[..3];
            let mut producer = Producer::opened(socket, opening("kube", "one", OWN, kinds))?;
            let begins = kinds.iter().map(|kind| begin(kind));
            producer.send(begins.chain(rows()).chain(kinds.iter().map(|kind| complete(kind))).collect())?;
            producer.settle()?;
            let end = node.attach(&late)?;
            node.detach(&end)?;
        }
        ensure!(!two.is_open()?, "the rule");
        two.end(node)
    })
}

#[test]
fn a_policy_that_another_has_or_that_does_not_fit_is_refused_alone() -> Result<()> {
    fed(|node, socket| {
        let two = Two::start(node)?;
        let document = node.dirs().root.join("web.yaml");
        fs::write(&document, deny_all())?;
        node.wharf(&["policy", "import", document.to_str().context("path")?])?.ok()?;
        let open = DENY
            .replace("namespace: shop", "namespace: default")
            .replace("{podSelector: {}}", "{podSelector: {}, ingress: [{}]}");
        let mut producer = kube(socket)?;
        snapshot(
            &mut producer,
            vec![own_node(), node_b(), namespace("default", &[]), policy("z", &open), policy("y", &open)],
        )?;
        ensure!(!two.is_open()?, "the import takes precedence");
        let told = |count: usize, text: &str| {
            wait::until(text, || {
                let feed = view(node)?;
                let all: Vec<&str> = feed.refused.iter().map(|row| row.reason.as_str()).collect();
                Ok((all.len() == count && all.iter().all(|why| why.contains(text))).then_some(()))
            })
        };
        told(2, "was imported, too")?;
        node.wharf(&["policy", "delete", "--all"])?.ok()?;
        ensure!(two.is_open()?, "the first row follows");
        told(1, "is of row y, too")?;
        // In one message, in whatever order: the name goes to another row.
        producer.send(vec![policy("a", &deny_all()), delete("policy", "y"), delete("policy", "z")])?;
        producer.settle()?;
        ensure!(!two.is_open()? && view(node)?.refused.is_empty(), "{:?}", view(node)?.refused);
        // One that does not fit, among others: it has more listeners than there are.
        let rule = |n: u32| {
            let http = format!("rules: {{http: [{{path: /{n}}}]}}");
            format!(
                "{{fromEndpoints: [{{}}], toPorts: [{{ports: [{{port: \"{}\", protocol: TCP}}], {http}}}]}}",
                n + 1_000
            )
        };
        let rules: Vec<String> = (0..1_001).map(rule).collect();
        let large = format!(
            "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {{name: large, namespace: default}}\n\
             spec: {{endpointSelector: {{}}, ingress: [{}]}}\n",
            rules.join(", ")
        );
        producer.send(vec![delete("policy", "a"), policy("b", &open), policy("large", &large), policy("c", &large)])?;
        producer.settle()?;
        ensure!(two.is_open()?, "the other policies of the message");
        let refused = view(node)?.refused;
        let names: Vec<(&str, bool)> = refused.iter().map(|row| (row.name.as_str(), row.conflict)).collect();
        ensure!(names == [("c", false), ("large", false)], "{refused:?}");
        producer.send(vec![delete("policy", "b"), delete("policy", "c"), policy("large", &deny_all())])?;
        producer.settle()?;
        ensure!(!two.is_open()? && view(node)?.refused.is_empty(), "{:?}", view(node)?.refused);
        two.end(node)
    })
}

/// Packets in ingress, by the metric.
fn unknown_pod_drops(node: &Node) -> Result<u64> {
    let text = node.http("GET", "/metrics", None)?.text();
    let line = text.lines().find_map(|line| line.strip_prefix("wharf_unknown_pod_drops_total{direction=\"ingress\"} "));
    line.context("no metric")?.parse().context("the metric")
}

#[test]
fn a_pod_of_another_node_is_known_by_its_labels_and_its_namespace() -> Result<()> {
    fed(|node, socket| {
        let two = Two::start(node)?;
        let other = node.sandbox("other")?;
        ip(node.space(), &format!("link set up1 netns {}", other.path().display()))?;
        for command in [
            "link set lo up",
            "link set up1 up",
            "addr add 198.51.100.2/24 dev up1",
            "addr add 10.88.0.9/32 dev lo",
            "addr add 10.88.0.10/32 dev lo",
            "addr add 10.88.0.11/32 dev lo",
        ] {
            ip(other.space()?, command)?;
        }
        let reaches = |from: &str| {
            ip(other.space()?, &format!("route replace 10.87.0.0/16 via 198.51.100.1 src {from}"))?;
            reaches(other.space()?, two.echo.tcp_at(two.to))
        };
        let allows = deny_all().replace(
            "{podSelector: {}}",
            "{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {app: web}}, namespaceSelector: \
             {matchExpressions: [{key: evil, operator: DoesNotExist}]}}]}]}",
        );
        let (web, db) = (("app", "web"), ("app", "db"));
        let mut producer = kube(socket)?;
        let pods = [pod("one", "b", &["10.88.0.9"], &[web]), pod("two", "b", &["10.88.0.10"], &[db])];
        let rows = [own_node(), node_b(), namespace("default", &[]), policy("web", &allows)];
        snapshot(&mut producer, rows.into_iter().chain(pods).collect())?;
        ensure!(!reaches("10.88.0.9")?, "its namespace is not known: a label may be there");
        let mut send = |changes: Vec<v1::Change>| {
            producer.send(changes)?;
            producer.settle()
        };
        let by_name = deny_all().replace(
            "{podSelector: {}}",
            "{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: shop}}}]}]}",
        );
        send(vec![policy("web", &by_name)])?;
        ensure!(reaches("10.88.0.9")?, "the name of a namespace is known");
        send(vec![policy("web", &allows), namespace("shop", &[])])?;
        let allowed = || Ok::<_, anyhow::Error>(["10.88.0.9", "10.88.0.10", "10.88.0.11"].map(&reaches));
        let expect = |expected: [bool; 3], when: &str| {
            let found = allowed()?.into_iter().collect::<Result<Vec<bool>>>()?;
            ensure!(found == expected, "{when}: {found:?}");
            Ok(())
        };
        ensure!(unknown_pod_drops(node)? == 0, "each pod has a row");
        expect([true, false, false], "by labels; the third address has no pod")?;
        wait::until("the drops of the third address", || Ok((unknown_pod_drops(node)? > 0).then_some(())))?;
        let (_, message) = component(node)?;
        ensure!(message.contains("packets of unknown pods"), "{message}");
        send(vec![pod("one", "b", &["10.88.0.9"], &[db]), pod("two", "b", &["10.88.0.10"], &[web])])?;
        expect([false, true, false], "with the labels swapped")?;
        send(vec![pod("one", "b", &["10.88.0.10"], &[db]), pod("two", "b", &["10.88.0.9", "10.88.0.11"], &[web])])?;
        expect([true, false, true], "with the addresses swapped")?;
        send(vec![namespace("shop", &[("evil", "yes")])])?;
        expect([false, false, false], "with a label of the namespace")?;
        send(vec![namespace("shop", &[]), delete("pod", "two")])?;
        expect([false, false, false], "without the pod")?;
        // The other node itself.
        for (entity, expected) in [("world", false), ("host", false), ("cluster", true), ("remote-node", true)] {
            let text = format!(
                "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {{name: nodes, namespace: default}}\n\
                 spec: {{endpointSelector: {{}}, ingress: [{{fromEntities: [{entity}]}}]}}\n"
            );
            send(vec![policy("nodes", &text)])?;
            ensure!(reaches("198.51.100.2")? == expected, "{entity}");
        }
        ensure!(!reaches("10.88.0.11")?, "an address without a pod");
        send(vec![node_with_routers("b", &["198.51.100.2"], &["10.88.0.0/24"], &["10.88.0.11", "192.0.2.7"])])?;
        ensure!(reaches("10.88.0.11")?, "a router address is the node's");
        send(vec![node_b()])?;
        ensure!(!reaches("10.88.0.11")?, "an address that is no router address any more");
        send(vec![delete("policy", "nodes")])?;
        ensure!(!reaches("198.51.100.2")?, "no rule names the node");
        send(vec![delete("node", "b")])?;
        two.end(node)
    })
}

/// A pod of namespace `shop`, as a kubelet's runtime adds it; its uid is its name.
fn add_pod(node: &Node, sandbox: &Sandbox) -> Result<Attached> {
    let (name, conf) = (sandbox.name(), node.netconf());
    let args = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={name};K8S_POD_UID={name}");
    let add = node.cni("ADD").of(name, sandbox.path(), "eth0").conf(&conf).env("CNI_ARGS", &args).run()?;
    let (container, netns) = (name.to_owned(), sandbox.path().to_owned());
    Ok(Attached { container, netns, ifname: "eth0".to_owned(), conf, result: add.result()? })
}

#[test]
fn a_pod_of_this_node_has_the_labels_of_its_row() -> Result<()> {
    fed(|node, socket| {
        let (web, db) = (("app", "web"), ("app", "db"));
        let dark = DENY.replace("{podSelector: {}}", "{podSelector: {matchLabels: {app: db}}}");
        let mut producer = kube(socket)?;
        let rows = [own_node(), namespace("shop", &[]), policy("web", &dark), pod("one", OWN, &[], &[web])];
        snapshot(&mut producer, rows.into())?;
        let (client, one, late) = (node.sandbox("client")?, node.sandbox("one")?, node.sandbox("late")?);
        let ends = [node.attach(&client)?, add_pod(node, &one)?, add_pod(node, &late)?];
        let [of_one, of_late] = [&one, &late].map(|sandbox| EchoServer::start(sandbox.space()?));
        let (of_one, of_late) = (of_one?, of_late?);
        let (to_one, to_late) = (of_one.tcp_at(ends[1].v4()?.into()), of_late.tcp_at(ends[2].v4()?.into()));
        let is_open = |to: SocketAddr| reaches(client.space()?, to);
        let labels = node.endpoint(&ends[1])?.labels;
        ensure!(labels.iter().any(|label| label == "k8s:app=web"), "at the ADD: {labels:?}");
        ensure!(is_open(to_one)? && !is_open(to_late)?, "a pod without a row is isolated");
        let waits_for = node.endpoint(&ends[2])?.status.waits_for;
        ensure!(waits_for.contains("row of its pod"), "{waits_for}");
        let mut send = |changes: Vec<v1::Change>| {
            producer.send(changes)?;
            producer.settle()
        };
        send(vec![pod("late", OWN, &[], &[web]), pod("one", OWN, &[], &[db])])?;
        ensure!(!is_open(to_one)? && is_open(to_late)?, "with a row, and with another label");
        send(vec![pod("one", OWN, &[], &[web]), pod("late", OWN, &[], &[db])])?;
        ensure!(is_open(to_one)? && !is_open(to_late)?, "with the labels swapped");
        send(vec![delete("pod", "one"), delete("pod", "late")])?;
        ensure!(is_open(to_one)? && !is_open(to_late)?, "without the rows");
        drop(producer);
        node.kill_agent()?;
        node.start_agent()?;
        node.await_rebuilt()?;
        ensure!(is_open(to_one)? && !is_open(to_late)?, "after a restart without a producer");
        ends.iter().try_for_each(|end| node.detach(end))
    })
}

#[test]
fn rows_stay_in_force_without_their_producer_and_over_a_restart() -> Result<()> {
    fed(|node, socket| {
        let mut producer = kube(socket)?;
        let pods = [pod("web-0", "b", &["10.88.0.9"], &[("app", "web")])];
        let rows_sent = [own_node(), node_b(), namespace("shop", &[("team", "red")]), policy("web", DENY)];
        let processed = snapshot(&mut producer, rows_sent.into_iter().chain(pods).collect())?;
        ensure!(processed.refused.is_empty(), "{processed:?}");
        ensure!(routes(node)? == [TO_B], "{:?}", routes(node)?);
        ensure!(rows(node)? == FULL, "{:?}", rows(node)?);
        ensure!(component(node)?.0 == "ok", "{:?}", component(node)?);
        let shown = node.wharf(&["cluster", "feed"])?.ok()?;
        ensure!(shown.contains("kube, connected for"), "{shown}");
        ensure!(node.wharf(&["cluster", "status"])?.ok()?.contains("feed:       kube"), "the line of the feed");
        let pods = node.wharf(&["cluster", "pods", "--node", "b"])?.ok()?;
        ensure!(pods.contains("10.88.0.9") && pods.contains("app=web"), "{pods}");
        ensure!(
            !node.wharf(&["cluster", "pods", "--namespace", "other"])?.ok()?.contains("web-0"),
            "another namespace"
        );
        let told = node.wharf(&["explain", "10.88.0.9"])?.ok()?;
        ensure!(told.contains("pod shop/web-0 on node b") && told.contains("Identity:"), "{told}");
        let told = node.wharf(&["explain", "10.88.0.10"])?.ok()?;
        ensure!(told.contains("7 (reserved:unknown-pod)") && !told.contains("once a policy"), "{told}");
        wait::until("the report", || {
            producer.send(Vec::new())?;
            let conditions = producer.report().map(|report| report.conditions.as_slice()).unwrap_or_default();
            Ok((conditions.len() == 3 && conditions.iter().all(|condition| condition.holds)).then_some(()))
        })?;

        drop(producer);
        wait::until("the producer is missed", || Ok(view(node)?.connected_since_unix_ms.is_none().then_some(())))?;
        ensure!(component(node)?.1.contains("the rows of the last one stay in force"), "{:?}", component(node)?);
        ensure!(node.wharf(&["cluster", "feed"])?.code() == 1, "a feed without a producer");
        ensure!(routes(node)? == [TO_B] && rows(node)? == FULL, "after the disconnect");

        // Ends in good order, then by a kill.
        for turn in 0..2 {
            match turn {
                0 => node.stop_agent()?,
                _ => node.kill_agent()?,
            }
            ensure!(routes(node)? == [TO_B], "without an agent");
            node.start_agent()?;
            ensure!(routes(node)? == [TO_B], "after a start");
            // The rows that are no nodes are read beside the API.
            wait::until_equal("the rows after a start", &FULL.to_vec(), || rows(node))?;
        }

        // A snapshot that is not complete removes nothing.
        let mut partial = kube(socket)?;
        partial.send(vec![begin("node"), own_node(), complete("node"), begin("pod")])?;
        drop(partial);
        wait::until("the producer is missed", || Ok(view(node)?.connected_since_unix_ms.is_none().then_some(())))?;
        ensure!(routes(node)? == [TO_B] && rows(node)? == FULL, "after half a snapshot");

        // The next one waits for its turn, and removes what it does not have.
        let mut producer = kube(socket)?;
        snapshot(&mut producer, vec![own_node(), namespace("shop", &[])])?;
        ensure!(routes(node)?.is_empty() && rows(node)? == [1u64, 0, 1, 0], "{:?} {:?}", routes(node)?, rows(node)?);
        producer.send(vec![node_b()])?;
        producer.settle()?;
        ensure!(routes(node)? == [TO_B], "{:?}", routes(node)?);
        producer.send(vec![delete("node", "b")])?;
        producer.settle()?;
        ensure!(routes(node)?.is_empty(), "{:?}", routes(node)?);
        Ok(())
    })
}

#[test]
fn a_damaged_file_is_set_aside_and_routes_stay_until_the_producer_has_sent_every_row() -> Result<()> {
    fed(|node, socket| {
        let mut producer = kube(socket)?;
        snapshot(&mut producer, vec![own_node(), node_b()])?;
        drop(producer);
        node.stop_agent()?;
        ensure!(fs::read_to_string(file(node))?.contains("10.88.0.0/24"), "the rows are not kept");
        fs::write(file(node), "{")?;
        node.start_agent()?;
        ensure!(routes(node)? == [TO_B] && rows(node)? == [0u64; 4], "after a start without rows");
        let (health, message) = component(node)?;
        ensure!(health == "degraded" && message.contains("feed.json.damaged"), "{message}");
        ensure!(!file(node).exists(), "the damaged file is in place");
        ensure!(node.found_amiss()?.is_empty(), "{:?}", node.found_amiss()?);
        // Also another cluster: nothing of the first one is known.
        let mut producer = Producer::opened(socket, opening("kube", "two", OWN, &KINDS))?;
        snapshot(&mut producer, vec![own_node()])?;
        ensure!(routes(node)?.is_empty(), "{:?}", routes(node)?);
        wait::until("the damage is no more told", || Ok((component(node)?.0 == "ok").then_some(())))
    })
}

#[test]
fn one_producer_has_the_feed_and_a_refused_row_is_told() -> Result<()> {
    fed(|node, socket| {
        let mut first = kube(socket)?;
        snapshot(&mut first, vec![own_node(), namespace("shop", &[]), policy("web", DENY)])?;
        let (_, reason) = Producer::open(socket, opening("other", "one", OWN, &KINDS))?;
        ensure!(reason.as_ref().is_some_and(|why| why.contains("producer \"kube\" has the feed")), "{reason:?}");
        let (_, reason) = Producer::open(socket, opening("kube", "two", OWN, &KINDS))?;
        ensure!(reason.as_ref().is_some_and(|why| why.contains("rows of cluster \"one\"")), "{reason:?}");

        // A row that breaks a rule, one that cannot be read, and a document that does not parse.
        let broken = DENY.replace("podSelector", "podSelektor");
        let sent =
            vec![peer("c", &["127.0.0.1"], &[]), peer("d", &["198.51.100"], &[]), policy("web", &broken), node_b()];
        let processed = first.send(sent)?;
        first.settle()?;
        let refused: Vec<(&str, bool)> = processed.refused.iter().map(|row| (row.name.as_str(), row.stale)).collect();
        ensure!(refused == [("c", false), ("d", false), ("web", true)], "{:?}", processed.refused);
        ensure!(processed.refused[1].reason == "\"198.51.100\" is no IP address", "{:?}", processed.refused[1]);
        ensure!(routes(node)? == [TO_B], "the row after the refused ones: {:?}", routes(node)?);
        ensure!(node.wharf(&["policy", "list"])?.ok()?.contains("web"), "the earlier policy");
        let shown = node.wharf(&["cluster", "feed"])?;
        ensure!(shown.code() == 1 && shown.stdout.contains("the earlier row"), "{}", shown.describe());
        ensure!(view(node)?.refused_total == 3, "{:?}", view(node)?);

        // Over a restart, too.
        drop(first);
        node.stop_agent()?;
        node.start_agent()?;
        ensure!(node.wharf(&["policy", "list"])?.ok()?.contains("web"), "the earlier policy after a restart");

        // A half-open stream is replaced.
        let mut old = kube(socket)?;
        old.send(vec![begin("node"), own_node()])?;
        let mut new = kube(socket)?;
        ensure!(code(last(&mut old))? == Code::Aborted, "the replaced stream");
        snapshot(&mut new, vec![own_node(), namespace("shop", &[])])?;
        ensure!(view(node)?.refused_total == 0 && routes(node)?.is_empty(), "{:?}", view(node)?);
        Ok(())
    })
}

/// The answer that ends a stream.
fn last(producer: &mut Producer) -> Result<Option<v1::agent_message::Body>> {
    loop {
        match producer.answer() {
            Ok(Some(_)) => {}
            end => return end,
        }
    }
}
