//! Traffic that goes on while something else happens: UDP with sequence numbers, TCP that must not break.

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use nix::{
    sched::{CpuSet, sched_getcpu, sched_setaffinity},
    sys::socket::{setsockopt, sockopt},
    unistd::Pid,
};

use crate::{space::Space, wait};

const TICK: Duration = Duration::from_millis(20);
/// After the sender's end, how long the receiver waits for a packet that may still come: a slow machine's queues are
/// long.
const DRAIN: Duration = Duration::from_secs(5);
/// How far a sender that was not scheduled falls behind before it leaves packets out: a burst of a second's packets
/// would fill the queue of its processor (net.core.netdev_max_backlog), which is no loss of the datapath's.
const LATE: Duration = Duration::from_millis(200);
/// A stream ends by itself after this long, whatever its owner does.
const BOUND: Duration = Duration::from_secs(300);

/// What came of a UDP stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UdpReport {
    /// Packets the sender's kernel took.
    pub sent: u64,
    /// Sends the sender's kernel refused (no route, no buffer).
    pub refused: u64,
    /// Different packets that arrived.
    pub received: u64,
    /// Packets that arrived once more.
    pub duplicated: u64,
    /// Packets that arrived after one that was sent later.
    pub reordered: u64,
    /// The first that never arrived, and the last.
    pub missing: Option<(u64, u64)>,
    /// Packets of any stream that the processors' queues dropped meanwhile (/proc/net/softnet_stat).
    pub queues_dropped: u64,
}

impl UdpReport {
    /// Packets that never arrived.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.sent.saturating_sub(self.received)
    }

    /// Something was sent, and all of it arrived once and in order.
    ///
    /// # Errors
    /// When not.
    pub fn must_be_perfect(&self) -> Result<()> {
        let perfect = self.sent > 0 && self.refused == 0 && self.lost() == 0 && self.duplicated == 0;
        ensure!(perfect && self.reordered == 0, "{} of {} packets lost: {self:?}", self.lost(), self.sent);
        Ok(())
    }
}

/// A UDP stream at a steady rate.
#[derive(Debug)]
pub struct UdpStream {
    stop: Arc<AtomicBool>,
    received: Arc<AtomicU64>,
    queues_dropped: u64,
    sender: JoinHandle<Result<(u64, u64)>>,
    receiver: JoinHandle<UdpReport>,
}

impl UdpStream {
    /// Starts a stream of `rate` packets each second from one namespace to an address in another; returns when the
    /// first has arrived.
    ///
    /// # Errors
    /// When no socket can be made, or nothing arrives.
    pub fn start(from: &Space, to: &Space, address: IpAddr, rate: u32) -> Result<Self> {
        let receiving = to.run(|| UdpSocket::bind(SocketAddr::new(address, 0)))?.context("bind the receiver")?;
        let at = receiving.local_addr().context("receiver's address")?;
        Self::start_at(from, receiving, at, rate)
    }

    /// As [`Self::start`], to a receiver that the sender reaches at another address, as at a published port.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_at(from: &Space, receiving: UdpSocket, at: SocketAddr, rate: u32) -> Result<Self> {
        // Room for seconds of traffic: a receiver that is not scheduled must not look like a datapath that loses.
        setsockopt(&receiving, sockopt::RcvBufForce, &(16 << 20)).context("enlarge the receive buffer")?;
        receiving.set_read_timeout(Some(TICK)).context("set a time limit")?;
        let sending = crate::echo::udp_client(from, at)?;
        let (stop, received) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let sent = Arc::new(AtomicU64::new(u64::MAX));
        let sender = thread::spawn({
            let (stop, sent) = (Arc::clone(&stop), Arc::clone(&sent));
            move || {
                stay_here()?;
                Ok(send_all(&sending, rate, &stop, &sent))
            }
        });
        let receiver = thread::spawn({
            let received = Arc::clone(&received);
            move || receive_all(&receiving, &received, &sent)
        });
        let stream = Self { stop, received, queues_dropped: queues_dropped()?, sender, receiver };
        stream.await_more(1)?;
        Ok(stream)
    }

    /// Different packets that have arrived so far.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Waits until that many more have arrived.
    ///
    /// # Errors
    /// When they do not.
    pub fn await_more(&self, packets: u64) -> Result<()> {
        let goal = self.received() + packets;
        wait::until("more packets of a UDP stream", || Ok((self.received() >= goal).then_some(())))
    }

    /// Ends the stream and counts.
    ///
    /// # Errors
    /// When a thread of it panicked.
    pub fn stop(self) -> Result<UdpReport> {
        self.stop.store(true, Ordering::Relaxed);
        let (sent, refused) = self.sender.join().map_err(|_| anyhow!("the sender panicked"))??;
        let report = self.receiver.join().map_err(|_| anyhow!("the receiver panicked"))?;
        let queues_dropped = queues_dropped()?.saturating_sub(self.queues_dropped);
        Ok(UdpReport { sent, refused, queues_dropped, ..report })
    }
}

/// Packets that the processors' input queues dropped since boot: the second column, one row for each processor.
fn queues_dropped() -> Result<u64> {
    let rows = std::fs::read_to_string("/proc/net/softnet_stat").context("read the queues' counters")?;
    let dropped = |row: &str| u64::from_str_radix(row.split_whitespace().nth(1).unwrap_or_default(), 16);
    rows.lines().map(dropped).sum::<Result<u64, _>>().context("read the queues' counters")
}

/// Keeps the calling thread on the processor it is on. A packet between namespaces waits in a queue of the processor
/// that sent it: those of a sender that moves may overtake each other, whatever the datapath does.
fn stay_here() -> Result<()> {
    let mut here = CpuSet::new();
    here.set(sched_getcpu().context("ask which processor this is")?).context("name a processor")?;
    sched_setaffinity(Pid::from_raw(0), &here).context("stay on one processor")
}

/// Sends until told to stop, at absolute times, so that a late packet does not slow the rest down, up to [`LATE`].
fn send_all(socket: &UdpSocket, rate: u32, stop: &AtomicBool, total: &AtomicU64) -> (u64, u64) {
    let start = Instant::now();
    let gap = Duration::from_secs(1) / rate.max(1);
    let (mut sent, mut refused, mut next) = (0_u64, 0_u64, start);
    while !stop.load(Ordering::Relaxed) && start.elapsed() < BOUND {
        // 64 bytes: the number, and the rest zero.
        let mut packet = [0; 64];
        if let Some(field) = packet.first_chunk_mut() {
            *field = sent.to_be_bytes();
        }
        match socket.send(&packet) {
            Ok(_) => sent += 1,
            Err(_) => refused += 1,
        }
        let now = Instant::now();
        next = (next + gap).max(now.checked_sub(LATE).unwrap_or(now));
        thread::sleep(next.saturating_duration_since(now));
    }
    total.store(sent, Ordering::Release);
    (sent, refused)
}

/// Receives until everything sent is there, or nothing more comes. `total` is `u64::MAX` while the sender still sends.
fn receive_all(socket: &UdpSocket, received: &AtomicU64, total: &AtomicU64) -> UdpReport {
    let mut report = UdpReport::default();
    let mut seen = Vec::<bool>::new();
    let mut buffer = [0; 128];
    let mut quiet_since = None;
    loop {
        let number = socket.recv(&mut buffer).ok().filter(|n| *n >= 8).and_then(|_| buffer.first_chunk());
        if let Some(number) = number.map(|n| u64::from_be_bytes(*n)).and_then(|n| usize::try_from(n).ok()) {
            quiet_since = None;
            if number + 1 < seen.len() {
                report.reordered += 1;
            } else {
                seen.resize(number + 1, false);
            }
            match seen.get_mut(number) {
                Some(true) | None => report.duplicated += 1,
                Some(slot) => {
                    *slot = true;
                    report.received += 1;
                    received.store(report.received, Ordering::Relaxed);
                }
            }
        }
        let sent = total.load(Ordering::Acquire);
        if sent != u64::MAX {
            let quiet = *quiet_since.get_or_insert_with(Instant::now);
            if report.received >= sent || quiet.elapsed() > DRAIN {
                let number_missing = |n: &u64| seen.get(usize::try_from(*n).unwrap_or(usize::MAX)) != Some(&true);
                let mut missing = (0..sent).filter(number_missing);
                report.missing = missing.next().map(|first| (first, missing.next_back().unwrap_or(first)));
                return report;
            }
        }
    }
}

/// What came of a TCP flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpReport {
    /// Requests that were answered.
    pub exchanges: u64,
    /// Longest an answer took.
    pub longest: Duration,
    /// What broke the connection, if something did.
    pub broken: Option<String>,
}

impl TcpReport {
    /// The connection lived to its end.
    ///
    /// # Errors
    /// When it was reset, timed out, or never said anything.
    pub fn must_be_whole(&self) -> Result<()> {
        ensure!(self.broken.is_none() && self.exchanges > 0, "the TCP flow broke: {self:?}");
        Ok(())
    }
}

/// One TCP connection with a request and an answer, again and again.
#[derive(Debug)]
pub struct TcpFlow {
    stop: Arc<AtomicBool>,
    exchanges: Arc<AtomicU64>,
    client: JoinHandle<TcpReport>,
    server: JoinHandle<()>,
}

impl TcpFlow {
    /// Connects from one namespace to an address in another and begins.
    ///
    /// # Errors
    /// When the connection cannot be made.
    pub fn start(from: &Space, to: &Space, address: IpAddr) -> Result<Self> {
        let listener = to.run(|| TcpListener::bind(SocketAddr::new(address, 0)))?.context("bind the listener")?;
        let at = listener.local_addr().context("listener's address")?;
        let client = from.run(|| TcpStream::connect_timeout(&at, wait::PATIENCE))?;
        let client = client.with_context(|| format!("connect {at}"))?;
        let (server, _) = listener.accept().context("accept")?;
        for stream in [&client, &server] {
            stream.set_nodelay(true).context("set TCP_NODELAY")?;
            stream.set_read_timeout(Some(wait::PATIENCE)).context("set a time limit")?;
        }
        let (stop, exchanges) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let client = thread::spawn({
            let (stop, exchanges) = (Arc::clone(&stop), Arc::clone(&exchanges));
            move || converse(client, &stop, &exchanges)
        });
        Ok(Self { stop, exchanges, client, server: thread::spawn(move || answer(server)) })
    }

    /// Waits until that many more requests have been answered.
    ///
    /// # Errors
    /// When they are not.
    pub fn await_more(&self, count: u64) -> Result<()> {
        let goal = self.exchanges.load(Ordering::Relaxed) + count;
        wait::until("more exchanges of a TCP flow", || {
            Ok((self.exchanges.load(Ordering::Relaxed) >= goal).then_some(()))
        })
    }

    /// True when the connection has broken.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.client.is_finished()
    }

    /// Ends the flow and reports.
    ///
    /// # Errors
    /// When a thread of it panicked.
    pub fn stop(self) -> Result<TcpReport> {
        self.stop.store(true, Ordering::Relaxed);
        let report = self.client.join().map_err(|_| anyhow!("the client panicked"))?;
        self.server.join().map_err(|_| anyhow!("the server panicked"))?;
        Ok(report)
    }
}

fn converse(mut stream: TcpStream, stop: &AtomicBool, exchanges: &AtomicU64) -> TcpReport {
    let mut report = TcpReport { exchanges: 0, longest: Duration::ZERO, broken: None };
    let bound = Instant::now() + BOUND;
    while !stop.load(Ordering::Relaxed) && Instant::now() < bound {
        let start = Instant::now();
        let (request, mut echoed) = (report.exchanges.to_be_bytes(), [0; 8]);
        if let Err(e) = stream.write_all(&request).and_then(|()| stream.read_exact(&mut echoed)) {
            report.broken = Some(e.to_string());
            break;
        }
        if request != echoed {
            report.broken = Some(format!("asked {request:?}, was answered {echoed:?}"));
            break;
        }
        report.longest = report.longest.max(start.elapsed());
        report.exchanges += 1;
        exchanges.store(report.exchanges, Ordering::Relaxed);
        // Some two thousand a second: enough to meet any gap, and the processor stays free for what is tested.
        thread::sleep(Duration::from_micros(500));
    }
    report
}

fn answer(mut stream: TcpStream) {
    let mut request = [0; 8];
    loop {
        match stream.read_exact(&mut request) {
            Ok(()) => {
                if stream.write_all(&request).is_err() {
                    return;
                }
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}
