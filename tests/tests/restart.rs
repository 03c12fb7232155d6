//! The agent goes and comes back; the containers do not notice.

use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
    agent::Dirs,
    crash,
    echo::EchoServer,
    frame::{self, PacketSocket},
    http,
    icmp::ping,
    programs, scenario,
    stream::{TcpFlow, UdpStream},
    wait,
};

fn two(node: &Node) -> Result<[(Sandbox, Attached); 2]> {
    let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
    let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
    Ok([(a, ea), (b, eb)])
}

/// What of an endpoint must be the same after a restart.
fn facts(node: &Node) -> Result<Vec<String>> {
    let fact = |e: &wharf_api::Endpoint| {
        let w = (e.id, e.epoch, &e.container_id, &e.ifname, &e.network, e.ipv4, e.ipv6, e.ifindex);
        format!("{w:?} {:?}", (&e.container_mac, &e.host_mac, e.identity, &e.labels, e.mtu, &e.pool, e.created_unix_ms))
    };
    let mut facts: Vec<String> = node.endpoints()?.iter().map(fact).collect();
    facts.sort_unstable();
    Ok(facts)
}

fn all_ready(node: &Node) -> Result<()> {
    wait::until("every endpoint to be ready", || {
        let all = node.endpoints()?;
        Ok(all.iter().all(|e| e.state == wharf_api::EndpointState::Ready).then_some(()))
    })
}

/// Traffic through a way for the agent to go and come back; nothing may be lost, nothing forgotten.
fn traffic_survives(go: fn(&mut Node) -> Result<()>) -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (b, eb)] = two(node)?;
        let (sa, sb) = (a.space()?, b.space()?);
        let before = facts(node)?;
        let v4 = UdpStream::start(sa, sb, eb.v4()?.into(), 2000)?;
        let v6 = UdpStream::start(sb, sa, ea.v6()?.into(), 2000)?;
        let from_node = UdpStream::start(node.space(), sb, eb.v4()?.into(), 500)?;
        let tcp = TcpFlow::start(sa, sb, eb.v6()?.into())?;
        for _ in 0..3 {
            go(node)?;
            v4.await_more(200).context("while no agent runs")?;
            tcp.await_more(20).context("while no agent runs")?;
            node.start_agent()?;
            v6.await_more(200)?;
            all_ready(node)?;
            ensure!(facts(node)? == before, "{before:#?}\nbecame\n{:#?}", facts(node)?);
        }
        for (what, stream) in [("IPv4", v4), ("IPv6", v6), ("from the node", from_node)] {
            stream.stop()?.must_be_perfect().context(what)?;
        }
        tcp.stop()?.must_be_whole()?;
        node.check(&ea)?.silent()?;
        let left: Vec<_> = node.audit()?.findings;
        ensure!(left.is_empty(), "{left:?}");
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn traffic_never_stops_when_the_agent_is_killed_and_restarted() -> Result<()> {
    traffic_survives(Node::kill_agent)
}

#[test]
fn traffic_never_stops_when_the_agent_is_stopped_and_restarted() -> Result<()> {
    traffic_survives(Node::stop_agent)
}

/// An agent that brings other programs replaces those of the one before; one that brings the same leaves them.
#[test]
fn traffic_never_stops_when_the_agent_is_upgraded() -> Result<()> {
    /// Programs with log records are other programs.
    const OTHER_PROGRAMS: &str = "--debug-programs";
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (b, eb)] = two(node)?;
        let (sa, sb) = (a.space()?, b.space()?);
        let v4 = UdpStream::start(sa, sb, eb.v4()?.into(), 1000)?;
        let v6 = UdpStream::start(sb, sa, ea.v6()?.into(), 1000)?;
        let tcp = TcpFlow::start(sa, sb, eb.v4()?.into())?;
        let link = node.endpoint(&ea)?.host_ifname;
        let mut there = programs::attached(node.space(), &link)?;
        for (other, changes) in [(false, false), (true, true), (false, true), (false, false)] {
            node.kill_agent()?;
            node.set_flag(OTHER_PROGRAMS, other);
            node.start_agent()?;
            all_ready(node)?;
            v4.await_more(100)?;
            v6.await_more(100)?;
            let now = programs::attached(node.space(), &link)?;
            ensure!((now != there) == changes, "other programs {other}: {there:?} became {now:?}");
            there = now;
        }
        v4.stop()?.must_be_perfect()?;
        v6.stop()?.must_be_perfect()?;
        tcp.stop()?.must_be_whole()?;
        let left = node.audit()?.findings;
        ensure!(left.is_empty(), "{left:?}");
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

/// What happens to the agent while traffic runs.
#[derive(Debug, Clone, Copy)]
enum Event {
    Kill,
    Stop,
    Regenerate(&'static str),
}

/// Kills, restarts and regenerations in turn, twenty in all.
const EVENTS: [Event; 20] = {
    const ROUND: [Event; 4] = [Event::Kill, Event::Regenerate("policy"), Event::Stop, Event::Regenerate("datapath")];
    let mut all = [Event::Kill; 20];
    let mut n = 0;
    while n < all.len() {
        all[n] = ROUND[n % ROUND.len()];
        n += 1;
    }
    all
};

/// Frames that a container may not send, from its own namespace: with its neighbour's address, and to it.
fn spoof(node: &Node, from: &Sandbox, own: &Attached, neighbour: &Attached, port: u16) -> Result<Vec<Vec<u8>>> {
    let endpoint = node.endpoint(own)?;
    let (me, gateway) = (frame::mac(&endpoint.container_mac)?, frame::mac(&endpoint.host_mac)?);
    let socket = PacketSocket::open(from.space()?, "eth0")?;
    ensure!(socket.mac()? == me, "the container has another MAC address than its record says");
    let [n4, n6] = neighbour.both()?;
    let frames = [(frame::IPV4, n4), (frame::IPV6, n6)].map(|(ethertype, to)| {
        let packet = frame::ip(to, to, 17, &frame::udp(to, to, (4000, port), b"spoof"));
        frame::ethernet(gateway, me, ethertype, &packet)
    });
    let stranger = [2, 0, 0, 0, 0xbe, 0xef];
    let honest = frame::ip(own.v4()?.into(), n4, 17, &frame::udp(own.v4()?.into(), n4, (4000, port), b"spoof"));
    Ok(frames.into_iter().chain([frame::ethernet(gateway, stranger, frame::IPV4, &honest)]).collect())
}

#[test]
fn traffic_through_twenty_kills_restarts_and_regenerations_loses_nothing() -> Result<()> {
    const RATE: u32 = 1000;
    const SPOOFS: u64 = 5;
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (b, eb)] = two(node)?;
        let (sa, sb) = (a.space()?, b.space()?);
        let v4 = UdpStream::start(sa, sb, eb.v4()?.into(), RATE)?;
        let v6 = UdpStream::start(sb, sa, ea.v6()?.into(), RATE)?;
        let tcp = TcpFlow::start(sa, sb, eb.v4()?.into())?;
        let server = EchoServer::start(sb)?;
        let false_frames = spoof(node, &a, &ea, &eb, server.udp_at(eb.v4()?.into()).port())?;
        let sender = PacketSocket::open(sa, "eth0")?;
        let id = node.endpoint(&ea)?.id;
        let (mut spoofed, mut counted_before) = (0_u64, spoofs_counted(node, id)?);
        for (n, event) in EVENTS.into_iter().enumerate() {
            let what = || format!("event {n}, {event:?}");
            match event {
                Event::Regenerate(level) => {
                    for e in [&ea, &eb] {
                        node.wharf(&["endpoint", "regenerate", &e.id(), "--level", level])?.ok().with_context(what)?;
                    }
                }
                Event::Kill | Event::Stop => {
                    if matches!(event, Event::Kill) {
                        node.kill_agent()?
                    } else {
                        node.stop_agent()?
                    }
                    // Without an agent the programs police on.
                    for frame in (0..SPOOFS).flat_map(|_| &false_frames) {
                        sender.send(frame)?;
                        spoofed += 1;
                    }
                    for stream in [&v4, &v6] {
                        stream.await_more(100).with_context(what)?;
                    }
                    tcp.await_more(20).with_context(what)?;
                    node.start_agent()?;
                    all_ready(node)?;
                    let sent = SPOOFS * false_frames.len() as u64;
                    // The rebuild carried the counters on. What the container's kernel sends by itself may count too.
                    counted_before = wait::until("the false frames to be counted", || {
                        let counted = spoofs_counted(node, id)?;
                        Ok((counted >= counted_before + sent).then_some(counted))
                    })
                    .with_context(what)?;
                }
            }
            for stream in [&v4, &v6] {
                stream.await_more(100).with_context(what)?;
            }
            tcp.await_more(20).with_context(what)?;
        }
        let reports = [v4.stop()?, v6.stop()?];
        let tcp = tcp.stop()?;
        println!(
            "{} events: UDP {} + {} packets sent, {} + {} received; TCP {} exchanges, the longest took {:?}; {spoofed} false \
             frames, {} arrived",
            EVENTS.len(),
            reports[0].sent,
            reports[1].sent,
            reports[0].received,
            reports[1].received,
            tcp.exchanges,
            tcp.longest,
            server.datagrams(),
        );
        reports.iter().try_for_each(wharf_tests::stream::UdpReport::must_be_perfect)?;
        tcp.must_be_whole()?;
        ensure!(server.datagrams() == 0, "{} spoofed packets arrived", server.datagrams());
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

fn spoofs_counted(node: &Node, endpoint: u16) -> Result<u64> {
    let reasons = ["invalid-source-ip", "invalid-source-mac"];
    reasons.into_iter().map(|reason| node.packets(endpoint, "egress", reason)).sum()
}

#[test]
fn a_restarted_agent_adds_regenerates_and_deletes_as_before() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(a, ea), (_b, eb)] = two(node)?;
        node.kill_agent()?;
        node.start_agent()?;
        all_ready(node)?;
        let c = node.sandbox("c")?;
        let ec = node.attach(&c)?;
        let used = [ea.both()?, eb.both()?].concat();
        ensure!(ec.both()?.iter().all(|ip| !used.contains(ip)), "{} has a taken address", ec.result);
        ping(c.space()?, ea.v4()?.into())?.must_answer()?;
        let link = node.endpoint(&ea)?.host_ifname;
        let before = programs::attached(node.space(), &link)?;
        node.wharf(&["endpoint", "regenerate", &ea.id(), "--level", "datapath"])?.ok()?;
        ensure!(programs::attached(node.space(), &link)? != before);
        ping(a.space()?, ec.v6()?.into())?.must_answer()?;
        [ea, eb, ec].iter().try_for_each(|e| node.detach(e))
    })
}

#[test]
fn a_container_that_died_while_the_agent_was_away_is_taken_away() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let [(mut a, ea), (b, eb)] = two(node)?;
        node.kill_agent()?;
        a.vanish()?;
        wait::until("the dead container's link to go", || Ok((node.endpoint_links()?.len() == 1).then_some(())))?;
        node.start_agent()?;
        wait::until("the dead endpoint to be taken away", || Ok((node.endpoints()?.len() == 1).then_some(())))?;
        all_ready(node)?;
        ping(b.space()?, eb.gateways()?[0])?.must_answer()?;
        let findings = node.audit()?.findings;
        ensure!(findings.is_empty(), "{findings:?}");
        // The runtime's DEL comes late, and must still succeed; whatever was kept for it goes then.
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn an_agent_killed_in_the_middle_of_adds_and_dels_leaves_no_leak() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let sandboxes: Vec<Sandbox> = (0..6).map(|n| node.sandbox(&format!("c{n}"))).collect::<Result<_>>()?;
        for round in 0..8_u32 {
            let pid = node.agent_pid()?;
            let shared = &*node;
            std::thread::scope(|scope| {
                let calls: Vec<_> = sandboxes
                    .iter()
                    .map(|s| {
                        scope.spawn(move || {
                            for _ in 0..20 {
                                // Failures are what the kill is for; what counts is what is left in the end.
                                match shared.attach(s).and_then(|e| shared.detach(&e)) {
                                    Ok(()) => {}
                                    Err(_) => return,
                                }
                            }
                        })
                    })
                    .collect();
                // Another moment of the ADDs and DELs in every round; which one does not matter, so no waiting for it.
                std::thread::sleep(std::time::Duration::from_millis(u64::from(7 + round * 9)));
                nix::sys::signal::kill(
                    nix::unistd::Pid::from_raw(i32::try_from(pid)?),
                    nix::sys::signal::Signal::SIGKILL,
                )
                .context("kill the agent")?;
                calls.into_iter().try_for_each(|c| c.join().map_err(|_| anyhow::anyhow!("a thread panicked")))
            })?;
            node.kill_agent()?;
            node.start_agent()?;
            for s in &sandboxes {
                node.cni("DEL").of(s.name(), s.path(), "eth0").conf(&node.netconf()).run()?.silent()?;
            }
            let left = wait::until_equal("what is left", &Vec::<String>::new(), || node.left_behind());
            left.with_context(|| format!("round {round}"))?;
            for s in &sandboxes {
                let links = s.space()?.links()?;
                ensure!(links == ["lo"], "round {round}: {} still has {links:?}", s.name());
            }
        }
        Ok(())
    })
}

/// Reads that are answered from the records of endpoints, sent to an agent that has not read them yet.
fn read_early(dirs: &Dirs, targets: [String; 4]) -> Result<Vec<http::Response>> {
    const POINT: &str = "restore/after-dump";
    wait::until("the start to be at the point", || Ok(crash::trace(dirs)?.iter().any(|at| at == POINT).then_some(())))?;
    let socket = dirs.socket();
    thread::scope(|scope| {
        let ask = |target: String| scope.spawn(|| http::request(&dirs.socket(), "GET", &{ target }, None));
        let asked = targets.map(ask);
        // It waits longer for parts of the status than a read without records would take.
        let told = http::request(&socket, "GET", "/v1/healthz", None);
        crash::release(dirs)?;
        ensure!(told?.status == 503, "an agent that starts is not healthy");
        asked.into_iter().map(|read| read.join().map_err(|_| anyhow!("a thread panicked"))?).collect()
    })
}

#[test]
fn reads_of_a_start_wait_until_it_knows_its_endpoints() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let sandbox = node.sandbox("a")?;
        let end = node.attach(&sandbox)?;
        let targets = || -> Result<_> {
            let (id, address) = (node.endpoint(&end)?.id, end.v4()?);
            Ok([
                "/v1/endpoint".to_owned(),
                format!("/v1/endpoint/{id}"),
                "/v1/ipam".to_owned(),
                format!("/v1/explain/{address}"),
            ])
        };
        let targets = targets()?;
        let before: Vec<_> = targets.iter().map(|target| node.http("GET", target, None)).collect::<Result<_>>()?;
        node.kill_agent()?;
        let dirs = node.dirs().clone();
        crash::forget_trace(&dirs)?;
        crash::hold(&dirs, &["restore/after-dump"])?;
        let (early, started) = thread::scope(|scope| {
            let early = scope.spawn(|| read_early(&dirs, targets.clone()));
            let started = node.start_armed_agent();
            (early.join(), started)
        });
        ensure!(started?, "the agent died at its start");
        let early = early.map_err(|_| anyhow!("a thread panicked"))??;
        for ((target, before), early) in targets.iter().zip(&before).zip(&early) {
            ensure!(early.status == 200, "{target}: {early:?}");
            let knows = |answer: &http::Response| {
                answer.text().contains(&end.v4().map_or_else(|e| e.to_string(), |ip| ip.to_string()))
            };
            ensure!(knows(before) && knows(early), "{target}: {}\nbecame {}", before.text(), early.text());
        }
        node.detach(&end)
    })
}
