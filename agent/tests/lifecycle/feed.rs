//! Policies of the cluster feed that are lost, that do not fit, that cannot be read, or that the proxy does not
//! acknowledge.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use wharf_agent::{
    cluster::feed::{Consumer as _, Taken},
    endpoint::create::CreateSpec,
    policy::Policy,
};
use wharf_cluster::feed::{Complete, Effects, FeedNamespace, FeedPod, FeedPolicy};
use wharf_datapath::fake::Operation as Op;

use crate::{
    policy::{OF_NAMESPACES, ingress, isolates},
    redirects::only,
    support::*,
};

fn machine() -> Machine {
    let mut machine = Machine::new();
    machine.config.cluster_feed = Some(machine.config.run_dir.join("feed"));
    machine
}

/// Every row is known.
fn complete() -> Complete {
    Complete { all: true, namespaces: true, ..Complete::default() }
}

/// Texts by key; `None` for a row that is gone.
fn policies<'a>(rows: impl IntoIterator<Item = (&'a str, Option<String>)>) -> Effects {
    let policy = |(key, text): (&'a str, Option<String>)| {
        (key.into(), text.map(|text| Arc::new(FeedPolicy { key: key.to_owned(), text })))
    };
    let policies = rows.into_iter().map(policy).collect();
    Effects { policies, ..Effects::default() }
}

/// Labels of the namespace `shop`.
fn shop(light: &str) -> Effects {
    let labels = BTreeMap::from([("light".to_owned(), light.to_owned())]);
    let row = Arc::new(FeedNamespace { name: "shop".to_owned(), labels });
    Effects { namespaces: [("shop".into(), Some(row))].into(), ..Effects::default() }
}

/// So many pods of another node, each with an address.
fn pods(count: u8) -> Effects {
    let pod = |n: u8| FeedPod {
        uid: format!("pod-{n}").into(),
        namespace: "shop".into(),
        name: format!("web-{n}").into(),
        addresses: [IpAddr::from([10, 99, 0, n])].into(),
        node: "b".into(),
        labels: BTreeMap::from([("app".to_owned(), "web".to_owned())]).into(),
        named_ports: Arc::default(),
    };
    let pods = (0..count).map(pod).map(|pod| (Arc::clone(&pod.uid), Some(Arc::new(pod)))).collect();
    Effects { pods, ..Effects::default() }
}

async fn put<'a>(agent: &Agent, rows: impl IntoIterator<Item = (&'a str, Option<String>)>) -> Vec<String> {
    let taken = agent.life.take(policies(rows), complete()).await;
    assert!(taken.rows.is_ok(), "{taken:?}");
    keys(&taken)
}

/// Keys of refused rows.
fn keys(taken: &Taken) -> Vec<String> {
    taken.refused.iter().map(|refusal| refusal.key.key.clone()).collect()
}

/// A policy for web pods with this name and so many networks, others for each `part`.
fn wide(name: &str, part: u8, networks: u8) -> String {
    let networks: Vec<String> = (0..networks).map(|n| format!("{{ipBlock: {{cidr: 172.16.{part}.{n}/32}}}}")).collect();
    let isolates = isolates("web").replace("{name: web}", &format!("{{name: {name}}}"));
    format!("{isolates}  ingress: [{{from: [{}]}}]\n", networks.join(", "))
}

/// A container in the namespace `shop`.
async fn create_in_shop(agent: &Agent) {
    let labels = ["k8s:app=web", "k8s:io.kubernetes.pod.namespace=shop"].map(|label| label.parse().expect("label"));
    agent.try_create(CreateSpec { labels: labels.into(), ..agent.container("c1") }).await.expect("created");
}

#[test]
fn policies_of_the_feed_are_lost_without_rules_in_the_kernel_too() {
    let machine = machine();
    let text = isolates("db");
    machine.life(async |agent| {
        agent.create("c1").await;
        assert_eq!(put(&agent, [("a", Some(text.clone()))]).await, [""; 0]);
        assert_eq!(ingress(&machine, 1), 0, "no endpoint is selected");
    });
    // A life begins without the rows.
    for text in [Some(text), None] {
        machine.life(async |agent| {
            for _ in 0..2 {
                let refused = agent.try_create(agent.container("c2")).await.expect_err("refused");
                assert!(refused.message.contains("rows of the cluster feed are lost"), "{}", refused.message);
                let part =
                    agent.life.take(Effects::default(), Complete { namespaces: true, ..Complete::default() }).await;
                assert!(part.rows.is_err(), "{part:?}");
                agent.life.policy.ensure().await.expect("nothing to do");
            }
            put(&agent, text.map(|text| ("a", Some(text)))).await;
            assert_eq!(agent.life.policy.summary().await.problem, None);
            let handle = agent.create("c2").await;
            agent.delete(&handle).await;
        });
    }
    machine.life(async |agent| drop(agent.create("c3").await));
}

#[test]
fn a_start_writes_that_the_feed_has_policies_if_the_last_agent_was_killed_before() {
    let machine = machine();
    let file = machine.config.state_dir.join("policy.json");
    machine.life(async |agent| {
        agent.create("c1").await;
        put(&agent, [("a", Some(isolates("web")))]).await;
    });
    let kept = std::fs::read_to_string(&file).expect("read");
    assert!(kept.contains(r#""cluster":true"#), "{kept}");
    // As if the agent was killed after it had written the rows of the feed.
    std::fs::write(&file, kept.replace(r#","cluster":true"#, "")).expect("written");
    machine.life(async |agent| {
        put(&agent, [("a", Some(isolates("web")))]).await;
        agent.life.policy.ensure().await.expect("nothing to do");
        assert!(std::fs::read_to_string(&file).expect("read").contains(r#""cluster":true"#), "it is written again");
    });
}

#[test]
fn a_kept_policy_that_this_version_cannot_read_keeps_its_rules_until_it_is_replaced() {
    let machine = machine();
    machine.life(async |agent| {
        agent.create("c1").await;
        put(&agent, [("a", Some(isolates("web")))]).await;
    });
    let before = ingress(&machine, 1);
    assert_ne!(before, 0);
    machine.life(async |agent| {
        let unreadable = policies([("a", Some("kind: Newer".to_owned()))]);
        let taken = agent.life.take(unreadable, complete()).await;
        assert!(taken.rows.is_err() && keys(&taken) == ["a"], "{taken:?}");
        // The producer sends the same text, which is no change.
        let taken = agent.life.take(Effects::default(), complete()).await;
        assert!(taken.rows.is_err() && keys(&taken) == ["a"], "{taken:?}");
        assert_eq!(ingress(&machine, 1), before);
        assert_eq!(put(&agent, [("a", Some(isolates("web")))]).await, [""; 0]);
        assert_ne!(ingress(&machine, 1), 0);
        put(&agent, [("a", None)]).await;
        assert_eq!(ingress(&machine, 1), 0);
    });
}

#[test]
fn a_namespace_whose_row_is_refused_has_unknown_labels() {
    let machine = machine();
    machine.life(async |agent| {
        agent.life.policy.import("a.yaml", OF_NAMESPACES).await.expect("imported");
        create_in_shop(&agent).await;
        let refused = Complete { refused_namespaces: ["shop".to_owned()].into(), ..complete() };
        let taken = agent.life.take(Effects::default(), refused).await;
        assert!(taken.rows.is_ok() && ingress(&machine, 1) != 0, "a policy that may select it isolates it: {taken:?}");
        agent.life.take(Effects::default(), complete()).await.rows.expect("taken");
        assert_eq!(ingress(&machine, 1), 0, "it has no labels");
    });
}

#[test]
fn networks_of_policies_leave_room_for_pods() {
    let machine = machine();
    // 400 rows, and 100 networks.
    machine.kernel.set_peers_max(401);
    machine.life(async |agent| {
        agent.create("c1").await;
        let rows = [("fits", Some(wide("fits", 0, 60))), ("large", Some(wide("large", 1, 101)))];
        let taken = agent.life.take(policies(rows), complete()).await;
        assert!(taken.rows.is_ok() && keys(&taken) == ["large"], "{taken:?}");
        let why = &taken.refused[0].why;
        assert!(why.contains("networks and exceptions of rules") && why.contains("than the 100 that fit"), "{why}");
        assert_ne!(ingress(&machine, 1), 0, "the other policy is in force");
        let taken = agent.life.take(pods(250), complete()).await;
        assert!(taken.rows.is_ok() && keys(&taken) == ["large"], "{taken:?}");
        agent.create("c2").await;
    });
}

#[test]
fn a_start_leaves_out_policies_of_the_feed_that_do_not_fit() {
    let machine = machine();
    machine.kernel.set_peers_max(401);
    let record = machine.life(async |agent| {
        let handle = agent.create("c1").await;
        put(&agent, [("fits", Some(wide("fits", 0, 60)))]).await;
        handle.shared.read(|v| v.record.clone())
    });
    let policy = Policy::new(&machine.config, Arc::new(machine.kernel.clone()), machine.proxy.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        policy.load().await.expect("the file");
        policy.begin([record], []).await;
        // The feed's file has the refused row, too.
        let rows = [("fits", Some(wide("fits", 0, 60))), ("large", Some(wide("large", 1, 101)))];
        policy.take_feed("test", policies(rows), complete()).await.expect("taken");
        policy.start().await.expect("without the large one");
        let refused: Vec<String> = policy.refused_rows().await.into_keys().collect();
        assert_eq!(refused, ["large"]);
        assert_ne!(ingress(&machine, 1), 0);
        policy.take_feed("test", pods(100), complete()).await.expect("later rows are taken");
        policy.take_feed("test", policies([("fits", None)]), complete()).await.expect("later policies, too");
        assert_eq!(ingress(&machine, 1), 0);
    });
}

/// The rows are lost, and one of those that come does not fit.
#[test]
fn lost_rows_are_replaced_by_those_that_fit() {
    let machine = machine();
    machine.kernel.set_peers_max(401);
    machine.life(async |agent| {
        agent.create("c1").await;
        put(&agent, [("fits", Some(wide("fits", 0, 60)))]).await;
    });
    machine.life(async |agent| {
        let rows = || policies([("fits", Some(wide("fits", 0, 60))), ("large", Some(wide("large", 1, 101)))]);
        agent.life.take(rows(), Complete::default()).await.rows.expect_err("not complete");
        let taken = agent.life.take(rows(), complete()).await;
        assert!(taken.rows.is_ok() && keys(&taken) == ["large"], "{taken:?}");
        assert_ne!(ingress(&machine, 1), 0);
        agent.create("c2").await;
    });
}

#[test]
fn refused_policies_follow_when_there_is_room_and_cost_later_ones_nothing() {
    let machine = machine();
    machine.kernel.set_peers_max(401);
    machine.life(async |agent| {
        agent.create("c1").await;
        let attempts = || machine.kernel.calls(Op::ObserveAddresses);
        let names: Vec<String> = (0..100).map(|n| format!("large-{n:02}")).collect();
        let large = names.iter().zip(0..).map(|(name, part)| (name.as_str(), Some(wide(name, part, 101))));
        let before = attempts();
        let refused = put(&agent, large.chain([("zz", Some(isolates("web")))])).await;
        assert!(attempts() - before < 80, "{} attempts in one call", attempts() - before);
        assert!(refused.len() >= 100, "{refused:?}");
        let mut calls = 0;
        while agent.life.refused().await.iter().any(|refusal| refusal.why.contains("not tried yet")) {
            calls += 1;
            assert!(calls < 30, "{:?}", agent.life.refused().await);
            agent.life.policy.ensure().await.expect("tried");
        }
        assert!(calls > 1, "all at once");
        assert!(ingress(&machine, 1) != 0 && agent.life.refused().await.len() == 100);
        // Later policies, and looks without more room.
        let before = attempts();
        assert_eq!(put(&agent, [("db", Some(isolates("db")))]).await.len(), 100);
        agent.life.policy.ensure().await.expect("nothing to do");
        assert!(attempts() - before < 6, "{} attempts", attempts() - before);
        put(&agent, names.iter().map(|name| (name.as_str(), None))).await;
        // One that fits when another is gone.
        put(&agent, [("one", Some(wide("one", 0, 60)))]).await;
        assert_eq!(put(&agent, [("two", Some(wide("two", 1, 60)))]).await, ["two"]);
        assert_eq!(put(&agent, [("one", None)]).await, ["two"]);
        agent.life.policy.ensure().await.expect("tried");
        assert_eq!(agent.life.refused().await, []);
        assert!(machine.kernel.policy().0.peers.contains_key(&"172.16.1.0/32".parse().expect("a network")));
    });
}

#[test]
fn policies_that_the_proxy_has_not_acknowledged_are_refused_until_it_has() {
    let machine = machine();
    machine.life(async |agent| {
        agent.create("c1").await;
        agent.proxy.is_silent(true);
        let rows = [("l7", Some(only("/a"))), ("other", Some(isolates("web")))];
        let taken = agent.life.take(policies(rows), complete()).await;
        let [refused] = &taken.refused[..] else { panic!("{taken:?}") };
        assert!(taken.rows.is_ok() && refused.key.key == "l7" && refused.stale, "{taken:?}");
        assert!(refused.why.contains("has not acknowledged"), "{}", refused.why);
        agent.proxy.is_silent(false);
        agent.life.policy.ensure().await.expect("looked");
        assert_eq!(agent.life.refused().await, []);
    });
}

#[test]
fn labels_of_a_namespace_are_in_force_when_the_connections_of_earlier_rules_have_ended() {
    let machine = machine();
    machine.life(async |agent| {
        create_in_shop(&agent).await;
        agent.life.take(shop("off"), complete()).await.rows.expect("taken");
        let dark = "endpointSelector: {matchLabels: {'k8s:io.cilium.k8s.namespace.labels.light': 'off'}}";
        put(&agent, [("l7", Some(only("/a").replace("endpointSelector: {}", dark)))]).await;
        assert_ne!(ingress(&machine, 1), 0);
        agent.life.take(shop("on"), complete()).await.rows.expect("taken");
        let list = agent.life.policy.list().await;
        assert_eq!((ingress(&machine, 1), list.problem, list.realized), (0, None, list.revision));
    });
}
