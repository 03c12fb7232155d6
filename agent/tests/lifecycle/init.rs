//! Pods that come without labels: where the node has policy, they are isolated until their labels come or are waited
//! for no longer.

use std::time::Duration;

use tokio::sync::oneshot;
use wharf_agent::{
    endpoint::create::CreateSpec,
    node::{
        edit::Edit,
        endpoint::{Command, Handle},
        error::CommandError,
    },
    policy::{self, Ask},
};
use wharf_api::{PolicyExplanation, PolicyProtocol, PolicyVerdict};
use wharf_core::{identity::Identity, policy::Enforcement, state::State};
use wharf_datapath::fake::Operation as Op;

use crate::support::*;

/// Longer than any test, unless its clock is moved.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Databases get packets from nobody; every other pod of the namespace may do what it likes.
const DARK: &str = "
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: db, namespace: shop}
spec:
  podSelector: {matchLabels: {app: db}}
  policyTypes: [Ingress]
";

/// Pods whose labels are not known send nevertheless.
const INIT_SENDS: &str = "
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: init}
spec:
  endpointSelector: {matchLabels: {'reserved:init': ''}}
  egress: [{toEntities: [all]}]
";

fn machine() -> Machine {
    let mut machine = Machine::new();
    machine.config.labels_timeout = TIMEOUT;
    machine
}

/// A pod as a kubelet's runtime names it.
fn pod(agent: &Agent, name: &str, labels: &[&str]) -> CreateSpec {
    let namespace = "k8s:io.kubernetes.pod.namespace=shop";
    let labels = labels.iter().copied().chain([namespace]).map(|l| l.parse().expect("label")).collect();
    let (pod_name, pod_namespace) = (Some(name.to_owned()), Some("shop".to_owned()));
    CreateSpec { labels, pod_name, pod_namespace, ..agent.container(name) }
}

async fn create(agent: &Agent, spec: CreateSpec) -> Handle {
    agent.handle(agent.try_create(spec).await.expect("created").id)
}

async fn edit(handle: &Handle, edit: Edit) -> Result<(), CommandError> {
    let (done, answer) = oneshot::channel();
    handle.mailbox.send(Command::Edit(Box::new(edit), done)).await.expect("the endpoint is there");
    answer.await.expect("answered")
}

fn identity(handle: &Handle) -> Identity {
    handle.shared.read(|v| v.record.identity)
}

async fn explain(agent: &Agent, from: &Handle, to: &Handle) -> PolicyExplanation {
    let (source, destination) = (addresses(from)[0], addresses(to)[0]);
    let ends = (Some(from.id), Some(to.id));
    let to_port = policy::destination(PolicyProtocol::Tcp, 80).expect("a port");
    let ask = Ask { from: ends.0, source, to: ends.1, destination, to_port };
    agent.life.policy.explain(ask).await
}

/// Whether a connection passes, both ways.
async fn passes(agent: &Agent, one: &Handle, other: &Handle) -> (bool, bool) {
    let accepts = |told: PolicyExplanation| told.verdict == PolicyVerdict::Accept;
    (accepts(explain(agent, one, other).await), accepts(explain(agent, other, one).await))
}

#[test]
fn a_pod_without_labels_is_isolated_as_soon_as_there_is_a_policy_and_until_they_come() {
    machine().life(async |agent| {
        let web = create(&agent, pod(&agent, "web", &["k8s:app=web"])).await;
        let late = create(&agent, pod(&agent, "late", &[])).await;
        assert_eq!((identity(&late), state(&late)), (Identity::INIT, State::Ready));
        assert!(late.shared.read(|v| v.status.waits_for.contains("labels")));
        assert_ne!(identity(&web), Identity::INIT);
        assert!(!agent.operations().contains(&Op::ChangePolicy), "there is no policy");
        agent.life.policy.import("a.yaml", DARK).await.expect("imported");
        assert_eq!(passes(&agent, &late, &web).await, (false, false));
        let told = explain(&agent, &late, &web).await.egress.expect("judged");
        assert_eq!(told.isolated_by, ["identity reserved:init"]);
        assert_eq!(agent.life.policy.summary().await.without_labels, 1);
        let labels = web.shared.read(|v| v.record.labels.clone());
        edit(&late, Edit::labels(labels)).await.expect("labels");
        assert_eq!(identity(&late), identity(&web));
        assert_eq!(passes(&agent, &late, &web).await, (true, true));
        assert!(!late.shared.read(|v| v.record.awaits_labels || v.status.waits_for.contains("labels")));
        assert_eq!(agent.life.policy.summary().await.without_labels, 0);
        agent.assert_healthy().await;
    });
}

#[test]
fn a_pod_that_comes_after_the_policy_is_isolated_before_it_is_attached() {
    machine().life(async |agent| {
        agent.life.policy.import("a.yaml", DARK).await.expect("imported");
        let late = create(&agent, pod(&agent, "late", &[])).await;
        let operations = agent.operations();
        let last = |of| operations.iter().rposition(|operation| *operation == of).expect("it was called");
        assert!(last(Op::ChangePolicy) < last(Op::EnsureAttached), "{operations:?}");
        let isolated = || agent.kernel.policy().0.sets.get(&late.id).is_some_and(|s| s.ingress != 0 && s.egress != 0);
        assert!(isolated());
        agent.life.policy.delete_all().await.expect("deleted");
        assert!(!isolated(), "without a policy it is open again");
    });
}

#[test]
fn labels_that_do_not_come_are_waited_for_no_longer_than_the_setting_says() {
    machine().life(async |agent| {
        agent.life.policy.import("a.yaml", DARK).await.expect("imported");
        let web = create(&agent, pod(&agent, "web", &["k8s:app=web"])).await;
        let late = create(&agent, pod(&agent, "late", &[])).await;
        assert_eq!(passes(&agent, &late, &web).await, (false, false));
        let moved =
            async || eventually("it has the identity of what it has", || identity(&late) != Identity::INIT).await;
        after(TIMEOUT - Duration::from_secs(1), let_all_run()).await;
        assert_eq!(identity(&late), Identity::INIT);
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(2)).await;
        tokio::time::resume();
        moved().await;
        eventually("its rules are in force", || state(&late) == State::Ready).await;
        assert_eq!(passes(&agent, &late, &web).await, (true, true));
        assert!(!agent.snapshot().await.endpoints[1].awaits_labels);
        agent.assert_healthy().await;
    });
}

#[test]
fn a_disk_that_is_full_when_the_wait_ends_is_tried_again() {
    let mut machine = machine();
    machine.config.labels_timeout = Duration::from_millis(50);
    machine.life(async |agent| {
        agent.disk.fill();
        let spec = pod(&agent, "late", &[]);
        agent.try_create(spec.clone()).await.expect_err("no create either");
        agent.disk.mend();
        let late = create(&agent, spec).await;
        agent.disk.fill();
        let failed = || log_of(&late).iter().any(|line| line.contains("tried again in"));
        eventually("it failed", failed).await;
        assert_eq!(identity(&late), Identity::INIT);
        agent.disk.mend();
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(6)).await;
        tokio::time::resume();
        eventually("it has an identity", || identity(&late) != Identity::INIT).await;
        agent.assert_healthy().await;
    });
}

#[test]
fn a_restart_keeps_the_isolation_and_waits_again() {
    let machine = machine();
    machine.life(async |agent| {
        agent.life.policy.import("a.yaml", DARK).await.expect("imported");
        create(&agent, pod(&agent, "late", &[])).await;
    });
    machine.life(async |agent| {
        let late = agent.handle(1);
        eventually("it is back", || state(&late) == State::Ready).await;
        assert_eq!(identity(&late), Identity::INIT);
        let sets = agent.kernel.policy().0.sets[&late.id];
        assert!(sets.ingress != 0 && sets.egress != 0);
        after(TIMEOUT + Duration::from_secs(1), async {}).await;
        eventually("the wait ends", || identity(&late) != Identity::INIT).await;
    });
}

#[test]
fn policies_about_pods_without_labels_and_an_endpoints_own_enforcement_hold() {
    machine().life(async |agent| {
        agent.life.policy.import("a.yaml", INIT_SENDS).await.expect("imported");
        let web = create(&agent, pod(&agent, "web", &["k8s:app=web"])).await;
        let late = create(&agent, pod(&agent, "late", &[])).await;
        assert_eq!(passes(&agent, &late, &web).await, (true, false));
        let never = Edit { enforcement: Some(Enforcement::Never), ..Edit::default() };
        edit(&late, never).await.expect("changed");
        assert_eq!(passes(&agent, &late, &web).await, (true, true));
        assert_eq!(identity(&late), Identity::INIT, "its labels are still to come");
    });
}

#[test]
fn what_is_no_pod_and_what_has_labels_waits_for_none() {
    machine().life(async |agent| {
        let bare = CreateSpec { labels: Default::default(), ..agent.container("bare") };
        assert_ne!(identity(&create(&agent, bare).await), Identity::INIT);
        assert_ne!(identity(&create(&agent, pod(&agent, "web", &["cni:app=web"])).await), Identity::INIT);
    });
    Machine::new().life(async |agent| {
        assert_ne!(identity(&create(&agent, pod(&agent, "late", &[])).await), Identity::INIT, "the default");
    });
}
