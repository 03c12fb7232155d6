//! Networks of sandboxes: ports, policy, several at once, chains of plugins, and an agent that is away.

use std::{
    fs,
    io::Write as _,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::unix::fs::symlink,
    path::Path,
};

use anyhow::{Context, Result, ensure};
use nix::{
    mount::{MsFlags, mount},
    sys::{signal::Signal, stat::Mode},
    unistd::mkfifo,
};
use serde_json::json;
use wharf_api::ProxyState;
use wharf_tests::{
    NodeConfig,
    echo::{self, EchoServer},
    icmp::ping,
    process, wait,
    world::{NODE, World},
};

use crate::scene::{BACK, FRONT, with_sandboxes, with_sandboxes_on};

const POLICY: &str = "\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: db, namespace: default}
spec:
  podSelector: {matchLabels: {app: db}}
  policyTypes: [Ingress]
  ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]
";

#[test]
fn a_published_port_is_reached_from_outside() -> Result<()> {
    with_sandboxes(|node, s| {
        let world = World::join(node)?;
        // A first sandbox tells which port its server gets; the published one has a server on any port, so it is made
        // after.
        s.ok(node, &["create", "plain"])?;
        let echo = EchoServer::start(&s.space("plain")?)?;
        let port = echo.tcp_at(IpAddr::from(Ipv6Addr::LOCALHOST)).port();
        drop(echo);
        s.ok(node, &["create", "web", "--publish", &format!("8080:{port}")])?;
        let listener = s.space("web")?.run(|| std::net::TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)))??;
        let server = std::thread::spawn(move || -> std::io::Result<usize> {
            let mut served = 0;
            for _ in 0..NODE.len() {
                let (stream, _) = listener.accept()?;
                std::io::copy(&mut &stream, &mut &stream)?;
                served += 1;
            }
            Ok(served)
        });
        for address in NODE {
            let at = SocketAddr::new(address.parse()?, 8080);
            echo::tcp(world.space()?, at, 50_000).with_context(|| format!("TCP to {at}"))?;
        }
        ensure!(server.join().map_err(|_| anyhow::anyhow!("the server panicked"))?? == NODE.len());
        s.fails(node, &["create", "late", "--publish", "8080:80"], 1, &["plugin wharf-cni", "8080"])?;
        ensure!(!s.record("late").exists());
        s.ok(node, &["rm", "web", "plain"]).map(drop)
    })
}

#[test]
fn policy_selects_sandboxes_by_their_labels() -> Result<()> {
    with_sandboxes(|node, s| {
        for (name, label) in [("db", "app=db"), ("web", "app=web"), ("other", "app=other")] {
            s.ok(node, &["create", name, "--label", label])?;
        }
        let echo = EchoServer::start(&s.space("db")?)?;
        let file = node.dirs().root.join("policy.yaml");
        fs::write(&file, POLICY)?;
        let other = s.space("other")?;
        for address in s.addresses(node, "db", 0)? {
            echo::tcp(&other, echo.tcp_at(address), 1_000).context("without a policy")?;
        }
        node.wharf(&["policy", "import", &file.display().to_string()])?.ok()?;
        for address in s.addresses(node, "db", 0)? {
            echo::tcp(&s.space("web")?, echo.tcp_at(address), 1_000).context("allowed")?;
            ensure!(echo::tcp(&other, echo.tcp_at(address), 1_000).is_err(), "the policy does not deny {address}");
        }
        node.wharf(&["policy", "delete", "--all"])?.ok()?;
        s.ok(node, &["rm", "db", "web", "other"]).map(drop)
    })
}

#[test]
fn a_create_that_waits_for_an_address_says_so_and_need_not_wait() -> Result<()> {
    with_sandboxes_on(NodeConfig::default().flags(&["--ip-rest-ms", "3000"]), |node, s| {
        s.ok(node, &["create", "a", "--ip", "10.87.0.40"])?;
        s.ok(node, &["rm", "a"])?;
        let fix = ["create", "fix", "--ip", "10.87.0.40"];
        let words = ["10.87.0.40 is in quarantine for ", " s more, until ", "code 11"];
        s.fails(node, &[fix.as_slice(), &["--no-wait"]].concat(), 1, &words)?;
        let explained = node.wharf(&["explain", "fix"])?;
        ensure!(explained.stdout.contains("10.87.0.40 is in quarantine"), "{}", explained.describe());
        let said = s.told(node, &fix, "10.87.0.40 is in quarantine for ", || Ok(()))?;
        ensure!(said.starts_with("wharf: plugin wharf-cni: "), "{said}");
        s.ok(node, &["rm", "fix"]).map(drop)
    })
}

#[test]
fn a_sandbox_has_an_interface_for_each_network() -> Result<()> {
    with_sandboxes(|node, s| {
        s.ok(
            node,
            &[
                "create",
                "both",
                "--network",
                BACK,
                "--network",
                FRONT,
                "--ip",
                "10.87.3.3",
                "--mac",
                "02:00:00:00:00:33",
            ],
        )?;
        s.ok(node, &["create", "one", "--network", FRONT])?;
        let space = s.space("both")?;
        let mut links = space.links()?;
        links.sort();
        ensure!(links == ["eth0", "eth1", "lo"], "{links:?}");
        let kept = s.inspect(node, "both")?;
        ensure!(kept["attachments"][0]["network"] == BACK && kept["attachments"][1]["network"] == FRONT, "{kept}");
        ensure!(kept["attachments"][0]["result"]["interfaces"][1]["mac"] == "02:00:00:00:00:33", "{kept}");
        let addresses = [s.addresses(node, "both", 0)?, s.addresses(node, "both", 1)?].concat();
        ensure!(addresses.first() == Some(&"10.87.3.3".parse()?), "{addresses:?}");
        for address in &addresses {
            ping(&s.space("one")?, *address)?.must_answer()?;
        }
        ensure!(s.wharf(node, &["inspect", "both", "--check"])?.status.success());
        s.fails(node, &["create", "none", "--network", "nowhere"], 1, &["find network nowhere", "front", "back"])?;
        s.ok(node, &["rm", "both", "one"]).map(drop)
    })
}

#[test]
fn run_has_labels_ports_and_networks_as_create_has() -> Result<()> {
    with_sandboxes(|node, s| {
        let options = ["--network", FRONT, "--network", BACK, "--label", "app=web", "--publish", "8080:80"];
        s.ok(node, &[&["run", "--detach"], &options[..], &["web", "--", "sleep", "600"]].concat())?;
        let mut links = s.space("web")?.links()?;
        links.sort();
        ensure!(links == ["eth0", "eth1", "lo"], "{links:?}");
        for endpoint in node.endpoints()? {
            let labels = node.wharf(&["endpoint", "get", &endpoint.id.to_string()])?.ok()?;
            ensure!(labels.contains("app=web"), "{labels}");
        }
        let ports = node.wharf(&["port", "list"])?.ok()?;
        ensure!(ports.contains("8080/tcp"), "{ports}");
        s.ok(node, &["rm", "web"]).map(drop)
    })
}

#[test]
fn the_quick_start_of_the_page_on_l7_works_as_copied() -> Result<()> {
    with_sandboxes_on(NodeConfig::default().with_envoy()?, |node, s| {
        // Who copies commands is slower than Envoy's start.
        wait::until("Envoy is connected", || {
            let proxy = node.ask(async |client| client.proxy().await)?;
            Ok((proxy.state == ProxyState::Serving).then_some(()))
        })?;
        let page = include_str!("../../../docs/l7.md");
        let (_, rest) = page.split_once("```sh\n").context("a block of shell")?;
        let copied = rest.split_once("```").context("its end")?.0;
        // The test has directories of its own.
        let directory = node.dirs().root.join("copied");
        fs::create_dir(&directory)?;
        let text = |path: &Path| path.display().to_string();
        let lines: Vec<&str> = copied.lines().map(|line| line.strip_prefix("   ").unwrap_or(line)).collect();
        let script = lines
            .join("\n")
            .replace("wharf sandbox", &format!("wharf {}", s.places().join(" ")))
            .replace("ip netns exec client", &format!("nsenter --net={}", text(&s.names.join("client"))))
            .replace("/srv/www", &text(&directory.join("www")))
            .replace("web.yaml", &text(&directory.join("web.yaml")));
        // What `wharf` finds without being told: the node's own socket.
        let mut shell = node.wharf_command(&[])?;
        let wharf = std::iter::once(shell.get_program()).chain(shell.get_args());
        let wharf: Vec<String> = wharf.map(|word| word.to_string_lossy().into_owned()).collect();
        let script = script.replace("\nwharf ", &format!("\n{} ", wharf.join(" ")));
        shell = node.command("sh")?;
        shell.args(["-ec", &script]).current_dir(&directory);
        let printed = process::run(shell, b"", 4 * wait::PATIENCE)?.ok()?;
        for part in ["GET /public...", "hello", "Access denied", "the proxy judges what it carries"] {
            ensure!(printed.contains(part), "{part} is missing: {printed}");
        }
        println!("{printed}");
        Ok(())
    })
}

/// A runtime of virtual machines puts devices of its own there before anything runs.
#[test]
fn devices_that_somebody_puts_into_a_sandbox_go_with_it() -> Result<()> {
    with_sandboxes(|node, s| {
        s.ok(node, &["create", "vm"])?;
        let space = s.space("vm")?;
        for device in ["br7 type bridge", "tap7 master br7 type veth peer name vm7"] {
            process::ip(&space, &format!("link add {device}"))?;
        }
        ensure!(s.wharf(node, &["inspect", "vm", "--check"])?.status.success());
        s.ok(node, &["rm", "vm"])?;
        ensure!(node.endpoint_links()?.is_empty(), "{:?}", node.endpoint_links()?);
        Ok(())
    })
}

#[test]
fn a_create_that_fails_undoes_what_was_added() -> Result<()> {
    with_sandboxes(|node, s| {
        s.plugin("last", "[ \"$CNI_COMMAND\" = ADD ] && { echo '{\"code\": 999, \"msg\": \"no tide\"}'; exit 1; }")?;
        s.network(node, "30-chain.conflist", "chain", &["last"])?;
        let asked = ["create", "web", "--network", FRONT, "--network", "chain"];
        s.fails(node, &asked, 1, &["wharf: no tide (ADD of plugin last, network chain, interface eth1, code 999)\n"])?;
        let calls = s.calls();
        ensure!(calls.len() == 2 && calls[0].starts_with("ADD eth1") && calls[1].starts_with("DEL eth1"), "{calls:?}");
        ensure!(s.left()?.is_empty(), "{:?}", s.left()?);
        // The undo fails, too: the sandbox is broken, and a remove resumes.
        s.plugin("last", "echo '{\"code\": 999, \"msg\": \"no tide\"}'; exit 1")?;
        s.fails(node, &asked, 1, &["ADD of plugin last", "could not be taken back", "DEL of plugin last", "rm web"])?;
        ensure!(s.states(node)? == [("web".into(), "broken".into())], "{:?}", s.list(node)?);
        s.fails(node, &["run", "web", "--", "true"], 125, &["broken", "rm web"])?;
        s.fails(node, &["rm", "web"], 1, &["DEL of plugin last"])?;
        s.plugin("last", "true")?;
        s.ok(node, &["rm", "web"]).map(drop)
    })
}

#[test]
fn a_plugin_that_is_not_installed_is_told_before_anything_is_made() -> Result<()> {
    with_sandboxes(|node, s| {
        s.plugin("first", "echo '{}'")?;
        s.network(node, "30-chain.conflist", "chain", &["first", "absent"])?;
        s.calls();
        s.fails(
            node,
            &["create", "web", "--network", "chain"],
            1,
            &["plugin absent", "no such program", "--cni-bin-dir"],
        )?;
        ensure!(s.calls().is_empty() && s.left()?.is_empty(), "{:?}", s.left()?);
        Ok(())
    })
}

#[test]
fn a_stop_that_fails_keeps_its_place_and_is_resumed() -> Result<()> {
    with_sandboxes(|node, s| {
        s.plugin("first", "true")?;
        s.plugin("last", "true")?;
        s.network(node, "30-chain.conflist", "chain", &["first", "last"])?;
        s.ok(node, &["create", "web", "--network", "chain"])?;
        ensure!(s.calls().len() == 2);
        s.plugin("first", "echo 'the quay is closed' >&2; exit 7")?;
        s.fails(node, &["stop", "web"], 1, &["DEL of plugin first", "exit status: 7: the quay is closed"])?;
        ensure!(s.states(node)? == [("web".into(), "stop-unfinished".into())], "{:?}", s.list(node)?);
        ensure!(s.ok(node, &["list"])?.contains("the quay is closed"));
        ensure!(s.names.join("web").exists() && node.endpoints()?.len() == 1, "the stop went on");
        s.fails(node, &["rm", "web"], 1, &["DEL of plugin first"])?;
        s.calls();
        s.plugin("first", "true")?;
        s.ok(node, &["stop", "web"])?;
        let path = s.names.join("web").display().to_string();
        ensure!(s.calls() == [format!("DEL eth0 [{path}]")], "a DEL that had succeeded was repeated, or none was sent");
        s.ok(node, &["rm", "web"])?;
        ensure!(s.calls().is_empty(), "DEL after a stop");
        Ok(())
    })
}

#[test]
fn check_tells_what_a_plugin_finds() -> Result<()> {
    with_sandboxes(|node, s| {
        s.plugin("last", "true")?;
        s.network(node, "30-chain.conflist", "chain", &["last"])?;
        s.ok(node, &["create", "web", "--network", "chain"])?;
        let told = s.ok(node, &["inspect", "web", "--check"])?;
        ensure!(
            told.contains("\"checked\": true") && s.calls().last().is_some_and(|c| c.starts_with("CHECK eth0")),
            "{told}"
        );
        // What Wharf's own plugin finds: an address is gone.
        let address = s.addresses(node, "web", 0)?[0];
        process::ip(&s.space("web")?, &format!("addr del {address}/32 dev eth0"))?;
        let done = s.wharf(node, &["inspect", "web", "--check"])?;
        ensure!(done.code() == 1 && done.stdout.contains("CHECK of plugin wharf-cni"), "{}", done.describe());
        s.ok(node, &["rm", "web"]).map(drop)
    })
}

#[test]
fn a_plugin_that_outlives_its_command_is_waited_for() -> Result<()> {
    with_sandboxes(|node, s| {
        let (gate, there) = (s.plugins.join("gate"), s.plugins.join("there"));
        mkfifo(&gate, Mode::S_IRWXU)?;
        s.plugin("last", "[ \"$CNI_COMMAND\" = ADD ] && { : > there; read line < gate; }")?;
        s.network(node, "30-chain.conflist", "chain", &["last"])?;
        let mut create = s.command(node, &["create", "web", "--network", "chain"])?.spawn()?;
        wait::until("the plugin runs", || Ok(there.exists().then_some(())))?;
        create.kill()?;
        create.wait()?;
        ensure!(s.states(node)? == [("web".into(), "creating".into())], "{:?}", s.states(node)?);
        let told = format!("waiting for process {}, which works on sandbox web", create.id());
        s.told(node, &["rm", "web"], &told, || {
            // Opened for both, so that it does not wait for the plugin.
            fs::OpenOptions::new().read(true).write(true).open(&gate)?.write_all(b"go\n").context("let the plugin go")
        })?;
        let calls = s.calls();
        ensure!(calls.len() == 2 && calls[1].starts_with("DEL"), "{calls:?}");
        Ok(())
    })
}

#[test]
fn stop_remove_and_list_need_no_agent() -> Result<()> {
    with_sandboxes(|node, s| {
        for name in ["a", "b", "c"] {
            s.ok(node, &["create", name])?;
        }
        s.ok(node, &["stop", "c"])?;
        node.kill_agent()?;
        s.ok(node, &["stop", "a"])?;
        let states = s.states(node)?;
        ensure!(states.iter().map(|(_, state)| state.as_str()).eq(["stopped", "ready", "stopped"]), "{states:?}");
        s.inspect(node, "b")?;
        s.ok(node, &["rm", "a", "b", "c"])?;
        s.fails(node, &["create", "d"], 1, &["ADD of plugin wharf-cni", "code 11)"])?;
        ensure!(s.left()?.is_empty(), "{:?}", s.left()?);
        node.start_agent()?;
        wait::until_equal("endpoints", &0, || Ok(node.endpoints()?.len()))
    })
}

#[test]
fn an_agent_that_hangs_is_told_while_it_is_waited_for() -> Result<()> {
    with_sandboxes(|node, s| {
        node.signal_agent(Signal::SIGSTOP)?;
        let told = "wharf: ADD of plugin wharf-cni for eth0 of sandbox web";
        let said = s.told(node, &["create", "web"], told, || node.signal_agent(Signal::SIGCONT))?;
        ensure!(said.matches(told).count() == 1, "{said}");
        s.ok(node, &["rm", "web"]).map(drop)
    })
}

/// The reference plugins, as Debian's package has them.
const REFERENCE: &str = "/usr/lib/cni";

#[test]
fn a_chain_of_the_reference_plugins_works_beside_wharf() -> Result<()> {
    with_sandboxes(|node, s| {
        // They keep things below /run: one of this test's mount namespace alone.
        mount(Some("wharf-test"), "/run", Some("tmpfs"), MsFlags::empty(), Some("mode=0755")).context("cover /run")?;
        for plugin in ["bridge", "host-local", "tuning"] {
            let from = Path::new(REFERENCE).join(plugin);
            ensure!(from.is_file(), "{} is not there; `cargo xtask test` installs it", from.display());
            symlink(from, s.plugins.join(plugin))?;
        }
        let leases = node.dirs().root.join("leases");
        let list = json!({"cniVersion": "1.0.0", "name": "bridged", "plugins": [
            {"type": "bridge", "bridge": "quay0", "isGateway": true,
             "ipam": {"type": "host-local", "dataDir": leases, "ranges": [[{"subnet": "192.0.2.0/24"}]]}},
            {"type": "tuning", "capabilities": {"mac": true}, "sysctl": {"net.ipv4.conf.all.log_martians": "1"}}]});
        fs::write(s.conf.join("30-bridged.conflist"), list.to_string())?;
        let options = ["--network", "bridged", "--network", FRONT, "--ip", "192.0.2.77", "--mac", "02:00:00:00:00:77"];
        s.ok(node, &[&["create", "web"], options.as_slice()].concat())?;
        s.ok(node, &["create", "db", "--network", "bridged"])?;
        let shown = process::ip(&s.space("web")?, "-o addr show dev eth0")?;
        ensure!(shown.contains("192.0.2.77/24"), "{shown}");
        let shown = process::ip(&s.space("web")?, "-o link show dev eth0")?;
        ensure!(shown.contains("02:00:00:00:00:77"), "{shown}");
        ping(&s.space("db")?, "192.0.2.77".parse()?)?.must_answer()?;
        ensure!(s.space("web")?.links()?.len() == 3, "{:?}", s.space("web")?.links()?);
        s.ok(node, &["inspect", "web", "--check"])?;
        ensure!(leases.join("bridged/192.0.2.77").exists());
        s.ok(node, &["rm", "web", "db"])?;
        let left: Vec<_> = fs::read_dir(leases.join("bridged"))?.flatten().map(|e| e.file_name()).collect();
        ensure!(left.iter().all(|name| !name.to_string_lossy().starts_with("192.")), "leases stay: {left:?}");
        Ok(())
    })
}
