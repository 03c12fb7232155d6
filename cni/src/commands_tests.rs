use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixListener,
    path::Path,
    thread::JoinHandle,
};

use serde_json::json;
use tempfile::TempDir;
use wharf_handover::queue::{Deletion, MAX_RECORDS, Queue};

use super::*;

const CONTAINER: &str = "wharf-cni-unit-test";
const DEFERRED: Done = Done { stdout: None, deferred: true, found_nothing: false };

struct Machine {
    dir: TempDir,
}

impl Machine {
    fn new() -> Self {
        Self { dir: TempDir::new().unwrap() }
    }

    fn socket(&self) -> std::path::PathBuf {
        self.dir.path().join("wharf.sock")
    }

    fn queue(&self) -> Queue {
        Queue::new(self.dir.path())
    }

    fn del(&self, limits: &Limits) -> Result<Done, Fault> {
        run(&ask(&self.socket(), Command::Del { target: target() }), limits, None)
    }

    fn record(&self) -> Deletion {
        let mut entries = self.queue().list().unwrap();
        assert_eq!(entries.len(), 1, "{entries:?}");
        entries.remove(0).content.unwrap()
    }

    /// Sends these answers in turn and ends; returns the number of requests. An empty answer closes the connection,
    /// `None` waits for the caller's close.
    fn agent(&self, answers: Vec<Option<String>>) -> JoinHandle<usize> {
        let listener = UnixListener::bind(self.socket()).unwrap();
        let socket = self.socket();
        std::thread::spawn(move || {
            let mut requests = 0;
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                assert_ne!(stream.read(&mut [0; 4096]).unwrap(), 0);
                requests += 1;
                match answer {
                    Some(answer) => stream.write_all(answer.as_bytes()).unwrap(),
                    None => assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0),
                }
            }
            fs::remove_file(socket).unwrap();
            requests
        })
    }
}

fn target() -> Target {
    Target { container_id: CONTAINER.into(), ifname: "eth0".into() }
}

fn ask(socket: &Path, command: Command) -> Ask {
    let document = json!({"cniVersion": "1.1.0", "name": "net", "type": "wharf-cni", "socket": socket});
    Ask {
        conf: NetConf::parse(document.as_object().unwrap().clone(), None).unwrap(),
        command,
        runtime: None,
        ipam: None,
    }
}

fn impatient() -> Limits {
    Limits {
        add_absent: Duration::from_millis(50),
        del_absent: Duration::from_millis(50),
        del_answer: Duration::from_millis(100),
        ..Limits::default()
    }
}

fn answer(status: u16, body: &serde_json::Value) -> Option<String> {
    let body = body.to_string();
    Some(format!("HTTP/1.1 {status} x\r\nContent-Length: {}\r\n\r\n{body}", body.len()))
}

fn later() -> Option<String> {
    answer(429, &json!({"code": "overloaded", "message": "full", "retry_after_ms": 20}))
}

#[test]
fn del_without_an_agent_leaves_a_record_and_succeeds() {
    let machine = Machine::new();
    assert_eq!(machine.del(&impatient()), Ok(DEFERRED));
    let record = machine.record();
    assert_eq!(
        (record.network.as_str(), record.container_id.as_str(), record.ifname.as_str()),
        ("net", CONTAINER, "eth0")
    );
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert_eq!((record.boot_id.as_str(), record.endpoint, record.canary), (boot_id.trim(), None, None));
    drop(UnixListener::bind(machine.socket()).unwrap());
    assert_eq!(machine.del(&impatient()), Ok(DEFERRED));
    assert_eq!(machine.record().written_unix_ms, record.written_unix_ms);
}

#[test]
fn del_waits_for_an_agent_that_comes_back() {
    let machine = Machine::new();
    let late = std::thread::scope(|scope| {
        let del = scope.spawn(|| {
            machine.del(&Limits {
                del_absent: Duration::from_secs(600),
                change: Duration::from_secs(600),
                ..Limits::default()
            })
        });
        let first = machine.agent(vec![Some(String::new())]);
        assert_eq!(first.join().unwrap(), 1);
        let second = machine.agent(vec![answer(200, &json!({"deleted": [7], "errors": []}))]);
        assert_eq!(second.join().unwrap(), 1);
        del.join().unwrap()
    });
    assert_eq!(late, Ok(Done::default()));
    assert_eq!(machine.queue().list().unwrap(), [], "the agent did it");
}

#[test]
fn del_of_an_agent_that_is_silent_goes_by_the_queue() {
    let machine = Machine::new();
    let agent = machine.agent(vec![None]);
    assert_eq!(machine.del(&Limits { del_answer: Duration::from_secs(1), ..impatient() }), Ok(DEFERRED));
    assert_eq!(agent.join().unwrap(), 1, "it had its time, and is not asked twice");
    assert_eq!(machine.record().container_id, CONTAINER);
}

#[test]
fn del_of_an_agent_that_dies_each_time_goes_by_the_queue() {
    let machine = Machine::new();
    let agent = machine.agent(vec![Some(String::new())]);
    assert_eq!(machine.del(&impatient()), Ok(DEFERRED));
    assert_eq!(agent.join().unwrap(), 1);
    assert_eq!(machine.record().container_id, CONTAINER);
}

#[test]
fn del_of_an_agent_that_says_later_is_to_be_tried_again() {
    let machine = Machine::new();
    let full = answer(429, &json!({"code": "overloaded", "message": "full"}));
    let agent = machine.agent(vec![later(), full]);
    let fault = machine.del(&Limits::default()).unwrap_err();
    assert_eq!((fault.code, agent.join().unwrap()), (Code::TryAgain, 2));
    assert!(!machine.queue().path().exists(), "the agent is there, so nothing is written");
}

#[test]
fn a_delete_in_part_is_the_agents_answer_and_is_not_queued() {
    let machine = Machine::new();
    let step = json!({"step": "unpin", "endpoint": "7", "message": "device busy"});
    let agent = machine.agent(vec![answer(206, &json!({"deleted": [7], "errors": [step]}))]);
    assert_eq!(machine.del(&impatient()).unwrap_err().code, Code::TryAgain);
    agent.join().unwrap();
    assert!(!machine.queue().path().exists());
}

#[test]
fn del_before_any_agent_ran_in_this_boot_has_nothing_to_do() {
    let machine = Machine::new();
    let run_dir = machine.dir.path().join("none");
    let del = ask(&run_dir.join("wharf.sock"), Command::Del { target: target() });
    assert_eq!(run(&del, &impatient(), None), Ok(Done::default()));
    assert!(!run_dir.exists());
}

#[test]
fn del_whose_record_cannot_be_written_is_to_be_tried_again() {
    let machine = Machine::new();
    fs::write(machine.queue().path(), "in the way").unwrap();
    let fault = machine.del(&impatient()).unwrap_err();
    assert_eq!(fault.code, Code::TryAgain);
    assert!(fault.msg.contains("it is not a directory") && fault.msg.contains("does not answer"), "{}", fault.msg);
    assert!(fault.details.contains("move it out of the way"), "{}", fault.details);

    fs::remove_file(machine.queue().path()).unwrap();
    fs::create_dir(machine.queue().path()).unwrap();
    for n in 0..MAX_RECORDS {
        fs::write(machine.queue().path().join(format!("{n}")), "x").unwrap();
    }
    let fault = machine.del(&impatient()).unwrap_err();
    assert_eq!(fault.code, Code::TryAgain);
    assert!(fault.msg.contains("4096 records wait there already"), "{}", fault.msg);
}

#[test]
fn add_waits_a_little_for_an_agent_and_never_asks_one_twice_that_went_away() {
    let add = |machine: &Machine, limits: &Limits| {
        let command =
            Command::Add { target: target(), netns: "/run/netns/c1".into(), args: Box::default(), chain: None };
        run(&ask(&machine.socket(), command), limits, None)
    };
    let machine = Machine::new();
    let fault = add(&machine, &impatient()).unwrap_err();
    assert_eq!(fault.code, Code::TryAgain);
    assert!(fault.msg.contains("is wharf-agent running"), "{}", fault.msg);
    assert!(fault.details.contains(wharf_api::client::why_agent_is_away()), "{}", fault.details);
    assert!(!machine.queue().path().exists(), "an ADD leaves nothing");

    // Only the runtime may retry: the agent may have created the endpoint.
    let agent = machine.agent(vec![Some(String::new())]);
    let patient = Limits { add_absent: Duration::from_secs(600), ..Limits::default() };
    assert_eq!(add(&machine, &patient).unwrap_err().code, Code::TryAgain);
    assert_eq!(agent.join().unwrap(), 1);
}

#[test]
fn only_a_whole_wait_without_an_answer_says_that_the_agent_is_stuck() {
    let conf = ask(Path::new("/s"), Command::Status).conf;
    let limits = Limits::default();
    let client = Client::new("/s");
    let agent = Agent { client, conf: &conf, runtime: None, ipam: None, limits: &limits, told: None };
    let timeout = |after| ClientError::Timeout { operation: "DELETE /".into(), after };
    assert!(agent.is_stuck(&timeout(limits.del_answer)));
    assert!(!agent.is_stuck(&timeout(Duration::from_secs(3))), "the rest of a minute of \"not now\"");
}

const HANGS: &str = "#!/bin/sh\nsleep 600 &\necho $! >> \"${0%/*}/started\"\nwait\n";

#[test]
fn an_ipam_plugin_that_hangs_is_killed_with_what_it_started() {
    use std::os::unix::fs::PermissionsExt as _;

    let machine = Machine::new();
    let program = machine.dir.path().join("hangs");
    fs::write(&program, HANGS).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let agent = machine.agent(vec![answer(404, &json!({"code": "not-found", "message": "no endpoint"}))]);
    let command = Command::Add { target: target(), netns: "/run/netns/x".into(), args: Box::default(), chain: None };
    let ask = Ask {
        ipam: Some(Ipam {
            plugin: "hangs".into(),
            path: Some(machine.dir.path().into()),
            netconf: b"{}".to_vec(),
            version: crate::netconf::Version::V1_0_0,
            log: Level::Error,
        }),
        ..ask(&machine.socket(), command)
    };
    let limits = Limits { ipam: Duration::from_millis(500), ..impatient() };
    let fault = run(&ask, &limits, None).unwrap_err();
    assert_eq!((agent.join().unwrap(), fault.code), (1, Code::TryAgain), "{fault:?}");
    assert!(fault.msg.contains("hangs: ADD had not ended") && fault.details.contains("as well"), "{fault:?}");
    let started = fs::read_to_string(machine.dir.path().join("started")).unwrap();
    assert_eq!(started.lines().count(), 2, "ADD, and the DEL after it");
    let lives = |pid: &str| fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
    let until = Instant::now() + Duration::from_secs(30);
    while started.lines().any(lives) {
        assert!(Instant::now() < until, "what it started lives on: {started}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
