//! Every endpoint's own check: what its programs do with test packets, against what they should. A fault made behind
//! the agent's back is found, told with both sides and mended; traffic and churn raise no alarm, and no test packet is
//! counted or told.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use aya::{
    maps::{Array, Map, MapData},
    programs::SchedClassifier,
};
use wharf_api::{
    EndpointHealth, EndpointLogEntry, EndpointPatch, FlowList, Health, LogStatus, MonitorEvent, PolicyImport,
    RegenerateLevel,
};
use wharf_common::{EndpointConfig, map::FLAG_LIVE};
use wharf_tests::{
    Attached, Node, NodeConfig, scenario,
    stream::{TcpFlow, UdpStream},
    wait,
};

const MODES: [&str; 2] = ["clsact", "tcx"];

/// Looks every `interval` milliseconds; nothing else mends what the tests break.
fn config(mode: &str, interval: &str) -> NodeConfig {
    NodeConfig::default().flags(&[
        "--attach-mode",
        mode,
        "--selfcheck-interval-ms",
        interval,
        "--audit-interval-ms",
        "0",
    ])
}

fn health(node: &Node, endpoint: &Attached) -> Result<EndpointHealth> {
    let id = endpoint.id();
    node.ask(async |c| c.endpoint_health(&id).await)
}

/// The endpoint's log lines about the self-check.
fn told(node: &Node, endpoint: &Attached) -> Result<Vec<EndpointLogEntry>> {
    let id = endpoint.id();
    let lines = node.ask(async |c| c.endpoint_log(&id).await)?;
    Ok(lines.into_iter().filter(|l| l.event == "self-check").collect())
}

/// A metric without labels.
fn metric(node: &Node, name: &str) -> Result<u64> {
    let text = node.http("GET", "/metrics", None)?.text();
    let line = text.lines().find_map(|l| l.strip_prefix(name)).with_context(|| format!("no {name} in\n{text}"))?;
    line.trim().parse().with_context(|| format!("{name}{line}"))
}

fn checks(node: &Node) -> Result<u64> {
    metric(node, "wharf_self_checks_total ")
}

fn alarms(node: &Node) -> Result<u64> {
    metric(node, "wharf_self_check_alarms_total ")
}

fn pin(node: &Node, endpoint: &Attached, name: &str) -> Result<PathBuf> {
    Ok(node.dirs().endpoint_pins().join(node.endpoint(endpoint)?.id.to_string()).join(name))
}

/// Puts the program pinned at one path in another's place.
fn replace_pin(from: &PathBuf, to: &PathBuf) -> Result<()> {
    let beside = to.with_file_name("other");
    SchedClassifier::from_pin(from)?.pin(&beside).with_context(|| format!("pin {}", beside.display()))?;
    fs::rename(&beside, to).with_context(|| format!("move over {}", to.display()))
}

fn rewrite(node: &Node, endpoint: &Attached, change: impl FnOnce(&mut EndpointConfig)) -> Result<()> {
    let path = pin(node, endpoint, "CONFIG")?;
    let mut rows: Array<MapData, EndpointConfig> = Map::Array(MapData::from_pin(&path)?).try_into()?;
    let mut row = rows.get(&0, 0)?;
    change(&mut row);
    rows.set(0, row, 0).context("set CONFIG")
}

/// The alarm has come, with words in it, and gone.
fn await_mended(node: &Node, endpoint: &Attached, words: &str) -> Result<()> {
    let lines = wait::until("the alarm's end in the endpoint's log", || {
        let lines = told(node, endpoint)?;
        Ok(lines.iter().any(|l| l.status == LogStatus::Ok).then_some(lines))
    })?;
    let alarm = lines.iter().find(|l| l.status == LogStatus::Failure).context("an alarm before its end")?;
    ensure!(alarm.message.contains(words), "{words:?} is not in {:?}", alarm.message);
    let end = lines.iter().find(|l| l.status == LogStatus::Ok).context("an end")?;
    ensure!(end.message.contains("regenerated the datapath"), "{:?}", end.message);
    let h = health(node, endpoint)?;
    ensure!(h.overall == Health::Ok && h.self_check.alarm.is_none(), "{h:?}");
    ensure!(alarms(node)? >= 1);
    Ok(())
}

#[test]
fn a_healthy_endpoint_passes_every_case() -> Result<()> {
    MODES.into_iter().try_for_each(|mode| {
        scenario(config(mode, "0"), |node| {
            let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
            let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
            for endpoint in [&ea, &eb] {
                for _ in 0..5 {
                    let h = health(node, endpoint)?;
                    ensure!(h.overall == Health::Ok && h.self_check.state == Health::Ok, "{h:?}");
                    ensure!(h.self_check.cases.len() == 14 && h.self_check.cases.iter().all(|c| c.ok), "{h:?}");
                }
                // Test packets are not traffic: not one lie is among the counters.
                let id = node.endpoint(endpoint)?.id;
                for reason in ["invalid-source-ip", "invalid-source-mac"] {
                    ensure!(node.packets(id, "egress", reason)? == 0, "{reason}");
                }
                let shown = node.wharf(&["endpoint", "health", &id.to_string()])?;
                ensure!(shown.code() == 0, "{shown:?}");
                let text = &shown.stdout;
                ensure!(text.contains("14 of 14 test packets as expected"), "{text}");
                ensure!(text.contains("gateway-resolution-ipv6"), "{text}");
            }
            node.detach(&ea)?;
            node.detach(&eb)
        })
    })
}

/// Rows of the tables of flows.
fn flows(node: &Node) -> Result<usize> {
    let list: FlowList = serde_json::from_str(&node.wharf(&["bpf", "ct", "list", "-o", "json"])?.ok()?)?;
    Ok(list.flows.len())
}

#[test]
fn what_policy_allows_and_denies_is_tried_and_leaves_no_trace() -> Result<()> {
    const POLICY: &str =
        "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: db}, spec: {podSelector: {},
        policyTypes: [Ingress, Egress], ingress: [{from: [{ipBlock: {cidr: 198.51.100.0/24}}], ports: [{port: 5432}]}],
        egress: [{to: [{podSelector: {}}]}]}}";
    scenario(config("clsact", "0"), |node| {
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
        let import = PolicyImport { file: "db.yaml".to_owned(), text: POLICY.to_owned() };
        node.ask(async |client| client.import_policy(&import).await)?;
        for endpoint in [&ea, &eb] {
            let h = health(node, endpoint)?;
            ensure!(h.self_check.state == Health::Ok, "{h:?}");
            let names: Vec<&str> = h.self_check.cases.iter().map(|case| case.name.as_str()).collect();
            for name in ["ingress-allowed-ipv4", "ingress-denied-ipv6", "egress-allowed-ipv6", "egress-denied-ipv4"] {
                ensure!(names.contains(&name), "{name} in {names:?}");
            }
            let policy = node.ask(async |client| client.endpoint_policy(&endpoint.id()).await)?;
            let rows = policy.ingress.rows.iter().chain(&policy.egress.rows);
            ensure!(rows.map(|row| row.packets).sum::<u64>() == 0, "test packets are counted: {policy:?}");
        }
        ensure!(flows(node)? == 0, "{} flows", flows(node)?);
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn one_family_alone_is_checked_alone() -> Result<()> {
    let toml = "[[pool]]\nname = 'four'\ncidrs = ['10.99.0.0/24']\n";
    scenario(config("clsact", "0").toml(toml), |node| {
        let a = node.sandbox("a")?;
        let mut conf = node.netconf();
        conf = conf.with("pool", "four".into());
        let ea = node.attach_with(&a, "eth0", &conf)?;
        let cases = health(node, &ea)?.self_check.cases;
        ensure!(cases.len() == 6 && cases.iter().all(|c| c.ok && c.name.ends_with("-ipv4")), "{cases:?}");
        node.detach(&ea)
    })
}

#[test]
fn both_sides_of_a_mismatch_are_shown() -> Result<()> {
    scenario(config("clsact", "0"), |node| {
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
        replace_pin(&pin(node, &eb, "from_container")?, &pin(node, &ea, "from_container")?)?;
        let h = health(node, &ea)?;
        ensure!(h.self_check.state == Health::Failing && h.overall == Health::Failing, "{h:?}");
        let case = h.self_check.cases.iter().find(|c| c.name == "to-gateway-ipv4").context("a case")?;
        ensure!(!case.ok && case.expected == "pass, egress forwarded-stack", "{case:?}");
        let other = node.endpoint(&eb)?.id;
        let got = format!("drop, egress invalid-source-mac at endpoint {other}");
        ensure!(case.got == got, "another endpoint's program speaks: {case:?}");
        ensure!(health(node, &eb)?.self_check.state == Health::Ok, "b is as it was");
        let id = node.endpoint(&ea)?.id.to_string();
        let shown = node.wharf(&["endpoint", "health", &id])?;
        ensure!(shown.code() == 1, "{shown:?}");
        ensure!(shown.stdout.contains("drop, egress invalid-source-mac at"), "{shown:?}");
        let json: serde_json::Value =
            serde_json::from_str(&node.wharf(&["endpoint", "health", &id, "-o", "json"])?.stdout)?;
        ensure!(json.pointer("/self_check/state").and_then(|s| s.as_str()) == Some("failing"), "{json}");
        // Whoever asks changes nothing; whoever regenerates mends it.
        ensure!(told(node, &ea)?.is_empty());
        let patch = EndpointPatch { regenerate: Some(RegenerateLevel::Datapath), ..EndpointPatch::default() };
        node.ask(async |c| c.patch_endpoint(&ea.id(), &patch).await)?;
        let h = health(node, &ea)?;
        ensure!(h.overall == Health::Ok, "{h:?}");
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn another_endpoints_programs_are_found_and_replaced() -> Result<()> {
    MODES.into_iter().try_for_each(|mode| {
        scenario(config(mode, "100"), |node| {
            let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
            let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
            replace_pin(&pin(node, &eb, "to_container")?, &pin(node, &ea, "to_container")?)?;
            await_mended(node, &ea, "from-node-ipv4: expected pass, ingress forwarded-stack; got drop")?;
            node.detach(&ea)?;
            node.detach(&eb)
        })
    })
}

#[test]
fn the_sink_in_a_programs_place_is_found_and_replaced() -> Result<()> {
    MODES.into_iter().try_for_each(|mode| {
        scenario(config(mode, "100"), |node| {
            let a = node.sandbox("a")?;
            let ea = node.attach(&a)?;
            let sink = node.dirs().endpoint_pins().with_file_name("shared").join("sink");
            replace_pin(&sink, &pin(node, &ea, "from_container")?)?;
            await_mended(node, &ea, "to-gateway-ipv4: expected pass, egress forwarded-stack; got drop, not reported")?;
            ensure!(node.log().contains("self-check: to-gateway-ipv4"), "the agent's log tells of it");
            node.detach(&ea)
        })
    })
}

#[test]
fn a_configuration_row_of_others_making_is_found_and_rewritten() -> Result<()> {
    scenario(config("clsact", "100"), |node| {
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
        rewrite(node, &ea, |row| row.flags &= !FLAG_LIVE)?;
        await_mended(node, &ea, "got drop, egress endpoint-not-ready")?;
        let stolen = ea.v4()?.octets();
        rewrite(node, &eb, |row| row.ipv4 = stolen)?;
        await_mended(
            node,
            &eb,
            "to-gateway-ipv4: expected pass, egress forwarded-stack; got drop, egress invalid-source",
        )?;
        let status = node.ask(async |c| c.status().await)?;
        let part = status.components.iter().find(|c| c.name == "self-check").context("a component")?;
        ensure!(part.health == Health::Ok, "{part:?}");
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

/// Why the programs drop what a container's kernel says by itself on a new link.
const CHATTER: [&str; 2] = ["multicast-unsupported", "neighbour-unknown-target"];

/// Counters of endpoints are what they were at the last look, or more.
fn never_back(node: &Node, ids: &[u16], seen: &mut BTreeMap<String, u64>) -> Result<()> {
    for row in node.ask(async |c| c.metrics_rows().await)? {
        let Some(id) = row.endpoint.filter(|id| ids.contains(id)) else { continue };
        let name = format!("endpoint {id} {} {}", row.direction, row.reason);
        let before = seen.insert(name.clone(), row.packets).unwrap_or(0);
        ensure!(row.packets >= before, "{name}: {} after {before}", row.packets);
    }
    Ok(())
}

#[test]
fn a_busy_endpoint_raises_no_alarm() -> Result<()> {
    MODES.into_iter().try_for_each(|mode| {
        scenario(config(mode, "100"), |node| {
            let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
            let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
            let (sa, sb) = (a.space()?, b.space()?);
            let four = UdpStream::start(sa, sb, eb.v4()?.into(), 3000)?;
            let six = UdpStream::start(sb, sa, ea.v6()?.into(), 3000)?;
            let from_node = UdpStream::start(node.space(), sb, eb.v4()?.into(), 1000)?;
            let tcp = TcpFlow::start(sa, sb, eb.v6()?.into())?;
            let before = checks(node)?;
            let ids = [node.endpoint(&ea)?.id, node.endpoint(&eb)?.id];
            let mut seen = BTreeMap::new();
            wait::until("forty checks", || {
                never_back(node, &ids, &mut seen)?;
                Ok((checks(node)? >= before + 40).then_some(()))
            })?;
            ensure!(!seen.is_empty());
            for (what, stream) in [("IPv4", four), ("IPv6", six), ("from the node", from_node)] {
                stream.stop()?.must_be_perfect().context(what)?;
            }
            tcp.stop()?.must_be_whole()?;
            ensure!(alarms(node)? == 0, "{:?}, {:?}", told(node, &ea)?, told(node, &eb)?);
            for endpoint in [&ea, &eb] {
                let id = node.endpoint(endpoint)?.id;
                for reason in ["invalid-source-ip", "invalid-source-mac"] {
                    ensure!(node.packets(id, "egress", reason)? == 0, "{reason}");
                }
            }
            node.detach(&ea)?;
            node.detach(&eb)
        })
    })
}

/// Drops and traces of endpoints that are checked over and over, and their counters: nothing but the chatter.
#[test]
fn test_packets_are_neither_told_nor_counted() -> Result<()> {
    scenario(config("clsact", "100"), |node| {
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        let (ea, eb) = (node.attach(&a)?, node.attach(&b)?);
        for endpoint in [&ea, &eb] {
            let trace = EndpointPatch { trace: Some(true), ..EndpointPatch::default() };
            node.ask(async |c| c.patch_endpoint(&endpoint.id(), &trace).await)?;
        }
        let ids = [node.endpoint(&ea)?.id, node.endpoint(&eb)?.id];
        let until = checks(node)? + 20;
        let reasons = node.ask(async |c| {
            let mut monitor = c.monitor().await?;
            let mut reasons = Vec::new();
            // Told by the metrics, so that an agent that tells of nothing ends the loop too.
            while !matches!(checks(node), Ok(n) if n >= until) {
                let next = tokio::time::timeout(Duration::from_millis(50), monitor.next()).await;
                if let Some(MonitorEvent::Drop(p) | MonitorEvent::Trace(p)) = next.unwrap_or(Ok(None))? {
                    reasons.extend(ids.iter().any(|id| u32::from(*id) == p.endpoint).then_some(p.reason));
                }
            }
            Ok(reasons)
        })?;
        ensure!(reasons.iter().all(|r| CHATTER.contains(&r.as_str())), "{reasons:?}");
        let rows = node.ask(async |c| c.metrics_rows().await)?;
        let of_these = rows.iter().filter(|row| row.endpoint.is_some_and(|id| ids.contains(&id)));
        let counted: Vec<_> = of_these.filter(|row| !CHATTER.contains(&row.reason.as_str())).collect();
        ensure!(counted.is_empty(), "{counted:?}");
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn churn_raises_no_alarm_and_leaves_nothing() -> Result<()> {
    scenario(config("clsact", "100"), |node| {
        let (calm, stays) = (node.sandbox("calm")?, node.sandbox("stays")?);
        let (ec, es) = (node.attach(&calm)?, node.attach(&stays)?);
        let sandboxes = (0..4).map(|n| node.sandbox(&format!("c{n}"))).collect::<Result<Vec<_>>>()?;
        let (shared, enough) = (&*node, AtomicBool::new(false));
        let enough = &enough;
        thread::scope(|scope| {
            let mut threads: Vec<_> = sandboxes
                .iter()
                .map(|sandbox| {
                    scope.spawn(move || -> Result<()> {
                        while !enough.load(Ordering::Relaxed) {
                            let e = shared.attach(sandbox)?;
                            let labels = vec![format!("k8s:app={}", sandbox.name())];
                            let relabel = EndpointPatch { labels: Some(labels), ..EndpointPatch::default() };
                            shared.ask(async |c| c.patch_endpoint(&e.id(), &relabel).await)?;
                            shared.detach(&e)?;
                        }
                        Ok(())
                    })
                })
                .collect();
            let id = es.id();
            threads.push(scope.spawn(move || {
                while !enough.load(Ordering::Relaxed) {
                    let anew =
                        EndpointPatch { regenerate: Some(RegenerateLevel::Datapath), ..EndpointPatch::default() };
                    shared.ask(async |c| c.patch_endpoint(&id, &anew).await)?;
                }
                Ok(())
            }));
            let looked = wait::until("twenty checks", || Ok((checks(shared)? >= 20).then_some(())));
            enough.store(true, Ordering::Relaxed);
            threads.into_iter().try_for_each(|t| t.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)?;
            looked
        })?;
        ensure!(alarms(node)? == 0, "{}", node.log());
        node.detach(&ec)?;
        node.detach(&es)
    })
}
