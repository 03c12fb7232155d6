//! `wharf monitor`: an event, a line.

use std::net::{IpAddr, SocketAddr};

use wharf_api::{MonitorEvent, PacketEvent};

use super::{Style, Tone, text};

/// One event as one line, without its end.
pub(crate) fn line(event: &MonitorEvent, style: &Style) -> String {
    match event {
        MonitorEvent::Drop(p) => packet(p, style, style.paint(Tone::Bad, "drop ")),
        MonitorEvent::Trace(p) => packet(p, style, style.paint(Tone::Good, "trace")),
        MonitorEvent::Agent(a) => {
            let subject = a.endpoint.map_or_else(String::new, |id| format!("endpoint {id} "));
            let words = [text::safe(&a.event), text::safe(&a.message)].join(": ");
            format!("{} {} {subject}{words}", text::time_of_day(a.time_unix_ms), style.paint(Tone::Bold, "agent"))
        }
        MonitorEvent::Lost { count } => {
            style.paint(Tone::Warn, &format!("-- {} lost here --", text::count(*count, "event")))
        }
    }
}

fn packet(p: &PacketEvent, style: &Style, verdict: String) -> String {
    let flow = match (p.source, p.destination) {
        (None, None) => String::new(),
        (source, destination) => {
            format!(" {} -> {}", side(source, p.source_port), side(destination, p.destination_port))
        }
    };
    // An IP packet too short for addresses has no protocol that could be believed.
    let is_ip = !p.protocol.is_empty() && p.source.is_some();
    let mut kind = text::safe(if is_ip { &p.protocol } else { &p.ethertype });
    if let Some(message) = &p.message {
        kind = format!("{kind} {}", text::safe(message));
    }
    let rule = p.rule.as_deref().map_or_else(String::new, |rule| format!("; {}", text::safe(rule)));
    format!(
        "{} {verdict} endpoint {} {} {}: {}{flow} {} bytes, identity {}{rule}",
        text::time_of_day(p.time_unix_ms),
        p.endpoint,
        text::safe(&p.direction),
        style.paint(Tone::Bold, &text::safe(&p.reason)),
        kind,
        p.length,
        p.identity,
    )
}

/// `10.88.0.7:53`, `[fd00::7]:53`, or the address alone where there are no ports.
fn side(ip: Option<IpAddr>, port: u16) -> String {
    match (ip, port) {
        (None, _) => "?".to_owned(),
        (Some(ip), 0) => ip.to_string(),
        (Some(ip), port) => SocketAddr::new(ip, port).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use wharf_api::AgentEvent;

    use super::*;
    use crate::render::sample::{HOSTILE, NOW};

    fn sample() -> PacketEvent {
        PacketEvent {
            time_unix_ms: NOW + 1_123,
            endpoint: 7,
            epoch: 41,
            identity: 65_537,
            direction: "egress".to_owned(),
            reason: "invalid-source-ip".to_owned(),
            rule: None,
            ethertype: "IPv4".to_owned(),
            protocol: "UDP".to_owned(),
            message: None,
            source: "10.0.0.9".parse().ok(),
            source_port: 5353,
            destination: "10.88.0.1".parse().ok(),
            destination_port: 53,
            length: 98,
        }
    }

    #[test]
    fn every_kind_of_event() {
        let v6 = PacketEvent {
            source: "fd00::9".parse().ok(),
            destination: "fd00::1".parse().ok(),
            ethertype: "IPv6".to_owned(),
            reason: "forwarded-local".to_owned(),
            ..sample()
        };
        let without_ports = PacketEvent { source_port: 0, destination_port: 0, ..sample() };
        let icmp = PacketEvent {
            protocol: "ICMP".to_owned(),
            message: Some("echo-request".to_owned()),
            ..without_ports.clone()
        };
        let listener_report = PacketEvent {
            source: "::".parse().ok(),
            destination: "ff02::16".parse().ok(),
            ethertype: "IPv6".to_owned(),
            protocol: "ICMPv6".to_owned(),
            message: Some("multicast-listener-report-v2".to_owned()),
            ..without_ports.clone()
        };
        let arp = PacketEvent {
            ethertype: "ARP".to_owned(),
            protocol: String::new(),
            message: Some("request".to_owned()),
            ..without_ports
        };
        let odd = PacketEvent {
            source: None,
            destination: None,
            ethertype: "0x88cc".to_owned(),
            reason: "unsupported-l2-protocol".to_owned(),
            ..sample()
        };
        let agent = |endpoint| AgentEvent {
            time_unix_ms: NOW,
            endpoint,
            event: "endpoint-created".to_owned(),
            message: "in 2.1 ms".to_owned(),
        };
        let events = [
            MonitorEvent::Drop(sample()),
            MonitorEvent::Trace(v6),
            MonitorEvent::Drop(icmp),
            MonitorEvent::Drop(listener_report),
            MonitorEvent::Drop(arp),
            MonitorEvent::Drop(odd),
            MonitorEvent::Agent(agent(Some(7))),
            MonitorEvent::Agent(agent(None)),
            MonitorEvent::Lost { count: 1 },
        ];
        let style = Style::plain();
        let lines: Vec<String> = events.iter().map(|e| line(e, &style)).collect();
        insta::assert_snapshot!(lines.join("\n"), @r"
        12:00:01.123 drop  endpoint 7 egress invalid-source-ip: UDP 10.0.0.9:5353 -> 10.88.0.1:53 98 bytes, identity 65537
        12:00:01.123 trace endpoint 7 egress forwarded-local: UDP [fd00::9]:5353 -> [fd00::1]:53 98 bytes, identity 65537
        12:00:01.123 drop  endpoint 7 egress invalid-source-ip: ICMP echo-request 10.0.0.9 -> 10.88.0.1 98 bytes, identity 65537
        12:00:01.123 drop  endpoint 7 egress invalid-source-ip: ICMPv6 multicast-listener-report-v2 :: -> ff02::16 98 bytes, identity 65537
        12:00:01.123 drop  endpoint 7 egress invalid-source-ip: ARP request 10.0.0.9 -> 10.88.0.1 98 bytes, identity 65537
        12:00:01.123 drop  endpoint 7 egress unsupported-l2-protocol: 0x88cc 98 bytes, identity 65537
        12:00:00.000 agent endpoint 7 endpoint-created: in 2.1 ms
        12:00:00.000 agent endpoint-created: in 2.1 ms
        -- 1 event lost here --
        ");
    }

    #[test]
    fn an_event_is_one_line_whatever_it_carries() {
        let hostile = PacketEvent {
            direction: HOSTILE.to_owned(),
            reason: HOSTILE.to_owned(),
            protocol: HOSTILE.to_owned(),
            message: Some(HOSTILE.to_owned()),
            ..sample()
        };
        let agent =
            AgentEvent { time_unix_ms: 0, endpoint: None, event: HOSTILE.to_owned(), message: HOSTILE.to_owned() };
        for event in [MonitorEvent::Drop(hostile), MonitorEvent::Agent(agent)] {
            let text = line(&event, &Style::plain());
            assert!(!text.chars().any(char::is_control), "{text:?}");
            assert!(!text.contains('\u{202e}'), "{text:?}");
        }
    }

    #[test]
    fn colour_only_when_asked_for() {
        let coloured = line(&MonitorEvent::Drop(sample()), &Style { color: true, ..Style::plain() });
        assert!(coloured.contains("\x1b[31mdrop \x1b[0m"), "{coloured:?}");
    }
}
