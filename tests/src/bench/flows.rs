//! What the flow tables cost when they are full, and whether collecting them breaks a connection.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    thread,
    time::Instant,
};

use anyhow::{Context, Result, anyhow};
use aya::maps::{HashMap, Map, MapData};
use nix::{
    sys::socket::{setsockopt, sockopt},
    time::{ClockId, clock_gettime},
};
use serde_json::Value;
use wharf_common::{
    EndpointKey, FlowKey, FlowRow,
    flow::{FLOW_REPLIED, TCP, TICK_SHIFT},
    map,
};

use super::findings::{Better, Group, Mark, Part};
use crate::{Node, NodeConfig, wait};

const EMPTY: &str = "no flow";
const FULL: &str = "500,000 flows";
const FLOWS: u32 = 500_000;
/// Listeners: so many that a flow is collected before its addresses and ports come again.
const LISTENERS: usize = 16;

/// DEL with an empty table and a full one; connections one after another while the table is collected.
///
/// # Errors
/// When a node cannot be made, or the tables cannot be read.
pub fn measure(agent: &NodeConfig, rounds: usize, connections: usize) -> Result<Part> {
    let (deletes, mark) = deletes(agent, rounds)?;
    let (broken, other) = connect(agent, connections)?;
    Ok((vec![deletes, broken], vec![mark, other]))
}

fn shared(node: &Node, name: &str) -> Result<PathBuf> {
    Ok(node.dirs().endpoint_pins().parent().context("the directory of the pins")?.join("shared").join(name))
}

/// Puts that many established flows of addresses elsewhere into the table.
fn fill(node: &Node) -> Result<()> {
    let path = shared(node, map::FLOWS)?;
    let mut flows: HashMap<MapData, FlowKey, FlowRow> =
        Map::HashMap(MapData::from_pin(&path).context("open FLOWS")?).try_into()?;
    let now = std::time::Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?).as_nanos() >> TICK_SHIFT;
    let row = FlowRow { seen: u32::try_from(now)?, flags: FLOW_REPLIED, ..FlowRow::default() };
    for number in 0..FLOWS {
        let [_, a, b, c] = number.to_be_bytes();
        let (low, high) = (EndpointKey::v4([192, a, b, c]), EndpointKey::v4([198, 51, 100, 1]));
        let key = FlowKey { low, high, low_port: 1, high_port: 2, protocol: TCP, ..FlowKey::default() };
        flows.insert(key, row, 0).context("insert a flow")?;
    }
    Ok(())
}

fn deletes(agent: &NodeConfig, rounds: usize) -> Result<(Group, Mark)> {
    let mut nodes = [Node::start(agent.clone())?, Node::start(agent.clone())?];
    let [_, full] = &nodes;
    fill(full)?;
    let mut samples = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        for turn in 0..2 {
            let place = (round + turn) % 2;
            let (node, times) = nodes.get(place).zip(samples.get_mut(place)).context("a node in turn")?;
            let sandbox = node.sandbox(&format!("flows{round}"))?;
            let attached = node.attach(&sandbox)?;
            let since = Instant::now();
            node.detach(&attached)?;
            times.push(since.elapsed().as_secs_f64() * 1_000.0);
        }
    }
    let mut group = Group::new("DEL beside flows", "ms", Better::Lower);
    for (name, samples) in [EMPTY, FULL].into_iter().zip(samples) {
        group.add(name, samples)?;
    }
    group.compare_to(EMPTY)?;
    let [empty, full] =
        [EMPTY, FULL].map(|name| group.series.iter().find(|s| s.name == name).map(|s| s.summary.median));
    let ratio = full.context("samples")? / empty.context("samples")?;
    let mark = Mark::judge("DEL beside 500,000 flows: as beside none", "x", Better::Lower, ratio, 1.05);
    nodes.iter_mut().try_for_each(Node::finish)?;
    Ok((group, mark))
}

/// One connection: a byte each way, then a reset, so that no port waits.
fn once(at: SocketAddr) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&at, wait::PATIENCE)?;
    stream.set_read_timeout(Some(wait::PATIENCE))?;
    setsockopt(&stream, sockopt::Linger, &nix::libc::linger { l_onoff: 1, l_linger: 0 })?;
    stream.write_all(&[1])?;
    stream.read_exact(&mut [0])
}

fn connect(agent: &NodeConfig, connections: usize) -> Result<(Group, Mark)> {
    let mut node = Node::start(agent.clone())?;
    let (left, right) = (node.sandbox("left")?, node.sandbox("right")?);
    let ends = [node.attach(&left)?, node.attach(&right)?];
    let address = ends[1].v4()?.into();
    let listen = || {
        let listener = TcpListener::bind(SocketAddr::new(address, 0)).context("bind a listener")?;
        let at = listener.local_addr().context("ask for the listener's address")?;
        anyhow::Ok((listener, at))
    };
    let listeners = right.space()?.run(|| (0..LISTENERS).map(|_| listen()).collect::<Result<Vec<_>>>())??;
    let places: Vec<SocketAddr> = listeners.iter().map(|(_, at)| *at).collect();
    let answerers: Vec<_> = listeners
        .into_iter()
        .map(|(listener, _)| {
            // Ends when its listener is shut down.
            let stop = listener.try_clone().context("copy a descriptor")?;
            let answer = move || {
                while let Ok((mut stream, _)) = listener.accept() {
                    // What the client misses, it counts.
                    let mut byte = [0];
                    let _ = stream.read_exact(&mut byte).and_then(|()| stream.write_all(&byte));
                }
            };
            anyhow::Ok((stop, thread::spawn(answer)))
        })
        .collect::<Result<_>>()?;
    let since = Instant::now();
    let broken = left.space()?.run(|| {
        let places = places.iter().cycle().take(connections);
        places.filter(|at| once(**at).is_err()).count()
    })?;
    let took = since.elapsed().as_secs_f64();
    for (listener, answerer) in answerers {
        shut_down(&listener)?;
        answerer.join().map_err(|_| anyhow!("an answering end panicked"))?;
    }
    let totals = node.wharf(&["bpf", "map", "get", map::FLOW_TOTALS, "-o", "json"])?.ok()?;
    let totals: Value = serde_json::from_str(&totals).context("read the totals")?;
    let expired = totals.pointer("/rows/0/expired").and_then(Value::as_str).context("what was collected")?;
    let mut group = Group::new("connections while flows are collected", "connections/s", Better::Higher);
    let rate = f64::from(u32::try_from(connections)?) / took;
    group.add("one after another", vec![rate])?;
    group.note(format!("{broken} of {connections} broken; {expired} rows collected in {took:.0} s"));
    let broken = f64::from(u32::try_from(broken)?);
    let mark = Mark::judge("connections broken while flows are collected: none", "", Better::Lower, broken, 0.0);
    ends.iter().try_for_each(|end| node.detach(end))?;
    node.finish()?;
    Ok((group, mark))
}

/// Wakes whoever accepts.
fn shut_down(listener: &TcpListener) -> Result<()> {
    use std::os::fd::AsRawFd as _;
    nix::sys::socket::shutdown(listener.as_raw_fd(), nix::sys::socket::Shutdown::Both).context("shut a listener down")
}
