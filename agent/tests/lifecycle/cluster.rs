//! Other nodes of the cluster: the order of changes, refused direct paths, and the report to the producer of the feed.

use std::{
    fs,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use wharf_agent::{cluster::feed::KEEP_CONTROLLER, node::network, policy, status::feed::Reporter};
use wharf_cluster::paths::{Path, Probed};
use wharf_core::{
    kernel::{KernelErrorKind as Kind, MissingRoute},
    overlap::{NodeNetwork, Way},
};
use wharf_datapath::fake::{Operation as Op, Peers};

use crate::support::*;

/// Longer than a failure may last until the node is unready.
const LONG: Duration = Duration::from_secs(31);

/// A node with a cluster file, and these other nodes in the network of its link.
fn machine(others: &[&str]) -> Machine {
    let mut machine = Machine::new();
    machine.config.cluster_file = Some(machine.config.state_dir.join("nodes.toml"));
    let network = |net: &str, way| NodeNetwork { net: net.parse().expect("network"), way, ifname: None };
    let lan = Way::OnLink { by_kernel: true, point_to_point: false };
    machine.kernel.set_networks(vec![network("192.0.2.0/24", lan), network("192.0.2.1/32", Way::Address)]);
    set_nodes(&machine, others);
    machine
}

fn set_nodes(machine: &Machine, others: &[&str]) {
    let mut text = "[[node]]\nname = 'test'\naddresses = ['192.0.2.1']\n".to_owned();
    for (n, name) in others.iter().enumerate() {
        text.push_str(&format!(
            "\n[[node]]\nname = '{name}'\naddresses = ['192.0.2.{}']\npod-cidrs = ['10.{}.0.0/24']\n\
             router-addresses = ['10.{}.0.1']\n",
            n + 2,
            n + 101,
            n + 101
        ));
    }
    fs::write(machine.config.cluster_file.as_ref().expect("a file"), text).expect("written");
}

async fn wait_long() {
    tokio::time::pause();
    tokio::time::advance(LONG).await;
    tokio::time::resume();
}

/// Messages of the conditions `Ready` and `RoutesInForce`; empty for one that holds.
async fn conditions(reporter: &Reporter) -> [String; 2] {
    let conditions = reporter.report().await.conditions;
    ["Ready", "RoutesInForce"].map(|name| {
        let condition = conditions.iter().find(|condition| condition.name == name).expect("the condition");
        assert_eq!(condition.holds, condition.message.is_empty(), "{condition:?}");
        condition.message.clone()
    })
}

fn reporter(agent: &Agent) -> Reporter {
    agent.node.serving.store(true, Ordering::Release);
    Reporter::new(&agent.node)
}

#[test]
fn an_older_state_of_the_nodes_never_follows_a_newer_one() {
    let machine = machine(&["b"]);
    machine.life(async |agent| {
        agent.kernel.change_peers_behind_the_back(|peers| *peers = Peers::default());
        // It knows node b alone, and has made nothing.
        let hold = agent.kernel.hold_node(0);
        let life = Arc::clone(&agent.life);
        let older = tokio::spawn(async move { life.network.ensure_node().await });
        hold.reached().await;
        set_nodes(&machine, &["b", "c"]);
        agent.life.network.load_cluster("boot").await.expect("nodes");
        let life = Arc::clone(&agent.life);
        let newer = tokio::spawn(async move { life.network.put_cluster().await });
        let_all_run().await;
        hold.release();
        older.await.expect("task").expect("the node's objects");
        newer.await.expect("task").expect("the nodes");
        assert_eq!(agent.kernel.peers().routes.len(), 2);
    });
}

#[test]
fn refused_paths_are_kept_although_the_kernel_refuses_their_routes() {
    let machine = machine(&["b"]);
    machine.life(async |agent| {
        let (from, router, hop) = ([10, 88, 0, 1].into(), [10, 101, 0, 1].into(), [192, 0, 2, 2].into());
        let path = Path { node: "b".to_owned(), from, router, hop };
        // Failures, answers by the overlay on trial, and failures of the test.
        for answers in [false, false, false, true, true, false, false, false, false] {
            let probed = Probed { path: path.clone(), router: Some(answers), hop: Some(true) };
            agent.life.network.cluster.judge_paths(&[probed]).await;
        }
        agent.kernel.fail_next(Op::EnsureNode, Kind::Permission);
        agent.life.network.follow_cluster().await.expect_err("the kernel refused");
        assert!(machine.files().contains(&"paths.json".to_owned()), "{:?}", machine.files());
    });
}

#[test]
fn a_report_names_missing_routes_and_a_node_without_any_is_unready() {
    let machine = machine(&["b", "c"]);
    machine.life(async |agent| {
        let reporter = reporter(&agent);
        let missing = |to: &str| MissingRoute {
            to: to.parse().expect("network"),
            why: "no overlay: UDP port 4789 is in use".into(),
        };
        let ensure = async |routes: &[&str]| {
            agent.kernel.set_missing_routes(routes.iter().copied().map(missing).collect());
            agent.life.network.ensure_node().await.expect("the rest of the node");
        };
        assert_eq!(conditions(&reporter).await, [""; 2]);
        ensure(&["10.101.0.0/24"]).await;
        conditions(&reporter).await;
        wait_long().await;
        let [ready, routes] = conditions(&reporter).await;
        assert_eq!(ready, "", "a route to one node");
        assert!(routes.contains("the nodes b: no overlay: UDP port 4789"), "{routes}");
        ensure(&["10.101.0.0/24", "10.102.0.0/24"]).await;
        let [ready, routes] = conditions(&reporter).await;
        assert_eq!(ready, "", "the agent may repair it");
        assert!(routes.contains("the nodes b, c: "), "{routes}");
        wait_long().await;
        let [ready, _] = conditions(&reporter).await;
        assert!(ready.starts_with("routes: ") && ready.contains("UDP port 4789"), "{ready}");
        ensure(&[]).await;
        assert_eq!(conditions(&reporter).await, [""; 2]);
        agent.kernel.fail_next(Op::EnsureNode, Kind::Permission);
        agent.life.network.ensure_node().await.expect_err("the kernel refused");
        let [ready, routes] = conditions(&reporter).await;
        assert!(ready.is_empty() && routes.contains("may be missing"), "{ready} {routes}");
    });
}

#[test]
fn a_controller_that_keeps_failing_makes_the_node_unready() {
    let machine = machine(&["b"]);
    machine.life(async |agent| {
        let (reporter, controllers) = (reporter(&agent), &agent.life.tasks.controllers);
        controllers.record(policy::CONTROLLER, Err("the kernel refused"));
        let [ready, _] = conditions(&reporter).await;
        assert!(ready.contains("policy: the kernel refused"), "since the first report: {ready}");
        for name in [network::CONTROLLER, policy::CONTROLLER, KEEP_CONTROLLER] {
            controllers.record(name, Ok::<(), String>(()));
        }
        assert_eq!(conditions(&reporter).await[0], "", "all are well");
        for name in [network::CONTROLLER, policy::CONTROLLER, "pool-overlap"] {
            controllers.record(name, Err("the kernel refused"));
            assert_eq!(conditions(&reporter).await[0], "", "{name}: the agent may repair it");
            wait_long().await;
            let [ready, _] = conditions(&reporter).await;
            let is_needed = name != "pool-overlap";
            assert_eq!(ready.contains(&format!("{name}: the kernel refused")), is_needed, "{ready}");
            controllers.record(name, Ok::<(), String>(()));
            assert_eq!(conditions(&reporter).await[0], "", "{name}");
        }
    });
}
