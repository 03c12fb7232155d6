//! What is not as it was left: reboots, files in the place of namespaces, records that cannot be used.

use std::fs;

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::Value;
use wharf_tests::{process, wait};

use crate::scene::{Scene, with_sandboxes};

/// What a reboot does to a record: it is another boot's.
fn age(s: &Scene, name: &str) -> Result<()> {
    let mut record: Value = serde_json::from_str(&fs::read_to_string(s.record(name))?)?;
    record["boot_id"] = "00000000-0000-0000-0000-000000000000".into();
    fs::write(s.record(name), record.to_string()).context("write the record")
}

#[test]
fn after_a_reboot_a_sandbox_is_told_stopped_and_removed() -> Result<()> {
    with_sandboxes(|node, s| {
        s.plugin("last", "true")?;
        s.network(node, "30-chain.conflist", "chain", &["last"])?;
        for name in ["web", "db"] {
            s.ok(node, &["create", name, "--network", "chain"])?;
            s.vanish(name)?;
            age(s, name)?;
        }
        umount2(&s.names, MntFlags::MNT_DETACH).context("unmount the names")?;
        fs::remove_dir(&s.names).context("remove the names")?;
        node.kill_agent()?;
        fs::remove_dir_all(&node.dirs().run).context("remove the run directory")?;
        fs::create_dir(&node.dirs().run)?;
        node.start_agent()?;
        s.calls();
        let table = s.ok(node, &["list"])?;
        ensure!(table.contains("stopped (its") && table.contains("gone)"), "{table}");
        s.fails(node, &["create", "web"], 1, &["it exists, and is stopped (its namespace is gone)", "rm web"])?;
        s.fails(node, &["run", "web", "--", "true"], 125, &["stopped (its namespace is gone)", "start web"])?;
        s.ok(node, &["stop", "web"])?;
        ensure!(s.calls() == ["DEL eth0 []"], "DEL after a reboot");
        s.ok(node, &["start", "db"])?;
        let path = s.names.join("db").display().to_string();
        ensure!(s.calls() == ["DEL eth0 []".to_owned(), format!("ADD eth0 [{path}]")], "a start after a reboot");
        s.ok(node, &["rm", "web", "db"])?;
        ensure!(s.calls() == [format!("DEL eth0 [{path}]")], "DEL of a sandbox that was started");
        s.ok(node, &["create", "web"])?;
        s.ok(node, &["rm", "web"]).map(drop)
    })
}

#[test]
fn numbers_of_another_boot_lead_to_nobody() -> Result<()> {
    with_sandboxes(|node, s| {
        s.ok(node, &["run", "--detach", "web", "--", "sleep", "600"])?;
        let pid = s.inspect(node, "web")?["processes"][0]["pid"].as_i64().context("pid")?;
        // The record is of another boot, in which a namespace and a process had the numbers that these have now.
        age(s, "web")?;
        let told = s.ok(node, &["rm", "web"])?;
        ensure!(told == "web: removed\n", "{told}");
        ensure!(s.names.join("web").exists(), "a namespace that the sandbox did not make was unmounted");
        ensure!(fs::exists(format!("/proc/{pid}"))?, "a process that the sandbox did not have was ended");
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(i32::try_from(pid)?), nix::sys::signal::Signal::SIGKILL)?;
        s.vanish("web")
    })
}

#[test]
fn a_namespace_that_took_over_an_inodes_number_is_left_alone() -> Result<()> {
    with_sandboxes(|node, s| {
        s.ok(node, &["create", "web"])?;
        let mut record: Value = serde_json::from_str(&fs::read_to_string(s.record("web"))?)?;
        let identity = &mut record["netns"]["identity"];
        // The sandbox's own namespace had the number before the one that has it now.
        identity["cookie"] = (identity["cookie"].as_u64().context("cookie")? + 1).into();
        fs::write(s.record("web"), record.to_string())?;
        let mut guest = process::command_in(&s.space("web")?, "sleep")?.arg("600").spawn()?;
        let told = s.ok(node, &["stop", "web"])?;
        ensure!(told.contains("another network namespace has its name"), "{told}");
        s.ok(node, &["rm", "web"])?;
        ensure!(guest.try_wait()?.is_none() && s.names.join("web").exists(), "it was not the sandbox's");
        guest.kill()?;
        guest.wait()?;
        s.vanish("web")
    })
}

#[test]
fn a_corrupt_name_counts_as_stopped_and_is_removed() -> Result<()> {
    with_sandboxes(|node, s| {
        let path = |name: &str| s.names.join(name);
        for name in ["plain", "missing", "link", "covered"] {
            s.ok(node, &["create", name])?;
        }
        for name in ["plain", "missing", "link"] {
            s.vanish(name)?;
        }
        fs::write(path("plain"), "no namespace")?;
        let target = node.dirs().root.join("target");
        fs::write(&target, "untouched")?;
        std::os::unix::fs::symlink(&target, path("link"))?;
        let gone = s.states(node)?.into_iter().filter(|(_, state)| state == "gone").count();
        ensure!(gone == 3, "{:?}", s.states(node)?);
        s.ok(node, &["stop", "plain", "missing", "link"])?;
        s.ok(node, &["rm", "plain", "missing", "link"])?;
        ensure!(fs::read_to_string(&target)? == "untouched");
        // What somebody mounted over the name is not unmounted.
        mount(Some(&target), &path("covered"), None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
        let other = s.wharf(node, &["rm", "covered"])?;
        ensure!(other.code() == 1, "a mount of somebody else's was removed: {}", other.describe());
        ensure!(fs::read_to_string(path("covered"))? == "untouched", "{}", other.describe());
        umount2(&path("covered"), MntFlags::MNT_DETACH)?;
        s.ok(node, &["rm", "covered"]).map(drop)
    })
}

#[test]
fn a_record_that_cannot_be_used_is_told_and_removed_by_force() -> Result<()> {
    with_sandboxes(|node, s| {
        s.ok(node, &["create", "web"])?;
        let whole = fs::read_to_string(s.record("web"))?;
        for text in ["", &whole[..whole.len() / 2]] {
            fs::write(s.record("web"), text)?;
            let listed = s.list(node)?;
            ensure!(listed[0]["state"] == "damaged" && listed[0]["problem"].is_string(), "{listed:?}");
            for command in [vec!["inspect", "web"], vec!["stop", "web"], vec!["rm", "web"], vec!["create", "web"]] {
                s.fails(node, &command, 1, &["cannot be used", "rm --force web"])?;
            }
        }
        // The rest is as the hint of the page says.
        let told = s.ok(node, &["rm", "--force", "web"])?;
        ensure!(told.contains("its namespace and networks were not touched"), "{told}");
        let id = node.endpoints()?.first().context("its endpoint")?.container_id.clone();
        node.wharf(&["endpoint", "delete", "--container-id", &id])?.ok()?;
        s.vanish("web")
    })
}

#[test]
fn without_rights_nothing_is_called_unknown() -> Result<()> {
    with_sandboxes(|node, s| {
        s.ok(node, &["create", "web"])?;
        let program = wharf_tests::node::runnable_by_all("wharf")?;
        for verb in ["stop", "rm", "list", "inspect", "create"] {
            let mut command = node.command(&program)?;
            let arguments = [verb, "web"];
            let given = s.command(node, if verb == "list" { &["list"] } else { &arguments })?;
            command.args(given.get_args());
            process::as_nobody(&mut command);
            let done = process::run(command, b"", wait::PATIENCE)?;
            let told = done.stderr.contains("hint: run it as root");
            ensure!(done.code() == 1 && told, "{verb}: {}", done.describe());
        }
        s.ok(node, &["rm", "web"]).map(drop)
    })
}
