//! What the container sends.

use anyhow::Result;
use wharf_common::{
    Direction::{Egress, Ingress},
    DropReason::{self, *},
    EndpointConfig,
};
use wharf_tests::{
    frame::{self, BROADCAST, IPV4},
    icmp::internet_checksum,
};

use crate::fixture::{
    A, B, Case, ELSEWHERE4, ELSEWHERE6, Endpoint, FROM_CONTAINER, GATEWAY4, GATEWAY6, OK, REDIRECT, SHOT, check_all,
    pair, udp, with,
};

/// Offsets in a frame.
const ETHERTYPE: usize = 12;
const V4: usize = 14;
const V4_TTL: usize = V4 + 8;
const V4_CHECKSUM: usize = V4 + 10;
const V6: usize = 14;
const V6_HOP_LIMIT: usize = V6 + 7;

fn drop(name: &'static str, packet: Vec<u8>, reason: DropReason) -> Case {
    Case::drop(name, FROM_CONTAINER, packet, reason)
}

fn to_stack(name: &'static str, packet: Vec<u8>) -> Case {
    Case {
        name,
        program: FROM_CONTAINER,
        packet,
        action: OK,
        at_a: vec![(Egress, ForwardedStack)],
        at_b: Vec::new(),
        output: None,
    }
}

fn to_b(name: &'static str, packet: Vec<u8>, output: Vec<u8>) -> Case {
    Case {
        name,
        program: FROM_CONTAINER,
        packet,
        action: REDIRECT,
        at_a: vec![(Egress, ForwardedLocal)],
        at_b: vec![(Ingress, ForwardedLocal)],
        output: Some(output),
    }
}

/// The frame as it must arrive at `mac`'s container: addressed, one hop on, with a checksum computed afresh.
pub(crate) fn arrived4(packet: &[u8], ttl: u8, to: &crate::fixture::Who) -> Vec<u8> {
    let mut packet = with(packet.to_vec(), 0, &[to.mac, to.host_mac].concat());
    packet = with(packet, V4_TTL, &[ttl]);
    packet = with(packet, V4_CHECKSUM, &[0, 0]);
    let header = usize::from(packet[V4] & 0x0f) * 4;
    let checksum = internet_checksum(&packet[V4..V4 + header]);
    with(packet, V4_CHECKSUM, &checksum.to_be_bytes())
}

pub(crate) fn arrived6(packet: &[u8], hop_limit: u8, to: &crate::fixture::Who) -> Vec<u8> {
    with(with(packet.to_vec(), 0, &[to.mac, to.host_mac].concat()), V6_HOP_LIMIT, &[hop_limit])
}

/// A's packet to B with another TTL and a right checksum.
fn with_ttl(ttl: u8) -> Vec<u8> {
    let packet = with(with(udp(A.v4, B.v4), V4_TTL, &[ttl]), V4_CHECKSUM, &[0, 0]);
    let checksum = internet_checksum(&packet[V4..V4 + 20]);
    with(packet, V4_CHECKSUM, &checksum.to_be_bytes())
}

#[test]
fn forwards_to_a_local_endpoint_and_to_the_stack() -> Result<()> {
    let (four, six) = (udp(A.v4, B.v4), udp(A.v6, B.v6));
    let hop = |limit: u8| with(udp(A.v6, B.v6), V6_HOP_LIMIT, &[limit]);
    // More of them follow; `flows` has those.
    let fragment = {
        let packet = with(with(four.clone(), V4 + 6, &[0x20, 0]), V4_CHECKSUM, &[0, 0]);
        let checksum = internet_checksum(&packet[V4..V4 + 20]);
        with(packet, V4_CHECKSUM, &checksum.to_be_bytes())
    };
    // Four bytes of options between header and datagram.
    let options = {
        let mut packet = four.clone();
        packet.splice(34..34, [1, 1, 1, 0]);
        let total = u16::try_from(packet.len() - 14)?;
        let packet = with(with(packet, V4, &[0x46]), V4 + 2, &total.to_be_bytes());
        let packet = with(packet, V4_CHECKSUM, &[0, 0]);
        let checksum = internet_checksum(&packet[V4..V4 + 24]);
        with(packet, V4_CHECKSUM, &checksum.to_be_bytes())
    };
    let padded = [four.clone(), vec![0; 9]].concat();
    let itself4 = udp(A.v4, A.v4);
    let mut cases = vec![
        to_b("v4 to a local endpoint", four.clone(), arrived4(&four, 63, &B)),
        to_b("v6 to a local endpoint", six.clone(), arrived6(&six, 63, &B)),
        to_b("v4 first fragment to a local endpoint", fragment.clone(), arrived4(&fragment, 63, &B)),
        to_b("v4 with options", options.clone(), arrived4(&options, 63, &B)),
        to_b("bytes beyond the total length", padded.clone(), arrived4(&padded, 63, &B)),
        to_b("last TTL that arrives", with_ttl(2), arrived4(&with_ttl(2), 1, &B)),
        to_b("last hop limit that arrives", hop(2), arrived6(&hop(2), 1, &B)),
        to_stack("v4 TTL for the stack to answer", with_ttl(1)),
        to_stack("v6 hop limit for the stack to answer", hop(1)),
        drop("v4 TTL of zero", with_ttl(0), TtlExceeded),
        drop("v6 hop limit of zero", hop(0), TtlExceeded),
        to_stack("v4 to the gateway", udp(A.v4, GATEWAY4)),
        to_stack("v6 to the gateway", udp(A.v6, GATEWAY6)),
        to_stack("v4 elsewhere", udp(A.v4, ELSEWHERE4)),
        to_stack("v6 elsewhere", udp(A.v6, ELSEWHERE6)),
        Case {
            name: "to its own address",
            program: FROM_CONTAINER,
            packet: itself4.clone(),
            action: REDIRECT,
            at_a: vec![(Egress, ForwardedLocal), (Ingress, ForwardedLocal)],
            at_b: Vec::new(),
            output: Some(arrived4(&itself4, 63, &A)),
        },
        // ICMPv6 that is no neighbour message goes where any packet goes.
        to_b("an echo request", echo6(), arrived6(&echo6(), 63, &B)),
    ];
    // Checksums at the edges of one's complement arithmetic: the identification makes the sum anything.
    for (identification, name) in [(0_u16, "v4 identification 0"), (0x7fff, "0x7fff"), (0xffff, "0xffff")] {
        let packet = with(four.clone(), V4 + 4, &identification.to_be_bytes());
        let packet = with(packet, V4_CHECKSUM, &[0, 0]);
        let checksum = internet_checksum(&packet[V4..V4 + 20]);
        let packet = with(packet, V4_CHECKSUM, &checksum.to_be_bytes());
        cases.push(to_b(name, packet.clone(), arrived4(&packet, 63, &B)));
    }
    check_all(cases)
}

fn echo6() -> Vec<u8> {
    let message = [128, 0, 0, 0, 0, 1, 0, 1, 9, 9, 9, 9];
    frame::ethernet(A.host_mac, A.mac, frame::IPV6, &frame::ipv6(A.v6, B.v6, 58, 64, &message))
}

/// The incremental checksum against one computed afresh, for every value that the header's checksum can have.
#[test]
fn mends_every_checksum() -> Result<()> {
    let (a, _b) = pair()?;
    let base = udp(A.v4, B.v4);
    for identification in 0..=u16::MAX {
        let packet = with(with(base.clone(), V4 + 4, &identification.to_be_bytes()), V4_CHECKSUM, &[0, 0]);
        let checksum = internet_checksum(&packet[V4..V4 + 20]);
        let packet = with(packet, V4_CHECKSUM, &checksum.to_be_bytes());
        let outcome = a.run(FROM_CONTAINER, &packet)?;
        assert_eq!(outcome.action, REDIRECT);
        let afresh = arrived4(&packet, 63, &B);
        assert_eq!(outcome.packet, afresh, "identification {identification:#x}");
    }
    Ok(())
}

#[test]
fn drops_what_lies_about_its_source() -> Result<()> {
    let stolen_mac = |packet| with(packet, 6, &B.mac);
    check_all([
        drop("another's MAC over v4", stolen_mac(udp(A.v4, B.v4)), InvalidSourceMac),
        drop("another's MAC over v6", stolen_mac(udp(A.v6, B.v6)), InvalidSourceMac),
        drop("the host's MAC", with(udp(A.v4, B.v4), 6, &A.host_mac), InvalidSourceMac),
        drop("a group MAC", with(udp(A.v4, B.v4), 6, &BROADCAST), InvalidSourceMac),
        drop("another's v4", udp(B.v4, ELSEWHERE4), InvalidSourceIp),
        drop("another's v6", udp(B.v6, ELSEWHERE6), InvalidSourceIp),
        drop("the gateway's v4", udp(GATEWAY4, B.v4), InvalidSourceIp),
        drop("the gateway's v6", udp(GATEWAY6, B.v6), InvalidSourceIp),
        drop("no v4", udp([0, 0, 0, 0], B.v4), InvalidSourceIp),
        drop("no v6", udp([0_u16; 8], B.v6), InvalidSourceIp),
        drop("v4 loopback", udp([127, 0, 0, 1], B.v4), InvalidSourceIp),
        drop("v6 loopback", udp([0_u16, 0, 0, 0, 0, 0, 0, 1], B.v6), InvalidSourceIp),
        drop("link-local v6", udp([0xfe80_u16, 0, 0, 0, 0, 0, 0, 1], B.v6), InvalidSourceIp),
        drop("multicast v4", udp([224, 0, 0, 1], B.v4), InvalidSourceIp),
        drop(
            "v6 that differs in the last bit",
            udp([0xfd00_u16, 0x77, 0, 0, 0, 0, 0, 0x11], ELSEWHERE6),
            InvalidSourceIp,
        ),
        drop(
            "v6 that differs in the first half",
            udp([0xfd00_u16, 0x78, 0, 0, 0, 0, 0, 0x10], ELSEWHERE6),
            InvalidSourceIp,
        ),
        drop("its own v4, mapped, over v6", udp(A.v4.to_ipv6_mapped(), B.v6), InvalidSourceIp),
        drop("to the node's loopback over v4", udp(A.v4, [127, 1, 2, 3]), InvalidDestinationIp),
        drop("to the node's loopback over v6", udp(A.v6, [0_u16, 0, 0, 0, 0, 0, 0, 1]), InvalidDestinationIp),
        drop("to another MAC over v4", with(udp(A.v4, B.v4), 0, &B.mac), InvalidDestinationMac),
        drop("to another MAC over v6", with(udp(A.v6, B.v6), 0, &B.mac), InvalidDestinationMac),
    ])
}

/// `ENDPOINTS` keeps IPv4 addresses as IPv4-mapped ones.
#[test]
fn an_ipv6_packet_finds_no_ipv4_endpoint() -> Result<()> {
    let six = |name, destination: [u16; 8]| drop(name, udp(A.v6, destination), InvalidDestinationIp);
    let [high, low] = [0x0ac8, 0x000b];
    check_all([
        drop("another's v4, mapped", udp(A.v6, B.v4.to_ipv6_mapped()), InvalidDestinationIp),
        drop("its own v4, mapped", udp(A.v6, A.v4.to_ipv6_mapped()), InvalidDestinationIp),
        drop("the gateway's v4, mapped", udp(A.v6, GATEWAY4.to_ipv6_mapped()), InvalidDestinationIp),
        drop("a stranger's v4, mapped", udp(A.v6, ELSEWHERE4.to_ipv6_mapped()), InvalidDestinationIp),
        six("another's v4, compatible", [0, 0, 0, 0, 0, 0, high, low]),
        six("unspecified", [0; 8]),
        six("loopback", [0, 0, 0, 0, 0, 0, 0, 1]),
        drop(
            "its own v4, mapped, as the source too",
            udp(A.v4.to_ipv6_mapped(), B.v4.to_ipv6_mapped()),
            InvalidSourceIp,
        ),
        drop("its own v4, compatible, as the source", udp([0, 0, 0, 0, 0, 0, 0x0ac8, 0x000a], B.v6), InvalidSourceIp),
        // What only looks similar is an address like any other, and nobody's here.
        to_stack("translated", udp(A.v6, [0, 0, 0, 0, 0xffff, 0, high, low])),
        to_stack("by the well-known prefix", udp(A.v6, [0x64, 0xff9b, 0, 0, 0, 0, high, low])),
        to_stack("a bit less", udp(A.v6, [0, 0, 0, 0, 0, 0xfffe, high, low])),
        to_stack("a bit more", udp(A.v6, [0, 0, 0, 1, 0, 0xffff, high, low])),
    ])
}

#[test]
fn drops_groups_and_strangers() -> Result<()> {
    check_all([
        drop("v4 multicast", udp(A.v4, [224, 0, 0, 251]), Multicast),
        drop("last v4 multicast", udp(A.v4, [239, 255, 255, 255]), Multicast),
        drop("v4 broadcast", udp(A.v4, [255, 255, 255, 255]), Multicast),
        drop("v4 by a broadcast frame", with(udp(A.v4, B.v4), 0, &BROADCAST), Multicast),
        drop("an address request", with(udp([0, 0, 0, 0], [255, 255, 255, 255]), 0, &BROADCAST), Multicast),
        drop("v6 multicast", udp(A.v6, [0xff02_u16, 0, 0, 0, 0, 0, 0, 0xfb]), Multicast),
        drop("v6 by a multicast frame", with(udp(A.v6, B.v6), 0, &[0x33, 0x33, 0, 0, 0, 1]), Multicast),
        drop("listener report", listener_report(), Multicast),
        drop("a VLAN tag", tagged(0x8100), UnsupportedL2),
        drop("a service VLAN tag", tagged(0x88a8), UnsupportedL2),
        drop("LLDP", with(udp(A.v4, B.v4), ETHERTYPE, &[0x88, 0xcc]), UnsupportedL2),
        drop("a length for an ethertype", with(udp(A.v4, B.v4), ETHERTYPE, &[0, 46]), UnsupportedL2),
        // 240/4 is not multicast, and is nobody's here.
        to_stack("v4 reserved", udp(A.v4, [240, 0, 0, 1])),
    ])
}

fn tagged(ethertype: u16) -> Vec<u8> {
    let inner = udp(A.v4, B.v4);
    let tag = [&[0, 5][..], &IPV4.to_be_bytes(), &inner[14..]].concat();
    frame::ethernet(A.host_mac, A.mac, ethertype, &tag)
}

/// MLDv2, behind a hop-by-hop header as it always is.
fn listener_report() -> Vec<u8> {
    let payload = [58, 0, 5, 2, 0, 0, 1, 0, 143, 0, 0, 0, 0, 0, 0, 0];
    let packet = frame::ipv6(
        [0xfe80_u16, 0, 0, 0, 0, 0, 0, 1].into(),
        [0xff02_u16, 0, 0, 0, 0, 0, 0, 0x16].into(),
        0,
        1,
        &payload,
    );
    frame::ethernet([0x33, 0x33, 0, 0, 0, 0x16], A.mac, frame::IPV6, &packet)
}

#[test]
fn drops_headers_that_contradict_themselves() -> Result<()> {
    let (four, six) = (udp(A.v4, B.v4), udp(A.v6, B.v6));
    let room4 = u16::try_from(four.len() - 14)?;
    let room6 = u16::try_from(six.len() - 54)?;
    check_all([
        drop("v4 with version 6", with(four.clone(), V4, &[0x65]), Malformed),
        drop("v4 with version 0", with(four.clone(), V4, &[0x05]), Malformed),
        drop("v4 header of 16 bytes", with(four.clone(), V4, &[0x44]), Malformed),
        drop("v4 header of 60 bytes in 53", with(four.clone(), V4, &[0x4f]), Malformed),
        drop("v4 total beyond the packet", with(four.clone(), V4 + 2, &(room4 + 1).to_be_bytes()), Malformed),
        drop("v4 total less than its header", with(four.clone(), V4 + 2, &19_u16.to_be_bytes()), Malformed),
        drop("v4 total of zero in one packet", with(four.clone(), V4 + 2, &[0, 0]), Malformed),
        drop("v4 total of all ones", with(four, V4 + 2, &[0xff, 0xff]), Malformed),
        drop("v6 with version 4", with(six.clone(), V6, &[0x45]), Malformed),
        drop("v6 payload beyond the packet", with(six.clone(), V6 + 4, &(room6 + 1).to_be_bytes()), Malformed),
        drop("v6 payload of all ones", with(six, V6 + 4, &[0xff, 0xff]), Malformed),
    ])
}

#[test]
fn an_endpoint_that_is_not_live_sends_nothing() -> Result<()> {
    let (mut a, b) = pair()?;
    a.configure(EndpointConfig { flags: 0, ..A.config() })?;
    for packet in [udp(A.v4, B.v4), udp(A.v6, B.v6), udp(A.v4, ELSEWHERE4), vec![0; 64]] {
        drop("not live", packet, EndpointNotReady).check(&a, &b)?;
    }
    // The row as the map was born.
    a.configure(EndpointConfig::default())?;
    drop("never configured", udp(A.v4, B.v4), EndpointNotReady).check(&a, &b)
}

#[test]
fn an_endpoint_without_a_family_has_no_source_in_it() -> Result<()> {
    let (mut a, b) = pair()?;
    a.configure(EndpointConfig { ipv4: [0; 4], gateway4: [0; 4], ..A.config() })?;
    drop("v4 without v4", udp(A.v4, B.v4), InvalidSourceIp).check(&a, &b)?;
    drop("the absent v4 itself", udp([0, 0, 0, 0], B.v4), InvalidSourceIp).check(&a, &b)?;
    to_b("v6 beside it", udp(A.v6, B.v6), arrived6(&udp(A.v6, B.v6), 63, &B)).check(&a, &b)?;
    a.configure(EndpointConfig { ipv6: [0; 16], gateway6: [0; 16], ..A.config() })?;
    drop("v6 without v6", udp(A.v6, B.v6), InvalidSourceIp).check(&a, &b)?;
    drop("the absent v6 itself", udp([0_u16; 8], B.v6), InvalidSourceIp).check(&a, &b)
}

#[test]
fn a_destination_whose_program_is_gone_drops_and_nothing_counts_as_forwarded() -> Result<()> {
    let (mut a, b) = (Endpoint::load(A)?, Endpoint::load(B)?);
    a.knows(&B)?;
    let (four, six) = (udp(A.v4, B.v4), udp(A.v6, B.v6));
    let left = |packet: Vec<u8>| Case {
        name: "no program in the slot",
        program: FROM_CONTAINER,
        action: SHOT,
        at_a: vec![(Egress, NoTailCallTarget)],
        at_b: Vec::new(),
        output: Some(packet.clone()),
        packet,
    };
    left(four).check(&a, &b)?;
    left(six).check(&a, &b)
}
