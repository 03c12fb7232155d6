//! From create to remove, through Wharf.

use std::{fs, thread};

use anyhow::{Context, Result, anyhow, ensure};
use nix::mount::{MsFlags, mount};
use wharf_tests::{
    echo::{self, EchoServer},
    icmp::ping,
    process::{bin_dir, command_in, run},
    wait,
};

use crate::scene::{Scene, with_sandboxes};

#[test]
fn two_sandboxes_reach_each_other_and_leave_nothing() -> Result<()> {
    with_sandboxes(|node, s| {
        let told = s.ok(node, &["create", "a"])?;
        ensure!(told.starts_with("a: eth0 on front: 10."), "{told}");
        s.ok(node, &["create", "b", "--label", "app=b"])?;
        let (from, to) = (s.space("a")?, s.addresses(node, "b", 0)?);
        let echo = EchoServer::start(&s.space("b")?)?;
        for address in to {
            ping(&from, address)?.must_answer()?;
            echo::tcp(&from, echo.tcp_at(address), 100_000)?;
            echo::udp(&from, echo.udp_at(address), 1_000)?;
        }
        drop(echo);
        ensure!(s.states(node)? == [("a".into(), "ready".into()), ("b".into(), "ready".into())], "{:?}", s.list(node)?);
        let table = s.ok(node, &["list"])?;
        ensure!(table.lines().count() >= 3 && table.lines().all(|l| l.chars().count() <= 100), "{table}");
        ensure!(s.wharf(node, &["inspect", "a", "--check"])?.status.success(), "{}", s.ok(node, &["inspect", "a"])?);
        // The agent knows it by its container id and its labels.
        let b = node.endpoints()?.into_iter().find(|e| e.container_id.starts_with("b-")).context("b's endpoint")?;
        ensure!(b.labels.iter().any(|l| l == "cni:app=b"), "{:?}", b.labels);

        let (a, b) = (s.inspect(node, "a")?, s.space("b")?);
        ensure!(s.ok(node, &["stop", "a"])? == "a: stopped\n");
        ensure!(s.ok(node, &["stop", "a"])? == "a: was stopped already\n");
        ensure!(!s.names.join("a").exists(), "the name of a's namespace is still there");
        ensure!(s.inspect(node, "a")?["container_id"] == a["container_id"]);
        // Removed without a stop.
        ensure!(s.ok(node, &["rm", "b", "a"])? == "b: removed\na: removed\n");
        ensure!(b.links()? == ["lo"], "{:?}", b.links()?);
        s.ok(node, &["rm", "a"])?;
        ensure!(s.list(node)?.is_empty());
        Ok(())
    })
}

#[test]
fn the_quick_start_of_the_page_works_as_copied() -> Result<()> {
    with_sandboxes(|node, s| {
        let page = include_str!("../../../docs/sandboxes.md");
        let (_, rest) = page.split_once("```sh\n").context("a block of shell")?;
        let (script, _) = rest.split_once("```").context("its end")?;
        ensure!(script.contains("sandbox create") && script.contains("sandbox rm"), "{script}");
        let mut shell = node.command("sh")?;
        let path = std::env::var_os("PATH").unwrap_or_default();
        let programs = std::iter::once(bin_dir().canonicalize()?).chain(std::env::split_paths(&path));
        shell.args(["-ec", script]).env("PATH", std::env::join_paths(programs)?);
        for (variable, directory) in [
            ("WHARF_SANDBOX_STATE_DIR", &s.state),
            ("WHARF_SANDBOX_NETNS_DIR", &s.names),
            ("WHARF_CNI_CONF_DIR", &s.conf),
            ("WHARF_CNI_BIN_DIR", &s.plugins),
        ] {
            shell.env(variable, directory);
        }
        let told = run(shell, b"", 2 * wait::PATIENCE)?.ok()?;
        ensure!(told.contains("web   ready  front") && told.ends_with("web: stopped\nweb: removed\n"), "{told}");
        Ok(())
    })
}

#[test]
fn a_sandbox_is_a_namespace_of_ip_netns() -> Result<()> {
    with_sandboxes(|node, s| {
        // A /run of this test's mount namespace alone.
        fs::create_dir_all(&s.state)?;
        mount(Some("wharf-test"), "/run", Some("tmpfs"), MsFlags::empty(), Some("mode=0755")).context("cover /run")?;
        let s = Scene { names: "/run/netns".into(), ..s.clone() };
        s.ok(node, &["create", "web"])?;
        let ip = |arguments: &[&str]| -> Result<String> {
            let mut command = command_in(node.space(), "ip")?;
            command.args(arguments);
            run(command, b"", wait::PATIENCE)?.ok()
        };
        ensure!(ip(&["netns", "list"])?.split_whitespace().next() == Some("web"), "{}", ip(&["netns", "list"])?);
        let shown = ip(&["netns", "exec", "web", "ip", "-br", "addr"])?;
        let address = s.addresses(node, "web", 0)?[0].to_string();
        ensure!(shown.contains(&address) && shown.contains("127.0.0.1"), "{shown}");
        // Others' namespaces stay.
        ip(&["netns", "add", "other"])?;
        s.fails(node, &["create", "other"], 1, &["/run/netns/other", "belongs to no sandbox", "hint:"])?;
        ensure!(!s.record("other").exists());
        s.ok(node, &["rm", "web"])?;
        ensure!(ip(&["netns", "list"])?.split_whitespace().next() == Some("other"), "{}", ip(&["netns", "list"])?);

        // Somebody removed the namespace, and made another one of the name.
        s.ok(node, &["create", "web"])?;
        ip(&["netns", "del", "web"])?;
        ensure!(s.states(node)? == [("web".into(), "gone".into())], "{:?}", s.states(node)?);
        ip(&["netns", "add", "web"])?;
        let told = s.ok(node, &["stop", "web"])?;
        ensure!(told.contains("another network namespace has its name"), "{told}");
        s.ok(node, &["rm", "web"])?;
        ensure!(ip(&["netns", "list"])?.lines().count() == 2, "{}", ip(&["netns", "list"])?);
        ip(&["netns", "del", "web"])?;
        ip(&["netns", "del", "other"])?;
        ensure!(s.left()?.is_empty(), "{:?}", s.left()?);
        Ok(())
    })
}

#[test]
fn a_name_has_one_sandbox_and_a_second_create_changes_nothing() -> Result<()> {
    with_sandboxes(|node, s| {
        s.ok(node, &["create", "web"])?;
        let before = fs::read_to_string(s.record("web"))?;
        s.fails(node, &["create", "web"], 1, &["create sandbox web: it exists, and is ready", "wharf sandbox rm web"])?;
        ensure!(fs::read_to_string(s.record("web"))? == before);
        for name in ["", "a/b", "..", "a b"] {
            s.fails(node, &["create", name], 3, &["NAME"])?;
        }
        s.ok(node, &["stop", "web"])?;
        s.fails(node, &["create", "web"], 1, &["it exists, and is stopped", "wharf sandbox rm web"])?;
        s.ok(node, &["rm", "web"]).map(drop)
    })
}

#[test]
fn a_whole_name_wins_and_a_lost_endpoint_is_told_by_every_command() -> Result<()> {
    with_sandboxes(|node, s| {
        s.ok(node, &["create", "web"])?;
        s.ok(node, &["create", "web2"])?;
        let endpoint = || -> Result<serde_json::Value> {
            Ok(serde_json::from_str(&node.wharf(&["endpoint", "get", "web", "-o", "json"])?.ok()?)?)
        };
        let first = endpoint()?;
        ensure!(first["container_id"] == s.inspect(node, "web")?["container_id"], "{first}");
        let explained = node.wharf(&["explain", "web"])?.ok()?;
        ensure!(explained.contains(first["container_id"].as_str().context("id")?), "{explained}");
        // A name that has ended wins over the beginning of another name.
        s.ok(node, &["rm", "web"])?;
        let explained = node.wharf(&["explain", "web"])?.ok()?;
        ensure!(explained.contains("deleted") && !explained.contains("web2-"), "{explained}");
        s.ok(node, &["create", "web"])?;

        // The endpoint is deleted behind the sandbox's back.
        node.wharf(&["endpoint", "delete", "web"])?.ok()?;
        ensure!(s.states(node)? == [("web".into(), "detached".into()), ("web2".into(), "ready".into())]);
        ensure!(s.ok(node, &["list"])?.contains("web: eth0 is gone"), "{}", s.ok(node, &["list"])?);
        let hint = "`wharf sandbox stop web`, then `wharf sandbox start web`";
        s.fails(node, &["exec", "web", "--", "true"], 125, &["detached (an interface is gone)", hint])?;
        s.fails(node, &["start", "web"], 1, &["detached (an interface is gone)", hint])?;
        s.ok(node, &["stop", "web"])?;
        ensure!(s.ok(node, &["start", "web"])? == "web: started\n");

        // Only its link: the endpoint stays, and no command calls it ready.
        let again = endpoint()?;
        let link = again["host_ifname"].as_str().context("link")?;
        wharf_tests::process::ip(node.space(), &format!("link del {link}"))?;
        ensure!(endpoint()?["status"]["problem"] == "its link is gone", "{}", endpoint()?);
        let table = node.wharf(&["endpoint", "list"])?.ok()?;
        ensure!(table.contains("failing") && table.contains("its link is gone; `wharf explain"), "{table}");
        ensure!(node.wharf(&["explain", "web"])?.code() == 1);
        ensure!(s.states(node)?[0].1 == "detached", "{:?}", s.states(node)?);
        s.ok(node, &["rm", "web", "web2"]).map(drop)
    })
}

#[test]
fn a_stopped_sandbox_starts_with_what_its_create_asked_for() -> Result<()> {
    with_sandboxes(|node, s| {
        s.plugin("last", "true")?;
        s.network(node, "30-chain.conflist", "chain", &["last"])?;
        s.ok(node, &["create", "web", "--network", "chain", "--label", "app=web,tier=front", "--ip", "10.87.0.77"])?;
        let before = s.inspect(node, "web")?;
        s.fails(node, &["start", "nobody"], 1, &["start sandbox nobody: no sandbox has this name"])?;
        ensure!(s.ok(node, &["start", "web"])? == "web: was ready already\n");
        s.ok(node, &["stop", "web"])?;
        s.fails(node, &["run", "web", "--", "true"], 125, &["it is stopped", "`wharf sandbox start web` starts it"])?;
        // The address is in quarantine for others, not for the sandbox that had it.
        ensure!(s.ok(node, &["start", "web", "--no-wait"])? == "web: started\n");
        let after = s.inspect(node, "web")?;
        ensure!(after["container_id"] == before["container_id"] && after["netns"] != before["netns"], "{after}");
        ensure!(s.addresses(node, "web", 0)?[0].to_string() == "10.87.0.77", "{after}");
        let endpoint = node.endpoints()?.into_iter().next().context("its endpoint")?;
        ensure!(endpoint.labels.iter().filter(|l| l.starts_with("cni:")).count() == 2, "{:?}", endpoint.labels);
        ping(node.space(), s.addresses(node, "web", 0)?[0])?.must_answer()?;
        // A start that fails leaves it stopped, and says why.
        s.ok(node, &["stop", "web"])?;
        s.plugin("last", "[ \"$CNI_COMMAND\" = ADD ] && { echo 'no tide' >&2; exit 1; }")?;
        s.fails(node, &["start", "web"], 1, &["no tide"])?;
        ensure!(s.states(node)? == [("web".into(), "stopped".into())], "{:?}", s.list(node)?);
        ensure!(s.ok(node, &["list"])?.contains("no tide") && node.endpoints()?.is_empty());
        s.plugin("last", "true")?;
        s.ok(node, &["start", "web"])?;
        s.ok(node, &["rm", "web"]).map(drop)
    })
}

#[test]
fn a_stopped_sandbox_has_no_address_any_more() -> Result<()> {
    with_sandboxes(|node, s| {
        s.ok(node, &["create", "web"])?;
        ensure!(s.list(node)?[0]["addresses"].as_array().is_some_and(|a| a.len() == 2), "{:?}", s.list(node)?);
        s.ok(node, &["stop", "web"])?;
        ensure!(s.list(node)?[0]["addresses"] == serde_json::json!([]), "{:?}", s.list(node)?);
        s.ok(node, &["rm", "web"]).map(drop)
    })
}

#[test]
fn the_unknown_is_stopped_and_removed_with_success() -> Result<()> {
    with_sandboxes(|node, s| {
        for verb in ["stop", "rm"] {
            let told = s.ok(node, &[verb, "nobody"])?;
            ensure!(told.contains("no sandbox has this name"), "{told}");
        }
        let json = s.ok(node, &["rm", "nobody", "-o", "json"])?;
        ensure!(json.contains("\"outcome\": \"unknown\""), "{json}");
        ensure!(!s.state.exists(), "a directory was made for nobody");
        s.fails(node, &["inspect", "nobody"], 1, &["no sandbox has this name"])
    })
}

#[test]
fn twenty_sandboxes_come_and_go_at_once() -> Result<()> {
    const MANY: usize = 20;
    with_sandboxes(|node, s| {
        let names: Vec<String> = (0..MANY).map(|n| format!("s{n:02}")).collect();
        let all = |verb: &str| -> Result<()> {
            let commands = names.iter().map(|name| s.command(node, &[verb, name])).collect::<Result<Vec<_>>>()?;
            thread::scope(|scope| {
                let start = |command| scope.spawn(move || run(command, b"", 4 * wait::PATIENCE)?.ok());
                let running: Vec<_> = commands.into_iter().map(start).collect();
                running.into_iter().try_for_each(|r| r.join().map_err(|_| anyhow!("panicked"))?.map(drop))
            })
        };
        all("create")?;
        let listed = s.list(node)?;
        let mut addresses: Vec<String> = listed.iter().map(|s| s["addresses"][0].to_string()).collect();
        addresses.sort();
        addresses.dedup();
        ensure!(addresses.len() == MANY && listed.iter().all(|s| s["state"] == "ready"), "{listed:?}");
        ping(&s.space("s00")?, s.addresses(node, "s19", 0)?[0])?.must_answer()?;
        all("rm")
    })
}

#[test]
fn two_commands_at_once_on_one_sandbox_make_one_of_it() -> Result<()> {
    with_sandboxes(|node, s| {
        for _ in 0..5 {
            let commands = [s.command(node, &["create", "web"])?, s.command(node, &["create", "web"])?];
            let ended: Vec<_> = thread::scope(|scope| {
                let running: Vec<_> =
                    commands.map(|c| scope.spawn(move || run(c, b"", 4 * wait::PATIENCE))).into_iter().collect();
                running.into_iter().map(|r| r.join().map_err(|_| anyhow!("panicked"))?).collect::<Result<_>>()
            })?;
            let made = ended.iter().filter(|e| e.status.success()).count();
            ensure!(made == 1, "{made} creates succeeded: {ended:?}");
            ensure!(node.endpoints()?.len() == 1, "{:?}", node.endpoints()?);
            let commands = [s.command(node, &["rm", "web"])?, s.command(node, &["stop", "web"])?];
            thread::scope(|scope| {
                let running: Vec<_> =
                    commands.map(|c| scope.spawn(move || run(c, b"", 4 * wait::PATIENCE)?.ok())).into_iter().collect();
                running.into_iter().try_for_each(|r| r.join().map_err(|_| anyhow!("panicked"))?.map(drop))
            })?;
            ensure!(s.left()?.is_empty(), "{:?}", s.left()?);
        }
        Ok(())
    })
}
