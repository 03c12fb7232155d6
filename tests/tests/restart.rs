//! The agent goes and comes back; the containers do not notice.

use anyhow::{Context, Result, ensure};
use wharf_tests::{
    Attached, Node, NodeConfig, Sandbox,
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
