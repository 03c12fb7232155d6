//! Settings that change while the agent runs, and maps as the operator sees them.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use wharf_api::{AgentConfigPatch, LogFormat, MonitorEvent};
use wharf_tests::{Node, NodeConfig, process::Finished, scenario, wait};

fn config(node: &Node) -> Result<Value> {
    Ok(serde_json::from_str(&node.wharf(&["config", "get", "-o", "json"])?.ok()?)?)
}

/// The CLI refused: this exit status, nothing on standard output, and a reason with these words.
fn refused(finished: &Finished, code: i32, words: &[&str]) -> Result<()> {
    ensure!(finished.code() == code && finished.stdout.is_empty(), "{}", finished.describe());
    for word in words {
        ensure!(finished.stderr.contains(word), "no {word:?}: {}", finished.describe());
    }
    Ok(())
}

#[test]
fn a_setting_that_makes_no_sense_is_refused_with_what_is_allowed() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let before = config(node)?;
        for level in ["zzz", "info,zzz", "wharf_agent=zzz", "[x]=info"] {
            let set = node.wharf(&["config", "set", &format!("log-level={level}")])?;
            refused(&set, 3, &["error, warn, info, debug, trace or off", "wharf_agent=debug,info"])?;
        }
        // With something that could be done: nothing is, when any of it is wrong.
        let set = node.wharf(&["config", "set", "log-level=debug", "policy-enforcement=sometimes"])?;
        refused(&set, 3, &["default", "always", "never"])?;
        let answer = node.http("PATCH", "/v1/config", Some(r#"{"source_enforcement": "never"}"#))?;
        ensure!(answer.status == 400, "source enforcement is no setting: {}", answer.text());
        ensure!(config(node)? == before, "{} became {}", before, config(node)?);
        for mode in ["always", "never", "default"] {
            node.wharf(&["config", "set", &format!("policy-enforcement={mode}")])?.ok()?;
            let shown = config(node)?["effective"]["policy-enforcement"].clone();
            ensure!(shown == mode, "{shown} is shown for {mode}");
        }
        Ok(())
    })
}

#[test]
fn what_is_set_is_in_force_shown_and_told() -> Result<()> {
    let start = NodeConfig::default().toml("mtu = 1400\n[[pool]]\nname = \"blue\"\ncidrs = [\"10.9.0.0/24\"]");
    scenario(start, |node| {
        let shown = config(node)?;
        for (name, origin) in [("mtu", "file"), ("pool.blue", "file"), ("node-name", "flag"), ("ip-rest-ms", "default")]
        {
            ensure!(shown["origin"][name] == origin, "{name}: {shown}");
        }
        let told = node.ask(async |client| {
            let mut monitor = client.monitor().await?;
            let patch = AgentConfigPatch {
                log_level: Some("wharf_agent=debug,info".into()),
                log_format: Some(LogFormat::Json),
                trace: Some(true),
                trace_sampling: Some(10),
                ..AgentConfigPatch::default()
            };
            client.patch_config(&patch).await?;
            let mut told = Vec::new();
            while told.len() < 4 {
                match monitor.next().await? {
                    Some(MonitorEvent::Agent(event)) if event.event == "config-changed" => told.push(event.message),
                    Some(_) => {}
                    None => break,
                }
            }
            Ok(told)
        })?;
        let wanted = [
            "log-level: info -> wharf_agent=debug,info",
            "log-format: text -> json",
            "trace-sampling: 1 -> 10",
            "trace: off -> on",
        ];
        ensure!(told == wanted, "{told:?}");
        let shown = config(node)?;
        for (name, value) in [
            ("log-level", "wharf_agent=debug,info"),
            ("log-format", "json"),
            ("trace", "true"),
            ("trace-sampling", "10"),
        ] {
            ensure!(shown["effective"][name] == value && shown["origin"][name] == "run-time", "{name}: {shown}");
        }
        // Debug lines, as JSON, from now on.
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        wait::until("a debug line as JSON", || {
            let of_create = |l: &Value| l["level"] == "DEBUG" && l["event"] == "endpoint-created";
            Ok(node.log().lines().filter_map(|l| serde_json::from_str(l).ok()).any(|l| of_create(&l)).then_some(()))
        })?;
        let table = node.wharf(&["config", "get"])?.ok()?;
        ensure!(table.contains("run time") && table.lines().all(|l| l.chars().count() <= 100), "{table}");
        node.detach(&ea)
    })
}

#[test]
fn an_array_is_no_body() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        for (method, target, body) in [
            ("PATCH", "/v1/config", json!([null, null])),
            ("PATCH", "/v1/config", json!([])),
            ("POST", "/v1/ipam", json!([null, null, "me"])),
            ("POST", "/v1/gc", json!(["harbour", []])),
            ("POST", "/v1/gc", json!({"network": "harbour", "valid": [["a", "eth0"]]})),
            ("PUT", "/v1/endpoint/cni-attachment-id:a:eth0", json!(["a", "eth0", "n", "/nowhere"])),
        ] {
            let answer = node.http(method, target, Some(&body.to_string()))?;
            let text = answer.text();
            ensure!(answer.status == 400 && text.contains("expected an object"), "{method} {target} {body}: {text}");
        }
        Ok(())
    })
}

#[test]
fn every_map_that_is_listed_can_be_shown() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        let id = node.endpoint(&ea)?.id;
        let maps: Value = serde_json::from_str(&node.wharf(&["bpf", "map", "list", "-o", "json"])?.ok()?)?;
        let names: Vec<&str> = maps.as_array().context("an array")?.iter().filter_map(|m| m["name"].as_str()).collect();
        for name in ["ENDPOINTS", "CALLS", "EVENTS", "STACK_PATHS", &format!("{id}/CONFIG"), &format!("{id}/METRICS")] {
            ensure!(names.contains(&name), "{name} is not in {names:?}");
        }
        // Sets that are ready ahead of need come and go while this looks; those of the endpoint and the shared ones
        // stay.
        let of_endpoint = format!("{id}/");
        for name in names.iter().filter(|n| !n.contains('/') || n.starts_with(&of_endpoint)) {
            let elsewhere = match *name {
                "FLOWS" | "FLOWS_RECENT" | "FLOWS_NEW" | "FLOW_CACHE" | "FLOW_CACHE_ENDS" => "wharf bpf ct list",
                "FRAGMENT_SLOTS" | "FRAGMENTS" => "packets that are on their way",
                "PROFILES" => "CONFIG; look at that",
                _ => "",
            };
            if !elsewhere.is_empty() {
                refused(&node.wharf(&["bpf", "map", "get", name])?, 1, &[name, elsewhere])?;
                continue;
            }
            let text = node.wharf(&["bpf", "map", "get", name, "-o", "json"])?.ok()?;
            let dump: Value = serde_json::from_str(&text)?;
            ensure!(dump["map"]["name"] == *name && dump["rows"].is_array(), "{dump}");
            node.wharf(&["bpf", "map", "get", name])?.ok()?;
        }
        let events: Value = serde_json::from_str(&node.wharf(&["bpf", "map", "get", "EVENTS", "-o", "json"])?.ok()?)?;
        ensure!(events["rows"][0]["bytes"] == "262144", "{events}");
        let unknown = node.wharf(&["bpf", "map", "get", "NOTHING"])?;
        refused(&unknown, 1, &["NOTHING", "ENDPOINTS, CALLS, NODE_CALLS, PROFILES, EVENTS", "wharf bpf map list"])?;
        node.detach(&ea)
    })
}
