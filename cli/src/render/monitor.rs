//! `wharf monitor`: one line per event.

use std::net::{IpAddr, SocketAddr};

use wharf_api::{MonitorEvent, PacketEvent, RequestEvent};

use super::{Style, Tone, text};

const MAX_WORD: usize = 200;

pub(crate) fn line(event: &MonitorEvent, style: &Style) -> String {
    match event {
        MonitorEvent::Drop(p) => packet(p, style, style.paint(Tone::Bad, "drop ")),
        MonitorEvent::Trace(p) => packet(p, style, style.paint(Tone::Good, "trace")),
        MonitorEvent::Agent(a) => {
            let subject = a.endpoint.map_or_else(String::new, |id| format!("endpoint {id} "));
            let words = [text::safe(&a.event), text::safe(&a.message)].join(": ");
            format!("{} {} {subject}{words}", text::time_of_day(a.time_unix_ms), style.paint(Tone::Bold, "agent"))
        }
        MonitorEvent::L7(r) => request(r, style),
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
    // A packet without addresses may have an arbitrary protocol.
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

fn request(r: &RequestEvent, style: &Style) -> String {
    let tone = match r.verdict.as_str() {
        "forwarded" => Tone::Good,
        "denied" => Tone::Bad,
        _ => Tone::Warn,
    };
    let what = match r.protocol.as_str() {
        "TLS" => format!("TLS to {}", or_unknown(&r.host)),
        "DNS" => format!("DNS {} {}", or_unknown(&r.method), or_unknown(&r.host)),
        _ => format!("{} http://{}{}", or_unknown(&r.method), or_unknown(&r.host), word(&r.path)),
    };
    let status = match r.status {
        0 if r.response.is_empty() => String::new(),
        0 => format!(" -> {}", word(&r.response)),
        status => format!(" -> {status}"),
    };
    let took = r.latency_us.map_or_else(String::new, |us| format!(" {}.{} ms", us / 1_000, us / 100 % 10));
    let end = |address: Option<SocketAddr>| address.map_or_else(|| "?".to_owned(), |address| address.to_string());
    let is_told = matches!(r.protocol.as_str(), "TLS" | "DNS");
    let protocol = if is_told { String::new() } else { format!(" {}", word(&r.protocol)) };
    let flags = match r.flags.as_str() {
        "" => String::new(),
        why if r.protocol == "DNS" => format!(": {}", text::cut(why, MAX_WORD)),
        flags => format!(" flags {}", word(flags)),
    };
    format!(
        "{} {} endpoint {} {} {} {what}{status}{took}, {} -> {}{protocol}{flags}",
        text::time_of_day(r.time_unix_ms),
        style.paint(Tone::Bold, "l7   "),
        r.endpoint,
        word(&r.direction),
        style.paint(tone, &word(&r.verdict)),
        end(r.source),
        end(r.destination),
    )
}

fn or_unknown(text: &str) -> String {
    if text.is_empty() { "?".to_owned() } else { word(text) }
}

/// A blank in a path must not look like its end.
fn word(text: &str) -> String {
    text::cut(text, MAX_WORD).replace(' ', "\\u{20}")
}

/// `10.88.0.7:53`, `[fd00::7]:53`, or an address without port.
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

    fn request() -> RequestEvent {
        RequestEvent {
            time_unix_ms: NOW + 1_123,
            endpoint: 7,
            epoch: 41,
            direction: "ingress".to_owned(),
            verdict: "denied".to_owned(),
            protocol: "HTTP/1.1".to_owned(),
            method: "GET".to_owned(),
            path: "/path?q=1".to_owned(),
            host: "shop".to_owned(),
            status: 403,
            response: String::new(),
            latency_us: Some(849),
            source: "10.88.0.3:4711".parse().ok(),
            destination: "10.88.0.4:80".parse().ok(),
            flags: String::new(),
        }
    }

    #[test]
    fn requests_that_the_proxy_judged() {
        let forwarded = RequestEvent {
            verdict: "forwarded".to_owned(),
            status: 200,
            latency_us: Some(12_345),
            source: "[fd00::3]:4711".parse().ok(),
            destination: "[fd00::4]:80".parse().ok(),
            protocol: "HTTP/2".to_owned(),
            ..request()
        };
        let tls = RequestEvent {
            protocol: "TLS".to_owned(),
            method: String::new(),
            path: String::new(),
            host: "api.example.com".to_owned(),
            status: 0,
            direction: "egress".to_owned(),
            ..request()
        };
        let without_name = RequestEvent { host: String::new(), ..tls.clone() };
        let failed = RequestEvent {
            verdict: "failed".to_owned(),
            method: String::new(),
            host: String::new(),
            path: String::new(),
            status: 503,
            latency_us: None,
            source: None,
            flags: "UF,URX".to_owned(),
            ..request()
        };
        let spoof = RequestEvent { path: "/ -> 200 1.0 ms, 1.2.3.4:5".to_owned(), ..request() };
        let dns = RequestEvent {
            protocol: "DNS".to_owned(),
            method: "AAAA".to_owned(),
            path: String::new(),
            host: "api.example.com".to_owned(),
            status: 0,
            response: "REFUSED".to_owned(),
            direction: "egress".to_owned(),
            ..request()
        };
        let (verdict, flags) = ("failed".to_owned(), "the server did not answer".to_owned());
        let unanswered = RequestEvent { verdict, flags, response: String::new(), latency_us: None, ..dns.clone() };
        let events = [request(), forwarded, tls, without_name, failed, spoof, dns, unanswered].map(MonitorEvent::L7);
        let lines: Vec<String> = events.iter().map(|e| line(e, &Style::plain())).collect();
        insta::assert_snapshot!(lines.join("\n"), @r"
        12:00:01.123 l7    endpoint 7 ingress denied GET http://shop/path?q=1 -> 403 0.8 ms, 10.88.0.3:4711 -> 10.88.0.4:80 HTTP/1.1
        12:00:01.123 l7    endpoint 7 ingress forwarded GET http://shop/path?q=1 -> 200 12.3 ms, [fd00::3]:4711 -> [fd00::4]:80 HTTP/2
        12:00:01.123 l7    endpoint 7 egress denied TLS to api.example.com 0.8 ms, 10.88.0.3:4711 -> 10.88.0.4:80
        12:00:01.123 l7    endpoint 7 egress denied TLS to ? 0.8 ms, 10.88.0.3:4711 -> 10.88.0.4:80
        12:00:01.123 l7    endpoint 7 ingress failed ? http://? -> 503, ? -> 10.88.0.4:80 HTTP/1.1 flags UF,URX
        12:00:01.123 l7    endpoint 7 ingress denied GET http://shop/\u{20}->\u{20}200\u{20}1.0\u{20}ms,\u{20}1.2.3.4:5 -> 403 0.8 ms, 10.88.0.3:4711 -> 10.88.0.4:80 HTTP/1.1
        12:00:01.123 l7    endpoint 7 egress denied DNS AAAA api.example.com -> REFUSED 0.8 ms, 10.88.0.3:4711 -> 10.88.0.4:80
        12:00:01.123 l7    endpoint 7 egress failed DNS AAAA api.example.com, 10.88.0.3:4711 -> 10.88.0.4:80: the server did not answer
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
        let [method, path, host] = [HOSTILE; 3].map(str::to_owned);
        let [verdict, protocol, flags] = [HOSTILE; 3].map(str::to_owned);
        let l7 = RequestEvent { method, path, host, verdict, protocol, flags, ..request() };
        let dns = RequestEvent { protocol: "DNS".to_owned(), response: HOSTILE.to_owned(), ..l7.clone() };
        for event in
            [MonitorEvent::Drop(hostile), MonitorEvent::Agent(agent), MonitorEvent::L7(l7), MonitorEvent::L7(dns)]
        {
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
