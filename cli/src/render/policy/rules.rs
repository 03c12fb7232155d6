//! `wharf bpf policy get`.

use wharf_api::{EndpointPolicy, EndpointRules, Enforcement, PolicyRow};

use super::super::{
    Style, Tone,
    screen::Screen,
    table::{Cell, cell, lines, table, token},
    text,
};

/// The wide form has no limit.
const SHOWN: usize = 4;
/// Counts from here on have a unit prefix.
const MANY: u64 = 1_000_000;

/// State of the endpoint, then rows for each direction.
pub(crate) fn rules(policy: &EndpointPolicy, style: &Style, wide: bool) -> String {
    let mut screen = Screen::new(style);
    screen.line("Endpoint", &policy.endpoint.to_string());
    let EndpointPolicy { desired_revision, realized_revision, .. } = policy;
    if realized_revision >= desired_revision {
        screen.line("Revision", &format!("{realized_revision}, in force"));
    } else {
        let late = format!("{realized_revision} in force, {desired_revision} wanted");
        screen.toned("Revision", Tone::Warn, &late, "");
    }
    let audit = if policy.audit { "; audit: what policy would drop passes" } else { "" };
    let enforcement = match policy.enforcement {
        Enforcement::Default => "default (in the directions of policies that select it)",
        Enforcement::Always => "always (in both directions)",
        Enforcement::Never => "never",
    };
    screen.line("Enforcement", &format!("{enforcement}{audit}"));
    for (name, rules) in [("Ingress", &policy.ingress), ("Egress", &policy.egress)] {
        screen.gap();
        direction(&mut screen, name, rules, style, wide);
    }
    screen.finish()
}

fn direction(screen: &mut Screen<'_>, name: &str, rules: &EndpointRules, style: &Style, wide: bool) {
    if rules.rule_set == 0 {
        screen.heading(&format!("{name}: no rule set, every packet passes"));
        return;
    }
    screen.heading(&format!("{name}: rule set {}", rules.rule_set));
    if !rules.policies.is_empty() {
        screen.line("Policies", &rules.policies.join(", "));
    }
    let mut header = vec!["PEERS", "PORTS", "VERDICT", "RULE"];
    header.extend(wide.then_some("TIER"));
    header.extend(["PACKETS", "BYTES"]);
    screen.block(&table(style, &header, rules.rows.iter().map(|rule| row(rule, wide)).collect()));
}

fn row(row: &PolicyRow, wide: bool) -> Vec<Cell> {
    let most = if wide { usize::MAX } else { SHOWN };
    let tone = match row.verdict.as_str() {
        "accept" => Tone::Good,
        "deny" => Tone::Bad,
        verdict if verdict.starts_with("redirect") => Tone::Warn,
        _ => Tone::Plain,
    };
    let mut cells = vec![
        lines(&peers(row, most), usize::MAX),
        lines(&row.ports, most),
        token(&row.verdict).tone(tone),
        match &row.rule {
            Some(rule) if wide => cell(format!("{}, {} ({}:{})", rule.document, rule.field, rule.file, rule.line)),
            Some(rule) => cell(format!("{}, {}", rule.document, rule.field)),
            // Isolation has no rule.
            None if row.verdict == "deny" => token("isolation"),
            None => token("-"),
        },
    ];
    cells.extend(wide.then(|| token(&row.tier)));
    let packets = if row.packets < MANY { row.packets.to_string() } else { text::decimal(row.packets) };
    cells.extend([token(packets.trim_end()), token(text::bytes(row.bytes))]);
    cells
}

/// Includes peers omitted by the agent.
fn peers(row: &PolicyRow, most: usize) -> Vec<String> {
    let mut shown: Vec<String> = row.peers.iter().take(most).cloned().collect();
    let hidden = u64::try_from(row.peers.len() - shown.len()).unwrap_or(u64::MAX).saturating_add(row.more_peers);
    if hidden > 0 {
        shown.push(format!("(+{hidden} more)"));
    }
    shown
}

#[cfg(test)]
mod tests {
    use wharf_api::PolicyRule;

    use super::*;

    fn rule(file: &str) -> Option<PolicyRule> {
        let (document, field) = ("NetworkPolicy shop/db".to_owned(), "spec.ingress[0]".to_owned());
        Some(PolicyRule { file: file.to_owned(), line: 9, document, field })
    }

    fn usual() -> EndpointPolicy {
        let row = |peers: &[&str], ports: &[&str], verdict: &str, packets| PolicyRow {
            peers: peers.iter().map(|peer| (*peer).to_owned()).collect(),
            more_peers: 0,
            ports: ports.iter().map(|ports| (*ports).to_owned()).collect(),
            verdict: verdict.to_owned(),
            rule: None,
            tier: "namespaced".to_owned(),
            packets,
            bytes: packets * 74,
        };
        let web = row(&["10.88.0.7/32", "fd00:88::7/128"], &["TCP 5432"], "accept", 12);
        let many = ["10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16", "10.4.0.0/16", "10.5.0.0/16", "10.6.0.0/16"];
        EndpointPolicy {
            endpoint: 9,
            enforcement: Enforcement::Default,
            audit: false,
            desired_revision: 7,
            realized_revision: 7,
            ingress: EndpointRules {
                rule_set: 3,
                policies: vec!["NetworkPolicy shop/db".to_owned()],
                rows: vec![
                    PolicyRow { rule: rule("db.yaml"), ..web },
                    PolicyRow { more_peers: 40, ..row(&many, &["UDP 53", "UDP 8000-8015"], "pass", 1_500_000) },
                    row(&["any"], &["any"], "deny", 3),
                ],
            },
            egress: EndpointRules::default(),
        }
    }

    #[test]
    fn rules_have_a_line_each_and_a_direction_without_rules_is_told() {
        insta::assert_snapshot!(rules(&usual(), &Style::plain(), false));
    }

    #[test]
    fn wide_names_every_peer_and_the_place_of_the_rule() {
        let shown = rules(&usual(), &Style { width: 200, ..Style::plain() }, true);
        for wanted in ["10.6.0.0/16", "(+40 more)", "(db.yaml:9)", "TIER"] {
            assert!(shown.contains(wanted), "{wanted}: {shown}");
        }
    }

    #[test]
    fn the_longest_rows_stay_within_100_columns() {
        let mut policy = usual();
        let rule = PolicyRule {
            file: "f".to_owned(),
            line: 1,
            document: format!("CiliumClusterwideNetworkPolicy {}", "n".repeat(253)),
            field: "specs[10].ingressDeny[3]".to_owned(),
        };
        policy.realized_revision = 6;
        policy.audit = true;
        policy.ingress.policies = vec![rule.document.clone(); 3];
        policy.ingress.rows = vec![PolicyRow {
            peers: vec!["2001:db8:1111:2222:3333:4444:5555:6666/128".to_owned(); 16],
            more_peers: 100_000,
            ports: vec!["ICMPv6 type 128-255".to_owned(); 9],
            verdict: "accept".to_owned(),
            rule: Some(rule),
            tier: "namespaced".to_owned(),
            packets: 999_990_000_000,
            bytes: u64::MAX,
        }];
        let shown = rules(&policy, &Style::plain(), false);
        assert!(shown.lines().all(|line| line.chars().count() <= 100), "{shown}");
        assert!(shown.contains("(+100012 more)") && shown.contains("6 in force, 7 wanted"), "{shown}");
    }
}
