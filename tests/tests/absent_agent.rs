//! DEL, ADD, CHECK and STATUS while no agent runs, and the deletion queue between plugin and agent.

use std::{
    fs,
    os::unix::{ffi::OsStrExt, fs::symlink},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    mount::{MsFlags, mount},
    sys::{signal::Signal, stat::Mode},
    unistd::mkfifo,
};
use wharf_api::{AgentStatus, Endpoint};
use wharf_handover::queue::{self, Deletion, Entry, Queue};
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    cni::{Answer, NETWORK},
    echo::{self, EchoServer},
    icmp::ping,
    process::ip,
    programs, scenario, wait,
};

/// CNI's "try again later".
const LATER: u32 = 11;
/// STATUS: ADD would fail.
const NOT_AVAILABLE: u32 = 50;

fn two(node: &Node) -> Result<[(Sandbox, Attached); 2]> {
    let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
    let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
    Ok([(a, ea), (b, eb)])
}

fn del(node: &Node, container: &str, netns: &Path) -> Result<Answer> {
    node.cni("DEL").of(container, netns, "eth0").conf(&node.netconf()).run()
}

fn queue_of(node: &Node) -> Queue {
    Queue::new(&node.dirs().run)
}

/// The records; not the agent's canary, which an agent that is killed soon after its start leaves.
fn records(node: &Node) -> Result<Vec<Entry>> {
    Ok(queue_of(node).list()?.into_iter().filter(|entry| !entry.is_canary()).collect())
}

/// Containers that a record waits for.
fn queued(node: &Node) -> Result<Vec<String>> {
    let entries = records(node)?;
    entries.into_iter().map(|e| e.content.map(|d| d.container_id).map_err(anyhow::Error::msg)).collect()
}

fn boot_id() -> Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id").context("read the boot id")?.trim().to_owned())
}

/// A record as the plugin leaves it that did not find the link.
fn record(container: &str) -> Result<Deletion> {
    Ok(Deletion {
        version: queue::VERSION,
        network: NETWORK.into(),
        container_id: container.into(),
        ifname: "eth0".into(),
        endpoint: None,
        boot_id: boot_id()?,
        written_unix_ms: 1,
        canary: None,
    })
}

fn status(node: &Node) -> Result<AgentStatus> {
    let text = node.wharf(&["status", "-o", "json"])?.stdout;
    serde_json::from_str(&text).with_context(|| format!("read the status {text}"))
}

/// Waits until the agent has served the queue and knows these containers only, each with its leases and nobody else's.
fn await_only(node: &Node, attached: &[&Attached]) -> Result<()> {
    let mut expected: Vec<String> = attached.iter().map(|e| e.container.clone()).collect();
    expected.sort_unstable();
    wait::until_equal("containers that have an endpoint", &expected, || {
        let mut all: Vec<String> = node.endpoints()?.into_iter().map(|e| e.container_id).collect();
        all.sort_unstable();
        Ok(all)
    })?;
    wait::until_equal("records in the queue", &0, || Ok(records(node)?.len()))?;
    let leases = node.ask(async |c| c.ipam().await)?.leases;
    let mut leased: Vec<_> = leases.into_iter().filter(|l| l.owner != "node").map(|l| l.ip).collect();
    let mut owned: Vec<_> = attached.iter().flat_map(|e| e.addresses()).collect();
    leased.sort_unstable();
    owned.sort_unstable();
    ensure!(leased == owned, "leased are {leased:?}, the endpoints have {owned:?}");
    wait::until_equal("findings of the audit", &Vec::new(), || node.found_amiss())
}

#[test]
fn del_succeeds_without_an_agent_and_the_next_agent_finishes_it() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (b, eb)] = two(node)?;
        node.kill_agent()?;
        del(node, "a", a.path())?.silent()?;
        ensure!(queued(node)? == ["a"], "{:?}", queued(node)?);
        ensure!(a.space()?.links()? == ["lo"], "the container has {:?}", a.space()?.links()?);
        ensure!(node.endpoint_links()?.len() == 1, "{:?}", node.endpoint_links()?);
        let key = |node: &Node| -> Result<Vec<(String, u64)>> {
            Ok(records(node)?.into_iter().map(|e| (e.name, e.written_unix_ms)).collect())
        };
        let before = key(node)?;
        del(node, "a", a.path())?.silent()?;
        ensure!(key(node)? == before, "a second DEL: {before:?} became {:?}", key(node)?);
        ping(b.space()?, eb.gateways()?[0])?.must_answer()?;
        node.start_agent()?;
        await_only(node, &[&eb])?;
        ping(b.space()?, eb.gateways()?[1])?.must_answer()?;
        // Once more, as runtimes do.
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn del_of_what_was_never_added_succeeds_without_an_agent_and_harms_nobody() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (_b, eb)] = two(node)?;
        node.kill_agent()?;
        del(node, "nobody", a.path())?.silent()?;
        let other = node.netconf().with("name", serde_json::json!("elsewhere"));
        node.cni("DEL").of("a", a.path(), "eth0").conf(&other).run()?.silent()?;
        node.start_agent()?;
        await_only(node, &[&ea, &eb])?;
        ping(a.space()?, eb.v4()?.into())?.must_answer()?;
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

/// DEL with a path that leads nowhere, or to another container, whether an agent runs or not.
fn del_by_a_wrong_path(agent_runs: bool) -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let root = node.dirs().root.clone();
        let b = node.sandbox("b")?;
        let eb = node.attach(&b)?;
        let echo = EchoServer::start(b.space()?)?;
        let file = root.join("not-a-namespace");
        fs::write(&file, b"a corrupt file")?;
        let paths = [PathBuf::new(), root.join("missing"), file, b.path().to_owned()];
        for path in paths {
            let a = node.sandbox("a")?;
            let ea = node.attach(&a)?;
            if !agent_runs {
                node.kill_agent()?;
            }
            del(node, "a", &path)?.silent().with_context(|| format!("DEL with CNI_NETNS={}", path.display()))?;
            ensure!(a.space()?.links()? == ["lo"], "{}: {:?}", path.display(), a.space()?.links()?);
            if !agent_runs {
                ensure!(queued(node)? == ["a"], "{:?}", queued(node)?);
                node.start_agent()?;
            }
            await_only(node, &[&eb]).with_context(|| format!("after DEL with CNI_NETNS={}", path.display()))?;
            echo::tcp(node.space(), echo.tcp_at(eb.v4()?.into()), 1000)?;
            echo::udp(node.space(), echo.udp_at(eb.v6()?.into()), 1000)?;
            node.detach(&ea)?;
        }
        node.detach(&eb)
    })
}

#[test]
fn del_by_a_wrong_path_takes_the_right_endpoint() -> Result<()> {
    del_by_a_wrong_path(true)
}

#[test]
fn del_by_a_wrong_path_without_an_agent_takes_the_right_endpoint() -> Result<()> {
    del_by_a_wrong_path(false)
}

#[test]
fn a_container_that_lives_at_a_dead_ones_path_keeps_its_network() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let mut old = node.sandbox("pod")?;
        let first = node.attach(&old)?;
        old.vanish()?;
        // The path is another's now, who has an endpoint of the same interface name.
        let new = node.sandbox("pod")?;
        let call = |command| node.cni(command).of("pod-2", new.path(), "eth0").conf(&node.netconf());
        let result = call("ADD").run()?.result()?;
        let second = Attached { container: "pod-2".into(), result, ..first.clone() };
        node.kill_agent()?;
        del(node, "pod", new.path())?.silent()?;
        ping(new.space()?, second.gateways()?[0])?.must_answer()?;
        node.start_agent()?;
        await_only(node, &[&second])?;
        ping(new.space()?, second.gateways()?[1])?.must_answer()?;
        node.detach(&second)
    })
}

/// What nobody should find in the queue. None of it may be followed, waited for, or believed.
fn hostile_files(directory: &Path, living: &str) -> Result<usize> {
    let right_name = Queue::file_name(NETWORK, living, "eth0");
    let valid = serde_json::to_vec(&record(living)?)?;
    fs::write(directory.join(&right_name), valid.get(..valid.len() / 2).context("half a record")?)?;
    fs::write(directory.join("garbage.json"), [0xff, 0x00, 0x7b])?;
    fs::write(directory.join("empty"), b"")?;
    fs::write(directory.join("large.json"), vec![b' '; 1 << 20])?;
    // A true record in another's name.
    fs::write(directory.join("0000.json"), &valid)?;
    let newer = String::from_utf8(valid)?.replace("\"version\":1", "\"version\":2");
    fs::write(directory.join("newer.json"), newer)?;
    symlink("/etc/passwd", directory.join("link.json"))?;
    mkfifo(&directory.join("pipe.json"), Mode::from_bits_truncate(0o600)).context("make a pipe")?;
    fs::create_dir(directory.join("directory.json"))?;
    fs::write(directory.join("directory.json/file"), b"in it")?;
    fs::write(directory.join(std::ffi::OsStr::from_bytes(b"\xff\xfe.json")), b"{}")?;
    Ok(9)
}

#[test]
fn hostile_records_are_set_aside_and_told_of_and_harm_nobody() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (_b, eb)] = two(node)?;
        let passwd = fs::read("/etc/passwd").context("read /etc/passwd")?;
        let directory = queue_of(node).path().to_owned();
        // At start.
        node.kill_agent()?;
        let count = hostile_files(&directory, "b")?;
        let other_boot = Deletion { boot_id: "11111111-2222-3333-4444-555555555555".into(), ..record("a")? };
        queue_of(node).put(&other_boot)?;
        node.start_agent()?;
        await_only(node, &[&ea, &eb])?;
        let seen = wait::until("the queue to be looked at", || {
            let status = status(node)?;
            Ok((status.deletion_queue.unusable >= count as u64).then_some(status))
        })?;
        ensure!(seen.deletion_queue.unusable == count as u64, "{:?}", seen.deletion_queue);
        let shown = node.wharf(&["status"])?.stdout;
        ensure!(shown.contains("put aside"), "`wharf status` does not tell of it:\n{shown}");
        // While it runs.
        hostile_files(&directory, "a")?;
        wait::until("the queue to be looked at again", || {
            let left = fs::read_dir(&directory)?.filter_map(Result::ok).filter(|e| e.file_name() != queue::BAD).count();
            Ok((left == 0).then_some(()))
        })?;
        await_only(node, &[&ea, &eb])?;
        ping(a.space()?, eb.v4()?.into())?.must_answer()?;
        ensure!(fs::read("/etc/passwd")? == passwd, "a link in the queue was followed");
        // The queue works as ever.
        queue_of(node).put(&record("a")?)?;
        await_only(node, &[&eb])?;
        node.detach(&eb)
    })
}

#[test]
fn a_del_that_a_stuck_agent_did_not_answer_is_served_when_it_goes_on() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, _ea), (b, eb)] = two(node)?;
        node.signal_agent(Signal::SIGSTOP)?;
        let answer = del(node, "a", a.path());
        let (records, links) = (queued(node), a.space()?.links());
        node.signal_agent(Signal::SIGCONT)?;
        answer?.silent()?;
        ensure!(records? == ["a"], "no record was left");
        ensure!(links? == ["lo"], "the container still had its interface");
        await_only(node, &[&eb])?;
        ping(b.space()?, eb.gateways()?[0])?.must_answer()?;
        node.detach(&eb)
    })
}

/// A node whose run directory is a small file system of its own.
fn on_a_small_disk(body: impl FnOnce(&mut Node) -> Result<()>) -> Result<()> {
    let mut node = Node::without_agent(NodeConfig::default())?;
    mount(Some("small"), &node.dirs().run, Some("tmpfs"), MsFlags::empty(), Some("size=16m,mode=0755"))
        .context("mount a small tmpfs")?;
    let outcome = node.start_agent().and_then(|()| body(&mut node)).and_then(|()| node.finish());
    outcome.with_context(|| format!("the agent's log:\n{}", node.log()))
}

/// Takes what space there is, to the last byte.
fn fill(node: &Node) -> Result<PathBuf> {
    use std::io::Write;
    let path = node.dirs().run.join("filler");
    let mut file = fs::File::create(&path).context("create the filler")?;
    for size in [65_536, 4096, 512, 1] {
        loop {
            match file.write(&vec![b'x'; size]) {
                Ok(n) if n > 0 => {}
                Ok(_) => break,
                Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => break,
                Err(e) => return Err(e).context("fill the disk"),
            }
        }
    }
    Ok(path)
}

#[test]
fn del_on_a_full_disk_without_an_agent_is_refused_whole_and_succeeds_later() -> Result<()> {
    on_a_small_disk(|node| {
        let [(a, ea), (_b, eb)] = two(node)?;
        node.kill_agent()?;
        let filler = fill(node)?;
        for _ in 0..2 {
            let failure = del(node, "a", a.path())?.failure()?;
            ensure!(failure.code == LATER, "{failure:?}");
            ensure!(queued(node)?.is_empty(), "{:?}", queued(node)?);
            // Nothing may be taken away of which no record tells.
            ping(a.space()?, eb.v4()?.into())?.must_answer()?;
        }
        fs::remove_file(filler)?;
        del(node, "a", a.path())?.silent()?;
        ensure!(a.space()?.links()? == ["lo"]);
        node.start_agent()?;
        await_only(node, &[&eb])?;
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn a_full_disk_under_a_running_agent_costs_nothing_but_retries() -> Result<()> {
    on_a_small_disk(|node| {
        let [(a, ea), (b, eb)] = two(node)?;
        let filler = fill(node)?;
        let c = node.sandbox("c")?;
        // The store may have room left in its file: then they succeed.
        for (command, sandbox) in [("DEL", &a), ("ADD", &c)] {
            let call = node.cni(command).of(sandbox.name(), sandbox.path(), "eth0").conf(&node.netconf());
            let answer = call.run()?;
            if !answer.finished.status.success() {
                let failure = answer.failure()?;
                ensure!(failure.code == LATER, "{command} on a full disk: {failure:?}");
            }
            ping(b.space()?, eb.gateways()?[0])?.must_answer()?;
        }
        fs::remove_file(filler)?;
        node.detach(&ea)?;
        del(node, "c", c.path())?.silent()?;
        let ec = node.attach(&c)?;
        await_only(node, &[&eb, &ec])?;
        ping(c.space()?, eb.v6()?.into())?.must_answer()?;
        ensure!(a.space()?.links()? == ["lo"]);
        node.detach(&ec)?;
        node.detach(&eb)
    })
}

#[test]
fn add_and_status_without_an_agent_say_later_and_make_nothing() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        // The start's own record is out of the queue; what stands there later, a plugin left.
        canary_came_out(node)?;
        node.kill_agent()?;
        let links = node.space().links()?;
        let failure =
            node.cni("ADD").of("a", a.path(), "eth0").conf(&node.netconf()).run()?.failure().context("ADD")?;
        ensure!(failure.code == LATER, "{failure:?}");
        let failure = node.cni("STATUS").conf(&node.netconf()).run()?.failure().context("STATUS")?;
        ensure!(failure.code == NOT_AVAILABLE, "{failure:?}");
        ensure!(a.space()?.links()? == ["lo"] && node.space().links()? == links, "something was made");
        ensure!(queued(node)?.is_empty(), "{:?}", queued(node)?);
        // What every failed ADD is followed by.
        del(node, "a", a.path())?.silent()?;
        node.start_agent()?;
        node.cni("STATUS").conf(&node.netconf()).run()?.silent()?;
        await_only(node, &[])?;
        let ea = node.attach(&a)?;
        ping(a.space()?, ea.gateways()?[0])?.must_answer()?;
        node.detach(&ea)
    })
}

/// A change of a container or its link, and the words that a CHECK without an agent must have.
type Tampering = (&'static str, fn(&Node, &Sandbox, &Endpoint) -> Result<()>, &'static str);

const TAMPERINGS: [Tampering; 6] = [
    ("well", |_, _, _| Ok(()), ""),
    ("address", |_, s, _| ip(s.space()?, "-4 addr flush dev eth0").map(drop), "address 10."),
    ("route", |_, s, _| ip(s.space()?, "-6 route del default").map(drop), "route to ::/0"),
    ("link", |n, _, e| ip(n.space(), &format!("link del {}", e.host_ifname)).map(drop), "no interface eth0"),
    ("up", |n, _, e| ip(n.space(), &format!("link set {} down", e.host_ifname)).map(drop), "expected up, is down"),
    ("program", take_off, "no program of Wharf's is on ingress"),
];

/// Detaches the endpoint's first program: a tcx link goes with its pin.
fn take_off(node: &Node, _: &Sandbox, endpoint: &Endpoint) -> Result<()> {
    let pin = node.dirs().endpoint_pins().join(endpoint.id.to_string()).join("link_from_container");
    if pin.exists() {
        return fs::remove_file(&pin).with_context(|| format!("remove {}", pin.display()));
    }
    programs::take_off(node.space(), &endpoint.host_ifname, "ingress")
}

fn checks_without_an_agent(mode: &str) -> Result<()> {
    scenario(NodeConfig::default().flags(&["--attach-mode", mode]), |node| {
        let all = TAMPERINGS.iter().map(|(name, ..)| {
            let sandbox = node.sandbox(name)?;
            let end = node.attach(&sandbox)?;
            let endpoint = node.endpoint(&end)?;
            anyhow::Ok((sandbox, end, endpoint))
        });
        let all = all.collect::<Result<Vec<_>>>()?;
        node.kill_agent()?;
        for (_, end, _) in &all {
            node.check(end)?.silent().context("CHECK without an agent")?;
        }
        for ((name, tamper, _), (sandbox, _, endpoint)) in TAMPERINGS.iter().zip(&all) {
            tamper(node, sandbox, endpoint).with_context(|| format!("tamper with: {name}"))?;
        }
        // Each that fails has waited for the agent: all wait together.
        let calls = all.iter().map(|(_, end, _)| {
            let conf = end.conf.clone().after(&end.result);
            anyhow::Ok(std::thread::spawn({
                let call = node.cni("CHECK").of(&end.container, &end.netns, &end.ifname).conf(&conf).ready()?;
                move || call.run()
            }))
        });
        for ((name, _, words), call) in TAMPERINGS.iter().zip(calls.collect::<Result<Vec<_>>>()?) {
            let answer = call.join().map_err(|_| anyhow::anyhow!("the CHECK of {name} panicked"))??;
            if words.is_empty() {
                answer.silent().with_context(|| format!("CHECK of {name}"))?;
                continue;
            }
            let failure = answer.failure().with_context(|| format!("CHECK of {name}"))?;
            ensure!(failure.code == 110 && failure.msg.contains(words), "{name}: {failure:?}");
        }
        node.start_agent()?;
        all.iter().try_for_each(|(_, end, _)| node.detach(end))
    })
}

#[test]
fn check_without_an_agent_succeeds_where_traffic_flows_and_names_what_is_wrong() -> Result<()> {
    checks_without_an_agent("clsact")
}

#[test]
fn check_without_an_agent_sees_tcx_links() -> Result<()> {
    checks_without_an_agent("tcx")
}

#[test]
fn an_add_right_after_a_queued_del_stays() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let mut last = node.attach(&a)?;
        // Left while no agent ran: served before anything is added.
        node.kill_agent()?;
        del(node, "a", a.path())?.silent()?;
        node.start_agent()?;
        let before = last;
        last = node.attach(&a)?;
        ensure!(last.v4()? != before.v4()?, "an address was given out again at once");
        // Left while one runs: it is served at once, or the ADD that comes first sees to it.
        for round in 0..20 {
            let before = node.endpoint(&last)?.epoch;
            queue_of(node).put(&record("a")?)?;
            last = wait::until("ADD to succeed", || {
                let answer = node.cni("ADD").of("a", a.path(), "eth0").conf(&node.netconf()).run()?;
                if answer.finished.status.success() {
                    return Ok(Some(Attached { result: answer.result()?, ..last.clone() }));
                }
                let failure = answer.failure()?;
                ensure!(failure.code == LATER, "round {round}: {failure:?}");
                Ok(None)
            })?;
            await_only(node, &[&last]).with_context(|| format!("round {round}"))?;
            ensure!(node.endpoint(&last)?.epoch > before, "round {round}: the old endpoint is still there");
            ping(a.space()?, last.gateways()?[0])?.must_answer().with_context(|| format!("round {round}"))?;
        }
        node.detach(&last)
    })
}

fn canary_came_out(node: &Node) -> Result<()> {
    wait::until("the canary to come out", || {
        Ok(status(node)?.deletion_queue.canary.starts_with("came out").then_some(()))
    })
}

/// Whether the controller that serves the queue fails, and how `wharf status` judges the queue.
fn queue_fails(node: &Node) -> Result<bool> {
    let status = status(node)?;
    let Some(controller) = status.controllers.iter().find(|c| c.name == "deletion-queue") else {
        bail!("no controller serves the queue: {:?}", status.controllers);
    };
    Ok(controller.consecutive_failures > 0)
}

#[test]
fn the_canary_comes_out_and_a_queue_that_cannot_be_used_is_told_of_until_it_can() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (b, eb)] = two(node)?;
        canary_came_out(node)?;
        let directory = queue_of(node).path().to_owned();
        // Something else has its name.
        fs::remove_dir_all(&directory)?;
        fs::write(&directory, b"a file")?;
        wait::until("status to tell of it", || Ok(queue_fails(node)?.then_some(())))?;
        let shown = node.wharf(&["status"])?.stdout;
        ensure!(shown.contains("deletion"), "`wharf status` does not tell of it:\n{shown}");
        // Nor can the plugin use it: nothing is half done.
        node.kill_agent()?;
        let failure = del(node, "a", a.path())?.failure()?;
        ensure!(failure.code == LATER && failure.text().contains("deletions"), "{failure:?}");
        ping(a.space()?, eb.v4()?.into())?.must_answer()?;
        // An agent starts all the same, serves, and says so.
        node.start_agent()?;
        wait::until("status to tell of it", || Ok(queue_fails(node)?.then_some(())))?;
        node.detach(&ea)?;
        let ea = node.attach(&a)?;
        fs::remove_file(&directory)?;
        wait::until("the queue to be set up anew", || Ok((!queue_fails(node)? && directory.is_dir()).then_some(())))?;
        canary_came_out(node)?;
        // Removed under the watch: made anew, and watched.
        fs::remove_dir_all(&directory)?;
        wait::until("the directory to be made anew", || Ok(directory.is_dir().then_some(())))?;
        queue_of(node).put(&record("a")?)?;
        await_only(node, &[&eb])?;
        ping(b.space()?, eb.gateways()?[0])?.must_answer()?;
        node.detach(&ea)?;
        node.detach(&eb)
    })
}
