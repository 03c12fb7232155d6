//! Nodes with several pod CIDRs of each family, and nodes without IPv4.

use std::{
    net::{IpAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use wharf_api::PolicyImport;
use wharf_tests::{
    Node,
    cluster::{Container, FAR, NAMES, Nodes, THREE, address, await_routes, component, is_far, pool, row, seen_by},
    echo, icmp,
    process::ip,
    wait,
};

/// How long a connection that must not be made is waited for: TCP repeats its first packet after a second.
const DENIED: Duration = Duration::from_millis(1_300);

/// Second network of the containers of node `n`.
fn second(n: usize, v6: bool) -> String {
    if v6 { format!("fd88:0:0:{}::/64", n + 1) } else { format!("10.88.{n}.0/24") }
}

/// Addresses in both networks of [`second`].
fn in_second(n: usize) -> [String; 2] {
    [format!("10.88.{n}.77"), format!("fd88:0:0:{}::77", n + 1)]
}

fn networks(n: usize) -> [String; 4] {
    [pool(n, false), second(n, false), pool(n, true), second(n, true)]
}

/// All routes of node `n` with `--routing auto`.
fn routes(n: usize) -> Vec<String> {
    let to = |other: usize| {
        let way = move |cidr: String| {
            if is_far(n) == is_far(other) {
                return format!("{cidr} via {}", address(other, cidr.contains(':')));
            }
            format!("{cidr} overlay to {} from {} mtu 1450", address(other, false), address(n, false))
        };
        networks(other).map(way)
    };
    (0..THREE).filter(|other| *other != n).flat_map(to).collect()
}

/// The protocols that policy and routes treat in different ways, from a container to an address of another.
fn reach(near: &Container, far: &Container, own: IpAddr, to: IpAddr) -> Result<()> {
    let both = || format!("{own} to {to}");
    icmp::ping(near.space()?, to)?.must_answer().with_context(both)?;
    echo::tcp(near.space()?, far.echo.tcp_at(to), 200_000).with_context(both)?;
    echo::udp(near.space()?, far.echo.udp_at(to), 4_000).with_context(both).context("fragments")?;
    let seen = seen_by(far.space()?, near.space()?, to).with_context(both)?;
    ensure!(seen == own, "{own} is masqueraded to {to}: {seen}");
    Ok(())
}

/// Admits these networks to a container.
fn admit(node: &Node, app: &str, networks: &[String]) -> Result<()> {
    let blocks: Vec<String> = networks.iter().map(|cidr| format!("{{ipBlock: {{cidr: '{cidr}'}}}}")).collect();
    let text = format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {app}}}\n\
         spec: {{podSelector: {{matchLabels: {{app: {app}}}}}, ingress: [{{from: [{}]}}]}}\n",
        blocks.join(", ")
    );
    let import = PolicyImport { file: format!("{app}.yaml"), text };
    node.ask(async |client| client.import_policy(&import).await).map(drop)
}

/// Each container reaches the other one, or does not, at each of these addresses.
fn must_connect(of: &[(&Container, bool)], server: &Container, addresses: &[IpAddr]) -> Result<()> {
    let all = of.iter().flat_map(|(client, expected)| addresses.iter().map(move |to| (*client, *to, *expected)));
    wait::all(all, |(client, to, expected)| {
        let to = server.echo.tcp_at(to);
        let patience = if expected { wait::PATIENCE } else { DENIED };
        let connected = client.space()?.run(|| TcpStream::connect_timeout(&to, patience))?.is_ok();
        ensure!(connected == expected, "{:?} reaches {to}: {connected}", client.end.addresses());
        Ok(())
    })
}

fn several_networks(joined: &mut Nodes) -> Result<()> {
    let of_node = |n: usize| row(NAMES[n], &[address(n, false), address(n, true)], &networks(n));
    joined.write(&(0..THREE).map(of_node).collect::<String>())?;
    for (n, node) in joined.nodes.iter_mut().enumerate() {
        for (flag, v6) in [("--ipv4-pool", false), ("--ipv6-pool", true)] {
            node.set_flag(&format!("{flag}={}", second(n, v6)), true);
        }
        node.start_agent().with_context(|| format!("node {}", NAMES[n]))?;
    }
    for (n, node) in joined.nodes.iter().enumerate() {
        await_routes(node, routes(n)).with_context(|| format!("node {}", NAMES[n]))?;
    }
    let (mut first, mut others) = (Vec::new(), Vec::new());
    for (n, node) in joined.nodes.iter().enumerate() {
        let [v4, v6] = in_second(n);
        first.push(Container::start(node, "one")?);
        let other = Container::start_at(node, "two", &[&v4, &v6])?;
        ensure!(other.end.both()? == [v4.parse::<IpAddr>()?, v6.parse()?], "{}", other.end.result);
        others.push(other);
    }
    let all: Vec<(usize, &Container)> = first.iter().enumerate().chain(others.iter().enumerate()).collect();
    for (n, near) in &all {
        for (_, far) in all.iter().filter(|(other, _)| other != n) {
            for (own, to) in near.end.both()?.into_iter().zip(far.end.both()?) {
                reach(near, far, own, to)?;
            }
        }
    }
    let a = &joined.nodes[0];
    for (n, way) in [(1, "packets to it go via 198.51.100.2"), (FAR, "packets to it go by overlay to 203.0.113.2")] {
        for ip in in_second(n) {
            let told = a.wharf(&["explain", &ip])?.ok()?;
            let way = if ip.contains(':') && n == 1 { "packets to it go via 2001:db8:7::2" } else { way };
            ensure!(told.contains(&format!("of node {}: {way}", NAMES[n])), "{told}");
        }
    }
    // The policy admits one network of each node.
    admit(a, "one", &[second(1, false), second(1, true), pool(FAR, false), pool(FAR, true)])?;
    let clients = [(&first[1], false), (&others[1], true), (&first[FAR], true), (&others[FAR], false)];
    must_connect(&clients, &first[0], &first[0].end.both()?)?;
    for node in &joined.nodes {
        wait::until_equal("what is amiss", &Vec::new(), || node.found_amiss())?;
        ensure!(node.wharf(&["cluster", "status"])?.ok()?.contains("8 of 8 in force"), "routes in force");
    }
    all.into_iter().try_for_each(|(n, pod)| joined.nodes[n].detach(&pod.end))
}

#[test]
fn containers_in_every_pod_cidr_of_a_node_are_reached() -> Result<()> {
    Nodes::join(THREE, "auto")?.run(several_networks)?.end()
}

fn without_ipv4(joined: &mut Nodes, routing: &str) -> Result<()> {
    let of_node = |n: usize| row(NAMES[n], &[address(n, true)], &[pool(n, true)]);
    joined.write(&[of_node(0), of_node(1)].concat())?;
    for (n, node) in joined.nodes.iter_mut().enumerate() {
        ip(node.space(), "-4 addr flush dev up0")?;
        node.set_flag(&format!("--ipv4-pool={}", pool(n, false)), false);
        node.set_flag("--ipv4-pool=", true);
        node.start_agent().with_context(|| format!("node {}", NAMES[n]))?;
    }
    let [a, b] = [&joined.nodes[0], &joined.nodes[1]];
    for (node, own, other) in [(a, 0, 1), (b, 1, 0)] {
        let (cidr, from, at) = (pool(other, true), address(own, true), address(other, true));
        let way = match routing {
            "native" => format!("{cidr} via {at}"),
            _ => format!("{cidr} overlay to {at} from {from} mtu 1430"),
        };
        await_routes(node, vec![way])?;
    }
    let (one, two, third) = (Container::start(a, "one")?, Container::start(b, "two")?, Container::start(a, "third")?);
    for (near, far) in [(&one, &two), (&two, &one), (&one, &third)] {
        ensure!(near.end.addresses().len() == 1, "{}", near.end.result);
        reach(near, far, near.end.v6()?.into(), far.end.v6()?.into())?;
    }
    // The node to a container, and a container to the other node.
    echo::tcp(a.space(), two.echo.tcp_at(two.end.v6()?.into()), 10_000).context("from the node")?;
    icmp::ping(one.space()?, address(1, true).parse()?)?.must_answer().context("to the other node")?;
    let own = format!("{}/128", one.end.v6()?);
    admit(b, "two", &[own])?;
    must_connect(&[(&one, true), (&third, false)], &two, &[two.end.v6()?.into()])?;
    let routes = if routing == "native" { "2 nodes, 1 route" } else { "2 nodes, 1 route, 1 by the overlay" };
    for node in [a, b] {
        wait::until_equal("what is amiss", &Vec::new(), || node.found_amiss())?;
        ensure!(component(node)? == ("ok".to_owned(), routes.to_owned()), "{:?}", component(node)?);
        ensure!(node.wharf(&["cluster", "status"])?.code() == 0, "a route is missing");
        let (v4, addresses) = (ip(node.space(), "-4 route")?, ip(node.space(), "-4 addr show scope global")?);
        ensure!(v4.is_empty() && addresses.is_empty(), "IPv4 on a node without it:\n{v4}{addresses}");
    }
    a.detach(&one.end)?;
    a.detach(&third.end)?;
    b.detach(&two.end)
}

#[test]
fn nodes_without_ipv4_reach_each_other_by_native_routes() -> Result<()> {
    Nodes::join(2, "native")?.run(|joined| without_ipv4(joined, "native"))?.end()
}

#[test]
fn nodes_without_ipv4_reach_each_other_by_the_overlay() -> Result<()> {
    Nodes::join(2, "overlay")?.run(|joined| without_ipv4(joined, "overlay"))?.end()
}
