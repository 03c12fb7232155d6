//! Pods of this node take labels and named ports from their rows in the cluster feed.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::{sync::oneshot, time::Instant};
use wharf_agent::{
    cluster::feed::{Consumer as _, Taken},
    endpoint::create::CreateSpec,
    node::{
        edit::Edit,
        endpoint::{Command, Handle},
    },
};
use wharf_cluster::feed::{Complete, Effects, FeedPod, Kind};
use wharf_core::{
    identity::{Identity, Label},
    ids::PortName,
    nat::Protocol,
    policy::NamedPort,
    state::State,
};
use wharf_datapath::fake::Operation as Op;

use crate::support::*;

const UID: &str = "6f1c1f9e-3b0a-4a8e-9d57-0a4f5a0c1d2e";
const NEXT: &str = "0b7d2c44-91aa-4f0e-8a11-5d0e6f7a8b9c";

/// Longer than a create waits for a row.
const LONG: Duration = Duration::from_secs(4);

/// Databases get packets from nobody.
const DARK: &str = "
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: db, namespace: shop}
spec:
  podSelector: {matchLabels: {app: db}}
  policyTypes: [Ingress]
";

fn machine() -> Machine {
    let mut machine = Machine::new();
    machine.config.cluster_feed = Some(machine.config.run_dir.join("feed"));
    machine
}

/// The pod `web` as a kubelet's runtime names it.
fn web(agent: &Agent) -> CreateSpec {
    let labels = [("namespace", "shop"), ("name", "web"), ("uid", UID)].iter();
    let labels = labels.map(|(key, value)| format!("k8s:io.kubernetes.pod.{key}={value}").parse().expect("label"));
    let (pod_name, pod_namespace) = (Some("web".to_owned()), Some("shop".to_owned()));
    CreateSpec { labels: labels.collect(), pod_name, pod_namespace, ..agent.container("web") }
}

fn row(uid: &str, app: &str) -> FeedPod {
    FeedPod {
        uid: uid.into(),
        namespace: "shop".into(),
        name: "web".into(),
        addresses: [].into(),
        node: "test".into(),
        labels: BTreeMap::from([("app".to_owned(), app.to_owned())]).into(),
        named_ports: BTreeMap::from([((Protocol::Tcp, "http".to_owned()), 80)]).into(),
    }
}

/// Puts a row in force, or removes it.
async fn take(agent: &Agent, uid: &str, pod: Option<FeedPod>) -> Taken {
    let pods = BTreeMap::from([(uid.into(), pod.map(Into::into))]);
    let complete = Complete { all: true, namespaces: true, ..Complete::default() };
    agent.life.take(Effects { pods, ..Effects::default() }, complete).await
}

async fn put(agent: &Agent, app: &str) {
    let taken = take(agent, UID, Some(row(UID, app))).await;
    assert!(taken.rows.is_ok() && taken.refused.is_empty(), "{taken:?}");
}

async fn create(agent: &Agent, spec: CreateSpec) -> Handle {
    agent.handle(agent.try_create(spec).await.expect("created").id)
}

async fn edit(handle: &Handle, edit: Edit) {
    let (done, answer) = oneshot::channel();
    handle.mailbox.send(Command::Edit(Box::new(edit), done)).await.expect("the endpoint is there");
    answer.await.expect("answered").expect("changed");
}

/// Waits until a create waits for its row.
async fn waits(agent: &Agent) -> Handle {
    let waits = |handle: &Handle| handle.shared.read(|v| v.status.waits_for.contains("row of its pod"));
    eventually("a create waits for its row", || agent.life.endpoints.registry.list().iter().any(waits)).await;
    agent.handle(1)
}

fn apps(labels: &BTreeSet<Label>) -> Vec<&str> {
    labels.iter().filter(|label| label.key == "app").map(|label| label.value.as_str()).collect()
}

/// Values of its labels `app`, and its identity.
fn app(handle: &Handle) -> (Vec<String>, Identity) {
    handle.shared.read(|v| (apps(&v.record.labels).into_iter().map(str::to_owned).collect(), v.record.identity))
}

fn is_isolated(agent: &Agent, handle: &Handle) -> bool {
    agent.kernel.policy().0.sets.get(&handle.id).is_some_and(|sets| sets.ingress != 0)
}

#[test]
fn a_pod_whose_row_is_known_has_its_labels_at_once_on_every_interface() {
    machine().life(async |agent| {
        put(&agent, "web").await;
        let spec = web(&agent);
        let first = create(&agent, spec.clone()).await;
        let second = create(&agent, CreateSpec { attachment: attachment("web", "eth1"), ..spec }).await;
        let (labels, identity) = app(&first);
        assert_eq!(labels, ["web"]);
        assert_ne!(identity, Identity::INIT);
        assert!(!log_of(&first).iter().any(|line| line.starts_with("pod-row")), "{:?}", log_of(&first));
        put(&agent, "db").await;
        for handle in [&first, &second] {
            assert_eq!((app(handle).0, state(handle)), (vec!["db".to_owned()], State::Ready));
        }
        assert_eq!(app(&first).1, app(&second).1);
        agent.assert_healthy().await;
    });
}

#[test]
fn a_create_waits_for_the_row_of_its_pod_before_anything_is_made() {
    machine().life(async |agent| {
        let create = agent.spawn_create(web(&agent));
        let handle = waits(&agent).await;
        assert_eq!((state(&handle), agent.operations()), (State::WaitingForIdentity, Vec::new()));
        put(&agent, "web").await;
        create.await.expect("task").expect("created");
        assert_eq!((app(&handle).0, state(&handle)), (vec!["web".to_owned()], State::Ready));
        agent.assert_healthy().await;
    });
}

#[test]
fn a_row_that_comes_after_the_wait_ends_the_isolation() {
    machine().life(async |agent| {
        agent.life.policy.import("a.yaml", DARK).await.expect("imported");
        let create = agent.spawn_create(web(&agent));
        let handle = waits(&agent).await;
        tokio::time::pause();
        tokio::time::advance(LONG).await;
        tokio::time::resume();
        create.await.expect("task").expect("created");
        assert_eq!(app(&handle), (Vec::new(), Identity::INIT));
        assert!(is_isolated(&agent, &handle));
        assert!(handle.shared.read(|v| v.status.waits_for.contains("row of its pod")));
        put(&agent, "web").await;
        assert_eq!((app(&handle).0, state(&handle)), (vec!["web".to_owned()], State::Ready));
        assert!(!is_isolated(&agent, &handle), "when the row is in force");
        put(&agent, "db").await;
        assert!(is_isolated(&agent, &handle));
        agent.assert_healthy().await;
    });
}

#[test]
fn a_request_without_time_for_the_wait_does_not_wait() {
    machine().life(async |agent| {
        let deadline = Instant::now() + LONG;
        let handle = create(&agent, CreateSpec { deadline, ..web(&agent) }).await;
        assert_eq!(app(&handle), (Vec::new(), Identity::INIT));
        agent.delete(&handle).await;
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_row_that_is_gone_or_of_a_successor_leaves_the_labels() {
    machine().life(async |agent| {
        put(&agent, "web").await;
        let handle = create(&agent, web(&agent)).await;
        let old = app(&handle);
        put(&agent, "db").await;
        let new = app(&handle);
        assert!(new.0 == ["db"] && new.1 != old.1, "{old:?} {new:?}");
        let record = agent.snapshot().await.endpoints.remove(0);
        assert_eq!((apps(&record.labels), record.identity), (vec!["db"], new.1));
        take(&agent, UID, None).await;
        assert_eq!(app(&handle), new);
        take(&agent, NEXT, Some(row(NEXT, "cache"))).await;
        assert_eq!(app(&handle), new);
        assert_eq!(agent.identities.list().len(), 1, "the identity of before is released");
        agent.assert_healthy().await;
    });
}

#[test]
fn rows_of_other_nodes_give_no_labels() {
    machine().life(async |agent| {
        put(&agent, "web").await;
        let handle = create(&agent, web(&agent)).await;
        let elsewhere = FeedPod { node: "b".into(), ..row(UID, "db") };
        take(&agent, UID, Some(elsewhere)).await;
        assert_eq!(app(&handle).0, ["web"]);
    });
}

#[test]
fn labels_survive_a_restart_without_a_producer() {
    let machine = machine();
    machine.life(async |agent| {
        put(&agent, "web").await;
        create(&agent, web(&agent)).await;
    });
    machine.life(async |agent| {
        let handle = agent.handle(1);
        eventually("it is back", || state(&handle) == State::Ready).await;
        assert_eq!(app(&handle).0, ["web"]);
        // As after an end between the change of the row and that of the endpoint.
        put(&agent, "db").await;
        assert_eq!((app(&handle).0, state(&handle)), (vec!["db".to_owned()], State::Ready));
        agent.assert_healthy().await;
    });
}

#[test]
fn a_row_that_an_endpoint_cannot_take_is_refused_and_tried_again() {
    machine().life(async |agent| {
        put(&agent, "web").await;
        let handle = create(&agent, web(&agent)).await;
        agent.disk.fill();
        let taken = take(&agent, UID, Some(row(UID, "db"))).await;
        assert!(taken.rows.is_ok(), "the other rows do not wait: {taken:?}");
        let [refused] = &taken.refused[..] else { panic!("{taken:?}") };
        assert_eq!((refused.key.kind, refused.key.key.as_str(), refused.name.as_str()), (Kind::Pod, UID, "shop/web"));
        assert!(refused.stale && refused.why.contains("endpoint 1"), "{refused:?}");
        assert_eq!(app(&handle).0, ["web"]);
        agent.disk.mend();
        agent.life.refused().await;
        eventually("it has the row", || app(&handle).0 == ["db"] && state(&handle) == State::Ready).await;
        assert_eq!(agent.life.refused().await, []);
        agent.assert_healthy().await;
    });
}

#[test]
fn a_row_that_changes_during_a_create_is_in_force_when_it_is_reported() {
    machine().life(async |agent| {
        put(&agent, "web").await;
        let hold = agent.kernel.hold(Op::EnsureLink);
        let create = agent.spawn_create(web(&agent));
        hold.reached().await;
        let handle = agent.handle(1);
        tokio::join!(put(&agent, "db"), async {
            let_all_run().await;
            assert_eq!(app(&handle).0, ["web"], "its task is busy");
            hold.release();
        });
        assert_eq!((app(&handle).0, state(&handle)), (vec!["db".to_owned()], State::Ready));
        create.await.expect("task").expect("created");
        agent.assert_healthy().await;
    });
}

#[test]
fn labels_and_ports_of_a_client_take_precedence() {
    machine().life(async |agent| {
        put(&agent, "web").await;
        let handle = create(&agent, web(&agent)).await;
        let given = handle.shared.read(|v| v.record.labels.clone());
        let mine = given.iter().filter(|label| label.key != "app").cloned();
        let mine: BTreeSet<Label> = mine.chain(["k8s:app=mine".parse().expect("label")]).collect();
        edit(&handle, Edit::labels(mine.clone())).await;
        let port = NamedPort { port: 8080.try_into().expect("port"), protocol: Protocol::Tcp };
        let named_ports = [(PortName::parse("http").expect("name"), Some(port))].into();
        edit(&handle, Edit { named_ports, ..Edit::default() }).await;
        put(&agent, "db").await;
        assert_eq!(app(&handle).0, ["mine"]);
        let ports: Vec<u16> =
            handle.shared.read(|v| v.record.all_named_ports().map(|(_, port)| port.port.get()).collect());
        assert_eq!(ports, [8080]);
        let without = mine.into_iter().filter(|label| label.key != "app").collect();
        edit(&handle, Edit::labels(without)).await;
        assert_eq!(app(&handle).0, ["db"], "the row's again");
        agent.assert_healthy().await;
    });
}
