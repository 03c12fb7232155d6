//! Test packets. Without payload: programs decide by headers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{ids::MacAddr, nat::Protocol};

const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xdd];
const ARP: [u8; 2] = [0x08, 0x06];
const UDP: u8 = 17;
const TCP: u8 = 6;
/// Discard (RFC 863).
const PORT: u16 = 9;
const ICMPV6: u8 = 58;
/// RFC 4861, 7.1.1: no router forwarded it.
const NEIGHBOUR_HOPS: u8 = 255;

fn ethernet(to: MacAddr, from: MacAddr, ethertype: [u8; 2], payload: &[u8]) -> Vec<u8> {
    [&to.0[..], &from.0, &ethertype, payload].concat()
}

/// RFC 1071; parts of even length.
fn checksum(parts: &[&[u8]]) -> [u8; 2] {
    let mut sum = 0_u32;
    for part in parts {
        for word in part.chunks(2) {
            let word = [word.first().copied().unwrap_or(0), word.get(1).copied().unwrap_or(0)];
            sum += u32::from(u16::from_be_bytes(word));
            sum = (sum & 0xffff) + (sum >> 16);
        }
    }
    let [_, _, high, low] = (!sum).to_be_bytes();
    [high, low]
}

/// A datagram or a TCP SYN, whose checksum no program reads.
pub(super) fn opening(
    macs: (MacAddr, MacAddr),
    from: IpAddr,
    to: IpAddr,
    ttl: u8,
    protocol: Protocol,
    port: u16,
) -> Vec<u8> {
    if protocol != Protocol::Tcp {
        return udp_to(port, macs, from, to, ttl);
    }
    const BYTES: u8 = 20;
    const SYN: u8 = 2;
    let [high, low] = port.to_be_bytes();
    let [source_high, source_low] = PORT.to_be_bytes();
    // Five 32-bit words.
    let segment = [source_high, source_low, high, low, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, SYN, 0x10, 0, 0, 0, 0, 0];
    let (to_mac, from_mac) = macs;
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let header = header4(20 + BYTES, TCP, ttl, from, to);
            ethernet(to_mac, from_mac, IPV4, &[&header[..], &segment].concat())
        }
        (from, to) => {
            let addresses = [octets6(from), octets6(to)].concat();
            let header = [&[0x60, 0, 0, 0, 0, BYTES, TCP, ttl][..], &addresses].concat();
            ethernet(to_mac, from_mac, IPV6, &[&header[..], &segment].concat())
        }
    }
}

fn header4(length: u8, protocol: u8, ttl: u8, from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
    let mut header =
        [&[0x45, 0, 0, length, 0, 0, 0x40, 0, ttl, protocol, 0, 0][..], &from.octets(), &to.octets()].concat();
    let sum = checksum(&[&header]);
    for (at, byte) in header.iter_mut().skip(10).zip(sum) {
        *at = byte;
    }
    header
}

pub(super) fn udp(macs: (MacAddr, MacAddr), from: IpAddr, to: IpAddr, ttl: u8) -> Vec<u8> {
    udp_to(PORT, macs, from, to, ttl)
}

fn udp_to(port: u16, macs: (MacAddr, MacAddr), from: IpAddr, to: IpAddr, ttl: u8) -> Vec<u8> {
    let (to_mac, from_mac) = macs;
    let ports = [PORT.to_be_bytes(), port.to_be_bytes()].concat();
    const LENGTH: [u8; 2] = [0, 8];
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let header = header4(28, UDP, ttl, from, to);
            // No checksum (RFC 768).
            ethernet(to_mac, from_mac, IPV4, &[&header[..], &ports, &LENGTH, &[0, 0]].concat())
        }
        (from, to) => {
            let (from, to) = (octets6(from), octets6(to));
            let sum = checksum(&[&from, &to, &[0, 0, 0, 8, 0, 0, 0, UDP], &ports, &LENGTH]);
            // IPv6 forbids zero, which means none (RFC 8200, 8.1).
            let sum = if sum == [0, 0] { [0xff, 0xff] } else { sum };
            let header = [&[0x60, 0, 0, 0, 0, 8, UDP, ttl][..], &from, &to].concat();
            ethernet(to_mac, from_mac, IPV6, &[&header[..], &ports, &LENGTH, &sum].concat())
        }
    }
}

fn octets6(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(a) => a.to_ipv6_mapped().octets(),
        IpAddr::V6(a) => a.octets(),
    }
}

/// RFC 826; operation 1 is a request, 2 a reply.
pub(super) fn arp(
    macs: (MacAddr, MacAddr),
    operation: u8,
    sender: (MacAddr, Ipv4Addr),
    target: (MacAddr, Ipv4Addr),
) -> Vec<u8> {
    let message =
        [&[0, 1, 8, 0, 6, 4, 0, operation][..], &sender.0.0, &sender.1.octets(), &target.0.0, &target.1.octets()]
            .concat();
    ethernet(macs.0, macs.1, ARP, &message)
}

/// RFC 4861, 4.3, to the solicited-node group (RFC 4291, 2.7.1).
pub(super) fn solicitation(from_mac: MacAddr, from: Ipv6Addr, target: Ipv6Addr) -> Vec<u8> {
    let [.., a, b, c] = target.octets();
    let group = Ipv6Addr::from([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c]);
    let message = neighbour([135, 0], [0; 4], target, (1, from_mac), from, group);
    ethernet(MacAddr([0x33, 0x33, 0xff, a, b, c]), from_mac, IPV6, &message)
}

/// Solicited, of a router, with the override flag (RFC 4861, 4.4).
pub(super) fn advertisement(macs: (MacAddr, MacAddr), target: Ipv6Addr, asker: Ipv6Addr) -> Vec<u8> {
    let message = neighbour([136, 0], [0xe0, 0, 0, 0], target, (2, macs.1), target, asker);
    ethernet(macs.0, macs.1, IPV6, &message)
}

fn neighbour(
    kind: [u8; 2],
    flags: [u8; 4],
    target: Ipv6Addr,
    option: (u8, MacAddr),
    from: Ipv6Addr,
    to: Ipv6Addr,
) -> Vec<u8> {
    let (from, to) = (from.octets(), to.octets());
    let body = [&flags[..], &target.octets(), &[option.0, 1], &option.1.0].concat();
    let sum = checksum(&[&from, &to, &[0, 0, 0, 32, 0, 0, 0, ICMPV6], &kind, &body]);
    [&[0x60, 0, 0, 0, 0, 32, ICMPV6, NEIGHBOUR_HOPS][..], &from, &to, &kind, &sum, &body].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACS: (MacAddr, MacAddr) = (MacAddr([2, 0, 0, 0, 0, 1]), MacAddr([2, 0, 0, 0, 0, 2]));

    #[test]
    fn headers_sum_to_zero_with_their_checksums() {
        let v4 = udp(MACS, [10, 0, 0, 1].into(), [10, 0, 0, 2].into(), 64);
        assert_eq!(v4.len(), 42);
        assert_eq!(checksum(&[v4.get(14..34).unwrap_or_default()]), [0, 0]);
        let (a, b) = (Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1), Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2));
        let v6 = udp(MACS, a.into(), b.into(), 64);
        let pseudo = [&a.octets()[..], &b.octets(), &[0, 0, 0, 8, 0, 0, 0, 17]].concat();
        assert_eq!(checksum(&[&pseudo, v6.get(54..).unwrap_or_default()]), [0, 0]);
        let advertised = advertisement(MACS, a, b);
        let pseudo = [&a.octets()[..], &b.octets(), &[0, 0, 0, 32, 0, 0, 0, 58]].concat();
        assert_eq!(advertised.len(), 86);
        assert_eq!(checksum(&[&pseudo, advertised.get(54..).unwrap_or_default()]), [0, 0]);
    }
}
