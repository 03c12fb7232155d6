//! SCTP without the kernel's own: the two packets that begin an association, by raw sockets (RFC 9260).

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::{
    socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, recvfrom, sendto, setsockopt,
        socket, sockopt,
    },
    time::TimeVal,
};

use crate::space::Space;

/// Chunks.
const INIT: u8 = 1;
const INIT_ACK: u8 = 2;
/// The one tag of all associations.
const TAG: [u8; 4] = [0, 0, 0, 9];

/// A raw socket, which sees every SCTP packet of its namespace.
#[derive(Debug)]
pub struct SctpSocket {
    socket: OwnedFd,
    v4: bool,
}

impl SctpSocket {
    /// Opens one of a family.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn open(space: &Space, v4: bool) -> Result<Self> {
        let family = if v4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let open = || socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Sctp);
        let socket = space.run(open)?.context("make a raw socket")?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::new(5, 0)).context("set a time limit")?;
        Ok(Self { socket, v4 })
    }

    /// Asks for an association.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn init(&self, from_port: u16, to: SocketAddr) -> Result<()> {
        // There is no tag yet.
        self.send(from_port, to, [0; 4], INIT)
    }

    /// Answers [`Self::init`].
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn acknowledge(&self, from_port: u16, to: SocketAddr) -> Result<()> {
        self.send(from_port, to, TAG, INIT_ACK)
    }

    fn send(&self, from_port: u16, to: SocketAddr, tag: [u8; 4], chunk: u8) -> Result<()> {
        let ports = [from_port.to_be_bytes(), to.port().to_be_bytes()].concat();
        // Flags, length; tag, window, streams out and in, first number.
        let rest = [&[chunk, 0, 0, 20][..], &TAG, &[0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1]].concat();
        let packet = |sum: [u8; 4]| [&ports[..], &tag, &sum, &rest].concat();
        let sum = crc32c(&packet([0; 4])).to_le_bytes();
        let to = SockaddrStorage::from(SocketAddr::new(to.ip(), 0));
        sendto(self.socket.as_raw_fd(), &packet(sum), &to, MsgFlags::empty()).context("send SCTP").map(drop)
    }

    /// Who asks for an association next, or acknowledges one, and the port that the packet came to. Its checksum is
    /// right.
    ///
    /// # Errors
    /// When none comes in time.
    pub fn receive(&self, acknowledgement: bool) -> Result<(SocketAddr, u16)> {
        let wanted = if acknowledgement { INIT_ACK } else { INIT };
        loop {
            let mut buffer = [0; 256];
            let (length, from) =
                recvfrom::<SockaddrStorage>(self.socket.as_raw_fd(), &mut buffer).context("no SCTP")?;
            let from = from.context("a packet without a source")?;
            let from: IpAddr = match (from.as_sockaddr_in(), from.as_sockaddr_in6()) {
                (Some(v4), _) => v4.ip().into(),
                (_, Some(v6)) => v6.ip().into(),
                _ => bail!("a packet of another family"),
            };
            // IPv4's raw sockets have the header in front.
            let packet = buffer.get(if self.v4 { 20 } else { 0 }..length).context("a packet that is cut short")?;
            let [a, b, c, d, _, _, _, _, sum @ .., chunk] = packet.first_chunk::<13>().context("no chunk")?;
            let zeroed =
                [packet.get(..8), Some(&[0; 4]), packet.get(12..)].into_iter().flatten().collect::<Vec<_>>().concat();
            ensure!(u32::from_le_bytes(*sum) == crc32c(&zeroed), "a packet of {from} with a wrong checksum");
            if *chunk == wanted {
                return Ok((SocketAddr::new(from, u16::from_be_bytes([*a, *b])), u16::from_be_bytes([*c, *d])));
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

#[cfg(test)]
mod tests {
    #[test]
    fn the_checksum_is_the_one_of_the_standards_example() {
        assert_eq!(super::crc32c(b"123456789"), 0xe306_9283);
    }
}
