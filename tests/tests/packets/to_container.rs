//! What the node's stack sends to the container.

use anyhow::Result;
use wharf_common::{
    Direction::Ingress,
    DropReason::{self, *},
    EndpointConfig,
};
use wharf_tests::frame::{self, BROADCAST};

use crate::fixture::{
    A, B, Case, ELSEWHERE4, ELSEWHERE6, GATEWAY4, GATEWAY6, OK, TO_CONTAINER, check_all, pair, udp, with,
};

/// As the stack leaves it on an interface without ARP: both addresses the interface's own.
fn from_stack(packet: Vec<u8>) -> Vec<u8> {
    with(packet, 0, &[A.host_mac, A.host_mac].concat())
}

fn passed(name: &'static str, packet: Vec<u8>) -> Case {
    let output = with(packet.clone(), 0, &[A.mac, A.host_mac].concat());
    Case {
        name,
        program: TO_CONTAINER,
        packet,
        action: OK,
        at_a: vec![(Ingress, ForwardedStack)],
        at_b: Vec::new(),
        output: Some(output),
    }
}

fn drop(name: &'static str, packet: Vec<u8>, reason: DropReason) -> Case {
    Case::drop(name, TO_CONTAINER, from_stack(packet), reason)
}

#[test]
fn passes_what_is_for_the_container_and_nothing_else() -> Result<()> {
    let arp =
        frame::ethernet(BROADCAST, A.host_mac, frame::ARP, &frame::arp(1, (A.host_mac, GATEWAY4), ([0; 6], A.v4)));
    check_all([
        passed("v4 from the node", from_stack(udp(GATEWAY4, A.v4))),
        passed("v6 from the node", from_stack(udp(GATEWAY6, A.v6))),
        passed("v4 forwarded", from_stack(udp(ELSEWHERE4, A.v4))),
        passed("v6 forwarded", from_stack(udp(ELSEWHERE6, A.v6))),
        passed("whatever the frame's addresses were", with(udp(GATEWAY4, A.v4), 0, &BROADCAST)),
        drop("v4 for another", udp(GATEWAY4, B.v4), NotOurAddress),
        drop("v6 for another", udp(GATEWAY6, B.v6), NotOurAddress),
        drop("v4 to nobody", udp(GATEWAY4, [0, 0, 0, 0]), NotOurAddress),
        drop("v4 broadcast", udp(GATEWAY4, [255, 255, 255, 255]), Multicast),
        drop("v4 multicast", udp(GATEWAY4, [224, 0, 0, 251]), Multicast),
        drop("v6 multicast", udp(GATEWAY6, [0xff02_u16, 0, 0, 0, 0, 0, 0, 1]), Multicast),
        Case::drop("ARP", TO_CONTAINER, arp, NeighbourUnknown),
        drop("another protocol", with(udp(GATEWAY4, A.v4), 12, &[0x88, 0x47]), UnsupportedL2),
        drop("a VLAN tag", with(udp(GATEWAY4, A.v4), 12, &[0x81, 0]), UnsupportedL2),
        drop("v4 total beyond the packet", with(udp(GATEWAY4, A.v4), 16, &[0xff, 0xff]), Malformed),
        drop("v6 payload beyond the packet", with(udp(GATEWAY6, A.v6), 18, &[0xff, 0xff]), Malformed),
    ])
}

#[test]
fn an_endpoint_that_is_not_live_receives_nothing() -> Result<()> {
    let (mut a, b) = pair()?;
    a.configure(EndpointConfig { flags: 0, ..A.config() })?;
    drop("v4 before it is live", udp(GATEWAY4, A.v4), EndpointNotReady).check(&a, &b)?;
    drop("v6 before it is live", udp(GATEWAY6, A.v6), EndpointNotReady).check(&a, &b)
}

#[test]
fn an_absent_family_is_nobodys_address() -> Result<()> {
    let (mut a, b) = pair()?;
    a.configure(EndpointConfig { ipv4: [0; 4], ipv6: [0; 16], ..A.config() })?;
    drop("v4 it does not have", udp(GATEWAY4, A.v4), NotOurAddress).check(&a, &b)?;
    drop("the absent v4", udp(GATEWAY4, [0, 0, 0, 0]), NotOurAddress).check(&a, &b)?;
    drop("the absent v6", udp(GATEWAY6, [0_u16; 8]), NotOurAddress).check(&a, &b)
}
