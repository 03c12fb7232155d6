//! Addresses from an IPAM plugin: Debian's `host-local`, behind the real plugin, agent and kernel.

use std::{
    fs,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    cni::{DEBIANS_PLUGINS, NetConf},
    crash, echo,
    icmp::ping,
    process::ip,
    scenario, wait,
    world::{NODE, WORLD, World},
};

const NETWORK: &str = "far";

/// The network of `host-local`, which keeps its leases in the node's own directory.
fn far(node: &Node) -> Result<NetConf> {
    let program = format!("{DEBIANS_PLUGINS}/host-local");
    ensure!(Path::new(&program).exists(), "{program} is missing: install containernetworking-plugins");
    let ranges = json!([[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd01::/64"}]]);
    let ipam = json!({"type": "host-local", "dataDir": node.dirs().root.join("host-local"), "ranges": ranges});
    Ok(node.netconf().version("1.0.0").with("name", json!(NETWORK)).with("ipam", ipam))
}

/// The addresses that `host-local` has leased, sorted.
fn leased(node: &Node) -> Result<Vec<IpAddr>> {
    let directory: PathBuf = node.dirs().root.join("host-local").join(NETWORK);
    let Ok(entries) = fs::read_dir(&directory) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in entries {
        found.extend(entry?.file_name().to_string_lossy().parse::<IpAddr>().ok());
    }
    found.sort();
    Ok(found)
}

fn add(node: &Node, sandbox: &Sandbox, conf: &NetConf) -> Result<Attached> {
    node.attach_with(sandbox, "eth0", conf)
}

/// Both families both ways, and the node to both.
fn talk(node: &Node, a: (&Sandbox, &Attached), b: (&Sandbox, &Attached)) -> Result<()> {
    for (from, to) in [(a.0.space()?, b.1), (b.0.space()?, a.1), (node.space(), a.1), (node.space(), b.1)] {
        for address in to.both()? {
            ping(from, address)?.must_answer()?;
        }
    }
    Ok(())
}

#[test]
fn host_local_leases_what_the_agent_serves_over_a_restart() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        let conf = far(node)?;
        let (ea, eb) = (add(node, &a, &conf)?, node.attach(&b)?);
        let mut own = ea.both()?.to_vec();
        own.sort();
        ensure!(leased(node)? == own, "{:?}, and the endpoint has {own:?}", leased(node)?);
        ensure!(ea.gateways()? == ["10.1.0.1".parse::<IpAddr>()?, "fd01::1".parse()?], "{}", ea.result);
        talk(node, (&a, &ea), (&b, &eb))?;
        let shown = node.wharf(&["endpoint", "get", &node.endpoint(&ea)?.id.to_string()])?.stdout;
        ensure!(shown.contains("host-local (CNI plugin"), "{shown}");
        let leases = node.ask(async |client| client.ipam().await)?;
        let foreign = |ip: IpAddr| own.contains(&ip);
        ensure!(!leases.leases.iter().any(|lease| foreign(lease.ip)), "{leases:?}");
        node.check(&ea)?.silent()?;
        ensure!(node.audit()?.findings.is_empty(), "{:?}", node.audit()?.findings);

        // The one that is there keeps its lease.
        let again = node.cni("ADD").of("a", a.path(), "eth0").conf(&conf).run()?.failure()?;
        ensure!(again.code == 4 && leased(node)? == own, "{again:?}, {:?}", leased(node)?);
        // One ADD that worked, and one that did not: the question whether it is there is no command.
        let failed = || -> Result<bool> {
            let text = node.http("GET", "/metrics", None)?.text();
            let of = |outcome: &str| {
                let labels = format!("command=\"ADD\",network=\"{NETWORK}\",mode=\"own\",outcome=\"{outcome}\"");
                text.contains(&format!("wharf_cni_commands_total{{{labels}}} 1\n"))
            };
            Ok(of("success") && of("failure"))
        };
        wait::until("one failed ADD to be counted", || Ok(failed()?.then_some(())))?;

        node.kill_agent()?;
        node.start_agent()?;
        node.await_rebuilt()?;
        talk(node, (&a, &ea), (&b, &eb)).context("after a restart")?;
        ensure!(node.audit()?.findings.is_empty(), "{:?}", node.audit()?.findings);
        node.detach(&ea)?;
        ensure!(leased(node)?.is_empty(), "{:?}", leased(node)?);
        // As containerd has it: once more, without a namespace and without a result.
        node.cni("DEL").of("a", Path::new(""), "eth0").conf(&conf).run()?.silent()?;
        node.await_released()?;
        let resting = node.ask(async |client| client.ipam().await)?.resting;
        ensure!(!resting.iter().any(|rest| foreign(rest.ip)), "{resting:?}");
        node.detach(&eb)
    })
}

/// Who sends to the socket.
fn sender(server: &UdpSocket, send: impl FnOnce() -> Result<()>) -> Result<IpAddr> {
    server.set_read_timeout(Some(Duration::from_secs(5)))?;
    send()?;
    Ok(server.recv_from(&mut [0; 16])?.1.ip())
}

#[test]
fn other_networks_see_the_address_and_a_published_port_shows_who_asks() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::join(node)?;
        ip(world.space()?, &format!("route add 10.1.0.0/24 via {}", NODE[0]))?;
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        let ports = json!({"portMappings": [{"hostPort": 5353, "containerPort": 53, "protocol": "udp"}]});
        let ea = add(node, &a, &far(node)?.with("runtimeConfig", ports))?;
        let eb = node.attach(&b)?;
        let to = |from: &Sandbox, to: SocketAddr| -> Result<()> {
            echo::udp_client(from.space()?, to)?.send(b"who?")?;
            Ok(())
        };
        let outside =
            world.space()?.run(|| UdpSocket::bind(SocketAddr::new(WORLD[0].parse().expect("address"), 0)))??;
        let seen = sender(&outside, || to(&a, outside.local_addr()?))?;
        ensure!(seen == ea.v4()?, "the world sees {seen}");
        // By the node's address: the stack translates it. A container that was masqueraded would be taken for the node,
        // which policy always lets in.
        let inside = a.space()?.run(|| UdpSocket::bind((ea.v4().expect("address"), 53)))??;
        let seen = sender(&inside, || to(&b, format!("{}:5353", NODE[0]).parse()?))?;
        ensure!(seen == eb.v4()?, "the container sees {seen}");

        let masqueraded = far(node)?.with("ipMasq", json!(true));
        let c = node.sandbox("c")?;
        let refused = node.cni("ADD").of("c", c.path(), "eth0").conf(&masqueraded).run()?.failure()?;
        ensure!(refused.code == 7 && refused.text().contains("ipMasq"), "{refused:?}");
        ensure!(leased(node)?.len() == 2, "{:?}", leased(node)?);
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn addresses_of_the_node_and_of_its_pools_are_refused_and_given_back() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let _world = World::join(node)?;
        let a = node.sandbox("a")?;
        for (subnet, words) in [("10.87.44.0/24", "a pool of the agent"), ("198.51.100.0/24", "up0")] {
            let ipam = json!({"type": "host-local", "dataDir": node.dirs().root.join("host-local"), "subnet": subnet});
            let conf = far(node)?.with("ipam", ipam);
            let refused = node.cni("ADD").of("a", a.path(), "eth0").conf(&conf).run()?.failure()?;
            ensure!(refused.code == 7 && refused.text().contains(words), "{subnet}: {refused:?}");
            ensure!(leased(node)?.is_empty(), "{subnet}: {:?}", leased(node)?);
            node.cni("DEL").of("a", a.path(), "eth0").conf(&conf).run()?.silent()?;
        }
        ensure!(a.space()?.links()? == ["lo"], "{:?}", a.space()?.links()?);
        Ok(())
    })
}

#[test]
fn a_shim_that_is_killed_leaves_the_lease_to_the_runtimes_del() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let conf = far(node)?;
        let call = |command: &str| node.cni(command).of("a", a.path(), "eth0").conf(&conf);
        for point in ["shim/add/before-ask", "shim/add/after-answer"] {
            crash::wish(node.dirs(), point)?;
            let killed = call("ADD").armed(node.dirs()).run()?;
            ensure!(killed.finished.code() == -1, "{point}: {:?}", killed.finished);
            crash::forget_wish(node.dirs())?;
            ensure!(leased(node)?.len() == 2, "{point}: {:?}", leased(node)?);
            call("DEL").run()?.silent()?;
            ensure!(leased(node)?.is_empty(), "{point}: {:?}", leased(node)?);
        }
        // Between the two deletes: the next DEL finds the lease alone.
        call("ADD").run()?.result()?;
        crash::wish(node.dirs(), "shim/del/after-answer")?;
        let killed = call("DEL").armed(node.dirs()).run()?;
        ensure!(killed.finished.code() == -1, "{:?}", killed.finished);
        crash::forget_wish(node.dirs())?;
        ensure!(leased(node)?.len() == 2 && a.space()?.links()? == ["lo"], "{:?}", leased(node)?);
        call("DEL").run()?.silent()?;
        ensure!(leased(node)?.is_empty(), "{:?}", leased(node)?);
        Ok(())
    })
}

#[test]
fn a_del_without_an_agent_gives_the_lease_back_and_the_agent_ends_the_rest() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        let conf = far(node)?;
        let ea = add(node, &a, &conf)?;
        node.kill_agent()?;
        node.detach(&ea)?;
        ensure!(leased(node)?.is_empty(), "{:?}", leased(node)?);
        ensure!(a.space()?.links()? == ["lo"], "{:?}", a.space()?.links()?);
        // The address may be asked for at once. The agent gives it to nobody before it has finished the deletion.
        node.start_agent()?;
        let wish = conf.with("args", json!({"cni": {"ips": [ea.v4()?.to_string()]}}));
        let eb = add(node, &b, &wish)?;
        ensure!(eb.v4()? == ea.v4()?, "{}", eb.result);
        for address in eb.both()? {
            ping(node.space(), address)?.must_answer()?;
        }
        node.detach(&eb)
    })
}

#[test]
fn an_ipam_plugin_of_before_cni_1_1_is_told_by_status_and_no_obstacle_to_gc() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let conf = far(node)?.version("1.1.0");
        let status = node.cni("STATUS").conf(&conf).run()?.failure()?;
        ensure!(status.code == 50 && status.text().contains("does not support CNI 1.1.0"), "{status:?}");
        let refused = node.cni("ADD").of("a", a.path(), "eth0").conf(&conf).run()?.failure()?;
        ensure!(refused.code == 1 && refused.text().contains("IPAM plugin host-local"), "{refused:?}");
        let none: Value = json!([]);
        node.cni("GC").conf(&conf.with("cni.dev/valid-attachments", none)).run()?.silent()
    })
}

/// An IPAM plugin that takes its time: a second for ADD, half of one for DEL. It kills who runs it where `kill` is
/// there.
const SLOW: &str = r#"#!/bin/sh
cd "${0%/*}" || exit 1
if [ -e kill ]; then rm kill; kill -KILL $PPID; fi
case $CNI_COMMAND in
ADD)
    sleep 1
    echo "$CNI_CONTAINERID" >lease
    echo '{"cniVersion": "1.0.0", "ips": [{"address": "10.1.0.9/24", "gateway": "10.1.0.1"}]}'
    ;;
DEL)
    sleep 0.5
    rm -f lease
    ;;
esac
"#;

#[test]
fn commands_of_one_attachment_take_turns_and_wait_for_an_ipam_plugin_that_outlived_one() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let directory = node.dirs().root.join("plugins");
        fs::create_dir(&directory)?;
        let (program, lease) = (directory.join("slow"), directory.join("lease"));
        fs::write(&program, SLOW)?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        let conf = node.netconf().version("1.0.0").with("name", json!(NETWORK)).with("ipam", json!({"type": "slow"}));
        let path = directory.display().to_string();
        let call = |command: &str| node.cni(command).env("CNI_PATH", &path).of("a", a.path(), "eth0").conf(&conf);
        let killed = |command: &str| -> Result<()> {
            fs::write(directory.join("kill"), "")?;
            let finished = call(command).run()?.finished;
            ensure!(finished.code() == -1, "{finished:?}");
            Ok(())
        };

        // A lease that comes after its ADD is given back by the DEL.
        killed("ADD")?;
        call("DEL").run()?.silent()?;
        ensure!(!lease.exists(), "the DEL did not wait for the ADD's IPAM plugin");
        // A DEL that goes on does not take the lease of an ADD after it.
        call("ADD").run()?.result()?;
        killed("DEL")?;
        call("ADD").run()?.result()?;
        ensure!(lease.exists(), "the ADD did not wait for the DEL's IPAM plugin");
        call("DEL").run()?.silent()?;

        // Of several ADDs one has the interface and the lease, and those that are refused give nothing back.
        let adding: Vec<_> = (0..4)
            .map(|_| {
                Ok(std::thread::spawn({
                    let add = call("ADD").ready()?;
                    move || add.run()
                }))
            })
            .collect::<Result<_>>()?;
        let mut added = 0;
        for thread in adding {
            let answer = thread.join().map_err(|_| anyhow!("a thread panicked"))??;
            match answer.finished.code() {
                0 => added += 1,
                _ => ensure!(answer.failure()?.code == 4, "{answer:?}"),
            }
        }
        ensure!(added == 1 && lease.exists(), "{added} added, leased: {}", lease.exists());
        call("DEL").run()?.silent()?;
        ensure!(!lease.exists() && fs::read_dir(node.dirs().run.join("ipam-turns"))?.count() == 0, "something is left");
        Ok(())
    })
}
