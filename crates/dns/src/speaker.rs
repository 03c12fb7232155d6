//! Sends answers from the servers' addresses, on raw sockets: a UDP socket would conflict with a server on the node,
//! and take queries.

use std::{
    io::{self, IoSlice},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsRawFd as _, OwnedFd},
};

use nix::{
    setsockopt_impl,
    sys::socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, sendmsg,
        setsockopt, socket, sockopt,
    },
};

use crate::socket::{lacks_family, make_transparent};

/// Bytes (RFC 768).
const HEADER: u16 = 8;
const UDP: u8 = 17;

/// `SO_ATTACH_FILTER` (socket(7)).
#[derive(Debug, Clone, Copy)]
struct AttachFilter;
setsockopt_impl!(
    AttachFilter,
    libc::SOL_SOCKET,
    libc::SO_ATTACH_FILTER,
    libc::sock_fprog,
    sockopt::SetStruct<libc::sock_fprog>
);

#[derive(Debug)]
pub(crate) struct Speaker {
    v4: OwnedFd,
    /// `None` on a node without IPv6.
    v6: Option<OwnedFd>,
}

impl Speaker {
    pub(crate) fn new() -> io::Result<Self> {
        let v6 = match raw(IpAddr::V6(Ipv6Addr::LOCALHOST)) {
            Ok(socket) => Some(socket),
            Err(error) if lacks_family(&error) => None,
            Err(error) => return Err(error),
        };
        Ok(Self { v4: raw(IpAddr::V4(Ipv4Addr::LOCALHOST))?, v6 })
    }

    pub(crate) fn send(&self, server: SocketAddr, client: SocketAddr, answer: &[u8]) -> io::Result<()> {
        let header = header(server, client, answer)?;
        let parts = [IoSlice::new(&header), IoSlice::new(answer)];
        // A raw socket has no ports.
        let to = SockaddrStorage::from(SocketAddr::new(client.ip(), 0));
        let send =
            |socket: &OwnedFd, from| sendmsg(socket.as_raw_fd(), &parts, &[from], MsgFlags::MSG_DONTWAIT, Some(&to));
        match (server.ip(), &self.v6) {
            (IpAddr::V4(ip), _) => {
                let source = libc::in_addr { s_addr: u32::from(ip).to_be() };
                let from = libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: source, ipi_addr: source };
                send(&self.v4, ControlMessage::Ipv4PacketInfo(&from))?;
            }
            (IpAddr::V6(ip), Some(socket)) => {
                let from = libc::in6_pktinfo { ipi6_addr: libc::in6_addr { s6_addr: ip.octets() }, ipi6_ifindex: 0 };
                send(socket, ControlMessage::Ipv6PacketInfo(&from))?;
            }
            (IpAddr::V6(_), None) => return Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT)),
        }
        Ok(())
    }
}

fn raw(loopback: IpAddr) -> io::Result<OwnedFd> {
    let family = if loopback.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Udp)?;
    // The filter (`ret #0`) drops received copies of datagrams.
    let mut nothing = [libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0 }];
    setsockopt(&socket, AttachFilter, &libc::sock_fprog { len: 1, filter: nothing.as_mut_ptr() })?;
    make_transparent(&socket, loopback)?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(loopback, 0)))?;
    Ok(socket)
}

/// With the checksum that IPv6 requires (RFC 8200, section 8.1).
fn header(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> io::Result<[u8; HEADER as usize]> {
    let too_long = |_| io::Error::from_raw_os_error(libc::EMSGSIZE);
    let length = u16::try_from(payload.len() + usize::from(HEADER)).map_err(too_long)?;
    let ([f1, f2], [t1, t2], [l1, l2]) = (from.port().to_be_bytes(), to.port().to_be_bytes(), length.to_be_bytes());
    let header = [f1, f2, t1, t2, l1, l2, 0, 0];
    let mut sum = u64::from(UDP) + u64::from(length);
    for ip in [from.ip(), to.ip()] {
        sum += match ip {
            IpAddr::V4(ip) => words(&ip.octets()),
            IpAddr::V6(ip) => words(&ip.octets()),
        };
    }
    sum += words(&header) + words(payload);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // 0 means no checksum.
    let [.., c1, c2] = match sum ^ 0xffff {
        0 => u64::from(u16::MAX),
        checksum => checksum,
    }
    .to_be_bytes();
    Ok([f1, f2, t1, t2, l1, l2, c1, c2])
}

/// An odd last byte is a high byte.
fn words(bytes: &[u8]) -> u64 {
    let word = |pair: &[u8]| match *pair {
        [high, low] => u64::from(u16::from_be_bytes([high, low])),
        [high] => u64::from(high) << 8,
        _ => 0,
    };
    bytes.chunks(2).map(word).sum()
}
