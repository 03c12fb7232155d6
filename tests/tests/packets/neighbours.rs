//! ARP and neighbour discovery of the container.

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::Result;
use wharf_common::{
    Direction::Egress,
    DropReason::{self, *},
    EndpointConfig,
};
use wharf_tests::{
    frame::{self, ARP, BROADCAST, IPV6, Mac},
    icmp::internet_checksum,
};

use crate::fixture::{A, B, Case, FROM_CONTAINER, GATEWAY4, GATEWAY6, REDIRECT, check_all, pair, with};

const NOBODY: Mac = [0; 6];
const ANY: Ipv4Addr = Ipv4Addr::UNSPECIFIED;
const LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xaaff, 0xfe00, 0xa);
/// Where solicitations for the gateway go.
const SOLICITED_NODE: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 1);
const SOLICITED_NODE_MAC: Mac = [0x33, 0x33, 0xff, 0, 0, 1];
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);

fn arp(operation: u16, sender: (Mac, Ipv4Addr), target: (Mac, Ipv4Addr)) -> Vec<u8> {
    frame::ethernet(BROADCAST, A.mac, ARP, &frame::arp(operation, sender, target))
}

pub(crate) fn answered(name: &'static str, packet: Vec<u8>, output: Vec<u8>) -> Case {
    Case {
        name,
        program: FROM_CONTAINER,
        packet,
        action: REDIRECT,
        at_a: vec![(Egress, NeighbourAnswered)],
        at_b: Vec::new(),
        output: Some(output),
    }
}

fn drop(name: &'static str, packet: Vec<u8>, reason: DropReason) -> Case {
    Case::drop(name, FROM_CONTAINER, packet, reason)
}

pub(crate) fn arp_answer(asker: Ipv4Addr) -> Vec<u8> {
    frame::ethernet(A.mac, A.host_mac, ARP, &frame::arp(2, (A.host_mac, GATEWAY4), (A.mac, asker)))
}

#[test]
fn answers_arp_for_the_gateway() -> Result<()> {
    let question = arp(1, (A.mac, A.v4), (NOBODY, GATEWAY4));
    check_all([
        answered("by broadcast", question.clone(), arp_answer(A.v4)),
        answered("by unicast, as a refresh is", with(question.clone(), 0, &A.host_mac), arp_answer(A.v4)),
        answered("as a probe", arp(1, (A.mac, ANY), (NOBODY, GATEWAY4)), arp_answer(ANY)),
        answered("with padding", [question, vec![0; 18]].concat(), [arp_answer(A.v4), vec![0; 18]].concat()),
    ])
}

#[test]
fn drops_every_other_arp() -> Result<()> {
    let question = arp(1, (A.mac, A.v4), (NOBODY, GATEWAY4));
    check_all([
        drop("for another endpoint", arp(1, (A.mac, A.v4), (NOBODY, B.v4)), NeighbourUnknown),
        drop("a probe for its own address", arp(1, (A.mac, ANY), (NOBODY, A.v4)), NeighbourUnknown),
        drop("an announcement of itself", arp(1, (A.mac, A.v4), (NOBODY, A.v4)), NeighbourUnknown),
        drop("an answer about itself", arp(2, (A.mac, A.v4), (A.host_mac, GATEWAY4)), NeighbourUnknown),
        drop("a probe for nothing", arp(1, (A.mac, ANY), (NOBODY, ANY)), NeighbourUnknown),
        drop("an answer that it is the gateway", arp(2, (A.mac, GATEWAY4), (BROADCAST, GATEWAY4)), NeighbourSpoof),
        drop("a question as another", arp(1, (A.mac, B.v4), (NOBODY, GATEWAY4)), NeighbourSpoof),
        drop("a question with another's MAC", arp(1, (B.mac, A.v4), (NOBODY, GATEWAY4)), NeighbourSpoof),
        drop("a frame with another's MAC", with(question.clone(), 6, &B.mac), InvalidSourceMac),
        drop("hardware not Ethernet", with(question.clone(), 14, &[0, 6]), Malformed),
        drop("protocol not IPv4", with(question.clone(), 16, &[0x86, 0xdd]), Malformed),
        drop("hardware addresses of 8 bytes", with(question.clone(), 18, &[8]), Malformed),
        drop("protocol addresses of 16 bytes", with(question.clone(), 19, &[16]), Malformed),
        drop("operation 0", with(question.clone(), 20, &[0, 0]), Malformed),
        drop("RARP's operation", with(question.clone(), 20, &[0, 3]), Malformed),
        drop("cut short", question[..41].to_vec(), Malformed),
    ])
}

pub(crate) fn solicitation(from: Ipv6Addr, to: Ipv6Addr, target: Ipv6Addr, mac: Mac) -> Vec<u8> {
    let to_mac = if to.is_multicast() { SOLICITED_NODE_MAC } else { A.host_mac };
    frame::ethernet(to_mac, A.mac, IPV6, &frame::neighbour(135, from, to, target, mac))
}

/// The same without its option.
fn bare(from: Ipv6Addr, to: Ipv6Addr, target: Ipv6Addr) -> Vec<u8> {
    let mut packet = solicitation(from, to, target, A.mac);
    packet.truncate(78);
    with(packet, 18, &24_u16.to_be_bytes())
}

/// The same with more options than the one: the nonce of RFC 7527.
fn with_nonce(from: Ipv6Addr, to: Ipv6Addr, target: Ipv6Addr) -> Vec<u8> {
    let packet = [solicitation(from, to, target, A.mac), vec![14, 1, 1, 2, 3, 4, 5, 6]].concat();
    with(packet, 18, &40_u16.to_be_bytes())
}

/// The advertisement, made from the standard: router, solicited and override, with the host side's MAC.
pub(crate) fn advertisement(to: Ipv6Addr) -> Vec<u8> {
    let packet = frame::ethernet(A.mac, A.host_mac, IPV6, &frame::neighbour(136, GATEWAY6, to, GATEWAY6, A.host_mac));
    let packet = with(with(packet, 58, &[0xe0]), 56, &[0, 0]);
    let pseudo = [&packet[22..54], &[0, 0, 0, 32, 0, 0, 0, 58], &packet[54..]].concat();
    with(packet, 56, &internet_checksum(&pseudo).to_be_bytes())
}

#[test]
fn answers_solicitations_for_the_gateway() -> Result<()> {
    check_all([
        answered("by multicast", solicitation(A.v6, SOLICITED_NODE, GATEWAY6, A.mac), advertisement(A.v6)),
        answered("by unicast, as a refresh is", solicitation(A.v6, GATEWAY6, GATEWAY6, A.mac), advertisement(A.v6)),
        answered(
            "from link-local",
            solicitation(LINK_LOCAL, SOLICITED_NODE, GATEWAY6, A.mac),
            advertisement(LINK_LOCAL),
        ),
        answered("without option", bare(A.v6, GATEWAY6, GATEWAY6), advertisement(A.v6)),
        answered("with more options", with_nonce(A.v6, SOLICITED_NODE, GATEWAY6), advertisement(A.v6)),
    ])
}

/// The checksum in software, for many askers.
#[test]
fn advertisements_sum_to_zero() -> Result<()> {
    let (a, _b) = pair()?;
    for last in 0..=u16::MAX {
        let asker = Ipv6Addr::new(0xfe80, 0, 0, 0, last.wrapping_mul(40_503), 0xffff, !last, last);
        let outcome = a.run(FROM_CONTAINER, &solicitation(asker, SOLICITED_NODE, GATEWAY6, A.mac))?;
        assert_eq!(outcome.action, REDIRECT);
        let pseudo = [&outcome.packet[22..54], &[0, 0, 0, 32, 0, 0, 0, 58], &outcome.packet[54..]].concat();
        assert_eq!(internet_checksum(&pseudo), 0, "asker {asker}");
    }
    Ok(())
}

fn icmp(kind: u8, from: Ipv6Addr, to: Ipv6Addr) -> Vec<u8> {
    with(solicitation(from, to, GATEWAY6, A.mac), 54, &[kind])
}

fn real_router_solicitation() -> Vec<u8> {
    let mut frame = icmp(133, LINK_LOCAL, ALL_ROUTERS);
    frame.truncate(14 + 40 + 16);
    with(frame, 18, &16_u16.to_be_bytes())
}

#[test]
fn drops_every_other_neighbour_message() -> Result<()> {
    let question = solicitation(A.v6, SOLICITED_NODE, GATEWAY6, A.mac);
    let announce =
        |target, to, mac| frame::ethernet(A.host_mac, A.mac, IPV6, &frame::neighbour(136, A.v6, to, target, mac));
    check_all([
        drop("for another endpoint", solicitation(A.v6, SOLICITED_NODE, B.v6, A.mac), NeighbourUnknown),
        drop("for itself", solicitation(A.v6, SOLICITED_NODE, A.v6, A.mac), NeighbourUnknown),
        drop("for nothing", solicitation(A.v6, SOLICITED_NODE, Ipv6Addr::UNSPECIFIED, A.mac), NeighbourUnknown),
        drop("duplicate address detection", bare(Ipv6Addr::UNSPECIFIED, SOLICITED_NODE, A.v6), Multicast),
        drop("the same for the gateway's", bare(Ipv6Addr::UNSPECIFIED, SOLICITED_NODE, GATEWAY6), Multicast),
        drop("as another endpoint", solicitation(B.v6, SOLICITED_NODE, GATEWAY6, A.mac), NeighbourSpoof),
        drop("with another's MAC", solicitation(A.v6, SOLICITED_NODE, GATEWAY6, B.mac), NeighbourSpoof),
        drop("router solicitation", icmp(133, LINK_LOCAL, ALL_ROUTERS), Multicast),
        // Sixteen bytes of ICMPv6, as Linux sends it (RFC 4861, 4.1): shorter than any message that names a target.
        drop("router solicitation of its real size", real_router_solicitation(), Multicast),
        drop("router solicitation by unicast", icmp(133, A.v6, GATEWAY6), NeighbourUnknown),
        drop("router advertisement", icmp(134, LINK_LOCAL, ALL_NODES), NeighbourSpoof),
        drop("router advertisement by unicast", icmp(134, LINK_LOCAL, B.v6), NeighbourSpoof),
        drop("redirect", icmp(137, LINK_LOCAL, B.v6), NeighbourSpoof),
        drop("advertisement of itself", announce(A.v6, GATEWAY6, A.mac), NeighbourUnknown),
        drop("the same to all", announce(A.v6, ALL_NODES, A.mac), NeighbourUnknown),
        drop("of its link-local address", announce(LINK_LOCAL, ALL_NODES, A.mac), NeighbourUnknown),
        drop("of the gateway", announce(GATEWAY6, B.v6, A.mac), NeighbourSpoof),
        drop("of another endpoint", announce(B.v6, GATEWAY6, A.mac), NeighbourSpoof),
        drop("with another's MAC", announce(A.v6, GATEWAY6, B.mac), NeighbourSpoof),
        drop("a hop limit that is no neighbour's", with(question.clone(), 21, &[254]), Malformed),
        drop("code 1", with(question.clone(), 55, &[1]), Malformed),
        drop("cut in the target", with(question[..77].to_vec(), 18, &23_u16.to_be_bytes()), Malformed),
        drop("a payload of 23 bytes in more", with(question.clone(), 18, &23_u16.to_be_bytes()), Malformed),
        drop("ICMPv6 of 7 bytes", with(question[..61].to_vec(), 18, &7_u16.to_be_bytes()), Malformed),
    ])
}

#[test]
fn an_endpoint_without_a_gateway_is_told_nothing() -> Result<()> {
    let (mut a, b) = pair()?;
    a.configure(EndpointConfig { gateway4: [0; 4], gateway6: [0; 16], ..A.config() })?;
    drop("ARP", arp(1, (A.mac, A.v4), (NOBODY, ANY)), NeighbourUnknown).check(&a, &b)?;
    drop("ND", solicitation(A.v6, SOLICITED_NODE, Ipv6Addr::UNSPECIFIED, A.mac), NeighbourUnknown).check(&a, &b)?;
    // And one without the families has nothing to ask with but the absence of an address.
    a.configure(EndpointConfig { ipv4: [0; 4], ipv6: [0; 16], ..A.config() })?;
    drop("ARP as what it is not", arp(1, (A.mac, A.v4), (NOBODY, GATEWAY4)), NeighbourSpoof).check(&a, &b)?;
    drop("ND as what it is not", solicitation(A.v6, SOLICITED_NODE, GATEWAY6, A.mac), NeighbourSpoof).check(&a, &b)
}
