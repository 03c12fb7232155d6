//! Source prefixes: a router container sends for the hosts behind it, and only for those.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use wharf_api::{EndpointPatch, PolicyDeleteQuery, PolicyImport};
use wharf_tests::{
    Attached, NetConf, Node, NodeConfig, Sandbox,
    echo::{self, EchoServer},
    frame::{self, ARP, BROADCAST, IPV6, Mac, PacketSocket, mac},
    process::{command_in, ip, own_address, run},
    scenario,
    space::Space,
    stream::UdpStream,
    wait,
    world::World,
};

const PREFIXES: [&str; 2] = ["10.200.0.0/16", "fd00:9::/64"];
/// The router's addresses toward the host behind it.
const INNER: [&str; 2] = ["10.200.0.1", "fd00:9::1"];
/// The host's.
const HOST: [&str; 2] = ["10.200.0.2", "fd00:9::2"];
const SERVICES: [&str; 2] = ["198.18.5.1", "2001:db8:5::1"];
const SERVICE_PORT: u16 = 80;
const CIDRS: &str = "--service-cidr=198.18.5.0/24,2001:db8:5::/64";
const FOREIGN: &str = "invalid-source-ip";
/// How long an answer that must not come is waited for; the question is repeated.
const DENIED: Duration = Duration::from_millis(1_300);

fn addresses(texts: [&str; 2]) -> Result<[IpAddr; 2]> {
    let [v4, v6] = texts;
    Ok([v4.parse()?, v6.parse()?])
}

/// A netconf with the label `app` and these source prefixes.
fn conf(node: &Node, app: &str, prefixes: &[&str]) -> NetConf {
    let labels = json!({"cni": {"labels": [{"key": "app", "value": app}]}});
    let conf = node.netconf().with("args", labels);
    if prefixes.is_empty() { conf } else { conf.with("sourcePrefixes", json!(prefixes)) }
}

/// A container with an echo server.
struct Server {
    sandbox: Sandbox,
    end: Attached,
    echo: EchoServer,
}

impl Server {
    fn attach(node: &Node, name: &str) -> Result<Self> {
        let sandbox = node.sandbox(name)?;
        let end = node.attach_with(&sandbox, "eth0", &conf(node, name, &[]))?;
        let echo = EchoServer::start(sandbox.space()?)?;
        Ok(Self { sandbox, end, echo })
    }

    fn space(&self) -> Result<&Space> {
        self.sandbox.space()
    }

    /// Its server in each family.
    fn at(&self) -> Result<[SocketAddr; 2]> {
        Ok(self.end.both()?.map(|address| self.echo.udp_at(address)))
    }
}

/// A router container, the node's routes by it, and a host behind it.
struct Lan {
    router: Sandbox,
    end: Attached,
    host: Sandbox,
    echo: EchoServer,
}

impl Lan {
    fn join(node: &Node, conf: &NetConf) -> Result<Self> {
        let (router, host) = (node.sandbox("router")?, node.sandbox("host")?);
        let end = node.attach_with(&router, "eth0", conf)?;
        ip(router.space()?, &format!("link add lan type veth peer name eth0 netns {}", host.path().display()))?;
        for (space, name, [v4, v6]) in [(router.space()?, "lan", INNER), (host.space()?, "eth0", HOST)] {
            ip(space, &format!("addr add {v4}/16 dev {name}"))?;
            ip(space, &format!("addr add {v6}/64 dev {name} nodad"))?;
            ip(space, &format!("link set {name} up"))?;
            ip(space, "link set lo up")?;
        }
        ip(host.space()?, &format!("route add default via {}", INNER[0]))?;
        ip(host.space()?, &format!("-6 route add default via {}", INNER[1]))?;
        for path in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            router.space()?.run(|| std::fs::write(format!("/proc/sys/net/{path}"), "1"))?.context(path)?;
        }
        route(node, PREFIXES, &end)?;
        // A router asks for its neighbours from its link-local address, once that is checked.
        for space in [router.space()?, host.space()?] {
            wait::until("IPv6 addresses are checked", || {
                Ok(ip(space, "-6 addr show tentative")?.is_empty().then_some(()))
            })?;
        }
        let echo = EchoServer::start(host.space()?)?;
        Ok(Self { router, end, host, echo })
    }

    fn id(&self, node: &Node) -> Result<u16> {
        Ok(node.endpoint(&self.end)?.id)
    }

    /// Packets with a foreign source that the router's programs dropped.
    fn dropped(&self, node: &Node) -> Result<u64> {
        node.packets(self.id(node)?, "egress", FOREIGN)
    }

    /// Whether the host behind is answered.
    fn reaches(&self, to: [SocketAddr; 2], expected: bool, when: &str) -> Result<()> {
        wait::all(addresses(HOST)?.into_iter().zip(to), |(source, to)| {
            ensure!(asks(self.host.space()?, source, to)? == expected, "{when}: {source} to {to}, expected {expected}");
            Ok(())
        })
    }
}

/// Leads prefixes to a container.
fn route(node: &Node, prefixes: [&str; 2], end: &Attached) -> Result<()> {
    let [v4, v6] = prefixes;
    ip(node.space(), &format!("route replace {v4} via {}", end.v4()?))?;
    ip(node.space(), &format!("-6 route replace {v6} via {}", end.v6()?))?;
    Ok(())
}

/// Whether a datagram from an address of a namespace is answered.
fn asks(from: &Space, source: IpAddr, to: SocketAddr) -> Result<bool> {
    let socket = from.run(|| UdpSocket::bind(SocketAddr::new(source, 0)))?.with_context(|| format!("bind {source}"))?;
    socket.connect(to).with_context(|| format!("connect {to}"))?;
    socket.set_read_timeout(Some(Duration::from_millis(200)))?;
    let end = Instant::now() + DENIED;
    while Instant::now() < end {
        // An ICMP error is no answer.
        if socket.send(b"ahoy").and_then(|_| socket.recv(&mut [0; 16])).is_ok() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Source of a datagram from a host, as a receiver in `to` sees it.
fn seen_as(to: &Space, address: IpAddr, from: &Space) -> Result<IpAddr> {
    let server = to.run(|| UdpSocket::bind(SocketAddr::new(address, 0)))??;
    server.set_read_timeout(Some(Duration::from_secs(5)))?;
    echo::udp_client(from, server.local_addr()?)?.send(b"who?")?;
    Ok(server.recv_from(&mut [0; 16]).with_context(|| format!("nothing arrives at {address}"))?.1.ip())
}

fn patch(node: &Node, end: &Attached, prefixes: &[&str]) -> Result<()> {
    let list = prefixes.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
    let patch = EndpointPatch { source_prefixes: Some(list), ..EndpointPatch::default() };
    let answer = node.ask(async |client| client.patch_endpoint(&end.id(), &patch).await)?;
    let told: Vec<String> = answer.source_prefixes.iter().map(ToString::to_string).collect();
    ensure!(told == prefixes, "{told:?}");
    Ok(())
}

/// Imports a network policy about the containers of an app.
fn import(node: &Node, app: &str, rules: &str) -> Result<()> {
    let text = format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {app}}}\n\
         spec: {{podSelector: {{matchLabels: {{app: {app}}}}}, {rules}}}\n"
    );
    let import = PolicyImport { file: "test.yaml".to_owned(), text };
    node.ask(async |client| client.import_policy(&import).await).map(drop)
}

fn forget(node: &Node) -> Result<()> {
    let all = PolicyDeleteQuery { all: Some(true), ..PolicyDeleteQuery::default() };
    node.ask(async |client| client.delete_policy(&all).await).map(drop)
}

fn nft(node: &Node, rules: &str) -> Result<()> {
    let mut command = command_in(node.space(), "nft")?;
    command.args(["-f", "-"]);
    run(command, rules.as_bytes(), Duration::from_secs(10))?.ok().map(drop)
}

#[test]
fn a_router_sends_for_the_hosts_behind_it() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let server = Server::attach(node, "server")?;
        let lan = Lan::join(node, &conf(node, "router", &PREFIXES))?;
        let (host, id) = (lan.host.space()?, lan.id(node)?.to_string());
        for (address, behind) in server.end.both()?.into_iter().zip(addresses(HOST)?) {
            echo::tcp(host, server.echo.tcp_at(address), 100_000).context("from the host")?;
            echo::udp(host, server.echo.udp_at(address), 4_000).context("fragments from the host")?;
            for from in [server.space()?, node.space()] {
                echo::tcp(from, lan.echo.tcp_at(behind), 100_000).context("to the host")?;
                echo::udp(from, lan.echo.udp_at(behind), 4_000).context("fragments to the host")?;
            }
        }
        ensure!(lan.dropped(node)? == 0, "{} packets of the host are dropped", lan.dropped(node)?);
        let shown = node.wharf(&["endpoint", "get", &id])?.ok()?;
        ensure!(PREFIXES.iter().all(|prefix| shown.contains(prefix)), "{shown}");
        let shown = node.wharf(&["explain", HOST[0]])?.ok()?;
        ensure!(shown.contains(&format!("endpoint {id} ")) && shown.contains(PREFIXES[0]), "{shown}");
        let checked = node.wharf(&["endpoint", "health", &id])?.ok()?;
        for prefix in PREFIXES {
            let packets = [format!("source-{prefix}"), format!("beside-source-{prefix}")];
            let of = |name: &String| checked.lines().any(|line| line.split_whitespace().next() == Some(name.as_str()));
            ensure!(packets.iter().all(of), "{checked}");
        }
        ensure!(lan.dropped(node)? == 0, "test packets are counted");
        // Addresses next to the prefixes.
        for (foreign, to) in addresses(["10.201.0.0", "fd00:9:0:1::1"])?.into_iter().zip(server.at()?) {
            own_address(lan.router.space()?, foreign)?;
            let before = lan.dropped(node)?;
            ensure!(!asks(lan.router.space()?, foreign, to)?, "{foreign} is answered");
            ensure!(lan.dropped(node)? > before, "packets from {foreign} are not counted");
        }
        [&lan.end, &server.end].into_iter().try_for_each(|end| node.detach(end))
    })?;
    scenario(NodeConfig::default(), |node| {
        let server = Server::attach(node, "server")?;
        let lan = Lan::join(node, &conf(node, "router", &[]))?;
        lan.reaches(server.at()?, false, "without prefixes")?;
        ensure!(lan.dropped(node)? > 0, "the drops are not counted");
        [&lan.end, &server.end].into_iter().try_for_each(|end| node.detach(end))
    })
}

#[test]
fn a_change_takes_effect_on_running_flows() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let server = Server::attach(node, "server")?;
        let lan = Lan::join(node, &conf(node, "router", &PREFIXES))?;
        let id = lan.id(node)?.to_string();
        for (address, source) in server.end.both()?.into_iter().zip(lan.end.both()?) {
            let own = UdpStream::start(lan.router.space()?, server.space()?, address, 500)?;
            let behind = UdpStream::start(lan.host.space()?, server.space()?, address, 500)?;
            patch(node, &lan.end, &[])?;
            let drops = |more: u64| -> Result<()> {
                let goal = lan.dropped(node)? + more;
                wait::until("packets of the host are dropped", || Ok((lan.dropped(node)? >= goal).then_some(())))
            };
            // Packets that were in queues at the answer.
            drops(50)?;
            let received = behind.received();
            drops(100)?;
            ensure!(behind.received() == received, "{source}: a flow of the host goes on without its prefix");
            let list = format!("source-prefixes={}", PREFIXES.join(","));
            node.wharf(&["endpoint", "config", &id, &list])?.ok()?;
            behind.await_more(100)?;
            behind.stop()?;
            own.stop()?.must_be_perfect().context("the router's own flow")?;
        }
        ensure!(node.found_amiss()?.is_empty(), "{:?}", node.found_amiss()?);
        [&lan.end, &server.end].into_iter().try_for_each(|end| node.detach(end))
    })
}

#[test]
fn a_routers_policy_holds_for_the_hosts_behind_it() -> Result<()> {
    scenario(NodeConfig::default().flags(&[CIDRS]), |node| {
        let server = Server::attach(node, "server")?;
        let lan = Lan::join(node, &conf(node, "router", &PREFIXES))?;
        let [v4, v6] = server.at()?;
        let port = v4.port();
        nft(
            node,
            &format!(
                "table inet services {{ chain c {{ type nat hook prerouting priority -100;
                   ip daddr {} udp dport {SERVICE_PORT} dnat ip to {}:{port}
                   ip6 daddr {} udp dport {SERVICE_PORT} dnat ip6 to [{}]:{port}
                 }}
                 }}",
                SERVICES[0],
                v4.ip(),
                SERVICES[1],
                v6.ip(),
            ),
        )?;
        let services = addresses(SERVICES)?.map(|service| SocketAddr::new(service, SERVICE_PORT));
        let hold = |expected: bool, when: &str| -> Result<()> {
            lan.reaches(server.at()?, expected, when)?;
            lan.reaches(services, expected, &format!("{when}, by a service"))
        };
        hold(true, "without a policy")?;
        import(node, "router", "policyTypes: [Egress], egress: []")?;
        hold(false, "isolated")?;
        import(node, "router", "policyTypes: [Egress], egress: [{to: [{podSelector: {matchLabels: {app: server}}}]}]")?;
        hold(true, "with the server allowed")?;
        import(node, "router", "policyTypes: [Egress], egress: [{to: [{podSelector: {matchLabels: {app: other}}}]}]")?;
        hold(false, "with another container allowed")?;
        forget(node)?;
        [&lan.end, &server.end].into_iter().try_for_each(|end| node.detach(end))
    })
}

#[test]
fn others_see_the_address_of_the_host() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let world = World::join(node)?;
        let (server, other) = (Server::attach(node, "server")?, Server::attach(node, "other")?);
        let lan = Lan::join(node, &conf(node, "router", &PREFIXES))?;
        for (host, own) in addresses(HOST)?.into_iter().zip(other.end.both()?) {
            let seen = seen_as(lan.host.space()?, host, other.space()?)?;
            ensure!(seen == own, "the host sees {seen}, not {own}");
        }
        for (address, host) in world.addresses().into_iter().zip(addresses(HOST)?) {
            let seen = seen_as(world.space()?, address, lan.host.space()?)?;
            ensure!(seen == host, "the world sees {seen}, not {host}");
        }
        let hold = |behind: bool, router: bool, third: bool, when: &str| -> Result<()> {
            lan.reaches(server.at()?, behind, when)?;
            let senders = [(&lan.router, &lan.end, router), (&other.sandbox, &other.end, third)];
            for (sandbox, end, expected) in senders {
                for (source, to) in end.both()?.into_iter().zip(server.at()?) {
                    ensure!(asks(sandbox.space()?, source, to)? == expected, "{when}: {source}, expected {expected}");
                }
            }
            Ok(())
        };
        hold(true, true, true, "without a policy")?;
        let blocks = PREFIXES.map(|prefix| format!("{{ipBlock: {{cidr: '{prefix}'}}}}")).join(", ");
        import(node, "server", &format!("policyTypes: [Ingress], ingress: [{{from: [{blocks}]}}]"))?;
        hold(true, false, false, "with the prefixes allowed")?;
        let labels = "policyTypes: [Ingress], ingress: [{from: [{podSelector: {matchLabels: {app: router}}}]}]";
        import(node, "server", labels)?;
        hold(false, true, false, "with the router allowed")?;
        forget(node)?;
        // Ingress rules of the router apply to packets for the host.
        import(node, "router", "policyTypes: [Ingress], ingress: []")?;
        for (source, behind) in other.end.both()?.into_iter().zip(addresses(HOST)?) {
            ensure!(!asks(other.space()?, source, lan.echo.udp_at(behind))?, "{behind} behind an isolated router");
        }
        lan.reaches(server.at()?, true, "out of an isolated ingress")?;
        forget(node)?;
        [&lan.end, &server.end, &other.end].into_iter().try_for_each(|end| node.detach(end))
    })
}

#[test]
fn two_containers_share_a_virtual_address() -> Result<()> {
    const SHARED: [&str; 2] = ["10.200.0.50", "fd00:9::50"];
    const VIRTUAL: [&str; 2] = ["10.200.0.50/32", "fd00:9::50/128"];
    scenario(NodeConfig::default(), |node| {
        let client = Server::attach(node, "client")?;
        let member = |name: &str| -> Result<(Sandbox, Attached, EchoServer)> {
            let sandbox = node.sandbox(name)?;
            let arguments = format!("IgnoreUnknown=1;WHARF_SOURCE_PREFIXES={}", VIRTUAL.join(","));
            let conf = conf(node, name, &["10.250.0.0/16"]);
            let add = node.cni("ADD").of(name, sandbox.path(), "eth0").conf(&conf).env("CNI_ARGS", &arguments);
            let (container, netns) = (name.to_owned(), sandbox.path().to_owned());
            let end = Attached { container, netns, ifname: "eth0".to_owned(), conf, result: add.run()?.result()? };
            ip(sandbox.space()?, "link set lo up")?;
            for address in addresses(SHARED)? {
                own_address(sandbox.space()?, address)?;
            }
            let echo = EchoServer::start(sandbox.space()?)?;
            Ok((sandbox, end, echo))
        };
        let members = [member("one")?, member("two")?];
        for (_, end, _) in &members {
            let told: Vec<String> = node.endpoint(end)?.source_prefixes.iter().map(ToString::to_string).collect();
            ensure!(told == VIRTUAL, "the container's list does not replace the network's: {told:?}");
        }
        for (_, end, echo) in members.iter().chain(members.first()) {
            route(node, VIRTUAL, end)?;
            for address in addresses(SHARED)? {
                echo::tcp(client.space()?, echo.tcp_at(address), 10_000)
                    .with_context(|| format!("by the route to {}", end.container))?;
            }
        }
        let [(_, one, _), (_, two, _)] = &members;
        [one, two, &client.end].into_iter().try_for_each(|end| node.detach(end))
    })
}

#[test]
fn prefixes_of_others_are_refused() -> Result<()> {
    scenario(NodeConfig::default().flags(&[CIDRS]), |node| {
        let _world = World::join(node)?;
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        let end = node.attach_with(&a, "eth0", &conf(node, "a", &PREFIXES))?;
        let [pool4, pool6] = end.both()?;
        let [of_pool4, of_pool6] = [format!("{pool4}/32"), format!("{pool6}/128")];
        let around = format!("{}/8", Ipv4Addr::from_bits(end.v4()?.to_bits() & 0xff00_0000));
        let many: Vec<String> = (0..9).map(|n| format!("172.20.{n}.0/24")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let cases: Vec<(Vec<&str>, &str)> = vec![
            (many, "9 source prefixes, at most 8"),
            (vec!["10.200.0.1/16"], "write 10.200.0.0/16"),
            (vec!["0.0.0.0/0"], "unspecified"),
            (vec!["::/0"], "::/127"),
            (vec!["127.1.0.0/16"], "loopback"),
            (vec!["169.254.7.0/24"], "link-local"),
            (vec!["fe80::/64"], "link-local"),
            (vec!["224.0.0.0/24"], "multicast"),
            (vec!["10.200.0.0/16", "10.200.7.0/24"], "10.200.7.0/24 is in 10.200.0.0/16"),
            (vec![of_pool4.as_str()], "a pool of the agent"),
            (vec![of_pool6.as_str()], "a pool of the agent"),
            (vec![around.as_str()], "a pool of the agent"),
            (vec!["198.18.0.0/16"], "--service-cidr"),
            (vec!["2001:db8:5::/64"], "--service-cidr"),
            (vec!["198.51.100.0/24"], "the node's address 198.51.100.1 on up0"),
            (vec!["2001:db8:7::1/128"], "the node's address 2001:db8:7::1 on up0"),
        ];
        let target = format!("/v1/endpoint/{}", node.endpoint(&end)?.id);
        for (prefixes, words) in cases {
            let conf = node.netconf().with("sourcePrefixes", json!(prefixes));
            let refused = node.cni("ADD").of("b", b.path(), "eth0").conf(&conf).run()?.failure()?;
            ensure!(refused.code == 7 && refused.msg.contains(words), "{prefixes:?}: {refused:?}");
            let answer = node.http("PATCH", &target, Some(&json!({"source_prefixes": prefixes}).to_string()))?;
            ensure!(answer.status == 400 && answer.text().contains(words), "{prefixes:?}: {}", answer.text());
        }
        let refused = |conf: &NetConf, arguments: &str, code: u32, words: &str| -> Result<()> {
            let add = node.cni("ADD").of("b", b.path(), "eth0").conf(conf).env("CNI_ARGS", arguments);
            let refused = add.run()?.failure()?;
            ensure!(refused.code == code && refused.msg.contains(words), "{refused:?}");
            Ok(())
        };
        refused(&node.netconf().with("sourcePrefixes", json!(["10.200.0.0"])), "", 7, "sourcePrefixes[0]")?;
        refused(&node.netconf(), "WHARF_SOURCE_PREFIXES=10.200.0.0/33", 4, "WHARF_SOURCE_PREFIXES")?;
        let put = |keys: Value| -> Result<String> {
            let mut body = json!({"container_id": "b", "ifname": "eth0", "network": "net", "netns": b.path()});
            for (key, value) in keys.as_object().context("an object")? {
                body[key] = value.clone();
            }
            let answer = node.http("PUT", "/v1/endpoint/cni-attachment-id:b:eth0", Some(&body.to_string()))?;
            ensure!(answer.status == 400, "{keys}: {}", answer.text());
            Ok(answer.text())
        };
        let told = put(json!({"chained": true, "ips": ["10.9.0.2"], "source_prefixes": [PREFIXES[0]]}))?;
        ensure!(told.contains("its link may be a bridge"), "{told}");
        let told = put(json!({"ipam": "host-local", "ips": [HOST[0]]}))?;
        ensure!(told.contains("may send from it"), "{told}");
        // Nothing of it was made or changed.
        ensure!(node.endpoints()?.len() == 1);
        let kept: Vec<String> = node.endpoint(&end)?.source_prefixes.iter().map(ToString::to_string).collect();
        ensure!(kept == PREFIXES, "{kept:?}");
        node.detach(&end)
    })
}

#[test]
fn prefixes_outlive_kills_restarts_and_upgrades() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let server = Server::attach(node, "server")?;
        let lan = Lan::join(node, &conf(node, "router", &PREFIXES))?;
        let foreign = addresses(["10.201.0.1", "fd00:a::1"])?;
        for foreign in foreign {
            own_address(lan.router.space()?, foreign)?;
        }
        let hold = |when: &str| -> Result<()> {
            lan.reaches(server.at()?, true, when)?;
            for (foreign, to) in foreign.into_iter().zip(server.at()?) {
                ensure!(!asks(lan.router.space()?, foreign, to)?, "{when}: {foreign} is answered");
            }
            Ok(())
        };
        for next in [false, true, false] {
            if next {
                node.stop_agent()?;
            } else {
                node.kill_agent()?;
            }
            hold("without an agent")?;
            node.set_next_version(next);
            node.start_agent()?;
            node.await_rebuilt()?;
            hold("after the start")?;
            let told = node.endpoint(&lan.end)?.source_prefixes;
            ensure!(told.iter().map(ToString::to_string).eq(PREFIXES), "{told:?}");
            ensure!(node.found_amiss()?.is_empty(), "{:?}", node.found_amiss()?);
        }
        node.wharf(&["endpoint", "regenerate", &lan.id(node)?.to_string(), "--level", "datapath"])?.ok()?;
        hold("regenerated")?;
        [&lan.end, &server.end].into_iter().try_for_each(|end| node.detach(end))
    })
}

#[test]
fn a_successor_inherits_nothing() -> Result<()> {
    scenario(NodeConfig::default().flags(&["--ip-rest-ms=0"]), |node| {
        let server = Server::attach(node, "server")?;
        let lan = Lan::join(node, &conf(node, "router", &PREFIXES))?;
        lan.reaches(server.at()?, true, "before")?;
        let ips = lan.end.both()?;
        node.detach(&lan.end)?;
        node.await_released()?;
        ensure!(node.found_amiss()?.is_empty(), "{:?}", node.found_amiss()?);
        let again = node.netconf().with("args", json!({"cni": {"ips": ips}}));
        // More than the programs that are prepared, so that ids are used again.
        for round in 0..8 {
            let sandbox = node.sandbox(&format!("next{round}"))?;
            let end = node.attach_with(&sandbox, "eth0", &again)?;
            ensure!(node.endpoint(&end)?.source_prefixes.is_empty());
            ip(sandbox.space()?, "link set lo up")?;
            for (source, to) in addresses(INNER)?.into_iter().zip(server.at()?) {
                own_address(sandbox.space()?, source)?;
                ensure!(!asks(sandbox.space()?, source, to)?, "round {round}: {source} is answered");
            }
            ensure!(node.packets(node.endpoint(&end)?.id, "egress", FOREIGN)? > 0, "round {round}: not counted");
            node.detach(&end)?;
            node.await_released()?;
        }
        node.detach(&server.end)
    })
}

#[test]
fn neighbour_messages_about_a_prefix_are_dropped() -> Result<()> {
    const TIMES: u64 = 5;
    scenario(NodeConfig::default(), |node| {
        let lan = Lan::join(node, &conf(node, "router", &PREFIXES))?;
        let own = node.endpoint(&lan.end)?;
        let (me, gateway): (Mac, Mac) = (mac(&own.container_mac)?, mac(&own.host_mac)?);
        let (g4, g6) = (own.gateway4.context("IPv4 gateway")?, own.gateway6.context("IPv6 gateway")?);
        let (inner4, inner6): (Ipv4Addr, Ipv6Addr) = (INNER[0].parse()?, INNER[1].parse()?);
        let arp = |op, sender, target| frame::ethernet(BROADCAST, me, ARP, &frame::arp(op, sender, ([0; 6], target)));
        let advertised = frame::neighbour(136, lan.end.v6()?, g6, inner6, me);
        let frames = [
            ("an ARP answer", arp(2, (me, inner4), g4)),
            ("an ARP question from beside the prefix", arp(1, (me, Ipv4Addr::new(10, 201, 0, 1)), g4)),
            ("a gratuitous ARP", arp(1, (me, inner4), inner4)),
            ("an advertisement", frame::ethernet(gateway, me, IPV6, &advertised)),
        ];
        let socket = PacketSocket::open(lan.router.space()?, "eth0")?;
        for (what, bytes) in frames {
            let before = node.packets(own.id, "egress", "neighbour-spoof")?;
            (0..TIMES).try_for_each(|_| socket.send(&bytes))?;
            let drops = || -> Result<u64> { Ok(node.packets(own.id, "egress", "neighbour-spoof")? - before) };
            wait::until_equal(what, &TIMES, drops)?;
        }
        node.detach(&lan.end)
    })
}
