//! An agent that cannot serve says why before it has made anything, and one that finds damage loses nothing.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, chown},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount};
use wharf_tests::{
    Node, NodeConfig,
    agent::{Agent, read_log},
    icmp::Ping,
    node::runnable_by_all,
    process::{Finished, as_nobody, bin, ip, run},
    scenario, wait,
};

fn refused(node: &Node, flags: &[&str], words: &[&str]) -> Result<()> {
    let finished = node.run_agent_to_end(flags)?;
    says(&finished, words)
}

fn says(finished: &Finished, words: &[&str]) -> Result<()> {
    ensure!(finished.code() > 0, "the agent was to refuse: {}", finished.describe());
    let text = format!("{}{}", finished.stdout, finished.stderr);
    let missing: Vec<_> = words.iter().filter(|w| !text.to_lowercase().contains(&w.to_lowercase())).collect();
    ensure!(missing.is_empty(), "the error lacks {missing:?}: {}", finished.describe());
    ensure!(!text.contains("panicked") && !text.contains("RUST_BACKTRACE"), "{text}");
    Ok(())
}

fn nothing_was_made(node: &Node) -> Result<()> {
    ensure!(node.space().links()? == ["lo"], "{:?}", node.space().links()?);
    ensure!(!node.dirs().bpffs.join("wharf").exists(), "something was pinned");
    ensure!(!node.dirs().socket().exists(), "a socket was made");
    Ok(())
}

#[test]
fn bad_settings_are_refused_before_anything_is_made() -> Result<()> {
    let node = Node::without_agent(NodeConfig::default())?;
    let cases: &[(&[&str], &[&str])] = &[
        (&["--ipv4-pool", "10.0.0.0/33"], &["10.0.0.0/33"]),
        (&["--ipv4-pool", "fd00::/64"], &["ipv4-pool", "fd00::/64"]),
        (&["--ipv4-pool", "10.0.0.0/16", "--ipv4-pool", "10.0.3.0/24"], &["10.0.0.0/16", "10.0.3.0/24", "overlap"]),
        (&["--ipv4-pool", "127.0.0.0/8"], &["127.0.0.0/8"]),
        (&["--ipv4-pool", "224.0.0.0/8"], &["224.0.0.0/8"]),
        (&["--ipv6-pool", "fe80::/64"], &["fe80::/64"]),
        (&["--mtu", "100"], &["mtu", "100"]),
        (&["--mtu", "x"], &["mtu"]),
        (&["--metrics-listen", "everywhere"], &["metrics-listen"]),
        (&["--attach-mode", "magic"], &["attach-mode", "magic"]),
        (&["--device-mode", "magic"], &["device-mode", "magic"]),
        (&["--log-level", "=[=["], &["log"]),
        (&["--node-name", ""], &["node-name"]),
        (&["--no-such-flag"], &["no-such-flag"]),
    ];
    for (flags, words) in cases {
        // clap takes a flag only once, so the node's own defaults are not passed.
        let mut command = node.command(wharf_tests::process::bin("wharf-agent")?)?;
        command.args(node.dirs().flags()).args(*flags);
        let finished = run(command, b"", Duration::from_secs(10))?;
        says(&finished, words).with_context(|| format!("{flags:?}"))?;
        nothing_was_made(&node).with_context(|| format!("{flags:?}"))?;
    }
    Ok(())
}

#[test]
fn a_bad_configuration_file_is_refused_and_named() -> Result<()> {
    let node = Node::without_agent(NodeConfig::default())?;
    let file = node.dirs().root.join("wharf.toml");
    let path = file.display().to_string();
    let cases: &[(&str, &[&str])] = &[
        ("mtu = ", &["wharf.toml", "line 1"]),
        ("ipv4-pol = ['10.0.0.0/8']", &["wharf.toml", "ipv4-pol"]),
        ("mtu = 'big'", &["wharf.toml", "mtu"]),
        ("[[pool]]\nname = 'a'\ncidrs = ['10.87.3.0/24']", &["10.87.0.0/16", "10.87.3.0/24", "overlap"]),
        ("[[pool]]\nname = 'a'\ncidrs = []", &["pool a", "CIDR"]),
        (
            "[[pool]]\nname = 'a'\ncidrs = ['10.1.0.0/24']\n[[pool]]\nname = 'a'\ncidrs = ['10.2.0.0/24']",
            &["pool a", "twice"],
        ),
        ("[[pool]]\nname = 'a b'\ncidrs = ['10.1.0.0/24']", &["pool", "a b"]),
        ("[[pool]]\nname = 'a'\ncidrs = ['10.1.0.0/24']\ncolour = 'blue'", &["wharf.toml", "colour"]),
    ];
    for (text, words) in cases {
        fs::write(&file, text)?;
        refused(&node, &["--config", &path], words).with_context(|| format!("{text:?}"))?;
        nothing_was_made(&node)?;
    }
    fs::remove_file(&file)?;
    refused(&node, &["--config", &path], &["wharf.toml", "No such file"])?;
    fs::create_dir(&file)?;
    refused(&node, &["--config", &path], &["wharf.toml", "directory"])?;
    nothing_was_made(&node)
}

#[test]
fn a_file_system_that_is_no_bpffs_is_refused_with_the_remedy() -> Result<()> {
    let node = Node::without_agent(NodeConfig::default())?;
    let plain = node.dirs().root.join("plain");
    fs::create_dir(&plain)?;
    for path in [plain.display().to_string(), node.dirs().root.join("nothing").display().to_string()] {
        let mut command = node.command(wharf_tests::process::bin("wharf-agent")?)?;
        command.arg("--run-dir").arg(&node.dirs().run).arg("--state-dir").arg(&node.dirs().state);
        command.args(["--bpffs", &path]);
        says(&run(command, b"", Duration::from_secs(10))?, &[&path, "mount -t bpf"])?;
        ensure!(node.space().links()? == ["lo"]);
        ensure!(!node.dirs().socket().exists());
    }
    ensure!(fs::read_dir(&plain)?.next().is_none(), "something was put into a directory that is no bpffs");
    Ok(())
}

#[test]
fn a_run_directory_that_is_a_file_is_refused_in_the_name_of_its_setting() -> Result<()> {
    let node = Node::without_agent(NodeConfig::default())?;
    let file = node.dirs().root.join("file");
    fs::write(&file, "")?;
    let mut command = node.command(wharf_tests::process::bin("wharf-agent")?)?;
    command.arg("--run-dir").arg(&file).arg("--state-dir").arg(&node.dirs().state);
    command.arg("--bpffs").arg(&node.dirs().bpffs);
    says(&run(command, b"", Duration::from_secs(10))?, &["--run-dir", &file.display().to_string()])
}

#[test]
fn a_directory_on_a_read_only_file_system_is_refused_with_the_remedy() -> Result<()> {
    let node = Node::without_agent(NodeConfig::default())?;
    let place = node.dirs().root.join("read-only");
    fs::create_dir(&place)?;
    // In the mount namespace of the tests.
    mount(Some("wharf-test"), &place, Some("tmpfs"), MsFlags::MS_RDONLY, None::<&str>)?;
    let mut command = node.command(bin("wharf-agent")?)?;
    command.arg("--run-dir").arg(&node.dirs().run).arg("--state-dir").arg(&place);
    command.arg("--bpffs").arg(&node.dirs().bpffs);
    says(&run(command, b"", Duration::from_secs(10))?, &["read-only", "--state-dir", "mount it writable"])?;
    nothing_was_made(&node)
}

#[test]
fn a_taken_or_foreign_address_for_metrics_is_refused_with_the_remedy() -> Result<()> {
    let node = Node::without_agent(NodeConfig::default())?;
    // A namespace without any address accepts every one.
    ip(node.space(), "link set lo up")?;
    let _taken = node.space().run(|| std::net::TcpListener::bind("127.0.0.1:9964"))??;
    refused(&node, &["--metrics-listen", "127.0.0.1:9964"], &["in use", "--metrics-listen 127.0.0.1:9964", "stop it"])?;
    refused(&node, &["--metrics-listen", "192.0.2.1:9964"], &["--metrics-listen 192.0.2.1:9964", "no interface"])
}

#[test]
fn a_directory_of_another_user_is_refused_and_the_capability_named() -> Result<()> {
    let node = Node::without_agent(NodeConfig::default())?;
    for (setting, directory) in [("--run-dir", &node.dirs().run), ("--state-dir", &node.dirs().state)] {
        chown(directory, Some(4711), None)?;
        refused(&node, &[], &[setting, "belongs to user 4711", "CAP_DAC_OVERRIDE", "chown 0"])?;
        chown(directory, Some(0), None)?;
    }
    Ok(())
}

#[test]
fn without_root_the_agent_says_so() -> Result<()> {
    let node = Node::without_agent(NodeConfig::default())?;
    let mut command = node.command(runnable_by_all("wharf-agent")?)?;
    as_nobody(command.args(node.dirs().flags()));
    says(&run(command, b"", Duration::from_secs(10))?, &["root", "CAP_"])?;
    nothing_was_made(&node)
}

#[test]
fn others_write_to_nothing_that_an_agent_makes_whatever_the_umask_is() -> Result<()> {
    let node = Node::without_agent(NodeConfig::default())?;
    let mut command = node.command("/bin/sh")?;
    command.args(["-c", "umask 000 && exec \"$0\" \"$@\""]).arg(bin("wharf-agent")?);
    let agent = Agent::start(command, node.dirs(), &[])?;
    let mut seen = 0;
    for directory in [&node.dirs().run, &node.dirs().state] {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let mode = entry.metadata()?.permissions().mode();
            ensure!(mode & 0o002 == 0, "{} has mode {mode:o}", entry.path().display());
            seen += 1;
        }
    }
    ensure!(seen > 3, "the look is blind: {seen} files");
    ensure!(agent.stop()?.success(), "{}", read_log(node.dirs()));
    Ok(())
}

#[test]
fn a_second_agent_on_the_same_run_directory_is_refused_and_the_first_serves_on() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let sandbox = node.sandbox("a")?;
        let attached = node.attach(&sandbox)?;
        let before = node.endpoints()?;
        // Its own run directory would not help: it would meet links that its records do not explain, and remove them.
        let other = node.dirs().root.join("other");
        fs::create_dir(&other)?;
        says(&node.run_agent_to_end(&[])?, &["another agent", "network namespace"])?;
        let mut apart = node.command(bin("wharf-agent")?)?;
        apart.arg("--run-dir").arg(&other).arg("--state-dir").arg(&other).arg("--bpffs").arg(&node.dirs().bpffs);
        says(&run(apart, b"", wait::PATIENCE)?, &["another agent", "network namespace"])?;
        ensure!(node.endpoints()? == before);
        wharf_tests::icmp::ping(sandbox.space()?, attached.gateways()?[0])?.must_answer()?;
        node.detach(&attached)
    })
}

#[test]
fn pools_that_would_take_the_gateway_away_from_living_containers_are_refused() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let sandbox = node.sandbox("a")?;
        let attached = node.attach(&sandbox)?;
        node.stop_agent()?;
        let finished = node.run_agent_to_end(&["--ipv4-pool", "10.99.0.0/24"])?;
        says(&finished, &["10.87.0.1", "10.99.0.1", "the pools"])?;
        wharf_tests::icmp::ping(sandbox.space()?, attached.gateways()?[0])?.must_answer()?;
        node.start_agent()?;
        node.detach(&attached)
    })
}

#[test]
fn program_sets_whose_pins_somebody_removed_do_not_fail_creates() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let pins = node.dirs().endpoint_pins();
        // All of them: one that is still being pinned would get new pins while its directory is removed.
        wait::until("program sets are ready", || {
            let prepared = node.ask(async |c| c.status().await)?.prepared;
            Ok((prepared.target > 0 && prepared.ready == prepared.target).then_some(()))
        })?;
        for set in fs::read_dir(&pins)? {
            fs::remove_dir_all(set?.path())?;
        }
        let sandbox = node.sandbox("a")?;
        let attached = node.attach(&sandbox)?;
        wharf_tests::icmp::ping(sandbox.space()?, attached.gateways()?[0])?.must_answer()?;
        node.detach(&attached)
    })
}

#[test]
fn shared_pins_that_somebody_removed_are_named_and_come_back_without_an_operator() -> Result<()> {
    // The leak audit alone would take two minutes.
    scenario(NodeConfig::default(), |node| {
        let sandbox = node.sandbox("a")?;
        let attached = node.attach(&sandbox)?;
        let tree = node.dirs().bpffs.join("wharf");
        wait::until("the pins to go", || match fs::remove_dir_all(&tree) {
            // Meanwhile the agent pinned programs ahead of need.
            Err(e) if e.kind() == std::io::ErrorKind::DirectoryNotEmpty => Ok(None),
            removed => removed.map(Some).context("remove the pins"),
        })?;
        let pin = node.dirs().endpoint_pins().with_file_name("shared").join("ENDPOINTS");
        let audit = node.wharf(&["audit"])?;
        // Unless the agent was faster.
        ensure!(audit.stdout.contains("shared/ENDPOINTS") || pin.exists(), "{}", audit.describe());
        // The sink is the last one.
        let last = pin.with_file_name("sink");
        wait::until("the agent to put them back", || Ok(last.exists().then_some(())))?;
        let other = node.sandbox("b")?;
        let reached = node.attach(&other)?;
        wharf_tests::icmp::ping(sandbox.space()?, reached.v4()?.into())?.must_answer()?;
        ensure!(node.wharf(&["audit", "--repair"])?.code() == 0, "what is left of it can be mended");
        // A new map of that name would lead no packet to the new container.
        let (calls, third) = (pin.with_file_name("CALLS"), node.sandbox("c")?);
        wait::until("an ADD and an audit between two looks of the agent", || {
            fs::remove_file(&calls)?;
            let add = node.cni("ADD").of(third.name(), third.path(), "eth0").conf(&node.netconf()).run()?;
            let audit = node.wharf(&["audit"])?;
            if calls.exists() {
                node.cni("DEL").of(third.name(), third.path(), "eth0").conf(&node.netconf()).run()?.silent()?;
                return Ok(None);
            }
            let refused = add.failure()?;
            ensure!(refused.code == 11 && refused.text().contains("shared/CALLS: the pin is missing"), "{refused:?}");
            ensure!(audit.stdout.contains("shared/CALLS"), "{}", audit.describe());
            Ok(Some(()))
        })?;
        ensure!(node.wharf(&["audit", "--repair"])?.code() == 0, "the map that the agent holds is pinned");
        let late = node.attach(&third)?;
        wharf_tests::icmp::ping(third.space()?, attached.v4()?.into())?.must_answer()?;
        node.detach(&late)?;
        node.detach(&attached)?;
        node.detach(&reached)
    })
}

#[test]
fn a_store_that_is_gone_or_empty_costs_no_container_its_network() -> Result<()> {
    for empty in [false, true] {
        scenario(NodeConfig::default(), |node| {
            let sandbox = node.sandbox("a")?;
            let attached = node.attach(&sandbox)?;
            // Somebody else's link that has a name of our kind is nobody's to remove.
            ip(node.space(), "link add wh00aa000000aa type veth peer name theirs")?;
            node.kill_agent()?;
            let store = node.dirs().run.join("state.redb");
            fs::remove_file(&store)?;
            if empty {
                fs::write(&store, b"")?;
            }
            for start in 1..=2 {
                node.start_agent()?;
                let ping = Ping { to: attached.gateways()?[0], count: 3, payload: 56 };
                ping.run(sandbox.space()?)?.must_answer().with_context(|| format!("start {start}"))?;
                let shown = node.wharf(&["status"])?.stdout;
                ensure!(shown.contains("records"), "start {start}: `wharf status` does not tell of it:\n{shown}");
                if start == 1 {
                    node.kill_agent()?;
                }
            }
            // Its delete takes it away by the mark on its link.
            node.detach(&attached)?;
            ensure!(sandbox.space()?.links()? == ["lo"], "{:?}", sandbox.space()?.links()?);
            ensure!(node.space().links()?.contains(&"wh00aa000000aa".to_owned()), "another's link was removed");
            ip(node.space(), "link del wh00aa000000aa").map(drop)
        })?;
    }
    Ok(())
}

#[test]
fn a_damaged_store_is_put_aside_and_the_containers_live_on() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let sandbox = node.sandbox("a")?;
        let attached = node.attach(&sandbox)?;
        node.kill_agent()?;
        fs::write(node.dirs().run.join("state.redb"), b"this is not a store")?;
        node.start_agent()?;
        ensure!(node.log().contains("put aside") || node.log().contains("set aside"), "the log does not tell of it");
        let kept: Vec<_> = fs::read_dir(&node.dirs().run)?.filter_map(|e| e.ok()).map(|e| e.file_name()).collect();
        ensure!(kept.len() > 3 || kept.iter().any(|n| n.to_string_lossy().starts_with("state.redb.")), "{kept:?}");
        // The container is not cut off, its address is not given to another, and the audit tells of it.
        let ping = Ping { to: attached.gateways()?[0], count: 3, payload: 56 };
        ping.run(sandbox.space()?)?.must_answer()?;
        let other = node.sandbox("b")?;
        let neighbour = node.attach(&other)?;
        ensure!(neighbour.v4()? != attached.v4()? && neighbour.v6()? != attached.v6()?, "{neighbour:?}");
        ping.run(other.space()?)?.must_answer()?;
        let told = node.wharf(&["audit"])?;
        ensure!(told.code() == 1, "{}", told.describe());
        node.detach(&neighbour)?;
        // Unknown to the agent: done, says DEL. What is left goes when the operator says so.
        node.detach(&attached)?;
        node.wharf(&["audit", "--repair"])?;
        // The address was held for a link that is gone now.
        node.stop_agent()?;
        node.start_agent()
    })
}
