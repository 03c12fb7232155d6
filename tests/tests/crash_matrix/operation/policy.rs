//! Operations under policy, and changes of policy itself. Floods that no policy of these lets in run all the time.

use anyhow::{Context as _, Result, ensure};
use wharf_tests::{crash, process::ip};

use super::{Act, FLAGS, Operation, Victim, nothing, retry_add};
use crate::{guard, scene::Scene};

pub(crate) const ADD: Operation = Operation {
    name: "ADD of a container that a policy selects",
    least: 40,
    prepare: |scene| armed_and_guarded(scene, &[guard::more()]),
    go_on: |scene, finished| {
        // Not answered, it is there whole or not at all; the runtime's DEL leaves nothing of it.
        scene.delete_x()?;
        // A DEL is answered before the kernel has released the devices; the record stays until it has.
        scene.node.await_released()?;
        let endpoints = scene.node.endpoints()?;
        ensure!(endpoints.iter().all(|e| e.container_id != scene.x.name()), "{endpoints:?}");
        scene.rules_follow(false).context("after the runtime's DEL")?;
        retry_add(scene, finished)
    },
    ..super::ADD
};

pub(crate) const DEL: Operation = Operation {
    name: "DEL of a container that a policy selects",
    least: 30,
    prepare: |scene| {
        armed_and_guarded(scene, &[guard::more()])?;
        scene.add_x()?;
        scene.await_quiet()
    },
    ..super::DEL
};

pub(crate) const IMPORT: Operation = Operation {
    name: "import of a policy",
    least: 13,
    flags: FLAGS,
    victim: Victim::Agent,
    prepare: |scene| armed_and_guarded(scene, &[]),
    act: |scene| import(scene, &guard::more()),
    go_on: |scene, _| retried(import(scene, &guard::more())?),
};

pub(crate) const CHANGE: Operation = Operation {
    name: "change of a policy",
    least: 11,
    act: |scene| import(scene, &guard::changed()),
    go_on: |scene, _| retried(import(scene, &guard::changed())?),
    ..IMPORT
};

pub(crate) const DELETE: Operation = Operation {
    name: "delete of a policy",
    least: 13,
    prepare: |scene| armed_and_guarded(scene, &[guard::more()]),
    act: |scene| wharf(scene, &["policy", "delete", "NetworkPolicy", "more"]),
    // What is gone is not there to be deleted.
    go_on: |scene, _| {
        let finished = wharf(scene, &["policy", "delete", "NetworkPolicy", "more"])?.run()?.context("a command")?;
        ensure!(finished.code() <= 1, "{}", finished.describe());
        Ok(())
    },
    ..IMPORT
};

pub(crate) const LABELS: Operation = Operation {
    name: "other labels of a container that a policy names",
    least: 17,
    prepare: |scene| armed_and_guarded(scene, &[guard::more()]),
    act: relabel_web,
    go_on: |scene, _| retried(relabel_web(scene)?),
    ..IMPORT
};

pub(crate) const NAMESPACE: Operation = Operation {
    name: "other labels of a namespace that a policy names",
    least: 12,
    prepare: |scene| armed_and_guarded(scene, &[guard::of_teams()]),
    act: |scene| wharf(scene, &["namespace", "set", "default", "team=a"]),
    go_on: |scene, _| retried(wharf(scene, &["namespace", "set", "default", "team=a"])?),
    ..IMPORT
};

pub(crate) const RESTORE: Operation = Operation {
    name: "restart with an interrupted import of a policy, and a dead endpoint that it selects",
    least: 85,
    flags: FLAGS,
    victim: Victim::Start,
    prepare: |scene| {
        armed_and_guarded(scene, &[guard::more()])?;
        scene.rules_follow(true).context("without the interruption")?;
        scene.guarded(&[])?;
        scene.add_x()?;
        scene.await_quiet()?;
        crash::wish(scene.node.dirs(), "datapath/policy/after-row:4")?;
        let call = import(scene, &guard::more())?;
        let calling = std::thread::spawn(move || call.run());
        scene.node.await_crash().context("an import to be interrupted")?;
        crash::forget_wish(scene.node.dirs())?;
        calling.join().map_err(|_| anyhow::anyhow!("the call panicked"))?.map(drop)?;
        // Its link goes without an agent, as when the container dies.
        let ex = scene.ex.take().context("the container")?;
        ip(scene.x.space()?, "link del eth0")?;
        scene.dead = Some(ex);
        Ok(())
    },
    act: nothing,
    go_on: |scene, _| {
        let dead = scene.dead.take().context("a container that died")?;
        scene.delete(&dead)?;
        scene.delete_x()?;
        scene.add_x()
    },
};

/// An agent with crash points, under policies. Nothing of it is left to do.
fn armed_and_guarded(scene: &mut Scene<'_>, more: &[String]) -> Result<()> {
    scene.arm()?;
    scene.guarded(more)?;
    scene.await_quiet()
}

pub(super) fn wharf(scene: &Scene<'_>, arguments: &[&str]) -> Result<Act> {
    scene.node.wharf_command(arguments).map(Act::Cli)
}

pub(super) fn import(scene: &Scene<'_>, text: &str) -> Result<Act> {
    let path = guard::file(scene.node, text)?;
    wharf(scene, &["policy", "import", &path.display().to_string()])
}

fn relabel_web(scene: &Scene<'_>) -> Result<Act> {
    wharf(scene, &["endpoint", "labels", &scene.guard()?.web().id(), "--set", "cni:app=guest"])
}

fn retried(act: Act) -> Result<()> {
    act.run()?.context("a command")?.ok().map(drop)
}
