//! Ping over raw ICMP sockets: sizes, fragments and exact counts, without a ping program.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, setsockopt, socket, sockopt};

use crate::{echo, space::Space};

/// How long an answer may take: a thousand times what it takes on an idle machine.
const PATIENCE: Duration = Duration::from_secs(3);

/// A number of echo requests to one address.
#[derive(Debug, Clone, Copy)]
pub struct Ping {
    /// Destination.
    pub to: IpAddr,
    /// Requests to send, one after the other's answer.
    pub count: u16,
    /// Bytes after the ICMP header; above 1472 it goes in fragments at an MTU of 1500.
    pub payload: usize,
}

/// What came of a ping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PingReport {
    /// Destination.
    pub to: IpAddr,
    /// Requests sent.
    pub sent: u16,
    /// Right answers: same sequence number, same payload, each counted once.
    pub answered: u16,
    /// Errors of the sending call, in words.
    pub refused: Vec<String>,
}

impl PingReport {
    /// Every request was answered.
    ///
    /// # Errors
    /// When one was not.
    pub fn must_answer(&self) -> Result<()> {
        ensure!(self.sent > 0 && self.answered == self.sent, "ping {}: {self:?}", self.to);
        Ok(())
    }
}

/// Three pings of 56 bytes.
///
/// # Errors
/// When no socket can be made; a missing answer is in the report.
pub fn ping(from: &Space, to: IpAddr) -> Result<PingReport> {
    Ping { to, count: 3, payload: 56 }.run(from)
}

impl Ping {
    /// Sends them from a namespace.
    ///
    /// # Errors
    /// When no socket can be made; a missing answer is in the report.
    pub fn run(self, from: &Space) -> Result<PingReport> {
        let socket = raw_socket(from, self.to.is_ipv6())?;
        let mut report = PingReport { to: self.to, sent: 0, answered: 0, refused: Vec::new() };
        let identifier = identifier();
        let mut answered = BTreeSet::new();
        for sequence in 1..=self.count {
            let request = echo_request(self.to, identifier, sequence, self.payload);
            report.sent += 1;
            match socket.send_to(&request, SocketAddr::new(self.to, 0)) {
                Ok(_) if await_answer(&socket, self.to, &request)? => {
                    answered.insert(sequence);
                }
                Ok(_) => {}
                Err(e) => report.refused.push(e.to_string()),
            }
        }
        report.answered = u16::try_from(answered.len()).context("count answers")?;
        Ok(report)
    }
}

fn raw_socket(from: &Space, v6: bool) -> Result<UdpSocket> {
    let (family, protocol) =
        if v6 { (AddressFamily::Inet6, SockProtocol::IcmpV6) } else { (AddressFamily::Inet, SockProtocol::Icmp) };
    let fd: OwnedFd = from
        .run(|| socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol))?
        .context("make a raw ICMP socket")?;
    // std has no raw socket; its UDP type makes exactly the send and receive calls a raw one needs.
    let socket = UdpSocket::from(fd);
    socket.set_read_timeout(Some(Duration::from_millis(100))).context("set a time limit")?;
    Ok(socket)
}

/// What a trace sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probe {
    /// An echo request.
    Echo,
    /// A UDP datagram to a port that nobody has.
    Udp,
}

/// Sends one probe that so many routers pass on, as traceroute does. Says who answered it; none where nobody did.
///
/// # Errors
/// When no socket can be made, or the probe cannot be sent.
pub fn trace(from: &Space, to: IpAddr, probe: Probe, hops: u8) -> Result<Option<IpAddr>> {
    const UDP_PORT: u16 = 33_434;
    let hears = raw_socket(from, to.is_ipv6())?;
    let request = echo_request(to, identifier(), u16::from(hops), 32);
    let speaks = match probe {
        Probe::Echo => hears.try_clone().context("copy the socket")?,
        Probe::Udp => echo::udp_client(from, SocketAddr::new(to, UDP_PORT))?,
    };
    if to.is_ipv6() {
        setsockopt(&speaks, sockopt::Ipv6Ttl, &i32::from(hops)).context("set the hop limit")?;
    } else {
        setsockopt(&speaks, sockopt::Ipv4Ttl, &i32::from(hops)).context("set the TTL")?;
    }
    match probe {
        Probe::Echo => speaks.send_to(&request, SocketAddr::new(to, 0)),
        Probe::Udp => speaks.send(&request),
    }
    .with_context(|| format!("send a probe to {to}"))?;
    let (answer, errors, inner) = if to.is_ipv6() { (129, [1, 3], 24..40) } else { (0, [3, 11], 16..20) };
    let wanted = match to {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let is_answer = |icmp: &[u8]| {
        let kind = icmp.first().copied().unwrap_or_default();
        // An error has the beginning of the packet that it is about.
        let about = icmp.get(8..).and_then(|packet| packet.get(inner.clone()));
        kind == answer && icmp.get(4..) == request.get(4..) || errors.contains(&kind) && about == Some(&wanted)
    };
    receive(&hears, to.is_ipv6(), is_answer)
}

/// Different for each ping of this process and, by the process id, of its neighbours.
fn identifier() -> u16 {
    use std::sync::atomic::{AtomicU16, Ordering};
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let [a, b, ..] = std::process::id().to_ne_bytes();
    u16::from_ne_bytes([a, b]).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed).wrapping_mul(257))
}

fn echo_request(to: IpAddr, identifier: u16, sequence: u16, payload: usize) -> Vec<u8> {
    let mut packet = vec![if to.is_ipv6() { 128 } else { 8 }, 0, 0, 0];
    packet.extend(identifier.to_be_bytes());
    packet.extend(sequence.to_be_bytes());
    // A pattern with a period of 251, so that fragments put together in the wrong order are seen.
    packet.extend((0..=250_u8).cycle().take(payload));
    if to.is_ipv4() {
        let [high, low] = internet_checksum(&packet).to_be_bytes();
        if let Some(field) = packet.get_mut(2..4) {
            field.copy_from_slice(&[high, low]);
        }
    }
    packet
}

/// Reads until the answer to `request` is there. Others' packets, which a raw socket sees too, are passed over.
fn await_answer(socket: &UdpSocket, to: IpAddr, request: &[u8]) -> Result<bool> {
    let answer_type = if to.is_ipv6() { 129 } else { 0 };
    let is_answer = |icmp: &[u8]| icmp.first() == Some(&answer_type) && icmp.get(4..) == request.get(4..);
    Ok(receive(socket, to.is_ipv6(), is_answer)?.is_some())
}

/// Reads ICMP messages until a wanted one is there; says who sent it.
fn receive(socket: &UdpSocket, v6: bool, is_wanted: impl Fn(&[u8]) -> bool) -> Result<Option<IpAddr>> {
    let end = Instant::now() + PATIENCE;
    let mut buffer = vec![0; 70_000];
    while Instant::now() < end {
        let (n, from) = match socket.recv_from(&mut buffer) {
            Ok(got) => got,
            Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => continue,
            Err(e) => return Err(e).context("receive an ICMP message"),
        };
        let packet = buffer.get(..n).unwrap_or_default();
        // IPv4 raw sockets hand out the IP header too.
        let header = if v6 { 0 } else { usize::from(packet.first().unwrap_or(&0) & 0x0f) * 4 };
        let icmp = packet.get(header..).unwrap_or_default();
        if is_wanted(icmp) {
            return Ok(Some(from.ip()));
        }
    }
    Ok(None)
}

/// RFC 1071.
#[must_use]
pub fn internet_checksum(bytes: &[u8]) -> u16 {
    let mut sum = 0_u32;
    for pair in bytes.chunks(2) {
        let word = match *pair {
            [a, b] => u16::from_be_bytes([a, b]),
            [a] => u16::from_be_bytes([a, 0]),
            _ => 0,
        };
        sum += u32::from(word);
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_rfc_1071_section_3() {
        assert_eq!(internet_checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
    }

    #[test]
    fn a_packet_with_its_checksum_sums_to_zero() {
        let packet = echo_request(IpAddr::from([10, 0, 0, 1]), 7, 9, 33);
        assert_eq!(internet_checksum(&packet), 0);
    }
}
