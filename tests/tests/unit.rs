//! The agent with the rights of its systemd unit: they are enough, and it gives up all others when something else
//! starts it.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::json;
use wharf_tests::{
    Node, NodeConfig,
    echo::{self, EchoServer},
    icmp,
    process::{self, as_nobody, bin, bounded, command_in, run},
    scenario, wait,
    world::{NODE, World},
};

const UNIT: &str = include_str!("../../dist/wharf-agent.service");

/// The effective set of a process, as the kernel shows it.
fn effective(pid: u32) -> Result<u64> {
    set(&fs::read_to_string(format!("/proc/{pid}/status"))?, "CapEff")
}

/// A set of a task, from its status file.
fn set(status: &str, name: &str) -> Result<u64> {
    let set = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).context("no such set")?;
    Ok(u64::from_str_radix(set.trim(), 16)?)
}

#[test]
fn an_agent_that_root_starts_by_hand_keeps_no_other_capability_in_any_thread() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let unit = process::bounds(UNIT)?.iter().fold(0, |mask, capability| mask | capability.bitmask());
        let here = effective(std::process::id())?;
        ensure!(here & !unit != 0, "this test starts the agent with no more than the unit gives it: {here:x}");
        // Threads of every kind have been made.
        let sandbox = node.sandbox("used")?;
        let end = node.attach(&sandbox)?;
        let mut threads = 0;
        for task in fs::read_dir(format!("/proc/{}/task", node.agent_pid()?))? {
            // One that has ended meanwhile has none.
            let Ok(status) = fs::read_to_string(task?.path().join("status")) else { continue };
            threads += 1;
            for name in ["CapEff", "CapPrm"] {
                ensure!(set(&status, name)? == unit & here, "{name}: {status}");
            }
            ensure!(set(&status, "CapInh")? & !unit == 0 && status.contains("NoNewPrivs:\t1"), "{status}");
        }
        ensure!(threads > 3, "{threads} threads");
        node.detach(&end)
    })
}

#[test]
fn the_units_capabilities_are_enough_for_a_life_a_restart_and_the_cleanup() -> Result<()> {
    for mode in ["clsact", "tcx"] {
        let flags = ["--node-name=quay", "--attach-mode", mode, "--ipv6-pool=2001:db8:7:0:1::/80", "--announce"];
        let flags = flags.map(str::to_owned).to_vec();
        let mut node = Node::without_agent(NodeConfig { flags, toml: None })?;
        node.set_unit(UNIT);
        let world = World::join(&node)?;
        node.start_agent()?;
        // A container that the tests run in may lack some itself.
        let (has, unit) = (effective(node.agent_pid()?)?, process::bounds(UNIT)?);
        let unit = unit.iter().fold(0, |mask, capability| mask | capability.bitmask());
        ensure!(has == unit & effective(std::process::id())?, "the agent has {has:x}, the unit gives {unit:x}");

        let inside = node.sandbox("inside")?;
        let server = EchoServer::start(inside.space()?)?;
        let port = server.tcp_at(IpAddr::from(Ipv4Addr::LOCALHOST)).port();
        let asked = json!({
            "portMappings": [
                {"hostPort": 80, "containerPort": port},
                {"hostPort": 8081, "containerPort": port, "hostIP": "127.0.0.1"},
            ],
            "bandwidth": {"ingressRate": 800_000_000, "egressRate": 800_000_000},
        });
        let end = node.attach_with(&inside, "eth0", &node.netconf().with("runtimeConfig", asked))?;
        let flows = |node: &Node| -> Result<()> {
            for (there, here) in world.addresses().into_iter().zip(NODE) {
                echo::tcp(inside.space()?, world.echo().tcp_at(there), 10_000).context("masqueraded")?;
                echo::tcp(world.space()?, SocketAddr::new(here.parse()?, 80), 10_000).context("published")?;
            }
            echo::tcp(node.space(), "127.0.0.1:8081".parse()?, 10_000).context("published on loopback")?;
            icmp::ping(world.space()?, end.v6()?.into())?.must_answer().map(drop).context("announced")
        };
        let reaches = |node: &Node, when: &str| flows(node).with_context(|| format!("{mode}, {when}"));
        reaches(&node, "made")?;
        node.stop_agent()?;
        node.start_agent()?;
        node.await_rebuilt()?;
        reaches(&node, "restarted")?;
        node.kill_agent()?;
        node.start_agent()?;
        node.await_rebuilt()?;
        reaches(&node, "killed and started")?;
        node.wharf(&["endpoint", "regenerate", &end.id(), "--level", "datapath"])?.ok()?;
        let findings = node.audit()?.findings;
        ensure!(findings.is_empty(), "{mode}: {findings:?}");
        wait::until("status is well", || Ok((node.wharf(&["status"])?.code() == 0).then_some(())))?;
        node.detach(&end)?;
        // A namespace that only the process of another user tells of.
        let theirs = node.sandbox("theirs")?;
        let mut sleeper = command_in(theirs.space()?, "sleep")?;
        sleeper.arg("30");
        as_nobody(&mut sleeper);
        let mut sleeper = sleeper.spawn()?;
        let path = PathBuf::from(format!("/proc/{}/ns/net", sleeper.id()));
        let call = |command| node.cni(command).of("theirs", &path, "eth0").conf(&node.netconf()).run();
        let done = call("ADD").and_then(|a| a.result()).and_then(|_| call("DEL")?.silent());
        sleeper.kill()?;
        sleeper.wait()?;
        done.with_context(|| format!("{mode}, a namespace by its process"))?;
        // A port below 1024 that a process holds is looked at by binding it.
        let held = node.space().run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 443)))??;
        let asked = json!({"portMappings": [{"hostPort": 443, "containerPort": 443}]});
        let conf = node.netconf().with("runtimeConfig", asked);
        let said = node.cni("ADD").of("inside", inside.path(), "eth0").conf(&conf).run()?.failure()?;
        ensure!(said.msg.contains("443"), "{mode}: {said:?}");
        drop((held, server));
        node.stop_agent()?;
        let log = node.log();
        let refused = log.lines().filter(|l| l.contains("not permitted") || l.contains("ermission denied"));
        ensure!(refused.clone().next().is_none(), "{mode}: {:?}", refused.collect::<Vec<_>>());

        let mut command = node.command(bin("wharf-agent")?)?;
        command.args(["cleanup", "--force"]).args(node.dirs().flags()).env("NO_COLOR", "1");
        bounded(&mut command, UNIT)?;
        let done = run(command, b"", wait::PATIENCE)?.ok()?;
        ensure!(done.contains("nftables table inet wharf") && !node.dirs().run.exists(), "{mode}: {done}");
    }
    Ok(())
}

/// A group that Envoy's user is not in, as the unit's is.
const FOREIGN_GROUP: u32 = 4711;

/// Every file below a directory that users outside its owner's group may read or enter.
fn open_to_others(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut open = Vec::new();
    for entry in fs::read_dir(directory)? {
        let (path, meta) = entry.and_then(|entry| Ok((entry.path(), entry.metadata()?)))?;
        if meta.mode() & 0o007 != 0 {
            open.push(path.clone());
        }
        if meta.is_dir() {
            open.extend(open_to_others(&path)?);
        }
    }
    Ok(open)
}

#[test]
fn the_unit_is_enough_for_envoy() -> Result<()> {
    let mut node = Node::without_agent(NodeConfig::default().with_envoy()?)?;
    node.set_unit(UNIT);
    // As systemd makes it.
    let directory = node.dirs().run.clone();
    fs::set_permissions(&directory, fs::Permissions::from_mode(process::mode(UNIT, "RuntimeDirectoryMode")?))?;
    chown(&directory, None, Some(FOREIGN_GROUP))?;
    node.start_agent()?;
    let serves = |node: &Node| {
        wait::until("Envoy serves", || Ok(node.wharf(&["proxy", "status"])?.ok()?.contains("serving").then_some(())))?;
        node.envoy().context("no Envoy lives")
    };
    let first = serves(&node)?;
    let open = open_to_others(&directory)?;
    ensure!(open.is_empty(), "whoever passes through the run directory may use {open:?}");
    // As systemd ends the unit: the agent alone is told (KillMode=process).
    ensure!(UNIT.lines().any(|line| line == "KillMode=process"), "the unit's end is Envoy's");
    node.stop_agent()?;
    node.start_agent()?;
    ensure!(serves(&node)? == first, "the next agent takes Envoy over");
    node.signal_envoy(Signal::SIGKILL)?;
    wait::until("the next Envoy", || Ok(node.envoy().filter(|pid| *pid != first)))?;
    serves(&node)?;
    node.stop_agent()?;
    let mut command = node.command(bin("wharf-agent")?)?;
    command.args(["cleanup", "--force"]).args(node.dirs().flags()).env("NO_COLOR", "1");
    bounded(&mut command, UNIT)?;
    run(command, b"", wait::PATIENCE)?.ok()?;
    ensure!(node.envoy().is_none(), "cleanup leaves Envoy");
    Ok(())
}
