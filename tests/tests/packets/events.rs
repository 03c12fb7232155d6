//! What the programs tell of packets.

use std::net::IpAddr;

use anyhow::{Context, Result};
use wharf_common::{
    Direction::{self, Egress, Ingress},
    DropReason::{self, *},
    Event, EventKind,
    map::{EVENTS, EVENTS_PER_SECOND},
};
use wharf_tests::frame;

use crate::fixture::{
    A, B, ELSEWHERE4, ELSEWHERE6, Endpoint, FROM_CONTAINER, GATEWAY4, GATEWAY6, SHOT, TO_CONTAINER, Who, pair, udp,
    with,
};

/// Enough for more events than the budget has, few enough for a fraction of its second.
const FLOOD: u32 = EVENTS_PER_SECOND + 44;

fn the_only(mut events: Vec<Event>) -> Result<Event> {
    assert_eq!(events.len(), 1, "{events:?}");
    events.pop().context("an event")
}

fn mapped(address: impl Into<IpAddr>) -> [u8; 16] {
    match address.into() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// What an event about a packet of `length` bytes must say, besides the packet's own fields.
fn about(who: &Who, kind: EventKind, direction: Direction, reason: DropReason, length: usize) -> Result<Event> {
    Ok(Event {
        epoch: who.epoch,
        kind: kind as u32,
        reason: reason as u32,
        direction: direction as u32,
        endpoint_id: who.id,
        identity: who.identity,
        length: u32::try_from(length)?,
        ..Event::default()
    })
}

/// Everything but the time, which must be set.
fn check(seen: Event, expected: Event, name: &str) {
    assert!(seen.timestamp_ns > 0, "{name}");
    assert_eq!(Event { timestamp_ns: 0, ..seen }, expected, "{name}");
}

#[test]
fn a_drop_is_told_with_what_the_packet_is() -> Result<()> {
    let mut a = Endpoint::load(A)?;
    let drop = |packet: &[u8], reason| about(&A, EventKind::Drop, Egress, reason, packet.len());

    let packet = udp(B.v4, ELSEWHERE4);
    let mut expected = drop(&packet, InvalidSourceIp)?;
    expected.source = mapped(B.v4);
    expected.destination = mapped(ELSEWHERE4);
    expected.source_port = 4000_u16.to_be_bytes();
    expected.destination_port = 53_u16.to_be_bytes();
    expected.ethertype = [8, 0];
    expected.protocol = 17;
    a.run(FROM_CONTAINER, &packet)?;
    check(the_only(a.events()?)?, expected, "v4");

    // A later fragment has no ports, whatever its bytes look like.
    a.run(FROM_CONTAINER, &with(packet.clone(), 20, &[0x20, 185]))?;
    check(the_only(a.events()?)?, Event { source_port: [0; 2], destination_port: [0; 2], ..expected }, "fragment");

    // Ports behind options.
    let mut options = with(packet.clone(), 14, &[0x46]);
    options.splice(34..34, [1, 1, 1, 0]);
    let expected_options = Event { length: expected.length + 4, ..expected };
    a.run(FROM_CONTAINER, &options)?;
    check(the_only(a.events()?)?, expected_options, "options");

    // Type and code, no ports.
    a.run(FROM_CONTAINER, &with(with(packet, 23, &[1]), 34, &[3, 4]))?;
    let expected_icmp = Event { protocol: 1, source_port: [3, 4], destination_port: [0; 2], ..expected };
    check(the_only(a.events()?)?, expected_icmp, "ICMP");

    let packet = udp(B.v6, ELSEWHERE6);
    let mut expected = drop(&packet, InvalidSourceIp)?;
    expected.source = mapped(B.v6);
    expected.destination = mapped(ELSEWHERE6);
    expected.source_port = 4000_u16.to_be_bytes();
    expected.destination_port = 53_u16.to_be_bytes();
    expected.ethertype = [0x86, 0xdd];
    expected.protocol = 17;
    a.run(FROM_CONTAINER, &packet)?;
    check(the_only(a.events()?)?, expected, "v6");

    let arp = frame::arp(2, (A.mac, GATEWAY4), ([0; 6], B.v4));
    let packet = frame::ethernet(frame::BROADCAST, A.mac, frame::ARP, &arp);
    let mut expected = drop(&packet, NeighbourSpoof)?;
    expected.source = mapped(GATEWAY4);
    expected.destination = mapped(B.v4);
    expected.source_port = [0, 2];
    expected.ethertype = [8, 6];
    a.run(FROM_CONTAINER, &packet)?;
    check(the_only(a.events()?)?, expected, "ARP");

    let mut packet = frame::ethernet(A.host_mac, A.mac, 0x88cc, &[0; 50]);
    let mut expected = drop(&packet, UnsupportedL2)?;
    expected.ethertype = [0x88, 0xcc];
    a.run(FROM_CONTAINER, &packet)?;
    check(the_only(a.events()?)?, expected, "another protocol");

    // What a short packet does not have is zero.
    packet = with(udp(A.v6, B.v6), 4 + 14, &[0xff, 0xff]);
    packet.truncate(56);
    let mut expected = drop(&packet, Malformed)?;
    expected.source = mapped(A.v6);
    expected.destination = mapped(B.v6);
    expected.ethertype = [0x86, 0xdd];
    expected.protocol = 17;
    a.run(FROM_CONTAINER, &packet)?;
    check(the_only(a.events()?)?, expected, "cut in the ports");
    Ok(())
}

/// A UDP packet with a false source, behind these extension headers, the first of which is of kind `next`.
fn behind(next: u8, headers: &[u8]) -> Vec<u8> {
    let mut packet = with(udp(B.v6, ELSEWHERE6), 20, &[next]);
    packet.splice(54..54, headers.iter().copied());
    let payload = u16::try_from(packet.len() - 54).unwrap_or(u16::MAX);
    with(packet, 18, &payload.to_be_bytes())
}

#[test]
fn a_drop_is_told_with_what_is_behind_extension_headers() -> Result<()> {
    const UDP: u8 = 17;
    let mut a = Endpoint::load(A)?;
    let mut told = |packet: &[u8]| {
        a.run(FROM_CONTAINER, packet)?;
        let event = the_only(a.events()?)?;
        let port = |bytes| u16::from_be_bytes(bytes);
        anyhow::Ok((event.protocol, port(event.source_port), port(event.destination_port)))
    };
    let options = |next: u8| [next, 0, 1, 4, 0, 0, 0, 0];
    assert_eq!(told(&behind(0, &options(UDP)))?, (UDP, 4000, 53), "hop-by-hop");
    let long = [&[UDP, 2, 1, 20][..], &[0; 20]].concat();
    assert_eq!(told(&behind(60, &long))?, (UDP, 4000, 53), "destination options of 24 bytes");
    let chain = [options(60), options(43), options(44), [UDP, 0, 0, 1, 0, 0, 0, 9]].concat();
    assert_eq!(told(&behind(0, &chain))?, (UDP, 4000, 53), "one of each, in the first fragment");
    assert_eq!(told(&behind(44, &[UDP, 0, 0, 8, 0, 0, 0, 9]))?, (UDP, 0, 0), "a later fragment");
    let most = [options(60), options(135), options(139), options(140), options(60), options(UDP)].concat();
    assert_eq!(told(&behind(0, &most))?, (UDP, 4000, 53), "as many as are looked behind");
    let many = [&options(60)[..], &most].concat();
    assert_eq!(told(&behind(0, &many))?, (60, 0, 0), "more than are looked behind");
    // A header that says it is longer than the packet.
    assert_eq!(told(&behind(0, &[60, 255, 1, 4, 0, 0, 0, 0]))?, (60, 0, 0), "cut off");

    // A listener report as every container's kernel sends it, behind a router alert.
    let payload = [58, 0, 5, 2, 0, 0, 1, 0, 143, 0, 0, 0, 0, 0, 0, 0];
    let group = [0xff02_u16, 0, 0, 0, 0, 0, 0, 0x16].into();
    let packet = frame::ipv6([0_u16; 8].into(), group, 0, 1, &payload);
    let packet = frame::ethernet([0x33, 0x33, 0, 0, 0, 0x16], A.mac, frame::IPV6, &packet);
    assert_eq!(told(&packet)?, (58, u16::from_be_bytes([143, 0]), 0), "MLDv2");
    Ok(())
}

#[test]
fn forwarding_is_told_only_when_asked() -> Result<()> {
    let (mut a, mut b) = pair()?;
    let packet = udp(A.v6, B.v6);
    a.run(FROM_CONTAINER, &packet)?;
    a.run(FROM_CONTAINER, &udp(A.v4, ELSEWHERE4))?;
    a.run(TO_CONTAINER, &udp(GATEWAY6, A.v6))?;
    assert_eq!((a.events()?, b.events()?), (vec![], vec![]));

    a.trace()?;
    b.trace()?;
    a.run(FROM_CONTAINER, &packet)?;
    let mut expected = about(&A, EventKind::Trace, Egress, ForwardedLocal, packet.len())?;
    expected.source = A.v6.octets();
    expected.destination = B.v6.octets();
    expected.source_port = 4000_u16.to_be_bytes();
    expected.destination_port = 53_u16.to_be_bytes();
    expected.ethertype = [0x86, 0xdd];
    expected.protocol = 17;
    check(the_only(a.events()?)?, expected, "the sender");
    let receiver = about(&B, EventKind::Trace, Ingress, ForwardedLocal, packet.len())?;
    let expected = Event {
        epoch: receiver.epoch,
        direction: receiver.direction,
        endpoint_id: receiver.endpoint_id,
        identity: receiver.identity,
        ..expected
    };
    check(the_only(b.events()?)?, expected, "the receiver");

    a.run(TO_CONTAINER, &udp(GATEWAY6, A.v6))?;
    let event = the_only(a.events()?)?;
    assert_eq!(
        (event.kind, event.reason, event.direction),
        (EventKind::Trace as u32, ForwardedStack as u32, Ingress as u32)
    );
    Ok(())
}

#[test]
fn a_flood_is_counted_but_not_told() -> Result<()> {
    let mut a = Endpoint::load(A)?;
    let packet = udp(B.v4, ELSEWHERE4);
    let before = a.counters()?;
    let outcome = a.run_times(FROM_CONTAINER, &packet, FLOOD)?;
    assert_eq!(outcome.action, SHOT);
    let (flood, budget) = (u64::from(FLOOD), u64::from(EVENTS_PER_SECOND));
    assert_eq!(
        a.counters()?.since(&before)?,
        [
            (Egress, EventSuppressed, flood - budget, 0),
            (Egress, InvalidSourceIp, flood, flood * u64::try_from(packet.len())?)
        ]
    );
    assert_eq!(u64::try_from(a.events()?.len())?, budget);
    Ok(())
}

/// A sender that means another's IPv4 row by an IPv6 packet spends its own budget.
#[test]
fn a_flood_to_a_mapped_address_is_the_senders() -> Result<()> {
    let (mut a, mut b) = pair()?;
    let packet = udp(A.v6, B.v4.to_ipv6_mapped());
    let before = [a.counters()?, b.counters()?];
    let outcome = a.run_times(FROM_CONTAINER, &packet, FLOOD)?;
    assert_eq!(outcome.action, SHOT);
    let (flood, budget) = (u64::from(FLOOD), u64::from(EVENTS_PER_SECOND));
    assert_eq!(
        a.counters()?.since(&before[0])?,
        [
            (Egress, EventSuppressed, flood - budget, 0),
            (Egress, InvalidDestinationIp, flood, flood * u64::try_from(packet.len())?)
        ]
    );
    assert_eq!(b.counters()?.since(&before[1])?, []);
    let told = a.events()?;
    assert_eq!(u64::try_from(told.len())?, budget);
    let mut expected = about(&A, EventKind::Drop, Egress, InvalidDestinationIp, packet.len())?;
    expected.source = mapped(A.v6);
    expected.destination = mapped(B.v4);
    expected.source_port = 4000_u16.to_be_bytes();
    expected.destination_port = 53_u16.to_be_bytes();
    expected.ethertype = [0x86, 0xdd];
    expected.protocol = 17;
    check(told[0], expected, "the first");
    // The receiver has all of its budget left.
    let outcome = b.run_times(TO_CONTAINER, &udp(GATEWAY4, A.v4), EVENTS_PER_SECOND)?;
    assert_eq!(outcome.action, SHOT);
    assert_eq!(u64::try_from(b.events()?.len())?, budget);
    Ok(())
}

#[test]
fn a_full_ring_is_counted_and_blocks_nothing() -> Result<()> {
    let mut a = Endpoint::load_with(A, |loader| {
        loader.map_max_entries(EVENTS, 4096);
    })?;
    let packet = udp(B.v4, ELSEWHERE4);
    let before = a.counters()?;
    a.run_times(FROM_CONTAINER, &packet, EVENTS_PER_SECOND)?;
    // Each record has a header of 8 bytes; the ring counts as full with a sixteenth left.
    let kept = (4096 - 4096 / 16) / (8 + size_of::<Event>()) + 1;
    let lost = u64::from(EVENTS_PER_SECOND) - u64::try_from(kept)?;
    assert_eq!(
        a.counters()?.since(&before)?,
        [
            (Egress, EventLost, lost, 0),
            (
                Egress,
                InvalidSourceIp,
                u64::from(EVENTS_PER_SECOND),
                u64::from(EVENTS_PER_SECOND) * u64::try_from(packet.len())?
            )
        ]
    );
    assert_eq!(a.events()?.len(), kept);
    Ok(())
}
