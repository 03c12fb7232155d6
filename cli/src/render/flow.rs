//! `wharf bpf ct list`.

use wharf_api::{Flow, FlowEnd, FlowProtocol, FlowState};

use super::{
    Style, Tone,
    table::{Cell, cell, lines, maybe, natural_width, table, token},
    text,
};

#[derive(Debug, Clone, Copy)]
struct Layout {
    wide: bool,
    stacked: bool,
}

/// Stacks addresses that do not fit side by side.
pub(crate) fn list(flows: &[Flow], style: &Style, wide: bool) -> String {
    let rows = |layout: Layout| flows.iter().map(|flow| layout.row(flow)).collect::<Vec<_>>();
    let flat = Layout { wide, stacked: false };
    // `--wide` implies a wide screen or a pipe.
    let stacked = !wide && natural_width(&flat.header(), &rows(flat)) > usize::from(style.width);
    let layout = Layout { wide, stacked };
    table(style, &layout.header(), rows(layout))
}

impl Layout {
    fn header(self) -> Vec<&'static str> {
        let mut header = vec!["PROTOCOL"];
        header.extend(if self.stacked { &["SOURCE -> DESTINATION"] as &[_] } else { &["SOURCE", "DESTINATION"] });
        header.extend(["STATE", "OWNER", "IDLE", "LEFT"]);
        header.extend(if self.wide { &["WAY", "KEPT"] as &[_] } else { &[] });
        header
    }

    fn row(self, flow: &Flow) -> Vec<Cell> {
        let [source, destination] = [&flow.source, &flow.destination].map(|of| end(of, flow.protocol));
        let mut row = vec![token(flow.protocol.to_string())];
        if self.stacked {
            row.push(lines(&[source, format!("-> {destination}")], 2).whole());
        } else {
            row.extend([cell(source).whole(), cell(destination).whole()]);
        }
        let tone = if matches!(flow.state, FlowState::Closing | FlowState::Closed) { Tone::Dim } else { Tone::Plain };
        row.extend([
            token(flow.state.as_str()).tone(tone),
            maybe(flow.owner),
            token(text::span(flow.idle_ms)),
            token(text::span(flow.left_ms)),
        ]);
        if self.wide {
            row.push(token(match (flow.by_proxy, flow.by_stack) {
                (true, _) => "proxy",
                (false, true) => "stack",
                (false, false) => "direct",
            }));
            row.push(token(if flow.kept { "yes" } else { "no" }));
        }
        row
    }
}

/// `10.0.0.2:443`, `[fd00::2]:443`, or an address without port.
fn end(end: &FlowEnd, protocol: FlowProtocol) -> String {
    if FlowProtocol::NAMED.iter().any(|(_, number)| *number == protocol.0) {
        std::net::SocketAddr::new(end.address, end.port).to_string()
    } else {
        end.address.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(protocol: u8, source: (&str, u16), destination: (&str, u16)) -> Flow {
        let end = |(address, port): (&str, u16)| FlowEnd { address: address.parse().unwrap(), port };
        Flow {
            protocol: FlowProtocol(protocol),
            source: end(source),
            destination: end(destination),
            state: FlowState::Established,
            owner: Some(7),
            by_stack: false,
            by_proxy: false,
            kept: true,
            idle_ms: 1_073,
            left_ms: 7_438_000,
        }
    }

    fn usual() -> [Flow; 5] {
        let new = Flow { state: FlowState::New, kept: false, ..flow(17, ("10.88.0.7", 40_000), ("10.88.0.8", 53)) };
        let closed = flow(6, ("fd57:4a7f:e8f::2", 40_000), ("fd57:4a7f:e8f::3", 443));
        [
            flow(6, ("10.88.0.7", 40_000), ("192.0.2.7", 443)),
            Flow { by_stack: true, ..new },
            Flow { state: FlowState::Closed, owner: None, left_ms: 0, ..closed },
            Flow { by_proxy: true, ..flow(6, ("10.88.0.7", 40_000), ("10.88.0.8", 443)) },
            flow(47, ("10.88.0.7", 0), ("192.0.2.7", 0)),
        ]
    }

    #[test]
    fn flows_have_a_line_each() {
        insta::assert_snapshot!(list(&usual(), &Style::plain(), false));
    }

    #[test]
    fn wide_tells_the_way_and_what_may_be_evicted() {
        insta::assert_snapshot!(list(&usual(), &Style::plain(), true));
    }

    #[test]
    fn the_longest_addresses_stand_below_each_other_within_100_columns() {
        let longest = ("2001:db8:1111:2222:3333:4444:5555:6666", 65_535);
        let flow = Flow { owner: Some(16_383), ..flow(132, longest, longest) };
        let shown = list(&[flow, usual()[4].clone()], &Style::plain(), false);
        assert!(shown.lines().all(|line| line.chars().count() <= 100), "{shown}");
        insta::assert_snapshot!(shown);
    }
}
