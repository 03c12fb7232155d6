//! Requests between two containers: without a proxy, through Envoy as a plain reverse proxy, and through a redirect.
//! And what rules about requests cost flows that have none.

use std::{
    io::{BufRead, BufReader},
    net::{IpAddr, SocketAddr},
    process::{Child, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{
    Extent,
    documents::{ALLOWED, DENIED, WEB, policy},
    import,
    load::{CONNECTIONS, Load, Server, ask},
    plain::Plain,
};
use crate::{
    Node, NodeConfig,
    bench::{
        findings::{Better, Group, Mark, Part},
        traffic::{self, paired, side_by_side},
        wires::Wire,
    },
    process::ip,
    wait, web,
};

/// Rules that name ports alone.
const PORTS: &str = "wharf, rules about ports";
/// The same rules, those of port 80 about requests.
const REQUESTS: &str = "wharf, rules about requests";

const NO_PROXY: &str = "no proxy";
const REVERSE: &str = "Envoy as a reverse proxy";
const REDIRECT: &str = "Envoy by a redirect";
const WATCHED: &str = "the same, a monitor is told of each";
/// Port of the reverse proxy.
const REVERSE_PORT: u16 = 10_000;

/// Requests, then flows beside them.
pub(super) fn measure(agent: &NodeConfig, extent: &Extent) -> Result<Part> {
    let with_proxy = agent.clone().with_envoy()?;
    let wires = [Wire::direct()?, Wire::labelled(PORTS, agent)?, Wire::labelled(REQUESTS, &with_proxy)?];
    let [_, ports, requests] = &wires;
    for (wire, about_requests) in [(ports, false), (requests, true)] {
        import(node(wire)?, &policy("server", "ingress", about_requests))?;
    }
    let (mut groups, mut marks) = rates(ports, requests, extent)?;
    for (wire, about_requests) in [(ports, false), (requests, true)] {
        import(node(wire)?, &policy("client", "egress", about_requests))?;
    }
    let (more, judged) = beside(&wires, extent)?;
    groups.extend(more);
    marks.extend(judged);
    wires.into_iter().try_for_each(Wire::finish)?;
    Ok((groups, marks))
}

fn node(wire: &Wire) -> Result<&Node> {
    wire.node().context("a wire of Wharf's")
}

/// The client's way out, an address of the node.
fn gateway(wire: &Wire) -> Result<IpAddr> {
    let routes: Value =
        serde_json::from_str(&ip(wire.left()?, "-j route show default")?).context("read ip's answer")?;
    let gateway = routes.pointer("/0/gateway").and_then(Value::as_str).context("no default route")?;
    gateway.parse().context("the gateway's address")
}

/// Requests a second in each of the three ways.
fn rates(ports: &Wire, requests: &Wire, extent: &Extent) -> Result<Part> {
    let [behind_ports, behind_requests] = [ports, requests].map(|wire| SocketAddr::new(wire.address(), WEB));
    let servers = [Server::start(ports.right()?, behind_ports)?, Server::start(requests.right()?, behind_requests)?];
    let at = SocketAddr::new(gateway(ports)?, REVERSE_PORT);
    let plain = Plain::start(node(ports)?.space(), &node(ports)?.dirs().root, at, behind_ports)?;
    for (wire, to, denied) in [(ports, behind_ports, 200), (ports, at, 200), (requests, behind_requests, 403)] {
        let (public, secret) = (web::get(wire.left()?, to, ALLOWED)?, web::get(wire.left()?, to, DENIED)?);
        ensure!((public, secret) == (200, denied), "{}: {public} and {secret} by {to}", wire.name());
    }
    let ways = [
        (NO_PROXY, ports, behind_ports),
        (REVERSE, ports, at),
        (REDIRECT, requests, behind_requests),
        (WATCHED, requests, behind_requests),
    ];
    let mut samples = ways.map(|_| Vec::<Load>::new());
    for round in 0..extent.rounds {
        for turn in 0..ways.len() {
            let place = (round + turn) % ways.len();
            let (name, wire, to) = ways[place];
            let watcher = if name == WATCHED { Some(Watcher::start(wire, to)?) } else { None };
            samples[place].push(ask(wire.left()?, to, extent.span).context(name)?);
            drop(watcher);
        }
    }
    drop(plain);
    servers.into_iter().try_for_each(Server::finish)?;

    let title = format!("l7: requests, {CONNECTIONS} connections that stay open");
    let mut rate = Group::new(&title, "requests/s", Better::Higher);
    let mut time = Group::new("l7: median time of a request, at that rate", "\u{b5}s", Better::Lower);
    for ((name, ..), loads) in ways.iter().zip(&samples) {
        rate.add(name, loads.iter().map(|load| load.rate).collect())?;
        time.add(name, loads.iter().map(|load| load.median_us).collect())?;
    }
    for group in [&mut rate, &mut time] {
        group.compare_to(REVERSE)?;
    }
    let ratio = paired(&rate, REDIRECT, REVERSE).context("no rounds")?;
    rate.note(format!(
        "{REDIRECT} to {REVERSE} within each round: median {:.3}, quartiles {:.3} - {:.3}",
        ratio.median, ratio.q1, ratio.q3
    ));
    rate.note(format!("client, server and Envoy (two threads) share {} processors; answers of two bytes", cpus()));
    rate.note("by a redirect, requests are judged and counted; the reverse proxy does neither");
    let proxy = node(requests)?.ask(async |client| client.proxy().await)?;
    rate.note(format!("{} of the agent's records of requests were lost", proxy.records_lost));
    let target = format!("requests: {REDIRECT} at least 0.9 of {REVERSE}");
    let slower = paired(&time, REDIRECT, REVERSE).context("no rounds")?;
    let slowest = format!("median time of a request: {REDIRECT} at most {REVERSE} / 0.9");
    let marks = vec![
        Mark::judge(&target, "x", Better::Higher, ratio.median, 0.9),
        Mark::judge(&slowest, "x", Better::Lower, slower.median, 1.0 / 0.9),
    ];
    Ok((vec![rate, time], marks))
}

/// `wharf monitor`; killed when dropped.
struct Watcher(Child);

impl Watcher {
    /// Starts one, and waits until it is told of requests to this server.
    fn start(wire: &Wire, to: SocketAddr) -> Result<Self> {
        let mut command = node(wire)?.wharf_command(&["monitor", "--type", "l7", "-o", "json"])?;
        let mut watcher = Self(command.stdout(Stdio::piped()).spawn().context("start the monitor")?);
        let output = watcher.0.stdout.take().context("its output")?;
        let (sender, told) = mpsc::sync_channel(1);
        thread::spawn(move || {
            // Reads to the monitor's end; the first line is what somebody waits for.
            for _ in BufReader::new(output).lines().map_while(Result::ok) {
                sender.try_send(()).ok();
            }
        });
        wait::until("the monitor is told of requests", || {
            web::get(wire.left()?, to, ALLOWED)?;
            Ok(told.recv_timeout(Duration::from_millis(300)).ok())
        })?;
        Ok(watcher)
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // An error means that it has ended by itself.
        if self.0.kill().is_ok() {
            self.0.wait().ok();
        }
    }
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Traffic on another port of endpoints whose port 80 has rules about requests, in both directions.
fn beside(wires: &[Wire], extent: &Extent) -> Result<Part> {
    let traffic: traffic::Traffic =
        ("l7: TCP request/response, 1 byte, on a port without requests", "transactions/s", traffic::tcp_round_trips);
    let group = side_by_side(traffic, wires, extent.rounds, extent.span, &[(REQUESTS, PORTS)])?;
    let ratio = paired(&group, REQUESTS, PORTS).context("no rounds")?.median;
    let target = "request/response beside rules about requests: within 1 % of rules about ports";
    let marks = vec![Mark::judge(target, "x", Better::Higher, ratio, 0.99)];
    Ok((vec![group], marks))
}
