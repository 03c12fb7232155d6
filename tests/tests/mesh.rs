//! Each node probes the other nodes of the cluster and their health endpoints.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, ensure};
use wharf_api::{Health, HealthReport, HealthState, NodeHealth, ProbeKind, ProbeOutcome};
use wharf_tests::{Node, NodeConfig, Sandbox, process::ip, scratch, wait};

const NAMES: [&str; 2] = ["a", "b"];
const ON: &str = "--health-interval-ms=300";
const OFF: &str = "--health-interval-ms=0";
const KINDS: [ProbeKind; 3] = [ProbeKind::Icmp, ProbeKind::Tcp, ProbeKind::Http];

fn addresses(n: usize) -> Vec<String> {
    vec![format!("198.51.100.{}", n + 1), format!("2001:db8:7::{}", n + 1)]
}

fn pools(n: usize) -> Vec<String> {
    vec![format!("10.87.{n}.0/24"), format!("fd87:0:0:{}::/64", n + 1)]
}

/// Node `n` in the file.
fn row(n: usize, health: &[String], routers: &[String]) -> String {
    let (name, addresses, pools) = (NAMES[n], addresses(n), pools(n));
    format!(
        "[[node]]\nname = {name:?}\naddresses = {addresses:?}\npod-cidrs = {pools:?}\nhealth-addresses = {health:?}\n\
         router-addresses = {routers:?}\n\n"
    )
}

/// Two nodes on one switch, which follow one file.
struct Pair {
    nodes: Vec<Node>,
    file: PathBuf,
    switch: Sandbox,
}

impl Pair {
    /// The agents do not run yet.
    fn join() -> Result<Self> {
        let file = scratch::fresh_dir("mesh")?.join("nodes.toml");
        let mut nodes = Vec::new();
        for (n, name) in NAMES.into_iter().enumerate() {
            let [v4, v6] = [0, 1].map(|family| pools(n).swap_remove(family));
            let flags = ["--node-name", name, "--prepared-programs", "4", "--routing", "native", ON];
            let flags = flags.map(str::to_owned).to_vec();
            let pools = ["--ipv4-pool".to_owned(), v4, "--ipv6-pool".to_owned(), v6];
            let list = ["--cluster-file".to_owned(), file.display().to_string()];
            let flags = flags.into_iter().chain(pools).chain(list).collect();
            nodes.push(Node::without_agent(NodeConfig { flags, toml: None })?);
        }
        let switch = nodes.first().context("no node")?.sandbox("switch")?;
        ip(switch.space()?, "link add br0 type bridge")?;
        ip(switch.space()?, "link set br0 up")?;
        for (n, node) in nodes.iter().enumerate() {
            let to = switch.path().display();
            ip(node.space(), &format!("link add up0 type veth peer name port{n} netns {to}"))?;
            for (address, rest) in addresses(n).iter().zip(["/24 dev up0", "/64 dev up0 nodad"]) {
                ip(node.space(), &format!("addr add {address}{rest}"))?;
            }
            ip(node.space(), "link set up0 up")?;
            ip(node.space(), "link set lo up")?;
            ip(switch.space()?, &format!("link set port{n} master br0"))?;
            ip(switch.space()?, &format!("link set port{n} up"))?;
        }
        let pair = Self { nodes, file, switch };
        pair.write(&(0..NAMES.len()).map(|n| row(n, &[], &[])).collect::<String>())?;
        Ok(pair)
    }

    /// Replaces the file, as an editor does.
    fn write(&self, text: &str) -> Result<()> {
        let new = self.file.with_extension("new");
        fs::write(&new, text).context("write the cluster file")?;
        fs::rename(&new, &self.file).context("replace the cluster file")
    }

    /// The node's rows with the addresses that the agents have.
    fn rows(&self) -> Result<String> {
        let mut text = String::new();
        for (n, node) in self.nodes.iter().enumerate() {
            let own = await_node(node, NAMES[n], "its own health endpoint", |h| is_ok(h) && h.pid.is_some())?;
            let health = [own.ipv4.context("IPv4")?.to_string(), own.ipv6.context("IPv6")?.to_string()];
            let status = node.ask(async |client| client.status().await)?;
            let routers: Vec<String> = status.router.iter().map(ToString::to_string).collect();
            ensure!(routers.len() == 2, "{routers:?}");
            text.push_str(&row(n, &health, &routers));
        }
        Ok(text)
    }

    /// The end of a scenario must find no health endpoint.
    fn end(&mut self) -> Result<()> {
        for node in &mut self.nodes {
            node.stop_agent()?;
            node.set_flag(ON, false);
            node.set_flag(OFF, true);
            node.start_agent()?;
            node.finish()?;
        }
        Ok(())
    }
}

fn is_ok(h: &NodeHealth) -> bool {
    h.state == HealthState::Ok
}

/// As `wharf health status -o json` shows them.
fn report(node: &Node) -> Result<Vec<NodeHealth>> {
    let shown = node.wharf(&["health", "status", "-o", "json"])?;
    let report: HealthReport = serde_json::from_str(&shown.stdout).with_context(|| shown.describe())?;
    ensure!((shown.code() == 0) == report.nodes.iter().all(is_ok), "{}", shown.describe());
    Ok(report.nodes)
}

/// Waits until a node of the report is as the test wants it.
fn await_node(node: &Node, name: &str, what: &str, fits: impl Fn(&NodeHealth) -> bool) -> Result<NodeHealth> {
    let mut last = None;
    let found = wait::until(what, || {
        let now = report(node)?.into_iter().find(|h| h.node == name);
        let fit = now.clone().filter(&fits);
        last = now;
        Ok(fit)
    });
    found.with_context(|| format!("the last that was seen: {last:#?}"))
}

/// All kinds of probes to both health addresses, and ICMP to both addresses of the node.
fn has_every_probe(h: &NodeHealth) -> bool {
    let answered = |probe: ProbeKind| {
        let of_kind = h.probes.iter().filter(|p| p.probe == probe);
        of_kind.filter(|p| p.outcome == ProbeOutcome::Answered && p.last_us.is_some()).count()
    };
    KINDS.map(answered) == [4, 2, 2] && h.probes.len() == 8
}

fn probe_each_other(pair: &Pair) -> Result<()> {
    let [a, b] = [&pair.nodes[0], &pair.nodes[1]];
    // Without health addresses, the nodes themselves are probed.
    let far = await_node(a, "b", "node b to answer", |h| is_ok(h) && h.probes.len() == 2)?;
    ensure!(!far.local && (far.ipv4, far.ipv6, far.launches) == (None, None, 0), "{far:?}");
    ensure!(report(a)?.first().is_some_and(|h| h.local && h.node == "a"), "the local node is not the first");

    let rows = pair.rows()?;
    pair.write(&rows)?;
    for (node, other) in [(a, "b"), (b, "a")] {
        await_node(node, other, "every probe to be answered", |h| is_ok(h) && has_every_probe(h))?;
    }
    let [of_a, of_b] = [report(a)?, report(b)?];
    let [far, own] = [&of_a[1], &of_b[0]];
    ensure!((far.ipv4, far.ipv6) == (own.ipv4, own.ipv6) && own.ipv4.is_some(), "{far:?} {own:?}");
    let shown = a.wharf(&["health", "status"])?.stdout;
    ensure!(shown.contains("LATENCY") && shown.lines().any(|line| line.starts_with("b ")), "{shown}");
    wait::until("the metric", || {
        let metrics = a.http("GET", "/metrics", None)?.text();
        Ok(metrics.contains("wharf_health_peers{state=\"ok\"} 1").then_some(()))
    })?;

    // The uplink of node b loses its carrier.
    ip(pair.switch.space()?, "link set port1 down")?;
    let lost = await_node(a, "b", "node b to be missed", |h| h.state == HealthState::Down)?;
    ensure!(lost.failed_rounds >= 3 && lost.message.contains("rounds in a row"), "{lost:?}");
    wait::until("the component", || {
        let status = a.ask(async |client| client.status().await)?;
        let health = status.components.into_iter().find(|c| c.name == "health").context("a component")?;
        let is_known = health.message.contains("0 of 1 other nodes answer");
        Ok((is_known && health.health == Health::Degraded && health.readiness() == Health::Ok).then_some(()))
    })?;
    let shown = a.wharf(&["health", "status"])?;
    ensure!(shown.code() == 1 && shown.stdout.contains("b: down: no answer in"), "{}", shown.describe());
    ip(pair.switch.space()?, "link set port1 up")?;
    for (node, other) in [(a, "b"), (b, "a")] {
        await_node(node, other, "the other node to answer again", |h| is_ok(h) && has_every_probe(h))?;
    }

    // Another node at its health addresses; the row is wrong.
    let own: Vec<String> = [of_a[0].ipv4.context("IPv4")?.to_string()].to_vec();
    ensure!(a.wharf(&["cluster", "status"])?.code() == 0, "the rows are in force");
    let foreign = format!("{}{}", row(0, &[], &[]), row(1, &own, &[]));
    pair.write(&foreign)?;
    wait::until("the row to be refused", || {
        let refused = a.wharf(&["cluster", "status"])?;
        let why = format!("{} is in no pod CIDR of node b", own[0]);
        Ok((refused.code() == 1 && refused.stdout.contains(&why)).then_some(()))
    })?;
    ensure!(report(a)?.iter().any(|h| h.node == "b"), "a refused file changes nothing");

    pair.write(&row(0, &[], &[]))?;
    wait::until("node b to leave", || Ok((report(a)?.len() == 1).then_some(())))?;
    pair.write(&rows)
}

#[test]
fn every_node_probes_the_others() -> Result<()> {
    let mut pair = Pair::join()?;
    pair.nodes.iter_mut().try_for_each(Node::start_agent)?;
    let outcome = probe_each_other(&pair).and_then(|()| pair.end());
    if outcome.is_err() {
        for node in &pair.nodes {
            eprintln!("---- log of an agent\n{}---- end of the log", node.log());
        }
    }
    outcome
}
