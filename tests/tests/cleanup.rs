//! `wharf-agent cleanup`: takes what is Wharf's off a node, and nothing else.

use std::fs;

use anyhow::{Result, ensure};
use nix::mount::{MsFlags, mount};
use wharf_common::ABI_VERSION;
use wharf_tests::{
    Node, NodeConfig,
    process::{Finished, ip},
};

fn cleanup(node: &Node, flags: &[&str]) -> Result<Finished> {
    let mut command = node.command(wharf_tests::process::bin("wharf-agent")?)?;
    command.arg("cleanup").args(node.dirs().flags()).args(flags).env("NO_COLOR", "1");
    wharf_tests::process::run(command, b"", wharf_tests::wait::PATIENCE)
}

fn names(directory: &std::path::Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(directory)?.map(|e| Ok(e?.file_name().to_string_lossy().into_owned()));
    let mut names = entries.collect::<Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

#[test]
fn cleanup_takes_every_trace_off_the_node_and_nothing_else() -> Result<()> {
    for mode in ["clsact", "tcx"] {
        let mut node = Node::start(NodeConfig::default().flags(&["--attach-mode", mode]))?;
        // What looks like ours and is not.
        for command in [
            "link add wh00aa000000aa type veth peer name theirs",
            "link set theirs up",
            "link set wh00aa000000aa up",
            "addr add 192.0.2.1/24 dev theirs",
            "route add 198.51.100.0/24 via 192.0.2.2",
        ] {
            ip(node.space(), command)?;
        }
        fs::create_dir(node.dirs().bpffs.join("theirs"))?;
        let others = |node: &Node| -> Result<Vec<String>> {
            let routes = ip(node.space(), "route show")?;
            Ok(routes.lines().filter(|l| !l.contains("proto 87")).map(str::to_owned).collect())
        };
        let before = others(&node)?;
        let sandbox = node.sandbox("a")?;
        let attached = node.attach(&sandbox)?;

        let refused = cleanup(&node, &["--force"])?;
        ensure!(refused.code() == 1 && refused.stderr.contains("another agent serves"), "{}", refused.describe());
        node.kill_agent()?;
        for flags in [&[][..], &["--dry-run"]] {
            let refused = cleanup(&node, flags)?;
            ensure!(refused.code() == 1, "an endpoint lives: {}", refused.describe());
            ensure!(
                refused.stderr.contains("harbour/a/eth0") && refused.stderr.contains("--force"),
                "{}",
                refused.describe()
            );
        }
        wharf_tests::icmp::ping(sandbox.space()?, attached.gateways()?[0])?.must_answer()?;

        let listed = cleanup(&node, &["--dry-run", "--force"])?.ok()?;
        wharf_tests::icmp::ping(sandbox.space()?, attached.gateways()?[0])?.must_answer()?;
        let done = cleanup(&node, &["--force"])?.ok()?;
        ensure!(listed.replace("would remove", "removed") == done, "listed:\n{listed}\ndone:\n{done}");
        for part in [
            "wharf0",
            "unreachable route 10.87.0.0/16",
            "nftables table inet wharf",
            "net.ipv6.conf.all.forwarding",
            "left alone: link wh00aa000000aa",
        ] {
            ensure!(done.contains(part), "{part} is not in:\n{done}");
        }
        let forwards = node.space().run(|| fs::read_to_string("/proc/sys/net/ipv6/conf/all/forwarding"))??;
        ensure!(forwards.trim() == "0", "{mode}: forwarding was not taken back: {forwards}");
        let mut links = node.space().links()?;
        links.sort();
        ensure!(links == ["lo", "theirs", "wh00aa000000aa"], "{mode}: {links:?}");
        ensure!(sandbox.space()?.links()? == ["lo"], "{mode}: the container's side is there");
        let pinned = names(&node.dirs().bpffs)?;
        ensure!(pinned.contains(&"theirs".to_owned()) && !pinned.contains(&"wharf".to_owned()), "{mode}: {pinned:?}");
        ensure!(!node.dirs().run.exists() && !node.dirs().state.exists(), "{mode}: a directory is there:\n{done}");
        ensure!(others(&node)? == before, "{mode}: {:?}", others(&node)?);
        ensure!(ip(node.space(), "-4 route show proto 87")?.is_empty(), "{mode}: routes are left");
        ensure!(ip(node.space(), "-6 route show proto 87")?.is_empty(), "{mode}: routes are left");

        let again = cleanup(&node, &[])?.ok()?;
        ensure!(again.contains("nothing of Wharf's is left"), "{again}");
        // The node can be served anew.
        node.start_agent()?;
        let attached = node.attach(&sandbox)?;
        wharf_tests::icmp::ping(sandbox.space()?, attached.gateways()?[0])?.must_answer()?;
        node.detach(&attached)?;
        node.stop_agent()?;
        cleanup(&node, &[])?.ok()?;
    }
    Ok(())
}

#[test]
fn files_that_are_not_the_agents_stay_where_they_are() -> Result<()> {
    let mut node = Node::start(NodeConfig::default())?;
    let (run, pins) = (node.dirs().run.clone(), node.dirs().bpffs.join(format!("wharf/v{ABI_VERSION}")));
    fs::write(run.join("notes.txt"), b"mine")?;
    fs::create_dir(run.join("state.redb.mine"))?;
    fs::create_dir(pins.join("mine"))?;
    // A dry run names what keeps a cleanup from being done.
    let listed = cleanup(&node, &["--dry-run"])?;
    ensure!(listed.code() == 0 && listed.stderr.contains("another agent serves"), "{}", listed.describe());
    node.stop_agent()?;
    let listed = cleanup(&node, &["--dry-run"])?;
    ensure!(listed.code() == 0 && listed.stderr.is_empty(), "{}", listed.describe());
    let done = cleanup(&node, &[])?.ok()?;
    ensure!(listed.stdout.replace("would remove", "removed") == done, "listed:\n{}\ndone:\n{done}", listed.stdout);
    for stays in [run.join("notes.txt"), run.join("state.redb.mine"), pins.join("mine")] {
        ensure!(stays.exists() && done.contains(&stays.display().to_string()), "{}:\n{done}", stays.display());
    }
    for line in done.lines().filter(|line| line.starts_with("removed")) {
        let path = line.rsplit(' ').next().unwrap_or_default();
        ensure!(!path.starts_with('/') || !std::path::Path::new(path).exists(), "it is there still: {line}\n{done}");
    }
    ensure!(names(&run)? == ["notes.txt", "state.redb.mine"], "{:?}", names(&run)?);
    let again = cleanup(&node, &[])?.ok()?;
    ensure!(!again.lines().any(|line| line.starts_with("removed")), "{again}");
    Ok(())
}

#[test]
fn a_mount_point_is_emptied_and_the_rest_is_removed() -> Result<()> {
    let mut node = Node::without_agent(NodeConfig::default())?;
    let (run, state) = (node.dirs().run.clone(), node.dirs().state.clone());
    mount(Some("wharf-test"), &state, Some("tmpfs"), MsFlags::empty(), Some("mode=0700"))?;
    node.start_agent()?;
    node.stop_agent()?;
    let done = cleanup(&node, &[])?.ok()?;
    ensure!(done.contains(&format!("emptied {}: it is a mount point", state.display())), "{done}");
    ensure!(done.contains(&format!("removed {}\n", run.display())) && done.contains("wharf0"), "{done}");
    ensure!(names(&state)?.is_empty() && !run.exists(), "{:?}\n{done}", names(&state)?);
    Ok(())
}
