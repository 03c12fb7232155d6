//! Policy and namespace commands for scripts: exit status, output, requests.

use std::{fs, path::Path};

use serde_json::{Value, json};

use crate::agent::{Agent, Answer, Ran, wharf};

const VALID: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: NAME, namespace: shop}\n\
                     spec: {podSelector: {matchLabels: {app: db}}, ingress: [{ports: [{port: 5432}]}]}\n";

/// A valid document `NAME.yaml` for each name.
fn documents(names: &[&str]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for name in names {
        fs::write(directory.path().join(format!("{name}.yaml")), VALID.replace("NAME", name)).expect("a file");
    }
    directory
}

fn run_in(agent: &Agent, directory: &Path, args: &[&str]) -> Ran {
    Ran::from(agent.command(args).current_dir(directory).output().expect("runs"))
}

fn change(revision: u64, realized: u64, put: &[&str], removed: &[&str]) -> Value {
    json!({"revision": revision, "realized": realized, "put": put, "removed": removed})
}

fn policies(revision: u64, realized: u64) -> Value {
    let policy = |namespace: &str, name: &str| {
        json!({
            "kind": "NetworkPolicy", "namespace": namespace, "name": name, "tier": "namespaced",
            "subject": "k8s:app=db", "isolates": ["ingress"], "ingress_rules": 1, "egress_rules": 0,
            "file": "db.yaml", "line": 4, "endpoints": [7]
        })
    };
    json!({
        "revision": revision, "realized": realized, "enforcement": "default", "audit": false,
        "rows": {"peers": 1, "peers_limit": 10, "ports": 1, "ports_limit": 10, "cells": 1, "cells_limit": 10,
                 "sets": 1, "sets_limit": 10},
        "policies": [policy("shop", "db"), policy("other", "db"), policy("shop", "web")]
    })
}

fn refused(code: &str, message: &str) -> Value {
    json!({"code": code, "message": message})
}

#[test]
fn files_are_sent_one_after_the_other_when_all_are_valid() {
    let agent = Agent::start(vec![
        Answer::new("PUT /v1/policy", 200, change(6, 6, &["NetworkPolicy shop/a"], &[])),
        Answer::new("PUT /v1/policy", 200, change(7, 7, &["NetworkPolicy shop/b"], &[])),
    ]);
    let directory = documents(&["a", "b"]);
    let ran = run_in(&agent, directory.path(), &["policy", "import", "a.yaml", "b.yaml"]);
    let wanted = "NetworkPolicy shop/a: put\nNetworkPolicy shop/b: put\nrevision 7 is in force\n";
    assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (Some(0), wanted, ""));
    let bodies: Vec<Value> = agent
        .seen()
        .iter()
        .filter(|seen| !seen.starts_with("GET "))
        .map(|seen| serde_json::from_str(seen.strip_prefix("PUT /v1/policy ").expect("a PUT")).expect("JSON"))
        .collect();
    let body = |name: &str| json!({"file": format!("{name}.yaml"), "text": VALID.replace("NAME", name)});
    assert_eq!(bodies, [body("a"), body("b")]);
}

#[test]
fn an_import_warns_of_a_policy_that_selects_no_endpoint() {
    let mut list = policies(6, 6);
    list["policies"][0]["endpoints"] = json!([]);
    let agent = Agent::start(vec![
        Answer::new("PUT /v1/policy", 200, change(6, 6, &["NetworkPolicy shop/db"], &[])),
        Answer::new("GET /v1/policy", 200, list),
        Answer::new("GET /v1/endpoint", 200, "[]"),
    ]);
    let directory = documents(&["db"]);
    let ran = run_in(&agent, directory.path(), &["policy", "import", "db.yaml"]);
    let out = "NetworkPolicy shop/db: put\nrevision 6 is in force\n";
    let err = "wharf: warning: NetworkPolicy shop/db selects no endpoint of this node (subject: k8s:app=db)\n  hint: this node has no endpoints\n";
    assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (Some(0), out, err));
}

#[test]
fn nothing_is_sent_when_one_file_is_refused() {
    let agent = Agent::start(Vec::new());
    let directory = documents(&["a"]);
    fs::write(directory.path().join("b.yaml"), VALID.replace("NAME", "b").replace("podSelector", "podselector"))
        .expect("a file");
    let ran = run_in(&agent, directory.path(), &["policy", "import", "."]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(1), ""), "{ran:?}");
    let lines: Vec<&str> = ran.err.lines().collect();
    assert!(lines[0].starts_with("./b.yaml:4: NetworkPolicy shop/b, spec.podselector: is no field here"), "{ran:?}");
    assert_eq!(lines[1..], ["wharf: import policies: 1 of 2 files refused; nothing was sent"]);
    assert_eq!(agent.seen(), Vec::<String>::new());
}

#[test]
fn a_file_without_policies_is_not_sent() {
    let agent = Agent::start(Vec::new());
    let directory = documents(&[]);
    fs::write(directory.path().join("a.yaml"), "# nothing yet\n").expect("a file");
    let ran = run_in(&agent, directory.path(), &["policy", "import", "a.yaml", "-o", "json"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "[]\n"), "{ran:?}");
    assert_eq!((ran.err.as_str(), agent.seen().len()), ("a.yaml: there is no policy in it\n", 0));
}

#[test]
fn a_refusal_of_the_agent_is_a_line_for_each_reason_and_what_was_put_is_told() {
    let reasons = "b.yaml:4: NetworkPolicy shop/b: first\nb.yaml:5: NetworkPolicy shop/b: second \u{1b}[2J";
    let agent = Agent::start(vec![
        Answer::new("PUT /v1/policy", 200, change(6, 6, &["NetworkPolicy shop/a"], &[])),
        Answer::new("PUT /v1/policy", 400, refused("invalid-request", reasons)),
    ]);
    let directory = documents(&["a", "b", "c"]);
    let ran = run_in(&agent, directory.path(), &["policy", "import", "."]);
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (Some(1), "NetworkPolicy shop/a: put\nrevision 6 is in force\n"),
        "{ran:?}"
    );
    let wanted = "b.yaml:4: NetworkPolicy shop/b: first\nb.yaml:5: NetworkPolicy shop/b: second \\u{1b}[2J\n\
                  wharf: import policies: the agent refused ./b.yaml\n";
    assert_eq!(ran.err, wanted);
    assert_eq!(agent.seen().iter().filter(|seen| seen.starts_with("PUT ")).count(), 2);
}

#[test]
fn without_an_agent_an_import_is_exit_2() {
    let directory = documents(&["a"]);
    let mut command = wharf(&["policy", "import", "a.yaml", "--socket", "no.sock"]);
    let ran = Ran::from(command.current_dir(directory.path()).output().expect("runs"));
    assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{ran:?}");
    assert!(ran.err.starts_with("wharf: import policies: a.yaml: connecting to the agent at no.sock"), "{ran:?}");
}

#[test]
fn a_change_that_is_not_in_force_is_exit_1() {
    let agent = Agent::start(vec![Answer::new("PUT /v1/policy", 200, change(7, 6, &["NetworkPolicy shop/a"], &[]))]);
    let directory = documents(&["a"]);
    let ran = run_in(&agent, directory.path(), &["policy", "import", "a.yaml"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.out.ends_with("revision 7 is not in force yet, 6 is; `wharf policy get` tells why\n"), "{ran:?}");
}

#[test]
fn policies_are_found_by_name() {
    let agent = Agent::start(vec![Answer::new("GET /v1/policy", 200, policies(7, 7))]);
    for (name, found) in [("db", 2), ("shop/db", 1), ("shop/web", 1)] {
        let ran = agent.run(&["policy", "get", name, "-o", "json"]);
        let json: Value = serde_json::from_str(&ran.out).expect("JSON");
        assert_eq!((ran.code, json["policies"].as_array().map(Vec::len)), (Some(0), Some(found)), "{name}");
    }
    let ran = agent.run(&["policy", "get", "none"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(1), ""), "{ran:?}");
    assert!(ran.err.contains("no policy is named none"), "{ran:?}");
    let ran = agent.run(&["policy", "get", "-o", "json"]);
    assert_eq!(serde_json::from_str::<Value>(&ran.out).expect("JSON"), policies(7, 7));
}

#[test]
fn policies_are_deleted_by_kind_namespace_and_name() {
    let removed = change(8, 8, &[], &["NetworkPolicy shop/db"]);
    let held = refused("exists", "delete NetworkPolicy default/db: it comes from /etc/wharf/policy/db.yaml");
    let agent = Agent::start(vec![
        Answer::new("DELETE /v1/policy?kind=NetworkPolicy&namespace=shop&name=db", 200, removed.clone()),
        Answer::new("DELETE /v1/policy?kind=NetworkPolicy&namespace=default&name=db", 409, held),
        Answer::new("DELETE /v1/policy?kind=ClusterNetworkPolicy&name=a", 404, refused("not-found", "no policy a")),
        Answer::new("DELETE /v1/policy?all=true", 200, removed),
    ]);
    let told = "NetworkPolicy shop/db: removed\nrevision 8 is in force\n";
    for (args, code, out, err) in [
        (&["networkpolicy", "db", "-n", "shop"] as &[&str], 0, told, ""),
        (&["NetworkPolicy", "db"], 1, "", "it comes from /etc/wharf/policy/db.yaml"),
        (&["ClusterNetworkPolicy", "a"], 1, "", "no policy a"),
        (&["ClusterNetworkPolicy", "a", "-n", "shop"], 3, "", "a clusterwide kind has no namespace"),
        (&["--all"], 0, told, ""),
    ] {
        let ran = agent.run(&[&["policy", "delete"], args].concat());
        assert_eq!((ran.code, ran.out.as_str()), (Some(code), out), "{args:?}: {ran:?}");
        assert!(ran.err.contains(err), "{args:?}: {ran:?}");
    }
    assert_eq!(agent.seen().len(), 4, "a wrong command line sends nothing");
}

#[test]
fn an_explanation_is_exit_0_or_1_by_its_verdict() {
    let path = "GET /v1/policy/explain?from=7&to=10.88.0.9&protocol=tcp&port=80";
    for (verdict, code) in [("accept", 0), ("deny", 1)] {
        let answer = json!({
            "verdict": verdict,
            "ingress": {"endpoint": 9, "enforced": true, "verdict": verdict, "isolated_by": ["NetworkPolicy shop/db"],
                        "rule_set": 3, "peer_class": 1, "port_class": 2}
        });
        let agent = Agent::start(vec![Answer::new(path, 200, answer.clone())]);
        let args = ["policy", "explain", "--from", "7", "--to", "10.88.0.9", "--port", "80"];
        let ran = agent.run(&args);
        assert_eq!(ran.code, Some(code), "{ran:?}");
        assert!(ran.out.starts_with(if code == 0 { "accepted: " } else { "denied: NetworkPolicy shop/db" }), "{ran:?}");
        let ran = agent.run(&[&args[..], &["-o", "json"]].concat());
        assert_eq!((ran.code, serde_json::from_str::<Value>(&ran.out).ok()), (Some(code), Some(answer)));
    }
    let path = "GET /v1/policy/explain?from=192.0.2.7&to=pod-name:a%2Fb&protocol=icmpv6";
    let agent = Agent::start(vec![Answer::new(path, 404, refused("not-found", "no endpoint a/b"))]);
    let args = ["policy", "explain", "--from", "192.0.2.7", "--to", "pod-name:a/b", "--protocol", "icmpv6"];
    assert_eq!(agent.run(&args).code, Some(1));
}

#[test]
fn a_wait_ends_with_the_revision_that_was_there_at_its_start() {
    let answers = [(7, 6), (8, 6), (8, 7)]
        .map(|(revision, realized)| Answer::new("GET /v1/policy", 200, policies(revision, realized)));
    let agent = Agent::start(answers.into());
    let ran = agent.run(&["policy", "wait"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "revision 7 is in force\n"), "{ran:?}");
    assert_eq!(agent.seen().len(), 3);
}

#[test]
fn a_wait_that_is_too_short_tells_the_problem() {
    let mut stuck = policies(8, 6);
    stuck["problem"] = "compile the policies: no room".into();
    let agent = Agent::start(vec![Answer::new("GET /v1/policy", 200, stuck)]);
    let ran = agent.run(&["policy", "wait", "8", "--timeout", "600ms"]);
    let wanted = "wharf: wait for revision 8 of the policies: after 600 ms, revision 6 is in force: compile the policies: \
                  no room\n";
    assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (Some(1), "", wanted));
    assert!(agent.seen().len() > 1, "it looks more than once");
    let ran = agent.run(&["policy", "wait", "6"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "revision 6 is in force\n"), "{ran:?}");
}

#[test]
fn labels_of_a_namespace_are_set_listed_and_forgotten() {
    let shop = json!({"name": "shop", "labels": {"kubernetes.io/metadata.name": "shop", "team": "a"}});
    let agent = Agent::start(vec![
        Answer::new("PUT /v1/namespace/shop", 200, shop.clone()),
        Answer::new("GET /v1/namespace", 200, json!([shop])),
        Answer::new("DELETE /v1/namespace/shop", 204, ""),
    ]);
    let ran = agent.run(&["namespace", "set", "shop", "team=a", "stage="]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "shop: 2 labels set\n"), "{ran:?}");
    let ran = agent.run(&["namespace", "list"]);
    assert!(ran.code == Some(0) && ran.out.contains("kubernetes.io/metadata.name=shop team=a"), "{ran:?}");
    let ran = agent.run(&["namespace", "delete", "shop", "-o", "json"]);
    assert_eq!((ran.code, serde_json::from_str(&ran.out).ok()), (Some(0), Some(json!({"deleted": "shop"}))), "{ran:?}");
    let ran = agent.run(&["namespace", "set", "shop", "team=a", "team=b"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(3), ""), "{ran:?}");
    let seen = agent.seen();
    assert_eq!(seen.len(), 3, "a wrong command line sends nothing: {seen:?}");
    assert_eq!(seen[0], r#"PUT /v1/namespace/shop {"labels":{"stage":"","team":"a"}}"#);
}

#[test]
fn the_rules_of_an_endpoint_are_shown_by_any_of_its_names() {
    let row = json!({
        "peers": ["any"], "more_peers": 0, "ports": ["any"], "verdict": "deny", "tier": "namespaced", "packets": 3,
        "bytes": 222
    });
    let answer = json!({
        "endpoint": 7, "enforcement": "default", "audit": false, "desired_revision": 7, "realized_revision": 7,
        "ingress": {"rule_set": 3, "policies": ["NetworkPolicy shop/db"], "rows": [row]},
        "egress": {"rule_set": 0, "policies": [], "rows": []}
    });
    let agent = Agent::start(vec![Answer::new("GET /v1/endpoint/pod-name:shop%2Fdb/policy", 200, answer.clone())]);
    let ran = agent.run(&["bpf", "policy", "get", "pod-name:shop/db"]);
    assert!(ran.code == Some(0) && ran.out.contains("Egress: no rule set, every packet passes"), "{ran:?}");
    let ran = agent.run(&["bpf", "policy", "get", "pod-name:shop/db", "-o", "json"]);
    assert_eq!((ran.code, serde_json::from_str::<Value>(&ran.out).ok()), (Some(0), Some(answer)), "{ran:?}");
}

#[test]
fn the_quick_start_of_the_documentation_shows_what_the_commands_say() {
    const PAGE: &str = include_str!("../../../docs/policy.md");
    let list = json!({
        "revision": 1, "realized": 1, "enforcement": "default", "audit": false,
        "rows": {"peers": 5, "peers_limit": 524_287, "ports": 1, "ports_limit": 65_536, "cells": 3,
                 "cells_limit": 262_144, "sets": 1, "sets_limit": 65_532},
        "policies": [{
            "kind": "NetworkPolicy", "namespace": "shop", "name": "db", "tier": "namespaced",
            "subject": "k8s:app=db, in namespace shop", "isolates": ["ingress"], "ingress_rules": 1, "egress_rules": 0,
            "file": "db.yaml", "line": 4, "endpoints": [9]
        }]
    });
    let judgement = |endpoint: u16, enforced: bool, verdict: &str| {
        let (set, class) = if enforced { (1, 2) } else { (0, 0) };
        let isolated_by = if enforced { json!(["NetworkPolicy shop/db"]) } else { json!([]) };
        json!({"endpoint": endpoint, "enforced": enforced, "verdict": verdict, "isolated_by": isolated_by,
               "rule_set": set, "peer_class": class, "port_class": 0})
    };
    let explained =
        json!({"verdict": "deny", "egress": judgement(7, false, "accept"), "ingress": judgement(9, true, "deny")});
    let agent = Agent::start(vec![
        Answer::new("PUT /v1/policy", 200, change(1, 1, &["NetworkPolicy shop/db"], &[])),
        Answer::new("GET /v1/policy", 200, list),
        Answer::new("GET /v1/policy/explain?from=7&to=9&protocol=tcp&port=22", 200, explained),
        Answer::new(
            "DELETE /v1/policy?kind=NetworkPolicy&namespace=shop&name=db",
            200,
            change(2, 2, &[], &["NetworkPolicy shop/db"]),
        ),
    ]);
    let directory = documents(&["db"]);
    for line in [
        "wharf policy import db.yaml",
        "wharf policy get",
        "wharf policy explain --from 7 --to 9 --port 22",
        "wharf policy delete NetworkPolicy db -n shop",
    ] {
        let args: Vec<&str> = line.split(' ').skip(1).collect();
        let ran = run_in(&agent, directory.path(), &args);
        assert_eq!(ran.err, "", "{line}");
        let shown = format!("$ {line}\n{}", ran.out);
        let indented = shown.lines().map(|line| format!("    {line}").trim_end().to_owned() + "\n");
        let indented = indented.collect::<String>();
        assert!(PAGE.contains(&indented), "not in docs/policy.md:\n{indented}");
    }
}
