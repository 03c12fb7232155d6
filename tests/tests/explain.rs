//! `wharf explain` against a real agent and a real kernel.

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use wharf_tests::{Node, NodeConfig, icmp::ping, process::ip, scenario};

/// What `wharf explain SUBJECT -o json` says, and its exit status.
fn explained(node: &Node, subject: &str) -> Result<(i32, Value)> {
    let finished = node.wharf(&["explain", subject, "-o", "json"])?;
    let value = serde_json::from_str(&finished.stdout).with_context(|| finished.describe())?;
    Ok((finished.code(), value))
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// The phases of an operation in the timeline.
fn phases(told: &Value, operation: &str) -> Vec<String> {
    let entries = told["timeline"].as_array().cloned().unwrap_or_default();
    let of = entries.iter().filter(|e| e["operation"] == operation);
    of.map(|e| text(e, "phase").to_owned()).collect()
}

const CREATE: [&str; 8] = [
    "write-intent",
    "lease",
    "ensure-programs",
    "ensure-link",
    "ensure-config",
    "ensure-attached",
    "ensure-connected",
    "ensure-reachable",
];

#[test]
fn a_life_is_told_from_create_to_delete_over_kills_of_the_agent() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (a, b) = (node.sandbox("first-container")?, node.sandbox("other-container")?);
        let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
        // The very next thing after the answer: what was not in the commit's transaction is lost.
        node.signal_agent(Signal::SIGKILL)?;
        node.kill_agent()?;
        node.start_agent()?;
        node.await_rebuilt()?;
        ping(a.space()?, eb.v4()?.into())?.must_answer()?;
        let id = node.endpoint(&ea)?.id.to_string();
        let link = node.endpoint(&ea)?.host_ifname;
        for subject in [
            id.as_str(),
            "first-container",
            "first-",
            "first-container/eth0",
            &link,
            &ea.v4()?.to_string(),
            &ea.v6()?.to_string(),
        ] {
            // Every command takes the same names.
            let got = node.wharf(&["endpoint", "get", subject, "-o", "json"])?.ok()?;
            let got: serde_json::Value = serde_json::from_str(&got)?;
            ensure!(got["id"].as_u64() == id.parse().ok(), "{subject}: {got:#}");
            let (code, told) = explained(node, subject)?;
            let same = told["endpoint"]["id"].as_u64() == id.parse().ok();
            ensure!(code == 0 && told["kind"] == "endpoint" && same, "{subject}: {told:#}");
            ensure!(text(&told, "summary").ends_with("nothing is wrong"), "{told:#}");
            ensure!(phases(&told, "create").starts_with(&CREATE.map(str::to_owned)), "{told:#}");
            ensure!(told["kernel"]["findings"] == serde_json::json!([]), "{told:#}");
        }
        let (_, told) = explained(node, &id)?;
        let forwarded = told["verdicts"].as_array().into_iter().flatten().any(|r| r["reason"] == "forwarded-local");
        ensure!(forwarded, "the ping is in the verdicts: {told:#}");
        let screen = node.wharf(&["explain", &id])?.ok()?;
        for word in ["nothing is wrong", "ensure-link", "first-container", "Packets:", "Timeline"] {
            ensure!(screen.contains(word), "no {word} in\n{screen}");
        }
        ensure!(screen.lines().all(|l| l.chars().count() <= 100), "{screen}");

        node.detach(&ea)?;
        node.kill_agent()?;
        node.start_agent()?;
        for subject in ["first-container", id.as_str()] {
            let (code, told) = explained(node, subject)?;
            ensure!(code == 0 && told["kind"] == "past-endpoint", "{subject}: {told:#}");
            ensure!(
                text(&told, "summary").starts_with("deleted ")
                    && text(&told, "summary").ends_with("nothing of it is left"),
                "{told:#}"
            );
            ensure!(phases(&told, "delete").last().is_some_and(|p| p == "remove-record"), "{told:#}");
        }
        let (_, told) = explained(node, &ea.v4()?.to_string())?;
        ensure!(told["kind"] == "address" && text(&told, "summary").starts_with("resting for "), "{told:#}");
        ensure!(text(&told["before"][0], "attachment").contains("first-container"), "{told:#}");
        node.detach(&eb)
    })
}

#[test]
fn what_is_wrong_in_the_kernel_is_the_conclusion() -> Result<()> {
    // Nobody mends it meanwhile.
    scenario(NodeConfig::default().flags(&["--audit-interval-ms", "0", "--selfcheck-interval-ms", "0"]), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        let address = ea.v4()?.to_string();
        ip(node.space(), &format!("route del {address}/32"))?;
        let (code, told) = explained(node, &address)?;
        ensure!(code == 1 && told["health"] == "failing", "{told:#}");
        let summary = text(&told, "summary");
        ensure!(summary.contains("not as it should be") && summary.contains("route"), "{summary}");
        let id = node.endpoint(&ea)?.id.to_string();
        node.wharf(&["endpoint", "regenerate", &id, "--level", "datapath"])?.ok()?;
        let (code, told) = explained(node, &id)?;
        ensure!(code == 0 && phases(&told, "regenerate") == ["build"], "{told:#}");
        node.detach(&ea)
    })
}

#[test]
fn a_create_that_failed_is_explained_by_its_cause() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        // The interface's name is taken in the container.
        ip(a.space()?, "link add eth0 type veth peer name other")?;
        node.cni("ADD").of("a", a.path(), "eth0").conf(&node.netconf()).run()?.failure()?;
        let (code, told) = explained(node, "a")?;
        ensure!(code == 0 && told["kind"] == "past-endpoint", "{told:#}");
        let summary = text(&told, "summary");
        ensure!(summary.starts_with("its create failed") && summary.contains("eth0"), "{summary}");
        ensure!(told["errors"][0]["phase"] == "ensure-link", "{told:#}");
        Ok(())
    })
}

#[test]
fn what_cannot_be_told_apart_and_what_nobody_knows_have_their_own_exits() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (a, b) = (node.sandbox("same-1")?, node.sandbox("same-2")?);
        let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
        for verb in ["get", "log", "health", "labels", "regenerate", "delete", "config"] {
            let several = node.wharf(&["endpoint", verb, "same"])?;
            let listed = several.stderr.contains("same-1:eth0") && several.stderr.contains("same-2:eth0");
            ensure!(several.code() == 1 && listed && several.stdout.is_empty(), "{verb}: {}", several.describe());
        }
        let (code, told) = explained(node, "same")?;
        ensure!(code == 3 && told["candidates"].as_array().is_some_and(|c| c.len() == 2), "{told:#}");
        let (code, told) = explained(node, "nobody")?;
        ensure!(
            code == 1 && told["kind"] == "unknown" && !told["searched"].as_array().is_none_or(Vec::is_empty),
            "{told:#}"
        );
        let (code, told) = explained(node, "192.0.2.7")?;
        ensure!(code == 0 && text(&told, "summary").starts_with("outside"), "{told:#}");
        let wrong = node.wharf(&["explain", "a/b/c"])?;
        ensure!(wrong.code() == 3 && wrong.stderr.contains("container id"), "{}", wrong.describe());
        node.detach(&ea)?;
        node.detach(&eb)
    })
}
