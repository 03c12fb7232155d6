//! `wharf health ...`.

use std::net::IpAddr;

use wharf_api::{HealthReport, HealthState, NodeHealth, ProbeKind, ProbeOutcome, ProbeStatus};

use super::{
    Style, Tone,
    screen::Screen,
    table::{cell, maybe, number, table, token},
    text,
};

/// Nodes without an answer that are shown in detail; more would fill the screen.
const MAX_DETAILED: usize = 8;

/// Whether all health endpoints answer.
pub(crate) fn is_well(report: &HealthReport) -> bool {
    !report.nodes.is_empty() && report.nodes.iter().all(|n| n.state == HealthState::Ok)
}

/// Whether the local health endpoint answers.
pub(crate) fn is_well_here(report: &HealthReport) -> bool {
    report.nodes.iter().any(|n| n.local && n.state == HealthState::Ok)
}

pub(crate) fn report(report: &HealthReport, style: &Style) -> String {
    let mut screen = Screen::new(style);
    let has_others = report.nodes.iter().any(|n| !n.local);
    let mut header = vec!["NODE", "STATE", "FOR", "PROBED", "ENDPOINT", "PID", "LAUNCHES"];
    if has_others {
        header.insert(4, "LATENCY");
    }
    screen.block(&table(style, &header, report.nodes.iter().map(|n| node(n, style, has_others)).collect()));
    let failing = || report.nodes.iter().filter(|n| !n.local && is_failing(n));
    let own = report.nodes.iter().filter(|n| n.local);
    let detailed: Vec<&NodeHealth> = own.chain(failing().take(MAX_DETAILED)).collect();
    for n in &detailed {
        if !n.probes.is_empty() {
            screen.gap();
            if report.nodes.len() > 1 {
                screen.heading(&text::cut(&n.node, 64));
            }
            let header = ["PROBE", "ADDRESS", "RESULT", "LAST", "MIN", "MEAN", "MAX", "LOST"];
            screen.block(&table(style, &header, n.probes.iter().map(probe).collect()));
        }
    }
    let mut remarks: Vec<(Tone, String)> = detailed.iter().flat_map(|n| remarks(n, style)).collect();
    let omitted = failing().count().saturating_sub(MAX_DETAILED);
    if omitted > 0 {
        let nodes = text::count(u64::try_from(omitted).unwrap_or(u64::MAX), "more node");
        remarks.push((Tone::Warn, format!("not ok: {nodes}; `wharf health status -o json` shows every probe")));
    }
    if !remarks.is_empty() {
        screen.gap();
    }
    for (tone, words) in remarks {
        screen.item(tone, &words);
    }
    screen.finish()
}

fn tone(state: HealthState) -> Tone {
    match state {
        HealthState::Ok => Tone::Good,
        HealthState::Off => Tone::Dim,
        HealthState::Starting | HealthState::Degraded => Tone::Warn,
        HealthState::WrongAnswer | HealthState::Down => Tone::Bad,
    }
}

fn is_failing(n: &NodeHealth) -> bool {
    matches!(n.state, HealthState::Degraded | HealthState::WrongAnswer | HealthState::Down)
}

fn node(n: &NodeHealth, style: &Style, has_others: bool) -> Vec<super::table::Cell> {
    let probed = n.last_round_unix_ms.map_or_else(|| "-".to_owned(), |then| text::ago(style.now_unix_ms, then));
    let mut cells = vec![
        cell(&n.node),
        token(n.state.as_str()).tone(tone(n.state)),
        token(text::age(style.now_unix_ms, n.since_unix_ms)),
        token(probed),
        maybe(n.endpoint),
        maybe(n.pid),
        // The agent launches only local endpoints.
        if n.local || !has_others { number(n.launches) } else { number("-") },
    ];
    if has_others {
        cells.insert(4, number(trip(latency(n))));
    }
    cells
}

/// Last ICMP round-trip time of the health endpoint, or else of the node.
fn latency(n: &NodeHealth) -> Option<u64> {
    let health = [n.ipv4.map(IpAddr::V4), n.ipv6.map(IpAddr::V6)];
    let answered = || n.probes.iter().filter(|p| p.probe == ProbeKind::Icmp && p.outcome == ProbeOutcome::Answered);
    answered().find(|p| health.contains(&Some(p.address))).or_else(|| answered().next())?.last_us
}

fn probe(p: &ProbeStatus) -> Vec<super::table::Cell> {
    let (word, tone) = match p.outcome {
        ProbeOutcome::Answered => ("answered", Tone::Good),
        ProbeOutcome::NoAnswer => ("no answer", Tone::Bad),
        ProbeOutcome::WrongAnswer => ("wrong answer", Tone::Bad),
        ProbeOutcome::NotTried => ("not tried", Tone::Dim),
    };
    let lost = if p.lost > 0 { Tone::Warn } else { Tone::Plain };
    vec![
        token(p.probe.as_str()),
        token(p.address.to_string()),
        token(word).tone(tone),
        number(trip(p.last_us)),
        number(trip(p.min_us)),
        number(trip(p.mean_us)),
        number(trip(p.max_us)),
        number(format!("{}/{}", p.lost, p.sent)).tone(lost),
    ]
}

/// `82us`, `1.2ms`, `1.0s`, or `-`.
fn trip(us: Option<u64>) -> String {
    match us {
        None => "-".to_owned(),
        Some(us @ 0..1_000) => format!("{us}us"),
        Some(us @ 1_000..1_000_000) => format!("{}.{}ms", us / 1_000, us % 1_000 / 100),
        Some(us) => format!("{}.{}s", us / 1_000_000, us % 1_000_000 / 100_000),
    }
}

fn remarks(n: &NodeHealth, style: &Style) -> Vec<(Tone, String)> {
    let mut out = Vec::new();
    if n.state != HealthState::Ok {
        out.push((tone(n.state), format!("{}: {}: {}", n.node, n.state.as_str(), n.message)));
    }
    let untried = |p: &&ProbeStatus| p.outcome == ProbeOutcome::NotTried;
    if let Some(p) = n.probes.iter().find(untried).filter(|_| n.state == HealthState::Ok) {
        out.push((Tone::Dim, format!("{}: {} was not tried: {}", n.node, p.probe.as_str(), p.error)));
    }
    // Probes already show addresses.
    let addresses = n.ipv4.map(|a| a.to_string()).into_iter().chain(n.ipv6.map(|a| a.to_string()));
    let addresses: Vec<String> = addresses.filter(|_| n.probes.is_empty()).collect();
    if !addresses.is_empty() {
        out.push((Tone::Dim, format!("{}: its addresses: {}", n.node, addresses.join(", "))));
    }
    if let Some(relaunch) = &n.last_relaunch {
        let when = text::ago(style.now_unix_ms, relaunch.unix_ms);
        out.push((Tone::Warn, format!("{}: deleted to be relaunched {when}: {}", n.node, relaunch.reason)));
    }
    if let Some(note) = &n.address_note {
        out.push((Tone::Warn, format!("{}: {note}", n.node)));
    }
    out
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use wharf_api::{IpFamily, ProbeKind, Relaunch};

    use super::*;
    use crate::render::sample::{HOSTILE, NOW};

    fn probed(address: &str, probe: ProbeKind, last_us: u64) -> ProbeStatus {
        let address: IpAddr = address.parse().unwrap_or(IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED));
        ProbeStatus {
            family: if address.is_ipv6() { IpFamily::Ipv6 } else { IpFamily::Ipv4 },
            address,
            probe,
            outcome: ProbeOutcome::Answered,
            error: String::new(),
            last_us: Some(last_us),
            min_us: Some(71),
            mean_us: Some(123),
            max_us: Some(12_345),
            sent: 60,
            lost: 0,
        }
    }

    fn well() -> NodeHealth {
        let all = |address: &str| {
            [(ProbeKind::Icmp, 82), (ProbeKind::Tcp, 96), (ProbeKind::Http, 1_204)]
                .map(|(kind, us)| probed(address, kind, us))
        };
        NodeHealth {
            node: "quay".to_owned(),
            local: true,
            state: HealthState::Ok,
            message: "6 of 6 probes answered".to_owned(),
            since_unix_ms: NOW - 720_000,
            ipv4: Some([10, 87, 0, 2].into()),
            ipv6: "fd57:4a7f:e8f::2".parse().ok(),
            endpoint: Some(7),
            pid: Some(4_242),
            interval_ms: 10_000,
            last_round_unix_ms: Some(NOW - 3_000),
            rounds: 72,
            launches: 1,
            probes: [all("10.87.0.2"), all("fd57:4a7f:e8f::2")].concat(),
            ..NodeHealth::default()
        }
    }

    fn show(nodes: Vec<NodeHealth>) -> String {
        let shown = report(&HealthReport { nodes }, &Style::plain());
        assert!(shown.lines().all(|l| l.chars().count() <= 100), "{shown}");
        shown
    }

    #[test]
    fn all_is_well() {
        insta::assert_snapshot!(show(vec![well()]), @r"
        NODE  STATE  FOR  PROBED  ENDPOINT  PID   LAUNCHES
        quay  ok     12m  3s ago  7         4242         1

        PROBE  ADDRESS           RESULT     LAST   MIN   MEAN     MAX  LOST
        ICMP   10.87.0.2         answered   82us  71us  123us  12.3ms  0/60
        TCP    10.87.0.2         answered   96us  71us  123us  12.3ms  0/60
        HTTP   10.87.0.2         answered  1.2ms  71us  123us  12.3ms  0/60
        ICMP   fd57:4a7f:e8f::2  answered   82us  71us  123us  12.3ms  0/60
        TCP    fd57:4a7f:e8f::2  answered   96us  71us  123us  12.3ms  0/60
        HTTP   fd57:4a7f:e8f::2  answered  1.2ms  71us  123us  12.3ms  0/60
        ");
    }

    #[test]
    fn down_and_relaunched() {
        let mut n = well();
        (n.state, n.launches, n.pid, n.endpoint) = (HealthState::Down, 3, None, None);
        n.message = "launch: lease its addresses: no free IPv4 address in pool default; it is tried again".to_owned();
        let reason = "3 rounds in a row failed: HTTP to 10.87.0.2: no answer within 1s".to_owned();
        n.last_relaunch = Some(Relaunch { unix_ms: NOW - 5_000, reason });
        n.address_note = Some("10.87.0.9, kept from before, cannot be had again; another was taken".to_owned());
        n.probes.truncate(3);
        let gone = NodeHealth { probes: Vec::new(), node: "pier".to_owned(), ..n.clone() };
        n.probes[2].outcome = ProbeOutcome::NoAnswer;
        (n.probes[2].lost, n.probes[2].last_us, n.probes[2].max_us) = (3, Some(999_999), Some(1_000_000));
        insta::assert_snapshot!(show(vec![n, gone]), @r"
        NODE  STATE  FOR  PROBED  ENDPOINT  PID  LAUNCHES
        quay  down   12m  3s ago  -         -           3
        pier  down   12m  3s ago  -         -           3

        quay
        PROBE  ADDRESS    RESULT        LAST   MIN   MEAN     MAX  LOST
        ICMP   10.87.0.2  answered      82us  71us  123us  12.3ms  0/60
        TCP    10.87.0.2  answered      96us  71us  123us  12.3ms  0/60
        HTTP   10.87.0.2  no answer  999.9ms  71us  123us    1.0s  3/60

          - quay: down: launch: lease its addresses: no free IPv4 address in pool default; it is tried again
          - quay: deleted to be relaunched 5s ago: 3 rounds in a row failed: HTTP to 10.87.0.2: no answer
            within 1s
          - quay: 10.87.0.9, kept from before, cannot be had again; another was taken
          - pier: down: launch: lease its addresses: no free IPv4 address in pool default; it is tried again
          - pier: its addresses: 10.87.0.2, fd57:4a7f:e8f::2
          - pier: deleted to be relaunched 5s ago: 3 rounds in a row failed: HTTP to 10.87.0.2: no answer
            within 1s
          - pier: 10.87.0.9, kept from before, cannot be had again; another was taken
        ");
    }

    #[test]
    fn several_nodes_hostile_words_and_long_addresses() {
        let mut n = well();
        n.node = HOSTILE.to_owned();
        n.state = HealthState::WrongAnswer;
        n.message = HOSTILE.to_owned();
        n.ipv6 = "fd57:4a7f:0e8f:1111:2222:3333:4444:5555".parse().ok();
        n.probes = vec![probed("fd57:4a7f:0e8f:1111:2222:3333:4444:5555", ProbeKind::Http, 45_678)];
        n.probes[0].outcome = ProbeOutcome::WrongAnswer;
        n.probes[0].lost = 60;
        let message = "turned off by --health-interval-ms 0".to_owned();
        let local = true;
        let off =
            NodeHealth { node: "pier".to_owned(), local, state: HealthState::Off, message, ..NodeHealth::default() };
        insta::assert_snapshot!(show(vec![n, off]), @r"
        NODE                                           STATE         FOR  PROBED  ENDPOINT  PID   LAUNCHES
        k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfak  wrong-answer  12m  3s ago  7         4242         1
        e row
        pier                                           off           -    -       -         -            0

        k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake row
        PROBE  ADDRESS                                 RESULT          LAST   MIN   MEAN     MAX   LOST
        HTTP   fd57:4a7f:e8f:1111:2222:3333:4444:5555  wrong answer  45.6ms  71us  123us  12.3ms  60/60

          - k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake row: wrong-answer:
            k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake row
          - pier: off: turned off by --health-interval-ms 0
        ");
    }

    fn other(name: &str, state: HealthState) -> NodeHealth {
        let probes = [("192.0.2.2", 404), ("10.87.1.2", 512)].map(|(address, us)| probed(address, ProbeKind::Icmp, us));
        NodeHealth {
            node: name.to_owned(),
            state,
            message: "2 of 2 probes answered".to_owned(),
            since_unix_ms: NOW - 60_000,
            ipv4: Some([10, 87, 1, 2].into()),
            interval_ms: 10_000,
            last_round_unix_ms: Some(NOW - 2_000),
            rounds: 6,
            probes: probes.to_vec(),
            ..NodeHealth::default()
        }
    }

    #[test]
    fn other_nodes_have_a_row_each_and_details_if_they_fail() {
        let mut own = well();
        own.probes.truncate(1);
        let mut far = other("far", HealthState::Degraded);
        far.message = "1 of 2 probes failed: ICMP to 10.87.1.2: no answer within 1s".to_owned();
        (far.probes[1].outcome, far.probes[1].lost) = (ProbeOutcome::NoAnswer, 3);
        let starting = NodeHealth { node: "new".to_owned(), since_unix_ms: NOW, ..NodeHealth::default() };
        insta::assert_snapshot!(show(vec![own, other("dock", HealthState::Ok), far, starting]), @r"
        NODE  STATE     FOR  PROBED  LATENCY  ENDPOINT  PID   LAUNCHES
        quay  ok        12m  3s ago     82us  7         4242         1
        dock  ok        1m   2s ago    512us  -         -            -
        far   degraded  1m   2s ago    404us  -         -            -
        new   starting  0s   -             -  -         -            -

        quay
        PROBE  ADDRESS    RESULT    LAST   MIN   MEAN     MAX  LOST
        ICMP   10.87.0.2  answered  82us  71us  123us  12.3ms  0/60

        far
        PROBE  ADDRESS    RESULT      LAST   MIN   MEAN     MAX  LOST
        ICMP   192.0.2.2  answered   404us  71us  123us  12.3ms  0/60
        ICMP   10.87.1.2  no answer  512us  71us  123us  12.3ms  3/60

          - far: degraded: 1 of 2 probes failed: ICMP to 10.87.1.2: no answer within 1s
        ");
    }

    #[test]
    fn many_failing_nodes_do_not_fill_the_screen() {
        let down = (0..20).map(|n| other(&format!("{n}-{}", HOSTILE.repeat(4)), HealthState::Down));
        let shown = show(std::iter::once(well()).chain(down).collect());
        assert_eq!(shown.matches("PROBE  ADDRESS").count(), 1 + MAX_DETAILED, "{shown}");
        assert!(shown.contains("not ok: 12 more nodes; `wharf health status -o json` shows every probe"), "{shown}");
    }

    #[test]
    fn well_means_every_node() {
        let off = NodeHealth { state: HealthState::Off, ..NodeHealth::default() };
        assert!(is_well(&HealthReport { nodes: vec![well()] }));
        let report = HealthReport { nodes: vec![well(), off] };
        assert!(!is_well(&report) && is_well_here(&report));
        assert!(!is_well(&HealthReport::default()));
    }
}
