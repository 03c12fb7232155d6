//! Two endpoints with a hundred rules each way: what they get out of the wire, and what a packet costs in the programs.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context, Result, ensure};
use aya::{
    maps::{Array, Map, MapData},
    programs::SchedClassifier,
};
use wharf_api::{Endpoint, PolicyExplainQuery, PolicyExplanation};
use wharf_common::{FlowTotals, map};

use super::documents::OUTSIDE;
use crate::{
    Node,
    bench::{
        findings::{Better, Group, Mark, Part},
        programs::{HOPS, Mirror, OK, REDIRECT, link_of, macs, pinned, run},
        stats::Summary,
        traffic::{self, connections, paired, side_by_side},
        wires::{DIRECT, Wire},
    },
    frame::{self, Mac},
};

/// The pair without policy.
pub(super) const PLAIN: &str = "wharf, no policy";
/// The pair with rules.
pub(super) const POLICED: &str = "wharf, 100 rules";
/// The server's port, and the client's of an established flow.
const PORTS: (u16, u16) = (4_000, 4_001);

/// Which traffic is measured, what its marks call it, and the least of what there is without policy and over a direct
/// pair.
const TRAFFIC: [(traffic::Traffic, &str, f64, Option<f64>); 2] = [
    (
        ("policy: TCP request/response, 1 byte", "transactions/s", traffic::tcp_round_trips),
        "request/response",
        0.98,
        Some(0.93),
    ),
    (
        ("policy: TCP connections: connect, 1 byte each way, close", "connections/s", connections),
        "connections",
        0.85,
        None,
    ),
];

/// Traffic over the wires: the direct pair, and the pairs without and with rules.
pub(super) fn traffic(wires: &[Wire], rounds: usize, span: Duration) -> Result<Part> {
    let (mut groups, mut marks) = (Vec::new(), Vec::new());
    for (kind, name, of_plain, of_direct) in TRAFFIC {
        let mut group = side_by_side(kind, wires, rounds, span, &[(POLICED, PLAIN), (POLICED, DIRECT)])?;
        group.note("100 rules: of egress at the client, and as many of ingress at the server");
        let mut mark = |base: &str, least: f64| -> Result<()> {
            let ratio = paired(&group, POLICED, base).context("no rounds")?.median;
            let target = format!("{name}, 100 rules: {least} of {base}");
            marks.push(Mark::judge(&target, "x", Better::Higher, ratio, least));
            Ok(())
        };
        mark(PLAIN, of_plain)?;
        of_direct.map_or(Ok(()), |least| mark(DIRECT, least))?;
        groups.push(group);
    }
    Ok((groups, marks))
}

/// What the agent says of the first packet from client to server.
fn explain(node: &Node, port: u16) -> Result<PolicyExplanation> {
    let ends = Ends::of(node)?;
    let (from, to) = (ends.client.id.to_string(), ends.server.id.to_string());
    let query = PolicyExplainQuery { from, to, port: Some(port), ..PolicyExplainQuery::default() };
    node.ask(async |client| client.explain_policy(&query).await)
}

/// Makes sure that rules decide at both ends: that they let the benchmark's ports pass and nothing else.
pub(super) fn is_policed(node: &Node) -> Result<()> {
    for (port, is_open) in [(PORTS.1, true), (80, false)] {
        let told = explain(node, port)?;
        for judged in [told.egress.as_ref(), told.ingress.as_ref()] {
            let judged = judged.context("an end is no endpoint")?;
            ensure!(
                judged.enforced && judged.rule.is_some() == is_open,
                "port {port} is not judged by a rule: {told:?}"
            );
        }
    }
    Ok(())
}

/// Endpoints of a pair.
struct Ends {
    client: Endpoint,
    server: Endpoint,
}

impl Ends {
    fn of(node: &Node) -> Result<Self> {
        let mut all = node.endpoints()?;
        all.sort_by_key(|endpoint| endpoint.container_id.clone());
        let [client, server] =
            <[Endpoint; 2]>::try_from(all).map_err(|all| anyhow::anyhow!("a pair of {}", all.len()))?;
        Ok(Self { client, server })
    }
}

/// Runs of the programs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Runs {
    /// Samples of each.
    pub(super) rounds: usize,
    /// Runs of a sample on a packet that stays the same.
    pub(super) repeat: u32,
    /// Calls of a sample where each has a packet of its own. All of one endpoint's in a second must be fewer than
    /// [`map::FLOWS_PER_TICK`].
    pub(super) calls: u16,
}

/// Nanoseconds a packet on the nodes of the two pairs, in turn: of an established flow, and of a flow that begins.
pub(super) fn packets(nodes: [&Node; 2], runs: Runs) -> Result<Part> {
    let mut of_flow = Group::new("policy: a packet of an established flow in the programs", "ns", Better::Lower);
    let mut first = Group::new("policy: the first packet of a flow in the programs", "ns", Better::Lower);
    let pairs = nodes.map(Programs::of);
    let [plain, policed] = pairs;
    let pairs = [(PLAIN, plain?), (POLICED, policed?)];
    let before = [untracked(nodes[0])?, untracked(nodes[1])?];
    let mut fixed = Vec::new();
    for path in PATHS {
        let (mut established, mut begun) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        for round in 0..runs.rounds {
            for turn in 0..2 {
                let place = (round + turn) % 2;
                let (_, pair) = &pairs[place];
                let (one, single, new) = pair.node.space().run(|| pair.sample(path, runs, round))??;
                established[place].push(one);
                begun[place].push(new);
                fixed.push(single - one);
            }
        }
        for (group, samples) in [(&mut of_flow, established), (&mut first, begun)] {
            for ((name, _), samples) in pairs.iter().zip(samples) {
                group.add(&format!("{}; {}", path.name, name.trim_start_matches("wharf, ")), samples)?;
            }
        }
    }
    for (node, before) in nodes.into_iter().zip(before) {
        let lost = untracked(node)? - before;
        ensure!(lost == 0, "{lost} flows of the benchmark had no row: its first packets came too fast");
    }
    of_flow.note("as many runs on one packet; the kernel's fixed cost of a run, about 19 ns, is in every number");
    let fixed = Summary::of(&fixed).context("no samples")?.median;
    first.note(format!("one run a call, each with a port of its own: {fixed:.0} ns more in every number for the call"));
    first.note("IPv4, UDP. The row of the flow is made in each; with rules the flow is judged by them first");
    Ok((vec![of_flow, first], Vec::new()))
}

/// Packets whose flow got no row.
fn untracked(node: &Node) -> Result<u64> {
    let shared = node.dirs().endpoint_pins().parent().context("the directory of the pins")?.join("shared");
    let totals = MapData::from_pin(shared.join(map::FLOW_TOTALS)).context("open FLOW_TOTALS")?;
    let totals: Array<MapData, FlowTotals> = Map::Array(totals).try_into()?;
    Ok(totals.get(&0, 0).context("read FLOW_TOTALS")?.untracked)
}

/// A packet's way through an endpoint's programs.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Path {
    name: &'static str,
    way: Way,
    verdict: u32,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    ToStack,
    ToServer,
    FromStack,
}

const PATHS: [Path; 3] = [
    Path { name: "from_container, to the node's stack", way: Way::ToStack, verdict: OK },
    Path { name: "from_container and deliver", way: Way::ToServer, verdict: REDIRECT },
    Path { name: "to_container, from the node's stack", way: Way::FromStack, verdict: OK },
];

/// A pair's programs and the packets that they meet.
struct Programs<'a> {
    node: &'a Node,
    ends: Ends,
    /// MAC addresses of container and host side.
    client: (Mac, Mac),
    server: (Mac, Mac),
    addresses: [IpAddr; 2],
}

impl<'a> Programs<'a> {
    fn of(node: &'a Node) -> Result<Self> {
        let ends = Ends::of(node)?;
        let (client, server) = (macs(&ends.client)?, macs(&ends.server)?);
        let v4 = |endpoint: &Endpoint| endpoint.ipv4.map(IpAddr::from).context("no IPv4 address");
        let addresses = [v4(&ends.client)?, v4(&ends.server)?];
        Ok(Self { node, ends, client, server, addresses })
    }

    /// A packet of a flow from client to server or outside, or from outside to the server; the client's port is `port`.
    fn packet(&self, way: Way, port: u16) -> Packet<'_> {
        let [client, server] = self.addresses;
        let (program, endpoint, (to, from), addresses) = match way {
            Way::ToStack => ("from_container", &self.ends.client, sent(self.client), (client, OUTSIDE.into())),
            Way::ToServer => ("from_container", &self.ends.client, sent(self.client), (client, server)),
            Way::FromStack => ("to_container", &self.ends.server, self.server, (OUTSIDE.into(), server)),
        };
        Packet { program, endpoint, bytes: udp((to, from), addresses, (port, PORTS.1)) }
    }

    /// An answer to [`Self::packet`] with the port of the established flow.
    fn answer(&self, way: Way) -> Packet<'_> {
        let [client, server] = self.addresses;
        let (program, endpoint, (to, from), addresses) = match way {
            Way::ToStack => ("to_container", &self.ends.client, self.client, (OUTSIDE.into(), client)),
            Way::ToServer => ("from_container", &self.ends.server, sent(self.server), (server, client)),
            Way::FromStack => ("from_container", &self.ends.server, sent(self.server), (server, OUTSIDE.into())),
        };
        Packet { program, endpoint, bytes: udp((to, from), addresses, (PORTS.1, PORTS.0)) }
    }

    /// Nanoseconds of a packet of an established flow, in many runs and in calls of one run, and of a flow's first
    /// packet.
    fn sample(&self, path: Path, runs: Runs, round: usize) -> Result<(f64, f64, f64)> {
        let packet = self.packet(path.way, PORTS.0);
        let answer = self.answer(path.way);
        // After the third packet the flow is in the table of established ones.
        packet.run(self.node, 1, path.verdict)?;
        answer.run(self.node, 1, path.verdict).context("an answer")?;
        packet.run(self.node, 1, path.verdict)?;
        let program = pinned(self.node, packet.endpoint, packet.program)?;
        let link = link_of(packet.endpoint)?;
        let median = |samples: Vec<f64>| Summary::of(&samples).context("no runs").map(|s| s.median);
        let one = if path.way == Way::ToServer {
            let mirror = Mirror::of(self.node, &self.ends.client, &self.ends.server)?;
            let mut bytes = packet.bytes.clone();
            // All the hops there can be: each run takes one.
            *bytes.get_mut(22).context("a hop count")? = 255;
            let calls = (runs.repeat / HOPS).clamp(1, 400);
            let all = (0..calls).map(|_| run(&program, &bytes, link, HOPS, path.verdict)).collect::<Result<_>>();
            mirror.remove()?;
            median(all?)?
        } else {
            run(&program, &packet.bytes, link, runs.repeat, path.verdict)?
        };
        let single = |port: u16| run(&program, &self.packet(path.way, port).bytes, link, 1, path.verdict);
        let again = (0..runs.calls).map(|_| single(PORTS.0)).collect::<Result<_>>()?;
        let base = 10_000 + u16::try_from(round)? * runs.calls;
        let new = (0..runs.calls).map(|n| single(base + n)).collect::<Result<_>>()?;
        Ok((one, median(again)?, median(new)?))
    }
}

/// Destination and source of a frame that a container sends.
fn sent((container, host): (Mac, Mac)) -> (Mac, Mac) {
    (host, container)
}

fn udp((to, from): (Mac, Mac), (source, destination): (IpAddr, IpAddr), ports: (u16, u16)) -> Vec<u8> {
    let datagram = frame::udp(source, destination, ports, &[0; 32]);
    frame::ethernet(to, from, frame::IPV4, &frame::ip(source, destination, 17, &datagram))
}

/// A packet at a program.
struct Packet<'a> {
    program: &'static str,
    endpoint: &'a Endpoint,
    bytes: Vec<u8>,
}

impl Packet<'_> {
    fn run(&self, node: &Node, repeat: u32, verdict: u32) -> Result<f64> {
        let program: SchedClassifier = pinned(node, self.endpoint, self.program)?;
        run(&program, &self.bytes, link_of(self.endpoint)?, repeat, verdict).with_context(|| self.program.to_owned())
    }
}
