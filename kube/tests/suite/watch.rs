//! Lists, watches and the feed against a scripted API server and a fake agent, in paused time.

use std::time::Duration;

use futures::future::BoxFuture;
use kube_client::Client;
use serde_json::json;
use tokio::time::{Instant, sleep};
use wharf_feed::v1;
use wharf_kube::{
    api::{Api, Connect, Failure},
    source::Source,
};

use super::common::{
    Bench,
    agent::Agent,
    objects::{namespace, node, pod, policy},
    server::{Fault, Server},
    streams::WatchFault,
    until,
};

const SOON: Duration = Duration::from_secs(2);
/// Silence, a delay of at most 30 s, and a list.
const BOUND: Duration = Duration::from_secs(75);

fn cluster() -> Server {
    let server = Server::start();
    server.put(node("a", "192.0.2.1", "10.1.0.0/24"));
    server.put(node("b", "192.0.2.2", "10.2.0.0/24"));
    server.put(namespace("shop", "one"));
    server.put(pod("web", "u1", Some("10.2.0.2"), "web"));
    server.put(policy(Source::NetworkPolicy, "web", "p1", 80));
    server
}

async fn settled() -> Bench {
    let bench = Bench::start(cluster(), Agent::start());
    // The program annotates its node.
    sleep(SOON).await;
    bench.settle(SOON).await;
    bench
}

#[tokio::test(start_paused = true)]
async fn rows_follow_the_objects_and_unchanged_objects_send_nothing() {
    let bench = settled().await;
    let sent = bench.metrics.changes_sent();
    bench.server.put(pod("db", "u2", Some("10.2.0.3"), "db"));
    bench.server.put(pod("web", "u1", Some("10.2.0.2"), "other"));
    bench.server.delete(Source::NetworkPolicy, "shop/web");
    bench.settle(SOON).await;
    assert_eq!(bench.metrics.changes_sent(), sent + 3);
    // A field without an effect, and the lists of two hours.
    let (_, mut same) = policy(Source::NetworkPolicy, "db", "p2", 1);
    bench.server.put((Source::NetworkPolicy, same.clone()));
    bench.settle(SOON).await;
    let sent = bench.metrics.changes_sent();
    same["metadata"]["annotations"] = json!({"a": "b"});
    same["status"] = json!({"other": true});
    bench.server.put((Source::NetworkPolicy, same));
    sleep(Duration::from_secs(7_200)).await;
    assert_eq!(bench.metrics.changes_sent(), sent);
    let lists = bench.metrics.lists_of(Source::Pod);
    assert!((7..14).contains(&lists), "{lists} lists in two hours");
    assert_eq!(bench.agent.violations(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn the_agent_has_the_state_of_each_watch_if_its_version_accepts_it() {
    let bench = settled().await;
    let state = |source| bench.agent.watch(source).map(|(state, _)| state);
    let of = |text: &str| Some(text.to_owned());
    assert_eq!(state(Source::Pod), of("watching"));
    assert_eq!(state(Source::CiliumNetworkPolicy), of("absent"));
    bench.server.define(Source::CiliumNetworkPolicy, true);
    // The list fails, and the watch, too.
    let faults = ["/networkpolicies?limit=", "/networkpolicies?limit=", "networkpolicies?watch"];
    faults.iter().for_each(|target| bench.server.fail(target, Fault::Status(403, None)));
    bench.server.break_watches(WatchFault::Error(410));
    sleep(SOON).await;
    let (failing, error) = bench.agent.watch(Source::NetworkPolicy).expect("a watch");
    assert!(failing == "failing" && error.contains("answers 403"), "{failing}: {error}");
    assert_eq!(state(Source::Node), of("watching"), "an expired version");
    until("both watches", BOUND, || {
        [Source::NetworkPolicy, Source::CiliumNetworkPolicy].into_iter().all(|source| state(source) == of("watching"))
    })
    .await;
    bench.agent.older(true);
    until("a new stream", BOUND, || state(Source::Pod).is_none()).await;
    bench.settle(BOUND).await;
    sleep(SOON).await;
    assert_eq!(state(Source::Pod), None, "an earlier version");
    bench.agent.older(false);
    until("the watches again", BOUND, || state(Source::Pod) == of("watching")).await;
    assert_eq!(bench.agent.violations(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn refused_rows_are_sent_again_after_a_growing_delay() {
    let bench = settled().await;
    let refused = |stale| {
        let (kind, key, name, reason) = ("pod".into(), "u1".into(), "shop/web".into(), "no room".into());
        vec![v1::RefusedRow { kind, key, name, reason, stale, conflict: false }]
    };
    let sent = bench.metrics.changes_sent();
    bench.agent.refuse(refused(false));
    for (seconds, again) in [(25, 0), (10, 1), (50, 1), (15, 2)] {
        sleep(Duration::from_secs(seconds)).await;
        assert_eq!(bench.metrics.changes_sent(), sent + again);
    }
    // An earlier row is in force.
    bench.agent.refuse(refused(true));
    sleep(Duration::from_secs(3_600)).await;
    assert_eq!(bench.metrics.changes_sent(), sent + 2);
    bench.settle(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn deletions_that_no_watch_saw_are_found() {
    let bench = settled().await;
    for fault in [WatchFault::Error(410), WatchFault::Error(504), WatchFault::Garbage] {
        bench.server.put(pod("gone", "u9", Some("10.2.0.9"), "gone"));
        bench.settle(SOON).await;
        bench.server.fail("/api/v1/pods", Fault::Status(500, None));
        bench.server.break_watches(fault);
        sleep(Duration::from_millis(20)).await;
        bench.server.delete(Source::Pod, "shop/gone");
        bench.server.compact();
        bench.settle(BOUND).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_connection_is_given_up_within_30_s() {
    let bench = settled().await;
    bench.server.break_watches(WatchFault::Silence);
    sleep(Duration::from_millis(20)).await;
    let began = Instant::now();
    bench.server.put(pod("db", "u2", Some("10.2.0.3"), "db"));
    bench.settle(Duration::from_secs(35)).await;
    assert!(began.elapsed() > Duration::from_secs(5), "the watch was silent");
    bench.server.fail("watch=true", Fault::Hang);
    bench.server.fail("limit=", Fault::Stall);
    bench.server.break_watches(WatchFault::Cut);
    bench.server.delete(Source::Pod, "shop/db");
    bench.settle(BOUND).await;
}

#[tokio::test(start_paused = true)]
async fn a_broken_watch_continues_and_a_list_follows() {
    let bench = settled().await;
    // First the end, of a watch that has just begun: at its time it is no fault.
    for fault in [WatchFault::End, WatchFault::Cut, WatchFault::Truncate] {
        let lists = bench.metrics.lists_of(Source::Pod);
        bench.server.break_watches(fault);
        sleep(Duration::from_millis(20)).await;
        bench.server.put(pod("db", "u2", Some("10.2.0.3"), &format!("{fault:?}")));
        bench.settle(SOON).await;
        assert_eq!(bench.metrics.lists_of(Source::Pod), lists, "{fault:?}: no list before the change");
        sleep(Duration::from_secs(61)).await;
        assert_eq!(bench.metrics.lists_of(Source::Pod), lists + 1, "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_restored_store_replaces_the_rows() {
    for fault in [WatchFault::Cut, WatchFault::End, WatchFault::Silence] {
        let bench = settled().await;
        let earlier = bench.server.snapshot();
        for i in 0..5 {
            bench.server.put(pod(&format!("new{i}"), &format!("n{i}"), Some(&format!("10.2.0.{}", 20 + i)), "new"));
        }
        bench.settle(SOON).await;
        bench.server.break_watches(fault);
        bench.server.restore(earlier);
        // The versions that the watches had, in another history.
        for i in 0..8 {
            bench.server.put(pod(&format!("other{i}"), &format!("o{i}"), Some(&format!("10.2.0.{}", 40 + i)), "other"));
        }
        bench.settle(BOUND + Duration::from_secs(30)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_version_in_the_future_leads_to_a_list() {
    let bench = settled().await;
    let earlier = bench.server.snapshot();
    bench.server.delete(Source::Pod, "shop/web");
    bench.settle(SOON).await;
    bench.server.restore(earlier);
    bench.server.break_watches(WatchFault::End);
    bench.settle(SOON).await;
    assert!(bench.server.object(Source::Pod, "shop/web").is_some());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_throttles_is_left_alone_as_long_as_it_asks() {
    let server = cluster();
    server.fail("/api/v1/pods", Fault::Status(429, Some(20)));
    let bench = Bench::start(server, Agent::start());
    sleep(Duration::from_secs(20)).await;
    assert_eq!(bench.server.count("/api/v1/pods"), 1);
    assert!(!bench.agent.is_complete());
    bench.settle(Duration::from_secs(5)).await;
}

#[tokio::test(start_paused = true)]
async fn a_watch_continues_while_the_server_refuses_lists() {
    let bench = settled().await;
    let lists = bench.metrics.lists_of(Source::Pod);
    for _ in 0..1_000 {
        bench.server.fail("limit=", Fault::Status(429, None));
    }
    sleep(Duration::from_secs(1_000)).await;
    assert!(bench.server.count("limit=") > 20, "every source tried to list");
    for i in 0..5 {
        bench.server.put(pod("db", "u2", Some("10.2.0.3"), &format!("label{i}")));
        bench.settle(SOON).await;
        sleep(Duration::from_secs(7)).await;
    }
    assert_eq!(bench.metrics.lists_of(Source::Pod), lists);
    bench.server.heal();
    sleep(BOUND).await;
    assert_eq!(bench.metrics.lists_of(Source::Pod), lists + 1);
}

#[tokio::test(start_paused = true)]
async fn refusals_back_off_and_end() {
    let server = cluster();
    for _ in 0..6 {
        server.fail("/api/v1/pods", Fault::Status(403, None));
        server.fail("/networkpolicies", Fault::Status(401, None));
    }
    let bench = Bench::start(server, Agent::start());
    sleep(Duration::from_secs(4)).await;
    let early = bench.server.count("/api/v1/pods");
    assert!((3..6).contains(&early), "{early} attempts in 4 s");
    bench.settle(BOUND).await;
}

#[tokio::test(start_paused = true)]
async fn long_lists_come_in_pages_of_one_version() {
    let server = cluster();
    for i in 0..60 {
        server.put(pod(&format!("p{i}"), &format!("u{i:03}"), Some(&format!("10.2.1.{i}")), "many"));
    }
    server.set_page(7);
    server.shuffle();
    let bench = Bench::start(server, Agent::start());
    bench.settle(SOON).await;
    assert!(bench.server.count("continue=") >= 8);
    // A token expires: the list begins again, and has no object twice and none too few.
    bench.server.break_watches(WatchFault::Error(410));
    bench.server.delete(Source::Pod, "shop/p7");
    bench.server.fail("continue=", Fault::Status(410, None));
    bench.settle(BOUND).await;
}

#[tokio::test(start_paused = true)]
async fn custom_resources_come_and_go_with_their_definition() {
    let bench = settled().await;
    let source = Source::CiliumNetworkPolicy;
    bench.server.define(source, true);
    bench.server.put(policy(source, "l7", "c1", 80));
    bench.settle(Duration::from_secs(45)).await;
    bench.server.define(source, false);
    bench.settle(BOUND).await;
    assert!(bench.agent.rows().iter().all(|(_, key, _)| !key.starts_with("Cilium")));
}

#[tokio::test(start_paused = true)]
async fn rows_stay_while_a_definition_cannot_be_read() {
    let server = cluster();
    let source = Source::ClusterNetworkPolicy;
    server.define(source, true);
    server.put(policy(source, "deny", "k1", 80));
    let bench = Bench::start(server, Agent::start());
    bench.settle(SOON).await;
    let definition = source.custom().expect("custom").definition();
    for _ in 0..50 {
        bench.server.fail(&definition, Fault::Status(503, None));
    }
    bench.server.break_watches(WatchFault::Error(410));
    sleep(Duration::from_secs(300)).await;
    bench.settle(Duration::ZERO).await;
    bench.server.heal();
    bench.settle(BOUND).await;
}

#[tokio::test(start_paused = true)]
async fn an_object_that_does_not_decode_is_skipped_and_keeps_its_row() {
    let server = cluster();
    let bad = |name: &str| (Source::Namespace, json!({"metadata": {"name": name, "uid": "x", "labels": {"a": 7}}}));
    server.put(bad("odd"));
    let bench = Bench::start(server, Agent::start());
    let keys = |bench: &Bench| -> Vec<String> {
        let rows = bench.agent.rows().into_iter().filter(|(kind, ..)| kind == "namespace");
        rows.map(|(_, key, _)| key).collect()
    };
    until("the other rows", SOON, || bench.agent.is_complete() && keys(&bench) == ["kube-system", "shop"]).await;
    // The same in a watch, for an object that has a row; and in the list after it.
    let (_, mut shop) = namespace("shop", "one");
    shop["metadata"]["labels"] = json!(3);
    bench.server.put((Source::Namespace, shop));
    bench.server.put(namespace("next", "n"));
    until("the next row", SOON, || keys(&bench) == ["kube-system", "next", "shop"]).await;
    bench.server.break_watches(WatchFault::Error(410));
    sleep(BOUND).await;
    assert_eq!(keys(&bench), ["kube-system", "next", "shop"]);
}

#[tokio::test(start_paused = true)]
async fn completed_pods_and_pods_of_the_host_have_no_row() {
    let bench = settled().await;
    let (source, mut done) = pod("web", "u1", Some("10.2.0.2"), "web");
    done["status"]["phase"] = json!("Succeeded");
    bench.server.put((source, done));
    // Its address belongs to another pod now.
    bench.server.put(pod("next", "u2", Some("10.2.0.2"), "next"));
    let (source, mut host) = pod("host", "u3", Some("192.0.2.2"), "host");
    host["spec"]["hostNetwork"] = json!(true);
    bench.server.put((source, host));
    bench.settle(SOON).await;
    let pods: Vec<_> =
        bench.agent.rows().into_iter().filter(|(kind, ..)| kind == "pod").map(|(_, key, _)| key).collect();
    assert_eq!(pods, ["u2"]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_created_again_under_its_name_replaces_the_row() {
    let bench = settled().await;
    bench.server.put(pod("web", "u2", Some("10.2.0.2"), "web"));
    bench.settle(SOON).await;
    // And when only a list sees it.
    bench.server.break_watches(WatchFault::Error(410));
    bench.server.put(pod("web", "u3", Some("10.2.0.7"), "web"));
    bench.server.compact();
    bench.settle(BOUND).await;
}

#[tokio::test(start_paused = true)]
async fn a_new_stream_has_a_snapshot_without_new_lists() {
    let bench = settled().await;
    let lists = bench.metrics.lists_of(Source::Pod);
    bench.agent.away(true);
    bench.server.delete(Source::Pod, "shop/web");
    bench.server.put(pod("db", "u2", Some("10.2.0.3"), "db"));
    sleep(Duration::from_secs(30)).await;
    bench.agent.away(false);
    bench.settle(Duration::from_secs(60)).await;
    assert_eq!(bench.metrics.lists_of(Source::Pod), lists);
    let openings = bench.agent.openings();
    assert_eq!(openings.len(), 2);
    assert!(openings.iter().all(|opening| opening.producer == "wharf-kube" && opening.cluster == "cluster"));
}

#[tokio::test(start_paused = true)]
async fn a_restarted_program_removes_what_was_deleted_meanwhile() {
    let bench = settled().await;
    let server = bench.server.clone();
    let agent = bench.agent.clone();
    drop(bench);
    server.delete(Source::Pod, "shop/web");
    server.delete(Source::Node, "b");
    let bench = Bench::start(server, agent);
    bench.settle(Duration::from_secs(30)).await;
}

#[tokio::test(start_paused = true)]
async fn changes_that_wait_for_the_agent_are_one_change_a_key() {
    let bench = settled().await;
    bench.agent.stall(true);
    for i in 0..3_000 {
        bench.server.put(pod("web", "u1", Some("10.2.0.2"), &format!("l{i}")));
        if i % 10 == 0 {
            bench.server.put(pod(&format!("brief{i}"), &format!("b{i}"), Some("10.2.0.9"), "brief"));
            bench.server.delete(Source::Pod, &format!("shop/brief{i}"));
            sleep(Duration::from_millis(20)).await;
        }
    }
    let sent = bench.metrics.changes_sent();
    sleep(SOON).await;
    bench.agent.stall(false);
    bench.settle(SOON).await;
    let late = bench.metrics.changes_sent() - sent;
    assert!(late <= 2, "{late} changes after the agent reads again");
    assert!(bench.server.count("watch=true") < 60, "the watches go on");
}

#[tokio::test(start_paused = true)]
async fn addresses_of_other_nodes_come_from_their_annotations() {
    let bench = settled().await;
    let (source, mut other) = node("b", "192.0.2.2", "10.2.0.0/24");
    other["metadata"]["annotations"] =
        json!({"wharf.dev/health-addresses": "10.2.0.9", "wharf.dev/router-addresses": "10.2.0.1"});
    bench.server.put((source, other));
    bench.settle(SOON).await;
    let rows = bench.agent.rows();
    assert!(rows.iter().any(|(_, key, row)| key == "b" && row.contains("10.2.0.9")), "{rows:?}");
}

struct InTurn([Server; 2]);

impl Connect for InTurn {
    fn connect(&self, attempt: usize) -> BoxFuture<'_, Result<Client, Failure>> {
        let [first, second] = &self.0;
        if attempt.is_multiple_of(2) { first.connect(attempt) } else { second.connect(attempt) }
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_fails_is_replaced_by_the_next_one() {
    let (dead, server) = (cluster(), cluster());
    for _ in 0..1_000 {
        dead.fail("/", Fault::Reset);
    }
    let api = Api::new(Box::new(InTurn([dead.clone(), server.clone()])));
    let bench = Bench::start_api(server, Agent::start(), api);
    bench.settle(Duration::from_secs(10)).await;
    // The other one fails, and the first one answers again with the same objects.
    for _ in 0..1_000 {
        bench.server.fail("/", Fault::Status(503, None));
    }
    dead.heal();
    bench.server.break_watches(WatchFault::Cut);
    sleep(BOUND).await;
    assert!(dead.count("watch=true") > 0, "{:?}", dead.last_requests());
}

#[tokio::test(start_paused = true)]
async fn a_resource_that_fails_moves_no_other_to_another_server() {
    let (server, dead) = (cluster(), cluster());
    for _ in 0..1_000 {
        dead.fail("/", Fault::Reset);
    }
    let api = Api::new(Box::new(InTurn([server.clone(), dead.clone()])));
    let bench = Bench::start_api(server, Agent::start(), api);
    sleep(SOON).await;
    bench.settle(SOON).await;
    for _ in 0..1_000 {
        bench.server.fail("/networkpolicies", Fault::Status(500, None));
    }
    bench.server.break_watches(WatchFault::Error(410));
    sleep(Duration::from_secs(240)).await;
    let failed = bench.server.count("/networkpolicies");
    assert!(failed > 8, "{failed} requests");
    assert_eq!(dead.requests(), Vec::<String>::new());
    // The other server is tried now and then: it may serve the resource.
    sleep(Duration::from_secs(600)).await;
    let tried = dead.requests().len();
    assert!((1..40).contains(&tried), "{tried} requests of the other server");
    bench.server.put(pod("db", "u2", Some("10.2.0.3"), "db"));
    bench.settle(BOUND).await;
    bench.server.heal();
    bench.settle(BOUND).await;
}
