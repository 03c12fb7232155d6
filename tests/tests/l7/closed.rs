//! Envoy below directories that its user cannot enter, and an Envoy whose directory was lost.

use std::{
    fs,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::Path,
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    mount::{MsFlags, mount},
    sys::stat::{Mode, umask},
    unistd::Pid,
};
use wharf_tests::{
    Node, NodeConfig,
    envoy::program,
    process::{bin, command_in, run},
    wait,
};

use crate::{Scene, await_realized, ingress, pods::import};

fn close(directory: &Path) -> Result<()> {
    fs::set_permissions(directory, fs::Permissions::from_mode(0o700)).context("chmod 0700")
}

/// As root works in a directory of its own, with umask 077.
fn start_in_private(node: &mut Node) -> Result<()> {
    let before = umask(Mode::from_bits_truncate(0o077));
    let started = node.start_agent();
    umask(before);
    started
}

#[test]
fn envoy_serves_below_directories_that_its_user_cannot_enter() -> Result<()> {
    let mut node = Node::without_agent(NodeConfig::default())?;
    let outcome = serves_below_closed_directories(&mut node);
    if outcome.is_err() {
        eprintln!("{}", node.log());
    }
    outcome
}

fn serves_below_closed_directories(node: &mut Node) -> Result<()> {
    let (root, bin) = (node.dirs().root.clone(), node.dirs().root.join("bin"));
    fs::create_dir(&bin)?;
    let program = program()?;
    let name = program.file_name().context("a name")?;
    mount(program.parent(), &bin, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    for directory in [&node.dirs().run, &node.dirs().state, &root] {
        close(directory)?;
    }
    node.set_flag(&format!("--envoy={}", bin.join(name).display()), true);
    start_in_private(node)?;
    let scene = Scene::new(node)?;
    import(node, &ingress("db", "[{path: /public}]"))?;
    await_realized(node)?;
    ensure!((scene.get("/public")?, scene.get("/secret")?) == (200, 403), "judged");
    let envoy = node.envoy().context("Envoy")?;
    let status = fs::read_to_string(format!("/proc/{envoy}/status"))?;
    // CAP_NET_ADMIN and CAP_NET_RAW.
    ensure!(status.contains("CapPrm:\t0000000000003000\n"), "Envoy keeps no other capability:\n{status}");

    node.kill_agent()?;
    start_in_private(node)?;
    await_realized(node)?;
    ensure!(node.envoy() == Some(envoy), "the next agent takes it over");
    import(node, &ingress("db", "[{path: /secret}]"))?;
    await_realized(node)?;
    ensure!((scene.get("/public")?, scene.get("/secret")?) == (403, 200), "it connected to the next agent");
    scene.end(node)?;
    node.finish()
}

fn serves(node: &Node) -> Result<Pid> {
    wait::until("Envoy serves", || {
        let view = node.ask(async |client| client.proxy().await)?;
        Ok((view.state == wharf_api::ProxyState::Serving).then_some(view.pid).flatten())
    })
    .map(Pid::from_raw)
}

/// A zombie has no command line.
fn lives(pid: Pid) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

#[test]
fn an_envoy_whose_run_directory_was_lost_is_ended() -> Result<()> {
    let mut node = Node::start(NodeConfig::default().with_envoy()?)?;
    let first = serves(&node)?;
    // The same mark in another network namespace.
    let other = node.sandbox("other")?;
    let mut stranger = command_in(other.space()?, "sleep")?;
    stranger.arg0(format!("wharf-envoy {}", node.dirs().run.join("proxy").display())).arg("60");
    let mut stranger = stranger.spawn()?;
    let lost = |node: &mut Node| -> Result<()> {
        node.stop_agent()?;
        fs::remove_dir_all(&node.dirs().run).context("remove the run directory")
    };
    lost(&mut node)?;
    ensure!(lives(first), "it outlives its agent");
    node.start_agent()?;
    let second = serves(&node)?;
    ensure!(second != first && !lives(first), "the next agent ends it");

    lost(&mut node)?;
    let mut command = node.command(bin("wharf-agent")?)?;
    command.args(["cleanup", "--force"]).args(node.dirs().flags()).env("NO_COLOR", "1");
    let done = run(command, b"", wait::PATIENCE)?.ok()?;
    ensure!(done.contains(&format!("removed Envoy (process {second})")) && !lives(second), "{done}");
    ensure!(stranger.try_wait()?.is_none(), "a process of another network namespace lives on");
    stranger.kill()?;
    stranger.wait()?;
    Ok(())
}
