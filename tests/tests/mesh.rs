//! Each node probes the other nodes of the cluster and their health endpoints.

use anyhow::{Context, Result, ensure};
use wharf_api::{Health, HealthReport, HealthState, NodeHealth, ProbeKind, ProbeOutcome};
use wharf_tests::{
    Node,
    cluster::{Nodes, own_row, port, with},
    process::ip,
    wait,
};

const KINDS: [ProbeKind; 3] = [ProbeKind::Icmp, ProbeKind::Tcp, ProbeKind::Http];

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

fn probe_each_other(pair: &Nodes) -> Result<()> {
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
    ip(pair.switch()?, &format!("link set {} down", port(1)))?;
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
    ip(pair.switch()?, &format!("link set {} up", port(1)))?;
    for (node, other) in [(a, "b"), (b, "a")] {
        await_node(node, other, "the other node to answer again", |h| is_ok(h) && has_every_probe(h))?;
    }

    // Another node at its health addresses; the row is wrong.
    let own = of_a[0].ipv4.context("IPv4")?;
    ensure!(a.wharf(&["cluster", "status"])?.code() == 0, "the rows are in force");
    pair.write(&[own_row(0), with(1, "health-addresses", &[own.into()])].concat())?;
    wait::until("the row to be refused", || {
        let refused = a.wharf(&["cluster", "status"])?;
        let why = format!("{own} is in no pod CIDR of node b");
        Ok((refused.code() == 1 && refused.stdout.contains(&why)).then_some(()))
    })?;
    ensure!(report(a)?.iter().any(|h| h.node == "b"), "a refused file changes nothing");

    pair.write(&own_row(0))?;
    wait::until("node b to leave", || Ok((report(a)?.len() == 1).then_some(())))?;
    pair.write(&rows)
}

#[test]
fn every_node_probes_the_others() -> Result<()> {
    let mut pair = Nodes::join(2, "native")?;
    pair.set_health(true);
    pair.nodes.iter_mut().try_for_each(Node::start_agent)?;
    let outcome = probe_each_other(&pair);
    if outcome.is_err() {
        for node in &pair.nodes {
            eprintln!("---- log of an agent\n{}---- end of the log", node.log());
        }
    }
    outcome.and_then(|()| pair.end_without_health())
}
