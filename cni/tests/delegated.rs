//! A network whose addresses an IPAM plugin leases. Agent and plugin are stand-ins; real ones are in the scenarios.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "other tests need the rest")]
mod support;

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use support::{Outcome, Run, endpoint, error};
use tempfile::TempDir;
use wharf_handover::report::Outcome as End;

const GET: &str = "GET /v1/endpoint/cni-attachment-id:c1:eth0";
const DELETE: &str = "DELETE /v1/endpoint/cni-attachment-id:c1:eth0?network=net";

/// Notes its command and what it is given, says what the test laid down for the command, and fails where it is to fail.
const PLUGIN: &str = r#"#!/bin/sh
cd "${0%/*}" || exit 9
echo "$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME $CNI_NETNS $EXTRA" >> calls
cat > "stdin.$CNI_COMMAND"
[ -f "stderr.$CNI_COMMAND" ] && cat "stderr.$CNI_COMMAND" >&2
[ -f "says.$CNI_COMMAND" ] && cat "says.$CNI_COMMAND"
[ -f "fails.$CNI_COMMAND" ] && exit 1
exit 0
"#;

/// A directory with the plugin `stand-in`.
struct Plugin {
    dir: TempDir,
}

impl Plugin {
    fn new() -> Self {
        let plugin = Self { dir: TempDir::new().unwrap() };
        plugin.program(PLUGIN, 0o755);
        plugin
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn program(&self, text: &str, mode: u32) {
        let path = self.file("stand-in");
        fs::write(&path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn says(&self, command: &str, answer: &Value) {
        fs::write(self.file(&format!("says.{command}")), answer.to_string()).unwrap();
    }

    fn fails(&self, command: &str, code: u32, msg: &str) {
        self.says(command, &json!({"cniVersion": "1.1.0", "code": code, "msg": msg, "details": "so it is"}));
        fs::write(self.file(&format!("fails.{command}")), "").unwrap();
    }

    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.file("calls")).unwrap_or_default();
        text.lines().map(|line| line.trim_end().to_owned()).collect()
    }

    /// The commands alone.
    fn commands(&self) -> Vec<String> {
        self.calls().iter().map(|call| call.split(' ').next().unwrap().to_owned()).collect()
    }
}

fn lease() -> Value {
    json!({
        "cniVersion": "1.0.0",
        "ips": [{"address": "10.70.0.7/24", "gateway": "10.70.0.1"}, {"address": "fd70::7/64"}],
        "routes": [{"dst": "10.0.0.0/8"}, {"dst": "fd00::/8", "gw": "fd70::1", "mtu": 1400}],
        "dns": {"nameservers": ["10.70.0.53"], "search": ["ipam.example"]},
    })
}

/// A run with the plugin in `CNI_PATH`, which has a lease to give.
fn run(command: &str, version: &str) -> (Run, Plugin) {
    let run = Run::new(command, version).key("ipam", json!({"type": "stand-in", "range": "x"}));
    let plugin = Plugin::new();
    plugin.says("ADD", &lease());
    let path = format!("/nonexistent:relative:{}", plugin.dir.path().display());
    (run.var("CNI_PATH", &path), plugin)
}

fn unknown(run: Run) -> Run {
    run.answer(404, &error("not-found", None))
}

/// The endpoint with what the plugin wants of it.
fn external() -> Value {
    let mut endpoint = endpoint();
    endpoint["pool"] = json!("");
    endpoint["ipam"] = json!("stand-in");
    endpoint["routes"] = json!([{"dst": "10.0.0.0/8", "gw": "10.70.0.1"}, {"dst": "fd00::/8", "gw": "fd70::1"}]);
    endpoint
}

/// The outcome and what the directory holds, which lives as long.
fn told(outcome: &Outcome) -> (u64, String) {
    let code = outcome.code();
    let body = outcome.json();
    (code, format!("{} | {}", body["msg"].as_str().unwrap(), body["details"].as_str().unwrap_or_default()))
}

#[test]
fn the_plugin_leases_and_the_agent_is_given_the_addresses() {
    let (run, plugin) = run("ADD", "1.0.0");
    let run = run.key("dns", json!({"nameservers": ["192.0.2.53"]})).var("EXTRA", "kept");
    let netconf = run.netconf();
    let outcome = unknown(run).answer(201, &external()).go();
    assert!(outcome.success, "{outcome:?}");
    assert_eq!(plugin.calls(), ["ADD c1 eth0 /run/netns/c1 kept"], "the environment as it came");
    assert_eq!(fs::read(plugin.file("stdin.ADD")).unwrap(), netconf, "the netconf as it came");
    assert_eq!(outcome.requests[0].line, GET);
    let body = &outcome.requests[1].body;
    assert_eq!(body["ips"], json!(["10.70.0.7", "fd70::7"]));
    assert_eq!((&body["ipam"], &body["gateways"], body.get("pool")), (&json!("stand-in"), &json!(["10.70.0.1"]), None));
    assert_eq!(body["routes"], json!([{"dst": "10.0.0.0/8"}, {"dst": "fd00::/8", "gw": "fd70::1"}]));
    let result = outcome.json();
    assert_eq!(result["routes"], external()["routes"]);
    assert_eq!(result["ips"][0]["address"], "10.70.0.7/32");
    assert_eq!(result["dns"], json!({"nameservers": ["192.0.2.53"], "search": ["ipam.example"]}));
}

#[test]
fn routes_of_the_network_go_before_the_plugins() {
    for (routes, expected) in
        [(json!([]), json!([])), (json!([{"dst": "10.9.0.0/16"}]), json!([{"dst": "10.9.0.0/16"}]))]
    {
        let (run, _plugin) = run("ADD", "1.0.0");
        let outcome = unknown(run.key("routes", routes)).answer(201, &external()).go();
        assert_eq!(outcome.requests[1].body["routes"], expected);
    }
}

#[test]
fn whatever_fails_after_the_lease_gives_it_back() {
    for (status, code, cni) in [(409, "exists", 4), (400, "invalid-request", 7), (500, "kernel", 11)] {
        let (run, plugin) = run("ADD", "1.0.0");
        let outcome = unknown(run).answer(status, &error(code, None)).go();
        assert_eq!(outcome.code(), cni, "{code}");
        assert_eq!(plugin.commands(), ["ADD", "DEL"], "{code}");
    }
    let (run_, plugin) = run("ADD", "1.0.0");
    assert_eq!(unknown(run_).raw_answer(b"").go().code(), 11, "the agent died with the request in hand");
    assert_eq!(plugin.commands(), ["ADD", "DEL"]);

    let (run_, plugin) = run("ADD", "1.0.0");
    plugin.fails("DEL", 100, "the disk is full");
    let outcome = unknown(run_).answer(500, &error("kernel", None)).go();
    let (code, words) = told(&outcome);
    assert!(code == 11 && words.contains("it is kernel"), "{words}");
    assert!(words.contains("giving the lease back failed as well") && words.contains("the disk is full"), "{words}");
}

#[test]
fn a_lease_that_an_endpoint_cannot_have_is_given_back_and_the_agent_not_asked() {
    let two = json!([{"address": "10.70.0.7/24"}, {"address": "10.71.0.7/24"}]);
    for (answer, code, words) in [
        (json!({"ips": two}), 7, "one address of each family"),
        (json!({"ips": []}), 7, "no address"),
        (json!(17), 6, "no JSON object"),
        (json!({"cniVersion": "0.2.0", "ip4": {"ip": "10.70.0.7/24"}}), 1, "0.2.0"),
    ] {
        let (run, plugin) = run("ADD", "1.0.0");
        plugin.says("ADD", &answer);
        let outcome = unknown(run).go();
        let (found, told) = told(&outcome);
        assert!(found == code && told.contains(words) && told.contains("IPAM plugin stand-in"), "{answer}: {told}");
        assert_eq!(plugin.commands(), ["ADD", "DEL"], "{answer}");
    }
    let (run, plugin) = run("ADD", "1.0.0");
    let outcome = unknown(run.var("CNI_ARGS", "IP=10.70.0.9")).go();
    let (code, words) = told(&outcome);
    assert!(code == 7 && words.contains("10.70.0.9"), "{words}");
    assert_eq!(plugin.commands(), ["ADD", "DEL"]);
}

#[test]
fn nothing_is_leased_for_an_attachment_that_is_there_or_without_an_agent() {
    let (run_, plugin) = run("ADD", "1.0.0");
    assert_eq!(run_.answer(200, &endpoint()).go().code(), 4);
    assert_eq!(plugin.calls(), [""; 0], "the undo would give back the lease of the one that is there");
    let (run_, plugin) = run("ADD", "1.0.0");
    assert_eq!(run_.go().code(), 11);
    assert_eq!(plugin.calls(), [""; 0]);
}

#[test]
fn the_plugins_own_error_is_passed_on_with_its_code() {
    let (run_, plugin) = run("ADD", "1.0.0");
    plugin.fails("ADD", 4711, "no addresses left");
    fs::write(plugin.file("stderr.ADD"), "looked everywhere\n").unwrap();
    let outcome = unknown(run_).go();
    let (code, words) = told(&outcome);
    assert!(code == 4711 && words.contains("no addresses left | so it is"), "{words}");
    assert!(outcome.stderr.contains("looked everywhere"), "{}", outcome.stderr);
    assert_eq!(plugin.commands(), ["ADD", "DEL"], "as the specification has it");
}

#[test]
fn a_plugin_that_cannot_be_run_is_named_with_where_it_was_looked_for() {
    let (run_, plugin) = run("ADD", "1.0.0");
    let path = plugin.dir.path().display().to_string();
    plugin.program("not a program", 0o644);
    let (code, words) = told(&unknown(run_).go());
    assert!(code == 7 && words.contains("stand-in") && words.contains(&path), "{words}");

    let (run_, plugin) = run("ADD", "1.0.0");
    plugin.program("\u{7f}ELF is not enough", 0o755);
    let (code, words) = told(&unknown(run_).go());
    assert!(code == 5 && words.contains(&format!("{}/stand-in", plugin.dir.path().display())), "{words}");

    let (run_, plugin) = run("ADD", "1.0.0");
    plugin.program("#!/bin/sh\necho went wrong >&2\nexit 3\n", 0o755);
    let (code, words) = told(&unknown(run_).go());
    assert!(code == 5 && words.contains("status 3") && words.contains("went wrong"), "{words}");

    let (run_, plugin) = run("ADD", "1.0.0");
    let (code, words) = told(&unknown(run_.var("CNI_PATH", "")).go());
    assert!(code == 4 && words.contains("CNI_PATH"), "{words}");
    assert_eq!(plugin.calls(), [""; 0]);

    let (run_, plugin) = run("ADD", "1.0.0");
    plugin.program("#!/bin/sh\nexec head -c 3000000 /dev/zero\n", 0o755);
    let (code, words) = told(&unknown(run_).go());
    assert!(code == 6 && words.contains("longer than"), "{words}");
}

#[test]
fn del_gives_the_lease_back_after_the_agent_and_each_time() {
    let done = json!({"deleted": [7], "errors": []});
    for answer in [(200, done.clone()), (404, error("not-found", None))] {
        let (run, plugin) = run("DEL", "1.0.0");
        let netconf = run.netconf();
        // containerd's second DEL has no namespace, and libcni's none of a container that is gone.
        let outcome = run.var("CNI_NETNS", "").answer(answer.0, &answer.1).go();
        outcome.assert_silent();
        assert_eq!(outcome.requests[0].line, DELETE);
        assert_eq!(plugin.calls(), ["DEL c1 eth0"]);
        assert_eq!(fs::read(plugin.file("stdin.DEL")).unwrap(), netconf);
    }
    // By the queue: no other DEL would come.
    let (run_, plugin) = run("DEL", "1.0.0");
    let outcome = run_.var("CNI_CONTAINERID", "wharf-cni-delegated-test").go();
    outcome.assert_silent();
    assert_eq!((outcome.queue().list().unwrap().len(), plugin.commands()), (1, vec!["DEL".to_owned()]));
}

#[test]
fn del_keeps_the_lease_while_a_retry_may_mend_what_the_agent_failed_at() {
    let step = json!({"step": "remove-link", "endpoint": "7", "message": "device busy"});
    let (run_, plugin) = run("DEL", "1.0.0");
    let outcome = run_.answer(206, &json!({"deleted": [], "errors": [step]})).go();
    assert_eq!((outcome.code(), plugin.calls()), (11, Vec::new()));
    // The next one does both.
    let done = run_again(outcome, &plugin);
    done.assert_silent();
    assert_eq!(plugin.commands(), ["DEL"]);

    // What no retry mends keeps nobody from giving the lease back, and both failures are told.
    let (run_, plugin) = run("DEL", "1.0.0");
    plugin.fails("DEL", 100, "the disk is full");
    let outcome = run_.raw_answer(b"220 mail ESMTP\r\n").go();
    let (code, words) = told(&outcome);
    assert!(code == 5 && words.contains("the disk is full"), "{words}");
    assert_eq!(plugin.commands(), ["DEL"]);
}

fn run_again(before: Outcome, plugin: &Plugin) -> Outcome {
    fs::remove_file(before.dir.path().join("wharf.sock")).unwrap();
    let run = Run::new("DEL", "1.0.0").key("ipam", json!({"type": "stand-in"})).after(before);
    run.var("CNI_PATH", &plugin.dir.path().display().to_string())
        .answer(200, &json!({"deleted": [7], "errors": []}))
        .go()
}

#[test]
fn del_tells_a_lease_that_stays() {
    let done = json!({"deleted": [7], "errors": []});
    let (run_, plugin) = run("DEL", "1.0.0");
    plugin.fails("DEL", 100, "the disk is full");
    assert_eq!(run_.answer(200, &done).go().code(), 100);
    let (run_, plugin) = run("DEL", "1.0.0");
    fs::remove_file(plugin.file("stand-in")).unwrap();
    assert_eq!(run_.answer(200, &done).go().code(), 7, "the endpoint is gone, the lease is not");
}

#[test]
fn del_and_gc_are_counted_once_whoever_fails() {
    let done = json!({"deleted": [7], "errors": []});
    let step = json!({"step": "remove-link", "endpoint": "7", "message": "device busy"});
    let unfinished = json!({"deleted": [], "errors": [step]});
    for (command, status, body, fails, outcome) in [
        ("DEL", 200, &done, false, End::Success),
        ("DEL", 200, &done, true, End::Failure),
        ("DEL", 206, &unfinished, false, End::Failure),
        ("GC", 200, &done, false, End::Success),
        ("GC", 200, &done, true, End::Failure),
    ] {
        let (run, plugin) = run(command, "1.1.0");
        if fails {
            plugin.fails(command, 100, "the disk is full");
        }
        let told = run.reporting().answer(status, body).go();
        assert_eq!(told.requests[0].command, None, "{command}: the agent counts it as well");
        let [report] = &told.reports()[..] else { panic!("{command} {status}: {told:?}") };
        assert_eq!(report.outcome, outcome, "{command} {status}");
    }
}

#[test]
fn check_asks_the_plugin_after_the_agent() {
    let healthy = json!({"overall": "ok", "bpf": "ok", "policy": "ok", "connected": "ok", "findings": []});
    let added = Run::new("ADD", "1.0.0").answer(201, &endpoint()).go().json();
    let check = || {
        let (run, plugin) = run("CHECK", "1.0.0");
        (run.key("prevResult", added.clone()), plugin)
    };
    let (run_, plugin) = check();
    run_.answer(200, &external()).answer(200, &healthy).go().assert_silent();
    assert_eq!(plugin.commands(), ["CHECK"]);
    let (run_, plugin) = check();
    plugin.fails("CHECK", 7, "no such lease");
    assert_eq!(run_.answer(200, &external()).answer(200, &healthy).go().code(), 7);
    let (run_, plugin) = check();
    assert_eq!(run_.answer(404, &error("not-found", None)).go().code(), 3);
    assert_eq!(plugin.calls(), [""; 0]);
}

#[test]
fn gc_asks_the_plugin_and_takes_an_old_one_for_what_it_is() {
    let gc = || {
        let (run, plugin) = run("GC", "1.1.0");
        (run.key("cni.dev/valid-attachments", json!([])), plugin)
    };
    let done = json!({"deleted": [], "errors": []});
    let (run_, plugin) = gc();
    run_.answer(200, &done).go().assert_silent();
    assert_eq!(plugin.commands(), ["GC"]);
    for (code, msg, silent) in [
        (1, "incompatible CNI versions", true),
        (4, "unknown CNI_COMMAND: GC", true),
        (3, "missing containerID", true),
        (4, "missing range", false),
        (100, "the disk is full", false),
    ] {
        let (run_, plugin) = gc();
        plugin.fails("GC", code, msg);
        let outcome = run_.answer(200, &done).go();
        assert_eq!(outcome.success, silent, "{msg}: {outcome:?}");
        assert!(silent || outcome.code() == u64::from(code), "{msg}");
    }
    let (run_, plugin) = gc();
    let part = json!({"deleted": [], "errors": [{"step": "unpin", "endpoint": "3", "message": "busy"}]});
    assert_eq!(run_.answer(206, &part).go().code(), 11);
    assert_eq!(plugin.calls(), [""; 0], "an address that may be in use stays leased");
    let (run_, plugin) = run("GC", "1.0.0");
    assert_eq!(run_.go().code(), 1);
    assert_eq!(plugin.calls(), [""; 0], "GC came with 1.1.0");
}

#[test]
fn status_asks_the_plugin_and_no_pool() {
    let status = json!({
        "overall": "ok", "serving": true, "version": "0.1.0", "abi_version": 1, "node_name": "n", "pid": 1,
        "uptime_ms": 1, "router": [], "kernel": {"release": "6", "attach_mode": "tcx", "features": {}},
        "components": [], "controllers": [], "ipam": [], "endpoints": {}, "refused_transitions": 0,
        "bpf_maps": [], "prepared": {"ready": 0, "target": 0},
        "proxy": {"enabled": false, "redirects": 0, "pending_completions": 0, "timed_out_completions": 0},
        "resident_bytes": 1,
    });
    let (run_, plugin) = run("STATUS", "1.1.0");
    run_.answer(200, &status).go().assert_silent();
    assert_eq!(plugin.commands(), ["STATUS"]);
    for code in [50, 51, 7] {
        let (run_, plugin) = run("STATUS", "1.1.0");
        plugin.fails("STATUS", code, "no range");
        assert_eq!(run_.answer(200, &status).go().code(), u64::from(code));
    }
    // One that does not know the command, of either age of the specification.
    for (supported, code) in [(json!(["1.0.0", "1.1.0"]), None), (json!(["0.4.0", "1.0.0"]), Some(50))] {
        let (run_, plugin) = run("STATUS", "1.1.0");
        plugin.fails("STATUS", 4, "unknown CNI_COMMAND: STATUS");
        plugin.says("VERSION", &json!({"cniVersion": "1.0.0", "supportedVersions": supported}));
        let outcome = run_.answer(200, &status).go();
        assert_eq!(plugin.commands(), ["STATUS", "VERSION"]);
        match code {
            None => outcome.assert_silent(),
            Some(code) => {
                let (found, words) = told(&outcome);
                assert!(found == code && words.contains("does not support CNI 1.1.0"), "{words}");
            }
        }
    }
}

#[test]
fn a_type_is_a_name_and_no_path() {
    let dir = Path::new("/bin");
    for plugin in ["../bin/sh", "/bin/sh", "sh/", ".."] {
        let run = Run::new("ADD", "1.0.0").key("ipam", json!({ "type": plugin }));
        let outcome = run.var("CNI_PATH", &dir.display().to_string()).go();
        assert_eq!(outcome.code(), 7, "{plugin}: {outcome:?}");
    }
}
