//! What Envoy acknowledges, what it refuses, and what becomes of waits when it stops, ends, or meets a new agent.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says what it expects by failing")]

mod world;

use std::{
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use wharf_policy::model::Direction;
use wharf_policy::requests::{HttpRule, Pattern};
use wharf_proxy::{EnvoyState, Listener, User, WaitError};
use world::*;

const GET: &str = "GET / HTTP/1.1\r\nHost: a";
const BOTH: &[(u16, &[&str])] = &[(7, &[CLIENT]), (8, &[OTHER_CLIENT])];

fn everything(port: u16, members: &[(u16, &[&str])]) -> Listener {
    listener(port, Direction::Egress, allow([HttpRule::default()]), members)
}

fn bad(port: u16) -> Listener {
    let rule = HttpRule { path: Some(Pattern::Regex("(".into())), ..HttpRule::default() };
    listener(port, Direction::Egress, allow([rule]), &[(7, &[CLIENT])])
}

/// How many listeners speak for the client's address.
fn speakers(world: &World) -> usize {
    world.proxy.speakers(CLIENT.parse().expect("an address")).len()
}

/// A request on a connection that stays open; whether it was answered.
async fn ask(stream: &mut TcpStream) -> bool {
    let answered = async {
        stream.write_all(format!("{GET}\r\n\r\n").as_bytes()).await.ok()?;
        let mut got = String::new();
        while !got.ends_with("\r\n\r\n") {
            got.push(char::from(stream.read_u8().await.ok()?));
        }
        let length = got.to_lowercase().split_once("content-length: ")?.1.split_once("\r\n")?.0.parse().ok()?;
        stream.read_exact(&mut vec![0; length]).await.ok()?;
        got.starts_with("HTTP/1.1 200 ").then_some(())
    };
    tokio::time::timeout(LONG, answered).await.expect("in time").is_some()
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn signal(world: &World, signal: Signal) {
    let pid = world.proxy.status().pid.expect("an Envoy");
    kill(Pid::from_raw(pid), signal).expect("a signal");
    // The kernel stops the threads of a process one after the other.
    let end = Instant::now() + LONG;
    while signal == Signal::SIGSTOP && !is_stopped(pid) {
        assert!(Instant::now() < end, "threads of Envoy (process {pid}) run {LONG:?} after SIGSTOP");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether all threads of a process are stopped. proc(5): their state follows their name, which is in parentheses.
fn is_stopped(pid: i32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    let mut stats = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok());
    stats.all(|stat| stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T')))
}

#[test]
fn a_member_that_leaves_loses_its_connections_and_nobody_elses() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let world = World::start();
        world.ensure(everything(EGRESS, BOTH)).await;
        let (mut leaves, mut stays) = (connect(CLIENT, SERVER).await, connect(OTHER_CLIENT, SERVER).await);
        assert!(ask(&mut leaves).await && ask(&mut stays).await);

        assert_eq!(speakers(&world), 1);
        world.ensure(everything(EGRESS, &[(8, &[OTHER_CLIENT])])).await;
        assert_eq!(speakers(&world), 0, "nobody speaks for its address");
        assert_eq!(request(CLIENT, GET).await, "", "a new connection is closed at once");
        let mut rest = Vec::new();
        tokio::time::timeout(LONG, leaves.read_to_end(&mut rest)).await.expect("closed in time").ok();
        assert!(ask(&mut stays).await, "the other member's connection lives");
        // Nor is it on its way to an end: that would come within the same time.
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(ask(&mut stays).await, "the other member's connection lives on");

        world.ensure(everything(EGRESS, BOTH)).await;
        assert!(ask(&mut connect(CLIENT, SERVER).await).await, "a member that comes back is served");
        assert!(ask(&mut stays).await, "a member that comes disturbs nobody either");
        let wait = world.proxy.remove(everything(EGRESS, &[]).key());
        wait.within(LONG).await.expect("acknowledged");
        until("the port is closed", || std::net::TcpStream::connect((SERVER, EGRESS)).is_err()).await;
        assert_eq!(world.proxy.status().pending_waits, 0);
    });
}

#[test]
fn another_round_ends_a_members_connections_and_takes_new_ones() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let world = World::start();
        world.ensure(everything(EGRESS, BOTH)).await;
        let (mut before, mut stays) = (connect(CLIENT, SERVER).await, connect(OTHER_CLIENT, SERVER).await);
        assert!(ask(&mut before).await && ask(&mut stays).await);
        let (member, _) = everything(EGRESS, BOTH).members.pop_first().expect("the client");
        world.ensure(Listener { rounds: [(member, 1)].into(), ..everything(EGRESS, BOTH) }).await;
        let mut now = connect(CLIENT, SERVER).await;
        assert!(ask(&mut now).await, "a new connection is served");
        let mut rest = Vec::new();
        tokio::time::timeout(LONG, before.read_to_end(&mut rest)).await.expect("closed in time").ok();
        assert!(ask(&mut now).await && ask(&mut stays).await, "others live on");
    });
}

#[test]
fn a_refusal_names_its_listener_and_hurts_no_other() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let world = World::without_envoy();
        // Both go out in one response.
        let (refused, good) = (world.proxy.ensure(bad(15009)), world.proxy.ensure(everything(EGRESS, BOTH)));
        let mut world = world;
        world.supervise();
        good.within(LONG).await.expect("acknowledged");
        let refused = refused.within(LONG).await;
        let Err(WaitError::Refused { listener, reason }) = refused else { panic!("{refused:?}") };
        assert_eq!(listener, "egress-15009");
        assert!(reason.contains("missing )"), "{reason}");
        assert_eq!(world.proxy.status().refused.get("egress-15009"), Some(&reason));
        assert!(ask(&mut connect(CLIENT, SERVER).await).await, "the other listener serves");

        // The next update is acknowledged, and the one after the refusal supersedes it.
        world.ensure(everything(EGRESS, &[(8, &[OTHER_CLIENT])])).await;
        world.ensure(everything(15009, BOTH)).await;
        assert!(world.proxy.status().refused.is_empty());

        // What had been good stays in force while a bad one is refused, and is sent again when it is asked for again.
        redirect_again(15009, Direction::Egress);
        for _ in 0..2 {
            let refused = world.proxy.ensure(bad(15009)).within(LONG).await;
            assert!(matches!(refused, Err(WaitError::Refused { .. })), "{refused:?}");
            assert!(ask(&mut connect(CLIENT, SERVER).await).await, "the last good state serves");
        }
        let port_0 = world.proxy.ensure(everything(0, BOTH)).await;
        assert!(matches!(port_0, Err(WaitError::Refused { .. })), "{port_0:?}");
    });
}

#[test]
fn an_envoy_that_is_killed_ends_waits_for_less_and_the_next_one_gets_everything() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let world = World::start();
        world.ensure(everything(EGRESS, BOTH)).await;
        let status = world.proxy.status();
        assert_eq!((status.state, status.restarts), (EnvoyState::Serving, 0));
        assert_eq!(status.version.as_deref(), Some("1.40.0"));

        // Stopped, it answers nobody; what it was asked meanwhile is answered by its end, or by the next one.
        signal(&world, Signal::SIGSTOP);
        let less = world.proxy.ensure(everything(EGRESS, &[(7, &[CLIENT])]));
        let gone = world.proxy.ensure(everything(15010, BOTH));
        let removed = world.proxy.remove(everything(15010, &[]).key());
        let more = world.proxy.ensure(everything(15011, BOTH));
        assert_eq!(world.proxy.status().pending_waits, 4);
        assert_eq!(
            world.proxy.speakers(OTHER_CLIENT.parse().expect("an address")).len(),
            3,
            "the one that may have come and gone, too"
        );
        signal(&world, Signal::SIGKILL);
        for wait in [less, gone, removed, more] {
            wait.within(LONG).await.expect("answered");
        }
        let status = world.proxy.status();
        assert_eq!((status.state, status.restarts, status.pending_waits), (EnvoyState::Serving, 1, 0), "{status:#?}");
        assert!(status.last_error.is_some_and(|error| error.starts_with("signal 9 ended it")));
        assert!(ask(&mut connect(CLIENT, SERVER).await).await, "the next Envoy serves");
        assert_eq!(request(OTHER_CLIENT, GET).await, "", "with the newest state");
    });
}

#[test]
fn an_envoy_that_is_stopped_costs_the_deadline_and_no_more() {
    in_a_namespace(|| async {
        let mut world = World::start();
        world.ensure(everything(EGRESS, BOTH)).await;
        signal(&world, Signal::SIGSTOP);
        let after = Duration::from_millis(300);
        let wait = world.proxy.ensure(everything(EGRESS, &[(8, &[OTHER_CLIENT])]));
        drop(wait);
        assert_eq!(speakers(&world), 1, "the address is no member's, and Envoy does not know");
        let timed_out = world.proxy.ensure(everything(EGRESS, &[])).within(after).await;
        assert_eq!(timed_out, Err(WaitError::TimedOut { listener: "egress-15001".into(), after }));
        assert_eq!(world.proxy.status().pending_waits, 0, "nobody waits for what nobody waits for");
        assert_eq!(speakers(&world), 1);
        drop(world.proxy.ensure(everything(EGRESS, &[(9, &[STRANGER])])));
        assert_eq!(world.proxy.status().pending_waits, 0, "a wait that is dropped is forgotten");
        let wait = world.proxy.ensure(everything(15003, &[(8, &[OTHER_CLIENT])]));
        signal(&world, Signal::SIGCONT);
        wait.within(LONG).await.expect("acknowledged when it goes on");
        until("nobody speaks for it", || speakers(&world) == 0).await;

        signal(&world, Signal::SIGSTOP);
        let lost = world.proxy.ensure(everything(15004, BOTH));
        world.stop_server().await;
        assert!(
            matches!(lost.within(LONG).await, Err(WaitError::Cancelled { .. })),
            "a peer that does not read keeps nobody"
        );
        signal(&world, Signal::SIGCONT);
    });
}

#[test]
fn an_envoy_that_cannot_start_is_a_state_and_no_hang() {
    in_a_namespace(|| async {
        let mut world = World::without_envoy();
        assert_eq!(world.proxy.status().state, EnvoyState::Absent);
        let gone = world.proxy.remove(everything(EGRESS, &[]).key());
        gone.within(LONG).await.expect("nobody has it");
        let wait = world.proxy.ensure(everything(EGRESS, BOTH));
        world.envoy.program = "/nowhere/envoy".into();
        world.supervise();
        until("it is told", || world.proxy.status().restarts > 1).await;
        let status = world.proxy.status();
        assert_eq!((status.state, status.pid, status.pending_waits), (EnvoyState::Waiting, None, 1));
        assert!(status.last_error.is_some_and(|error| error.starts_with("start Envoy (/nowhere/envoy)")));
        world.stop_server().await;
        assert!(matches!(wait.within(LONG).await, Err(WaitError::Cancelled { .. })), "the server ended");
        let late = world.proxy.ensure(everything(15002, &[]));
        assert!(matches!(late.within(LONG).await, Err(WaitError::Cancelled { .. })), "nobody will answer any more");
    });
}

#[test]
fn a_new_agent_takes_the_envoy_over_and_connections_live_on() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let mut world = World::without_envoy();
        world.envoy.ends_with_agent = false;
        world.supervise();
        world.ensure(everything(EGRESS, BOTH)).await;
        world.ensure(everything(15010, BOTH)).await;
        let pid = world.proxy.status().pid;
        let mut stream = connect(CLIENT, SERVER).await;
        assert!(ask(&mut stream).await);

        world.stop_server().await;
        world.new_agent();
        assert!(ask(&mut stream).await, "Envoy serves without an agent");
        // What the new agent knows of is set before it serves; the rest is to go.
        let known = world.proxy.ensure(everything(EGRESS, BOTH));
        world.supervise();
        world.serve();
        known.within(LONG).await.expect("acknowledged");
        assert_eq!(world.proxy.status().pid, pid, "the same process");
        assert!(ask(&mut stream).await, "a listener that is the same as before is not touched");
        let admin = world.envoy.admin_socket();
        let answers = || UnixStream::connect(&admin).is_ok();
        assert!(answers(), "Envoy's own interface is there");
        world.envoy.prepare().expect("its settings");
        assert!(answers(), "also when an agent prepares for an Envoy that somebody else starts");
        until("what the new agent does not know is gone", || std::net::TcpStream::connect((SERVER, 15010)).is_err())
            .await;
        assert!(ask(&mut stream).await);

        // Killed, it is seen to end although it is nobody's child here.
        signal(&world, Signal::SIGKILL);
        until("another one serves", || {
            let status = world.proxy.status();
            status.state == EnvoyState::Serving && status.pid != pid && status.restarts == 1
        })
        .await;
        world.new_agent();
        world.envoy.stop().await.expect("it ends");
        world.envoy.stop().await.expect("nothing to end");
        assert!(admin.exists(), "Envoy leaves its socket");
        world.envoy.prepare().expect("its settings");
        assert!(!admin.exists(), "the next Envoy can listen there");
    });
}

#[test]
fn an_envoy_that_has_not_answered_a_new_agent_may_speak_for_any_address() {
    in_a_namespace(|| async {
        let mut world = World::without_envoy();
        world.envoy.ends_with_agent = false;
        world.supervise();
        until("it serves", || world.proxy.status().state == EnvoyState::Serving).await;
        world.stop_server().await;
        world.new_agent();
        world.serve();
        assert_eq!(world.proxy.inherited(), None, "it was never told a listener");

        world.supervise();
        world.ensure(everything(EGRESS, BOTH)).await;
        assert_eq!(world.proxy.inherited(), None);
        let pid = world.proxy.status().pid;
        signal(&world, Signal::SIGSTOP);
        drop(world.proxy.ensure(everything(EGRESS, &[(8, &[OTHER_CLIENT])])));
        assert_eq!(speakers(&world), 1);
        world.stop_server().await;
        world.new_agent();
        drop(world.proxy.ensure(everything(EGRESS, &[(8, &[OTHER_CLIENT])])));
        world.serve();
        world.supervise();
        assert_eq!((speakers(&world), world.proxy.inherited()), (0, pid), "nobody knows what it serves");
        signal(&world, Signal::SIGCONT);
        until("it has what this agent wants", || world.proxy.inherited().is_none()).await;

        // The same without a supervisor, and an Envoy that never answers.
        signal(&world, Signal::SIGSTOP);
        world.stop_server().await;
        world.new_agent();
        world.serve();
        assert_eq!(world.proxy.inherited(), pid);
        signal(&world, Signal::SIGKILL);
        until("its end is seen", || world.proxy.inherited().is_none()).await;
        world.stop_server().await;
        world.new_agent();
        world.serve();
        assert_eq!(world.proxy.inherited(), None, "it is gone");
    });
}

/// The bootstrap of our own asks for the incremental variant; other ones may ask for the other.
#[test]
fn an_envoy_that_somebody_else_started_and_that_wants_all_at_once_is_served_too() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let world = World::start();
        world.ensure(everything(EGRESS, BOTH)).await;
        // Its settings, changed; then a world without a supervisor.
        let settings = std::fs::read_to_string(world.envoy.directory.join("bootstrap.json")).expect("the settings");
        world.envoy.stop().await.expect("it ends");
        drop(world);
        let mut world = World::without_envoy();
        let theirs = world.envoy.directory.join("theirs.json");
        let socket = settings.lines().find_map(|line| line.split('"').find(|word| word.ends_with("xds.sock")));
        let here = world.envoy.directory.join("xds.sock").display().to_string();
        let settings = settings.replace(socket.expect("the socket"), &here).replace("DELTA_GRPC", "GRPC");
        let admin = settings.lines().find_map(|line| line.split('"').find(|word| word.ends_with("admin.sock")));
        let settings = settings.replace(admin.expect("the socket"), &format!("{here}.admin"));
        std::fs::write(&theirs, settings).expect("settings");
        let mut process = tokio::process::Command::new(&world.envoy.program)
            .args(["--disable-hot-restart", "--log-level", "off", "--concurrency", "1", "--config-path"])
            .arg(&theirs)
            .kill_on_drop(true)
            .spawn()
            .expect("an Envoy");

        world.ensure(everything(EGRESS, BOTH)).await;
        assert!(ask(&mut connect(CLIENT, SERVER).await).await);
        let refused = world.proxy.ensure(bad(15009)).within(LONG).await;
        assert!(matches!(refused, Err(WaitError::Refused { .. })), "{refused:?}");
        world.ensure(everything(EGRESS, &[(7, &[CLIENT])])).await;
        assert_eq!(request(OTHER_CLIENT, GET).await, "", "it is no member");
        let status = world.proxy.status();
        assert_eq!((status.state, status.pid.map(i32::unsigned_abs)), (EnvoyState::Serving, process.id()));

        // Nobody supervises it: its end is seen all the same.
        signal(&world, Signal::SIGSTOP);
        let removed = world.proxy.remove(everything(EGRESS, &[]).key());
        assert_eq!(world.proxy.status().pending_waits, 1);
        process.kill().await.expect("it ends");
        removed.within(LONG).await.expect("nobody has it");
        assert_eq!(world.proxy.status().pid, None);
        world.stop_server().await;
    });
}

#[test]
fn it_runs_as_its_user_with_two_capabilities() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let mut world = World::without_envoy();
        world.stop_server().await;
        world.new_agent();
        world.envoy.user = Some(User { uid: 65_534, gid: 65_534 });
        world.open_directory();
        world.serve();
        world.supervise();
        world.ensure(everything(EGRESS, BOTH)).await;
        assert!(ask(&mut connect(CLIENT, SERVER).await).await, "transparent sockets and marks work");
        let pid = world.proxy.status().pid.expect("an Envoy");
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
        // CAP_NET_ADMIN (12) and CAP_NET_RAW (13).
        for line in [
            "Uid:\t65534\t65534\t65534\t65534",
            "Groups:\t ",
            "CapEff:\t0000000000003000",
            "CapPrm:\t0000000000003000",
            "NoNewPrivs:\t1",
        ] {
            assert!(status.lines().any(|there| there == line), "{line} in {status}");
        }

        // An agent that has another user for it cannot take it over: it no longer reaches the socket.
        world.stop_server().await;
        world.new_agent();
        world.envoy.user = Some(User { uid: 65_533, gid: 65_533 });
        world.serve();
        world.supervise();
        world.ensure(everything(EGRESS, BOTH)).await;
        let next = world.proxy.status().pid.expect("an Envoy");
        assert_ne!(next, pid);
        let status = std::fs::read_to_string(format!("/proc/{next}/status")).expect("its status");
        assert!(status.contains("Uid:\t65533\t"), "{status}");
    });
}

#[test]
fn its_heap_is_watched() {
    in_a_namespace(|| async {
        let world = World::start();
        world.ensure(everything(EGRESS, BOTH)).await;
        let asked = async {
            let mut admin = tokio::net::UnixStream::connect(world.envoy.admin_socket()).await?;
            admin.write_all(b"GET /stats?filter=fixed_heap HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").await?;
            let mut told = String::new();
            admin.read_to_string(&mut told).await.map(|_| told)
        };
        let told = tokio::time::timeout(LONG, asked).await.expect("in time").expect("an answer");
        let heap = "overload.envoy.resource_monitors.fixed_heap";
        assert!(
            told.contains(&format!("{heap}.failed_updates: 0")) && told.contains(&format!("{heap}.pressure: ")),
            "{told}"
        );
    });
}

#[test]
fn an_envoy_that_hangs_is_no_longer_served_and_then_replaced() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let world = World::start();
        world.ensure(everything(EGRESS, BOTH)).await;
        let pid = world.proxy.status().pid;
        signal(&world, Signal::SIGSTOP);
        until("it does not answer", || world.proxy.status().connected_streams == 0).await;
        until("another one is started", || world.proxy.status().pid.is_some_and(|other| Some(other) != pid)).await;
        let last = world.proxy.status().last_error.expect("a reason");
        assert_eq!(last, "it did not answer for 10 s: signal 9 ended it");
        until("it serves", || world.proxy.unacknowledged().is_empty()).await;
        assert!(ask(&mut connect(CLIENT, SERVER).await).await);
    });
}
