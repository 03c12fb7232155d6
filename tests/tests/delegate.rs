//! Delegated mode: the agent passes the plugin's commands on to a service, whatever becomes of the service, of itself
//! and of its callers.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::{fs::PermissionsExt as _, net::UnixListener},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tonic::Code;
use wharf_api::{AgentStatus, EndpointCreate, UNTIL_HEADER, client::Client};
use wharf_delegate::v1;
use wharf_handover::queue::{Deletion, Queue, VERSION};
use wharf_tests::{
    Node, NodeConfig, Sandbox,
    cni::{Answer, NETWORK},
    crash,
    delegate::{GATEWAY, Mood, NAME, Reference, attachment, failure},
    http,
    icmp::ping,
    wait,
};

/// CNI's "try again later".
const LATER: u32 = 11;

/// A node whose network the service makes. At the end nothing is owed to the service, the agent ends in good order, and
/// it has left nothing on the node.
fn delegated(body: impl FnOnce(&mut Node, &mut Reference) -> Result<()>) -> Result<()> {
    let flags = ["--node-name", "quay", "--log-format", "json"].map(str::to_owned).to_vec();
    let mut node = Node::without_agent(NodeConfig { flags, toml: None })?;
    let socket = node.dirs().root.join("net.sock");
    node.set_flag(&format!("--delegate={}", socket.display()), true);
    let mut service = Reference::start(Some(node.space()), &socket)?;
    let outcome = (|| {
        node.start_agent()?;
        let rules = node.command("nft")?.args(["list", "ruleset"]).output().context("run nft")?;
        ensure!(rules.stdout.is_empty(), "rules: {}", String::from_utf8_lossy(&rules.stdout));
        body(&mut node, &mut service)?;
        wait::until_equal("records of what is owed", &0, || owed(&node))?;
        if node.has_agent() {
            node.stop_agent()?;
        }
        let links = node.space().links()?;
        ensure!(links.iter().all(|link| link == "lo" || link.starts_with("ref")), "links {links:?}");
        ensure!(node.dirs().version_trees()?.is_empty(), "pins {:?}", node.dirs().version_trees()?);
        ensure!(fs::read_dir(&node.dirs().state)?.next().is_none(), "something is in the state directory");
        let run: BTreeSet<String> = fs::read_dir(&node.dirs().run)?
            .map(|e| Ok(e?.file_name().to_string_lossy().into_owned()))
            .collect::<Result<_>>()?;
        let known = ["deletions", "ipam-turns", "reports", "unfinished-adds"].map(str::to_owned);
        ensure!(run.iter().all(|name| known.contains(name)), "the run directory has {run:?}");
        Ok(())
    })();
    if outcome.is_err() {
        eprintln!("calls: {:?}\n---- log of the agent\n{}---- end of the log", service.calls(), node.log());
    }
    outcome
}

/// Records of what is owed; not the agent's canary, which an agent that is killed soon after its start leaves.
fn owed(node: &Node) -> Result<usize> {
    let run = &node.dirs().run;
    Ok(Queue::new(run).list()?.iter().chain(&Queue::unfinished(run).list()?).filter(|entry| !entry.is_canary()).count())
}

fn add(node: &Node, sandbox: &Sandbox) -> Result<Answer> {
    node.cni("ADD").of(sandbox.name(), sandbox.path(), "eth0").conf(&node.netconf()).run()
}

fn del(node: &Node, container: &str, netns: &Path) -> Result<Answer> {
    node.cni("DEL").of(container, netns, "eth0").conf(&node.netconf()).run()
}

fn status(node: &Node) -> Result<AgentStatus> {
    let text = node.wharf(&["status", "-o", "json"])?.stdout;
    serde_json::from_str(&text).with_context(|| format!("read the status {text}"))
}

/// The value of a series; none where there is no such series.
fn metric(node: &Node, series: &str) -> Result<Option<u64>> {
    let text = node.http("GET", "/metrics", None)?.text();
    let start = format!("{series} ");
    text.lines().find_map(|line| line.strip_prefix(&start)).map(|n| n.parse().context("a number")).transpose()
}

fn commands(verb: &str, outcome: &str) -> String {
    format!(
        "wharf_cni_commands_total{{command=\"{verb}\",network=\"{NETWORK}\",mode=\"delegated\",outcome=\"{outcome}\"}}"
    )
}

/// An ADD by the API, whose caller goes away after a while.
fn add_and_leave(node: &Node, sandbox: &Sandbox, patience: Duration) -> Result<()> {
    let body = EndpointCreate {
        container_id: sandbox.name().to_owned(),
        ifname: "eth0".to_owned(),
        network: NETWORK.to_owned(),
        netns: sandbox.path().display().to_string(),
        ..serde_json::from_value(json!({"container_id": "", "ifname": "", "network": "", "netns": ""}))?
    };
    let id = format!("cni-attachment-id:{}:eth0", sandbox.name());
    let gone =
        node.ask(async |client: Client| Ok(client.with_timeout(patience).put_endpoint(&id, &body).await.is_err()))?;
    ensure!(gone, "the ADD was answered");
    Ok(())
}

#[test]
fn a_container_gets_its_network_from_the_service_in_each_version() -> Result<()> {
    delegated(|node, service| {
        for version in ["0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
            let a = node.sandbox(&format!("a{}", version.replace('.', "-")))?;
            let conf = node.netconf().version(version).with("mtu", json!(1400));
            let call =
                |command: &str| node.cni(command).of(a.name(), a.path(), "eth0").env("CNI_ARGS", "K8S_POD_NAME=web-0");
            let result = call("ADD").conf(&conf).run()?.result()?;
            let made = service.asked().pop().context("an Add")?;
            ensure!(made.mtu == Some(1400) && made.pod_name.as_deref() == Some("web-0"), "{made:?}");
            ensure!(made.netns == a.path().display().to_string(), "{made:?}");
            let text = result.to_string();
            ensure!(result["ips"][0]["address"].as_str().is_some_and(|ip| ip.ends_with("/24")), "{text}");
            ensure!(result["ips"][0]["gateway"] == GATEWAY && result["ips"][0]["interface"] == 1, "{text}");
            ensure!(result["routes"] == json!([{"dst": "0.0.0.0/0", "gw": GATEWAY}]), "{text}");
            ensure!(result["dns"]["nameservers"] == json!(["10.77.255.53"]), "{text}");
            ensure!(result["interfaces"][0]["name"].as_str().is_some_and(|n| n.starts_with("ref")), "{text}");
            ensure!(result["interfaces"][1]["name"] == "eth0", "{text}");
            ping(a.space()?, GATEWAY.parse()?)?.must_answer()?;
            let after = conf.clone().after(&result);
            if version != "0.3.1" {
                call("CHECK").conf(&after).run()?.silent()?;
            }
            let again = call("ADD").conf(&conf).run()?.failure()?;
            ensure!(again.code == 4 && again.details.contains("delete it first"), "{again:?}");
            // The refused ADD made nothing, and took nothing away.
            ping(a.space()?, GATEWAY.parse()?)?.must_answer()?;
            call("DEL").conf(&after).run()?.silent()?;
            call("DEL").conf(&after).run()?.silent()?;
            ensure!(service.attached().is_empty() && a.space()?.links()? == ["lo"], "{:?}", a.space()?.links()?);
        }
        let status = |node: &Node| node.cni("STATUS").conf(&node.netconf()).run();
        status(node)?.silent()?;
        // GC keeps what is listed.
        let (b, c) = (node.sandbox("b")?, node.sandbox("c")?);
        add(node, &b)?.result()?;
        add(node, &c)?.result()?;
        let valid = json!([{"containerID": "b", "ifname": "eth0"}]);
        node.cni("GC").conf(&node.netconf().with("cni.dev/valid-attachments", valid)).run()?.silent()?;
        ensure!(service.attached() == BTreeSet::from(["b".to_owned()]), "{:?}", service.attached());
        del(node, "b", b.path())?.silent()
    })
}

#[test]
fn errors_of_the_service_reach_the_runtime_whole() -> Result<()> {
    delegated(|node, service| {
        let a = node.sandbox("a")?;
        service.mood("Add", Mood::Fail(failure(123, "the vlan is taken", "free vlan 7", 0)));
        let told = add(node, &a)?.failure()?;
        ensure!(told.code == 123 && told.msg == "the vlan is taken (create endpoint harbour/a:eth0)", "{told:?}");
        ensure!(told.details.starts_with("free vlan 7"), "{told:?}");
        ensure!(service.calls() == ["Add harbour/a/eth0"], "a failed Add owes nothing: {:?}", service.calls());
        // "Not now" is asked again, within the ADD.
        service.mood("Add", Mood::Fail(failure(LATER, "busy", "", 50)));
        let answer = thread::scope(|scope| {
            let adding = scope.spawn(|| add(node, &a));
            wait::until("a second Add", || Ok((service.calls().len() > 2).then_some(())))?;
            service.mood("Add", Mood::Well);
            adding.join().map_err(|_| anyhow::anyhow!("the ADD's thread panicked"))?
        })?;
        let result = answer.result()?;
        let check = || node.cni("CHECK").of("a", a.path(), "eth0").conf(&node.netconf().after(&result)).run();
        service.findings(&["the bridge port is down"]);
        let told = check()?.failure()?;
        ensure!(told.code == 110 && told.msg.contains("the bridge port is down"), "{told:?}");
        ensure!(told.details.contains("cni-attachment-id:a:eth0"), "{told:?}");
        let shown = node.wharf(&["endpoint", "health", "cni-attachment-id:a:eth0"])?;
        ensure!(shown.stdout.contains("the bridge port is down"), "{shown:?}");
        service.findings(&[]);
        service.mood("Check", Mood::Fail(failure(117, "the switch does not answer", "", 0)));
        let told = check()?.failure()?;
        ensure!(told.code == 117 && told.msg.contains("the switch does not answer"), "{told:?}");
        service.mood("Check", Mood::Well);
        // Another attachment's result.
        let mut other = result.clone();
        other["ips"][0]["address"] = json!("10.77.9.9/24");
        let told = node.cni("CHECK").of("a", a.path(), "eth0").conf(&node.netconf().after(&other)).run()?.failure()?;
        ensure!(told.code == 111, "{told:?}");
        service.mood("Del", Mood::Fail(failure(133, "the port is locked", "unlock it", 0)));
        let told = del(node, "a", a.path())?.failure()?;
        ensure!(told.code == 133 && told.msg.contains("the port is locked") && owed(node)? == 0, "{told:?}");
        service.mood("Del", Mood::Well);
        del(node, "a", a.path())?.silent()?;
        let told = check()?.failure()?;
        ensure!(told.code == 3 && told.msg.contains("nothing is attached there"), "{told:?}");
        service.mood("Gc", Mood::Fail(failure(140, "no", "", 0)));
        let gc = node.netconf().with("cni.dev/valid-attachments", json!([]));
        ensure!(node.cni("GC").conf(&gc).run()?.failure()?.code == 140);
        for code in [50, 51] {
            service.mood("Status", Mood::Fail(failure(code, "no room on the switch", "", 0)));
            let told = node.cni("STATUS").conf(&node.netconf()).run()?.failure()?;
            ensure!(told.code == code && told.msg.contains("no room on the switch"), "{told:?}");
        }
        service.mood("Status", Mood::Well);
        // Another service has the socket.
        service.mood("Add", Mood::Refuse(Code::Unimplemented));
        let told = add(node, &a)?.failure()?;
        ensure!(told.code == 7 && told.text().contains("net.sock") && told.details.contains("`delegate`"), "{told:?}");
        // What a service that panics answers: nobody knows what it made.
        service.mood("Add", Mood::Refuse(Code::Internal));
        let told = add(node, &a)?.failure()?;
        ensure!(told.code == 5 && told.msg.contains("as it was told to"), "{told:?}");
        wait::until("the Del that it owes", || {
            Ok((service.calls().last().map(String::as_str) == Some("Del harbour/a/eth0")).then_some(()))
        })
    })
}

#[test]
fn a_service_that_is_away_costs_an_add_its_patience_and_a_del_nothing() -> Result<()> {
    delegated(|node, service| {
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        add(node, &a)?.result()?;
        service.die()?;
        // Until then an ADD may be sent into the old connection, and its DEL is owed.
        wait::until("the service is told as not reached", || {
            Ok(status(node)?.delegate.filter(|d| d.reachable == Some(false)).map(drop))
        })?;
        let began = Instant::now();
        let told = add(node, &b)?.failure()?;
        ensure!(told.code == LATER && told.text().contains("net.sock"), "{told:?}");
        ensure!(began.elapsed() < Duration::from_secs(5), "ADD took {:?}", began.elapsed());
        ensure!(owed(node)? == 0, "nothing was sent, and nothing is owed");
        del(node, "a", a.path())?.silent()?;
        ensure!(owed(node)? == 1 && service.attached().contains("a"));
        let told = node.cni("STATUS").conf(&node.netconf()).run()?.failure()?;
        ensure!(told.code == 50 && told.msg.contains("net.sock"), "{told:?}");
        let shown = status(node)?;
        let delegate = shown.delegate.clone().context("the delegate's status")?;
        ensure!(delegate.reachable == Some(false) && delegate.since_unix_ms > 0, "{delegate:?}");
        ensure!(shown.deletion_queue.records == 1 && delegate.last_error.is_some(), "{shown:?}");
        ensure!(node.wharf(&["status", "--brief"])?.stdout == "down\n");
        // Long lines are continued below.
        let text = node.wharf(&["status"])?.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        ensure!(
            text.contains("Delegate: ") && text.contains(", not reached for ") && text.contains("; 1 deletion waits"),
            "{text}"
        );
        // An ADD of the same attachment does not pass the DEL by.
        let told = add(node, &a)?.failure()?;
        ensure!(told.code == LATER && told.msg.contains("an earlier DEL of it is owed"), "{told:?}");
        ensure!(
            metric(node, "wharf_delegate_reachable")? == Some(0),
            "{:?}",
            metric(node, "wharf_delegate_reachable")?
        );
        ensure!(metric(node, &commands("DEL", "deferred"))? == Some(1));
        // It survives the agent, which starts without the service.
        node.kill_agent()?;
        node.start_agent()?;
        ensure!(owed(node)? == 1);
        service.rise()?;
        wait::until_equal("records of what is owed", &0, || owed(node))?;
        ensure!(service.attached().is_empty(), "{:?}", service.attached());
        // The order of a DEL that is owed and a new ADD.
        add(node, &a)?.result()?;
        service.die()?;
        del(node, "a", a.path())?.silent()?;
        let before = service.calls().len();
        service.rise()?;
        add(node, &a)?.result()?;
        let calls = service.calls().split_off(before);
        ensure!(
            calls.iter().position(|c| c.starts_with("Del")) < calls.iter().position(|c| c.starts_with("Add")),
            "{calls:?}"
        );
        ping(a.space()?, GATEWAY.parse()?)?.must_answer()?;
        del(node, "a", a.path())?.silent()?;
        wait::until("the service is told as reached", || {
            Ok(status(node)?.delegate.filter(|d| d.reachable == Some(true) && d.service == NAME).map(drop))
        })
    })
}

#[test]
fn a_service_that_hangs_holds_nobody_and_what_it_may_yet_do_is_undone() -> Result<()> {
    delegated(|node, service| {
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        // A caller that goes away while the service hangs: the ADD ends later, and nobody has it.
        service.mood("Add", Mood::Hang);
        add_and_leave(node, &a, Duration::from_millis(500))?;
        ensure!(Queue::unfinished(&node.dirs().run).list()?.len() == 1, "the ADD is recorded while it is sent");
        service.mood("Add", Mood::Well);
        wait::until_equal("records of what is owed", &0, || owed(node))?;
        ensure!(service.attached().is_empty(), "{:?}", service.attached());
        // One whose own deadline passes.
        service.mood("Add", Mood::Hang);
        let body =
            json!({"container_id": "b", "ifname": "eth0", "network": NETWORK, "netns": b.path(), "deadline_ms": 300});
        let answer = node.http("PUT", "/v1/endpoint/cni-attachment-id:b:eth0", Some(&body.to_string()))?;
        ensure!(answer.status == 503 && answer.text().contains("gave no answer within"), "{answer:?}");
        wait::until("its Del", || Ok(service.calls().contains(&"Del harbour/b/eth0".to_owned()).then_some(())))?;
        service.mood("Add", Mood::Well);
        add(node, &b)?.result()?;
        // DEL.
        service.mood("Del", Mood::Hang);
        let began = Instant::now();
        del(node, "b", b.path())?.silent()?;
        ensure!(began.elapsed() < Duration::from_secs(15) && owed(node)? == 1, "DEL took {:?}", began.elapsed());
        // The agent's stop.
        let began = Instant::now();
        node.stop_agent()?;
        ensure!(began.elapsed() < Duration::from_secs(12), "the stop took {:?}", began.elapsed());
        service.mood("Del", Mood::Well);
        node.start_agent()?;
        wait::until_equal("records of what is owed", &0, || owed(node))?;
        ensure!(service.attached().is_empty(), "{:?}", service.attached());
        Ok(())
    })
}

/// As a process that is stopped by a signal: the kernel takes the connection, and nobody reads from it.
#[test]
fn a_service_that_is_stopped_is_told_as_not_reached_and_the_agent_ends() -> Result<()> {
    delegated(|node, service| {
        service.die()?;
        let frozen = UnixListener::bind(service.socket())?;
        wait::until("the service is told as not reached", || {
            Ok(status(node)?
                .delegate
                .filter(|d| {
                    d.reachable == Some(false) && d.last_error.as_ref().is_some_and(|e| e.contains("no answer"))
                })
                .map(drop))
        })?;
        let a = node.sandbox("a")?;
        let mut adding = node.cni("ADD").of("a", a.path(), "eth0").conf(&node.netconf()).ready().map(Some)?;
        thread::scope(|scope| -> Result<()> {
            let adding = adding.take().context("the call")?;
            let adding = scope.spawn(move || adding.run());
            wait::until("the ADD is recorded", || Ok((owed(node)? == 1).then_some(())))?;
            let began = Instant::now();
            node.signal_agent(Signal::SIGTERM)?;
            let told = adding.join().map_err(|_| anyhow::anyhow!("the ADD's thread panicked"))??.failure()?;
            ensure!(told.code == LATER && began.elapsed() < Duration::from_secs(12), "{:?}: {told:?}", began.elapsed());
            Ok(())
        })?;
        node.stop_agent()?;
        ensure!(owed(node)? == 1, "the next start sends the Del");
        drop(frozen);
        fs::remove_file(service.socket())?;
        service.rise()?;
        node.start_agent()?;
        wait::until_equal("records of what is owed", &0, || owed(node))?;
        ensure!(service.calls() == ["Del harbour/a/eth0"], "{:?}", service.calls());
        Ok(())
    })
}

/// Kills the agent at each point of ADD and DEL. The shim's answer is a failure or a deferral, and in the end nothing
/// is attached.
#[test]
fn an_agent_that_is_killed_at_any_point_leaves_nothing() -> Result<()> {
    delegated(|node, service| {
        node.stop_agent()?;
        for point in ["delegate/add/after-record", "delegate/add/after-answer", "delegate/add/after-record-removed"] {
            let a = node.sandbox(&format!("a{}", point.len()))?;
            ensure!(node.start_armed_agent()?);
            crash::wish(node.dirs(), point)?;
            let told = add(node, &a)?.failure()?;
            ensure!(told.code == LATER, "{point}: {told:?}");
            node.await_crash()?;
            crash::forget_wish(node.dirs())?;
            let attached = service.attached();
            ensure!(attached.is_empty() == point.ends_with("add/after-record"), "{point}: {attached:?}");
            ensure!(owed(node)? == usize::from(!point.ends_with("removed")), "{point}: {} records", owed(node)?);
            if point.ends_with("removed") {
                // The ADD had ended but for its answer: the runtime's DEL follows every ADD that failed.
                del(node, a.name(), a.path())?.silent()?;
            }
            node.start_agent()?;
            wait::until_equal("records of what is owed", &0, || owed(node))?;
            ensure!(service.attached().is_empty(), "{point}: {:?}", service.attached());
            node.stop_agent()?;
        }
        let of_dels = [
            "delegate/del/after-answer",
            "delegate/del/after-record",
            "delegate/drain/after-list",
            "delegate/settle/after-del",
        ];
        for point in of_dels {
            let b = node.sandbox(&format!("b{}", point.len()))?;
            ensure!(node.start_armed_agent()?);
            add(node, &b)?.result()?;
            let is_drained = ["drain", "settle"].iter().any(|part| point.contains(part));
            if !point.ends_with("del/after-answer") {
                service.die()?;
            }
            if is_drained {
                del(node, b.name(), b.path())?.silent()?;
                crash::wish(node.dirs(), point)?;
                // A pass that has listed the record before the wish ends without the service.
                if !point.ends_with("after-list") {
                    service.rise()?;
                }
            } else {
                crash::wish(node.dirs(), point)?;
                // The agent is gone: the plugin records it, if the agent has not.
                del(node, b.name(), b.path())?.silent()?;
            }
            node.await_crash()?;
            crash::forget_wish(node.dirs())?;
            let was_sent = ["after-answer", "after-del"].iter().any(|end| point.ends_with(end));
            ensure!(service.attached().is_empty() == was_sent && owed(node)? == 1, "{point}: {:?}", service.attached());
            if ["del/after-record", "after-list"].iter().any(|end| point.ends_with(end)) {
                service.rise()?;
            }
            node.start_agent()?;
            wait::until_equal("records of what is owed", &0, || owed(node))?;
            ensure!(service.attached().is_empty(), "{point}: {:?}", service.attached());
            node.stop_agent()?;
        }
        node.start_agent()
    })
}

#[test]
fn without_an_agent_a_del_is_recorded_and_touches_nothing() -> Result<()> {
    delegated(|node, service| {
        let a = node.sandbox("a")?;
        add(node, &a)?.result()?;
        let links = (node.space().links()?, a.space()?.links()?);
        node.kill_agent()?;
        del(node, "a", a.path())?.silent()?;
        ensure!(owed(node)? == 1);
        ensure!(links == (node.space().links()?, a.space()?.links()?), "the links are the service's");
        ping(a.space()?, GATEWAY.parse()?)?.must_answer()?;
        ensure!(add(node, &a)?.failure()?.code == LATER);
        // An agent of the other mode would take the deletion for its own.
        let delegate = format!("--delegate={}", service.socket().display());
        node.set_flag(&delegate, false);
        let refused = node.run_agent_to_end(&[])?;
        ensure!(refused.code() == 1 && refused.stderr.contains("deletions (1) wait"), "{}", refused.describe());
        ensure!(node.dirs().version_trees()?.is_empty(), "pins {:?}", node.dirs().version_trees()?);
        node.set_flag(&delegate, true);
        node.start_agent()?;
        wait::until_equal("records of what is owed", &0, || owed(node))?;
        ensure!(service.attached().is_empty(), "{:?}", service.attached());
        Ok(())
    })
}

#[test]
fn an_answer_that_breaks_a_rule_is_refused_and_what_it_made_is_undone() -> Result<()> {
    delegated(|node, service| {
        let key = |container: &str| v1::AttachmentKey {
            network: NETWORK.to_owned(),
            container_id: container.to_owned(),
            interface: "eth0".to_owned(),
        };
        type Spoil = fn(&mut v1::Attachment);
        let lies: [(&str, Spoil); 6] = [
            ("which was not asked for", |a| {
                a.key = Some(v1::AttachmentKey { container_id: "other".into(), ..a.key.clone().unwrap_or_default() })
            }),
            ("\"10.77.0.300\"", |a| a.addresses[0].address = "10.77.0.300".to_owned()),
            ("10000 of them, at most 2", |a| a.addresses = vec![a.addresses[0].clone(); 10_000]),
            ("longer than 65536 bytes", |a| {
                a.dns = Some(v1::Dns { domain: "x".repeat(100_000), ..v1::Dns::default() })
            }),
            ("must be at most 15 bytes", |a| {
                a.host =
                    Some(v1::Interface { name: "a-name-that-is-too-long".into(), ..a.host.clone().unwrap_or_default() })
            }),
            ("has control characters", |a| a.netns.push('\u{1b}')),
        ];
        for (n, (words, spoil)) in lies.into_iter().enumerate() {
            let a = node.sandbox(&format!("a{n}"))?;
            let mut lie = attachment(&key(a.name()), &a.path().display().to_string(), 1);
            spoil(&mut lie);
            service.mood("Add", Mood::Lie(Box::new(lie)));
            let told = add(node, &a)?.failure()?;
            // An answer of 10,000 addresses is longer than any may be, too.
            let is_told = told.msg.contains(words) || (words.contains("10000") && told.msg.contains("longer than"));
            ensure!(told.code == 5 && is_told && told.msg.len() < 600, "{words}: {told:?}");
            ensure!(!told.text().contains('\u{1b}'), "{told:?}");
            wait::until_equal("records of what is owed", &0, || owed(node))?;
            ensure!(service.attached().is_empty(), "{words}: {:?}", service.attached());
        }
        Ok(())
    })
}

#[test]
fn fifty_at_once_are_all_attached_and_all_detached() -> Result<()> {
    delegated(|node, service| {
        let all: Vec<Sandbox> = (0..50).map(|n| node.sandbox(&format!("c{n}"))).collect::<Result<_>>()?;
        for (command, count) in [("ADD", 50), ("DEL", 0)] {
            let calls =
                all.iter().map(|s| node.cni(command).of(s.name(), s.path(), "eth0").conf(&node.netconf()).ready());
            let calls: Vec<_> = calls.collect::<Result<_>>()?;
            let running: Vec<_> = calls.into_iter().map(|call| thread::spawn(move || call.run())).collect();
            for call in running {
                let answer = call.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
                ensure!(answer.finished.status.success(), "{}", answer.finished.describe());
            }
            ensure!(service.attached().len() == count, "{:?}", service.attached());
        }
        for (verb, outcome) in [("ADD", "success"), ("DEL", "success")] {
            ensure!(
                metric(node, &commands(verb, outcome))? == Some(50),
                "{verb}: {:?}",
                metric(node, &commands(verb, outcome))?
            );
        }
        Ok(())
    })
}

#[test]
fn commands_are_told_as_delegated_and_what_is_not_there_says_so() -> Result<()> {
    delegated(|node, service| {
        let a = node.sandbox("a")?;
        let made = add(node, &a)?.result()?;
        service.mood("Add", Mood::Fail(failure(123, "no", "", 0)));
        let b = node.sandbox("b")?;
        add(node, &b)?.failure()?;
        let conf = node.netconf();
        let check =
            |result: &Value| node.cni("CHECK").of("a", a.path(), "eth0").conf(&conf.clone().after(result)).run();
        check(&made)?.silent()?;
        let listed = json!([{"containerID": "a", "ifname": "eth0"}]);
        node.cni("GC").conf(&conf.clone().with("cni.dev/valid-attachments", listed)).run()?.silent()?;
        del(node, "a", a.path())?.silent()?;
        check(&made)?.failure()?;
        for (verb, outcome, count) in [
            ("ADD", "success", 1),
            ("ADD", "failure", 1),
            ("CHECK", "success", 1),
            ("CHECK", "failure", 1),
            ("GC", "success", 1),
            ("DEL", "success", 1),
        ] {
            ensure!(metric(node, &commands(verb, outcome))? == Some(count), "{verb} {outcome}");
        }
        ensure!(metric(node, "wharf_delegate_reachable")? == Some(1));
        let line = |holds: &dyn Fn(&Value) -> bool| {
            node.log().lines().filter_map(|l| serde_json::from_str::<Value>(l).ok()).find(|l| holds(l))
        };
        let told = line(&|l| l["command"] == "ADD" && l["outcome"] == "failure").context("a line of the failed ADD")?;
        ensure!(told["mode"] == "delegated" && told["code"] == "delegate" && told["container"] == "b", "{told}");
        for (method, path) in
            [("GET", "/v1/endpoint"), ("GET", "/v1/ipam"), ("POST", "/v1/audit"), ("PATCH", "/v1/endpoint/7")]
        {
            let answer = node.http(method, path, Some("{}"))?;
            ensure!(answer.status == 422 && answer.text().contains("net.sock"), "{method} {path}: {answer:?}");
        }
        let unknown = node.http("GET", "/v1/endpoint/7", None)?;
        ensure!(unknown.status == 400 && unknown.text().contains("cni-attachment-id"), "{unknown:?}");
        // The process has given up every capability but the one for its socket's group.
        let process = fs::read_to_string(format!("/proc/{}/status", node.agent_pid()?))?;
        let caps = process.lines().find_map(|l| l.strip_prefix("CapPrm:")).context("CapPrm")?.trim().to_owned();
        ensure!(u64::from_str_radix(&caps, 16)? & !1 == 0, "capabilities {caps}");
        Ok(())
    })
}

#[test]
fn a_socket_that_others_may_have_made_is_not_trusted_and_a_network_of_its_own_is_refused() -> Result<()> {
    delegated(|node, service| {
        let a = node.sandbox("a")?;
        fs::set_permissions(service.socket(), fs::Permissions::from_mode(0o777))?;
        service.die()?;
        service.rise()?;
        fs::set_permissions(service.socket(), fs::Permissions::from_mode(0o777))?;
        wait::until("the old connection is gone", || {
            Ok(status(node)?.delegate.filter(|d| d.reachable == Some(false)).map(drop))
        })?;
        let told = add(node, &a)?.failure()?;
        ensure!(told.code == LATER && told.msg.contains("it is not trusted: its mode 777"), "{told:?}");
        fs::set_permissions(service.socket(), fs::Permissions::from_mode(0o660))?;
        std::os::unix::fs::chown(service.socket(), Some(65534), None)?;
        let told = add(node, &a)?.failure()?;
        ensure!(told.code == LATER && told.msg.contains("user 65534 owns it"), "{told:?}");
        std::os::unix::fs::chown(service.socket(), Some(0), None)?;
        add(node, &a)?.result()?;
        del(node, "a", a.path())?.silent()?;
        node.stop_agent()?;
        let refused = node.run_agent_to_end(&["--ipv4-pool", "10.9.0.0/24"])?;
        ensure!(
            refused.code() == 3 && refused.stderr.contains("setting delegate (--delegate)"),
            "{}",
            refused.describe()
        );
        ensure!(refused.stderr.contains("ipv4-pool") && refused.stderr.contains("net.sock"), "{}", refused.describe());
        fs::write(node.dirs().run.join("state.redb"), "")?;
        let refused = node.run_agent_to_end(&[])?;
        ensure!(refused.code() == 1 && refused.stderr.contains("wharf-agent cleanup"), "{}", refused.describe());
        fs::remove_file(node.dirs().run.join("state.redb"))?;
        node.start_agent()
    })
}

/// The caller of a DEL that the agent did not read has left a record, and the runtime has gone on: the attachment may
/// be a later ADD's.
#[test]
fn a_del_that_is_read_after_its_caller_gave_up_does_nothing() -> Result<()> {
    delegated(|node, service| {
        let a = node.sandbox("a")?;
        add(node, &a)?.result()?;
        // A client that gives up may not have sent its request yet. This one has, and its time was over at the boot.
        let request = format!(
            "DELETE /v1/endpoint/cni-attachment-id:a:eth0?network={NETWORK} HTTP/1.1\r\nHost: wharf\r\n\
             Connection: close\r\n{UNTIL_HEADER}: 0\r\n\r\n"
        );
        let late = http::raw(&node.dirs().socket(), request.as_bytes())?;
        ensure!(late.text().contains("its caller gave up"), "{}", late.text());
        ensure!(service.attached().len() == 1 && !service.calls().iter().any(|call| call.starts_with("Del")));
        ping(a.space()?, GATEWAY.parse()?)?.must_answer()?;
        del(node, "a", a.path())?.silent()
    })
}

#[test]
fn an_add_during_a_gc_is_not_collected() -> Result<()> {
    delegated(|node, service| {
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        add(node, &a)?.result()?;
        service.mood("Gc", Mood::Slow(Duration::from_millis(500)));
        let conf = node.netconf().with("cni.dev/valid-attachments", json!([]));
        let gc = node.cni("GC").conf(&conf).ready()?;
        thread::scope(|scope| -> Result<()> {
            let gc = scope.spawn(move || gc.run());
            wait::until("the Gc", || Ok(service.calls().iter().any(|call| call.starts_with("Gc")).then_some(())))?;
            add(node, &b)?.result()?;
            gc.join().map_err(|_| anyhow::anyhow!("the GC's thread panicked"))??.silent()
        })?;
        ensure!(service.attached() == BTreeSet::from(["b".to_owned()]), "{:?}", service.attached());
        ping(b.space()?, GATEWAY.parse()?)?.must_answer()?;
        del(node, "b", b.path())?.silent()
    })
}

/// As many as are sent at once. GC does not pass them by.
#[test]
fn deletions_that_the_service_does_not_take_hold_up_no_others() -> Result<()> {
    delegated(|node, service| {
        let all: Vec<Sandbox> = ["bad", "good"]
            .iter()
            .flat_map(|kind| (0..8).map(move |n| format!("{kind}{n}")))
            .map(|name| node.sandbox(&name))
            .collect::<Result<_>>()?;
        for sandbox in &all {
            add(node, sandbox)?.result()?;
        }
        service.mood("Del", Mood::AwayFor("bad"));
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        for (at, sandbox) in all.iter().enumerate() {
            Queue::new(&node.dirs().run).put(&Deletion {
                version: VERSION,
                network: NETWORK.to_owned(),
                container_id: sandbox.name().to_owned(),
                ifname: "eth0".to_owned(),
                endpoint: None,
                boot_id: boot_id.clone(),
                // The bad ones are the oldest.
                written_unix_ms: 1 + at as u64,
                canary: None,
            })?;
        }
        wait::until_equal("records of what is owed", &8, || owed(node))?;
        ensure!(service.attached().iter().all(|there| there.contains("bad")), "{:?}", service.attached());
        let valid = json!([{"containerID": "bad0", "ifname": "eth0"}]);
        let gc = node.netconf().with("cni.dev/valid-attachments", valid);
        let told = node.cni("GC").conf(&gc).run()?.failure()?;
        ensure!(told.code == LATER && told.msg.contains("bad0") && told.msg.contains("owed"), "{told:?}");
        service.mood("Del", Mood::Well);
        wait::until_equal("records of what is owed", &0, || owed(node))
    })
}

/// As after a service that hangs was replaced without its end.
#[test]
fn a_service_that_took_over_the_socket_is_reached() -> Result<()> {
    delegated(|node, service| {
        service.die()?;
        let frozen = UnixListener::bind(service.socket())?;
        let reached = || Ok(status(node)?.delegate.and_then(|d| d.reachable));
        wait::until_equal("the frozen one is not reached", &Some(false), reached)?;
        fs::remove_file(service.socket())?;
        service.rise()?;
        wait::until_equal("the one behind it is reached", &Some(true), reached)?;
        drop(frozen);
        let a = node.sandbox("a")?;
        add(node, &a)?.result()?;
        del(node, "a", a.path())?.silent()
    })
}

#[test]
fn what_cannot_be_recorded_is_told_before_an_add() -> Result<()> {
    delegated(|node, _| {
        let directory = node.dirs().run.join("unfinished-adds");
        fs::remove_dir(&directory)?;
        fs::write(&directory, "")?;
        let told = node.cni("STATUS").conf(&node.netconf()).run()?.failure()?;
        ensure!(told.code == 50 && told.msg.contains("no ADD can be recorded"), "{told:?}");
        fs::remove_file(&directory)?;
        node.cni("STATUS").conf(&node.netconf()).run()?.silent()
    })
}

/// The second STATUS arrives while the first waits for the service, after its look at the directory.
#[test]
fn a_status_is_not_answered_by_a_look_that_began_before_it() -> Result<()> {
    delegated(|node, service| {
        wait::until("the agent's own look", || {
            Ok(status(node)?.delegate.filter(|d| d.reachable == Some(true)).map(drop))
        })?;
        service.mood("Status", Mood::Slow(Duration::from_secs(1)));
        let (conf, looks) = (node.netconf(), service.looks());
        let first = node.cni("STATUS").conf(&conf).ready()?;
        thread::scope(|scope| -> Result<()> {
            let first = scope.spawn(move || first.run());
            wait::until("its look", || Ok((service.looks() > looks).then_some(())))?;
            let directory = node.dirs().run.join("unfinished-adds");
            fs::remove_dir(&directory)?;
            fs::write(&directory, "")?;
            let told = node.cni("STATUS").conf(&conf).run()?.failure()?;
            ensure!(told.code == 50 && told.msg.contains("no ADD can be recorded"), "{told:?}");
            first.join().map_err(|_| anyhow::anyhow!("the first STATUS's thread panicked"))??;
            fs::remove_file(&directory)?;
            Ok(())
        })
    })
}

/// An address is leased until the service has nothing of the attachment any more.
#[test]
fn an_ipam_plugins_lease_outlasts_the_attachment() -> Result<()> {
    delegated(|node, service| {
        let data = node.dirs().root.join("host-local");
        let ipam = json!({"type": "host-local", "dataDir": data, "ranges": [[{"subnet": "10.1.0.0/24"}]]});
        let conf = node.netconf().version("1.0.0").with("ipam", ipam);
        let leased = || data.join(NETWORK).join("10.1.0.2").exists();
        let a = node.sandbox("a")?;
        let call = |verb: &str| node.cni(verb).of(a.name(), a.path(), "eth0").conf(&conf).run();
        // Nobody knows what the service made.
        service.mood("Add", Mood::Refuse(Code::Unavailable));
        service.mood("Del", Mood::Refuse(Code::Unavailable));
        ensure!(call("ADD")?.failure()?.code == LATER && leased());
        let told = call("DEL")?.failure()?;
        ensure!(told.code == LATER && told.msg.contains("may have the container's addresses") && leased(), "{told:?}");
        service.mood("Add", Mood::Well);
        service.mood("Del", Mood::Well);
        call("DEL")?.silent()?;
        ensure!(!leased(), "the lease stays");
        // It has what was leased, and nothing else.
        let mut lie = attachment(&v1::AttachmentKey::default(), &a.path().display().to_string(), 9);
        lie.key = Some(v1::AttachmentKey {
            network: NETWORK.to_owned(),
            container_id: "a".to_owned(),
            interface: "eth0".to_owned(),
        });
        lie.container.get_or_insert_default().name = "eth0".to_owned();
        service.mood("Add", Mood::Lie(Box::new(lie)));
        let told = call("ADD")?.failure()?;
        ensure!(told.code == 5 && told.msg.contains("the IPAM plugin leased"), "{told:?}");
        wait::until_equal("records of what is owed", &0, || owed(node))?;
        call("DEL")?.silent()?;
        service.mood("Add", Mood::Well);
        let result = call("ADD")?.result()?;
        let address = result["ips"][0]["address"].as_str().unwrap_or_default().to_owned();
        ensure!(address.starts_with("10.1.0."), "{result}");
        call("DEL")?.silent()
    })
}
