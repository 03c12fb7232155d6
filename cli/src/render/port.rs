//! `wharf port list`.

use std::net::IpAddr;

use serde::Serialize;
use wharf_api::{Endpoint, PublishedPort};

use super::{
    Style, Tone,
    endpoint::{PORTS_OFF, short_ids},
    screen::wrap,
    table::{number, table, token},
};

#[derive(Debug, Serialize)]
pub(crate) struct Port<'a> {
    #[serde(flatten)]
    port: &'a PublishedPort,
    endpoint: u16,
    container_id: &'a str,
    ifname: &'a str,
    addresses: Vec<IpAddr>,
    /// No rule translates the port.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    off: bool,
    #[serde(skip)]
    short_id: String,
}

pub(crate) fn of(endpoints: &[Endpoint]) -> Vec<Port<'_>> {
    let mut all = Vec::new();
    for (e, short_id) in endpoints.iter().zip(short_ids(endpoints)) {
        let own = || e.ipv4.map(IpAddr::V4).into_iter().chain(e.ipv6.map(IpAddr::V6));
        all.extend(e.ports.iter().map(|port| Port {
            port,
            endpoint: e.id,
            container_id: &e.container_id,
            ifname: &e.ifname,
            addresses: own().filter(|ip| port.host_ip.is_none_or(|host| host.is_ipv4() == ip.is_ipv4())).collect(),
            off: e.ports_off,
            short_id: short_id.clone(),
        }));
    }
    all.sort_by_key(|p| (p.port.host_port, p.port.protocol, p.port.host_ip, p.endpoint));
    all
}

/// Includes the reason for untranslated ports.
pub(crate) fn list(ports: &[Port<'_>], style: &Style) -> String {
    let row = |p: &Port<'_>| {
        vec![
            token(format!("{}/{}", p.port.host_port, p.port.protocol)),
            token(p.port.host_ip.map_or_else(|| "every address".to_owned(), |ip| ip.to_string())),
            number(p.port.container_port),
            number(p.endpoint),
            token(format!("{}/{}", p.short_id, p.ifname)),
        ]
    };
    let table = table(style, &["PORT", "OF THE NODE'S", "TO PORT", "ID", "CONTAINER"], ports.iter().map(row).collect());
    if ports.iter().any(|p| p.off) {
        let note = wrap(PORTS_OFF, style.width.into()).into_iter().map(|line| style.paint(Tone::Warn, &line) + "\n");
        return format!("{table}\n{}", note.collect::<String>());
    }
    table
}

#[cfg(test)]
mod tests {
    use wharf_api::Protocol;

    use super::*;
    use crate::render::sample::endpoint;

    fn port(host_ip: Option<&str>, host_port: u16, protocol: Protocol) -> PublishedPort {
        let number = |n: u16| n.try_into().unwrap();
        PublishedPort {
            protocol,
            host_ip: host_ip.map(|ip| ip.parse().unwrap()),
            host_port: number(host_port),
            container_port: number(80),
        }
    }

    #[test]
    fn ports_of_all_endpoints_by_number_within_100_columns() {
        let longest = "2001:db8:1111:2222:3333:4444:5555:6666";
        let web = Endpoint {
            ports: vec![port(None, 8080, Protocol::Udp), port(Some(longest), 65_535, Protocol::Sctp)],
            ..endpoint()
        };
        let other = Endpoint {
            id: 65_000,
            ifname: "a-long-ifname-1".to_owned(),
            ports: vec![port(Some("127.0.0.1"), 8080, Protocol::Tcp)],
            ..endpoint()
        };
        let endpoints = [web, other, endpoint()];
        let ports = of(&endpoints);
        let shown = list(&ports, &Style::plain());
        assert!(shown.lines().all(|line| line.chars().count() <= 100), "{shown}");
        insta::assert_snapshot!(shown);
        insta::assert_snapshot!(serde_json::to_string_pretty(&ports[..2]).unwrap());
    }

    #[test]
    fn ports_that_nothing_translates_are_told() {
        let ports = vec![port(None, 8080, Protocol::Udp)];
        let endpoints = [Endpoint { ports, ports_off: true, ..endpoint() }];
        let listed = list(&of(&endpoints), &Style::plain());
        assert!(listed.lines().any(|line| line.starts_with("off: the agent runs with --masquerade off")), "{listed}");
        assert!(serde_json::to_string(&of(&endpoints)).unwrap().contains(r#""off":true"#));
        let shown = crate::render::endpoint::get(&endpoints[0], &[], &Style::plain());
        assert!(shown.contains("off: the agent runs with --masquerade off"), "{shown}");
    }

    #[test]
    fn without_ports_there_is_the_head_alone() {
        insta::assert_snapshot!(list(&of(&[endpoint()]), &Style::plain()), @"PORT  OF THE NODE'S  TO PORT  ID  CONTAINER");
    }
}
