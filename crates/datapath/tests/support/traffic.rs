//! Real packets between the namespaces of a test.

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, SyncSender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use tokio::sync::watch;

use super::{LinuxWorld, ROUTER4};

pub(crate) const PORT: u16 = 7700;
const FORGED_PORT: u16 = 7701;

/// Longer than any test's machine is busy with something else.
const PATIENCE: Duration = Duration::from_secs(20);

/// A server that echoes one TCP connection and one datagram at an address, in the calling thread's namespace.
fn echo_once(address: IpAddr) -> impl FnOnce() + Send + 'static {
    let at = SocketAddr::new(address, PORT);
    let tcp = TcpListener::bind(at).expect("TCP listener");
    let udp = UdpSocket::bind(at).expect("UDP socket");
    udp.set_read_timeout(Some(PATIENCE)).expect("timeout");
    move || {
        let (mut stream, _) = tcp.accept().expect("connection");
        let mut text = [0; 4];
        stream.read_exact(&mut text).expect("request");
        stream.write_all(&text).expect("answer");
        let (n, peer) = udp.recv_from(&mut text).expect("datagram");
        udp.send_to(&text[..n], peer).expect("answer");
    }
}

/// Talks TCP and UDP to an address from the calling thread's namespace; says from which address it spoke.
fn talk_to(address: IpAddr) -> IpAddr {
    let at = SocketAddr::new(address, PORT);
    let mut stream = TcpStream::connect_timeout(&at, PATIENCE).expect("connect");
    stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
    stream.write_all(b"ping").expect("request");
    let mut text = [0; 4];
    stream.read_exact(&mut text).expect("answer");
    assert_eq!(&text, b"ping");
    let own = stream.local_addr().expect("own address").ip();
    let udp = UdpSocket::bind(SocketAddr::new(own, 0)).expect("UDP socket");
    udp.set_read_timeout(Some(PATIENCE)).expect("timeout");
    udp.connect(at).expect("connect");
    udp.send(b"ping").expect("datagram");
    assert_eq!(udp.recv(&mut text).expect("datagram"), 4);
    own
}

/// A TCP and a UDP conversation between two namespaces (none: the node's).
pub(crate) fn converse(from: Option<&Path>, to: Option<&Path>, address: IpAddr) -> IpAddr {
    let bound = match to {
        Some(to) => {
            let (sender, receiver) = mpsc::channel();
            let to = to.to_owned();
            let server = thread::spawn(move || {
                LinuxWorld::inside(&to, move || {
                    let serve = echo_once(address);
                    sender.send(()).expect("ready");
                    serve();
                });
            });
            receiver.recv().expect("server is ready");
            server
        }
        None => thread::spawn(echo_once(address)),
    };
    let own = match from {
        Some(from) => LinuxWorld::inside(from, move || talk_to(address)),
        None => talk_to(address),
    };
    bound.join().expect("server");
    own
}

/// True when a datagram from the container reaches the node within a short time.
pub(crate) fn reaches_node(from: &Path) -> bool {
    let server = UdpSocket::bind(SocketAddr::new(ROUTER4.into(), PORT)).expect("UDP socket");
    server.set_read_timeout(Some(Duration::from_millis(300))).expect("timeout");
    LinuxWorld::inside(from, || {
        let client = UdpSocket::bind("0.0.0.0:0").expect("UDP socket");
        // Without ARP's answer it goes nowhere, which is what the caller asks.
        let _sent = client.send_to(b"ping", SocketAddr::new(ROUTER4.into(), PORT));
    });
    let mut text = [0; 4];
    server.recv_from(&mut text).is_ok()
}

/// True when a datagram from the node reaches the container within a short time.
pub(crate) fn node_reaches(to: &Path, address: IpAddr) -> bool {
    let at = SocketAddr::new(address, PORT);
    let server = LinuxWorld::inside(to, move || UdpSocket::bind(at).expect("UDP socket"));
    server.set_read_timeout(Some(Duration::from_millis(300))).expect("timeout");
    let client = UdpSocket::bind(SocketAddr::new(ROUTER4.into(), 0)).expect("UDP socket");
    client.send_to(b"ping", at).expect("datagram");
    let mut text = [0; 4];
    server.recv_from(&mut text).is_ok()
}

/// Datagrams that may be on their way: few enough that no socket buffer overflows, so that each one that is missing was
/// lost in the datapath.
const WINDOW: usize = 32;

/// A stream of datagrams from one container to another, as fast as the receiver takes them.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    progress: watch::Receiver<u64>,
    sender: JoinHandle<u64>,
    receiver: JoinHandle<(u64, u64)>,
}

/// What became of a load.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Delivered {
    pub(crate) sent: u64,
    pub(crate) received: u64,
    /// Of the datagrams with a forged source, of which as many were sent, those that arrived.
    pub(crate) forged_received: u64,
}

impl Load {
    /// Starts to send from the namespace `from` to `address`, in the namespace `to`. With `forged`, an address of the
    /// sender's namespace, each datagram is followed by one from there.
    pub(crate) fn start(from: &Path, to: &Path, address: IpAddr, forged: Option<IpAddr>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (credit, credits) = mpsc::sync_channel(WINDOW);
        let (total, end) = mpsc::sync_channel(1);
        let (told, progress) = watch::channel(0);
        let (ready, is_ready) = mpsc::channel();
        let to = to.to_owned();
        let receiver = thread::spawn(move || {
            LinuxWorld::inside(&to, move || {
                let honest = UdpSocket::bind(SocketAddr::new(address, PORT)).expect("UDP socket");
                let forged = UdpSocket::bind(SocketAddr::new(address, FORGED_PORT)).expect("UDP socket");
                for _ in 0..WINDOW {
                    credit.send(()).expect("room for every credit");
                }
                ready.send(()).expect("ready");
                receive(&honest, &forged, &credit, &end, &told)
            })
        });
        is_ready.recv().expect("receiver is ready");
        let (from, until) = (from.to_owned(), Arc::clone(&stop));
        let sender = thread::spawn(move || {
            LinuxWorld::inside(&from, move || {
                let sent = send(address, forged, &credits, &until);
                total.send(sent).expect("the receiver waits for it");
                sent
            })
        });
        Self { stop, progress, sender, receiver }
    }

    /// Waits until further datagrams have arrived.
    pub(crate) async fn advance(&mut self, by: u64) {
        let target = *self.progress.borrow() + by;
        let further = self.progress.wait_for(|n| *n >= target);
        let arrived = tokio::time::timeout(PATIENCE, further).await.expect("datagrams still arrive");
        drop(arrived.expect("the receiver runs"));
    }

    /// Stops, and waits for what is on its way.
    pub(crate) fn finish(self) -> Delivered {
        self.stop.store(true, Ordering::Relaxed);
        let sent = self.sender.join().expect("sender");
        let (received, forged_received) = self.receiver.join().expect("receiver");
        Delivered { sent, received, forged_received }
    }
}

/// Ends when told to, or when no credit comes any more: then a whole window was lost.
fn send(address: IpAddr, forged: Option<IpAddr>, credits: &Receiver<()>, stop: &AtomicBool) -> u64 {
    let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let honest = UdpSocket::bind(any).expect("UDP socket");
    honest.connect(SocketAddr::new(address, PORT)).expect("connect");
    let forger = forged.map(|source| {
        let forger = UdpSocket::bind(SocketAddr::new(source, 0)).expect("UDP socket");
        forger.connect(SocketAddr::new(address, FORGED_PORT)).expect("connect");
        forger
    });
    let mut sent = 0u64;
    while !stop.load(Ordering::Relaxed) && credits.recv_timeout(PATIENCE).is_ok() {
        honest.send(&sent.to_be_bytes()).expect("send");
        if let Some(forger) = &forger {
            forger.send(b"forged").expect("send");
        }
        sent += 1;
    }
    sent
}

fn receive(
    honest: &UdpSocket,
    forged: &UdpSocket,
    credit: &SyncSender<()>,
    end: &Receiver<u64>,
    progress: &watch::Sender<u64>,
) -> (u64, u64) {
    honest.set_read_timeout(Some(Duration::from_millis(100))).expect("timeout");
    forged.set_nonblocking(true).expect("nonblocking");
    let (mut received, mut through, mut total) = (0, 0, None);
    let mut last = Instant::now();
    let mut text = [0; 16];
    loop {
        match honest.recv(&mut text) {
            Ok(_) => {
                received += 1;
                last = Instant::now();
                // When the sender has stopped nobody needs it, and then there is always room.
                let _unneeded = credit.try_send(());
                progress.send_replace(received);
            }
            Err(e) => assert!(matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "receive: {e}"),
        }
        while forged.recv(&mut text).is_ok() {
            through += 1;
        }
        total = total.or_else(|| end.try_recv().ok());
        if total.is_some_and(|sent| received >= sent || last.elapsed() > Duration::from_secs(3)) {
            return (received, through);
        }
    }
}
