//! The protocol as files: for each command one, with every version and every shape of `prevResult`, each with what the
//! binary printed, its exit status and what the agent was asked.
//!
//! `INSTA_UPDATE=always cargo nextest run -p wharf-cni -E 'binary(golden)'` writes the files anew after a change that
//! is meant; the difference is for the reviewer.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "other tests need the rest")]
mod support;

use serde_json::{Map, Value, json};
use support::{Run, endpoint, error};

/// Those that are supported, and then one that is older, one that is newer, and none at all.
const VERSIONS: [&str; 7] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0", "0.2.0", "1.2.0", ""];

/// Shapes of `prevResult`; none where the key is absent.
fn shapes(version: &str) -> Vec<(&'static str, Option<Value>)> {
    let ours = Run::new("ADD", version).answer(201, &endpoint()).if_needed().go().json();
    let bridge = json!({
        "cniVersion": version,
        "interfaces": [{"name": "cni0", "mac": "02:00:00:00:00:01"}, {"name": "veth1", "mac": "02:00:00:00:00:02"},
                       {"name": "eth0", "mac": "02:00:00:00:00:03", "sandbox": "/run/netns/c1"}],
        "ips": [{"version": "4", "address": "10.22.0.2/16", "gateway": "10.22.0.1", "interface": 2}],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dns": {},
    });
    vec![
        ("absent", None),
        ("null", Some(Value::Null)),
        ("empty", Some(json!({}))),
        ("ours", Some(ours)),
        ("another plugin's", Some(bridge)),
        ("no object", Some(json!("10.22.0.2"))),
        ("malformed", Some(json!({"interfaces": [{"name": 7}], "ips": [{"address": "10.22.0.2/99"}]}))),
    ]
}

/// One run against an agent where all is well.
fn cell(command: &str, version: &str, prev: Option<Value>) -> Value {
    let healthy = json!({"overall": "ok", "bpf": "ok", "policy": "ok", "connected": "ok", "findings": []});
    let mut run = Run::new(command, version).if_needed();
    if version.is_empty() {
        run = run.without("cniVersion");
    }
    if let Some(prev) = prev {
        run = run.key("prevResult", prev);
    }
    let done = json!({"deleted": [7], "errors": []});
    run = match command {
        "ADD" => run.answer(201, &endpoint()),
        "CHECK" => run.answer(200, &endpoint()).answer(200, &healthy),
        "DEL" => run.answer(200, &done),
        "GC" => {
            let keep = json!([{"containerID": "c2", "ifname": "eth0"}]);
            run.key("cni.dev/valid-attachments", keep).answer(200, &done)
        }
        // What a healthy one says is the work of other tests; what an unhealthy one says shows the form.
        "STATUS" => run.answer(503, &error("unavailable", None)),
        _ => run,
    };
    let outcome = run.go();
    let mut cell = Map::new();
    cell.insert("exit".into(), json!(i32::from(!outcome.success)));
    let stdout = if outcome.stdout.is_empty() { json!("") } else { outcome.json() };
    cell.insert("stdout".into(), stdout);
    let asked = outcome.requests.into_iter().map(|request| {
        let mut body = request.body;
        // The time that is left differs from run to run.
        body.as_object_mut().map(|body| body.remove("deadline_ms"));
        // The program that runs the plugin: this one, whose name differs from build to build.
        if let Some(runtime) = body.get_mut("runtime") {
            *runtime = json!("golden");
        }
        if body.is_null() { json!(request.line) } else { json!({ request.line: body }) }
    });
    cell.insert("asked".into(), asked.collect());
    Value::Object(cell)
}

fn golden(command: &str) {
    let mut text = String::new();
    for version in VERSIONS {
        // Cells that are the same as the one before are told by its name.
        let mut before: Vec<(&str, Value)> = Vec::new();
        for (shape, prev) in shapes(version) {
            let cell = cell(command, version, prev);
            let shown = if version.is_empty() { "no version" } else { version };
            match before.iter().find(|(_, other)| *other == cell) {
                Some((same, _)) => text.push_str(&format!("## {shown}, prevResult {shape}: as {same}\n\n")),
                None => {
                    let json = serde_json::to_string_pretty(&cell).unwrap();
                    text.push_str(&format!("## {shown}, prevResult {shape}\n{json}\n\n"));
                    before.push((shape, cell));
                }
            }
        }
    }
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("golden");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!(command, text));
}

#[test]
fn add() {
    golden("ADD");
}

#[test]
fn del() {
    golden("DEL");
}

#[test]
fn check() {
    golden("CHECK");
}

#[test]
fn gc() {
    golden("GC");
}

#[test]
fn status() {
    golden("STATUS");
}

#[test]
fn version() {
    golden("VERSION");
}
