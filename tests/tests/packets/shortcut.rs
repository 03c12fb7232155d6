//! The packets that an endpoint's own programs judge themselves, and those that they leave to the node's programs.
//! Packets of an endpoint that is watched are all left to them.

use anyhow::{Context, Result, ensure};
use wharf_common::DropReason;

use crate::fixture::{
    A, B, Change, Counters, DELIVER, ELSEWHERE4, ELSEWHERE6, Endpoint, FROM_CONTAINER, GATEWAY4, GATEWAY6, OK, Outcome,
    SHOT, TO_CONTAINER, pair, udp, with,
};

/// Bytes of the headers: Ethernet and IPv6.
const HEADERS: usize = 54;

/// What becomes of a packet, and what each endpoint counts.
type Seen = (Outcome, [Vec<Change>; 2]);

fn seen(pair: [&Endpoint; 2], program: &str, packet: &[u8]) -> Result<Seen> {
    let before = pair.map(Endpoint::counters);
    let outcome = pair[0].run(program, packet)?;
    let verdicts = |endpoint: &Endpoint, before: Result<Counters>| -> Result<Vec<Change>> {
        let changes = endpoint.counters()?.since(&before?)?;
        // A watched endpoint soon has used its budget of events.
        Ok(changes.into_iter().filter(|(_, reason, ..)| DropReason::is_verdict(*reason)).collect())
    };
    let [a, b] = before;
    Ok((outcome, [verdicts(pair[0], a)?, verdicts(pair[1], b)?]))
}

/// A frame as the node's stack sends it on A's link, on which it resolves no neighbours.
fn from_node(packet: Vec<u8>) -> Vec<u8> {
    with(with(packet, 0, &A.host_mac), 6, &A.host_mac)
}

#[test]
fn with_any_bit_of_the_headers_changed_the_verdict_is_that_of_the_nodes_programs() -> Result<()> {
    let (mut a, mut b) = pair()?;
    let (mut passed, mut dropped) = (0, 0);
    for (program, packet) in [
        (FROM_CONTAINER, udp(A.v4, B.v4)),
        (FROM_CONTAINER, udp(A.v6, B.v6)),
        (FROM_CONTAINER, udp(A.v4, ELSEWHERE4)),
        (FROM_CONTAINER, udp(A.v6, ELSEWHERE6)),
        (TO_CONTAINER, from_node(udp(GATEWAY4, A.v4))),
        (TO_CONTAINER, from_node(udp(GATEWAY6, A.v6))),
        (DELIVER, udp(B.v4, A.v4)),
        (DELIVER, udp(B.v6, A.v6)),
    ] {
        for bit in 0..HEADERS * 8 {
            let mut changed = packet.clone();
            *changed.get_mut(bit / 8).context("a longer packet")? ^= 1 << (bit % 8);
            for endpoint in [&mut a, &mut b] {
                endpoint.configure(endpoint.who.config())?;
            }
            let is = seen([&a, &b], program, &changed)?;
            for endpoint in [&mut a, &mut b] {
                endpoint.trace()?;
            }
            let expected = seen([&a, &b], program, &changed)?;
            ensure!(is == expected, "{program}, bit {bit}: {is:02x?}, of the node's programs {expected:02x?}");
            *(if is.0.action == SHOT { &mut dropped } else { &mut passed }) += 1;
        }
    }
    ensure!(passed > 100 && dropped > 100, "{passed} passed, {dropped} dropped");
    Ok(())
}

#[test]
fn what_nearly_all_packets_are_like_needs_no_program_of_the_endpoint_but_the_hooks() -> Result<()> {
    let (mut a, _b) = pair()?;
    a.is_unreachable()?;
    for (program, packet) in [
        (FROM_CONTAINER, udp(A.v4, ELSEWHERE4)),
        (FROM_CONTAINER, udp(A.v6, ELSEWHERE6)),
        (TO_CONTAINER, from_node(udp(GATEWAY4, A.v4))),
        (TO_CONTAINER, from_node(udp(GATEWAY6, A.v6))),
    ] {
        assert_eq!(a.run(program, &packet)?.action, OK, "{program}");
        let mut odd = packet.clone();
        *odd.get_mut(14).context("an IP header")? ^= 0x10;
        assert_eq!(a.run(program, &odd)?.action, SHOT, "{program}, of another IP version");
    }
    a.trace()?;
    assert_eq!(a.run(FROM_CONTAINER, &udp(A.v4, ELSEWHERE4))?.action, SHOT, "without the program that records it");
    Ok(())
}
