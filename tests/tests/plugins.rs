//! Plugins chained behind Wharf: Debian's `portmap`, `bandwidth`, `firewall` and `tuning`, as a runtime runs them.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox, echo, icmp,
    process::{Finished, command_in, ip, run},
    scenario,
    world::{NODE, World},
};

/// Where Debian's containernetworking-plugins are.
const PLUGINS: &str = "/usr/lib/cni";

/// Runs a chained plugin: its own configuration, and Wharf's result as `prevResult`.
fn chained(node: &Node, verb: &str, plugin: &str, own: Value, end: &Attached) -> Result<Finished> {
    let mut conf = json!({"cniVersion": "1.0.0", "name": "wharf", "type": plugin, "prevResult": end.result});
    conf["prevResult"]["cniVersion"] = json!("1.0.0");
    for (key, value) in own.as_object().context("an object")? {
        conf[key] = value.clone();
    }
    let program = format!("{PLUGINS}/{plugin}");
    ensure!(std::path::Path::new(&program).exists(), "{program} is missing: install containernetworking-plugins");
    let mut command = command_in(node.space(), program)?;
    command.env("CNI_COMMAND", verb).env("CNI_CONTAINERID", &end.container).env("CNI_NETNS", &end.netns);
    command.env("CNI_IFNAME", &end.ifname).env("CNI_PATH", PLUGINS).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    run(command, conf.to_string().as_bytes(), Duration::from_secs(20))
}

struct Chain {
    sandbox: Sandbox,
    end: Attached,
}

fn chain(node: &Node) -> Result<Chain> {
    let sandbox = node.sandbox("a")?;
    let end = node.attach_with(&sandbox, "eth0", &node.netconf().version("1.0.0"))?;
    Ok(Chain { sandbox, end })
}

/// Both families, to the node and to a neighbour, and nothing for the audit to tell.
fn works(node: &Node, c: &Chain, neighbour: &Attached) -> Result<()> {
    for address in c.end.gateways()?.into_iter().chain(neighbour.both()?) {
        icmp::ping(c.sandbox.space()?, address)?.must_answer().with_context(|| address.to_string())?;
    }
    node.check(&c.end)?.silent()?;
    ensure!(node.audit()?.findings.is_empty(), "{:?}", node.audit()?.findings);
    Ok(())
}

#[test]
fn tuning_and_firewall_work_behind_wharf() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let b = node.sandbox("b")?;
        let eb = node.attach(&b)?;
        let c = chain(node)?;
        let tuning = json!({"sysctl": {"net.ipv4.conf.eth0.arp_filter": "1"}, "mtu": 1400});
        chained(node, "ADD", "tuning", tuning.clone(), &c.end)?.ok()?;
        let link = ip(c.sandbox.space()?, "link show eth0")?;
        ensure!(link.contains("mtu 1400"), "{link}");
        works(node, &c, &eb).context("tuning")?;
        let firewall = json!({"backend": "iptables"});
        chained(node, "ADD", "firewall", firewall.clone(), &c.end)?.ok()?;
        works(node, &c, &eb).context("firewall")?;
        node.kill_agent()?;
        node.start_agent()?;
        node.await_rebuilt()?;
        works(node, &c, &eb).context("after a restart")?;
        ensure!(ip(c.sandbox.space()?, "link show eth0")?.contains("mtu 1400"), "the restart took the tuning back");
        chained(node, "DEL", "firewall", firewall, &c.end)?.ok()?;
        chained(node, "DEL", "tuning", tuning, &c.end)?.ok()?;
        node.detach(&c.end)?;
        node.detach(&eb)
    })
}

#[test]
fn portmap_works_behind_wharf() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::join(node)?;
        let b = node.sandbox("b")?;
        let eb = node.attach(&b)?;
        let c = chain(node)?;
        let server = echo::EchoServer::start(c.sandbox.space()?)?;
        let port = server.tcp_at(c.end.v4()?.into()).port();
        let own = json!({"capabilities": {"portMappings": true}, "snat": true,
            "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": port, "protocol": "tcp"}]}});
        chained(node, "ADD", "portmap", own.clone(), &c.end)?.ok()?;
        works(node, &c, &eb)?;
        let published: SocketAddr = format!("{}:8080", NODE[0]).parse()?;
        echo::tcp(world.space()?, published, 100_000).context("from outside")?;
        echo::tcp(world.space()?, format!("[{}]:8080", NODE[1]).parse()?, 100_000).context("from outside, IPv6")?;
        echo::tcp(b.space()?, published, 100_000).context("from another container")?;
        echo::tcp(node.space(), published, 100_000).context("from the node")?;
        echo::tcp(c.sandbox.space()?, published, 100_000).context("from the container itself")?;
        chained(node, "DEL", "portmap", own, &c.end)?.ok()?;
        ensure!(echo::tcp(world.space()?, published, 10).is_err(), "the port is still published");
        node.detach(&c.end)?;
        node.detach(&eb)
    })
}

#[test]
fn bandwidth_behind_wharf_is_named_and_the_native_limit_takes_its_place() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let c = chain(node)?;
        let limit = json!({"ingressRate": 8_000_000, "ingressBurst": 800_000});
        // Toward the container alone it succeeds, with a queue on Wharf's link that only the node's stack feeds.
        chained(node, "ADD", "bandwidth", limit.clone(), &c.end)?.ok()?;
        let host = node.endpoint(&c.end)?.host_ifname;
        let findings = node.audit()?.findings;
        let found = findings.iter().find(|f| f.problem.contains("tbf")).with_context(|| format!("{findings:?}"))?;
        for word in ["\"bandwidth\": true", &format!("tc qdisc del dev {host} root")] {
            ensure!(found.remedy.contains(word), "{word} is not in {}", found.remedy);
        }
        let mut remedy = command_in(node.space(), "tc")?;
        remedy.args(["qdisc", "del", "dev", &host, "root"]);
        run(remedy, b"", Duration::from_secs(5))?.ok()?;
        ensure!(node.audit()?.findings.is_empty(), "{:?}", node.audit()?.findings);
        // In both directions it wants the place where Wharf's programs are.
        let both =
            json!({"ingressRate": 8_000_000, "ingressBurst": 800_000, "egressRate": 8_000_000, "egressBurst": 800_000});
        let refused = chained(node, "ADD", "bandwidth", both.clone(), &c.end)?;
        ensure!(refused.code() != 0 && refused.stdout.contains("qdisc"), "{}", refused.describe());
        chained(node, "DEL", "bandwidth", both, &c.end)?.ok()?;
        node.detach(&c.end)?;
        let b = node.sandbox("b")?;
        let eb = node.attach_with(&b, "eth0", &node.netconf().with("runtimeConfig", json!({ "bandwidth": limit })))?;
        let told = node.endpoint(&eb)?.bandwidth.ingress.context("no limit")?;
        ensure!((told.rate, told.burst) == (8_000_000, 800_000), "{told:?}");
        node.detach(&eb)
    })
}
