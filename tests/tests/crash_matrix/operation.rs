//! The operations that are interrupted, and how a runtime goes on after each.

pub(crate) mod policy;
pub(crate) mod redirects;

use std::{process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::json;
use wharf_handover::queue::Queue;
use wharf_tests::{
    cni::{Answer, NETWORK, Ready},
    crash,
    process::{Finished, ip, run},
    wait,
};

use crate::{guard, scene::Scene};

/// Who dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Victim {
    /// The agent, while it serves.
    Agent,
    /// The agent, while it starts.
    Start,
    Plugin,
}

/// Something that is interrupted.
pub(crate) struct Operation {
    pub(crate) name: &'static str,
    /// Fewer points than this: some were lost.
    pub(crate) least: usize,
    /// Flags of the agent.
    pub(crate) flags: &'static [&'static str],
    pub(crate) victim: Victim,
    /// Brings the node to the point before it. With [`Victim::Agent`] an agent with crash points runs then, with
    /// [`Victim::Start`] none.
    pub(crate) prepare: fn(&mut Scene<'_>) -> Result<()>,
    /// Begins it. What it gives is run beside the agent's death.
    pub(crate) act: fn(&Scene<'_>) -> Result<Act>,
    /// What a runtime does next, when an agent runs again.
    pub(crate) go_on: fn(&mut Scene<'_>, Option<Finished>) -> Result<()>,
}

/// What is run.
pub(crate) enum Act {
    Nothing,
    Cni(Ready),
    Cli(Command),
}

impl Act {
    pub(crate) fn run(self) -> Result<Option<Finished>> {
        match self {
            Self::Nothing => Ok(None),
            Self::Cni(call) => Ok(Some(call.run()?.finished)),
            Self::Cli(command) => run(command, b"", Duration::from_secs(60)).map(Some),
        }
    }
}

/// Long rests: what the agent does by itself when one is over would be interrupted in place of the operation.
const FLAGS: &[&str] =
    &["--node-name", "quay", "--prepared-programs", "2", "--ip-rest-ms", "3600000", "--health-interval-ms", "0"];
const UNPREPARED: &[&str] =
    &["--node-name", "quay", "--prepared-programs", "0", "--ip-rest-ms", "3600000", "--health-interval-ms", "0"];

pub(crate) const START_EMPTY: Operation = Operation {
    name: "start on an empty node",
    least: 35,
    flags: FLAGS,
    victim: Victim::Start,
    prepare: |_| Ok(()),
    act: nothing,
    go_on: |_, _| Ok(()),
};

pub(crate) const ADD: Operation = Operation {
    name: "ADD with programs made ahead of need",
    least: 30,
    flags: FLAGS,
    victim: Victim::Agent,
    prepare: |scene| scene.arm(),
    act: |scene| cni(scene, "ADD", false),
    go_on: retry_add,
};

pub(crate) const ADD_UNPREPARED: Operation =
    Operation { name: "ADD without programs made ahead of need", least: 37, flags: UNPREPARED, ..ADD };

pub(crate) const ADD_FAILS_EARLY: Operation = Operation {
    name: "ADD that fails because the container has such an interface",
    least: 18,
    flags: FLAGS,
    victim: Victim::Agent,
    prepare: |scene| {
        scene.arm()?;
        ip(scene.x.space()?, "link add eth0 type veth peer name theirs").map(drop)
    },
    act: |scene| cni(scene, "ADD", false),
    go_on: |scene, finished| {
        Answer { finished: finished.context("ADD was not called")? }.failure()?;
        scene.del_x()?.silent()?;
        let links = scene.x.space()?.links()?;
        ensure!(links.contains(&"eth0".to_owned()), "somebody else's interface was removed: {links:?}");
        ip(scene.x.space()?, "link del eth0")?;
        scene.add_x()
    },
};

pub(crate) const ADD_FAILS_LATE: Operation = Operation {
    name: "ADD that fails because new interfaces of the node have no IPv6, and the agent may not turn it on",
    least: 31,
    flags: FLAGS,
    victim: Victim::Agent,
    prepare: |scene| {
        scene.arm()?;
        ipv6_of_new_interfaces(scene, false)?;
        // As for an agent in a container without privileges. The mount namespace is the test's own.
        let bind = |flags| mount(Some(SYSCTL), SYSCTL, None::<&str>, MsFlags::MS_BIND | flags, None::<&str>);
        bind(MsFlags::empty()).context("bind the sysctls")?;
        bind(MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY).context("make the sysctls read-only")
    },
    act: |scene| cni(scene, "ADD", false),
    go_on: |scene, finished| {
        Answer { finished: finished.context("ADD was not called")? }.failure()?;
        scene.del_x()?.silent()?;
        // Another process of the test may be looking at one.
        umount2(SYSCTL, MntFlags::MNT_DETACH).context("make the sysctls writable again")?;
        ipv6_of_new_interfaces(scene, true)?;
        scene.add_x()
    },
};

/// Where the kernel's settings are.
const SYSCTL: &str = "/proc/sys";

/// A setting of the node's namespace, which is the test's own.
fn ipv6_of_new_interfaces(scene: &Scene<'_>, on: bool) -> Result<()> {
    let path = "/proc/sys/net/ipv6/conf/default/disable_ipv6";
    let text = if on { "0" } else { "1" };
    scene.node.space().run(|| std::fs::write(path, text))?.with_context(|| format!("write {path}"))
}

pub(crate) const DEL: Operation = Operation {
    name: "DEL",
    least: 20,
    flags: FLAGS,
    victim: Victim::Agent,
    prepare: armed_with_x,
    act: |scene| cni(scene, "DEL", false),
    go_on: retry_del,
};

pub(crate) const REGENERATE_POLICY: Operation = Operation {
    name: "regenerate, level policy",
    least: 7,
    flags: FLAGS,
    victim: Victim::Agent,
    prepare: armed_with_x,
    act: |scene| regenerate(scene, "policy").map(Act::Cli),
    go_on: |scene, _| retry_regenerate(scene, "policy"),
};

pub(crate) const REGENERATE_DATAPATH: Operation = Operation {
    name: "regenerate, level datapath",
    least: 25,
    flags: FLAGS,
    victim: Victim::Agent,
    prepare: armed_with_x,
    act: |scene| regenerate(scene, "datapath").map(Act::Cli),
    go_on: |scene, _| retry_regenerate(scene, "datapath"),
};

pub(crate) const REPAIR_PIN: Operation = Operation {
    name: "a shared pin made again while the agent runs",
    least: 3,
    flags: FLAGS,
    victim: Victim::Agent,
    prepare: armed_with_x,
    act: |scene| {
        let shared = scene.node.dirs().bpffs.join(format!("wharf/v{}/shared", wharf_common::ABI_VERSION));
        std::fs::remove_file(shared.join("CALLS")).context("unpin the map")?;
        scene.node.wharf_command(&["audit", "--repair"]).map(Act::Cli)
    },
    // An audit that fails is repeated. That nothing is amiss is checked afterwards.
    go_on: |scene, _| {
        let audit = scene.node.wharf_command(&["audit", "--repair"])?;
        run(audit, b"", Duration::from_secs(60)).map(drop)
    },
};

pub(crate) const RESTORE: Operation = Operation {
    name: "restart with a dead endpoint and an interrupted ADD",
    least: 80,
    flags: FLAGS,
    victim: Victim::Start,
    prepare: |scene| {
        scene.arm()?;
        let mut dead = scene.node.sandbox("dead")?;
        scene.dead = Some(scene.node.attach(&dead)?);
        // How many sets of programs the start finds must not depend on when the agent made the next one.
        scene.await_quiet()?;
        interrupt(scene, "create/before-commit", "ADD")?;
        dead.vanish()?;
        // The kernel takes a namespace down in its own time. Left are the witnesses' links and that of the ADD.
        wait::until("the dead container's link to go", || Ok((scene.node.endpoint_links()?.len() == 3).then_some(())))
    },
    act: nothing,
    go_on: |scene, _| {
        let dead = scene.dead.take().context("a container that died")?;
        scene.node.detach(&dead)?;
        scene.del_x()?.silent()?;
        scene.add_x()
    },
};

pub(crate) const RESTORE_DEL: Operation = Operation {
    name: "restart with an interrupted DEL",
    least: 75,
    flags: FLAGS,
    victim: Victim::Start,
    prepare: |scene| {
        armed_with_x(scene)?;
        interrupt(scene, "delete/before-unpin", "DEL")
    },
    act: nothing,
    go_on: retry_del,
};

pub(crate) const DRAIN_AT_START: Operation = Operation {
    name: "deletion queue drained at start",
    least: 73,
    flags: FLAGS,
    victim: Victim::Start,
    prepare: |scene| {
        armed_with_x(scene)?;
        scene.node.kill_agent()?;
        scene.queue_x()
    },
    act: nothing,
    go_on: await_gone,
};

pub(crate) const DRAIN_LIVE: Operation = Operation {
    name: "deletion queue drained while the agent runs",
    least: 30,
    flags: FLAGS,
    victim: Victim::Agent,
    prepare: armed_with_x,
    act: |scene| scene.queue_x().map(|()| Act::Nothing),
    go_on: await_gone,
};

pub(crate) const PLUGIN_ADD: Operation = Operation {
    name: "the plugin's ADD",
    least: 2,
    flags: FLAGS,
    victim: Victim::Plugin,
    prepare: unarmed,
    act: |scene| cni(scene, "ADD", true),
    go_on: |scene, _| {
        scene.del_x()?.silent()?;
        scene.add_x()
    },
};

pub(crate) const PLUGIN_DEL: Operation = Operation {
    name: "the plugin's DEL",
    least: 2,
    flags: FLAGS,
    victim: Victim::Plugin,
    prepare: |scene| {
        unarmed(scene)?;
        scene.add_x()
    },
    act: |scene| cni(scene, "DEL", true),
    go_on: retry_del,
};

pub(crate) const PLUGIN_DEL_ABSENT: Operation = Operation {
    name: "the plugin's DEL while no agent runs",
    least: 10,
    flags: FLAGS,
    victim: Victim::Plugin,
    prepare: |scene| {
        unarmed(scene)?;
        scene.add_x()?;
        scene.node.kill_agent()?;
        std::fs::remove_dir_all(queue(scene).path()).context("remove the deletion queue")
    },
    act: |scene| cni(scene, "DEL", true),
    go_on: retry_del,
};

pub(crate) const PLUGIN_DEL_OVER_RUBBISH: Operation = Operation {
    name: "the plugin's DEL while no agent runs, over a record that is none",
    least: 11,
    flags: FLAGS,
    victim: Victim::Plugin,
    prepare: |scene| {
        unarmed(scene)?;
        scene.add_x()?;
        scene.node.kill_agent()?;
        let name = Queue::file_name(NETWORK, scene.x.name(), "eth0");
        std::fs::write(queue(scene).path().join(name), b"torn").context("write a torn record")
    },
    act: |scene| cni(scene, "DEL", true),
    go_on: retry_del,
};

fn nothing(_: &Scene<'_>) -> Result<Act> {
    Ok(Act::Nothing)
}

fn queue(scene: &Scene<'_>) -> Queue {
    Queue::new(&scene.node.dirs().run)
}

fn armed_with_x(scene: &mut Scene<'_>) -> Result<()> {
    scene.arm()?;
    scene.add_x()?;
    scene.await_quiet()
}

fn unarmed(scene: &mut Scene<'_>) -> Result<()> {
    if !scene.node.has_agent() {
        scene.node.start_agent()?;
    }
    scene.await_quiet()
}

/// A call about `x`, whose port is published.
fn cni(scene: &Scene<'_>, command: &str, armed: bool) -> Result<Act> {
    let node = &*scene.node;
    let ports = json!({"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "udp"}]});
    let published = node.netconf().with("runtimeConfig", ports);
    let published = if scene.is_labelled() { published.with("args", guard::labels_of_x()) } else { published };
    let call = node.cni(command).of(scene.x.name(), scene.x.path(), "eth0").conf(&published);
    let call = if armed { call.armed(node.dirs()) } else { call };
    Ok(Act::Cni(call.ready()?))
}

fn regenerate(scene: &Scene<'_>, level: &str) -> Result<Command> {
    let id = scene.ex.as_ref().context("an endpoint to regenerate")?.id();
    scene.node.wharf_command(&["endpoint", "regenerate", &id, "--level", level])
}

/// Kills the agent at a point of an ADD or DEL of `x`, and leaves it dead.
fn interrupt(scene: &mut Scene<'_>, point: &str, command: &str) -> Result<()> {
    crash::wish(scene.node.dirs(), point)?;
    let call = cni(scene, command, false)?;
    let calling = std::thread::spawn(move || call.run());
    scene.node.await_crash().with_context(|| format!("{command} to be interrupted at {point}"))?;
    crash::forget_wish(scene.node.dirs())?;
    // How it ends does not matter: the ADD fails, the DEL leaves a record.
    calling.join().map_err(|_| anyhow::anyhow!("the call panicked"))?.map(drop)
}

/// An ADD that failed is followed by a DEL, and tried again.
fn retry_add(scene: &mut Scene<'_>, finished: Option<Finished>) -> Result<()> {
    let answer = Answer { finished: finished.context("ADD was not called")? };
    if !answer.finished.status.success() {
        let failure = answer.failure()?;
        ensure!(failure.code == 11, "an ADD whose agent died is to be tried again: {failure:?}");
    }
    // One that went well is deleted too: what it answered would be lost with the runtime that died beside the agent.
    scene.delete_x()?;
    scene.add_x()
}

/// A DEL that failed is repeated; one that succeeded is too, because runtimes do that.
fn retry_del(scene: &mut Scene<'_>, finished: Option<Finished>) -> Result<()> {
    if let Some(finished) = finished.filter(|f| f.code() > 0) {
        let failure = Answer { finished }.failure()?;
        ensure!(failure.code == 11, "a DEL whose agent died is to be tried again: {failure:?}");
    }
    scene.delete_x()?;
    scene.delete_x()?;
    scene.ex = None;
    Ok(())
}

fn retry_regenerate(scene: &mut Scene<'_>, level: &str) -> Result<()> {
    let command = regenerate(scene, level)?;
    run(command, b"", Duration::from_secs(60))?.ok()?;
    Ok(())
}

/// The record is served without anybody asking again.
fn await_gone(scene: &mut Scene<'_>, _: Option<Finished>) -> Result<()> {
    wait::until("the deletion record to be served", || {
        let there = scene.node.endpoints()?.iter().any(|e| e.container_id == scene.x.name());
        Ok((!there && queue(scene).list()?.is_empty()).then_some(()))
    })?;
    scene.ex = None;
    Ok(())
}
