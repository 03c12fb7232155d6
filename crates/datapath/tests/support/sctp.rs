//! SCTP without the kernel's own: the two packets that begin an association, by raw sockets (RFC 9260).

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::{
    socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, recvfrom, sendto, setsockopt,
        socket, sockopt,
    },
    time::TimeVal,
};

const INIT: u8 = 1;
const INIT_ACK: u8 = 2;
const TAG: [u8; 4] = [0, 0, 0, 9];

/// A raw socket of the calling thread's namespace.
pub(crate) struct Sctp {
    socket: OwnedFd,
    v4: bool,
}

/// A packet that was received.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) from: IpAddr,
    pub(crate) source_port: u16,
    pub(crate) destination_port: u16,
    chunk: u8,
}

impl Sctp {
    pub(crate) fn open(v4: bool) -> Self {
        let family = if v4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let socket = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Sctp).expect("raw socket");
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::new(3, 0)).expect("timeout");
        Self { socket, v4 }
    }

    /// INIT has no verification tag yet.
    pub(crate) fn init(&self, from_port: u16, to: SocketAddr) {
        self.send(from_port, to, [0; 4], INIT);
    }

    pub(crate) fn acknowledge(&self, from_port: u16, to: SocketAddr) {
        self.send(from_port, to, TAG, INIT_ACK);
    }

    fn send(&self, from_port: u16, to: SocketAddr, tag: [u8; 4], chunk: u8) {
        let mut packet = [from_port.to_be_bytes(), to.port().to_be_bytes()].concat();
        packet.extend(tag);
        packet.extend([0; 4]);
        // Chunk: flags, length; tag, window, streams out and in, first number.
        packet.extend([chunk, 0, 0, 20]);
        packet.extend(TAG);
        packet.extend([0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1]);
        let sum = crc32c(&packet).to_le_bytes();
        packet[8..12].copy_from_slice(&sum);
        let to = SockaddrStorage::from(SocketAddr::new(to.ip(), 0));
        sendto(self.socket.as_raw_fd(), &packet, &to, MsgFlags::empty()).expect("send SCTP");
    }

    /// The next packet; its checksum is right.
    pub(crate) fn receive(&self, acknowledgement: bool) -> io::Result<Seen> {
        let mut buffer = [0; 256];
        loop {
            let (length, from) = recvfrom::<SockaddrStorage>(self.socket.as_raw_fd(), &mut buffer)?;
            // IPv4's raw sockets have the header in front.
            let packet = &mut buffer[if self.v4 { 20 } else { 0 }..length];
            let from = from.expect("a source");
            let from = match self.v4 {
                true => from.as_sockaddr_in().expect("IPv4").ip().into(),
                false => IpAddr::from(from.as_sockaddr_in6().expect("IPv6").ip()),
            };
            let port = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
            let seen = Seen { from, source_port: port(0), destination_port: port(2), chunk: packet[12] };
            let sum: [u8; 4] = packet[8..12].try_into().expect("four bytes");
            packet[8..12].fill(0);
            assert_eq!(u32::from_le_bytes(sum), crc32c(packet), "checksum of {seen:?}");
            if seen.chunk == if acknowledgement { INIT_ACK } else { INIT } {
                return Ok(seen);
            }
        }
    }
}

/// CRC-32C (RFC 9260, appendix A).
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 })
    })
}
