//! Sockets, also with foreign addresses (ip(7), `IP_TRANSPARENT`).

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket as StdUdpSocket},
    os::fd::{AsFd, AsRawFd as _, OwnedFd},
};

use nix::{
    errno::Errno,
    setsockopt_impl,
    sys::socket::{
        AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, connect, listen, setsockopt, socket, sockopt,
    },
};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use wharf_common::policy::MARK_PROXIED_EGRESS;

use crate::{proxy::Error, record::Transport};

/// `IPV6_TRANSPARENT` (linux/in6.h).
#[derive(Debug, Clone, Copy)]
struct Ipv6Transparent;
setsockopt_impl!(Ipv6Transparent, libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT, bool, sockopt::SetBool);

/// On the loopback address of each family.
pub(crate) struct Sockets {
    pub(crate) udp: Vec<UdpSocket>,
    pub(crate) tcp: Vec<TcpListener>,
}

impl Sockets {
    /// IPv4 only on a node without IPv6.
    pub(crate) fn open(port: u16) -> Result<Self, Error> {
        if port == 0 {
            return Err(Error::NoPort);
        }
        let mut sockets = Self { udp: Vec::new(), tcp: Vec::new() };
        for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
            let address = SocketAddr::new(ip, port);
            let fail = |transport| move |source| Error::Bind { address, transport, source };
            match udp_listener(address) {
                Ok(socket) => sockets.udp.push(socket),
                Err(error) if ip.is_ipv6() && lacks_family(&error) => continue,
                Err(error) => return Err(fail(Transport::Udp)(error)),
            }
            sockets.tcp.push(tcp_listener(address).map_err(fail(Transport::Tcp))?);
        }
        Ok(sockets)
    }
}

pub(crate) fn lacks_family(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL))
}

fn udp_listener(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = transparent(address.ip(), SockType::Datagram)?;
    match address {
        SocketAddr::V4(_) => setsockopt(&socket, sockopt::Ipv4OrigDstAddr, &true)?,
        SocketAddr::V6(_) => setsockopt(&socket, sockopt::Ipv6OrigDstAddr, &true)?,
    }
    // Not SO_REUSEADDR: any process could take the queries.
    bind(socket.as_raw_fd(), &SockaddrStorage::from(address))?;
    UdpSocket::from_std(StdUdpSocket::from(socket))
}

fn tcp_listener(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = transparent(address.ip(), SockType::Stream)?;
    // Connections can be in TIME_WAIT.
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(address))?;
    // One client must not fill the backlog.
    listen(&socket, Backlog::MAXCONN)?;
    TcpListener::from_std(std::net::TcpListener::from(socket))
}

fn transparent(ip: IpAddr, kind: SockType) -> io::Result<OwnedFd> {
    let socket = plain(ip, kind)?;
    make_transparent(&socket, ip)?;
    Ok(socket)
}

pub(crate) fn make_transparent(socket: &impl AsFd, ip: IpAddr) -> Result<(), Errno> {
    match ip {
        IpAddr::V4(_) => setsockopt(&socket, sockopt::IpTransparent, &true),
        IpAddr::V6(_) => setsockopt(&socket, Ipv6Transparent, &true),
    }
}

fn plain(ip: IpAddr, kind: SockType) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let family = if ip.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = socket(family, kind, flags, None)?;
    if ip.is_ipv6() {
        // Otherwise ::ffff:192.0.2.1 would be queried over IPv4.
        setsockopt(&socket, sockopt::Ipv6V6Only, &true)?;
    }
    Ok(socket)
}

/// From the client's address; to a server on the node from the node's: its answers to the client would not return here.
pub(crate) fn upstream_udp(client: SocketAddr, server: SocketAddr) -> io::Result<UdpSocket> {
    let socket = upstream(client, server, SockType::Datagram)?;
    connect(socket.as_raw_fd(), &SockaddrStorage::from(server))?;
    UdpSocket::from_std(StdUdpSocket::from(socket))
}

/// The caller sets the deadline.
pub(crate) async fn upstream_tcp(client: SocketAddr, server: SocketAddr) -> io::Result<TcpStream> {
    let socket = upstream(client, server, SockType::Stream)?;
    TcpSocket::from_std_stream(std::net::TcpStream::from(socket)).connect(server).await
}

fn upstream(client: SocketAddr, server: SocketAddr, kind: SockType) -> io::Result<OwnedFd> {
    if is_own(server)? {
        let socket = plain(server.ip(), kind)?;
        setsockopt(&socket, sockopt::Mark, &MARK_PROXIED_EGRESS)?;
        return Ok(socket);
    }
    let from_client = || {
        let socket = transparent(client.ip(), kind)?;
        setsockopt(&socket, sockopt::Mark, &MARK_PROXIED_EGRESS)?;
        bind(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(client.ip(), 0)))?;
        let port = nix::sys::socket::getsockname::<SockaddrStorage>(socket.as_raw_fd())?;
        io::Result::Ok((socket, port))
    };
    let (socket, address) = from_client()?;
    let port = address.as_sockaddr_in().map(|a| a.port()).or_else(|| address.as_sockaddr_in6().map(|a| a.port()));
    if port == Some(client.port()) {
        // Both legs would be one flow. The first socket keeps its port.
        return from_client().map(|(second, _)| second);
    }
    Ok(socket)
}

/// The kernel then uses the server's address as source.
fn is_own(server: SocketAddr) -> io::Result<bool> {
    let socket = plain(server.ip(), SockType::Datagram)?;
    connect(socket.as_raw_fd(), &SockaddrStorage::from(server))?;
    Ok(StdUdpSocket::from(socket).local_addr()?.ip() == server.ip())
}
