//! What other endpoints send to the container: the receiver's own rules, whatever the sender's program believed.

use anyhow::Result;
use wharf_common::{
    Direction::{Egress, Ingress},
    DropReason::{self, *},
    EndpointConfig,
};
use wharf_tests::frame;

use crate::{
    fixture::{
        A, B, Case, DELIVER, ELSEWHERE4, ELSEWHERE6, FROM_CONTAINER, REDIRECT, SHOT, check_all, pair, udp, with,
    },
    from_container::{arrived4, arrived6},
};

fn delivered(name: &'static str, packet: Vec<u8>, output: Vec<u8>) -> Case {
    Case {
        name,
        program: DELIVER,
        packet,
        action: REDIRECT,
        at_a: vec![(Ingress, ForwardedLocal)],
        at_b: Vec::new(),
        output: Some(output),
    }
}

fn drop(name: &'static str, packet: Vec<u8>, reason: DropReason) -> Case {
    Case::drop(name, DELIVER, packet, reason)
}

#[test]
fn lets_in_what_is_for_the_container_and_nothing_else() -> Result<()> {
    check_all([
        delivered("v4", udp(B.v4, A.v4), arrived4(&udp(B.v4, A.v4), 63, &A)),
        delivered("v6", udp(B.v6, A.v6), arrived6(&udp(B.v6, A.v6), 63, &A)),
        drop("v4 for another", udp(B.v4, ELSEWHERE4), NotOurAddress),
        drop("v6 for another", udp(B.v6, ELSEWHERE6), NotOurAddress),
        drop("v4 for the sender", udp(A.v4, B.v4), NotOurAddress),
        drop("v4 multicast", udp(B.v4, [224, 0, 0, 1]), Multicast),
        drop("v6 multicast", udp(B.v6, [0xff02_u16, 0, 0, 0, 0, 0, 0, 1]), Multicast),
        drop(
            "ARP",
            frame::ethernet(A.mac, B.mac, frame::ARP, &frame::arp(1, (B.mac, B.v4), ([0; 6], A.v4))),
            NeighbourUnknown,
        ),
        drop("another protocol", with(udp(B.v4, A.v4), 12, &[0x88, 0x47]), UnsupportedL2),
        drop("v4 total beyond the packet", with(udp(B.v4, A.v4), 16, &[0xff, 0xff]), Malformed),
        drop("v6 payload beyond the packet", with(udp(B.v6, A.v6), 18, &[0xff, 0xff]), Malformed),
    ])
}

#[test]
fn the_receivers_gate_holds_for_a_sender_that_does_not_know_of_it() -> Result<()> {
    let (a, mut b) = pair()?;
    let packet = udp(A.v6, B.v6);
    let refused = |reason| Case {
        name: "the receiver refuses",
        program: FROM_CONTAINER,
        packet: packet.clone(),
        action: SHOT,
        at_a: vec![(Egress, ForwardedLocal)],
        at_b: vec![(Ingress, reason)],
        output: Some(packet.clone()),
    };
    b.configure(EndpointConfig { flags: 0, ..B.config() })?;
    refused(EndpointNotReady).check(&a, &b)?;
    // The id has another owner by now, with another address.
    b.configure(EndpointConfig { epoch: 900, ipv6: ELSEWHERE6.octets(), ..B.config() })?;
    refused(NotOurAddress).check(&a, &b)?;
    // And one without the family: the absent address is nobody's.
    b.configure(EndpointConfig { ipv6: [0; 16], ..B.config() })?;
    refused(NotOurAddress).check(&a, &b)
}
