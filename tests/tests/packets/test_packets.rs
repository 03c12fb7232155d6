//! Test packets: the verdict of a packet that came on a link, and no trace in any map.

use anyhow::{Context, Result};
use aya::programs::{TestRun, TestRunOptions};
use wharf_common::{
    Direction::{self, Egress, Ingress},
    DropReason::{self, *},
    EndpointConfig, EventKind, TestReport,
    test_packet::{REPORTS_OFFSET, TEST_IFINDEX},
};
use wharf_tests::{frame, programs::on_interface};

use crate::fixture::{
    A, B, DELIVER, ELSEWHERE4, ELSEWHERE6, Endpoint, FROM_CONTAINER, GATEWAY4, GATEWAY6, TO_CONTAINER, pair, run_with,
    udp, with,
};

/// Program, packet, and what is reported: direction, endpoint, reason.
type Case = (&'static str, Vec<u8>, Vec<(Direction, u32, DropReason)>);

fn cases() -> Vec<Case> {
    let asked = frame::arp(1, (A.mac, A.v4), ([0; 6], GATEWAY4));
    let asked = frame::ethernet(frame::BROADCAST, A.mac, frame::ARP, &asked);
    let mut cases = vec![
        (FROM_CONTAINER, udp(A.v4, ELSEWHERE4), vec![(Egress, A.id, ForwardedStack)]),
        (FROM_CONTAINER, udp(A.v6, ELSEWHERE6), vec![(Egress, A.id, ForwardedStack)]),
        (FROM_CONTAINER, udp(B.v4, ELSEWHERE4), vec![(Egress, A.id, InvalidSourceIp)]),
        (FROM_CONTAINER, with(udp(A.v4, B.v4), 6, &B.mac), vec![(Egress, A.id, InvalidSourceMac)]),
        (FROM_CONTAINER, with(udp(A.v6, B.v6), 12, &[0x88, 0xcc]), vec![(Egress, A.id, UnsupportedL2)]),
        (FROM_CONTAINER, asked, vec![(Egress, A.id, NeighbourAnswered)]),
        (TO_CONTAINER, udp(GATEWAY4, A.v4), vec![(Ingress, A.id, ForwardedStack)]),
        (TO_CONTAINER, udp(GATEWAY6, B.v6), vec![(Ingress, A.id, NotOurAddress)]),
        (DELIVER, udp(B.v6, A.v6), vec![(Ingress, A.id, ForwardedLocal)]),
    ];
    for packet in [udp(A.v4, B.v4), udp(A.v6, B.v6)] {
        cases.push((FROM_CONTAINER, packet, vec![(Egress, A.id, ForwardedLocal), (Ingress, B.id, ForwardedLocal)]));
    }
    cases
}

/// What the programs reported of a packet.
fn reports(a: &Endpoint, program: &str, packet: &[u8]) -> Result<Vec<(Direction, u32, DropReason)>> {
    let mut context = [0; 512];
    a.program(program)?.test_run(TestRunOptions {
        data_in: Some(packet),
        ctx_out: Some(&mut context),
        ..TestRunOptions::default()
    })?;
    let mut all = Vec::new();
    for direction in [Egress, Ingress] {
        let word = context.get(REPORTS_OFFSET + 4 * direction as usize..).and_then(<[u8]>::first_chunk);
        let word = u32::from_ne_bytes(*word.context("a word of cb")?);
        all.extend(TestReport::from_word(word).map(|r| (direction, r.endpoint_id, r.reason)));
    }
    Ok(all)
}

#[test]
fn a_test_packet_gets_the_verdict_of_traffic_and_leaves_no_trace() -> Result<()> {
    let (mut a, mut b) = pair()?;
    // Every verdict would be told.
    a.trace()?;
    b.trace()?;
    let before = (a.counters()?, b.counters()?, a.budget()?, b.budget()?);
    let mut outcomes = Vec::new();
    for (program, packet, expected) in cases() {
        assert_eq!(reports(&a, program, &packet)?, expected, "{program} {packet:02x?}");
        // A context changes nothing while it names no other interface.
        outcomes.push(run_with(a.program(program)?, &packet, &on_interface(TEST_IFINDEX), 1)?);
    }
    assert_eq!((a.counters()?, b.counters()?, a.budget()?, b.budget()?), before);
    assert_eq!((a.events()?, b.events()?), (vec![], vec![]));
    for ((program, packet, expected), outcome) in cases().into_iter().zip(outcomes) {
        let before = [a.counters()?, b.counters()?];
        assert_eq!(a.run(program, &packet)?, outcome, "the same on a link: {program}");
        let mut counted = Vec::new();
        for (endpoint, before) in [&a, &b].into_iter().zip(&before) {
            let changes = endpoint.counters()?.since(before)?;
            counted.extend(changes.into_iter().map(|(direction, reason, ..)| (direction, endpoint.who.id, reason)));
        }
        assert_eq!(counted, expected, "counted as reported: {program}");
    }
    Ok(())
}

#[test]
fn a_test_packet_that_no_receiver_takes_is_reported_as_a_drop() -> Result<()> {
    let mut a = Endpoint::load(A)?;
    a.knows(&B)?;
    let before = a.counters()?;
    assert_eq!(reports(&a, FROM_CONTAINER, &udp(A.v4, B.v4))?, [(Egress, A.id, NoTailCallTarget)]);
    a.configure(EndpointConfig { flags: 0, ..A.config() })?;
    assert_eq!(reports(&a, TO_CONTAINER, &udp(B.v4, A.v4))?, [(Ingress, A.id, EndpointNotReady)]);
    assert_eq!(a.counters()?, before);
    assert_eq!(a.events()?, []);
    Ok(())
}

/// However many test packets are dropped: the drops of traffic are told.
#[test]
fn test_packets_take_nothing_of_the_budget_of_events() -> Result<()> {
    let mut a = Endpoint::load(A)?;
    let packet = udp(B.v4, ELSEWHERE4);
    run_with(a.program(FROM_CONTAINER)?, &packet, &on_interface(TEST_IFINDEX), 10_000)?;
    a.run(FROM_CONTAINER, &packet)?;
    let told: Vec<_> = a.events()?.iter().map(|e| (e.kind, e.reason)).collect();
    assert_eq!(told, [(EventKind::Drop as u32, InvalidSourceIp as u32)]);
    Ok(())
}
