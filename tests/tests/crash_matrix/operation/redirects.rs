//! Operations on rules about requests, and on a container whose requests are judged. Somebody asks all the time for
//! what no rule allows.

use anyhow::{Context as _, Result, ensure};
use wharf_tests::process::Finished;

use super::{Act, Operation, Victim, nothing, policy, retry_add};
use crate::{
    redirected::{self, NAME},
    scene::Scene,
};

/// A flag of agents that start Envoy.
pub(crate) const PROXY_PORT: &str = "--proxy-port";
const FLAGS: &[&str] = &[
    "--node-name",
    "quay",
    "--prepared-programs",
    "2",
    "--ip-rest-ms",
    "3600000",
    "--health-interval-ms",
    "0",
    PROXY_PORT,
    "15000",
];

pub(crate) const IMPORT: Operation = Operation {
    name: "import of rules about requests, the first",
    least: 22,
    flags: FLAGS,
    victim: Victim::Agent,
    prepare: |scene| armed(scene, false),
    act: |scene| policy::import(scene, &redirected::policy(false)),
    go_on: |scene, _| imported(policy::import(scene, &redirected::policy(false))?),
};

pub(crate) const CHANGE: Operation = Operation {
    name: "change of rules about requests",
    least: 27,
    prepare: |scene| armed(scene, true),
    act: |scene| policy::import(scene, &redirected::policy(true)),
    go_on: |scene, _| imported(policy::import(scene, &redirected::policy(true))?),
    ..IMPORT
};

pub(crate) const DELETE: Operation = Operation {
    name: "delete of rules about requests, the last",
    least: 20,
    prepare: |scene| armed(scene, true),
    act: delete,
    go_on: |scene, _| {
        // What is gone is not there to be deleted.
        let finished = delete(scene)?.run()?.context("a command")?;
        ensure!(finished.code() <= 1, "{}", finished.describe());
        Ok(())
    },
    ..IMPORT
};

pub(crate) const LEAVE: Operation = Operation {
    name: "the way to the proxy is taken away",
    least: 2,
    prepare: |scene| {
        armed(scene, true)?;
        delete(scene)?.run()?.context("a command")?.ok().map(drop)
    },
    // It goes by itself.
    act: nothing,
    go_on: |scene, _| redirected::left(scene.node),
    ..IMPORT
};

pub(crate) const ADD: Operation = Operation {
    name: "ADD of a container whose requests are judged",
    least: 36,
    flags: FLAGS,
    prepare: |scene| armed(scene, true),
    go_on: |scene: &mut Scene<'_>, finished: Option<Finished>| {
        scene.delete_x()?;
        scene.rules_follow(false).context("after the runtime's DEL")?;
        retry_add(scene, finished)
    },
    ..super::ADD
};

pub(crate) const DEL: Operation = Operation {
    name: "DEL of a container whose requests are judged",
    least: 20,
    flags: FLAGS,
    prepare: |scene| {
        armed(scene, true)?;
        scene.add_x()?;
        scene.hold_x()?;
        scene.await_quiet()
    },
    ..super::DEL
};

/// An agent with crash points, with or without rules. Nothing of it is left to do.
fn armed(scene: &mut Scene<'_>, judged: bool) -> Result<()> {
    scene.arm()?;
    scene.redirecting(judged)?;
    scene.await_quiet()
}

/// The proxy may need some time to connect to the next agent.
fn imported(act: Act) -> Result<()> {
    let finished = act.run()?.context("a command")?;
    let waits = finished.code() == 1 && finished.stdout.contains("not in force yet");
    ensure!(finished.status.success() || waits, "{}", finished.describe());
    Ok(())
}

fn delete(scene: &Scene<'_>) -> Result<Act> {
    scene.redirected()?.loosen();
    policy::wharf(scene, &["policy", "delete", "CiliumClusterwideNetworkPolicy", NAME])
}
