//! Exit statuses, output and requests for scripts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may end so")]

mod agent;
mod policy;

use std::{os::unix::net::UnixListener, process::Stdio};

use serde_json::{Value, json};

use agent::{Agent, Answer, Ran, wharf};

fn status(overall: &str, serving: bool) -> Value {
    json!({
        "overall": overall, "serving": serving, "version": "0.1.0", "abi_version": 1, "node_name": "node-a",
        "pid": 1, "uptime_ms": 1000, "router": [],
        "kernel": {"release": "6.18", "attach_mode": "tcx", "features": {}},
        "components": [{"name": "store", "health": overall, "message": "as the test says"}],
        "controllers": [], "ipam": [], "endpoints": {}, "refused_transitions": 0, "bpf_maps": [],
        "prepared": {"ready": 0, "target": 0},
        "proxy": {"enabled": false, "redirects": 0, "pending_completions": 0, "timed_out_completions": 0,
                  "state": "absent", "listeners": 0, "refused": 0, "restarts": 0, "records_lost": 0,
                  "requests": {"forwarded": 0, "denied": 0, "failed": 0}, "name_addresses": 0},
        "resident_bytes": 0, "stuck": [], "quarantined": [], "audit_findings": null,
        "deletion_queue": {"records": 0, "oldest_age_ms": 0, "unusable": 0, "drained": 0, "canary": "came out after 1 ms"},
        "commands": {"succeeded": 0, "failed": 0, "deferred": 0},
        "admission": {"waiting": 0, "running": 0, "deletes": 0, "cost_ms": 0, "refused": 0},
        "network": {"device_mode": "veth", "routing": "the node's routes", "masquerading": "none"},
        "controllers_total": 0, "controllers_unwell": 0, "from_admin": false
    })
}

fn endpoint(id: u16, container: &str) -> Value {
    json!({
        "id": id, "epoch": 41, "state": "ready", "container_id": container, "ifname": "eth0", "network": "wharf",
        "identity": 5, "labels": ["k8s:app=we\u{1b}[31mb"], "ipv4": "10.88.0.7", "ipv6": null, "ifindex": 12,
        "host_ifname": "wh1", "container_mac": "02:00:00:00:00:01", "host_mac": "02:00:00:00:00:02",
        "gateway4": "10.88.0.1", "gateway6": null, "mtu": 1500, "pool": "default", "netns": "/run/netns/a",
        "created_unix_ms": 1_790_856_000_000_u64,
        "status": {"phase": "", "since_unix_ms": 0, "waits_for": "", "ends_when": "", "desired_revision": 1,
                   "realized_revision": 1, "regenerations": 1, "failures": 0}
    })
}

fn finding(subject: &str) -> Value {
    json!({"object": "link", "subject": subject, "problem": "no endpoint has it", "repairable": true})
}

fn not_found(request: &str) -> Answer {
    let body = json!({"code": "not-found", "message": "no endpoint 9", "hint": "it may be gone"});
    Answer::new(request, 404, body)
}

#[test]
fn status_says_how_it_is() {
    for (overall, serving, http, code, word) in [
        ("ok", true, 200, 0, "ok"),
        ("pending", true, 200, 0, "ok"),
        ("degraded", true, 200, 1, "degraded"),
        ("failing", true, 200, 2, "down"),
        ("ok", false, 503, 2, "down"),
    ] {
        let agent = Agent::start(vec![Answer::new("GET /v1/healthz", http, status(overall, serving))]);
        let ran = agent.run(&["status"]);
        assert_eq!(ran.code, Some(code), "{overall} {serving}: {ran:?}");
        assert!(ran.out.contains("node-a"), "{ran:?}");
        let ran = agent.run(&["status", "--brief"]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(code), format!("{word}\n").as_str()), "{ran:?}");
        let ran = agent.run(&["status", "--ready"]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(code), format!("{word}\n").as_str()), "{ran:?}");
        let ran = agent.run(&["status", "-o", "json"]);
        assert_eq!(ran.code, Some(code));
        assert_eq!(serde_json::from_str::<Value>(&ran.out).expect("JSON"), status(overall, serving));
    }
}

#[test]
fn what_a_container_does_with_its_share_degrades_the_status_and_not_the_readiness() {
    let component = |name: &str, health: &str| json!({"name": name, "health": health, "message": "as the test says"});
    let proxy =
        json!({"name": "proxy", "health": "degraded", "message": "a share is spent", "without_containers": "ok"});
    for (other, code, word) in [("ok", 0, "ok"), ("degraded", 1, "degraded"), ("failing", 2, "down")] {
        let overall = if other == "failing" { "failing" } else { "degraded" };
        let mut answer = status(overall, true);
        answer["components"] = json!([component("store", other), proxy]);
        let agent = Agent::start(vec![Answer::new("GET /v1/healthz", 200, answer)]);
        let ran = agent.run(&["status", "--ready"]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(code), format!("{word}\n").as_str()), "{ran:?}");
        let ran = agent.run(&["status", "--brief"]);
        assert_eq!(ran.code, Some(code.max(1)), "{ran:?}");
    }
}

#[test]
fn an_api_that_is_silent_is_looked_at_through_the_admin_thread() {
    let mut answer = status("failing", true);
    answer["from_admin"] = true.into();
    let agent = Agent::start(vec![Answer::new("GET /v1/healthz", 200, answer.clone())]);
    let dir = tempfile::tempdir().expect("a directory");
    let api = dir.path().join("wharf.sock");
    // Taken by the kernel, and never by an agent.
    let _silent = UnixListener::bind(&api).expect("a socket");
    std::os::unix::fs::symlink(agent.socket(), dir.path().join("admin.sock")).expect("a link");
    let run = |args: &[&str]| Ran::from(wharf(args).env("WHARF_SOCKET", &api).output().expect("runs"));
    let ran = run(&["status"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.out.contains("the API does not answer; this is from the admin thread"), "{ran:?}");
    let ran = run(&["status", "-o", "json"]);
    assert_eq!(serde_json::from_str::<Value>(&ran.out).expect("JSON"), answer);
    assert!(ran.err.contains("from the admin thread"), "{ran:?}");
    let ran = run(&["status", "--brief"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(2), "down\n"), "{ran:?}");
    let mut well = status("ok", true);
    well["from_admin"] = true.into();
    let agent = Agent::start(vec![Answer::new("GET /v1/healthz", 200, well)]);
    std::fs::remove_file(dir.path().join("admin.sock")).expect("removed");
    std::os::unix::fs::symlink(agent.socket(), dir.path().join("admin.sock")).expect("a link");
    let ran = run(&["status", "--ready"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(1), "degraded\n"), "the API does not answer: {ran:?}");
}

#[test]
fn every_controller_is_asked_for_only_where_it_is_shown() {
    let agent = Agent::start(vec![
        Answer::new("GET /v1/healthz", 200, status("ok", true)),
        Answer::new("GET /v1/healthz?all-controllers=true", 200, status("ok", true)),
    ]);
    for (args, asked) in [
        (&["status"] as &[&str], "GET /v1/healthz"),
        (&["status", "--all-controllers"], "GET /v1/healthz?all-controllers=true"),
        (&["status", "--verbose"], "GET /v1/healthz?all-controllers=true"),
    ] {
        let ran = agent.run(args);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert_eq!(agent.seen().last().map(String::as_str), Some(asked), "{args:?}");
    }
}

#[test]
fn an_address_is_given_back_or_its_holder_is_named() {
    let agent = Agent::start(vec![Answer::new("DELETE /v1/ipam/10.88.0.9", 200, Value::Null)]);
    let ran = agent.run(&["ipam", "release", "10.88.0.9"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "10.88.0.9 is not held any more\n"), "{ran:?}");
    let held = json!({"code": "exists", "message": "release 10.88.0.9: held by wharf/c1:eth0"});
    let agent = Agent::start(vec![Answer::new("DELETE /v1/ipam/10.88.0.9", 409, held)]);
    let ran = agent.run(&["ipam", "release", "10.88.0.9"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.err.contains("held by wharf/c1:eth0"), "{ran:?}");
}

#[test]
fn flows_are_listed_with_what_was_left_out_and_flushed() {
    let end = |address: &str, port: u16| json!({"address": address, "port": port});
    let flow = json!({"protocol": "udp", "source": end("fd00:88::7", 4_000), "destination": end("fd00:88::8", 53),
        "state": "established", "owner": 7, "by_stack": false, "by_proxy": false, "kept": true, "idle_ms": 2_000, "left_ms": 178_000});
    let list = json!({"flows": [flow], "more": 41});
    let gone = json!({"code": "not-found", "message": "remove flows: find endpoint 9: no such endpoint"});
    let asked =
        "GET /v1/bpf/ct?endpoint=pod-name:a%2Fb&address=fd00:88::%2F64&port=53&protocol=udp&state=established&limit=1";
    let agent = Agent::start(vec![
        Answer::new(asked, 200, &list),
        Answer::new("DELETE /v1/bpf/ct?protocol=47", 200, json!({"removed": 1})),
        Answer::new("DELETE /v1/bpf/ct?all=true", 200, json!({"removed": 0})),
        Answer::new("DELETE /v1/bpf/ct?endpoint=9", 404, gone),
    ]);
    let args = ["bpf", "ct", "list", "--endpoint", "pod-name:a/b", "--address", "fd00:88::/64", "--port", "53"];
    let args = [&args[..], &["--protocol", "udp", "--state", "established", "--limit", "1"]].concat();
    let ran = agent.run(&args);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.out.contains("[fd00:88::7]:4000  [fd00:88::8]:53"), "{ran:?}");
    assert!(ran.err.contains("41 more flows not shown"), "{ran:?}");
    let ran = agent.run(&[&args[..], &["-o", "json"]].concat());
    assert_eq!((serde_json::from_str(&ran.out).ok(), ran.err.as_str()), (Some(list), ""), "{ran:?}");
    for (args, code, out) in [
        (&["--protocol", "47"], 0, "1 flow removed\n"),
        (&["--all", "--color=never"], 0, "0 flows removed\n"),
        (&["--endpoint", "9"], 1, ""),
    ] {
        let ran = agent.run(&[&["bpf", "ct", "flush"], &args[..]].concat());
        assert_eq!((ran.code, ran.out.as_str()), (Some(code), out), "{ran:?}");
    }
}

#[test]
fn an_agent_that_is_not_there() {
    let dir = tempfile::tempdir().expect("a directory");
    let none = dir.path().join("none.sock");
    let stale = dir.path().join("stale.sock");
    drop(UnixListener::bind(&stale).expect("a socket"));
    for socket in [&none, &stale] {
        for args in
            [&["status"] as &[&str], &["endpoint", "list"], &["audit"], &["monitor"], &["endpoint", "delete", "abc"]]
        {
            let ran = Ran::from(wharf(args).env("WHARF_SOCKET", socket).output().expect("runs"));
            assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{args:?}: {ran:?}");
            assert!(ran.err.starts_with("wharf: connecting to the agent at "), "{ran:?}");
            assert!(ran.err.contains("\n  hint: "), "{ran:?}");
        }
        let ran = Ran::from(wharf(&["status", "--brief"]).env("WHARF_SOCKET", socket).output().expect("runs"));
        assert_eq!((ran.code, ran.out.as_str()), (Some(2), "down\n"));
        let ran = Ran::from(wharf(&["version"]).env("WHARF_SOCKET", socket).output().expect("runs"));
        assert_eq!(ran.code, Some(2));
        assert!(ran.out.starts_with("wharf: "), "{ran:?}");
    }
}

#[test]
fn a_path_that_is_no_socket_is_told_from_a_socket_that_was_left_over() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("file");
    std::fs::write(&file, "text").expect("a file");
    let ran = Ran::from(wharf(&["endpoint", "list"]).env("WHARF_SOCKET", &file).output().expect("runs"));
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.err.contains("this is not a socket") && !ran.err.contains("left over"), "{ran:?}");
}

#[test]
fn what_the_agent_takes_for_no_request_is_a_wrong_command_line() {
    let refused = |why: &str| json!({"code": "invalid-request", "message": why});
    let agent = Agent::start(vec![
        Answer::new("GET /v1/endpoint?label=nonsense", 400, refused("list endpoints: must be source:key=value")),
        Answer::new("GET /v1/endpoint/7", 200, endpoint(7, "abc")),
        Answer::new("PATCH /v1/endpoint/7", 400, refused("read labels: 300 of them")),
    ]);
    let cases: [(&[&str], &str); 2] = [
        (&["endpoint", "list", "--label", "nonsense"], "must be source:key=value"),
        (&["endpoint", "labels", "7", "a=b"], "300 of them"),
    ];
    for (args, why) in cases {
        let ran = agent.run(args);
        assert_eq!((ran.code, ran.out.as_str()), (Some(3), ""), "{args:?}: {ran:?}");
        assert!(ran.err.contains(why), "{ran:?}");
    }
}

#[test]
fn labels_have_kubectls_grammar_wherever_they_are_written() {
    let mut labelled = endpoint(7, "abc");
    labelled["labels"] = json!(["cni:app=web", "k8s:tier=front"]);
    let agent = Agent::start(vec![
        Answer::new("GET /v1/endpoint/7", 200, labelled.clone()),
        Answer::new("PATCH /v1/endpoint/7", 200, labelled),
        Answer::new("GET /v1/endpoint/7/labels", 200, json!({"labels": [], "security_relevant": [], "identity": 256})),
        Answer::new("GET /v1/namespace", 200, json!([{"name": "shop", "labels": {"team": "a", "stage": "test"}}])),
        Answer::new("PUT /v1/namespace/shop", 200, json!({"name": "shop", "labels": {"team": "b"}})),
    ]);
    let sent = |args: &[&str], to: &str| {
        let before = agent.seen().len();
        let ran = agent.run(args);
        assert_eq!(ran.code, Some(0), "{args:?}: {ran:?}");
        let sent =
            agent.seen().into_iter().skip(before).find_map(|line| Some(line.strip_prefix(to)?.trim().to_owned()));
        sent.unwrap_or_default()
    };
    let labels = |args: &[&str]| sent(args, "PATCH /v1/endpoint/7");
    let all = r#"{"labels":["cni:app=db","k8s:new=1"]}"#;
    assert_eq!(labels(&["endpoint", "labels", "7", "app=db,new=1", "tier-"]), all);
    assert_eq!(
        labels(&["endpoint", "label", "7", "--set", "k8s:app=db,k8s:tier=x"]),
        r#"{"labels":["k8s:app=db","k8s:tier=x"]}"#
    );
    let namespace = |args: &[&str]| sent(args, "PUT /v1/namespace/shop");
    assert_eq!(namespace(&["namespace", "label", "shop", "team=b,stage-"]), r#"{"labels":{"team":"b"}}"#);
    assert_eq!(namespace(&["ns", "set", "shop", "team=b,k8s:x=y"]), r#"{"labels":{"team":"b","x":"y"}}"#);

    let before = agent.seen().len();
    for args in [
        &["endpoint", "labels", "7", "--set", "x"] as &[&str],
        &["endpoint", "labels", "7", "app"],
        &["endpoint", "labels", "7", "app=a b"],
        &["endpoint", "labels", "7", "app=a,app-"],
        &["namespace", "set", "shop", "team"],
        &["namespace", "set", "shop", "cni:team=a"],
        &["namespace", "label", "shop", "cni:team-"],
        &["namespace", "label", "shop", "team=a", "team-"],
        &["endpoint", "labels", "7", "--set", "app=a,app=b"],
        &["endpoint", "labels", "7", "app=a", "k8s:app=b"],
        &["sandbox", "create", "web", "--label", "app"],
        &["sandbox", "create", "web", "--label", "app=a,app=b"],
    ] {
        let ran = agent.run(args);
        assert_eq!((ran.code, ran.out.as_str()), (Some(3), ""), "{args:?}: {ran:?}");
        assert!(ran.err.contains("for example"), "{args:?}: {ran:?}");
    }
    assert_eq!(agent.seen().len(), before, "a wrong command line sends nothing");
}

#[test]
fn what_is_not_there_is_exit_one_with_a_reason() {
    let agent = Agent::start(vec![
        not_found("GET /v1/endpoint/9"),
        not_found("DELETE /v1/endpoint/9"),
        Answer::new("GET /v1/ipam", 200, "not what an agent says"),
    ]);
    for args in [&["endpoint", "get", "9"], &["endpoint", "delete", "9"]] {
        let ran = agent.run(args);
        assert_eq!((ran.code, ran.out.as_str()), (Some(1), ""));
        assert_eq!(ran.err, "wharf: no endpoint 9\n  hint: it may be gone\n");
    }
    let ran = agent.run(&["ipam", "list"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(1), ""), "{ran:?}");
}

#[test]
fn a_wrong_command_line_is_exit_three_and_asks_nothing() {
    let agent = Agent::start(Vec::new());
    for args in [
        &["frobnicate"] as &[&str],
        &["endpoint", "get", "a b"],
        &["endpoint"],
        &["config", "set", "trace=on", "trace=off"],
        &["endpoint", "config", "7", "port.http=80"],
        &["endpoint", "config", "7", "port.http=80/tcp", "port.http="],
    ] {
        let ran = agent.run(args);
        assert_eq!((ran.code, ran.out.as_str()), (Some(3), ""), "{args:?}: {ran:?}");
        assert!(!ran.err.is_empty());
    }
    assert_eq!(agent.seen(), Vec::<String>::new());
    for args in [&["--help"] as &[&str], &["--version"], &["endpoint", "list", "--help"]] {
        let ran = Ran::from(wharf(args).output().expect("runs"));
        assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn the_endpoint_list_for_scripts_is_the_apis() {
    let all = json!([endpoint(7, "abc"), endpoint(8, "abd")]);
    let agent = Agent::start(vec![
        Answer::new("GET /v1/endpoint", 200, &all),
        Answer::new("GET /v1/endpoint?state=ready&label=k8s:app%3Dweb", 200, "[]"),
    ]);
    let ran = agent.run(&["endpoint", "list", "-o", "json"]);
    assert_eq!(ran.code, Some(0));
    assert!(!ran.out.contains('\x1b'), "{:?}", ran.out);
    let got: Value = serde_json::from_str(&ran.out).expect("JSON");
    assert_eq!(got, all);
    for key in ["id", "epoch", "state", "container_id", "ifname", "identity", "labels", "ipv4", "ipv6", "ifindex"] {
        assert!(got[0].get(key).is_some(), "{key}");
    }
    let yaml = agent.run(&["endpoint", "list", "-o", "yaml"]);
    assert!(yaml.out.starts_with("- id: 7\n") && !yaml.out.contains('\x1b'), "{:?}", yaml.out);
    let table = agent.run(&["endpoint", "list"]);
    assert!(table.out.starts_with("ID  STATE  ") && !table.out.contains('\x1b'), "{:?}", table.out);
    let coloured = agent.run(&["endpoint", "list", "--color", "always"]);
    assert!(coloured.out.contains("\x1b["), "{:?}", coloured.out);
    let none = agent.run(&["endpoint", "list", "--state", "ready", "--label", "k8s:app=web", "-o", "json"]);
    assert_eq!((none.code, none.out.as_str()), (Some(0), "[]\n"), "{none:?}");
}

#[test]
fn a_list_that_is_watched_goes_on_with_each_change() {
    let regenerating = |mut e: Value| {
        e["state"] = json!("regenerating");
        e
    };
    let answers = || {
        vec![
            Answer::new("GET /v1/endpoint", 200, json!([endpoint(7, "abc")])),
            Answer::new("GET /v1/endpoint", 200, json!([endpoint(7, "abc")])),
            Answer::new("GET /v1/endpoint", 200, json!([regenerating(endpoint(7, "abc")), endpoint(8, "abd")])),
            Answer::new("GET /v1/endpoint", 200, json!([endpoint(8, "abd")])),
            Answer::new("GET /v1/endpoint", 503, json!({"code": "unavailable", "message": "the agent is stopping"})),
        ]
    };
    let agent = Agent::start(answers());
    let ran = agent.run(&["endpoint", "list", "--watch"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.err.contains("the agent is stopping"), "{ran:?}");
    let seen: Vec<Vec<&str>> = ran.out.lines().map(|l| l.split_whitespace().take(2).collect()).collect();
    assert_eq!(seen, [["ID", "STATE"], ["7", "ready"], ["7", "regenerating"], ["8", "ready"], ["7", "deleted"]]);
    assert!(ran.out.lines().all(|l| l.chars().count() <= 100), "{}", ran.out);
    let agent = Agent::start(answers());
    let ran = agent.run(&["endpoint", "list", "-w", "-o", "json"]);
    let seen: Vec<(Value, Value)> = ran
        .out
        .lines()
        .map(|l| serde_json::from_str::<Value>(l).expect("an object a line"))
        .map(|v| (v["change"].clone(), v["endpoint"]["id"].clone()))
        .collect();
    let wanted = [("added", 7), ("changed", 7), ("added", 8), ("deleted", 7)].map(|(c, id)| (json!(c), json!(id)));
    assert_eq!(seen, wanted);
}

#[test]
fn audit_prints_findings_and_nothing_else() {
    let healthy = json!({"findings": [], "examined": {"links": 2}});
    let agent = Agent::start(vec![Answer::new("GET /v1/audit", 200, &healthy)]);
    let ran = agent.run(&["audit"]);
    assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (Some(0), "", "nothing amiss (examined: links 2)\n"));
    let ran = agent.run(&["audit", "-o", "json"]);
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""));
    assert_eq!(serde_json::from_str::<Value>(&ran.out).expect("JSON"), healthy);

    let sick = json!({"findings": [finding("wh1"), finding("wh2\nlink wh3")], "examined": {}});
    let agent = Agent::start(vec![Answer::new("GET /v1/audit", 200, &sick)]);
    let ran = agent.run(&["audit"]);
    assert_eq!(ran.code, Some(1));
    assert_eq!(ran.out, "link wh1: no endpoint has it\nlink wh2\\nlink wh3: no endpoint has it\n");
    assert_eq!(agent.run(&["audit", "-o", "yaml"]).code, Some(1));
}

#[test]
fn a_repair_is_judged_by_a_second_look() {
    let found = json!({"findings": [finding("wh1")], "examined": {}});
    let none = json!({"findings": [], "examined": {}});
    let mut mended = found.clone();
    mended["findings"][0]["repair"] = json!("mended");
    let agent = Agent::start(vec![
        Answer::new("POST /v1/audit", 200, &mended),
        Answer::new("GET /v1/audit", 200, &none),
        Answer::new("GET /v1/audit", 200, &found),
    ]);
    let ran = agent.run(&["audit", "--repair"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), ""));
    assert!(ran.err.contains("repair: link wh1"), "{ran:?}");
    let ran = agent.run(&["audit", "--repair", "-o", "json"]);
    assert_eq!(ran.code, Some(1), "what the second look still finds is not well");
    let both: Value = serde_json::from_str(&ran.out).expect("JSON");
    assert_eq!(both["remaining"]["findings"].as_array().map(Vec::len), Some(1));
    assert_eq!(agent.seen(), ["POST /v1/audit", "GET /v1/audit", "POST /v1/audit", "GET /v1/audit"]);
}

#[test]
fn a_delete_asks_for_what_it_was_told() {
    let gone = json!({"deleted": [7], "leases_released": [], "errors": []});
    let partly = json!({"deleted": [7], "leases_released": [],
                        "errors": [{"step": "unpin", "endpoint": "7", "message": "busy"}]});
    let agent = Agent::start(vec![
        Answer::new("DELETE /v1/endpoint/abc", 200, &gone),
        Answer::new("DELETE /v1/endpoint/7?no-ip-release=true&epoch=5", 206, &partly),
        Answer::new("DELETE /v1/endpoint?container-id=abcdef", 200, &gone),
    ]);
    let ran = agent.run(&["endpoint", "delete", "abc"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "endpoint 7 deleted\n"), "{ran:?}");
    let ran = agent.run(&["endpoint", "delete", "7", "--keep-ip", "--epoch", "5"]);
    assert_eq!(ran.code, Some(1), "a step failed: {ran:?}");
    assert!(ran.out.contains("failed: unpin of 7: busy"), "{ran:?}");
    let ran = agent.run(&["endpoint", "delete", "--container-id", "abcdef"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
}

#[test]
fn health_and_regeneration_tell_by_exit_status() {
    let health =
        |overall: &str| json!({"overall": overall, "bpf": "ok", "policy": "ok", "connected": overall, "findings": []});
    let mut left = health("failing");
    left["findings"] =
        json!([{"object": "program", "subject": "deliver", "problem": "is missing", "remedy": "--level datapath"}]);
    let mut failed = endpoint(7, "abc");
    failed["status"]["last_error"] = json!("no such device");
    let agent = Agent::start(vec![
        Answer::new("GET /v1/endpoint/7/healthz", 200, health("ok")),
        Answer::new("GET /v1/endpoint/7/healthz", 200, health("failing")),
        Answer::new("PATCH /v1/endpoint/7", 200, endpoint(7, "abc")),
        Answer::new("GET /v1/endpoint/7/healthz", 200, health("ok")),
        Answer::new("PATCH /v1/endpoint/7", 200, failed),
        Answer::new("GET /v1/endpoint/7/healthz", 200, health("ok")),
        Answer::new("PATCH /v1/endpoint/7", 200, endpoint(7, "abc")),
        Answer::new("GET /v1/endpoint/7/healthz", 200, left),
    ]);
    assert_eq!(agent.run(&["endpoint", "health", "7"]).code, Some(0));
    assert_eq!(agent.run(&["endpoint", "health", "7"]).code, Some(1));
    assert_eq!(agent.run(&["endpoint", "regenerate", "7", "--level", "datapath"]).code, Some(0));
    let ran = agent.run(&["endpoint", "regenerate", "7"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.out.contains("no such device"), "{ran:?}");
    let ran = agent.run(&["endpoint", "regenerate", "7"]);
    assert_eq!(ran.code, Some(1), "the build succeeded and did not mend it: {ran:?}");
    assert!(ran.err.contains("still amiss: program deliver: is missing"), "{ran:?}");
    assert!(ran.err.contains("-> --level datapath"), "{ran:?}");
    let patches: Vec<String> = agent.seen().into_iter().filter(|r| r.starts_with("PATCH")).collect();
    assert_eq!(
        patches,
        [
            r#"PATCH /v1/endpoint/7 {"regenerate":"datapath"}"#,
            r#"PATCH /v1/endpoint/7 {"regenerate":"policy"}"#,
            r#"PATCH /v1/endpoint/7 {"regenerate":"policy"}"#
        ]
    );
}

#[test]
fn an_endpoints_settings_are_changed_in_one_request() {
    let mut changed = endpoint(7, "abc");
    changed["policy_enforcement"] = json!("always");
    changed["named_ports"] = json!({"http": {"port": 80, "protocol": "tcp"}});
    let agent = Agent::start(vec![
        Answer::new("GET /v1/endpoint/7", 200, endpoint(7, "abc")),
        Answer::new("PATCH /v1/endpoint/7", 200, changed),
    ]);
    let ran = agent.run(&["endpoint", "config", "7", "policy-enforcement=always", "port.http=80/tcp", "port.old="]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.out.contains("always (its own") && ran.out.contains("http 80/tcp"), "{ran:?}");
    let patch = r#"{"policy_enforcement":"always","named_ports":{"http":{"port":80,"protocol":"tcp"},"old":null}}"#;
    // One request for the change; the last for output.
    let seen = ["GET /v1/endpoint/7".to_owned(), format!("PATCH /v1/endpoint/7 {patch}"), "GET /v1/proxy".to_owned()];
    assert_eq!(agent.seen(), seen);
}

/// A proxy with a listener of endpoint 7.
fn proxy(state: &str) -> Value {
    let serves = state == "serving";
    let listener = json!({
        "name": "ingress-15000", "port": 15000, "direction": "ingress", "passes": ["GET /public..."], "fails_open": false,
        "endpoints": [7], "acknowledged": serves
    });
    let wait = json!({"listener": "ingress-15000", "endpoint": 9, "since_unix_ms": 1, "until_unix_ms": 3001});
    json!({
        "state": state, "since_unix_ms": 1, "supervised": false, "restarts": 0, "streams": u8::from(serves),
        "bootstrap": "/run/wharf/proxy/bootstrap.json", "requests": {"forwarded": 3, "denied": 1, "failed": 0},
        "records_lost": 0, "completions_pending": 1, "completions_timed_out": 0, "outstanding": [],
        "listeners": [listener], "completions": [wait]
    })
}

#[test]
fn a_proxy_that_does_not_serve_what_rules_need_is_not_well() {
    for (state, code) in [("serving", 0), ("absent", 1), ("starting", 1), ("waiting", 1)] {
        let agent = Agent::start(vec![Answer::new("GET /v1/proxy", 200, proxy(state))]);
        let ran = agent.run(&["proxy", "status"]);
        assert_eq!((ran.code, ran.out.contains(state)), (Some(code), true), "{ran:?}");
        let ran = agent.run(&["proxy", "listeners"]);
        assert_eq!((ran.code, ran.out.contains("GET /public...")), (Some(0), true), "{ran:?}");
        let ran = agent.run(&["proxy", "completions", "-o", "json"]);
        assert_eq!(ran.code, Some(0));
        assert_eq!(serde_json::from_str::<Value>(&ran.out).expect("JSON"), proxy(state)["completions"]);
    }
}

#[test]
fn an_endpoint_is_shown_with_its_redirects_and_without_a_proxy_that_answers() {
    let get = Answer::new("GET /v1/endpoint/7", 200, endpoint(7, "abc"));
    let agent = Agent::start(vec![get, Answer::new("GET /v1/proxy", 200, proxy("absent"))]);
    let ran = agent.run(&["endpoint", "get", "7"]);
    let line = "Redirects:          ingress, port 15000: GET /public...; no proxy serves\n";
    assert_eq!((ran.code, ran.out.contains(line)), (Some(0), true), "{ran:?}");
    let older =
        Agent::start(vec![Answer::new("GET /v1/endpoint/7", 200, endpoint(7, "abc")), not_found("GET /v1/proxy")]);
    let ran = older.run(&["endpoint", "get", "7"]);
    assert_eq!((ran.code, ran.out.contains("Redirects:          not known: ")), (Some(0), true), "{ran:?}");
    let ran = older.run(&["endpoint", "get", "7", "-o", "json"]);
    assert_eq!((ran.code, older.seen().len()), (Some(0), 3), "the API's object alone: {ran:?}");
}

#[test]
fn settings_are_changed_in_one_request() {
    let before =
        json!({"effective": {"log-level": "info", "mtu": "1500", "trace": "true"}, "mutable": ["log-level", "trace"]});
    let view =
        json!({"effective": {"log-level": "debug", "mtu": "1500", "trace": "true"}, "mutable": ["log-level", "trace"]});
    let agent = Agent::start(vec![
        Answer::new("PATCH /v1/config", 200, &view),
        Answer::new("GET /v1/config", 200, &before),
        Answer::new("GET /v1/config", 200, &view),
        Answer::new(
            "GET /v1/map/7.CONFIG",
            200,
            json!({
                "map": {"name": "7/CONFIG", "kind": "array", "entries": 1, "max_entries": 1, "memlock_bytes": 0},
                "rows": [{"key": "0", "flags": "gate"}]
            }),
        ),
    ]);
    let ran = agent.run(&["config", "set", "log-level=debug", "trace=on"]);
    // Only the change.
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "log-level: info -> debug\ntrace: true (as before)\n"));
    assert_eq!(agent.seen(), ["GET /v1/config", r#"PATCH /v1/config {"log_level":"debug","trace":true}"#]);
    let ran = agent.run(&["config", "get", "log-level"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "debug\n"));
    assert_eq!(agent.run(&["config", "get", "colour"]).code, Some(1));
    let ran = agent.run(&["bpf", "map", "get", "7/CONFIG"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "KEY  FLAGS\n0    gate\n"), "{ran:?}");
}

fn drop_event(reason: &str) -> Value {
    json!({"type": "drop", "time_unix_ms": 0, "endpoint": 7, "epoch": 1, "identity": 5, "direction": "egress",
           "reason": reason, "ethertype": "IPv4", "protocol": "UDP", "message": null, "source": "10.0.0.1", "source_port": 1,
           "destination": "10.0.0.2", "destination_port": 2, "length": 60})
}

#[test]
fn monitor_ends_when_it_was_asked_to() {
    let agent_event =
        json!({"type": "agent", "time_unix_ms": 0, "endpoint": null, "event": "agent-started", "message": "x"});
    let events = [
        agent_event,
        json!({"type": "lost", "count": 3}),
        drop_event("malformed"),
        drop_event("multicast-unsupported"),
    ];
    let agent = Agent::start(vec![Answer::open_stream("GET /v1/monitor", &events)]);
    let ran = agent.run(&["monitor", "--type", "drop", "-n", "1"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let lines: Vec<&str> = ran.out.lines().collect();
    assert_eq!(lines.len(), 2, "a gap and a drop: {lines:?}");
    assert_eq!(lines.first(), Some(&"-- 3 events lost here --"));
    assert!(lines.last().is_some_and(|l| l.contains(" drop  endpoint 7 egress malformed: ")), "{lines:?}");

    let ran = agent.run(&["monitor", "--reason", "multicast-unsupported", "-n", "1", "-o", "json"]);
    let last: Value = serde_json::from_str(ran.out.lines().last().unwrap_or_default()).expect("a line is an object");
    assert_eq!(last, drop_event("multicast-unsupported"));

    // Only two events are packets.
    let ran = agent.run(&["bpf", "events", "list", "--all", "--for", "1h", "-n", "2"]);
    assert_eq!((ran.code, ran.out.lines().count()), (Some(0), 3), "{ran:?}");
    // The time ends first.
    let ran = agent.run(&["monitor", "--for", "50ms", "-n", "100"]);
    assert_eq!((ran.code, ran.out.contains("multicast")), (Some(0), false), "{ran:?}");
    let hidden = "wharf: drops with the reason multicast-unsupported are not shown; `--all` or `--reason` shows them\n";
    assert_eq!(ran.err, hidden, "said once");
}

#[test]
fn who_asks_for_traces_is_told_when_nothing_traces() {
    let config = |trace: &str| json!({"effective": {"trace": trace}, "mutable": []});
    let of_endpoint = |trace: &str| json!({"desired": {"trace": trace}, "realized": {"trace": trace}});
    for (node, endpoint_traces, hinted) in
        [("false", "false", true), ("false", "true", false), ("true", "false", false)]
    {
        let agent = Agent::start(vec![
            Answer::open_stream("GET /v1/monitor", &[]),
            Answer::new("GET /v1/config", 200, config(node)),
            Answer::new("GET /v1/endpoint", 200, json!([endpoint(7, "abc")])),
            Answer::new("GET /v1/endpoint/7/config", 200, of_endpoint(endpoint_traces)),
        ]);
        let ran = agent.run(&["monitor", "--type", "trace", "--for", "10ms"]);
        assert_eq!((ran.code, ran.err.contains("--trace on")), (Some(0), hinted), "{ran:?}");
    }
}

#[test]
fn what_is_watched_is_shown_again_after_each_change() {
    let namespace = |team: &str| json!([{"name": "shop", "labels": {"team": team}}]);
    let answers = || {
        vec![
            Answer::new("GET /v1/namespace", 200, namespace("a")),
            Answer::new("GET /v1/namespace", 200, namespace("a")),
            Answer::new("GET /v1/namespace", 200, namespace("b")),
            Answer::new("GET /v1/namespace", 503, json!({"code": "unavailable", "message": "the agent is stopping"})),
        ]
    };
    let ran = Agent::start(answers()).run(&["namespace", "list", "--watch"]);
    let shown = "NAME  LABELS\nshop  team=a\n\nNAME  LABELS\nshop  team=b\n";
    assert_eq!((ran.code, ran.out.as_str()), (Some(1), shown), "{ran:?}");
    let ran = Agent::start(answers()).run(&["namespace", "list", "-l", "team=b", "-w", "-o", "json"]);
    assert_eq!(ran.out, "[]\n[{\"name\":\"shop\",\"labels\":{\"team\":\"b\"}}]\n", "{ran:?}");
}

#[test]
fn lists_are_narrowed_by_namespace_and_selector() {
    let mut shop = endpoint(8, "abd");
    (shop["pod_name"], shop["pod_namespace"]) = (json!("web"), json!("shop"));
    shop["labels"] = json!(["k8s:app=web"]);
    let agent = Agent::start(vec![
        Answer::new("GET /v1/endpoint", 200, json!([endpoint(7, "abc"), &shop])),
        Answer::new("GET /v1/endpoint/pod-name:shop%2Fweb", 200, &shop),
        Answer::new("GET /v1/proxy", 500, json!({"code": "internal", "message": "none"})),
        Answer::new(
            "GET /v1/map",
            200,
            json!([
                {"name": "8/CONFIG", "kind": "array", "entries": 1, "max_entries": 1, "memlock_bytes": 0},
                {"name": "9/CONFIG", "kind": "array", "entries": 1, "max_entries": 1, "memlock_bytes": 0}
            ]),
        ),
    ]);
    let ids = |args: &[&str]| -> Vec<u64> {
        let ran = agent.run(&[args, &["-o", "json"]].concat());
        let all: Value = serde_json::from_str(&ran.out).expect("JSON");
        all.as_array().into_iter().flatten().filter_map(|e| e["id"].as_u64()).collect()
    };
    assert_eq!(ids(&["endpoint", "list", "-n", "shop"]), [8]);
    assert_eq!(ids(&["endpoint", "list", "-n", "default"]), [7]);
    assert_eq!(ids(&["endpoint", "get", "-l", "app=web"]), [8]);
    assert_eq!(ids(&["endpoint", "list", "-l", "!app"]), Vec::<u64>::new());
    assert_eq!(ids(&["endpoint", "get"]), [7, 8]);
    let ran = agent.run(&["endpoint", "get", "web", "-n", "shop"]);
    assert!(ran.code == Some(0) && ran.out.contains("shop/web"), "{ran:?}");
    assert_eq!(agent.run(&["endpoint", "get", "7", "-l", "app=web"]).code, Some(3));
    let ran = agent.run(&["bpf", "map", "list"]);
    assert!(ran.out.contains("8/CONFIG") && !ran.out.contains("9/CONFIG"), "{ran:?}");
    assert!(ran.err.contains("1 map of prepared programs not shown"), "{ran:?}");
    assert!(agent.run(&["bpf", "map", "list", "--all"]).out.contains("9/CONFIG"));
}

#[test]
fn a_stream_that_the_agent_ends_is_exit_two() {
    let agent = Agent::start(vec![Answer::stream("GET /v1/monitor", &[drop_event("malformed")])]);
    let ran = agent.run(&["monitor"]);
    assert_eq!((ran.code, ran.out.lines().count()), (Some(2), 1), "{ran:?}");
    assert!(ran.err.starts_with("wharf: the agent ended the stream"), "{ran:?}");
}

#[test]
fn a_reader_that_left_is_a_silent_end() {
    let sick = json!({"findings": [finding("wh1")], "examined": {}});
    let agent = Agent::start(vec![
        Answer::new("GET /v1/endpoint", 200, json!([endpoint(7, "abc")])),
        Answer::new("GET /v1/audit", 200, &sick),
        Answer::open_stream("GET /v1/monitor", &[drop_event("malformed")]),
    ]);
    for (args, code) in [(&["endpoint", "list"] as &[&str], 0), (&["monitor"], 0), (&["audit", "-o", "json"], 1)] {
        // The first write fails.
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = agent.command(args).stdout(writer).stderr(Stdio::piped()).output().expect("runs");
        let ran = Ran::from(output);
        assert_eq!((ran.code, ran.err.as_str()), (Some(code), ""), "{args:?}");
    }
}

#[test]
fn completions_and_man_pages() {
    for shell in ["bash", "zsh", "fish"] {
        let ran = Ran::from(wharf(&["completion", shell]).output().expect("runs"));
        assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""));
        assert!(ran.out.contains("regenerate"), "{shell}");
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().to_str().expect("UTF-8");
    assert_eq!(Ran::from(wharf(&["man", path]).output().expect("runs")).code, Some(0));
    for page in ["wharf.1", "wharf-status.1", "wharf-endpoint-delete.1", "wharf-bpf-map-get.1"] {
        let text = std::fs::read_to_string(dir.path().join(page)).expect(page);
        assert!(text.contains("SYNOPSIS"), "{page}");
    }
    let ran = Ran::from(wharf(&["man", "/nonexistent/dir"]).output().expect("runs"));
    assert_eq!(ran.code, Some(1));
    assert!(ran.err.contains("/nonexistent/dir"), "{ran:?}");
}

#[test]
fn bash_offers_nothing_when_the_agent_does_not_answer() {
    let agent = Agent::start(Vec::new());
    for line in [&["endpoint", "get", ""] as &[&str], &["policy", "delete", "NetworkPolicy", ""], &["ns", "delete", ""]]
    {
        let got = offered(&agent, line);
        assert!(got.iter().all(String::is_empty), "{line:?}: {got:?}");
    }
}

/// Bash's completions, by the generated script.
fn offered(agent: &Agent, line: &[&str]) -> Vec<String> {
    let script = Ran::from(wharf(&["completion", "bash"]).output().expect("runs")).out;
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("wharf.bash");
    std::fs::write(&file, script).expect("written");
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_wharf"));
    let path = format!("{}:/usr/bin:/bin", program.parent().expect("a directory").display());
    // Bash passes the words, the current index, and the function's name.
    let test = r#"source "$1"; shift; COMP_WORDS=(wharf "$@"); COMP_CWORD=$#
        COMP_LINE="${COMP_WORDS[*]}"; COMP_POINT=${#COMP_LINE}
        _wharf_candidates wharf "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
        printf '%s\n' "${COMPREPLY[@]}""#;
    let mut bash = std::process::Command::new("bash");
    bash.args(["--norc", "-c", test, "bash"]).arg(&file).args(line);
    let ran = Ran::from(bash.env("PATH", path).env("WHARF_SOCKET", agent.socket()).output().expect("bash runs"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    ran.out.lines().map(str::to_owned).collect()
}

#[test]
fn bash_offers_what_the_agent_knows() {
    let mut hostile = endpoint(9, "fedcba");
    hostile["pod_name"] = json!("$(touch /tmp/x)");
    let map = |name: &str| json!({"name": name, "kind": "array", "entries": 1, "max_entries": 1, "memlock_bytes": 0});
    let policy = |kind: &str, namespace: Option<&str>, name: &str| {
        json!({"kind": kind, "namespace": namespace, "name": name, "tier": "", "subject": "", "isolates": [],
               "ingress_rules": 0, "egress_rules": 0, "file": "", "line": 1, "endpoints": []})
    };
    let policies = json!({
        "revision": 1, "realized": 1, "enforcement": "default", "audit": false,
        "rows": {"peers": 0, "peers_limit": 0, "ports": 0, "ports_limit": 0, "cells": 0, "cells_limit": 0, "sets": 0,
                 "sets_limit": 0},
        "policies": [policy("NetworkPolicy", Some("shop"), "db"), policy("NetworkPolicy", Some("store"), "web"),
                     policy("ClusterNetworkPolicy", None, "all")]
    });
    let agent = Agent::start(vec![
        Answer::new("GET /v1/endpoint", 200, json!([endpoint(7, "abc-1"), endpoint(8, "abd-1"), hostile])),
        Answer::new("GET /v1/map", 200, json!([map("ENDPOINTS"), map("7/CONFIG")])),
        Answer::new("GET /v1/policy", 200, policies),
        Answer::new("GET /v1/config", 200, json!({"effective": {"log-level": "info", "mtu": "1500"}, "mutable": []})),
    ]);
    let state = tempfile::tempdir().expect("a directory");
    std::fs::write(state.path().join("web.json"), "{}").expect("a record");
    let state = format!("--state-dir={}", state.path().display());
    for (line, wanted) in [
        (&["endpoint", "get", ""] as &[&str], &["7", "8", "9"] as &[&str]),
        (&["policy", "delete", "NetworkPolicy", ""], &["db", "web"]),
        (&["policy", "delete", "NetworkPolicy", "-n", "shop", "d"], &["db"]),
        (&["policy", "delete", "ClusterNetworkPolicy", ""], &["all"]),
        (&["policy", "get", "sh"], &["shop/db"]),
        (&["sandbox", &state, "rm", ""], &["web"]),
        (&["cand"], &[]),
        (&["man"], &[]),
        (&["endpoint", "get", "ab"], &["abc-1", "abd-1"]),
        (&["endpoint", "get", "$"], &[]),
        (&["monitor", "--endpoint", ""], &["7", "8", "9"]),
        (&["bpf", "map", "get", "EN"], &["ENDPOINTS"]),
        (&["config", "get", "m"], &["mtu"]),
        (&["config", "set", "log-f"], &["log-format=text", "log-format=json"]),
        (&["config", "set", "log-format", "="], &["text", "json"]),
        (&["config", "set", "log-format", "=", "j"], &["json"]),
        // What clap knows is still offered.
        (&["endpoint", "reg"], &["regenerate"]),
    ] {
        let got = offered(&agent, line);
        let got: Vec<&str> = got.iter().map(String::as_str).filter(|word| !word.is_empty()).collect();
        assert_eq!(got, wanted, "{line:?}");
    }
}
