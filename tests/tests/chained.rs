//! Wharf chained behind another plugin: Debian's `ptp` and `bridge` with `host-local`, run as a runtime runs them.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use wharf_api::{EndpointMode, Health, PolicyImport, RegenerateLevel};
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    cni::{Answer, NetConf},
    crash, echo,
    frame::{self, ARP, BROADCAST, IPV4, IPV6, Mac, PacketSocket},
    icmp::{Ping, ping},
    process::{Finished, bin, command_in, ip, run},
    scenario,
    stream::{TcpFlow, UdpStream},
    wait,
};

/// Where Debian's containernetworking-plugins are.
const PLUGINS: &str = "/usr/lib/cni";
const NETWORK: &str = "chain";
/// The gateways of host-local's ranges.
const GATEWAYS: [&str; 2] = ["10.9.0.1", "fd09::1"];
/// How long a connection that must not be made is waited for: TCP repeats its first packet after a second.
const DENIED: Duration = Duration::from_millis(1_300);

/// The configuration of the plugin that makes the interface.
fn maker(node: &Node, kind: &str) -> Value {
    json!({
        "cniVersion": "1.0.0", "name": NETWORK, "type": kind, "bridge": "cni0", "isGateway": true,
        "ipam": {
            "type": "host-local",
            "dataDir": node.dirs().root.join("host-local"),
            "ranges": [[{"subnet": "10.9.0.0/24"}], [{"subnet": "fd09::/64"}]],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
        },
    })
}

/// Runs the plugin that makes the interface, from its file.
fn make(node: &Node, verb: &str, conf: &Value, sandbox: &Sandbox) -> Result<Finished> {
    let kind = conf["type"].as_str().context("a type")?;
    let program = format!("{PLUGINS}/{kind}");
    ensure!(std::path::Path::new(&program).exists(), "{program} is missing: install containernetworking-plugins");
    let mut command = command_in(node.space(), program)?;
    command.env("CNI_COMMAND", verb).env("CNI_CONTAINERID", sandbox.name()).env("CNI_NETNS", sandbox.path());
    command.env("CNI_IFNAME", "eth0").env("CNI_PATH", PLUGINS).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    run(command, conf.to_string().as_bytes(), Duration::from_secs(20))
}

/// A container behind a chain of two plugins, of which Wharf is the second.
struct Chain {
    sandbox: Sandbox,
    maker: Value,
    /// What the first plugin answered.
    made: Value,
    /// Host side of its link.
    host: String,
}

impl Chain {
    /// Only the first plugin has run.
    fn begin(node: &Node, kind: &str, name: &str) -> Result<Self> {
        let (sandbox, maker) = (node.sandbox(name)?, maker(node, kind));
        let made: Value = serde_json::from_str(&make(node, "ADD", &maker, &sandbox)?.ok()?)?;
        let interfaces = made["interfaces"].as_array().context("interfaces")?;
        let host = interfaces.iter().filter_map(|i| i["name"].as_str()).find(|name| name.starts_with("veth"));
        let host = host.context("no host side")?.to_owned();
        Ok(Self { sandbox, maker, made, host })
    }

    /// Wharf's netconf.
    fn conf(&self, node: &Node) -> NetConf {
        let labels = json!({"cni": {"labels": [{"key": "app", "value": self.sandbox.name()}]}});
        node.netconf().version("1.0.0").with("name", json!(NETWORK)).with("args", labels)
    }

    fn add(&self, node: &Node, conf: &NetConf) -> Result<Answer> {
        let conf = conf.clone().after(&self.made);
        node.cni("ADD").of(self.sandbox.name(), self.sandbox.path(), "eth0").conf(&conf).run()
    }

    /// Both plugins have run.
    fn whole(node: &Node, kind: &str, name: &str) -> Result<(Self, Attached)> {
        let chain = Self::begin(node, kind, name)?;
        let end = chain.attach(node)?;
        Ok((chain, end))
    }

    fn attach(&self, node: &Node) -> Result<Attached> {
        let conf = self.conf(node);
        let result = self.add(node, &conf)?.result()?;
        ensure!(result == self.made, "{result} is not what came in: {}", self.made);
        let (container, netns) = (self.sandbox.name().to_owned(), self.sandbox.path().to_owned());
        Ok(Attached { container, netns, ifname: "eth0".to_owned(), conf, result })
    }

    /// DEL of the first plugin.
    fn unmake(&self, node: &Node) -> Result<()> {
        let mut conf = self.maker.clone();
        conf["prevResult"] = self.made.clone();
        make(node, "DEL", &conf, &self.sandbox)?.ok()?;
        ensure!(!self.has_link(node)?, "{} is still there", self.host);
        Ok(())
    }

    fn has_link(&self, node: &Node) -> Result<bool> {
        Ok(node.space().links()?.contains(&self.host))
    }

    /// What is on the hooks of the link, and whether it has some.
    fn hooks(&self, node: &Node) -> Result<String> {
        let mut told = String::new();
        for what in [&["qdisc"][..], &["filter", "ingress"], &["filter", "egress"]] {
            let mut tc = command_in(node.space(), "tc")?;
            tc.args([what[0], "show", "dev", &self.host]).args(&what[1..]);
            let finished = run(tc, b"", Duration::from_secs(5))?;
            told.push_str(&finished.stdout);
        }
        Ok(told)
    }

    /// The link as the plugin made it: its attributes, addresses and queues, without counters that a packet changes.
    fn picture(&self, node: &Node) -> Result<[String; 3]> {
        // The kernel gives any device a queue's length with a clsact qdisc, and ends an address's check in its own
        // time.
        let passing = ["\\", "qlen", "1000", "tentative"];
        let show = |what: &str| -> Result<String> {
            let told = ip(node.space(), &format!("-o {what} show dev {}", self.host))?.replace('\\', " \\ ");
            Ok(told.split_whitespace().filter(|word| !passing.contains(word)).collect::<Vec<_>>().join(" "))
        };
        Ok([show("link")?, show("addr")?, self.hooks(node)?])
    }

    fn space(&self) -> Result<&wharf_tests::space::Space> {
        self.sandbox.space()
    }
}

/// A container of Wharf's own, with an echo server.
struct Own {
    sandbox: Sandbox,
    end: Attached,
    echo: echo::EchoServer,
}

fn own(node: &Node, name: &str) -> Result<Own> {
    let sandbox = node.sandbox(name)?;
    let labels = json!({"cni": {"labels": [{"key": "app", "value": name}]}});
    let end = node.attach_with(&sandbox, "eth0", &node.netconf().with("args", labels))?;
    let echo = echo::EchoServer::start(sandbox.space()?)?;
    Ok(Own { sandbox, end, echo })
}

fn gateways() -> Result<[IpAddr; 2]> {
    Ok([GATEWAYS[0].parse()?, GATEWAYS[1].parse()?])
}

/// Whether a ping is answered.
fn answers(from: &wharf_tests::space::Space, to: IpAddr) -> Result<bool> {
    Ok(Ping { to, count: 1, payload: 56 }.run(from)?.answered > 0)
}

/// Everybody reaches everybody, in both families.
fn all_talk(node: &Node, c: &Chain, end: &Attached, b: &Own) -> Result<()> {
    let server = echo::EchoServer::start(c.space()?)?;
    for ((to_c, to_b), gateway) in end.both()?.into_iter().zip(b.end.both()?).zip(gateways()?) {
        ping(c.space()?, gateway)?.must_answer().context("to the gateway")?;
        ping(c.space()?, to_b)?.must_answer().context("to a container of Wharf's own")?;
        ping(b.sandbox.space()?, to_c)?.must_answer().context("from a container of Wharf's own")?;
        ping(node.space(), to_c)?.must_answer().context("from the node")?;
        echo::tcp(c.space()?, b.echo.tcp_at(to_b), 100_000).context("TCP to a container of Wharf's own")?;
        echo::tcp(b.sandbox.space()?, server.tcp_at(to_c), 100_000).context("TCP from a container of Wharf's own")?;
        echo::udp(c.space()?, b.echo.udp_at(to_b), 4_000).context("fragments")?;
    }
    Ok(())
}

fn is_well(node: &Node, end: &Attached) -> Result<()> {
    let id = end.id();
    let health = node.ask(async |client| client.endpoint_health(&id).await)?;
    ensure!(health.overall == Health::Ok, "{health:?}");
    node.check(end)?.silent()?;
    ensure!(node.found_amiss()?.is_empty(), "{:?}", node.found_amiss()?);
    Ok(())
}

fn life(kind: &str) -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let b = own(node, "b")?;
        let c = Chain::begin(node, kind, "c")?;
        let before = c.picture(node)?;
        let end = c.attach(node)?;
        let told = node.endpoint(&end)?;
        ensure!(told.mode == EndpointMode::Chained && told.host_ifname == c.host, "{told:?}");
        ensure!(node.wharf(&["endpoint", "get", &end.id()])?.ok()?.contains("chained"), "not told");
        let list: Value = serde_json::from_str(&node.wharf(&["endpoint", "list", "-o", "json"])?.ok()?)?;
        let modes: Vec<_> = list.as_array().context("a list")?.iter().map(|e| e["mode"].as_str()).collect();
        ensure!(modes.contains(&Some("chained")), "{list}");
        all_talk(node, &c, &end, &b)?;
        is_well(node, &end)?;
        let [link, addresses, _] = c.picture(node)?;
        ensure!([&link, &addresses] == [&before[0], &before[1]], "{before:?} became {link} {addresses}");

        // In the reverse order. Until the link goes nothing passes.
        node.detach(&end)?;
        ensure!(c.has_link(node)?, "Wharf removed the other plugin's link");
        for to in end.both()? {
            ensure!(!answers(node.space(), to)?, "{to} is still reached");
        }
        for to in b.end.both()? {
            ensure!(!answers(c.space()?, to)?, "{to} is still reached");
        }
        ensure!(node.endpoints()?.len() == 1 && node.found_amiss()?.is_empty(), "{:?}", node.found_amiss()?);
        node.detach(&end).context("a second DEL")?;
        c.unmake(node)?;
        ensure!(node.found_amiss()?.is_empty(), "{:?}", node.found_amiss()?);
        node.detach(&b.end)
    })
}

#[test]
fn a_life_behind_ptp() -> Result<()> {
    life("ptp")
}

#[test]
fn a_life_behind_bridge() -> Result<()> {
    life("bridge")
}

#[test]
fn two_on_a_bridge_reach_each_other_and_claim_nothing_of_the_other() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let ((a, ea), (b, eb)) = (Chain::whole(node, "bridge", "a")?, Chain::whole(node, "bridge", "b")?);
        for (from, to) in [(&a, &eb), (&b, &ea)] {
            for address in to.both()? {
                ping(from.space()?, address)?.must_answer()?;
            }
        }
        let (own, other) = (node.endpoint(&ea)?, node.endpoint(&eb)?);
        let (me, him) = (frame::mac(&own.container_mac)?, frame::mac(&other.container_mac)?);
        let ((a4, a6), (b4, b6)) = ((ea.v4()?, ea.v6()?), (eb.v4()?, eb.v6()?));
        let (g4, g6): (Ipv4Addr, Ipv6Addr) = (GATEWAYS[0].parse()?, GATEWAYS[1].parse()?);
        let stranger: Mac = [2, 0, 0, 0, 0xbe, 0xef];
        let udp = |from: IpAddr, to: IpAddr| frame::ip(from, to, 17, &frame::udp(from, to, (4000, 9), b"spoof"));
        let arp = |op, sender, target| frame::ethernet(BROADCAST, me, ARP, &frame::arp(op, sender, ([0; 6], target)));
        let says =
            |from, to, target, link| frame::ethernet(him, me, IPV6, &frame::neighbour(136, from, to, target, link));
        let his_link_local = format!(
            "fe80::{:02x}{:02x}:{:02x}ff:fe{:02x}:{:02x}{:02x}",
            him[0] ^ 2,
            him[1],
            him[2],
            him[3],
            him[4],
            him[5]
        )
        .parse()?;
        let socket = PacketSocket::open(a.space()?, "eth0")?;
        for (what, reason, bytes) in [
            ("another's MAC", "invalid-source-mac", frame::ethernet(him, stranger, IPV4, &udp(a4.into(), b4.into()))),
            ("another's IPv4", "invalid-source-ip", frame::ethernet(him, me, IPV4, &udp(b4.into(), b4.into()))),
            ("another's IPv6", "invalid-source-ip", frame::ethernet(him, me, IPV6, &udp(b6.into(), b6.into()))),
            ("the gateway's IPv4", "invalid-source-ip", frame::ethernet(him, me, IPV4, &udp(g4.into(), b4.into()))),
            ("an ARP answer for the gateway", "neighbour-spoof", arp(2, (me, g4), b4)),
            ("an ARP question in another's name", "neighbour-spoof", arp(1, (me, b4), g4)),
            ("an ARP answer with another's MAC", "neighbour-spoof", arp(2, (stranger, a4), b4)),
            ("an advertisement for the gateway", "neighbour-spoof", says(a6, b6, g6, me)),
            ("an advertisement for another's link-local address", "neighbour-spoof", says(a6, b6, his_link_local, me)),
            ("an advertisement with another's MAC", "neighbour-spoof", says(a6, b6, a6, stranger)),
        ] {
            let before = node.packets(own.id, "egress", reason)?;
            socket.send(&bytes)?;
            wait::until_equal(what, &(before + 1), || node.packets(own.id, "egress", reason))?;
        }
        // A true answer passes.
        let before = node.packets(own.id, "egress", "neighbour-spoof")?;
        for bytes in [arp(2, (me, a4), b4), says(a6, b6, a6, me)] {
            socket.send(&bytes)?;
        }
        for address in eb.both()? {
            ping(a.space()?, address)?.must_answer()?;
        }
        ensure!(node.packets(own.id, "egress", "neighbour-spoof")? == before, "a true answer is a lie");
        for (chain, end) in [(&a, &ea), (&b, &eb)] {
            node.detach(end)?;
            chain.unmake(node)?;
        }
        Ok(())
    })
}

/// A policy that selects the containers with this label.
fn policy(name: &str, app: &str, rules: &str) -> String {
    format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {name}}}\n\
         spec: {{podSelector: {{matchLabels: {{app: {app}}}}}, {rules}}}\n---\n"
    )
}

fn import(node: &Node, text: &str) -> Result<()> {
    let import = PolicyImport { file: "test.yaml".to_owned(), text: text.to_owned() };
    node.ask(async |client| client.import_policy(&import).await).map(drop).with_context(|| text.to_owned())
}

/// Whether a connection is made.
fn connects(from: &wharf_tests::space::Space, to: SocketAddr) -> Result<bool> {
    Ok(from.run(|| TcpStream::connect_timeout(&to, DENIED))?.is_ok())
}

fn policed(kind: &str) -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (b, friend) = (own(node, "b")?, own(node, "friend")?);
        let only = |who: &str| format!("[{{podSelector: {{matchLabels: {{app: {who}}}}}}}]");
        // In force before the container is: c takes and sends to its friend alone.
        import(
            node,
            &policy(
                "in",
                "c",
                &format!(
                    "policyTypes: [Ingress, Egress], ingress: [{{from: {0}}}], egress: [{{to: {0}}}]",
                    only("friend")
                ),
            ),
        )?;
        let (c, end) = Chain::whole(node, kind, "c")?;
        let server = echo::EchoServer::start(c.space()?)?;
        for ((to_c, to_b), to_friend) in end.both()?.into_iter().zip(b.end.both()?).zip(friend.end.both()?) {
            ensure!(!connects(c.space()?, b.echo.tcp_at(to_b))?, "c reached {to_b}");
            ensure!(!connects(b.sandbox.space()?, server.tcp_at(to_c))?, "b reached {to_c}");
            echo::tcp(c.space()?, friend.echo.tcp_at(to_friend), 10_000).context("to the friend")?;
            echo::tcp(friend.sandbox.space()?, server.tcp_at(to_c), 10_000).context("from the friend")?;
        }
        let id = node.endpoint(&end)?.id;
        ensure!(node.packets(id, "egress", "policy-denied")? > 0, "c's own hook denied nothing");
        is_well(node, &end)?;
        // The other way round: rules of one of Wharf's own about the chained one.
        import(node, &policy("in", "c", "policyTypes: [Ingress], ingress: [{}]"))?;
        import(node, &policy("b", "b", &format!("policyTypes: [Ingress], ingress: [{{from: {}}}]", only("friend"))))?;
        for (to_c, to_b) in end.both()?.into_iter().zip(b.end.both()?) {
            ensure!(!connects(c.space()?, b.echo.tcp_at(to_b))?, "c reached {to_b}");
            echo::tcp(b.sandbox.space()?, server.tcp_at(to_c), 10_000).context("answers pass")?;
        }
        node.detach(&end)?;
        c.unmake(node)?;
        node.detach(&b.end)?;
        node.detach(&friend.end)
    })
}

#[test]
fn policy_is_in_force_from_the_first_packet_behind_ptp() -> Result<()> {
    policed("ptp")
}

#[test]
fn policy_is_in_force_from_the_first_packet_behind_bridge() -> Result<()> {
    policed("bridge")
}

/// The address of a service in each family.
const SERVICES: [&str; 2] = ["198.18.5.1", "2001:db8:5::1"];
const SERVICE_PORT: u16 = 80;

fn services(kind: &str) -> Result<()> {
    let config = NodeConfig::default().flags(&["--service-cidr=198.18.5.0/24,2001:db8:5::/64"]);
    scenario(config, |node| {
        let db = own(node, "db")?;
        let [v4, v6] = db.end.both()?;
        let port = db.echo.tcp_at(v4).port();
        let rules = format!(
            "table inet services {{ chain c {{ type nat hook prerouting priority -100;
               ip daddr {} tcp dport {SERVICE_PORT} dnat ip to {v4}:{port}
               ip6 daddr {} tcp dport {SERVICE_PORT} dnat ip6 to [{v6}]:{port}
             }}
             }}",
            SERVICES[0], SERVICES[1],
        );
        let mut nft = command_in(node.space(), "nft")?;
        nft.args(["-f", "-"]);
        run(nft, rules.as_bytes(), Duration::from_secs(10))?.ok()?;
        let (c, end) = Chain::whole(node, kind, "c")?;
        let hold = |expected: bool, when: &str| -> Result<()> {
            for service in SERVICES {
                let to = SocketAddr::new(service.parse()?, SERVICE_PORT);
                ensure!(connects(c.space()?, to)? == expected, "{when}: {to}, expected {expected}");
            }
            Ok(())
        };
        // Its IPv6 address is usable.
        gateways()?.into_iter().try_for_each(|gateway| ping(c.space()?, gateway)?.must_answer())?;
        hold(true, "without a policy")?;
        import(node, &policy("out", "c", "policyTypes: [Egress], egress: []"))?;
        hold(false, "isolated")?;
        let to_db = "policyTypes: [Egress], egress: [{to: [{podSelector: {matchLabels: {app: db}}}]}]";
        import(node, &policy("out", "c", to_db))?;
        hold(true, "the pods of the database")?;
        node.detach(&end)?;
        c.unmake(node)?;
        node.detach(&db.end)
    })
}

#[test]
fn a_service_is_judged_behind_its_address_behind_ptp() -> Result<()> {
    services("ptp")
}

#[test]
fn a_service_is_judged_behind_its_address_behind_bridge() -> Result<()> {
    services("bridge")
}

#[test]
fn nothing_is_lost_over_regenerations_and_restarts() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let b = own(node, "b")?;
        let (c, end) = Chain::whole(node, "ptp", "c")?;
        let [to_c, to_b] = [end.v4()?.into(), b.end.v6()?.into()];
        let streams = [
            UdpStream::start(c.space()?, b.sandbox.space()?, to_b, 2_000)?,
            UdpStream::start(b.sandbox.space()?, c.space()?, to_c, 2_000)?,
        ];
        let flow = TcpFlow::start(c.space()?, b.sandbox.space()?, b.end.v4()?.into())?;
        let id = end.id();
        for level in [RegenerateLevel::Policy, RegenerateLevel::Datapath] {
            let patch = wharf_api::EndpointPatch { regenerate: Some(level), ..Default::default() };
            node.ask(async |client| client.patch_endpoint(&id, &patch).await)?;
        }
        node.kill_agent()?;
        streams.iter().try_for_each(|stream| stream.await_more(500))?;
        node.start_agent()?;
        node.await_rebuilt()?;
        node.stop_agent()?;
        node.start_agent()?;
        node.await_rebuilt()?;
        streams.iter().try_for_each(|stream| stream.await_more(500))?;
        flow.await_more(100)?;
        streams.into_iter().try_for_each(|stream| stream.stop()?.must_be_perfect())?;
        flow.stop()?.must_be_whole()?;
        is_well(node, &end)?;
        all_talk(node, &c, &end, &b)?;
        node.detach(&end)?;
        c.unmake(node)?;
        node.detach(&b.end)
    })
}

#[test]
fn del_without_an_agent_leaves_the_link_to_its_plugin() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let b = own(node, "b")?;
        let (c, end) = Chain::whole(node, "ptp", "c")?;
        node.kill_agent()?;
        node.detach(&end)?;
        ensure!(c.has_link(node)?, "the plugin's link is gone");
        ensure!(c.hooks(node)?.contains("wharf/"), "nothing polices the link any more");
        c.unmake(node)?;
        node.start_agent()?;
        wait::until_equal("endpoints", &1, || Ok(node.endpoints()?.len()))?;
        wait::until_equal("findings of the audit", &Vec::new(), || node.found_amiss())?;
        node.detach(&b.end)
    })
}

#[test]
fn what_is_another_plugins_job_is_refused_and_what_is_others_stays() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let c = Chain::begin(node, "ptp", "c")?;
        let before = c.picture(node)?;
        let conf = c.conf(node);
        let ports = json!({"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]});
        for (key, value, word) in [
            ("ipMasq", json!(true), "ipMasq"),
            ("mtu", json!(1400), "MTU"),
            ("pool", json!("default"), "pool"),
            ("sourcePrefixes", json!(["10.200.0.0/16"]), "bridge"),
            ("runtimeConfig", ports, "portmap"),
            ("runtimeConfig", json!({"ips": ["10.9.0.200"]}), "10.9.0.200"),
        ] {
            let failure = c.add(node, &conf.clone().with(key, value))?.failure()?;
            ensure!(failure.code == 7 && failure.text().contains(word), "{key}: {failure:?}");
        }
        ensure!(c.picture(node)? == before, "{before:?} became {:?}", c.picture(node)?);
        // Somebody's own hooks and filter, which stay beside ours and after them.
        // A classic BPF program that matches nothing: not every kernel has other classifiers.
        let filter = ["filter", "add", "dev", &c.host, "ingress", "prio", "7", "protocol", "ip", "bpf", "bytecode"];
        let filter = [&filter[..], &["1,6 0 0 0,"]].concat();
        for arguments in [&["qdisc", "add", "dev", &c.host, "clsact"][..], &filter] {
            let mut tc = command_in(node.space(), "tc")?;
            tc.args(arguments);
            run(tc, b"", Duration::from_secs(5))?.ok()?;
        }
        let limited =
            conf.with("runtimeConfig", json!({"bandwidth": {"ingressRate": 8_000_000, "ingressBurst": 800_000}}));
        c.add(node, &limited)?.result()?;
        let endpoint = node.endpoints()?.pop().context("no endpoint")?;
        ensure!(endpoint.bandwidth.ingress.is_some_and(|limit| limit.rate == 8_000_000), "{endpoint:?}");
        let prefixes = json!({"source_prefixes": ["10.200.0.0/16"]}).to_string();
        let refused = node.http("PATCH", &format!("/v1/endpoint/{}", endpoint.id), Some(&prefixes))?;
        ensure!(refused.status == 400 && refused.text().contains("bridge"), "{}", refused.text());
        for to in gateways()? {
            ping(c.space()?, to)?.must_answer()?;
        }
        ensure!(c.hooks(node)?.contains("pref 7"), "{}", c.hooks(node)?);
        node.cni("DEL").of("c", c.sandbox.path(), "eth0").conf(&c.conf(node)).run()?.silent()?;
        ensure!(c.hooks(node)?.contains("pref 7"), "{}", c.hooks(node)?);
        c.unmake(node)
    })
}

#[test]
fn a_host_side_is_followed_whatever_its_name() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let mut c = Chain::begin(node, "bridge", "c")?;
        let end = c.attach(node)?;
        ip(node.space(), &format!("link set {} down", c.host))?;
        ip(node.space(), &format!("link set {} name renamed0", c.host))?;
        ip(node.space(), "link set renamed0 up")?;
        c.host = "renamed0".to_owned();
        let reached = |node: &Node| ping(node.space(), end.v4()?.into())?.must_answer();
        reached(node)?;
        is_well(node, &end)?;
        node.stop_agent()?;
        node.start_agent()?;
        node.await_rebuilt()?;
        reached(node)?;
        is_well(node, &end)?;
        node.detach(&end)?;
        ensure!(!answers(node.space(), end.v4()?.into())?, "it is open");
        ensure!(!c.hooks(node)?.contains("container"), "{}", c.hooks(node)?);
        c.unmake(node)
    })
}

#[test]
fn a_lost_store_closes_it_whoever_else_lives() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let b = own(node, "b")?;
        let (c, end) = Chain::whole(node, "ptp", "c")?;
        node.kill_agent()?;
        std::fs::remove_file(node.dirs().run.join("state.redb"))?;
        node.start_agent()?;
        for to in end.both()? {
            ensure!(!answers(node.space(), to)?, "{to} is reached");
        }
        ping(node.space(), b.end.v4()?.into())?.must_answer()?;
        node.detach(&end)?;
        c.unmake(node)?;
        node.detach(&b.end)
    })
}

#[test]
fn hooks_that_others_hold_refuse_the_add_and_hold_up_no_del() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let c = Chain::begin(node, "ptp", "c")?;
        let conf = c.conf(node);
        let filter = ["filter", "add", "dev", &c.host, "ingress", "prio", "1", "protocol", "ip", "bpf", "bytecode"];
        let filter = [&filter[..], &["1,6 0 0 0,"]].concat();
        let qdisc = |word: &'static str, kind: &'static str| ["qdisc", word, "dev", &c.host, kind];
        let tc = |arguments: &[&str]| -> Result<()> {
            let mut tc = command_in(node.space(), "tc")?;
            tc.args(arguments);
            run(tc, b"", Duration::from_secs(5))?.ok().map(drop)
        };
        for kind in ["ingress", "clsact"] {
            tc(&qdisc("add", kind))?;
            if kind == "clsact" {
                tc(&filter)?;
            }
            let before = c.hooks(node)?;
            let failure = c.add(node, &conf)?.failure()?;
            node.cni("DEL").of("c", c.sandbox.path(), "eth0").conf(&conf).run()?.silent()?;
            ensure!(c.hooks(node)? == before, "{kind}, {failure:?}: {before} became {}", c.hooks(node)?);
            ensure!(node.endpoints()?.is_empty() && node.found_amiss()?.is_empty(), "{:?}", node.found_amiss()?);
            tc(&qdisc("del", kind))?;
        }
        c.add(node, &conf)?.result()?;
        // Between the two DELs nobody takes the filter off that keeps the link closed.
        node.cni("DEL").of("c", c.sandbox.path(), "eth0").conf(&conf).run()?.silent()?;
        node.stop_agent()?;
        let refused = cleanup(node, &[])?;
        node.start_agent()?;
        ensure!(refused.code() == 1 && refused.stderr.contains(&c.host), "{}", refused.describe());
        c.unmake(node)
    })
}

/// Runs `wharf-agent cleanup`.
fn cleanup(node: &Node, flags: &[&str]) -> Result<Finished> {
    let mut command = node.command(bin("wharf-agent")?)?;
    command.arg("cleanup").args(node.dirs().flags()).args(flags).env("NO_COLOR", "1");
    run(command, b"", wait::PATIENCE)
}

#[test]
fn tcx_nodes_attach_filters_there_and_cleanup_takes_them_off() -> Result<()> {
    let mut node = Node::start(NodeConfig::default().flags(&["--attach-mode", "tcx"]))?;
    let c = Chain::begin(&node, "ptp", "c")?;
    let before = c.picture(&node)?;
    let end = c.attach(&node)?;
    for to in gateways()? {
        ping(c.space()?, to)?.must_answer()?;
    }
    is_well(&node, &end)?;
    node.kill_agent()?;
    let refused = cleanup(&node, &[])?;
    ensure!(refused.code() == 1 && refused.stderr.contains(&c.host), "it lives: {}", refused.describe());
    cleanup(&node, &["--force"])?.ok()?;
    ensure!(c.picture(&node)? == before, "{before:?} became {:?}", c.picture(&node)?);
    c.unmake(&node)
}

/// Points that an ADD and a DEL pass, each once, which are this run's. What the agent does by its own time is not
/// theirs.
fn points(node: &mut Node, c: &Chain) -> Result<[Vec<String>; 2]> {
    ensure!(node.start_armed_agent()?, "it died without a wish");
    node.await_rebuilt()?;
    crash::forget_trace(node.dirs())?;
    let end = c.attach(node)?;
    let of_add = crash::trace(node.dirs())?;
    crash::forget_trace(node.dirs())?;
    node.detach(&end)?;
    wait::until_equal("endpoints", &0, || Ok(node.endpoints()?.len()))?;
    let of_del = crash::trace(node.dirs())?;
    node.stop_agent()?;
    let once = |passed: Vec<String>| {
        let own = passed.into_iter().filter(|point| !["drain/", "queue/"].iter().any(|room| point.starts_with(room)));
        own.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    let (of_add, of_del) = (once(of_add), once(of_del));
    println!("points of an ADD: {of_add:?}, of a DEL: {of_del:?}");
    ensure!(of_add.len() >= 15 && of_del.len() >= 10, "{} points of an ADD, {} of a DEL", of_add.len(), of_del.len());
    Ok([crash::share(of_add)?, crash::share(of_del)?])
}

#[test]
fn a_kill_between_any_two_steps_leaves_all_or_nothing() -> Result<()> {
    // No programs ahead of need, which pass the same points.
    let flags = ["--node-name", "quay", "--prepared-programs", "0", "--health-interval-ms", "0"];
    scenario(NodeConfig { flags: flags.map(str::to_owned).to_vec(), toml: None }, |node| {
        node.stop_agent()?;
        let c = Chain::begin(node, "ptp", "first")?;
        let [of_add, of_del] = points(node, &c)?;
        c.unmake(node)?;
        for (at, point) in of_add.iter().enumerate() {
            let c = Chain::begin(node, "ptp", &format!("a{at}"))?;
            let before = c.picture(node)?;
            ensure!(node.start_armed_agent()?, "{point}: it died before the ADD");
            node.await_rebuilt()?;
            crash::wish(node.dirs(), point)?;
            let conf = c.conf(node).after(&c.made);
            let call = node.cni("ADD").of(c.sandbox.name(), c.sandbox.path(), "eth0").conf(&conf).ready()?;
            let add = std::thread::spawn(move || call.run());
            node.await_crash().with_context(|| point.clone())?;
            crash::forget_wish(node.dirs())?;
            node.start_agent()?;
            node.await_rebuilt()?;
            let answer = add.join().map_err(|_| anyhow::anyhow!("the ADD panicked"))??;
            // The shim may have asked the next agent again.
            match answer.result() {
                Ok(_) => is_well_and_goes(node, &c)?,
                Err(_) if node.endpoints()?.is_empty() => {
                    ensure!(c.picture(node)? == before, "{point}: {before:?} became {:?}", c.picture(node)?);
                }
                // It had been stored: the runtime's DEL comes.
                Err(_) => is_well_and_goes(node, &c)?,
            }
            ensure!(node.found_amiss()?.is_empty(), "{point}: {:?}", node.found_amiss()?);
            node.stop_agent()?;
            c.unmake(node)?;
        }
        for (at, point) in of_del.iter().enumerate() {
            let c = Chain::begin(node, "ptp", &format!("d{at}"))?;
            ensure!(node.start_armed_agent()?, "{point}: it died at the start");
            let end = c.attach(node)?;
            node.await_rebuilt()?;
            crash::wish(node.dirs(), point)?;
            let conf = end.conf.clone().after(&end.result);
            let call = node.cni("DEL").of(c.sandbox.name(), c.sandbox.path(), "eth0").conf(&conf).ready()?;
            let del = std::thread::spawn(move || call.run());
            node.await_crash().with_context(|| point.clone())?;
            crash::forget_wish(node.dirs())?;
            ensure!(c.has_link(node)?, "{point}: the plugin's link is gone");
            ensure!(
                !answers(node.space(), end.v4()?.into())? || c.hooks(node)?.contains("from_container"),
                "{point}: it is open"
            );
            node.start_agent()?;
            del.join().map_err(|_| anyhow::anyhow!("the DEL panicked"))??.silent()?;
            wait::until_equal("endpoints", &0, || Ok(node.endpoints()?.len()))?;
            wait::until_equal("findings of the audit", &Vec::new(), || node.found_amiss())?;
            ensure!(c.has_link(node)?, "{point}: the plugin's link is gone");
            ensure!(!answers(node.space(), end.v4()?.into())?, "{point}: it is open");
            node.stop_agent()?;
            c.unmake(node)?;
        }
        node.start_agent()
    })
}

/// What an ADD left that was not answered, or was: whole, and gone with its DEL but for the closed link, which the next
/// ADD opens.
fn is_well_and_goes(node: &Node, c: &Chain) -> Result<()> {
    for to in gateways()? {
        ping(c.space()?, to)?.must_answer()?;
    }
    node.cni("DEL").of(c.sandbox.name(), c.sandbox.path(), "eth0").conf(&c.conf(node)).run()?.silent()?;
    ensure!(c.has_link(node)?, "the plugin's link is gone");
    Ok(())
}
