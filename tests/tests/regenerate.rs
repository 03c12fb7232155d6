//! Regeneration: new programs while packets flow, and not one is lost.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use anyhow::{Context, Result, anyhow, ensure};
use wharf_api::{EndpointPatch, EndpointState, Health, RegenerateLevel};
use wharf_tests::{
    Node, NodeConfig, programs, scenario,
    stream::{TcpFlow, UdpStream},
};

fn patch(level: RegenerateLevel) -> EndpointPatch {
    EndpointPatch { regenerate: Some(level), ..EndpointPatch::default() }
}

fn regenerate(node: &Node, id: &str, level: RegenerateLevel) -> Result<wharf_api::Endpoint> {
    node.ask(async |c| c.patch_endpoint(id, &patch(level)).await)
}

#[test]
fn no_packet_is_lost_while_programs_are_replaced() -> Result<()> {
    replaced_under_load("clsact")
}

#[test]
fn no_packet_is_lost_while_programs_are_replaced_in_tcx_mode() -> Result<()> {
    replaced_under_load("tcx")
}

fn replaced_under_load(mode: &str) -> Result<()> {
    scenario(NodeConfig::default().flags(&["--attach-mode", mode]), |node| {
        let (a, b, c) = (node.sandbox("a")?, node.sandbox("b")?, node.sandbox("c")?);
        let (ea, eb, ec) = (node.attach(&a)?, node.attach(&b)?, node.attach(&c)?);
        let (sa, sb, sc) = (a.space()?, b.space()?, c.space()?);
        let into4 = UdpStream::start(sa, sb, eb.v4()?.into(), 3000)?;
        let into6 = UdpStream::start(sa, sb, eb.v6()?.into(), 3000)?;
        let out = UdpStream::start(sb, sc, ec.v4()?.into(), 3000)?;
        let from_node = UdpStream::start(node.space(), sb, eb.v4()?.into(), 1000)?;
        let tcp = TcpFlow::start(sa, sb, eb.v6()?.into())?;
        let link = node.endpoint(&eb)?.host_ifname;
        for round in 0..100 {
            let before = programs::attached(node.space(), &link)?;
            let after_patch = regenerate(node, &eb.id(), RegenerateLevel::Datapath)?;
            ensure!(after_patch.state == EndpointState::Ready, "round {round}: {after_patch:?}");
            let after = programs::attached(node.space(), &link)?;
            let renewed = before.iter().flatten().all(|id| !after.iter().flatten().any(|other| other == id));
            ensure!(renewed && after.iter().all(|ids| ids.len() == 1), "round {round}: {before:?} -> {after:?}");
            into4.await_more(10)?;
        }
        for (what, stream) in [("IPv4 in", into4), ("IPv6 in", into6), ("IPv4 out", out), ("from the node", from_node)]
        {
            stream.stop()?.must_be_perfect().context(what)?;
        }
        tcp.stop()?.must_be_whole()?;
        let status = node.endpoint(&eb)?.status;
        ensure!(status.regenerations >= 100 && status.failures == 0, "{status:?}");
        [ea, eb, ec].iter().try_for_each(|e| node.detach(e))
    })
}

/// Programs, filters and rows are replaced while they are compared with what they should be.
#[test]
fn a_check_beside_regenerations_finds_nothing() -> Result<()> {
    const CHECKS: usize = 60;
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        let (node, done) = (&*node, AtomicBool::new(false));
        let regenerations = thread::scope(|scope| {
            let regenerating = scope.spawn(|| {
                let mut count = 0;
                while !done.load(Ordering::Relaxed) {
                    regenerate(node, &ea.id(), RegenerateLevel::Datapath)?;
                    count += 1;
                }
                Ok(count)
            });
            let checked = (0..CHECKS).try_for_each(|n| {
                node.check(&ea)?.silent().with_context(|| format!("CHECK {n}"))?;
                let health = node.ask(async |c| c.endpoint_health(&ea.id()).await)?;
                ensure!(health.findings.is_empty() && health.overall != Health::Failing, "look {n}: {health:?}");
                Ok(())
            });
            done.store(true, Ordering::Relaxed);
            let regenerated: Result<usize> = regenerating.join().map_err(|_| anyhow!("a thread panicked"))?;
            checked.and(regenerated)
        })?;
        ensure!(regenerations >= CHECKS / 2, "{regenerations} regenerations beside {CHECKS} checks");
        node.detach(&ea)
    })
}

#[test]
fn the_policy_level_leaves_the_programs_alone() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        let link = node.endpoint(&ea)?.host_ifname;
        let before = programs::attached(node.space(), &link)?;
        regenerate(node, &ea.id(), RegenerateLevel::Policy)?;
        ensure!(programs::attached(node.space(), &link)? == before);
        node.detach(&ea)
    })
}

#[test]
fn counters_live_on_through_a_regeneration() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        let id = node.endpoint(&ea)?.id;
        wharf_tests::icmp::Ping { to: ea.gateways()?[0], count: 7, payload: 56 }.run(a.space()?)?.must_answer()?;
        let before = node.packets(id, "egress", "forwarded-stack")?;
        ensure!(before >= 7, "{before} packets were counted");
        regenerate(node, &ea.id(), RegenerateLevel::Datapath)?;
        ensure!(node.packets(id, "egress", "forwarded-stack")? >= before, "the counters started anew");
        node.detach(&ea)
    })
}

#[test]
fn new_labels_are_a_new_identity_in_the_datapath() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
        let stream = UdpStream::start(a.space()?, b.space()?, eb.v4()?.into(), 2000)?;
        let before = node.endpoint(&eb)?;
        let labels = EndpointPatch { labels: Some(vec!["k8s:app=web".into()]), ..EndpointPatch::default() };
        let patched = node.ask(async |c| c.patch_endpoint(&eb.id(), &labels).await)?;
        ensure!(patched.identity != before.identity && patched.labels == ["k8s:app=web"], "{patched:?}");
        let rows = node.ask(async |c| c.map("ENDPOINTS").await)?.rows;
        let identity = patched.identity.to_string();
        let of_b: Vec<_> = rows.iter().filter(|r| r.get("endpoint") == Some(&patched.id.to_string())).collect();
        ensure!(of_b.len() == 2 && of_b.iter().all(|r| r.get("identity") == Some(&identity)), "{rows:?}");
        stream.stop()?.must_be_perfect()?;
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn endpoints_regenerate_side_by_side() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let sandboxes: Vec<_> = (0..8).map(|n| node.sandbox(&format!("c{n}"))).collect::<Result<_>>()?;
        let attached: Vec<_> = sandboxes.iter().map(|s| node.attach(s)).collect::<Result<Vec<_>>>()?;
        let shared = &*node;
        std::thread::scope(|scope| {
            let threads: Vec<_> = attached
                .iter()
                .map(|e| {
                    scope.spawn(move || {
                        (0..5).try_for_each(|_| regenerate(shared, &e.id(), RegenerateLevel::Datapath).map(drop))
                    })
                })
                .collect();
            threads.into_iter().try_for_each(|t| t.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
        })?;
        ensure!(node.endpoints()?.iter().all(|e| e.state == EndpointState::Ready && e.status.failures == 0));
        attached.iter().try_for_each(|e| node.detach(e))
    })
}
