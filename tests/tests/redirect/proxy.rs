//! A transparent TCP proxy: it takes what the node hands over, and sends it on in the client's name.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, Backlog, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect, listen, setsockopt,
        socket, sockopt,
    },
};
use wharf_tests::space::Space;

/// How often a thread looks whether it is to stop.
const TICK: Duration = Duration::from_millis(20);

/// How long a peer may take nothing of what is sent to it.
const PATIENCE: Duration = Duration::from_secs(5);

/// A connection that the proxy took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Taken {
    /// Who connected.
    pub(crate) client: SocketAddr,
    /// To whom.
    pub(crate) server: SocketAddr,
}

/// The proxy's own connections to servers.
#[derive(Debug, Default)]
struct Upstreams {
    /// Of each connection that was sent on, the address and the port that the proxy took for it.
    made: Mutex<Vec<SocketAddr>>,
    /// The port of the next one; zero: the kernel chooses.
    from: AtomicU16,
}

/// A proxy of a node's, which stops when it is dropped.
#[derive(Debug)]
pub(crate) struct Proxy {
    /// Where it listens, on the loopback addresses.
    pub(crate) port: u16,
    stop: Arc<AtomicBool>,
    taken: Arc<Mutex<Vec<Taken>>>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    upstreams: Arc<Upstreams>,
    threads: Vec<JoinHandle<()>>,
}

/// `IPV6_TRANSPARENT`: raw sockets of IPv6 do not know `IP_TRANSPARENT`.
fn make_transparent6(made: &OwnedFd) -> Result<(), Errno> {
    let (on, length) = (1_i32, nix::libc::socklen_t::try_from(size_of::<i32>()).unwrap_or_default());
    let (level, option) = (nix::libc::SOL_IPV6, nix::libc::IPV6_TRANSPARENT);
    // SAFETY: a socket, and a number of that length.
    let answer = unsafe { nix::libc::setsockopt(made.as_raw_fd(), level, option, (&raw const on).cast(), length) };
    Errno::result(answer).map(drop)
}

/// A transparent socket in this thread's namespace.
pub(crate) fn transparent(kind: SockType, at: SocketAddr, mark: Option<u32>) -> Result<OwnedFd> {
    let family = if at.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let protocol = (kind == SockType::Raw).then_some(SockProtocol::Udp);
    let made = socket(family, kind, SockFlag::SOCK_CLOEXEC, protocol).context("make a socket")?;
    match at {
        SocketAddr::V4(_) => setsockopt(&made, sockopt::IpTransparent, &true),
        SocketAddr::V6(_) => make_transparent6(&made),
    }
    .context("make it transparent")?;
    // Not of UDP: the kernel then gives a port that another flow's socket has as well, and both flows are one to every
    // observer.
    if kind == SockType::Stream {
        setsockopt(&made, sockopt::ReuseAddr, &true)?;
    }
    if at.is_ipv6() && kind != SockType::Raw {
        setsockopt(&made, sockopt::Ipv6V6Only, &true)?;
    }
    if let Some(mark) = mark {
        setsockopt(&made, sockopt::Mark, &mark).context("mark it")?;
    }
    bind(made.as_raw_fd(), &SockaddrStorage::from(at)).with_context(|| format!("bind {at}"))?;
    Ok(made)
}

fn listener(at: SocketAddr) -> Result<TcpListener> {
    let made = transparent(SockType::Stream, at, None)?;
    listen(&made, Backlog::new(64)?)?;
    let listener = TcpListener::from(made);
    listener.set_nonblocking(true)?;
    Ok(listener)
}

impl Proxy {
    /// Starts one in the node's namespace; what it sends on has the mark.
    pub(crate) fn start(node: &Space, mark: u32) -> Result<Self> {
        let (stop, taken) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (streams, upstreams) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Upstreams::default()));
        node.run(|| {
            let v4 = listener((Ipv4Addr::LOCALHOST, 0).into())?;
            let port = v4.local_addr()?.port();
            let v6 = listener((Ipv6Addr::LOCALHOST, port).into())?;
            let serve = |listener: TcpListener| {
                let (stop, taken) = (Arc::clone(&stop), Arc::clone(&taken));
                let (streams, upstreams) = (Arc::clone(&streams), Arc::clone(&upstreams));
                thread::spawn(move || serve(&listener, mark, &stop, &taken, &streams, &upstreams))
            };
            let threads = vec![serve(v4), serve(v6)];
            let (stop, taken) = (Arc::clone(&stop), Arc::clone(&taken));
            Ok(Self { port, stop, taken, streams: Arc::clone(&streams), upstreams: Arc::clone(&upstreams), threads })
        })?
    }

    /// Where the connections that it sent on come from, as the servers see it.
    pub(crate) fn upstreams(&self) -> Vec<SocketAddr> {
        self.upstreams.made.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The port of connections that it sends on from now on; zero: the kernel chooses.
    pub(crate) fn send_from(&self, port: u16) {
        self.upstreams.from.store(port, Ordering::Relaxed);
    }

    /// Closes the side of all clients, as one that has served its request.
    pub(crate) fn close_all(&self) -> Result<()> {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        for stream in streams.drain(..) {
            match stream.shutdown(Shutdown::Write) {
                Err(e) if e.kind() != ErrorKind::NotConnected => return Err(e).context("close a client's side"),
                _ => {}
            }
        }
        Ok(())
    }

    /// The connections that it took, in order.
    pub(crate) fn taken(&self) -> Vec<Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic was printed, and the client saw its connection end.
            thread.join().ok();
        }
    }
}

fn serve(
    listener: &TcpListener,
    mark: u32,
    stop: &AtomicBool,
    taken: &Mutex<Vec<Taken>>,
    streams: &Mutex<Vec<TcpStream>>,
    upstreams: &Upstreams,
) {
    thread::scope(|scope| {
        while !stop.load(Ordering::Relaxed) {
            let Ok((stream, client)) = listener.accept() else {
                thread::sleep(Duration::from_millis(2));
                continue;
            };
            let Ok(server) = stream.local_addr() else { continue };
            taken.lock().unwrap_or_else(PoisonError::into_inner).push(Taken { client, server });
            if let Ok(copy) = stream.try_clone() {
                streams.lock().unwrap_or_else(PoisonError::into_inner).push(copy);
            }
            scope.spawn(move || {
                match upstream((client.ip(), upstreams.from.load(Ordering::Relaxed)).into(), server, mark) {
                    Ok(upstream) => {
                        let own = upstream.local_addr();
                        upstreams.made.lock().unwrap_or_else(PoisonError::into_inner).extend(own);
                        between(&stream, &upstream, stop);
                    }
                    // The client sees its connection end.
                    Err(error) => eprintln!("the proxy, {client} to {server}: {error:#}"),
                }
            });
        }
    });
}

/// A connection to the server from an address of the client's.
fn upstream(from: SocketAddr, server: SocketAddr, mark: u32) -> Result<TcpStream> {
    let made = transparent(SockType::Stream, from, Some(mark))?;
    setsockopt(&made, sockopt::SendTimeout, &nix::sys::time::TimeVal::new(5, 0))?;
    connect(made.as_raw_fd(), &SockaddrStorage::from(server)).context("connect to the server")?;
    Ok(TcpStream::from(made))
}

/// Copies both directions until both have ended.
fn between(client: &TcpStream, server: &TcpStream, stop: &AtomicBool) {
    thread::scope(|scope| {
        scope.spawn(|| copy(client, server, stop));
        copy(server, client, stop);
    });
}

fn copy(mut from: &TcpStream, mut to: &TcpStream, stop: &AtomicBool) {
    let mut buffer = vec![0; 65_536];
    // A peer that takes nothing must not hold the thread.
    let bounded = from.set_nonblocking(false).and_then(|()| from.set_read_timeout(Some(TICK)));
    if bounded.and_then(|()| to.set_write_timeout(Some(PATIENCE))).is_err() {
        return;
    }
    while !stop.load(Ordering::Relaxed) {
        match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => {
                if to.write_all(buffer.get(..n).unwrap_or_default()).is_err() {
                    break;
                }
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
            Err(_) => break,
        }
    }
    // The other end may be gone already.
    to.shutdown(Shutdown::Write).ok();
}
