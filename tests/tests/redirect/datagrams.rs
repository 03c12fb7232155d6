//! A transparent UDP proxy: it takes the datagrams that the node hands over, sends them on in the client's name, and
//! answers in the server's.

use std::{
    collections::HashMap,
    io::{ErrorKind, IoSliceMut},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket},
    os::fd::AsRawFd as _,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, SockType, SockaddrStorage, connect, recvmsg, sendto, setsockopt, sockopt,
};
use wharf_tests::{frame, space::Space};

use crate::proxy::{Taken, transparent};

/// How long a thread waits for a client before it looks at the servers.
const TICK: Duration = Duration::from_millis(2);

/// What the threads of a proxy share with the test.
#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    /// Answers wait as long as this is set.
    holds: AtomicBool,
    /// Port of the next flow that is sent on; zero for any.
    from: AtomicU16,
    /// A server's host said that nobody is there.
    refused: AtomicBool,
    taken: Mutex<Vec<Taken>>,
    /// Of each flow that was sent on, the address and the port that the proxy took for it.
    upstreams: Mutex<Vec<SocketAddr>>,
    /// The socket of each flow that was sent on, by client and server.
    flows: Mutex<HashMap<(SocketAddr, SocketAddr), UdpSocket>>,
}

/// A proxy of a node's, which stops when it is dropped.
#[derive(Debug)]
pub(crate) struct Datagrams {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

fn locked<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Datagrams {
    /// Starts one in the node's namespace, at a port of the loopback addresses; what it sends on has the mark.
    pub(crate) fn start(node: &Space, port: u16, mark: u32) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        node.run(|| {
            let sockets =
                [listener((Ipv4Addr::LOCALHOST, port).into())?, listener((Ipv6Addr::LOCALHOST, port).into())?];
            let serve = |socket: UdpSocket| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || serve(&socket, mark, &shared))
            };
            let threads = sockets.map(serve).into();
            Ok(Self { shared: Arc::clone(&shared), threads })
        })?
    }

    /// The datagrams that it took, in order, since this was asked last.
    pub(crate) fn taken(&self) -> Vec<Taken> {
        std::mem::take(&mut *locked(&self.shared.taken))
    }

    /// Where the flows that it sent on come from, as the servers see it.
    pub(crate) fn upstreams(&self) -> Vec<SocketAddr> {
        locked(&self.shared.upstreams).clone()
    }

    /// Whether answers wait.
    pub(crate) fn hold(&self, holds: bool) {
        self.shared.holds.store(holds, Ordering::Relaxed);
    }

    /// Whether a server's answer waits to be sent on.
    pub(crate) fn is_answered(&self) -> bool {
        locked(&self.shared.flows).values().any(|upstream| upstream.peek(&mut [0]).is_ok())
    }

    /// The port of the next flow that it sends on.
    pub(crate) fn send_from(&self, port: u16) {
        self.shared.from.store(port, Ordering::Relaxed);
    }

    /// Whether a server's host said, since this was asked last, that nobody is there.
    pub(crate) fn is_refused(&self) -> bool {
        self.shared.refused.swap(false, Ordering::Relaxed)
    }

    /// Closes the sockets of all flows that it sent on.
    pub(crate) fn close_all(&self) {
        locked(&self.shared.flows).clear();
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic was printed, and the client got no answer.
            thread.join().ok();
        }
    }
}

fn listener(at: SocketAddr) -> Result<UdpSocket> {
    let made = transparent(SockType::Datagram, at, None)?;
    match at {
        SocketAddr::V4(_) => setsockopt(&made, sockopt::Ipv4OrigDstAddr, &true)?,
        SocketAddr::V6(_) => setsockopt(&made, sockopt::Ipv6OrigDstAddr, &true)?,
    }
    let socket = UdpSocket::from(made);
    socket.set_read_timeout(Some(TICK))?;
    Ok(socket)
}

fn serve(listener: &UdpSocket, mark: u32, shared: &Shared) {
    let v4 = listener.local_addr().is_ok_and(|at| at.is_ipv4());
    let mut buffer = vec![0; 65_536];
    while !shared.stop.load(Ordering::Relaxed) {
        if let Some((bytes, taken)) = next(listener, &mut buffer) {
            locked(&shared.taken).push(taken);
            if let Err(error) = send_on(buffer.get(..bytes).unwrap_or_default(), taken, mark, shared) {
                // The client gets no answer.
                eprintln!("the proxy, {taken:?}: {error:#}");
            }
        }
        if shared.holds.load(Ordering::Relaxed) {
            continue;
        }
        for ((client, server), upstream) in locked(&shared.flows).iter().filter(|((to, _), _)| to.is_ipv4() == v4) {
            let bytes = match upstream.recv(&mut buffer) {
                Ok(bytes) => bytes,
                Err(e) => {
                    // No answer yet, or the server's host said that nobody is there: then the client gets none.
                    shared.refused.fetch_or(e.kind() == ErrorKind::ConnectionRefused, Ordering::Relaxed);
                    continue;
                }
            };
            if let Err(error) = answer(*server, *client, buffer.get(..bytes).unwrap_or_default()) {
                eprintln!("the proxy, from {server} to {client}: {error:#}");
            }
        }
    }
}

/// A datagram's length, who sent it, and to whom.
fn next(listener: &UdpSocket, buffer: &mut [u8]) -> Option<(usize, Taken)> {
    let mut space = nix::cmsg_space!(nix::libc::sockaddr_in6);
    let mut parts = [IoSliceMut::new(buffer)];
    let got = recvmsg::<SockaddrStorage>(listener.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::empty()).ok()?;
    let client = address(&got.address?)?;
    let server = got.cmsgs().ok()?.find_map(|message| match message {
        ControlMessageOwned::Ipv4OrigDstAddr(to) => {
            Some(SocketAddrV4::new(u32::from_be(to.sin_addr.s_addr).into(), u16::from_be(to.sin_port)).into())
        }
        ControlMessageOwned::Ipv6OrigDstAddr(to) => {
            Some(SocketAddrV6::new(to.sin6_addr.s6_addr.into(), u16::from_be(to.sin6_port), 0, 0).into())
        }
        _ => None,
    })?;
    Some((got.bytes, Taken { client, server }))
}

fn address(found: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = found.as_sockaddr_in().map(|v4| SocketAddr::from((v4.ip(), v4.port())));
    v4.or_else(|| found.as_sockaddr_in6().map(|v6| SocketAddr::from((v6.ip(), v6.port()))))
}

fn send_on(datagram: &[u8], Taken { client, server }: Taken, mark: u32, shared: &Shared) -> Result<()> {
    let mut flows = locked(&shared.flows);
    let upstream = match flows.get(&(client, server)) {
        Some(upstream) => upstream,
        None => {
            let made = upstream(client, server, mark, shared.from.swap(0, Ordering::Relaxed))?;
            locked(&shared.upstreams).push(made.local_addr()?);
            flows.entry((client, server)).or_insert(made)
        }
    };
    upstream.send(datagram).context("send on").map(drop)
}

/// A socket for what a client sends to a server: from the client's address, or, where the server is the node itself,
/// from the node's.
fn upstream(client: SocketAddr, server: SocketAddr, mark: u32, port: u16) -> Result<UdpSocket> {
    let plain: SocketAddr =
        if server.is_ipv4() { (Ipv4Addr::UNSPECIFIED, 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
    let is_nodes = UdpSocket::bind((server.ip(), 0)).is_ok();
    let made = if is_nodes {
        UdpSocket::bind(plain)?
    } else {
        transparent(SockType::Datagram, (client.ip(), port).into(), Some(mark))?.into()
    };
    connect(made.as_raw_fd(), &SockaddrStorage::from(server)).context("connect to the server")?;
    made.set_nonblocking(true)?;
    Ok(made)
}

/// Sends a datagram in the server's name. A socket of UDP that is bound there would get what others send to the server.
fn answer(server: SocketAddr, client: SocketAddr, payload: &[u8]) -> Result<()> {
    let raw = transparent(SockType::Raw, (server.ip(), 0).into(), None)?;
    let to = SockaddrStorage::from(SocketAddr::new(client.ip(), 0));
    let datagram = frame::udp(server.ip(), client.ip(), (server.port(), client.port()), payload);
    sendto(raw.as_raw_fd(), &datagram, &to, MsgFlags::empty()).context("answer").map(drop)
}
