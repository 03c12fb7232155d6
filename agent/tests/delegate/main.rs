//! Delegated mode against a service that loses calls and answers: whatever happens, in the end exactly that is attached
//! whose ADD was answered and not deleted.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod service;

use std::{collections::BTreeMap, ffi::OsString, path::Path, sync::Arc, time::Duration};

use proptest::prelude::*;
use tokio::runtime::Runtime;
use wharf_agent::{
    config::{self, AgentConfig},
    delegate::{Delegation, work::Deleted},
    node::queue::Cause,
    rest::parse::create_spec,
};
use wharf_core::ids::Attachment;
use wharf_handover::queue::Queue;

use service::{Fake, Fate};

/// Places that a history is about.
const PLACES: usize = 3;

/// A step of a history.
#[derive(Debug, Clone)]
enum Step {
    /// ADD, awaited.
    Add(usize),
    /// ADD whose caller goes away after so many milliseconds.
    Leave(usize, u64),
    /// DEL, awaited.
    Del(usize),
    /// DEL whose caller goes away at once.
    LeaveDel(usize),
    /// The agent is killed and started again.
    Restart,
    /// What is owed is tried.
    Drain,
}

fn step() -> impl Strategy<Value = Step> {
    let place = 0..PLACES;
    prop_oneof![
        4 => place.clone().prop_map(Step::Add),
        2 => (place.clone(), 0_u64..12).prop_map(|(p, ms)| Step::Leave(p, ms)),
        3 => place.clone().prop_map(Step::Del),
        1 => place.prop_map(Step::LeaveDel),
        1 => Just(Step::Restart),
        1 => Just(Step::Drain),
    ]
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        4 => Just(Fate::Done),
        1 => Just(Fate::Lost),
        1 => Just(Fate::AnswerLost),
        1 => Just(Fate::Failed),
        1 => (1_u64..10).prop_map(Fate::Slow),
    ]
}

/// What the runtime knows of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// Its ADD was answered.
    Added,
    /// Its DEL was answered, or it was never added, or its ADD failed.
    Gone,
    /// Its last operation was not answered, or a DEL failed. `killed`: the runtime must ask again, because it was a
    /// DEL, or the agent was killed since.
    Unknown { killed: bool },
}

struct Agent {
    runtime: Runtime,
    this: Arc<Delegation>,
}

fn start(directory: &Path, socket: &Path) -> Agent {
    let flags = [
        "wharf-agent".to_owned(),
        format!("--run-dir={}", directory.display()),
        format!("--delegate={}", socket.display()),
    ];
    let flags: Vec<OsString> = flags.map(OsString::from).to_vec();
    let config = AgentConfig::of(&config::parse(&flags).expect("parses")).expect("settings");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let this = runtime.block_on(async {
        let this = Delegation::new(config, socket, "this-boot".into(), None);
        this.drain(Cause::Start).await.expect("drained");
        this
    });
    Agent { runtime, this }
}

fn attachment(place: usize) -> Attachment {
    Attachment {
        network: "net".parse().expect("a name"),
        container_id: format!("c{place}").parse().expect("an id"),
        ifname: "eth0".parse().expect("a name"),
    }
}

impl Agent {
    /// Whether it was answered well; `None` when its caller left first.
    fn add(&self, place: usize, patience: Option<Duration>) -> Option<bool> {
        let id = format!("cni-attachment-id:c{place}:eth0");
        let body = serde_json::json!({
            "container_id": format!("c{place}"), "ifname": "eth0", "network": "net", "netns": "/run/netns/x", "deadline_ms": 2_000,
        });
        let spec = create_spec(&id, serde_json::from_value(body).expect("a body")).expect("a spec");
        self.runtime.block_on(async {
            let adding = self.this.add(spec);
            match patience {
                None => Some(adding.await.is_ok()),
                Some(patience) => tokio::time::timeout(patience, adding).await.ok().map(|added| added.is_ok()),
            }
        })
    }

    fn del(&self, place: usize) -> Option<Deleted> {
        self.runtime.block_on(self.this.del(attachment(place))).ok()
    }
}

fn play(steps: Vec<Step>, fates: Vec<Fate>) -> Result<(), TestCaseError> {
    let directory = tempfile::tempdir().expect("a directory");
    let (run, socket) = (directory.path().join("run"), directory.path().join("net.sock"));
    let fake = Fake::start(&socket, fates);
    let mut agent = start(&run, &socket);
    let mut known: BTreeMap<usize, Known> = BTreeMap::new();
    for step in &steps {
        match *step {
            // A runtime adds only what it knows to be gone.
            Step::Add(p) | Step::Leave(p, _) if known.get(&p).is_some_and(|k| *k == Known::Added) => {}
            // Its DEL follows an ADD that failed, before the next.
            Step::Add(p) | Step::Leave(p, _)
                if known.get(&p).is_some_and(|k| *k == Known::Unknown { killed: true }) =>
            {
                if agent.del(p).is_some() {
                    known.insert(p, Known::Gone);
                }
            }
            Step::Add(p) => {
                let added = agent.add(p, None).expect("awaited");
                known.insert(p, if added { Known::Added } else { Known::Gone });
            }
            Step::Leave(p, ms) => {
                let after = match agent.add(p, Some(Duration::from_millis(ms))) {
                    Some(true) => Known::Added,
                    Some(false) => Known::Gone,
                    None => Known::Unknown { killed: false },
                };
                known.insert(p, after);
            }
            Step::Del(p) => {
                // One that failed may be done or not; the runtime asks again.
                let after = if agent.del(p).is_some() { Known::Gone } else { Known::Unknown { killed: true } };
                known.insert(p, after);
            }
            Step::LeaveDel(p) => {
                let gone = agent.runtime.block_on(async {
                    tokio::time::timeout(Duration::from_millis(1), agent.this.del(attachment(p)))
                        .await
                        .is_ok_and(|d| d.is_ok())
                });
                known.insert(p, if gone { Known::Gone } else { Known::Unknown { killed: true } });
            }
            Step::Restart => {
                agent.runtime.shutdown_background();
                agent = start(&run, &socket);
                for k in known.values_mut().filter(|k| matches!(k, Known::Unknown { .. })) {
                    *k = Known::Unknown { killed: true };
                }
            }
            Step::Drain => drop(agent.runtime.block_on(agent.this.drain(Cause::Tick)).expect("drained")),
        }
    }
    fake.be_well();
    for (p, k) in &known {
        // A runtime sends a DEL after an unanswered ADD. An agent that was not killed also removes the rest without it.
        if *k == (Known::Unknown { killed: true }) {
            prop_assert!(agent.del(*p).is_some());
        }
    }
    let want: Vec<String> = known.iter().filter(|(_, k)| **k == Known::Added).map(|(p, _)| format!("c{p}")).collect();
    // Operations whose callers left go on: nothing must come after a while without any.
    let (end, mut quiet) = (std::time::Instant::now() + Duration::from_secs(10), 0);
    while quiet < 10 {
        let stay = agent.runtime.block_on(agent.this.drain(Cause::Tick)).expect("drained");
        let (there, records) = (fake.attached(), Queue::unfinished(&run).list().expect("listed").len());
        let admission = agent.this.status().admission;
        let idle = fake.is_idle() && (stay, records, admission.running, admission.waiting) == (0, 0, 0, 0);
        quiet = if idle && there == want { quiet + 1 } else { 0 };
        let calls = fake.calls();
        prop_assert!(
            std::time::Instant::now() < end,
            "{stay} owed, attached {there:?}, wanted {want:?}; calls {calls:?}"
        );
        std::thread::sleep(Duration::from_millis(3));
    }
    // A call of an agent that was killed may still run when the next one calls.
    let killed = steps.iter().any(|step| matches!(step, Step::Restart));
    let broken = fake.broken().filter(|what| !killed || !what.starts_with("two calls"));
    prop_assert_eq!(broken, None, "calls {:?}", fake.calls());
    agent.runtime.shutdown_background();
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, max_shrink_iters: 20, ..ProptestConfig::default() })]

    #[test]
    fn in_the_end_what_is_attached_is_what_the_runtime_was_told(
        steps in prop::collection::vec(step(), 1..14),
        fates in prop::collection::vec(fate(), 0..30),
    ) {
        play(steps, fates)?;
    }
}
