//! The controller of the health endpoint, with a process and probes in memory.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tokio::sync::watch;
use wharf_agent::health::{self, HealthError, Host, Outcome, Probed, Responder};
use wharf_api::{HealthState, NodeHealth, ProbeKind};
use wharf_core::{endpoint::NetnsRef, ids::EndpointId, kernel::KernelErrorKind, plan::DeleteOptions};
use wharf_datapath::{FakeKernel, fake::Operation as Op};
use wharf_kit::sync::lock;

use crate::support::*;

/// A host in memory. Its processes have the numbers 1, 2, 3 in the order of their launch, and answer as the test says.
#[derive(Clone)]
struct Memory {
    kernel: FakeKernel,
    answer: Arc<Mutex<Outcome>>,
    /// When each process was launched.
    launches: Arc<Mutex<Vec<Instant>>>,
    /// How each process ended, by its number; without those that the controller ended.
    processes: Arc<Mutex<BTreeMap<u32, watch::Sender<Option<String>>>>>,
}

impl Memory {
    fn new(agent: &Agent) -> Self {
        let answer = Arc::new(Mutex::new(answered()));
        Self { kernel: agent.kernel.clone(), answer, launches: Arc::default(), processes: Arc::default() }
    }

    fn answers(&self, outcome: Outcome) {
        *lock(&self.answer) = outcome;
    }

    /// A process that the controller did not end: killed by somebody else.
    fn kill(&self, pid: u32) {
        lock(&self.processes)[&pid].send_replace(Some("it was ended by SIGKILL".to_owned()));
    }

    /// Processes that the controller did not end.
    fn not_ended(&self) -> Vec<u32> {
        lock(&self.processes).keys().copied().collect()
    }
}

struct InMemory {
    pid: u32,
    netns: NetnsRef,
    ended: watch::Receiver<Option<String>>,
    host: Memory,
}

impl Host for Memory {
    type Process = InMemory;

    async fn launch(&self, _: &str) -> Result<InMemory, HealthError> {
        let mut launches = lock(&self.launches);
        launches.push(Instant::now());
        let pid = u32::try_from(launches.len()).expect("a few launches");
        let netns = self.kernel.add_netns(format!("/proc/{pid}/ns/net"));
        let (tell, ended) = watch::channel(None);
        lock(&self.processes).insert(pid, tell);
        Ok(InMemory { pid, netns, ended, host: self.clone() })
    }

    async fn probe(&self, _: &InMemory, addresses: &[IpAddr]) -> Vec<Probed> {
        let outcome = lock(&self.answer).clone();
        let one = |address: &IpAddr| Probed { address: *address, kind: ProbeKind::Http, outcome: outcome.clone() };
        addresses.iter().map(one).collect()
    }
}

impl Responder for InMemory {
    fn pid(&self) -> u32 {
        self.pid
    }

    fn netns_path(&self) -> PathBuf {
        self.netns.path.clone()
    }

    fn is_in(&self, netns: &NetnsRef) -> bool {
        self.netns.same(netns)
    }

    fn ended(&self) -> watch::Receiver<Option<String>> {
        self.ended.clone()
    }

    async fn end(self) {
        lock(&self.host.processes).remove(&self.pid);
    }
}

/// An agent whose controller makes a round when it is asked to, or when the process ends.
fn machine() -> Machine {
    let mut machine = Machine::new();
    machine.config.health_interval = Duration::from_secs(3_600);
    machine
}

/// Starts the controller and waits for its first round.
async fn begin(agent: &Agent) -> Memory {
    let memory = Memory::new(agent);
    agent.life.tasks.endpoints.spawn(health::run(agent.life.clone(), agent.node.health.clone(), memory.clone()));
    eventually("the first round", || agent.node.health.view().rounds == 1).await;
    memory
}

/// What is known after one more round.
async fn round(agent: &Agent) -> NodeHealth {
    agent.node.health.ask().expect("it is on").await.expect("a round ends");
    agent.node.health.view()
}

fn endpoint(agent: &Agent) -> EndpointId {
    id(agent.node.health.view().endpoint.expect("an endpoint"))
}

fn answered() -> Outcome {
    Outcome::Answered(Duration::from_millis(1))
}

fn no_answer() -> Outcome {
    Outcome::NoAnswer("no answer within 1s".into())
}

#[test]
fn it_is_launched_and_probed_and_at_the_stop_all_but_its_addresses_is_removed() {
    machine().life(async |agent| {
        let memory = begin(&agent).await;
        let view = agent.node.health.view();
        assert_eq!((view.state, view.launches, view.pid), (HealthState::Ok, 1, Some(1)));
        let kept = addresses(&agent.handle(endpoint(&agent).get()));
        agent.life.tasks.stop.cancel();
        eventually("it is off", || agent.node.health.view().state == HealthState::Off).await;
        assert!(!agent.node.health.is_on());
        assert!(agent.life.endpoints.registry.is_empty());
        assert!(agent.kernel.is_clean());
        assert!(memory.not_ended().is_empty());
        assert!(!kept.is_empty() && kept.iter().all(|ip| agent.lease_owner(*ip).is_some()));
    });
}

#[test]
fn it_is_relaunched_at_the_same_addresses_when_its_process_ends_its_endpoint_is_deleted_or_its_link_is_gone() {
    machine().life(async |agent| {
        let memory = begin(&agent).await;
        let here = || agent.handle(endpoint(&agent).get());
        let (first, kept) = (endpoint(&agent), addresses(&here()));

        memory.kill(1);
        // Nobody asks: the end itself causes the round.
        eventually("a round", || agent.node.health.view().rounds == 2).await;
        let view = agent.node.health.view();
        assert_eq!((view.state, view.launches, view.pid), (HealthState::Ok, 2, Some(2)));
        let reason = view.last_relaunch.expect("relaunched").reason;
        assert_eq!(reason, "its process 1 is gone: it was ended by SIGKILL");
        assert_ne!(endpoint(&agent), first);
        assert_eq!(addresses(&here()), kept);

        let second = endpoint(&agent);
        agent.spawn_delete(&[&here()], DeleteOptions { no_ip_release: true }).await.expect("deleted");
        let view = round(&agent).await;
        assert_eq!((view.state, view.launches), (HealthState::Ok, 3));
        assert_eq!(view.last_relaunch.expect("relaunched").reason, format!("its endpoint {second} was deleted"));
        assert_eq!(addresses(&here()), kept);

        let host_ifname = here().shared.read(|v| v.record.host_ifname.clone());
        assert!(agent.kernel.remove_link_behind_the_back(host_ifname.as_str()));
        let view = round(&agent).await;
        assert_eq!((view.state, view.launches), (HealthState::Ok, 4));
        assert_eq!(addresses(&here()), kept);
        assert_eq!((agent.life.endpoints.registry.len(), memory.not_ended()), (1, vec![4]));
    });
}

#[test]
fn three_rounds_in_a_row_without_an_answer_relaunch_it_and_another_ones_answer_does_not() {
    machine().life(async |agent| {
        let memory = begin(&agent).await;
        memory.answers(no_answer());
        for failed in 1..=2 {
            let view = round(&agent).await;
            assert_eq!((view.state, view.launches, view.failed_rounds), (HealthState::Degraded, 1, failed));
        }
        memory.answers(answered());
        assert_eq!(round(&agent).await.state, HealthState::Ok, "one good round is enough");
        memory.answers(Outcome::WrongAnswer("another's".into()));
        for _ in 0..4 {
            let view = round(&agent).await;
            assert_eq!((view.state, view.launches), (HealthState::WrongAnswer, 1));
        }
        memory.answers(no_answer());
        for _ in 0..3 {
            round(&agent).await;
        }
        let view = agent.node.health.view();
        assert_eq!((view.state, view.launches, view.pid), (HealthState::Down, 2, Some(2)));
        memory.answers(answered());
        assert_eq!(round(&agent).await.state, HealthState::Ok);
    });
}

#[test]
fn a_relaunch_that_did_not_help_is_followed_by_the_next_only_after_a_pause() {
    machine().life(async |agent| {
        let memory = begin(&agent).await;
        memory.answers(no_answer());
        for _ in 0..5 {
            round(&agent).await;
        }
        let view = agent.node.health.view();
        assert_eq!((view.state, view.launches), (HealthState::Down, 2));
        let asked = Instant::now();
        round(&agent).await;
        let relaunched = lock(&memory.launches).len() == 3;
        assert!(relaunched || agent.life.endpoints.registry.is_empty(), "it is deleted before the pause");
        eventually("it is relaunched", || agent.node.health.view().launches == 3).await;
        // The shortest pause there is.
        assert!(lock(&memory.launches)[2].duration_since(asked) >= Duration::from_millis(50));
        assert_eq!(memory.not_ended(), [3]);
    });
}

#[test]
fn a_launch_that_fails_ends_its_process_and_is_tried_again() {
    machine().life(async |agent| {
        agent.kernel.fail_next(Op::EnsureAttached, KernelErrorKind::Other);
        let memory = begin(&agent).await;
        let view = agent.node.health.view();
        assert_eq!((view.state, view.launches, view.failed_launches), (HealthState::Ok, 1, 1));
        assert_eq!(memory.not_ended(), [2]);
    });
}

#[test]
fn the_endpoint_of_a_killed_agent_makes_way_for_one_at_the_same_addresses() {
    let machine = machine();
    let kept = machine.life(async |agent| {
        begin(&agent).await;
        addresses(&agent.handle(endpoint(&agent).get()))
    });
    machine.life(async |agent| {
        assert!(agent.life.endpoints.registry.is_empty(), "its process ended with the agent");
        health::reserve(&agent.life, &agent.node.health).await;
        begin(&agent).await;
        let handle = agent.handle(endpoint(&agent).get());
        assert_eq!((addresses(&handle), agent.life.endpoints.registry.len()), (kept, 1));
    });
}
