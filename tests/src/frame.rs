//! Frames made by hand, true and false ones, and the packet socket that sends them as they are.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    os::fd::{AsRawFd, OwnedFd},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use nix::{
    ifaddrs::getifaddrs,
    sys::socket::{AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, sendto, socket},
};

use crate::{icmp::internet_checksum, space::Space};

/// A MAC address.
pub type Mac = [u8; 6];

/// Parses `02:00:00:00:00:07`.
///
/// # Errors
/// When it is something else.
pub fn mac(text: &str) -> Result<Mac> {
    let bytes: Vec<u8> = text.split(':').map(|b| u8::from_str_radix(b, 16)).collect::<Result<_, _>>()?;
    bytes.try_into().map_err(|_| anyhow::anyhow!("{text} is not a MAC address"))
}

/// Everyone on the link.
pub const BROADCAST: Mac = [0xff; 6];

/// Ethertype of IPv4.
pub const IPV4: u16 = 0x0800;
/// Ethertype of ARP.
pub const ARP: u16 = 0x0806;
/// Ethertype of IPv6.
pub const IPV6: u16 = 0x86dd;

/// A packet socket on one interface.
#[derive(Debug)]
pub struct PacketSocket {
    socket: OwnedFd,
    link: LinkAddr,
}

impl PacketSocket {
    /// Opens one.
    ///
    /// # Errors
    /// When the namespace has no such interface.
    pub fn open(space: &Space, ifname: &str) -> Result<Self> {
        space.run(|| {
            let link = getifaddrs()
                .context("list interfaces")?
                .filter(|i| i.interface_name == ifname)
                .find_map(|i| i.address.as_ref().and_then(|a| a.as_link_addr().copied()))
                .with_context(|| format!("no interface {ifname} in the namespace"))?;
            let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::EthAll)
                .context("make a packet socket")?;
            Ok(Self { socket, link })
        })?
    }

    /// The interface's MAC address.
    ///
    /// # Errors
    /// When it has none.
    pub fn mac(&self) -> Result<Mac> {
        self.link.addr().context("the interface has no MAC address")
    }

    /// Sends a frame as it is.
    ///
    /// # Errors
    /// When the kernel refuses it.
    pub fn send(&self, frame: &[u8]) -> Result<()> {
        let n = sendto(self.socket.as_raw_fd(), frame, &self.link, MsgFlags::empty()).context("send a frame")?;
        ensure!(n == frame.len(), "only {n} of {} bytes of a frame were sent", frame.len());
        Ok(())
    }

    /// Receives frames (of every interface of the namespace) until one is wanted, at most `limit` long.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn await_frame(&self, limit: Duration, wanted: impl Fn(&[u8]) -> bool) -> Result<Option<Vec<u8>>> {
        let socket = UdpSocket::from(self.socket.try_clone().context("copy the socket")?);
        socket.set_read_timeout(Some(Duration::from_millis(20))).context("set a time limit")?;
        let end = std::time::Instant::now() + limit;
        let mut buffer = vec![0; 65_536];
        while std::time::Instant::now() < end {
            if let Ok(n) = socket.recv(&mut buffer)
                && let Some(frame) = buffer.get(..n).filter(|f| wanted(f))
            {
                return Ok(Some(frame.to_vec()));
            }
        }
        Ok(None)
    }
}

#[must_use]
pub fn ethernet(to: Mac, from: Mac, ethertype: u16, payload: &[u8]) -> Vec<u8> {
    [&to[..], &from, &ethertype.to_be_bytes(), payload].concat()
}

/// ARP for IPv4 over Ethernet: `operation` 1 asks, 2 answers.
#[must_use]
pub fn arp(operation: u16, sender: (Mac, Ipv4Addr), target: (Mac, Ipv4Addr)) -> Vec<u8> {
    [&[0, 1, 8, 0, 6, 4][..], &operation.to_be_bytes(), &sender.0, &sender.1.octets(), &target.0, &target.1.octets()]
        .concat()
}

/// An IP packet of the addresses' family, TTL 64.
#[must_use]
pub fn ip(from: IpAddr, to: IpAddr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => ipv4(from, to, protocol, payload),
        (from, to) => ipv6(to_v6(from), to_v6(to), protocol, 64, payload),
    }
}

fn to_v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

fn ipv4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let length = length(20 + payload.len()).to_be_bytes();
    let mut header =
        [&[0x45, 0][..], &length, &[0, 0, 0x40, 0, 64, protocol, 0, 0], &from.octets(), &to.octets()].concat();
    let checksum = internet_checksum(&header).to_be_bytes();
    if let Some(field) = header.get_mut(10..12) {
        field.copy_from_slice(&checksum);
    }
    [&header, payload].concat()
}

/// An IPv6 packet.
#[must_use]
pub fn ipv6(from: Ipv6Addr, to: Ipv6Addr, next: u8, hop_limit: u8, payload: &[u8]) -> Vec<u8> {
    let length = length(payload.len()).to_be_bytes();
    [&[0x60, 0, 0, 0][..], &length, &[next, hop_limit], &from.octets(), &to.octets(), payload].concat()
}

/// A UDP datagram with its checksum.
#[must_use]
pub fn udp(from: IpAddr, to: IpAddr, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let length = length(8 + payload.len()).to_be_bytes();
    let header = [ports.0.to_be_bytes(), ports.1.to_be_bytes(), length, [0, 0]].concat();
    with_checksum(from, to, 17, 6, [&header, payload].concat())
}

/// A TCP segment without options and data (RFC 9293, 3.1), with its checksum.
#[must_use]
pub fn tcp(from: IpAddr, to: IpAddr, ports: (u16, u16), sequence: u32, flags: u8) -> Vec<u8> {
    let ports = [ports.0.to_be_bytes(), ports.1.to_be_bytes()].concat();
    let rest = [0x50, flags, 0xff, 0xff, 0, 0, 0, 0];
    with_checksum(from, to, 6, 16, [&ports[..], &sequence.to_be_bytes(), &[0; 4], &rest].concat())
}

/// ICMPv6 neighbour solicitation (135) or advertisement (136) for `target`, with a link-layer address option.
#[must_use]
pub fn neighbour(kind: u8, from: Ipv6Addr, to: Ipv6Addr, target: Ipv6Addr, link_address: Mac) -> Vec<u8> {
    let solicitation = kind == 135;
    let flags = if solicitation { 0 } else { 0x60 };
    let option = [if solicitation { 1 } else { 2 }, 1];
    let message = [&[kind, 0, 0, 0, flags, 0, 0, 0][..], &target.octets(), &option, &link_address].concat();
    let message = with_checksum(from.into(), to.into(), 58, 2, message);
    ipv6(from, to, 58, 255, &message)
}

/// Fills the checksum field at `offset` over the pseudo header (RFC 768, RFC 8200 section 8.1) and the message.
fn with_checksum(from: IpAddr, to: IpAddr, protocol: u8, offset: usize, mut message: Vec<u8>) -> Vec<u8> {
    let length = u32::from(length(message.len())).to_be_bytes();
    let pseudo = match (from, to) {
        (IpAddr::V4(a), IpAddr::V4(b)) => [&a.octets()[..], &b.octets()].concat(),
        (a, b) => [to_v6(a).octets(), to_v6(b).octets()].concat(),
    };
    let sum = internet_checksum(&[&pseudo, &length[..], &[0, 0, 0, protocol], &message].concat());
    // Zero would mean "no checksum" in UDP.
    let sum = if sum == 0 { 0xffff } else { sum };
    if let Some(field) = message.get_mut(offset..offset + 2) {
        field.copy_from_slice(&sum.to_be_bytes());
    }
    message
}

fn length(bytes: usize) -> u16 {
    u16::try_from(bytes).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv4_header_with_its_checksum_sums_to_zero() {
        let packet = ip(IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]), 17, b"abc");
        assert_eq!(internet_checksum(&packet[..20]), 0);
        assert_eq!(packet.len(), 23);
    }

    #[test]
    fn a_neighbour_solicitation_sums_to_zero_with_its_pseudo_header() {
        let (a, b) = (Ipv6Addr::LOCALHOST, Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1));
        let packet = neighbour(135, a, b, b, [2, 0, 0, 0, 0, 1]);
        let pseudo = [&a.octets()[..], &b.octets(), &[0, 0, 0, 32, 0, 0, 0, 58], &packet[40..]].concat();
        assert_eq!(internet_checksum(&pseudo), 0);
    }
}
