//! A boot of the node, and snapshots that are repeated, reordered, contradictory or cut.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, SocketAddr, UdpSocket},
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, umount2};
use serde_json::{Value, json};
use wharf_api::ClusterPodsQuery;
use wharf_feed::v1;
use wharf_tests::{
    Node, Sandbox,
    echo::{self, EchoServer},
    feed::{Producer, begin, complete, delete, namespace, node as peer, pod, policy},
    process::{command_in, ip, run},
    scratch, wait,
};

use super::{KINDS, TO_B, Two, fed, file, kube, node_b, own_node, reaches, routes, rows, snapshot, view};

#[path = "../crash_matrix/rules.rs"]
mod rules;

/// Only pods with the label `app: web` reach a container.
const FROM_WEB: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\n\
                        metadata: {name: web, namespace: default}\n\
                        spec: {podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {app: web}}, \
                        namespaceSelector: {}}]}]}\n";
/// The container `late` sends nothing.
const SILENT: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\n\
                      metadata: {name: silent, namespace: default}\n\
                      spec: {podSelector: {matchLabels: {app: late}}, policyTypes: [Egress]}\n";
const WEB: (&str, &str) = ("app", "web");
const DB: (&str, &str) = ("app", "db");

/// Node b, with the addresses of its containers.
struct Other {
    sandbox: Sandbox,
    echo: EchoServer,
}

impl Other {
    const ADDRESS: &str = "198.51.100.2";

    /// At the other end of the node's link, which is in the node's namespace before.
    fn join(node: &Node, pods: &[&str]) -> Result<Self> {
        let sandbox = node.sandbox("other")?;
        ip(node.space(), &format!("link set up1 netns {}", sandbox.path().display()))?;
        ip(sandbox.space()?, "link set lo up")?;
        ip(sandbox.space()?, "link set up1 up")?;
        ip(sandbox.space()?, &format!("addr add {}/24 dev up1", Self::ADDRESS))?;
        for address in pods {
            ip(sandbox.space()?, &format!("addr add {address}/32 dev lo"))?;
        }
        let echo = EchoServer::start(sandbox.space()?)?;
        Ok(Self { sandbox, echo })
    }

    /// From one of its containers.
    fn reaches(&self, from: &str, to: SocketAddr) -> Result<bool> {
        let space = self.sandbox.space()?;
        ip(space, &format!("route replace 10.87.0.0/16 via 198.51.100.1 src {from}"))?;
        reaches(space, to)
    }

    fn udp(&self) -> Result<SocketAddr> {
        Ok(self.echo.udp_at(Self::ADDRESS.parse::<IpAddr>()?))
    }
}

/// Removes what a boot removes, without containers and an agent.
fn boot(node: &Node, socket: &Path) -> Result<()> {
    wait::until("links of containers to go", || Ok(node.endpoint_links()?.is_empty().then_some(())))?;
    ip(node.space(), "link del wharf0")?;
    // With all routes.
    ip(node.space(), "link set up0 down")?;
    ip(node.space(), "link set up0 up")?;
    let mut flush = command_in(node.space(), "nft")?;
    flush.args(["flush", "ruleset"]);
    run(flush, b"", wait::PATIENCE)?.ok()?;
    let dirs = node.dirs();
    umount2(&dirs.bpffs, MntFlags::MNT_DETACH).context("unmount the bpffs")?;
    fs::remove_dir(&dirs.bpffs).context("remove its mount point")?;
    scratch::mount_bpffs(&dirs.bpffs)?;
    fs::remove_dir_all(&dirs.run).context("remove the run directory")?;
    fs::create_dir(&dirs.run).context("make the run directory")?;
    fs::remove_dir_all(socket.parent().context("a directory")?).context("remove the directory of the socket")?;
    let kept = fs::read_to_string(file(node)).context("read feed.json")?;
    let (head, rest) = kept.split_once('\n').context("feed.json has one line")?;
    let mut head: Value = serde_json::from_str(head).context("read feed.json")?;
    ensure!(head["boot_id"].is_string(), "feed.json has no boot");
    head["boot_id"] = json!("11111111-2222-3333-4444-555555555555");
    fs::write(file(node), format!("{head}\n{rest}")).context("write feed.json")
}

/// Adds a container that sends datagrams from before its ADD on; returns when it has sent many with its address.
fn add_while_it_sends(node: &Node, sandbox: &Sandbox, to: SocketAddr) -> Result<wharf_tests::Attached> {
    const MANY: u64 = 100;
    let labels = json!({"cni": {"labels": [{"key": "app", "value": "late"}]}});
    let socket = sandbox.space()?.run(|| UdpSocket::bind("0.0.0.0:0"))?.context("bind the sender")?;
    let (done, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                // Without an address, the kernel refuses.
                if socket.send_to(b"?", to).is_ok() {
                    sent.fetch_add(1, Ordering::Relaxed);
                }
                thread::sleep(Duration::from_micros(200));
            }
        });
        let added = node.attach_with(sandbox, "eth0", &node.netconf().with("args", labels)).and_then(|end| {
            let is_enough = || Ok((sent.load(Ordering::Relaxed) >= MANY).then_some(()));
            wait::until("datagrams of the new container", is_enough).map(|()| end)
        });
        done.store(true, Ordering::Relaxed);
        added
    })
}

#[test]
fn after_a_boot_policies_hold_from_the_first_packet_and_pods_are_forgotten() -> Result<()> {
    fed(|node, socket| {
        let other = Other::join(node, &["10.88.0.9"])?;
        let all = || {
            let nodes = [own_node(), node_b(), namespace("default", &[]), namespace("shop", &[])];
            let others = [policy("web", FROM_WEB), policy("silent", SILENT), pod("web-0", "b", &["10.88.0.9"], &[WEB])];
            nodes.into_iter().chain(others).collect::<Vec<_>>()
        };
        let two = Two::start(node)?;
        let mut producer = kube(socket)?;
        snapshot(&mut producer, all())?;
        ensure!(other.reaches("10.88.0.9", two.echo.tcp_at(two.to))? && !two.is_open()?, "before the boot");
        drop(producer);
        node.stop_agent()?;
        drop(two);
        boot(node, socket)?;

        node.start_agent()?;
        ensure!(routes(node)? == [TO_B], "{:?}", routes(node)?);
        wait::until_equal("the rows after a boot", &vec![2u64, 0, 2, 2], || rows(node))?;
        let late = node.sandbox("late")?;
        let end = add_while_it_sends(node, &late, other.udp()?)?;
        let two = Two::start(node)?;
        // The same way is open to other containers.
        let before = other.echo.datagrams();
        echo::udp(two.client.space()?, other.udp()?, 100).context("from a container that may send")?;
        let after = other.echo.datagrams();
        ensure!(before == 0 && after == 1, "datagrams of the new container: {before}, later {after}");
        ensure!(!two.is_open()?, "ingress without a producer");
        ensure!(!other.reaches("10.88.0.9", two.echo.tcp_at(two.to))?, "a pod of the earlier boot is known");
        let pods = node.ask(async |client| client.cluster_pods(&ClusterPodsQuery::default()).await)?;
        ensure!(pods.total == 0, "{pods:?}");
        let told = node.wharf(&["explain", "10.88.0.9"])?.stdout;
        ensure!(!told.contains("web-0") && told.contains("node b"), "{told}");

        let mut producer = kube(socket)?;
        snapshot(&mut producer, all())?;
        ensure!(other.reaches("10.88.0.9", two.echo.tcp_at(two.to))?, "the pod is in force again");
        ensure!(!two.is_open()? && rows(node)? == [2u64, 1, 2, 2], "{:?}", rows(node)?);
        ensure!(node.found_amiss()?.is_empty(), "{:?}", node.found_amiss()?);
        node.detach(&end)?;
        // The link ends with node b's namespace.
        producer.send(vec![delete("node", "b")])?;
        producer.settle()?;
        two.end(node)
    })
}

/// What follows from the rows, without the numbers that an agent gives.
#[derive(Debug, PartialEq)]
struct State {
    routes: BTreeSet<String>,
    rules: rules::Rules,
    /// Prefixes of other nodes, of containers without known labels, and of the outside, with their identities.
    reserved: BTreeSet<(String, u32)>,
    in_force: Vec<u64>,
}

impl State {
    fn of(node: &Node) -> Result<Self> {
        let mut reserved = BTreeSet::new();
        for row in node.ask(async |client| client.map("IPCACHE").await)?.rows {
            let cell = |column: &str| row.get(column).context("a column");
            let identity: u32 = cell("identity")?.parse().context("an identity")?;
            let prefix = cell("prefix")?;
            // The kernel adds link-local addresses some time after a link.
            if identity < 256 && !prefix.starts_with("fe80:") {
                reserved.insert((prefix.clone(), identity));
            }
        }
        let routes = routes(node)?.into_iter().collect();
        Ok(Self { routes, rules: rules::observe(node)?, reserved, in_force: rows(node)? })
    }
}

/// The same order for a seed (xorshift).
fn shuffle<T>(items: &mut [T], seed: &mut u64) {
    for last in (1..items.len()).rev() {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        let places = last as u64 + 1;
        items.swap(last, usize::try_from(*seed % places).unwrap_or(last));
    }
}

/// Nodes c and d claim a network, pods x and y an address, and two policies a name.
fn contradictions() -> Vec<v1::Change> {
    vec![
        own_node(),
        node_b(),
        peer("c", &["198.51.100.3"], &["10.89.0.0/24"]),
        peer("d", &["198.51.100.4"], &["10.89.0.0/24", "10.90.0.0/24"]),
        namespace("default", &[]),
        namespace("shop", &[("team", "red")]),
        policy("first", FROM_WEB),
        policy("second", &FROM_WEB.replace("app: web", "app: db")),
        pod("one", "b", &["10.88.0.9"], &[WEB]),
        pod("two", "b", &["10.88.0.10"], &[DB]),
        pod("x", "b", &["10.88.0.12"], &[WEB]),
        pod("y", "b", &["10.88.0.12", "10.88.0.13"], &[DB]),
    ]
}

/// A snapshot with each row twice. Its changes, within the rules of the stream, and its messages depend on the seed.
fn in_disorder(producer: &mut Producer, mut seed: u64) -> Result<()> {
    let (mut rows, mut kinds) = ([contradictions(), contradictions()].concat(), KINDS);
    shuffle(&mut kinds, &mut seed);
    let mut changes: Vec<v1::Change> = kinds.into_iter().map(begin).collect();
    shuffle(&mut rows, &mut seed);
    changes.extend(rows);
    shuffle(&mut kinds, &mut seed);
    changes.extend(kinds.into_iter().map(complete));
    let size = usize::try_from(seed % 7).unwrap_or_default() + 1;
    for message in changes.chunks(size) {
        producer.send(message.to_vec())?;
    }
    producer.settle()
}

/// Every row but this node's.
fn delete_all(producer: &mut Producer) -> Result<()> {
    let nodes = ["b", "c", "d"].map(|name| delete("node", name));
    let pods = ["one", "two", "x", "y"].map(|uid| delete("pod", uid));
    let rest = [("namespace", "default"), ("namespace", "shop"), ("policy", "first"), ("policy", "second")];
    let rest = rest.map(|(kind, key)| delete(kind, key));
    producer.send(nodes.into_iter().chain(pods).chain(rest).collect())?;
    producer.settle()
}

/// An agent without rows.
fn start_again(node: &mut Node) -> Result<()> {
    node.kill_agent()?;
    fs::remove_file(file(node)).context("remove feed.json")?;
    node.start_agent()?;
    node.await_rebuilt()
}

#[test]
fn the_order_of_rows_has_no_influence_and_a_contradiction_ends_with_one_of_its_rows() -> Result<()> {
    fed(|node, socket| {
        let other = Other::join(node, &["10.88.0.12"])?;
        let two = Two::start(node)?;
        let reaches_server = || other.reaches("10.88.0.12", two.echo.tcp_at(two.to));
        let mut first: Option<State> = None;
        for seed in [0x9e37_79b9, 2, 77_777] {
            let mut producer = kube(socket)?;
            in_disorder(&mut producer, seed)?;
            let state = State::of(node)?;
            let refused: BTreeSet<_> = view(node)?.refused.into_iter().map(|row| (row.kind, row.key)).collect();
            let named = [("node", "c"), ("node", "d"), ("pod", "x"), ("pod", "y"), ("policy", "second")];
            let named = named.map(|(kind, key)| (kind.to_owned(), key.to_owned()));
            ensure!(refused == BTreeSet::from(named), "seed {seed}: {refused:?}");
            if let Some(first) = &first {
                ensure!(state == *first, "seed {seed}: {state:#?}, at first {first:#?}");
            }
            first = Some(state);
            // The next order finds nothing of this one.
            delete_all(&mut producer)?;
            let left = (routes(node)?, rows(node)?);
            ensure!(left.0.is_empty() && left.1 == [1u64, 0, 0, 0], "{left:?}");
            drop(producer);
            start_again(node)?;
        }

        let mut producer = kube(socket)?;
        in_disorder(&mut producer, 1)?;
        let of_d = "10.90.0.0/24 via 198.51.100.4".to_owned();
        let found: BTreeSet<String> = routes(node)?.into_iter().collect();
        ensure!(found == BTreeSet::from([TO_B.to_owned(), of_d]), "{found:?}");
        ensure!(!reaches_server()?, "an address of two pods belongs to one");
        producer.send(vec![delete("pod", "y"), delete("node", "d"), delete("policy", "second")])?;
        producer.settle()?;
        let of_c = "10.89.0.0/24 via 198.51.100.3".to_owned();
        let found: BTreeSet<String> = routes(node)?.into_iter().collect();
        ensure!(found == BTreeSet::from([TO_B.to_owned(), of_c]), "{found:?}");
        ensure!(reaches_server()? && view(node)?.refused.is_empty(), "{:?}", view(node)?.refused);

        // A snapshot that lacks most rows and does not end. A restart permits it at once.
        drop(producer);
        node.stop_agent()?;
        node.start_agent()?;
        node.await_rebuilt()?;
        let whole = State::of(node)?;
        for kinds in [&KINDS[..1], &KINDS[..3]] {
            let mut cut = kube(socket)?;
            let begins = kinds.iter().copied().map(begin).chain([own_node()]);
            let completes = kinds.iter().copied().map(complete);
            cut.send(begins.chain(completes).collect())?;
            cut.settle()?;
            ensure!(State::of(node)? == whole, "{kinds:?} are complete: {:#?}, before {whole:#?}", State::of(node)?);
            drop(cut);
            wait::until("the end of the stream", || Ok(view(node)?.connected_since_unix_ms.is_none().then_some(())))?;
            ensure!(State::of(node)? == whole, "a snapshot that ends at {kinds:?} removes rows");
            node.stop_agent()?;
            node.start_agent()?;
            node.await_rebuilt()?;
        }
        ensure!(State::of(node)? == whole, "after a restart: {:#?}", State::of(node)?);
        // The link ends with node b's namespace.
        snapshot(&mut kube(socket)?, [own_node()].into())?;
        two.end(node)
    })
}
