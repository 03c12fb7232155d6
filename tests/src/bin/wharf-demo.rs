//! The main job on real traffic, in a network namespace of its own: start, attach, talk, regenerate under load, delete,
//! nothing left. The exit status says whether all of it held.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpStream},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use caps::{CapSet, Capability::*};
use serde_json::json;
use wharf_api::{EndpointPatch, HealthState, PolicyExplanation, PolicyVerdict, ProxyState, RegenerateLevel};
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    cluster::{Container, Nodes, THREE},
    echo::{self, EchoServer},
    icmp::{Ping, ping},
    process::Finished,
    programs,
    report::{Report, Style},
    stream::{TcpFlow, UdpStream},
    wait,
    web::{WebServer, get},
    world::{NODE, World},
};

type Stdout = Report<io::Stdout>;

/// Packets each second of each stream while an endpoint regenerates.
const RATE: u32 = 2_000;
/// Time for Envoy's start.
const ENVOY_LIMIT: Duration = Duration::from_secs(8);
/// Regenerations under load.
const REGENERATIONS: usize = 20;

/// A container of the demo and its endpoint.
struct Ship {
    sandbox: Sandbox,
    endpoint: Attached,
}

fn main() -> ExitCode {
    let mut report = Report::new(io::stdout(), Style::detect());
    match demo(&mut report).and_then(|()| report.end()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("wharf-demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn demo(report: &mut Stdout) -> Result<()> {
    report
        .line("Wharf: each container gets an address, BPF programs and maps of its own, and leaves nothing behind.")?;
    report
        .line("Everything here happens in network namespaces that end with this demo; your network is not touched.")?;
    if cfg!(debug_assertions) {
        report.line("Times are of the unoptimised build.")?;
    }

    report.heading("1. A node: a network namespace with an agent in it")?;
    let Some(mut node) = start(report)? else { return Ok(()) };
    // Without Envoy, each check of requests would wait in vain.
    if report.check("Envoy serves", await_envoy(&node))?.is_none() {
        return Ok(());
    }

    report.heading("2. Three containers, attached through wharf-cni by the CNI protocol")?;
    let mut ships = Vec::new();
    for name in ["brigantine", "schooner", "yawl"] {
        ships.extend(attach(report, &node, name)?);
    }

    report.heading("3. They talk: to each other, to the node and to other networks, IPv4 and IPv6")?;
    if let [a, b, c] = ships.as_slice() {
        talk(report, a, b)?;
        talk(report, b, c)?;
        talk(report, c, a)?;
        talk_to_node(report, &node, a)?;
        talk_to_the_world(report, &node, a)?;

        report.heading("4. One endpoint gets new programs, again and again, under load")?;
        regenerate(report, &node, a, b, c)?;

        report.heading("5. A policy: one container may reach another, nobody else may")?;
        police(report, &node, a, b, c)?;

        report.heading("6. A policy about requests, which Envoy judges")?;
        judge_requests(report, &node, a, c)?;
    }

    report.heading("7. Three more nodes: two on one network, one behind a router")?;
    cluster(report)?;

    report.heading("8. What the operator sees")?;
    show(report, &node, &["status"])?;
    show(report, &node, &["endpoint", "list"])?;

    report.heading("9. The containers go, and nothing stays")?;
    for ship in &ships {
        let start = Instant::now();
        let gone = node.detach(&ship.endpoint);
        report.check(&format!("DEL {}", ship.sandbox.name()), gone.map(|()| ((), took(start))))?;
    }
    nothing_left(report, &mut node)?;
    if !report.all_held() {
        report.shown("the agent's log", &node.log())?;
    }
    Ok(())
}

fn start(report: &mut Stdout) -> Result<Option<Node>> {
    let flags = ["--node-name", "demo", "--health-interval-ms", "0"];
    let config = NodeConfig { flags: flags.map(str::to_owned).to_vec(), toml: None };
    let begin = Instant::now();
    let outcome = has_capabilities().and_then(|()| config.with_envoy()).and_then(Node::start).and_then(|node| {
        let took = took(begin);
        let status = node.ask(async |c| c.status().await)?;
        ensure!(status.serving, "the agent says it does not serve: {:?}", status.components);
        let finding = format!(
            "version {}, kernel {}, programs attached by {}, ready {took}",
            status.version, status.kernel.release, status.kernel.attach_mode
        );
        Ok((node, finding))
    });
    report.check("wharf-agent serves", outcome)
}

/// What the demo and its agent need of root's rights; containers often lack some.
fn has_capabilities() -> Result<()> {
    let has = caps::read(None, CapSet::Effective).context("read the capabilities of the demo")?;
    let needed = [CAP_SYS_ADMIN, CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF, CAP_PERFMON, CAP_CHOWN, CAP_SETUID, CAP_SETGID];
    let lacks: Vec<_> = needed.iter().filter(|one| !has.contains(one)).map(ToString::to_string).collect();
    ensure!(
        lacks.is_empty(),
        "the demo lacks {}: run it as root, and in a container with these capabilities (podman and docker: --privileged)",
        lacks.join(", ")
    );
    Ok(())
}

/// Waits until Envoy is connected to the agent, and gives the reason when it is not.
fn await_envoy(node: &Node) -> Result<((), String)> {
    let mut last = None;
    let version = wait::until_within(ENVOY_LIMIT, "Envoy to connect to the agent", || {
        let view = node.ask(async |client| client.proxy().await)?;
        if view.restarts > 1 {
            bail!("Envoy does not run: {}", view.last_error.unwrap_or_default());
        }
        let serves = view.state == ProxyState::Serving;
        last = view.last_error.clone();
        Ok(serves.then(|| view.version.unwrap_or_default()))
    });
    version.map(|version| ((), version)).map_err(|error| match last {
        Some(why) => error.context(why),
        None => error.context("see the agent's log for Envoy's messages"),
    })
}

fn attach(report: &mut Stdout, node: &Node, name: &str) -> Result<Option<Ship>> {
    let outcome = node.sandbox(name).and_then(|sandbox| {
        let begin = Instant::now();
        let endpoint = node.attach(&sandbox)?;
        let took = took(begin);
        let [v4, v6] = endpoint.both()?;
        let finding = format!("{} {v4} {v6}, {took}", endpoint.ifname);
        Ok((Ship { sandbox, endpoint }, finding))
    });
    report.check(&format!("ADD {name}"), outcome)
}

fn talk(report: &mut Stdout, from: &Ship, to: &Ship) -> Result<()> {
    let title = format!("{} \u{2192} {}", from.sandbox.name(), to.sandbox.name());
    let server = EchoServer::start(to.sandbox.space()?)?;
    for address in to.endpoint.both()? {
        report.check(&format!("{title} {}", family(address)), exchange(from, &server, address))?;
    }
    Ok(())
}

fn talk_to_node(report: &mut Stdout, node: &Node, ship: &Ship) -> Result<()> {
    let server = EchoServer::start(node.space())?;
    for address in ship.endpoint.gateways()? {
        let title = format!("{} \u{2192} node {}", ship.sandbox.name(), family(address));
        report.check(&title, exchange(ship, &server, address))?;
    }
    let server = EchoServer::start(ship.sandbox.space()?)?;
    for address in ship.endpoint.both()? {
        let outcome = (|| {
            ping(node.space(), address)?.must_answer()?;
            echo::tcp(node.space(), server.tcp_at(address), 1 << 20)?;
            echo::udp(node.space(), server.udp_at(address), 8_000)?;
            Ok(((), "ping, TCP 1 MiB, UDP 8000 bytes in fragments".to_owned()))
        })();
        report.check(&format!("node \u{2192} {} {}", ship.sandbox.name(), family(address)), outcome)?;
    }
    Ok(())
}

/// A network behind the node, which has no route back to any container: it sees the node's address, and reaches a
/// container by its published port.
fn talk_to_the_world(report: &mut Stdout, node: &Node, ship: &Ship) -> Result<()> {
    let world = World::join(node)?;
    let harbour = node.sandbox("cutter")?;
    let server = EchoServer::start(harbour.space()?)?;
    let port = |protocol: &str, to: u16| json!({"hostPort": 8080, "containerPort": to, "protocol": protocol});
    let [tcp, udp] = [server.tcp_at(world.addresses()[0]).port(), server.udp_at(world.addresses()[0]).port()];
    let ports = json!({"portMappings": [port("tcp", tcp), port("udp", udp)]});
    let published = node.attach_with(&harbour, "eth0", &node.netconf().with("runtimeConfig", ports))?;
    for address in NODE {
        let to = SocketAddr::new(address.parse()?, 8080);
        let outcome = (|| {
            echo::tcp(world.space()?, to, 1 << 20)?;
            echo::udp(world.space()?, to, 1_000)?;
            Ok(((), "TCP 1 MiB, UDP 1000 bytes".to_owned()))
        })();
        report.check(&format!("world \u{2192} port 8080 of the node \u{2192} cutter {}", family(to.ip())), outcome)?;
    }
    node.detach(&published)?;
    for address in world.addresses() {
        report.check(
            &format!("{} \u{2192} world {}", ship.sandbox.name(), family(address)),
            exchange(ship, world.echo(), address),
        )?;
    }
    Ok(())
}

/// Ping, plain and in fragments; TCP; UDP, plain and in fragments.
fn exchange(from: &Ship, server: &EchoServer, address: IpAddr) -> Result<((), String)> {
    let space = from.sandbox.space()?;
    ping(space, address)?.must_answer()?;
    Ping { to: address, count: 1, payload: 4_000 }.run(space)?.must_answer()?;
    echo::tcp(space, server.tcp_at(address), 1 << 20)?;
    echo::udp(space, server.udp_at(address), 1_000)?;
    echo::udp(space, server.udp_at(address), 8_000)?;
    Ok(((), "ping 56 and 4000 bytes, TCP 1 MiB, UDP 1000 and 8000 bytes".to_owned()))
}

/// `b` regenerates while it receives from `a`, sends to `c`, and answers a TCP client.
fn regenerate(report: &mut Stdout, node: &Node, a: &Ship, b: &Ship, c: &Ship) -> Result<()> {
    let (from, through, to) = (a.sandbox.space()?, b.sandbox.space()?, c.sandbox.space()?);
    let streams = (
        UdpStream::start(from, through, b.endpoint.v4()?.into(), RATE)?,
        UdpStream::start(through, to, c.endpoint.v6()?.into(), RATE)?,
        TcpFlow::start(from, through, b.endpoint.v6()?.into())?,
    );
    let outcome = renew(node, b, &streams.0);
    let name = b.sandbox.name();
    report.check(&format!("{name} regenerated {REGENERATIONS} times"), outcome)?;
    let (into, out_of, tcp) = (streams.0.stop()?, streams.1.stop()?, streams.2.stop()?);
    for (title, counts) in [("received over IPv4", into), ("sent over IPv6", out_of)] {
        let finding = format!("{} packets, {} lost, {} out of order", counts.sent, counts.lost(), counts.reordered);
        let held = counts.must_be_perfect().map(|()| ((), finding));
        report.check(&format!("UDP that {name} {title}"), held)?;
    }
    let finding = format!("{} exchanges on one connection, the longest {}", tcp.exchanges, millis(tcp.longest));
    report.check(&format!("TCP with {name}"), tcp.must_be_whole().map(|()| ((), finding)))?;
    Ok(())
}

fn renew(node: &Node, ship: &Ship, load: &UdpStream) -> Result<((), String)> {
    let id = ship.endpoint.id();
    let link = node.endpoint(&ship.endpoint)?.host_ifname;
    let patch = EndpointPatch { regenerate: Some(RegenerateLevel::Datapath), ..EndpointPatch::default() };
    let before = programs::attached(node.space(), &link)?;
    let mut last = before.clone();
    for round in 1..=REGENERATIONS {
        node.ask(async |client| client.patch_endpoint(&id, &patch).await).with_context(|| format!("round {round}"))?;
        let now = programs::attached(node.space(), &link)?;
        ensure!(now != last, "the programs on {link} are still {last:?} after round {round}");
        last = now;
        // Traffic between two replacements, so that every set of programs has carried some.
        load.await_more(100)?;
    }
    Ok(((), format!("programs in the kernel: {} \u{2192} {}", ids(&before), ids(&last))))
}

/// Only `b` may reach `c`.
fn police(report: &mut Stdout, node: &Node, a: &Ship, b: &Ship, c: &Ship) -> Result<()> {
    const POLICY: &str = "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: harbour}, spec: {podSelector: \
        {matchLabels: {app: db}}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]}}";
    let [from, friend, to] = [a, b, c].map(|ship| ship.sandbox.name());
    let labelled = [(b, "web"), (c, "db")].into_iter().try_for_each(|(ship, app)| {
        let patch = EndpointPatch { labels: Some(vec![format!("k8s:app={app}")]), ..EndpointPatch::default() };
        node.ask(async |client| client.patch_endpoint(&ship.endpoint.id(), &patch).await).map(drop)
    });
    let imported = labelled.and_then(|()| import(node, POLICY));
    if report.check(&format!("only {friend} may reach {to}"), imported)?.is_none() {
        return forget(report, node);
    }
    let server = EchoServer::start(c.sandbox.space()?)?;
    for address in c.endpoint.both()? {
        let family = family(address);
        let target = server.tcp_at(address);
        let allowed = echo::tcp(b.sandbox.space()?, target, 1 << 20).map(|()| ((), "TCP 1 MiB".to_owned()));
        report.check(&format!("{friend} \u{2192} {to} {family}"), allowed)?;
        let denied = a.sandbox.space()?.run(|| TcpStream::connect_timeout(&target, Duration::from_millis(500)))?;
        let told = denied_by(node, a, c).and_then(|rule| match denied {
            Ok(_) => bail!("connected"),
            Err(_) => Ok(((), format!("dropped: {rule} isolates {to}, and no rule allows it"))),
        });
        report.check(&format!("{from} \u{2192} {to} {family}"), told)?;
    }
    forget(report, node)
}

/// Imports a policy, and waits until it is in force.
fn import(node: &Node, policy: &str) -> Result<((), String)> {
    let body = json!({"file": "harbour.yaml", "text": policy}).to_string();
    let begin = Instant::now();
    let answer = node.http("PUT", "/v1/policy", Some(&body))?;
    ensure!(answer.status == 200, "{}", String::from_utf8_lossy(&answer.body));
    node.wharf(&["policy", "wait", "--timeout", "8s"]).and_then(Finished::ok)?;
    Ok(((), format!("in force after {}", millis(begin.elapsed()))))
}

fn forget(report: &mut Stdout, node: &Node) -> Result<()> {
    let gone = node.wharf(&["policy", "delete", "--all"]).and_then(Finished::ok);
    report.check("the policy is deleted", gone.map(|_| ((), String::new())))?;
    Ok(())
}

/// `to` has the label that [`police`] gave it.
fn judge_requests(report: &mut Stdout, node: &Node, from: &Ship, to: &Ship) -> Result<()> {
    const POLICY: &str = "{apiVersion: cilium.io/v2, kind: CiliumClusterwideNetworkPolicy, metadata: {name: requests}, spec: \
        {endpointSelector: {matchLabels: {app: db}}, ingress: [{toPorts: [{ports: [{port: '80', protocol: TCP}], \
        rules: {http: [{method: GET, path: '/public.*'}]}}]}]}}";
    let server = WebServer::start(to.sandbox.space()?, 80)?;
    let [client, name] = [from, to].map(|ship| ship.sandbox.name());
    if report.check(&format!("{name} serves GET /public alone"), import(node, POLICY))?.is_none() {
        return forget(report, node);
    }
    for (path, status) in [("/public/index.html", 200), ("/private", 403)] {
        for address in to.endpoint.both()? {
            let answer = get(from.sandbox.space()?, SocketAddr::new(address, 80), path).and_then(|answer| {
                ensure!(answer == status, "{answer}");
                Ok(((), if status == 200 { "200, by the server" } else { "403, by Envoy" }.to_owned()))
            });
            report.check(&format!("{client} GET {path} {}", family(address)), answer)?;
        }
    }
    drop(server);
    forget(report, node)?;
    // Connections that end have some seconds for it.
    wait::until("the way to Envoy to be taken away", || Ok(node.found_amiss()?.is_empty().then_some(())))
}

/// The policy that `wharf policy explain` names.
fn denied_by(node: &Node, from: &Ship, to: &Ship) -> Result<String> {
    let [from, to] = [from, to].map(|ship| ship.endpoint.v4().map(|ip| ip.to_string()));
    let asked = format!("/v1/policy/explain?from={}&to={}&port=80", from?, to?);
    let answer: PolicyExplanation = serde_json::from_slice(&node.http("GET", &asked, None)?.body)?;
    ensure!(answer.verdict == PolicyVerdict::Deny, "{answer:?}");
    answer.ingress.and_then(|judged| judged.isolated_by.into_iter().next()).context("a policy that isolates")
}

fn ids(programs: &[Vec<u32>; 2]) -> String {
    programs.iter().flatten().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn show(report: &mut Stdout, node: &Node, arguments: &[&str]) -> Result<()> {
    let outcome = node.wharf(arguments).and_then(Finished::ok);
    let call = format!("wharf {}", arguments.join(" "));
    match outcome {
        Ok(text) => report.shown(&call, &text),
        Err(error) => report.check::<()>(&call, Err(error)).map(|_| ()),
    }
}

fn nothing_left(report: &mut Stdout, node: &mut Node) -> Result<()> {
    let audit = node.wharf(&["audit"]).and_then(|finished| {
        ensure!(finished.status.success(), "{}", finished.describe());
        Ok(((), "empty".to_owned()))
    });
    report.check("wharf audit", audit)?;
    let left = node.left_behind().and_then(|left| {
        ensure!(left.is_empty(), "{}", left.join("\n"));
        Ok(((), "no interfaces, no attached programs, no pins, no endpoints, no leases".to_owned()))
    });
    report.check("kernel, bpffs and store", left)?;
    report.check("the agent ends in good order", node.finish().map(|()| ((), String::new())))?;
    Ok(())
}

/// A native route, the overlay, and the health of the other nodes.
fn cluster(report: &mut Stdout) -> Result<()> {
    let begin = Instant::now();
    let joined = Nodes::join(THREE, "auto").and_then(|mut joined| {
        joined.set_health(true);
        joined.nodes.iter_mut().try_for_each(Node::start_agent)?;
        joined.write(&joined.rows()?)?;
        Ok((joined, took(begin)))
    });
    let Some(joined) = report.check("three agents follow one list of nodes", joined)? else { return Ok(()) };
    let Some(joined) = talk_between_nodes(report, joined)? else { return Ok(()) };
    let ended = joined.end_without_health().map(|()| ((), String::new()));
    report.check("nothing is left on the three nodes", ended).map(drop)
}

fn talk_between_nodes(report: &mut Stdout, joined: Nodes) -> Result<Option<Nodes>> {
    let [a, b, c] = joined.nodes.as_slice() else { bail!("{} nodes", joined.nodes.len()) };
    let started = [(a, "one"), (b, "two"), (c, "three")].map(|(node, name)| Container::start(node, name));
    let [one, two, three] = started;
    let started = one.and_then(|one| Ok(([one, two?, three?], "one, two, three".to_owned())));
    let Some(containers) = report.check("a container on each", started)? else { return Ok(None) };
    let [one, two, three] = &containers;
    for (to, way) in [(two, "by a native route"), (three, "by the overlay")] {
        for address in to.end.both()? {
            let done = echo::tcp(one.space()?, to.echo.tcp_at(address), 1 << 20)
                .and_then(|()| echo::udp(one.space()?, to.echo.udp_at(address), 4_000))
                .map(|()| ((), format!("TCP 1 MiB, UDP 4000 bytes, {way}")));
            report.check(&format!("from node a to {address}, {}", family(address)), done)?;
        }
    }
    let others = wait::until("each node to answer the probes of node a", || {
        let all = a.ask(async |client| client.health().await)?.nodes;
        Ok((all.len() == THREE && all.iter().all(|h| h.state == HealthState::Ok)).then_some(((), String::new())))
    });
    report.check("node a probes the others and their health endpoints", others)?;
    show(report, a, &["cluster", "nodes"])?;
    show(report, a, &["health", "status"])?;
    for (node, container) in joined.nodes.iter().zip(&containers) {
        node.detach(&container.end)?;
    }
    Ok(Some(joined))
}

fn family(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "IPv4" } else { "IPv6" }
}

fn took(since: Instant) -> String {
    format!("in {}", millis(since.elapsed()))
}

fn millis(duration: Duration) -> String {
    format!("{:.1} ms", duration.as_secs_f64() * 1e3)
}
