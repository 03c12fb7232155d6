//! This node's object and Events, in paused time.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::sleep;
use wharf_feed::v1;
use wharf_kube::source::Source;

use super::common::{
    Bench, NODE,
    agent::Agent,
    objects::{namespace, node, policy},
    server::{Fault, Server},
    until,
};

const SOON: Duration = Duration::from_secs(3);
const TAINT: &str = "wharf.dev/agent-not-ready";

fn own(taints: &Value) -> (Source, Value) {
    let (source, mut object) = node(NODE, "192.0.2.1", "10.1.0.0/24");
    object["spec"]["taints"] = taints.clone();
    object["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    (source, object)
}

fn cluster() -> Server {
    let server = Server::start();
    server.put(own(
        &json!([{"key": TAINT, "effect": "NoSchedule"}, {"key": "other", "effect": "NoExecute", "value": "v"}]),
    ));
    server.put(namespace("shop", "one"));
    server
}

fn found(server: &Server) -> Value {
    server.object(Source::Node, NODE).expect("the node")
}

fn is_tainted(server: &Server) -> bool {
    let node = found(server);
    node["spec"]["taints"].as_array().is_some_and(|all| all.iter().any(|taint| taint["key"] == TAINT))
}

fn network(server: &Server) -> Option<String> {
    let node = found(server);
    let conditions = node["status"]["conditions"].as_array()?;
    let condition = conditions.iter().find(|condition| condition["type"] == "NetworkUnavailable")?;
    Some(format!("{} {}", condition["status"].as_str()?, condition["reason"].as_str()?))
}

#[tokio::test(start_paused = true)]
async fn the_taint_goes_when_everything_is_in_force_and_returns_when_not() {
    let agent = Agent::start();
    agent.report(&[("Ready", false), ("RoutesInForce", false)]);
    let bench = Bench::start(cluster(), agent);
    let server = &bench.server;
    sleep(SOON).await;
    assert!(is_tainted(server));
    assert_eq!(network(server), None, "routes are on their way");
    sleep(Duration::from_secs(60)).await;
    assert!(is_tainted(server));
    assert_eq!(network(server).as_deref(), Some("False RoutesMissing"));
    bench.agent.report(&[("Ready", false), ("RoutesInForce", true)]);
    sleep(SOON).await;
    assert!(is_tainted(server));
    assert_eq!(network(server).as_deref(), Some("False WharfIsUp"));
    bench.agent.report(&[("Ready", true), ("RoutesInForce", true)]);
    until("no taint", SOON, || !is_tainted(server)).await;
    let node = found(server);
    assert_eq!(node["spec"]["taints"], json!([{"key": "other", "effect": "NoExecute", "value": "v"}]));
    assert_eq!(node["metadata"]["annotations"]["wharf.dev/health-addresses"], "10.1.0.9");
    assert_eq!(node["metadata"]["annotations"]["wharf.dev/router-addresses"], "10.1.0.1");
    assert_eq!(node["status"]["conditions"][0], json!({"type": "Ready", "status": "True"}));
    // Missing routes close no node that was ready.
    bench.agent.report(&[("Ready", true), ("RoutesInForce", false)]);
    sleep(Duration::from_secs(70)).await;
    assert!(!is_tainted(server));
    bench.agent.report(&[("Ready", true), ("RoutesInForce", true)]);
    // Another writer removes what was put; it is put back. Then the agent is not ready.
    bench.agent.report(&[("Ready", false), ("RoutesInForce", true)]);
    until("the taint", SOON, || is_tainted(server)).await;
    server.put(own(&json!([])));
    until("the taint again", SOON, || is_tainted(server)).await;
}

#[tokio::test(start_paused = true)]
async fn the_taint_stays_while_a_list_is_missing() {
    let server = cluster();
    for _ in 0..6 {
        server.fail("/networkpolicies", Fault::Status(403, None));
    }
    let bench = Bench::start(server, Agent::start());
    sleep(Duration::from_secs(4)).await;
    assert!(is_tainted(&bench.server), "policies are not known yet");
    until("no taint", Duration::from_secs(30), || !is_tainted(&bench.server)).await;
}

#[tokio::test(start_paused = true)]
async fn a_restart_with_an_unreadable_source_closes_no_node_that_has_every_row() {
    for has_rows in [true, false] {
        let bench = Bench::start(cluster(), Agent::start());
        until("no taint", SOON, || !is_tainted(&bench.server)).await;
        bench.agent.report(&[("Ready", true), ("RoutesInForce", true), ("RowsComplete", has_rows)]);
        for _ in 0..1_000 {
            bench.server.fail("/networkpolicies", Fault::Status(403, None));
        }
        let bench = bench.restart();
        sleep(Duration::from_secs(90)).await;
        assert!(!bench.agent.is_complete(), "policies are not known");
        assert_eq!(is_tainted(&bench.server), !has_rows);
        let reason = if has_rows { "False WharfIsUp" } else { "True WharfIsStarting" };
        assert_eq!(network(&bench.server).as_deref(), Some(reason));
        bench.agent.report(&[("Ready", false), ("RoutesInForce", true), ("RowsComplete", has_rows)]);
        until("the taint of an agent that is not ready", SOON, || is_tainted(&bench.server)).await;
        bench.agent.report(&[("Ready", true), ("RoutesInForce", true), ("RowsComplete", has_rows)]);
        sleep(SOON).await;
        assert_eq!(is_tainted(&bench.server), !has_rows);
        bench.server.heal();
        until("no taint", Duration::from_secs(700), || bench.agent.is_complete() && !is_tainted(&bench.server)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_short_absence_of_the_agent_changes_nothing_and_a_long_one_does() {
    let bench = Bench::start(cluster(), Agent::start());
    let server = &bench.server;
    until("no taint", SOON, || !is_tainted(server)).await;
    let patches = server.count("PATCH");
    bench.agent.away(true);
    sleep(Duration::from_secs(40)).await;
    bench.agent.away(false);
    sleep(Duration::from_secs(30)).await;
    assert_eq!(server.count("PATCH"), patches);
    bench.agent.away(true);
    sleep(Duration::from_secs(57)).await;
    assert!(!is_tainted(server));
    until("the taint", Duration::from_secs(10), || is_tainted(server)).await;
    assert_eq!(network(server).as_deref(), Some("True WharfIsAway"));
    assert_eq!(found(server)["metadata"]["annotations"]["wharf.dev/health-addresses"], "10.1.0.9");
    bench.agent.away(false);
    until("no taint", Duration::from_secs(60), || !is_tainted(server)).await;
    assert_eq!(network(server).as_deref(), Some("False WharfIsUp"));
}

#[tokio::test(start_paused = true)]
async fn the_taint_comes_although_the_condition_is_refused() {
    let bench = Bench::start(cluster(), Agent::start());
    let server = &bench.server;
    until("no taint", SOON, || !is_tainted(server)).await;
    for _ in 0..100 {
        server.fail("/status", Fault::Status(500, None));
    }
    bench.agent.away(true);
    until("the taint", Duration::from_secs(70), || is_tainted(server)).await;
    assert_eq!(network(server).as_deref(), Some("False WharfIsUp"), "refused");
}

#[tokio::test(start_paused = true)]
async fn events_without_an_answer_do_not_delay_the_taint() {
    let server = cluster();
    server.put(policy(Source::NetworkPolicy, "web", "p1", 80));
    let bench = Bench::start(server, Agent::start());
    let server = &bench.server;
    until("no taint", SOON, || !is_tainted(server)).await;
    for _ in 0..100 {
        server.fail("/events", Fault::Hang);
    }
    bench.agent.refuse(vec![v1::RefusedRow {
        kind: "policy".into(),
        key: "NetworkPolicy shop/web".into(),
        name: "web".into(),
        reason: "no such field".into(),
        stale: true,
        conflict: false,
    }]);
    until("an attempt", SOON, || server.count("POST") == 1).await;
    bench.agent.report(&[("Ready", false), ("RoutesInForce", true)]);
    until("the taint", Duration::from_secs(8), || is_tainted(server)).await;
}

#[tokio::test(start_paused = true)]
async fn a_taint_of_another_writer_is_not_lost() {
    let bench = Bench::start(cluster(), Agent::start());
    let server = &bench.server;
    until("no taint", SOON, || !is_tainted(server)).await;
    let (_, raced) = own(&json!([{"key": "drain", "effect": "NoSchedule"}]));
    server.race_node(raced);
    bench.agent.report(&[("Ready", false), ("RoutesInForce", true)]);
    until("the taint", SOON, || is_tainted(server)).await;
    let taints = found(server)["spec"]["taints"].clone();
    assert!(taints.as_array().is_some_and(|all| all.iter().any(|taint| taint["key"] == "drain")), "{taints}");
}

#[tokio::test(start_paused = true)]
async fn requests_outside_the_role_are_refused() {
    let allows = super::common::rbac::allows;
    for (method, target) in [
        ("GET", "/api/v1/secrets?limit=1"),
        ("GET", "/api/v1/namespaces/default"),
        ("PATCH", "/api/v1/namespaces/shop/pods/web"),
        ("GET", "/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices"),
        ("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/other"),
        ("POST", "/api/v1/nodes"),
    ] {
        assert!(!allows(method, target), "{method} {target}");
    }
    assert!(allows("GET", "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=x"));
}

#[tokio::test(start_paused = true)]
async fn a_node_at_rest_has_few_requests() {
    let bench = Bench::start(cluster(), Agent::start());
    until("no taint", SOON, || !is_tainted(&bench.server)).await;
    sleep(SOON).await;
    let before = (bench.server.count("PATCH"), bench.server.count("/api/v1/nodes/"));
    for pods in 0..720 {
        bench.agent.problem(format!("cluster: {pods} pods; refused a policy"));
        sleep(Duration::from_secs(5)).await;
    }
    let after = (bench.server.count("PATCH"), bench.server.count("/api/v1/nodes/"));
    assert_eq!(before.0, after.0);
    // One of them for the problem, which has an Event.
    assert!(after.1 - before.1 <= 32, "{} reads in an hour", after.1 - before.1);
    assert!(bench.server.count("POST") <= 2, "{}", bench.server.count("POST"));
}

#[tokio::test(start_paused = true)]
async fn a_refused_policy_has_one_event() {
    let server = cluster();
    server.put(policy(Source::NetworkPolicy, "web", "p1", 80));
    let bench = Bench::start(server, Agent::start());
    bench.settle(SOON).await;
    let refused = |reason: &str, stale| v1::RefusedRow {
        kind: "policy".into(),
        key: "NetworkPolicy shop/web".into(),
        name: "web".into(),
        reason: reason.into(),
        stale,
        conflict: false,
    };
    bench.agent.refuse(vec![refused("no such field", true)]);
    until("an event", SOON, || bench.server.events().len() == 1).await;
    let event = bench.server.events().remove(0);
    let note =
        "The policy is not in force as written. An earlier version or a part of it may be in force. no such field";
    assert_eq!(event["note"], note);
    assert_eq!(event["metadata"]["namespace"], "shop");
    let regarding = json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "namespace": "shop", "name": "web",
        "uid": "p1"});
    assert_eq!(event["regarding"], regarding);
    // Another process, as on another node, has the same Event.
    let bench = bench.restart();
    sleep(Duration::from_secs(600)).await;
    assert_eq!(bench.server.events().len(), 1);
    assert!(bench.server.count("POST") <= 2, "{}", bench.server.count("POST"));
    bench.agent.refuse(vec![refused("another reason", false)]);
    until("another event", SOON, || bench.server.events().len() == 2).await;
    // A flood is limited.
    bench.agent.refuse((0..200).map(|i| refused(&format!("reason {i}"), false)).collect());
    sleep(Duration::from_secs(30)).await;
    assert!(bench.server.events().len() <= 42, "{}", bench.server.events().len());
}

#[tokio::test(start_paused = true)]
async fn an_event_that_is_refused_keeps_no_other_back() {
    let server = cluster();
    server.put(policy(Source::NetworkPolicy, "web", "p1", 80));
    server.put(policy(Source::NetworkPolicy, "db", "p2", 80));
    let bench = Bench::start(server, Agent::start());
    bench.settle(SOON).await;
    bench.server.fail("/events", Fault::Status(500, None));
    let refused = |key: &str| v1::RefusedRow {
        kind: "policy".into(),
        key: key.into(),
        name: key.into(),
        reason: "no such field".into(),
        stale: true,
        conflict: false,
    };
    bench.agent.refuse(["NetworkPolicy shop/web", "NetworkPolicy shop/db"].map(refused).into());
    until("the other event", SOON, || bench.server.events().len() == 1).await;
    assert_eq!(bench.server.events()[0]["regarding"]["name"], "db");
    let posts = bench.server.count("POST");
    sleep(Duration::from_secs(500)).await;
    assert_eq!(bench.server.count("POST"), posts, "it is tried again too early");
    until("the refused event", Duration::from_secs(400), || bench.server.events().len() == 2).await;
}
