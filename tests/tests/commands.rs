//! CNI commands as the node's operator sees them: counted once each, whether the agent answered or not.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use wharf_handover::report::Reports;
use wharf_tests::{Node, NodeConfig, cni::NETWORK, scenario, wait};

/// The value of a counter by these labels; 0 while it has none.
fn counted(node: &Node, command: &str, outcome: &str) -> Result<u64> {
    let text = node.http("GET", "/metrics", None)?.text();
    let labels = format!("command=\"{command}\",network=\"{NETWORK}\",mode=\"own\",outcome=\"{outcome}\"");
    let start = format!("wharf_cni_commands_total{{{labels}}} ");
    text.lines().find_map(|line| line.strip_prefix(&start)).map_or(Ok(0), |n| n.parse().context("a number"))
}

fn line(node: &Node, what: &str, holds: impl Fn(&Value) -> bool) -> Result<Value> {
    wait::until(what, || {
        let log = node.log();
        let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
        Ok(whole.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok()).find(|l| holds(l)))
    })
}

#[test]
fn each_command_is_counted_once_and_an_operators_request_is_not() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--log-format", "json"]), |node| {
        let a = node.sandbox("a")?;
        let added = node.attach(&a)?;
        let pod = "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0";
        let again = node.cni("ADD").of("a", a.path(), "eth0").env("CNI_ARGS", pod).conf(&node.netconf());
        let refused = again.run()?.failure()?;
        let told = line(node, "the refused ADD", |l| l["command"] == "ADD" && l["outcome"] == "failure")?;
        for (field, value) in [
            ("network", NETWORK),
            ("mode", "own"),
            ("container", "a"),
            ("interface", "eth0"),
            ("pod", "web-0"),
            ("namespace", "shop"),
            ("code", "exists"),
        ] {
            ensure!(told[field] == value, "{field} in {told}");
        }
        ensure!(told["duration_us"].as_u64().is_some_and(|us| us > 0) && told["op"].is_string(), "{told}");
        let check = |conf: &_| node.cni("CHECK").of("a", a.path(), "eth0").conf(conf).run();
        check(&node.netconf().after(&added.result))?.silent()?;
        let told = line(node, "the CHECK", |l| l["command"] == "CHECK" && l["outcome"] == "success")?;
        ensure!(told["container"] == "a" && told["duration_us"].as_u64().is_some_and(|us| us > 0), "{told}");
        let id = node.endpoint(&added)?.id;
        node.wharf(&["endpoint", "delete", &id.to_string()])?.ok()?;
        check(&node.netconf().after(&added.result))?.failure()?;
        node.detach(&added)?;
        let gc = node.netconf().with("cni.dev/valid-attachments", serde_json::json!([]));
        node.cni("GC").conf(&gc).run()?.silent()?;
        // A runtime's further DELs find nothing: counted, and no line for the operator.
        line(node, "the GC", |l| l["command"] == "GC")?;
        ensure!(!node.log().contains("CNI DEL"), "{}", node.log());
        let all = [
            ("ADD", "success", 1),
            ("ADD", "failure", 1),
            ("CHECK", "success", 1),
            ("CHECK", "failure", 1),
            ("DEL", "success", 1),
            ("GC", "success", 1),
        ];
        for (command, outcome, count) in all {
            ensure!(
                counted(node, command, outcome)? == count,
                "{command} {outcome}: {}",
                counted(node, command, outcome)?
            );
        }
        let text = node.http("GET", "/metrics", None)?.text();
        for (command, count) in [("ADD", 2), ("CHECK", 2), ("DEL", 1), ("GC", 1)] {
            let of = |line: &&str| {
                line.starts_with("wharf_cni_command_duration_seconds_count{")
                    && line.contains(&format!("command=\"{command}\""))
            };
            let timed: u64 =
                text.lines().filter(of).filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum();
            ensure!(timed == count, "{command}: {timed} durations");
        }
        let status = node.wharf(&["status"])?.stdout;
        let shown = status.lines().find(|l| l.starts_with("CNI commands")).context("a line of the status")?;
        ensure!(shown.contains("4 ok, 2 failed (last: CHECK "), "{shown}");
        ensure!(refused.msg.contains("eth0"), "{refused:?}");
        Ok(())
    })
}

#[test]
fn commands_without_an_agent_are_counted_by_the_next_one_and_live_reports_at_once() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        node.attach(&a)?;
        let waiting = |node: &Node| Ok(Reports::new(&node.dirs().run).list()?.len());
        node.kill_agent()?;
        node.cni("DEL").of("a", a.path(), "eth0").conf(&node.netconf()).run()?.silent()?;
        let failed = node.cni("ADD").of("b", a.path(), "eth0").conf(&node.netconf()).run()?.failure()?;
        ensure!(failed.code == 11 && waiting(node)? == 2, "{failed:?}, {} reports", waiting(node)?);
        node.start_agent()?;
        wait::until_equal("reports that wait", &0, || waiting(node))?;
        ensure!(counted(node, "DEL", "deferred")? == 1 && counted(node, "ADD", "failure")? == 1);
        // While it runs: a configuration that the plugin refuses by itself. Sooner than a tick.
        let bad = node.netconf().with("mtu", "x".into());
        node.cni("ADD").of("b", a.path(), "eth0").conf(&bad).run()?.failure()?;
        wait::until_equal("ADDs that failed", &2, || counted(node, "ADD", "failure"))?;
        wait::until_equal("reports that wait", &0, || waiting(node))
    })
}
