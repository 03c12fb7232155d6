//! `wharf sandbox ...`.

use wharf_sandbox::{Details, State, Summary};

use super::{
    Style, Tone,
    table::{cell, lines, number, table, token},
    text::{age, cut_middle, safe},
};

const MAX_SHOWN: usize = 6;
/// Characters; the table then fits 100 columns.
const MAX_NAME: usize = 28;

/// Errors of last operations follow the table.
pub(crate) fn list(sandboxes: &[Summary], style: &Style) -> String {
    let row = |s: &Summary| {
        let tone = match s.state {
            State::Ready => Tone::Good,
            State::Stopped | State::Creating | State::Stopping => Tone::Plain,
            State::Gone | State::StopUnfinished => Tone::Warn,
            State::Detached | State::Interrupted | State::Broken | State::Damaged => Tone::Bad,
        };
        // Without prefix lengths.
        let addresses: Vec<&str> = s.addresses.iter().map(|a| a.split('/').next().unwrap_or(a)).collect();
        vec![
            token(cut_middle(s.name.as_str(), MAX_NAME)),
            cell(s.state.to_string()).tone(tone),
            lines(&s.networks, MAX_SHOWN),
            lines(&addresses, MAX_SHOWN),
            number(s.processes),
            token(age(style.now_unix_ms, s.created_unix_ms)),
        ]
    };
    let header = ["NAME", "STATE", "NETWORK", "ADDRESS", "PROCS", "AGE"];
    let mut out = table(style, &header, sandboxes.iter().map(row).collect());
    let problems = sandboxes.iter().filter_map(|s| Some((&s.name, s.problem.as_ref()?)));
    for (index, (name, problem)) in problems.enumerate() {
        let gap = if index == 0 { "\n" } else { "" };
        out.push_str(&format!("{gap}{}\n", style.paint(Tone::Warn, &format!("{name}: {}", safe(problem)))));
    }
    out
}

pub(crate) fn created(details: &Details) -> String {
    let record = &details.record;
    let of = |a: &wharf_sandbox::record::Attachment| {
        let addresses = a.addresses().into_iter().map(safe).collect::<Vec<_>>().join(" ");
        format!("{}: {} on {}: {addresses}\n", record.name, a.ifname, a.network)
    };
    record.attachments.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::render::sample::NOW;

    fn summary(name: &str, state: State) -> Summary {
        Summary {
            name: name.parse().unwrap(),
            state,
            problem: None,
            container_id: Some(format!("{name}-0a1b2c3d")),
            created_unix_ms: NOW - 312_000,
            netns: Some(format!("/run/netns/{name}").into()),
            labels: BTreeMap::new(),
            networks: vec!["wharf".to_owned()],
            addresses: vec!["10.87.0.2/32".to_owned(), "fd57:4a7f:e8f::2/128".to_owned()],
            processes: 1,
        }
    }

    #[test]
    fn sandboxes_have_a_row_each_within_100_columns() {
        let longest = "a-name-that-is-as-long-as-a-name-may-be-and-not-a-letter-longer";
        let all = [
            summary("web", State::Ready),
            Summary { processes: 0, ..summary("gone", State::Gone) },
            Summary {
                problem: Some("\u{1b}[2J (DEL of plugin x, network wharf, interface eth0, code 11)".to_owned()),
                ..summary(longest, State::StopUnfinished)
            },
            Summary {
                problem: Some("it is empty".to_owned()),
                networks: Vec::new(),
                addresses: Vec::new(),
                created_unix_ms: 0,
                ..summary("bad", State::Damaged)
            },
        ];
        let shown = list(&all, &Style::plain());
        let rows = shown.split("\n\n").next().unwrap_or_default();
        assert!(rows.lines().all(|line| line.chars().count() <= 100), "{shown}");
        assert!(!shown.contains('\u{1b}'), "{shown}");
        insta::assert_snapshot!(shown, @r"
        NAME                          STATE                        NETWORK  ADDRESS           PROCS  AGE
        web                           ready                        wharf    10.87.0.2             1  5m12s
                                                                            fd57:4a7f:e8f::2
        gone                          stopped (its namespace is    wharf    10.87.0.2             0  5m12s
                                      gone)                                 fd57:4a7f:e8f::2
        a-name-that-is…letter-longer  stopping (its stop has not   wharf    10.87.0.2             1  5m12s
                                      ended)                                fd57:4a7f:e8f::2
        bad                           damaged (its record cannot                                  1  -
                                      be used)

        a-name-that-is-as-long-as-a-name-may-be-and-not-a-letter-longer: \u{1b}[2J (DEL of plugin x, network wharf, interface eth0, code 11)
        bad: it is empty
        ");
        insta::assert_snapshot!(list(&[], &Style::plain()), @"NAME  STATE  NETWORK  ADDRESS  PROCS  AGE");
    }
}
