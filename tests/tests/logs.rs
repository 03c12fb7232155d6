//! The agent's log: which operation and endpoint a line is about, what hostile bytes do to it, and what a flood does.

use std::{fs, os::unix::fs::PermissionsExt};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use wharf_tests::{Node, NodeConfig, scenario, wait};

/// Every line as JSON.
fn lines(node: &Node) -> Result<Vec<Value>> {
    let log = node.log();
    // The last one may still be on its way.
    let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().map(|l| serde_json::from_str(l).with_context(|| format!("not JSON: {l:?}"))).collect()
}

/// The first line for which this holds, once it is there.
fn line(node: &Node, what: &str, holds: impl Fn(&Value) -> bool) -> Result<Value> {
    wait::until(what, || Ok(lines(node)?.into_iter().find(|l| holds(l))))
}

fn is_op(line: &Value, letter: char) -> bool {
    line["op"].as_str().is_some_and(|op| op.starts_with(letter) && op[1..].starts_with('-'))
}

#[test]
fn each_line_about_an_operation_names_it_and_its_endpoint() -> Result<()> {
    let config = NodeConfig::default().flags(&["--log-format", "json", "--log-level", "debug"]);
    scenario(config, |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        let (id, epoch) = {
            let endpoint = node.endpoint(&ea)?;
            (endpoint.id, endpoint.epoch)
        };
        node.wharf(&["endpoint", "regenerate", &id.to_string()])?.ok()?;
        node.detach(&ea)?;
        let mut ops = Vec::new();
        for (event, letter) in [("endpoint-created", 'c'), ("endpoint-regenerated", 'g'), ("endpoint-deleted", 'd')] {
            let line = line(node, event, |l| l["event"] == event)?;
            ensure!(is_op(&line, letter) && line["endpoint"] == id && line["epoch"] == epoch, "{line}");
            ensure!(line["attachment"] == "harbour/a:eth0", "{line}");
            ops.push(line["op"].clone());
        }
        ensure!(ops[0] != ops[1] && ops[1] != ops[2] && ops[0] != ops[2], "{ops:?}");
        let restore = line(node, "restore", |l| l["message"] == "restoring")?;
        ensure!(is_op(&restore, 'r'), "{restore}");
        Ok(())
    })
}

#[test]
fn an_error_answer_names_its_operation_and_so_does_the_log() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--log-format", "json"]), |node| {
        let a = node.sandbox("a")?;
        let body = json!({"container_id": "a", "ifname": "eth0", "network": "n", "netns": "/nowhere"});
        let answer = node.http("PUT", "/v1/endpoint/cni-attachment-id:a:eth0", Some(&body.to_string()))?;
        let answer = answer.json()?;
        ensure!(answer["code"] == "invalid-netns" && is_op(&answer, 'c'), "{answer}");
        let told = line(node, "the refused create", |l| l["op"] == answer["op"])?;
        ensure!(told["message"] == answer["message"] && told["status"] == 400, "{told}");

        let ea = node.attach(&a)?;
        let again = node.cni("ADD").of("a", a.path(), "eth0").conf(&node.netconf()).run()?.failure()?;
        let details = again.details.clone();
        let op = details.split("operation ").nth(1).and_then(|rest| rest.split(' ').next()).map(str::to_owned);
        let op = op.with_context(|| format!("no operation in {details:?}"))?;
        line(node, "the refused ADD", |l| l["op"] == op)?;

        // A look that finds nothing is nothing to look for in the log.
        let looked = node.http("GET", "/v1/endpoint/9999", None)?.json()?;
        ensure!(looked.get("op").is_none(), "{looked}");
        node.detach(&ea)
    })
}

#[test]
fn hostile_names_cannot_forge_lines_or_drive_a_terminal() -> Result<()> {
    const NAME: &str = "a\n2026-01-01T00:00:00Z ERROR forged: \u{1b}[2J\u{9b}31m\u{202e}x";
    scenario(NodeConfig::default(), |node| {
        let queue = node.dirs().run.join(wharf_handover::queue::DIRECTORY);
        ensure!(queue.is_dir() || fs::create_dir(&queue).is_ok(), "{}", queue.display());
        fs::set_permissions(&queue, fs::Permissions::from_mode(0o700))?;
        fs::write(queue.join(NAME), b"{}")?;
        let escaped = r"a\n2026-01-01T00:00:00Z ERROR forged: \u{1b}[2J\u{9b}31m\u{202e}x";
        wait::until("the record's line", || Ok(node.log().contains(escaped).then_some(())))?;
        // Paths and bodies of requests too.
        node.http("PUT", "/v1/endpoint/%0A%1B%5B2J", Some(r#"{"network": "\u001b[2J\n"}"#))?;
        wait::until("the request's line", || Ok(node.log().contains("path=/v1/endpoint/%0A%1B%5B2J").then_some(())))?;
        let log = node.log();
        ensure!(!log.contains("\n2026-01-01"), "a forged line:\n{log}");
        let hidden = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
        ensure!(!log.contains(hidden), "raw bytes: {log:?}");
        Ok(())
    })
}

#[test]
fn a_flood_of_refused_requests_is_counted_not_written() -> Result<()> {
    const REQUESTS: u64 = 300;
    scenario(NodeConfig::default().flags(&["--log-format", "json"]), |node| {
        for _ in 0..REQUESTS {
            let answer = node.http("PATCH", "/v1/endpoint/9999", Some("{}"))?;
            ensure!(answer.status == 404, "{}", answer.status);
        }
        // How many of them fit into which second is the machine's matter: each is written or counted.
        wait::until_equal("lines and summaries", &REQUESTS, || {
            let mut told = 0;
            for line in lines(node)?.iter().filter(|l| l["path"] == "/v1/endpoint/9999") {
                let message = line["message"].as_str().unwrap_or_default();
                let suppressed = message.strip_prefix("suppressed ").and_then(|m| m.split(' ').next()?.parse().ok());
                told += suppressed.unwrap_or(1);
            }
            Ok(told)
        })
    })
}

#[test]
fn what_a_start_repaired_is_one_line_in_words() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--log-format", "json"]), |node| {
        let prepared = |node: &Node| fs::read_dir(node.dirs().endpoint_pins()).map_or(0, Iterator::count);
        wait::until("program sets ahead of need", || Ok((prepared(node) > 2).then_some(())))?;
        node.kill_agent()?;
        let before = lines(node)?.len();
        node.start_agent()?;
        let told = line(node, "the repair", is_repair)?;
        ensure!(
            told["message"].as_str().is_some_and(|m| m.contains("program sets without an endpoint unpinned (")),
            "{told}"
        );
        let all = lines(node)?;
        let repairs = all.iter().skip(before).filter(|l| is_repair(l)).count();
        ensure!(repairs == 1, "{repairs} lines tell of it: {all:#?}");
        let debug = |l: &Value| l["message"].as_str().is_some_and(|m| m.contains("RemovePins"));
        ensure!(!all.iter().any(debug), "{all:#?}");
        Ok(())
    })
}

fn is_repair(line: &Value) -> bool {
    line["message"].as_str().is_some_and(|m| m.starts_with("audit repaired: "))
}
