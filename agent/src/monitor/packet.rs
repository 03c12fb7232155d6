//! Converts packet records to API events.

use std::net::{IpAddr, Ipv6Addr};

use wharf_api::{MonitorEvent, PacketEvent};
use wharf_common::{Direction, DropReason, Event, EventKind};

const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const ARP: u16 = 0x0806;

pub(super) fn readable(event: &Event, rule: Option<String>, offset_ms: i64) -> Option<MonitorEvent> {
    let kind = EventKind::from_u32(event.kind)?;
    let time = i64::try_from(event.timestamp_ns / 1_000_000).unwrap_or(i64::MAX).saturating_add(offset_ms);
    let ethertype = u16::from_be_bytes(event.ethertype);
    let [source, destination] = [event.source, event.destination].map(|bytes| address(ethertype, event.length, bytes));
    let has_ports = matches!((ethertype, event.protocol), (IPV4 | IPV6, TCP | UDP));
    let port = |bytes: [u8; 2]| if has_ports { u16::from_be_bytes(bytes) } else { 0 };
    let packet = PacketEvent {
        time_unix_ms: u64::try_from(time).unwrap_or(0),
        endpoint: event.endpoint_id,
        epoch: event.epoch,
        identity: event.identity,
        direction: Direction::from_u32(event.direction)
            .map_or_else(|| event.direction.to_string(), |d| d.as_str().into()),
        reason: DropReason::from_u32(event.reason).map_or_else(|| event.reason.to_string(), |r| r.as_str().into()),
        rule,
        ethertype: match ethertype {
            IPV4 => "IPv4".into(),
            IPV6 => "IPv6".into(),
            ARP => "ARP".into(),
            other => format!("{other:#06x}"),
        },
        protocol: match ethertype {
            IPV4 | IPV6 => protocol(event.protocol),
            _ => String::new(),
        },
        message: source.and_then(|_| message(ethertype, event.protocol, event.source_port)),
        source,
        source_port: port(event.source_port),
        destination,
        destination_port: port(event.destination_port),
        length: event.length,
    };
    Some(match kind {
        EventKind::Drop => MonitorEvent::Drop(packet),
        EventKind::Trace => MonitorEvent::Trace(packet),
    })
}

fn address(ethertype: u16, length: u32, bytes: [u8; 16]) -> Option<IpAddr> {
    const ETHERNET: u32 = 14;
    let address = Ipv6Addr::from(bytes);
    match ethertype {
        IPV4 if length >= ETHERNET + 20 => address.to_ipv4_mapped().map(IpAddr::V4),
        ARP if length >= ETHERNET + 28 => address.to_ipv4_mapped().map(IpAddr::V4),
        // An IPv4-mapped address is not the IPv4 address.
        IPV6 if length >= ETHERNET + 40 => Some(IpAddr::V6(address)),
        _ => None,
    }
}

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;

/// Protocol or extension header (IANA, "Assigned Internet Protocol Numbers").
fn protocol(number: u8) -> String {
    match number {
        // Only if truncated: the programs parse behind a whole one.
        0 => "IPv6-hop-by-hop".into(),
        ICMP => "ICMP".into(),
        2 => "IGMP".into(),
        4 => "IPv4-in-IP".into(),
        TCP => "TCP".into(),
        UDP => "UDP".into(),
        33 => "DCCP".into(),
        41 => "IPv6-in-IP".into(),
        43 => "IPv6-routing".into(),
        44 => "IPv6-fragment".into(),
        47 => "GRE".into(),
        50 => "ESP".into(),
        51 => "AH".into(),
        ICMPV6 => "ICMPv6".into(),
        59 => "IPv6-no-next-header".into(),
        60 => "IPv6-destination-options".into(),
        132 => "SCTP".into(),
        136 => "UDP-Lite".into(),
        other => format!("protocol {other}"),
    }
}

fn message(ethertype: u16, protocol: u8, bytes: [u8; 2]) -> Option<String> {
    let [kind, code] = bytes;
    let name = match (ethertype, protocol) {
        (ARP, _) => match u16::from_be_bytes(bytes) {
            1 => "request",
            2 => "reply",
            other => return Some(format!("operation {other}")),
        },
        (IPV4, ICMP) => match kind {
            0 => "echo-reply",
            3 => "destination-unreachable",
            5 => "redirect",
            8 => "echo-request",
            9 => "router-advertisement",
            10 => "router-solicitation",
            11 => "time-exceeded",
            12 => "parameter-problem",
            _ => return Some(format!("type {kind} code {code}")),
        },
        (IPV6, ICMPV6) => match kind {
            1 => "destination-unreachable",
            2 => "packet-too-big",
            3 => "time-exceeded",
            4 => "parameter-problem",
            128 => "echo-request",
            129 => "echo-reply",
            130 => "multicast-listener-query",
            131 => "multicast-listener-report",
            132 => "multicast-listener-done",
            133 => "router-solicitation",
            134 => "router-advertisement",
            135 => "neighbor-solicitation",
            136 => "neighbor-advertisement",
            137 => "redirect",
            143 => "multicast-listener-report-v2",
            _ => return Some(format!("type {kind} code {code}")),
        },
        _ => return None,
    };
    Some(if code == 0 || ethertype == ARP { name.to_owned() } else { format!("{name} code {code}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(event: Event) -> (String, Option<String>, [Option<String>; 2], [u16; 2]) {
        let event = Event { kind: EventKind::Drop as u32, length: 90, ..event };
        let Some(MonitorEvent::Drop(packet)) = readable(&event, None, 0) else { panic!("a drop is told") };
        let addresses = [packet.source, packet.destination].map(|address| address.map(|a| a.to_string()));
        (packet.protocol, packet.message, addresses, [packet.source_port, packet.destination_port])
    }

    fn v6(source: &str, destination: &str) -> Event {
        let bytes = |text: &str| text.parse::<Ipv6Addr>().expect("an address").octets();
        Event {
            ethertype: IPV6.to_be_bytes(),
            source: bytes(source),
            destination: bytes(destination),
            ..Event::default()
        }
    }

    fn some(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn the_api_lists_every_reason() {
        let verdicts: Vec<_> =
            DropReason::ALL.iter().filter(|reason| reason.is_verdict()).map(|reason| reason.as_str()).collect();
        assert_eq!(wharf_api::PACKET_REASONS, verdicts);
    }

    #[test]
    fn messages_have_names_and_no_ports() {
        let group = v6("::", "ff02::16");
        let report = Event { protocol: ICMPV6, source_port: [143, 0], ..group };
        let words = some("multicast-listener-report-v2");
        assert_eq!(told(report), ("ICMPv6".into(), words, [some("::"), some("ff02::16")], [0, 0]));
        let unreachable = Event { protocol: ICMPV6, source_port: [1, 4], ..group };
        assert_eq!(told(unreachable).1, some("destination-unreachable code 4"));
        let unknown = Event { protocol: ICMPV6, source_port: [200, 3], ..group };
        assert_eq!(told(unknown).1, some("type 200 code 3"));
        let v4 = Event { ethertype: IPV4.to_be_bytes(), ..v6("::ffff:10.0.0.9", "::ffff:10.0.0.1") };
        let echo = Event { protocol: ICMP, source_port: [8, 0], ..v4 };
        let addresses = [some("10.0.0.9"), some("10.0.0.1")];
        assert_eq!(told(echo), ("ICMP".into(), some("echo-request"), addresses.clone(), [0, 0]));
        let arp = Event { ethertype: ARP.to_be_bytes(), source_port: [0, 1], ..v4 };
        assert_eq!(told(arp), (String::new(), some("request"), addresses, [0, 0]));
        assert_eq!(told(Event { source_port: [1, 2], ..arp }).1, some("operation 258"));
    }

    #[test]
    fn other_protocols_have_names_and_only_some_have_ports() {
        let ports = Event { source_port: [1, 0], destination_port: [0, 53], ..v6("fd00::9", "::ffff:10.0.0.1") };
        let addresses = [some("fd00::9"), some("::ffff:10.0.0.1")];
        let udp = Event { protocol: UDP, ..ports };
        assert_eq!(told(udp), ("UDP".into(), None, addresses.clone(), [256, 53]));
        let names = [0, 60, 99].map(|protocol| told(Event { protocol, ..ports }));
        assert_eq!(
            names.each_ref().map(|t| t.0.as_str()),
            ["IPv6-hop-by-hop", "IPv6-destination-options", "protocol 99"]
        );
        assert!(names.iter().all(|t| t.1.is_none() && t.3 == [0, 0]));
    }

    #[test]
    fn a_packet_too_short_for_addresses_has_none() {
        for (ethertype, whole) in [(IPV4, 34), (IPV6, 54), (ARP, 42)] {
            let event = Event { ethertype: ethertype.to_be_bytes(), kind: 1, ..v6("::ffff:0.0.0.0", "::ffff:0.0.0.0") };
            let source = |length| match readable(&Event { length, ..event }, None, 0) {
                Some(MonitorEvent::Drop(packet)) => packet.source,
                other => panic!("{other:?}"),
            };
            assert_eq!(source(whole - 1), None, "{ethertype:#x}");
            assert!(source(whole).is_some(), "{ethertype:#x}");
        }
    }
}
