//! Enforcement and named ports of one endpoint. When a change is answered, the kernel has its rows. They survive a
//! restart of the agent. A failed change leaves nothing.

use tokio::sync::oneshot;
use wharf_agent::{
    node::{
        edit::Edit,
        endpoint::{Command, Handle},
        error::CommandError,
    },
    policy::{self, Ask},
};
use wharf_api::{Enforcement, PolicyExplanation, PolicyProtocol, PolicyVerdict};
use wharf_core::{
    ids::PortName,
    kernel::KernelErrorKind as Kind,
    nat::Protocol,
    policy::{MAX_NAMED_PORTS, NamedPort},
};
use wharf_datapath::fake::Operation as Op;

use crate::support::*;

/// Pods with the label `app: web` get packets from nobody.
const ISOLATED: &str = "
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Ingress]
";

/// They send to port `api` of each other, and to nothing else.
const BY_NAME: &str = "
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Egress]
  egress:
  - to: [{podSelector: {matchLabels: {app: web}}}]
    ports: [{port: api}]
";

pub(crate) async fn edit(handle: &Handle, edit: Edit) -> Result<(), CommandError> {
    let (done, answer) = oneshot::channel();
    handle.mailbox.send(Command::Edit(Box::new(edit), done)).await.expect("the endpoint is there");
    answer.await.expect("answered")
}

fn enforcement(own: Enforcement) -> Edit {
    Edit { enforcement: Some(own), ..Edit::default() }
}

fn port(name: &str, number: Option<u16>) -> Edit {
    let port = |n: u16| NamedPort { port: n.try_into().expect("a port"), protocol: Protocol::Tcp };
    let named_ports = [(PortName::parse(name).expect("a name"), number.map(port))].into();
    Edit { named_ports, ..Edit::default() }
}

/// A TCP connection between two endpoints, by the rows that were given to the kernel.
async fn explain(agent: &Agent, from: &Handle, to: &Handle, port: u16) -> PolicyExplanation {
    let (source, destination) = (addresses(from)[0], addresses(to)[0]);
    let to_port = policy::destination(PolicyProtocol::Tcp, port).expect("a port");
    let ask = Ask { from: Some(from.id), source, to: Some(to.id), destination, to_port };
    agent.life.policy.explain(ask).await
}

async fn passes(agent: &Agent, from: &Handle, to: &Handle, port: u16) -> bool {
    explain(agent, from, to, port).await.verdict == PolicyVerdict::Accept
}

/// Rule sets of ingress and egress, as the kernel has them.
fn sets(agent: &Agent, handle: &Handle) -> (u32, u32) {
    agent.kernel.policy().0.sets.get(&handle.id).map_or((0, 0), |sets| (sets.ingress, sets.egress))
}

async fn two(agent: &Agent) -> (Handle, Handle) {
    (agent.create("c1").await, agent.create("c2").await)
}

#[test]
fn an_endpoint_of_its_own_is_isolated_in_both_directions_without_a_policy() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let (one, other) = two(&agent).await;
        edit(&one, enforcement(Enforcement::Always)).await.expect("changed");
        let (ingress, egress) = sets(&agent, &one);
        assert!(ingress != 0 && egress != 0, "in the kernel when it is answered");
        assert_eq!(sets(&agent, &other), (0, 0));
        assert!(!passes(&agent, &one, &other, 80).await && !passes(&agent, &other, &one, 80).await);
        let told = explain(&agent, &one, &other, 80).await.egress.expect("judged");
        assert_eq!(told.isolated_by, ["policy-enforcement of the endpoint always"]);
        let policy = agent.life.policy.endpoint(one.id).await.expect("read");
        assert_eq!(policy.enforcement, Enforcement::Always);
        assert_eq!(agent.life.policy.endpoint(other.id).await.expect("read").enforcement, Enforcement::Default);
    });
    machine.life(async |agent| {
        let (one, other) = (agent.handle(1), agent.handle(2));
        assert!(!passes(&agent, &other, &one, 80).await, "it outlives the agent");
        edit(&one, enforcement(Enforcement::Default)).await.expect("changed");
        assert_eq!(sets(&agent, &one), (0, 0));
        assert!(passes(&agent, &other, &one, 80).await);
    });
}

#[test]
fn an_endpoint_without_enforcement_is_the_subject_of_no_policy_and_still_a_peer() {
    Machine::new().life(async |agent| {
        let (one, other) = two(&agent).await;
        let from_web = format!("{ISOLATED}  ingress: [{{from: [{{podSelector: {{matchLabels: {{app: web}}}}}}]}}]\n");
        agent.life.policy.import("a.yaml", &from_web).await.expect("imported");
        edit(&one, enforcement(Enforcement::Never)).await.expect("changed");
        assert_eq!(sets(&agent, &one), (0, 0));
        assert!(passes(&agent, &one, &other, 80).await, "the other's policy knows it by its labels");
        assert_eq!(agent.life.policy.list().await.policies[0].endpoints, [2]);
        let policy = agent.life.policy.endpoint(one.id).await.expect("read");
        assert_eq!((policy.enforcement, policy.ingress.policies.len()), (Enforcement::Never, 0));
        edit(&one, enforcement(Enforcement::Default)).await.expect("changed");
        assert_ne!(sets(&agent, &one).0, 0);
        assert_eq!(agent.life.policy.list().await.policies[0].endpoints, [1, 2]);
    });
}

#[test]
fn the_nodes_mode_never_goes_before_an_endpoints_own() {
    Machine::new().life(async |agent| {
        let (one, other) = two(&agent).await;
        edit(&one, enforcement(Enforcement::Always)).await.expect("changed");
        agent.life.policy.set_enforcement(Enforcement::Never).await.expect("set");
        assert_eq!(sets(&agent, &one), (0, 0));
        edit(&other, enforcement(Enforcement::Always)).await.expect("changed");
        assert_eq!(sets(&agent, &other), (0, 0));
        assert_eq!(agent.life.policy.endpoint(one.id).await.expect("read").enforcement, Enforcement::Never);
        agent.life.policy.set_enforcement(Enforcement::Always).await.expect("set");
        edit(&other, enforcement(Enforcement::Never)).await.expect("changed");
        assert_eq!(sets(&agent, &other), (0, 0), "its own goes before every other mode");
        agent.life.policy.set_enforcement(Enforcement::Default).await.expect("set");
        assert!(sets(&agent, &one) != (0, 0) && !passes(&agent, &other, &one, 80).await);
    });
}

#[test]
fn a_change_that_the_kernel_or_the_disk_refuses_leaves_nothing() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let (one, _) = two(&agent).await;
        agent.life.policy.import("a.yaml", ISOLATED).await.expect("imported");
        let before = (one.shared.read(|v| v.record.clone()), agent.kernel.policy().0.sets);
        let both = Edit { enforcement: Some(Enforcement::Always), ..port("api", Some(80)) };
        agent.kernel.fail_next(Op::ChangePolicy, Kind::Exhausted);
        let refused = edit(&one, both.clone()).await.expect_err("the kernel");
        assert!(refused.to_string().contains("the rules of before"), "{refused}");
        agent.disk.fill();
        edit(&one, both).await.expect_err("the disk");
        agent.disk.mend();
        let now = one.shared.read(|v| v.record.clone());
        assert_eq!(now, before.0);
        assert_eq!(agent.snapshot().await.endpoints[0], before.0);
        let (ingress, egress) = sets(&agent, &one);
        assert!(ingress != 0 && egress == 0, "{:?} {:?}", before.1, agent.kernel.policy().0.sets);
        assert_eq!(agent.life.policy.list().await.problem, None);
        agent.assert_healthy().await;
    });
}

#[test]
fn a_rule_by_a_ports_name_means_each_peers_own_number() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let (one, other) = two(&agent).await;
        let third = agent.create("c3").await;
        agent.life.policy.import("a.yaml", BY_NAME).await.expect("imported");
        assert!(!passes(&agent, &third, &one, 8080).await, "nobody declares the name");
        edit(&one, port("api", Some(8080))).await.expect("changed");
        edit(&other, port("api", Some(9090))).await.expect("changed");
        for (to, number, opens) in
            [(&one, 8080, true), (&one, 9090, false), (&other, 9090, true), (&other, 8080, false)]
        {
            assert_eq!(passes(&agent, &third, to, number).await, opens, "{number}");
        }
    });
    machine.life(async |agent| {
        let (one, other, third) = (agent.handle(1), agent.handle(2), agent.handle(3));
        assert!(passes(&agent, &third, &one, 8080).await, "they outlive the agent");
        edit(&one, port("api", None)).await.expect("changed");
        assert!(!passes(&agent, &third, &one, 8080).await && passes(&agent, &third, &other, 9090).await);
    });
}

#[test]
fn an_endpoint_has_a_bounded_number_of_named_ports() {
    Machine::new().life(async |agent| {
        let one = agent.create("c1").await;
        let named = |n: usize| {
            let many = (0..n).flat_map(|i| port(&format!("p{i}"), Some(80)).named_ports);
            Edit { named_ports: many.collect(), ..Edit::default() }
        };
        edit(&one, named(MAX_NAMED_PORTS)).await.expect("as many as fit");
        let refused = edit(&one, named(MAX_NAMED_PORTS + 1)).await.expect_err("one more");
        assert!(matches!(refused, CommandError::NamedPorts(65)), "{refused}");
        assert_eq!(one.shared.read(|v| v.record.named_ports.len()), MAX_NAMED_PORTS);
    });
}
