//! The binary as a runtime runs it: environment, stdin, stdout, exit status; the agent is a stand-in.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use serde_json::{Value, json};
use support::{Outcome, Run, endpoint, error};
use wharf_handover::{command::Verb, queue::MAX_RECORDS, report::Outcome as End};

const VERSIONS: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];
const ID: &str = "/v1/endpoint/cni-attachment-id:c1:eth0";

fn healthy() -> Value {
    json!({"overall": "ok", "bpf": "ok", "policy": "ok", "connected": "ok", "findings": []})
}

/// A pool's row.
fn pool(name: &str, family: &str, used: u64, total: u64) -> Value {
    let cidr = if family == "ipv4" { "10.70.0.0/30" } else { "fd70::/126" };
    json!({"name": name, "family": family, "cidrs": [cidr], "used": used, "total": total})
}

fn roomy() -> Value {
    json!([pool("default", "ipv4", 1, 2), pool("default", "ipv6", 1, u64::MAX)])
}

fn status(serving: bool, components: &Value, ipam: &Value) -> Value {
    json!({
        "overall": "ok", "serving": serving, "version": "0.1.0", "abi_version": 1, "node_name": "n", "pid": 1,
        "uptime_ms": 1, "router": [], "kernel": {"release": "6", "attach_mode": "tcx", "features": {}},
        "components": components, "controllers": [], "ipam": ipam, "endpoints": {}, "refused_transitions": 0,
        "bpf_maps": [], "prepared": {"ready": 0, "target": 0},
        "proxy": {"enabled": false, "redirects": 0, "pending_completions": 0, "timed_out_completions": 0},
        "resident_bytes": 1,
    })
}

fn pretty(outcome: &Outcome) -> String {
    assert!(outcome.success, "{outcome:?}");
    serde_json::to_string_pretty(&outcome.json()).unwrap()
}

#[test]
fn add_result_in_every_version() {
    for version in VERSIONS {
        let dns = json!({"nameservers": ["10.70.0.2"], "search": ["shop.example"]});
        let outcome = Run::new("ADD", version).key("dns", dns).answer(201, &endpoint()).go();
        insta::assert_snapshot!(format!("add-{version}"), pretty(&outcome));
        assert!(outcome.stderr.is_empty(), "{outcome:?}");
    }
}

#[test]
fn add_result_of_one_family_without_dns() {
    let mut endpoint = endpoint();
    endpoint["ipv6"] = Value::Null;
    endpoint["gateway6"] = Value::Null;
    let outcome = Run::new("ADD", "1.1.0").answer(201, &endpoint).go();
    insta::assert_snapshot!("add-1.1.0-ipv4-only", pretty(&outcome));
}

/// The name of what runs the plugin here.
fn this_program() -> String {
    std::fs::read_to_string("/proc/self/comm").unwrap().trim_end().to_owned()
}

#[test]
fn add_is_one_request_with_everything() {
    let outcome = Run::new("ADD", "1.0.0")
        .var("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;IP=10.70.0.7")
        .key("mtu", json!(1450))
        .key("pool", json!("blue"))
        .key("args", json!({"cni": {"labels": [{"key": "app", "value": "web"}]}}))
        .key("runtimeConfig", json!({"mac": "02:00:00:00:00:0A", "ips": ["fd70::7/64"], "portMappings": []}))
        .answer(201, &endpoint())
        .go();
    assert_eq!(outcome.requests[0].line, format!("PUT {ID}"));
    let mut body = outcome.requests[0].body.clone();
    let deadline = body.as_object_mut().unwrap().remove("deadline_ms").and_then(|ms| ms.as_u64());
    assert!(deadline.is_some_and(|ms| (50_000..=60_000).contains(&ms)), "{deadline:?}");
    insta::assert_snapshot!("add-request", serde_json::to_string_pretty(&body).unwrap());
}

#[test]
fn add_asks_again_when_the_agent_says_later() {
    let outcome = Run::new("ADD", "1.0.0")
        .key("log-level", json!("info"))
        .answer(429, &error("overloaded", Some(5)))
        .answer(503, &error("unavailable", Some(5)))
        .answer(201, &endpoint())
        .go();
    assert!(outcome.success, "{outcome:?}");
    assert_eq!(outcome.stderr.matches("asking again").count(), 2, "{}", outcome.stderr);
}

#[test]
fn debug_tells_how_long_the_agent_took() {
    let outcome = Run::new("ADD", "1.0.0").key("log-level", json!("debug")).answer(201, &endpoint()).go();
    let lines: Vec<&str> = outcome.stderr.lines().collect();
    let [info, debug] = lines.as_slice() else { panic!("two lines, not {lines:?}") };
    assert!(info.ends_with("info: ADD c1/eth0 on network net: endpoint 7"), "{info}");
    assert!(debug.contains("debug: asking the agent at ") && debug.ends_with(" µs"), "{debug}");
}

#[test]
fn agent_errors_become_cni_errors() {
    for (status, code, cni) in [
        (400, "invalid-request", 7),
        (400, "invalid-netns", 4),
        (409, "exists", 4),
        (404, "not-found", 7),
        (429, "pool-exhausted", 11),
        (429, "limit-reached", 11),
        (429, "overloaded", 11),
        (429, "busy", 11),
        (503, "deadline-exceeded", 11),
        (500, "kernel", 11),
        (500, "store", 11),
        (503, "unavailable", 11),
        (500, "internal", 11),
    ] {
        let outcome = Run::new("ADD", "0.4.0").answer(status, &error(code, None)).go();
        assert_eq!(outcome.code(), cni, "{code}");
        let body = outcome.json();
        assert_eq!(body["cniVersion"], "0.4.0");
        let msg = body["msg"].as_str().unwrap();
        assert!(msg.contains(" (ADD c1/eth0 on network net)") && msg.contains(code), "{msg}");
        assert_eq!(msg.contains("CNI_"), cni == 4, "code 4 names the variable: {msg}");
    }
}

#[test]
fn agent_away_or_somebody_else_there() {
    // What DEL does is shown below.
    for (command, code) in [("ADD", 11), ("CHECK", 110), ("GC", 11), ("STATUS", 50)] {
        let run = || Run::new(command, "1.1.0");
        let run = || {
            // Keys that one command needs and the others pass over.
            let run = run().key("cni.dev/valid-attachments", json!([]));
            if command == "CHECK" { run.key("prevResult", json!({})) } else { run }
        };
        let outcome = run().go();
        assert_eq!(outcome.code(), code, "{command}");
        // CHECK compares the kernel with a result that names no interface.
        if command != "CHECK" {
            assert!(outcome.stdout.contains("is wharf-agent running"), "{}", outcome.stdout);
            assert!(outcome.stdout.contains(wharf_api::client::why_agent_is_away()), "{}", outcome.stdout);
        }
        assert!(!outcome.queue().path().exists(), "{command} leaves nothing");
        // Died with the request in hand.
        assert_eq!(run().raw_answer(b"").go().code(), code, "{command}");
        // Something else listens.
        let other = if command == "STATUS" { 50 } else { 5 };
        assert_eq!(run().raw_answer(b"220 mail ESMTP\r\n").go().code(), other, "{command}");
        assert_eq!(run().answer(200, &json!("what?")).go().code(), other, "{command}");
    }
}

/// A DEL of a container of which nobody has a link, in whatever namespace the tests run.
fn lonely_del() -> Run {
    Run::new("DEL", "1.0.0").var("CNI_CONTAINERID", "wharf-cni-binary-test").key("log-level", json!("info"))
}

#[test]
fn del_without_an_agent_succeeds_and_two_of_them_are_one_record() {
    // No socket, no netns: all that DEL has to go by is the attachment.
    let first = lonely_del().var("CNI_NETNS", "").go();
    first.assert_silent();
    assert!(first.stderr.contains("going on without the agent"), "{}", first.stderr);
    assert!(first.stderr.contains("the agent will finish it"), "{}", first.stderr);
    let before = first.queue().list().unwrap();
    let [entry] = before.as_slice() else { panic!("one record, not {before:?}") };
    let record = entry.content.as_ref().unwrap();
    assert_eq!((record.network.as_str(), record.container_id.as_str()), ("net", "wharf-cni-binary-test"));
    assert_eq!((record.ifname.as_str(), record.endpoint), ("eth0", None));

    // A socket that a killed agent left, and a netns that is nonsense.
    drop(std::os::unix::net::UnixListener::bind(first.dir.path().join("wharf.sock")).unwrap());
    let second = lonely_del().var("CNI_NETNS", "/proc/self/environ").after(first).go();
    second.assert_silent();
    assert_eq!(second.queue().list().unwrap(), before, "the same record, with the time of the first");
}

#[test]
fn del_whose_agent_dies_with_the_request_in_hand_is_queued() {
    let outcome = lonely_del().raw_answer(b"").go();
    outcome.assert_silent();
    assert_eq!(outcome.queue().list().unwrap().len(), 1);
}

#[test]
fn del_that_finds_somebody_else_there_is_an_error() {
    for run in [lonely_del().raw_answer(b"220 mail ESMTP\r\n"), lonely_del().answer(200, &json!("what?"))] {
        let outcome = run.go();
        assert_eq!(outcome.code(), 5);
        assert!(!outcome.queue().path().exists());
    }
}

#[test]
fn del_with_a_full_queue_is_to_be_tried_again() {
    let run = lonely_del();
    let queue = run.queue();
    queue.ensure_directory().unwrap();
    for n in 0..MAX_RECORDS {
        std::fs::write(queue.path().join(format!("{n:064x}.json")), "").unwrap();
    }
    let outcome = run.go();
    assert_eq!(outcome.code(), 11);
    let body = outcome.json();
    assert!(body["msg"].as_str().is_some_and(|msg| msg.contains("4096 records wait there already")), "{body}");
    assert!(body["details"].as_str().is_some_and(|details| details.contains("start wharf-agent")), "{body}");
    assert_eq!(std::fs::read_dir(queue.path()).unwrap().count(), MAX_RECORDS, "nothing temporary is left");
}

#[test]
fn del_before_any_agent_ran_in_this_boot_is_done() {
    let run = lonely_del();
    let run_dir = run.socket().parent().unwrap().join("none");
    let outcome = run.key("socket", json!(run_dir.join("wharf.sock"))).go();
    outcome.assert_silent();
    assert!(outcome.stderr.contains("no agent has run in this boot"), "{}", outcome.stderr);
    assert!(!run_dir.exists());
}

#[test]
fn add_behind_a_plugin_that_made_no_interface_asks_nobody() {
    let outcome = Run::new("ADD", "1.0.0").key("prevResult", json!({"interfaces": []})).go();
    assert_eq!(outcome.code(), 7);
}

#[test]
fn add_behind_another_plugin_asks_for_its_interface_and_answers_its_result() {
    for version in VERSIONS {
        let mut prev = json!({
            "cniVersion": version,
            "interfaces": [{"name": "veth1"}, {"name": "eth0", "sandbox": "/run/netns/c1"}],
            "ips": [{"address": "10.1.0.2/24", "gateway": "10.1.0.1", "interface": 1}],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dns": {"nameservers": ["10.1.0.53"]},
            "unknown": {"kept": true},
        });
        if version < "1.0.0" {
            prev["ips"][0]["version"] = json!("4");
        }
        let outcome = Run::new("ADD", version).key("prevResult", prev.clone()).answer(201, &endpoint()).go();
        assert_eq!(outcome.json(), prev);
        let body = &outcome.requests[0].body;
        assert_eq!((&body["chained"], &body["ips"]), (&json!(true), &json!(["10.1.0.2"])));
    }
}

#[test]
fn del_is_silent_when_done_or_unknown() {
    let done = json!({"deleted": [7], "errors": []});
    for version in VERSIONS {
        let outcome = Run::new("DEL", version).answer(200, &done).go();
        outcome.assert_silent();
        assert_eq!(outcome.requests[0].line, format!("DELETE {ID}?network=net"));
        assert!(outcome.stderr.is_empty());
    }
    // containerd's second DEL: no netns, no prevResult.
    Run::new("DEL", "1.0.0").var("CNI_NETNS", "").answer(404, &error("not-found", None)).go().assert_silent();
    Run::new("DEL", "1.0.0").var("CNI_ARGS", "IP=nonsense").answer(200, &done).go().assert_silent();
}

#[test]
fn del_in_part_is_to_be_tried_again() {
    let step = |step: &str| json!({"step": step, "endpoint": "7", "message": "device busy"});
    let result = json!({"deleted": [7], "errors": [step("unpin"), step("remove-link")]});
    let outcome = Run::new("DEL", "1.0.0").answer(206, &result).go();
    assert_eq!(outcome.code(), 11);
    let msg = outcome.json()["msg"].as_str().unwrap().to_owned();
    assert!(msg.contains("2 steps failed") && msg.contains("unpin of endpoint 7: device busy"), "{msg}");
}

#[test]
fn check_compares_and_tells() {
    for version in ["0.4.0", "1.0.0", "1.1.0"] {
        let added = Run::new("ADD", version).answer(201, &endpoint()).go().json();
        let check = || Run::new("CHECK", version).key("prevResult", added.clone());
        let outcome = check().answer(200, &endpoint()).answer(200, &healthy()).go();
        outcome.assert_silent();
        let lines: Vec<&str> = outcome.requests.iter().map(|r| r.line.as_str()).collect();
        assert_eq!(lines, [format!("GET {ID}"), format!("GET {ID}/healthz")]);

        let mut later = endpoint();
        later["host_ifname"] = json!("wh7x10");
        assert_eq!(check().answer(200, &later).answer(200, &healthy()).go().code(), 111);

        let mut ill = healthy();
        ill["overall"] = json!("failing");
        ill["findings"] = json!([{"object": "link", "subject": "wh7x9", "problem": "is down"}]);
        let outcome = check().answer(200, &endpoint()).answer(200, &ill).go();
        assert_eq!(outcome.code(), 110);
        assert!(outcome.stdout.contains("link wh7x9: is down"), "{}", outcome.stdout);

        assert_eq!(check().answer(404, &error("not-found", None)).go().code(), 3);
        // Deleted between the two questions.
        assert_eq!(check().answer(200, &endpoint()).answer(404, &error("not-found", None)).go().code(), 3);
    }
    let unknown = Run::new("CHECK", "1.0.0").answer(404, &error("not-found", None)).go();
    assert_eq!(unknown.code(), 3, "no cached result, and the agent knows of none either");
    assert_eq!(Run::new("CHECK", "1.0.0").answer(200, &endpoint()).go().code(), 7);
    assert_eq!(Run::new("CHECK", "0.3.1").key("prevResult", json!({})).go().code(), 1);
}

#[test]
fn gc_sends_what_is_to_stay() {
    let keep = json!([{"containerID": "c1", "ifname": "eth0"}, {"containerID": "c2", "ifname": "net1"}]);
    let done = json!({"deleted": [3], "errors": []});
    let gc = || Run::new("GC", "1.1.0").var("CNI_CONTAINERID", "").var("CNI_IFNAME", "").var("CNI_NETNS", "");
    let outcome = gc().key("cni.dev/valid-attachments", keep).answer(200, &done).go();
    outcome.assert_silent();
    assert_eq!(outcome.requests[0].line, "POST /v1/gc");
    assert_eq!(
        outcome.requests[0].body,
        json!({"network": "net", "runtime": this_program(), "valid": [
            {"container_id": "c1", "ifname": "eth0"}, {"container_id": "c2", "ifname": "net1"},
        ]})
    );
    let kept = json!({"deleted": [3], "errors": [], "kept": [{"endpoint": 4, "runtime": "podman"}]});
    let outcome = gc().key("log-level", json!("info")).key("cni.dev/attachments", json!([])).answer(200, &kept).go();
    assert!(outcome.success && outcome.stderr.contains("kept endpoint 4, which podman added"), "{outcome:?}");
    let outcome = gc().key("cni.dev/attachments", Value::Null).answer(200, &done).go();
    assert_eq!(outcome.requests[0].body["valid"], json!([]));
    let outcome = gc().answer(200, &done).go();
    assert!(outcome.success && outcome.stderr.contains("deletes every attachment of network net"), "{outcome:?}");
    assert_eq!(outcome.requests[0].body["valid"], json!([]), "as libcni sends it for no attachments");
    let part = json!({"deleted": [], "errors": [{"step": "unpin", "endpoint": "3", "message": "busy"}]});
    assert_eq!(gc().key("cni.dev/valid-attachments", json!([])).answer(206, &part).go().code(), 11);
    assert_eq!(gc().key("cniVersion", json!("1.0.0")).go().code(), 1);
}

#[test]
fn status_is_honest() {
    let component = |name: &str, health: &str| json!([{"name": name, "health": health, "message": "as seen"}]);
    let run = || Run::new("STATUS", "1.1.0").var("CNI_CONTAINERID", "").var("CNI_IFNAME", "").var("CNI_NETNS", "");
    run().answer(200, &status(true, &component("datapath", "ok"), &roomy())).go().assert_silent();
    run().answer(200, &status(true, &component("ipam", "degraded"), &roomy())).go().assert_silent();
    for (code, http, serving, name, health) in [
        (50, 503, false, "store", "ok"),
        (50, 503, false, "store", "failing"),
        (50, 200, true, "ipam", "failing"),
        (51, 200, true, "datapath", "degraded"),
        (51, 503, false, "datapath", "failing"),
        (50, 200, true, "proxy", "failing"),
    ] {
        let outcome = run().answer(http, &status(serving, &component(name, health), &roomy())).go();
        assert_eq!(outcome.code(), code, "{name} {health} {serving}");
    }
    // STATUS does not wait for a better answer.
    assert_eq!(run().answer(503, &error("unavailable", Some(1))).go().code(), 50);
}

#[test]
fn status_tells_of_a_pool_that_add_could_not_use() {
    let pools = json!([
        pool("default", "ipv4", 2, 2),
        pool("default", "ipv6", 1, 3),
        pool("blue", "ipv4", 1, 2),
        pool("green", "ipv4", 1, 2),
        pool("green", "ipv6", 3, 3),
    ]);
    let answer = status(true, &json!([{"name": "ipam", "health": "degraded", "message": "exhausted"}]), &pools);
    let run = |pool: Value| Run::new("STATUS", "1.1.0").key("pool", pool).answer(200, &answer).go();
    // Whatever other pools lack.
    run(json!("blue")).assert_silent();
    let full = "no free IPv4 address: 2 of 2 are in use (10.70.0.0/30)";
    for (key, words) in [
        (Value::Null, ["pool default", full]),
        (json!(""), ["pool default", full]),
        (json!("default"), ["pool default", full]),
        (json!("green"), ["pool green", "no free IPv6 address: 3 of 3 are in use (fd70::/126)"]),
        (json!("atlantis"), ["no pool \"atlantis\"", "blue; default; green"]),
        (json!("../default"), ["no pool \"../default\"", "its pools: blue"]),
    ] {
        let outcome = run(key.clone());
        assert_eq!(outcome.code(), 50, "{key}");
        let body = outcome.json();
        let msg = body["msg"].as_str().unwrap();
        assert!(msg.starts_with("STATUS of network net: "), "{msg}");
        assert!(words.iter().all(|word| msg.contains(word)), "{key}: {msg}");
        assert!(body["details"].as_str().is_some_and(|details| details.contains("pool")), "{body}");
    }
    // What is worse goes first: 51 though the pool is full too.
    let ill = status(true, &json!([{"name": "datapath", "health": "failing", "message": "gone"}]), &pools);
    assert_eq!(Run::new("STATUS", "1.1.0").answer(200, &ill).go().code(), 51);
}

#[test]
fn version_answers_whatever_it_is_given() {
    let probe = |stdin: &[u8]| Run::new("VERSION", "1.0.0").var("CNI_NETNS", "dummy").stdin(stdin).go();
    insta::assert_snapshot!("version", pretty(&probe(br#"{"cniVersion":"1.0.0"}"#)));
    for stdin in [&b""[..], b"{", b"\xff\xfe", b"[]"] {
        assert_eq!(probe(stdin).json()["cniVersion"], "1.1.0");
    }
    let bare = Run::new("VERSION", "1.0.0").var("CNI_CONTAINERID", "").var("CNI_IFNAME", "").var("CNI_NETNS", "");
    assert!(bare.go().success);
}

#[test]
fn bad_environment_and_netconf() {
    assert_eq!(Run::new("", "1.0.0").go().code(), 4);
    assert_eq!(Run::new("UPDATE", "1.0.0").go().code(), 4);
    assert_eq!(Run::new("ADD", "1.0.0").var("CNI_NETNS", "").go().code(), 4);
    assert_eq!(Run::new("ADD", "1.0.0").var("CNI_IFNAME", "sixteen-bytes-xx").go().code(), 4);
    for command in ["ADD", "DEL", "CHECK"] {
        let outcome = Run::new(command, "1.0.0").var("CNI_CONTAINERID", &"c".repeat(254)).go();
        assert_eq!(outcome.code(), 4, "{command}");
        assert!(outcome.stdout.contains("CNI_CONTAINERID"), "{}", outcome.stdout);
    }
    assert_eq!(Run::new("DEL", "1.0.0").key("name", json!("n".repeat(254))).go().code(), 7);
    assert_eq!(Run::new("ADD", "1.0.0").stdin(b"{").go().code(), 6);
    assert_eq!(Run::new("ADD", "1.0.0").stdin(&vec![b' '; 3 << 20]).go().code(), 7);
    assert_eq!(Run::new("ADD", "1.0.0").key("socket", json!(5)).go().code(), 7);
    let outcome = Run::new("ADD", "0.2.0").go();
    assert_eq!((outcome.code(), outcome.json()["cniVersion"].clone()), (1, json!("0.2.0")));
}

#[test]
fn a_hostile_result_cannot_break_the_frame() {
    let mut endpoint = endpoint();
    endpoint["host_ifname"] = json!("\"},\n{\u{0}");
    let outcome = Run::new("ADD", "1.0.0").answer(201, &endpoint).go();
    assert_eq!(outcome.json()["interfaces"][0]["name"], endpoint["host_ifname"]);
    assert_eq!(outcome.stdout.lines().count(), 1);
}

#[test]
fn requests_name_their_command_and_what_the_agent_answers_is_not_reported() {
    let pod = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0";
    let added = Run::new("ADD", "1.1.0").reporting().var("CNI_ARGS", pod).answer(201, &endpoint()).go();
    let (command, age) = added.requests[0].command.clone().unwrap();
    let names = [&command.network, &command.container_id, &command.ifname, &command.pod_name, &command.pod_namespace];
    assert_eq!((command.verb, names), (Verb::Add, ["net", "c1", "eth0", "web-0", "shop"].map(String::from).each_ref()));
    // Not a field of the request: an older agent refuses fields that it does not know, and ignores the header's.
    assert_eq!((command.runtime, added.requests[0].body.get("runtime")), (this_program(), None));
    assert!(age.as_secs() < 60, "{age:?}");
    assert_eq!(added.reports(), []);

    let step = json!({"deleted": [], "errors": [{"step": "unpin", "endpoint": "7", "message": "device busy"}]});
    for (command, status, body) in [
        ("ADD", 409, error("exists", None)),
        ("ADD", 500, error("kernel", None)),
        ("DEL", 200, json!({"deleted": [7], "errors": []})),
        ("DEL", 404, error("not-found", None)),
        ("DEL", 206, step.clone()),
        ("GC", 206, step),
    ] {
        let outcome = Run::new(command, "1.1.0").reporting().answer(status, &body).go();
        let (named, _) = outcome.requests[0].command.clone().unwrap();
        assert_eq!((named.verb.as_str(), outcome.reports().len()), (command, 0), "{outcome:?}");
        assert_ne!(named.id, 0);
    }
}

#[test]
fn what_the_agent_cannot_know_is_reported() {
    let one = |run: Run| {
        let outcome = run.reporting().go();
        let mut reports = outcome.reports();
        assert_eq!(reports.len(), 1, "{outcome:?}");
        reports.remove(0)
    };
    let absent = one(Run::new("ADD", "1.1.0"));
    assert_eq!((absent.outcome, absent.code), (End::Failure, Some(11)));
    assert!(absent.duration_us > 500_000, "ADD waits a second for the agent: {absent:?}");
    assert_eq!((absent.command.network.as_str(), absent.command.container_id.as_str()), ("net", "c1"));

    let config = one(Run::new("ADD", "1.1.0").key("mtu", json!("x")));
    assert_eq!((config.code, config.command.network.as_str()), (Some(7), "net"));
    let version = one(Run::new("ADD", "9.9.9"));
    assert_eq!((version.code, version.command.network.as_str()), (Some(1), "net"));
    // Neither names an agent.
    let environment = Run::new("DEL", "1.1.0").var("CNI_CONTAINERID", "../c").reporting().go();
    let no_json = Run::new("ADD", "1.1.0").stdin(b"{").reporting().go();
    assert_eq!((environment.code(), no_json.code()), (4, 6));
    assert_eq!((environment.reports(), no_json.reports()), (Vec::new(), Vec::new()));
    let given_up = one(Run::new("DEL", "1.1.0").answer(429, &error("overloaded", None)));
    assert_eq!((given_up.outcome, given_up.code), (End::Failure, Some(11)));
    let closed = one(Run::new("ADD", "1.1.0").raw_answer(b""));
    assert_eq!((closed.outcome, closed.code), (End::Failure, Some(11)));
    let unread = one(Run::new("ADD", "1.1.0").answer(201, &endpoint()).full_stdout());
    assert_eq!((unread.outcome, unread.code), (End::Failure, Some(5)));
    assert!(unread.message.contains("No space left"), "{}", unread.message);
}

#[test]
fn del_by_the_queue_is_reported_as_deferred() {
    let outcome = Run::new("DEL", "1.1.0").var("CNI_CONTAINERID", "wharf-cni-binary-test").reporting().go();
    outcome.assert_silent();
    assert_eq!(outcome.queue().list().unwrap().len(), 1);
    let [report] = &outcome.reports()[..] else { panic!("{outcome:?}") };
    assert_eq!((report.outcome, report.code, report.command.verb), (End::Deferred, None, Verb::Del));
}

#[test]
fn the_verdict_of_check_is_the_plugins_and_status_is_not_told() {
    let checked = Run::new("CHECK", "1.1.0").reporting().answer(404, &error("not-found", None)).go();
    assert_eq!(checked.code(), 3);
    assert_eq!(checked.requests[0].command, None, "the agent does not count it");
    let [report] = &checked.reports()[..] else { panic!("{checked:?}") };
    assert_eq!((report.command.verb, report.outcome, report.code), (Verb::Check, End::Failure, Some(3)));

    let asked = Run::new("STATUS", "1.1.0").reporting().answer(200, &status(true, &json!([]), &roomy())).go();
    asked.assert_silent();
    assert_eq!((asked.requests[0].command.clone(), asked.reports().len()), (None, 0));
}

#[test]
fn where_no_agent_has_run_nothing_is_left_behind() {
    let outcome = Run::new("ADD", "1.1.0").go();
    assert_eq!(outcome.code(), 11);
    assert_eq!(std::fs::read_dir(outcome.dir.path()).unwrap().count(), 0);
    assert!(!outcome.stderr.contains("report"), "{}", outcome.stderr);
}
