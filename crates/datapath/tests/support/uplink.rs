//! A node with an uplink: two containers behind it, and a host in front of it that has no route to the containers.
//!
//! Plain veths and routes, no programs of Wharf's. The calling thread's namespace is the node's.

use std::{
    fs, io,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

use nix::sys::{
    socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, recvfrom, sendto, setsockopt,
        socket, sockopt,
    },
    time::TimeVal,
};

use super::{LinuxWorld, new_netns, run};

pub(crate) const NODE4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
pub(crate) const NODE6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1));
pub(crate) const WORLD4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));
pub(crate) const WORLD6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2));

/// Long enough for a busy machine; a packet that is lost costs as much.
const PATIENCE: Duration = Duration::from_secs(3);

/// The namespaces beside the node's.
pub(crate) struct Uplink {
    pub(crate) containers: [PathBuf; 2],
    pub(crate) world: PathBuf,
}

/// Address of a container, 0 or 1.
pub(crate) fn container4(n: u8) -> IpAddr {
    Ipv4Addr::new(10, 77, 0, 2 + n).into()
}

pub(crate) fn container6(n: u8) -> IpAddr {
    Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 2 + u16::from(n)).into()
}

fn ip(arguments: &str) {
    run("ip", &arguments.split(' ').collect::<Vec<_>>());
}

fn set(sysctl: &str, value: &str) {
    fs::write(format!("/proc/sys/net/{sysctl}"), value).expect("sysctl of this namespace");
}

impl Uplink {
    /// Builds it in the calling thread's namespace, which must be a fresh one.
    pub(crate) fn new(dir: &Path) -> Self {
        ip("link set lo up");
        for (sysctl, value) in
            [("ipv4/ip_forward", "1"), ("ipv4/conf/all/route_localnet", "1"), ("ipv6/conf/all/forwarding", "1")]
        {
            set(sysctl, value);
        }
        let world = new_netns(dir, "world");
        ip(&format!("link add up0 type veth peer name eth0 netns {}", world.display()));
        for address in ["192.0.2.1/24", "2001:db8::1/64 nodad"] {
            ip(&format!("addr add {address} dev up0"));
        }
        ip("link set up0 up");
        LinuxWorld::inside(&world, || {
            ip("link set lo up");
            for address in ["192.0.2.2/24", "2001:db8::2/64 nodad"] {
                ip(&format!("addr add {address} dev eth0"));
            }
            ip("link set eth0 up");
        });
        let containers = [0, 1].map(|n| Self::add_container(dir, n));
        Self { containers, world }
    }

    fn add_container(dir: &Path, n: u8) -> PathBuf {
        let path = new_netns(dir, &format!("container-{n}"));
        ip(&format!("link add c{n} type veth peer name eth0 netns {}", path.display()));
        ip(&format!("addr add 10.77.0.1/32 dev c{n}"));
        ip(&format!("addr add fe80::1/64 dev c{n} nodad"));
        ip(&format!("link set c{n} up"));
        set(&format!("ipv4/conf/c{n}/route_localnet"), "1");
        let (v4, v6) = (container4(n), container6(n));
        for address in [v4, v6] {
            ip(&format!("route add {address} dev c{n}"));
        }
        LinuxWorld::inside(&path, move || {
            ip("link set lo up");
            ip(&format!("addr add {v4}/32 dev eth0"));
            ip(&format!("addr add {v6}/128 dev eth0 nodad"));
            ip("link set eth0 up");
            ip("route add 10.77.0.1 dev eth0");
            ip("route add default via 10.77.0.1");
            ip("route add default via fe80::1 dev eth0");
        });
        path
    }

    /// The namespace of an address, `None` for the node's.
    fn home(&self, address: IpAddr) -> Option<&Path> {
        let container = (0..).zip(&self.containers).find(|(n, _)| [container4(*n), container6(*n)].contains(&address));
        match container {
            Some((_, path)) => Some(path),
            None if [WORLD4, WORLD6].contains(&address) => Some(&self.world),
            None => None,
        }
    }

    /// A conversation over TCP and one over UDP from the namespace of one address to `target`, which a server at
    /// `server` answers. Returns the sources that the server saw.
    pub(crate) fn converse(&self, from: IpAddr, target: SocketAddr, server: SocketAddr) -> [io::Result<IpAddr>; 2] {
        [self.tcp(from, target, server), self.udp(from, target, server)]
    }

    pub(crate) fn tcp(&self, from: IpAddr, target: SocketAddr, server: SocketAddr) -> io::Result<IpAddr> {
        self.talk(from, target, move || serve_tcp(server), ask_tcp, self.home(server.ip()))
    }

    pub(crate) fn udp(&self, from: IpAddr, target: SocketAddr, server: SocketAddr) -> io::Result<IpAddr> {
        self.talk(from, target, move || serve_udp(server), ask_udp, self.home(server.ip()))
    }

    fn talk<S>(
        &self,
        from: IpAddr,
        target: SocketAddr,
        bind: impl FnOnce() -> S + Send + 'static,
        ask: fn(SocketAddr) -> io::Result<()>,
        home: Option<&Path>,
    ) -> io::Result<IpAddr>
    where
        S: FnOnce() -> io::Result<IpAddr>,
    {
        let (ready, is_ready) = mpsc::channel();
        let home = home.map(Path::to_owned);
        // Bound in the server's namespace before the client asks.
        let server = thread::spawn(move || {
            let serve = move || {
                let serve = bind();
                ready.send(()).expect("the client waits");
                serve()
            };
            in_home(home.as_deref(), serve)
        });
        is_ready.recv().expect("server is ready");
        let asked = in_home(self.home(from), move || ask(target));
        let saw = server.join().expect("server");
        asked.and(saw)
    }

    /// An ICMP echo and its reply.
    pub(crate) fn ping(&self, from: IpAddr, to: IpAddr) -> io::Result<()> {
        in_home(self.home(from), move || echo(to))
    }

    /// The error of a connected UDP socket whose datagram finds nobody.
    pub(crate) fn closed_port(&self, from: IpAddr, to: SocketAddr) -> Option<io::ErrorKind> {
        in_home(self.home(from), move || ask_udp(to)).err().map(|e| e.kind())
    }

    /// Flows of UDP from both containers to one destination, each container with the same ports. Says how many lost
    /// their first datagram or its answer, and how many had no answer to the second either.
    pub(crate) fn flows(&self, to: SocketAddr, each: u16) -> (usize, usize) {
        const FIRST: u16 = 32_768;
        let server = self.at(to.ip(), move || UdpSocket::bind(to).expect("UDP socket"));
        server.set_read_timeout(Some(PATIENCE)).expect("timeout");
        let tries = move |port| {
            let any: IpAddr = Ipv4Addr::UNSPECIFIED.into();
            let socket = UdpSocket::bind((any, port)).expect("UDP socket");
            socket.connect(to).expect("connect");
            socket.set_read_timeout(Some(Duration::from_millis(500))).expect("timeout");
            let ask = || socket.send(b"ping").and_then(|_| socket.recv(&mut [0; 4])).is_ok();
            if ask() { 0 } else { 1 + usize::from(!ask()) }
        };
        thread::scope(|scope| {
            let clients = self.containers.each_ref().map(|home| {
                scope.spawn(move || in_home(Some(home), move || (FIRST..FIRST + each).map(tries).collect::<Vec<_>>()))
            });
            scope.spawn(move || {
                let mut text = [0; 4];
                while let Ok((length, peer)) = server.recv_from(&mut text) {
                    server.send_to(&text[..length], peer).expect("answer");
                }
            });
            let missed: Vec<_> = clients.into_iter().flat_map(|client| client.join().expect("client")).collect();
            (missed.iter().filter(|n| **n > 0).count(), missed.iter().filter(|n| **n > 1).count())
        })
    }

    /// Runs a job in the namespace of an address.
    pub(crate) fn at<T: Send + 'static>(&self, address: IpAddr, job: impl FnOnce() -> T + Send + 'static) -> T {
        in_home(self.home(address), job)
    }
}

fn in_home<T>(home: Option<&Path>, job: impl FnOnce() -> T + Send) -> T
where
    T: Send,
{
    let Some(home) = home else { return job() };
    thread::scope(|scope| {
        let visitor = scope.spawn(|| {
            let namespace = fs::File::open(home).expect("open netns");
            nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).expect("setns");
            job()
        });
        visitor.join().expect("job in namespace")
    })
}

fn serve_tcp(at: SocketAddr) -> impl FnOnce() -> io::Result<IpAddr> {
    let listener = TcpListener::bind(at).expect("TCP listener");
    move || {
        // A listener has no timeout of its own.
        listener.set_nonblocking(true)?;
        let until = std::time::Instant::now() + PATIENCE;
        let (mut stream, peer) = loop {
            match listener.accept() {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && std::time::Instant::now() < until => {
                    thread::sleep(Duration::from_millis(1));
                }
                other => break other?,
            }
        };
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut text = [0; 4];
        stream.read_exact(&mut text)?;
        stream.write_all(&text)?;
        Ok(peer.ip().to_canonical())
    }
}

fn ask_tcp(target: SocketAddr) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&target, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"ping")?;
    stream.read_exact(&mut [0; 4])
}

fn serve_udp(at: SocketAddr) -> impl FnOnce() -> io::Result<IpAddr> {
    let socket = UdpSocket::bind(at).expect("UDP socket");
    move || {
        socket.set_read_timeout(Some(PATIENCE))?;
        let mut text = [0; 4];
        let (length, peer) = socket.recv_from(&mut text)?;
        socket.send_to(&text[..length], peer)?;
        Ok(peer.ip())
    }
}

fn ask_udp(target: SocketAddr) -> io::Result<()> {
    let socket = UdpSocket::bind(if target.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    // A connected socket takes no answer from another address.
    socket.connect(target)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.send(b"ping")?;
    socket.recv(&mut [0; 4]).map(drop)
}

/// Echo request, code, checksum (of IPv6 the kernel makes it), identifier, number.
fn echo(to: IpAddr) -> io::Result<()> {
    let (family, protocol, kind, reply) = match to {
        IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp, 8, 0),
        IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6, 128, 129),
    };
    let raw = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
    setsockopt(&raw, sockopt::ReceiveTimeout, &TimeVal::new(PATIENCE.as_secs().cast_signed(), 0))?;
    let [high, low] = (!((kind << 8) | (0x1234 + 1u16))).to_be_bytes();
    let request = [kind.to_be_bytes()[1], 0, high, low, 0x12, 0x34, 0, 1];
    sendto(raw.as_raw_fd(), &request, &SockaddrStorage::from(SocketAddr::new(to, 0)), MsgFlags::empty())?;
    let mut packet = [0; 128];
    loop {
        let (length, from) = recvfrom::<SockaddrStorage>(raw.as_raw_fd(), &mut packet)?;
        let message = packet.get(if to.is_ipv4() { 20 } else { 0 }..length).unwrap_or_default();
        let source = from.and_then(|from| match to {
            IpAddr::V4(_) => from.as_sockaddr_in().map(|a| a.ip().into()),
            IpAddr::V6(_) => from.as_sockaddr_in6().map(|a| IpAddr::from(a.ip())),
        });
        if message.first() == Some(&reply) && message.get(4..8) == Some(&[0x12, 0x34, 0, 1]) && source == Some(to) {
            return Ok(());
        }
    }
}
