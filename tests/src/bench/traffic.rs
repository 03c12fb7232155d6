//! What two containers get out of a wire: transactions a second on one connection, and bulk throughput.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use nix::{
    sched::{CpuSet, sched_getaffinity},
    sys::socket::{self, sockopt},
    unistd::Pid,
};

use super::{
    ends::{Answerer, Kind, bind},
    findings::{Better, Group, Mark, Part},
    stats::Summary,
    wires::{DIRECT, FLOOR, UNTRACKED, WHARF, Wire},
};
use crate::{NodeConfig, wait};

/// Transactions that are not counted, at the start of each connection.
const WARM_UP: u32 = 200;
/// Transactions between two looks at the clock.
const BATCH: u32 = 64;
/// Bytes of one write of a bulk sender.
const CHUNK: usize = 256 << 10;

/// What is measured on a wire: name, unit, how.
pub(super) type Traffic = (&'static str, &'static str, fn(&Wire, Duration, Cpus) -> Result<f64>);

const TRAFFIC: [Traffic; 4] = [
    ("TCP request/response, 1 byte, two processes on one CPU", "transactions/s", tcp_round_trips),
    ("UDP request/response, 1 byte, two processes on one CPU", "transactions/s", udp_round_trips),
    ("TCP connections: connect, 1 byte each way, close", "connections/s", connections),
    ("TCP bulk, each end on a CPU of its own", "Gbit/s", bulk),
];

/// All kinds of traffic on all wires, `span` each time, in rounds whose order rotates.
///
/// # Errors
/// When a wire cannot be made or breaks.
pub fn measure(agent: &NodeConfig, rounds: usize, span: Duration) -> Result<Part> {
    let wires = Wire::all(agent)?;
    let pairs = [(WHARF[0], DIRECT), (WHARF[0], FLOOR[0]), (WHARF[1], FLOOR[1]), (WHARF[0], UNTRACKED)];
    let groups: Vec<Group> = TRAFFIC
        .into_iter()
        .map(|traffic| side_by_side(traffic, &wires, rounds, span, &pairs))
        .collect::<Result<_>>()?;
    let mut marks = Vec::new();
    for (group, least) in groups.iter().zip([0.98, 0.96, 0.93]) {
        for (ours, floor) in WHARF.into_iter().zip(FLOOR) {
            if let Some(spread) = paired(group, ours, floor) {
                let target = format!("{}: {ours} at least {least} of {floor}", group.title);
                marks.push(Mark::judge(&target, "x", Better::Higher, spread.median, least));
            }
        }
    }
    for (group, least) in groups.iter().zip([0.98, 0.98, 0.9]) {
        if let Some(spread) = paired(group, WHARF[0], UNTRACKED) {
            let target = format!("{}: tracked at least {least} of untracked", group.title);
            marks.push(Mark::judge(&target, "x", Better::Higher, spread.median, least));
        }
    }
    wires.into_iter().try_for_each(Wire::finish)?;
    Ok((groups, marks))
}

/// One kind of traffic on wires, `span` each time, in rounds whose order rotates. `pairs`: wires of which a note tells
/// the ratio within each round.
///
/// # Errors
/// When a wire breaks, or none of them is the direct one.
pub(super) fn side_by_side(
    (title, unit, kind): Traffic,
    wires: &[Wire],
    rounds: usize,
    span: Duration,
    pairs: &[(&str, &str)],
) -> Result<Group> {
    let cpus = Cpus::of_this_process()?;
    let mut samples = vec![Vec::new(); wires.len()];
    for round in 0..rounds {
        for turn in 0..wires.len() {
            let place = (round + turn) % wires.len();
            if let (Some(wire), Some(samples)) = (wires.get(place), samples.get_mut(place)) {
                samples.push(kind(wire, span, cpus).with_context(|| format!("{title}: {}", wire.name()))?);
            }
        }
    }
    let mut group = Group::new(title, unit, Better::Higher);
    for (wire, samples) in wires.iter().zip(samples) {
        group.add(wire.name(), samples)?;
    }
    group.compare_to(DIRECT)?;
    for (ours, base) in pairs {
        if let Some(spread) = paired(&group, ours, base) {
            let (median, q1, q3) = (spread.median, spread.q1, spread.q3);
            group.note(format!("{ours} to {base} within each round: median {median:.3}, quartiles {q1:.3} - {q3:.3}"));
        }
    }
    Ok(group)
}

/// Ratio of the samples that were taken in the same round; none without both.
pub(super) fn paired(group: &Group, ours: &str, base: &str) -> Option<Summary> {
    let samples = |name: &str| group.series.iter().find(|s| s.name == name).map(|s| s.samples.as_slice());
    let ratios: Vec<f64> = samples(ours)?.iter().zip(samples(base)?).map(|(ours, base)| ours / base).collect();
    Summary::of(&ratios)
}

/// The CPUs that ends are bound to: one for both, or two.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cpus {
    one: usize,
    other: usize,
}

impl Cpus {
    pub(super) fn of_this_process() -> Result<Self> {
        let allowed = sched_getaffinity(Pid::from_raw(0)).context("ask which CPUs may be used")?;
        let mut cpus = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false));
        let one = cpus.next().context("no CPU may be used")?;
        Ok(Self { one, other: cpus.next().unwrap_or(one) })
    }
}

/// Runs a closure on a thread that is bound to a CPU.
fn on_cpu<T: Send>(cpu: usize, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        let thread = scope.spawn(move || bind(cpu).and_then(|()| f()));
        thread.join().map_err(|_| anyhow!("an end panicked"))?
    })
}

/// A connection from left to right.
fn connect(wire: &Wire) -> Result<(TcpStream, TcpStream)> {
    let at = SocketAddr::new(wire.address(), 0);
    let listener = wire.right()?.run(|| TcpListener::bind(at))?.context("bind a listener")?;
    let at = listener.local_addr().context("ask for the listener's address")?;
    let left = wire.left()?.run(|| TcpStream::connect_timeout(&at, wait::PATIENCE))?;
    let left = left.with_context(|| format!("connect {at}"))?;
    let (right, _) = listener.accept().context("accept")?;
    for stream in [&left, &right] {
        stream.set_nodelay(true).context("set TCP_NODELAY")?;
        stream.set_read_timeout(Some(wait::PATIENCE)).context("set a time limit")?;
        stream.set_write_timeout(Some(wait::PATIENCE)).context("set a time limit")?;
    }
    Ok((left, right))
}

/// Calls `trip` for `span` after a warm-up; calls a second.
fn count(span: Duration, mut trip: impl FnMut() -> Result<()>) -> Result<f64> {
    for _ in 0..WARM_UP {
        trip()?;
    }
    let start = Instant::now();
    let mut trips = 0_u32;
    loop {
        for _ in 0..BATCH {
            trip()?;
        }
        trips += BATCH;
        let took = start.elapsed();
        if took >= span {
            return Ok(f64::from(trips) / took.as_secs_f64());
        }
    }
}

pub(super) fn tcp_round_trips(wire: &Wire, span: Duration, cpus: Cpus) -> Result<f64> {
    let (mut left, right) = connect(wire)?;
    let answerer = Answerer::start(Kind::Tcp, right.into(), cpus.one)?;
    let ask = move || {
        let mut byte = [1];
        count(span, || {
            left.write_all(&byte).context("ask")?;
            left.read_exact(&mut byte).context("wait for an answer")
        })
    };
    let rate = on_cpu(cpus.one, ask)?;
    answerer.finish()?;
    Ok(rate)
}

/// Connections one after another. The end that asks resets each, so that no port waits; that is the flow's end as well.
pub(super) fn connections(wire: &Wire, span: Duration, cpus: Cpus) -> Result<f64> {
    let at = SocketAddr::new(wire.address(), 0);
    let listener = wire.right()?.run(|| TcpListener::bind(at))?.context("bind a listener")?;
    let at = listener.local_addr().context("ask for the listener's address")?;
    let answerer = thread::spawn(move || -> Result<()> {
        bind(cpus.one)?;
        loop {
            let (mut stream, _) = listener.accept().context("accept")?;
            stream.set_read_timeout(Some(wait::PATIENCE)).context("set a time limit")?;
            let mut byte = [0];
            stream.read_exact(&mut byte).context("wait for a byte")?;
            // The sign to stop.
            if byte == [0] {
                return Ok(());
            }
            stream.write_all(&byte).context("answer")?;
        }
    });
    let left = wire.left()?;
    let one = |byte: u8| -> Result<()> {
        let mut stream = TcpStream::connect_timeout(&at, wait::PATIENCE).with_context(|| format!("connect {at}"))?;
        stream.set_read_timeout(Some(wait::PATIENCE)).context("set a time limit")?;
        socket::setsockopt(&stream, sockopt::Linger, &nix::libc::linger { l_onoff: 1, l_linger: 0 })
            .context("set linger")?;
        stream.write_all(&[byte]).context("ask")?;
        if byte != 0 {
            stream.read_exact(&mut [0]).context("wait for an answer")?;
            return Ok(());
        }
        // The other end closes first.
        let _ = stream.read(&mut [0]).context("wait for the end")?;
        Ok(())
    };
    let rate = left.run(|| {
        bind(cpus.one)?;
        let rate = count(span, || one(1));
        one(0)?;
        rate
    })?;
    answerer.join().map_err(|_| anyhow!("the answering end panicked"))??;
    rate
}

pub(super) fn udp_round_trips(wire: &Wire, span: Duration, cpus: Cpus) -> Result<f64> {
    let at = SocketAddr::new(wire.address(), 0);
    let right = wire.right()?.run(|| UdpSocket::bind(at))?.context("bind a socket")?;
    let at = right.local_addr().context("ask for the socket's address")?;
    let left = wire.left()?.run(|| UdpSocket::bind("0.0.0.0:0"))?.context("bind a socket")?;
    left.connect(at).with_context(|| format!("connect {at}"))?;
    for socket in [&left, &right] {
        socket.set_read_timeout(Some(wait::PATIENCE)).context("set a time limit")?;
    }
    let answerer = Answerer::start(Kind::Udp, right.into(), cpus.one)?;
    let ask = move || {
        let mut byte = [1];
        let rate = count(span, || {
            left.send(&byte).context("ask")?;
            left.recv(&mut byte).map(|_| ()).context("wait for an answer")
        });
        left.send(&[]).context("end")?; // an empty datagram: the other end's sign to stop
        rate
    };
    let rate = on_cpu(cpus.one, ask)?;
    answerer.finish()?;
    Ok(rate)
}

pub(super) fn bulk(wire: &Wire, span: Duration, cpus: Cpus) -> Result<f64> {
    let (mut left, mut right) = connect(wire)?;
    let receive = move || {
        let mut buffer = vec![0; 4 * CHUNK];
        let (mut bytes, mut start) = (0_u64, None);
        loop {
            let n = right.read(&mut buffer).context("receive")?;
            match start {
                // What came before the clock ran is not counted.
                None => start = Some(Instant::now()),
                Some(_) => bytes += u64::try_from(n).context("bytes")?,
            }
            if n == 0 {
                break;
            }
        }
        let took = start.context("nothing came")?.elapsed();
        ensure!(bytes > 0, "nothing came");
        // Exact up to 2^53 bytes.
        Ok(bytes as f64 * 8.0 / took.as_secs_f64() / 1e9)
    };
    let send = move || {
        let chunk = vec![0; CHUNK];
        let start = Instant::now();
        while start.elapsed() < span {
            left.write_all(&chunk).context("send")?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let sender = scope.spawn(|| on_cpu(cpus.one, send));
        let rate = on_cpu(cpus.other, receive);
        sender.join().map_err(|_| anyhow!("an end panicked"))??;
        rate
    })
}
