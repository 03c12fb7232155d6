//! `wharf policy get`, `import` and `delete`.

use wharf_api::{Enforcement, PolicyChange, PolicyInfo, PolicyList, PolicySizes};

use super::{
    super::{
        Style, Tone,
        screen::{Screen, wrap},
        table::{Cell, cell, lines, table, token},
        text,
    },
    full_name, isolates, tier,
};

/// Columns and lines for endpoints; the wide form has no limit.
const ENDPOINTS: (usize, usize) = (12, 2);

pub(crate) fn get(list: &PolicyList, style: &Style, wide: bool) -> String {
    let mut screen = Screen::new(style);
    let PolicyList { revision, realized, .. } = list;
    if realized >= revision {
        screen.toned("Revision", Tone::Good, &revision.to_string(), "in force");
    } else {
        screen.toned("Revision", Tone::Warn, &revision.to_string(), &format!("not in force yet: {realized} is"));
    }
    // One line per refused file.
    for (at, problem) in list.problem.iter().flat_map(|all| all.lines()).enumerate() {
        screen.toned(if at == 0 { "Problem" } else { "" }, Tone::Bad, problem, "");
    }
    let audit = if list.audit { "; audit: what policy would drop passes" } else { "" };
    screen.line("Enforcement", &format!("{}{audit}", enforcement(list.enforcement)));
    screen.line("Rows", &fill(&list.rows));
    screen.gap();
    let mut header = vec!["KIND/NAME", "TIER", "SUBJECT", "ISOLATES", "RULES", "ENDPOINTS"];
    header.extend(wide.then_some("FILE"));
    screen.block(&table(style, &header, list.policies.iter().map(|policy| row(policy, wide)).collect()));
    screen.finish()
}

fn enforcement(mode: Enforcement) -> &'static str {
    match mode {
        Enforcement::Default => "default (endpoints that a policy selects)",
        Enforcement::Always => "always (every endpoint)",
        Enforcement::Never => "never",
    }
}

fn fill(rows: &PolicySizes) -> String {
    let PolicySizes { peers, peers_limit, ports, ports_limit, cells, cells_limit, sets, sets_limit } = rows;
    let tables = [
        ("peers", peers, peers_limit),
        ("ports", ports, ports_limit),
        ("cells", cells, cells_limit),
        ("rule sets", sets, sets_limit),
    ];
    tables.map(|(name, used, limit)| format!("{name} {used}/{limit}")).join(", ")
}

fn row(policy: &PolicyInfo, wide: bool) -> Vec<Cell> {
    let mut row = vec![
        cell(full_name(&policy.kind, policy.namespace.as_deref(), &policy.name)),
        tier(&policy.tier, policy.priority),
        cell(&policy.subject),
        isolates(&policy.isolates),
        token(format!("{}/{}", policy.ingress_rules, policy.egress_rules)),
        endpoints(&policy.endpoints, wide),
    ];
    row.extend(wide.then(|| cell(format!("{}:{}", policy.file, policy.line)).whole()));
    row
}

fn endpoints(ids: &[u16], wide: bool) -> Cell {
    let shown = ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    if ids.is_empty() || wide {
        return cell(if ids.is_empty() { "-" } else { &shown });
    }
    let (columns, most) = ENDPOINTS;
    let mut wrapped = wrap(&shown, columns);
    let hidden: usize = wrapped.iter().skip(most).map(|line| line.split(' ').count()).sum();
    if hidden > 0 {
        wrapped.truncate(most);
        wrapped.push(format!("(+{hidden} more)"));
    }
    lines(&wrapped, wrapped.len())
}

pub(crate) fn changes(changes: &[PolicyChange]) -> String {
    let mut out = String::new();
    let mut tell = |policies: &[String], what: &str| {
        for policy in policies {
            out.push_str(&format!("{}: {what}\n", text::safe(policy)));
        }
    };
    for change in changes {
        tell(&change.put, "put");
        tell(&change.removed, "removed");
    }
    if let Some(last) = changes.last() {
        let PolicyChange { revision, realized, .. } = last;
        out.push_str(&if last.is_in_force() {
            format!("revision {revision} is in force\n")
        } else {
            format!("revision {revision} is not in force yet, {realized} is; `wharf policy get` tells why\n")
        });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::sample::HOSTILE;

    fn policy(kind: &str, namespace: Option<&str>, endpoints: &[u16]) -> PolicyInfo {
        PolicyInfo {
            kind: kind.to_owned(),
            namespace: namespace.map(str::to_owned),
            name: "db".to_owned(),
            tier: if namespace.is_some() { "namespaced" } else { "admin" }.to_owned(),
            priority: namespace.is_none().then_some(10),
            subject: "k8s:app=db, in namespace shop".to_owned(),
            isolates: vec!["ingress".to_owned()],
            ingress_rules: 1,
            egress_rules: 0,
            file: "policies/db.yaml".to_owned(),
            line: 4,
            endpoints: endpoints.to_vec(),
        }
    }

    fn usual() -> PolicyList {
        let sizes = PolicySizes {
            peers: 12,
            peers_limit: 131_072,
            ports: 3,
            ports_limit: 65_536,
            cells: 7,
            cells_limit: 262_144,
            sets: 2,
            sets_limit: 16_384,
        };
        PolicyList {
            revision: 7,
            realized: 7,
            enforcement: Enforcement::Default,
            audit: false,
            problem: None,
            rows: sizes,
            policies: vec![
                policy("NetworkPolicy", Some("shop"), &[7, 9]),
                policy("ClusterNetworkPolicy", None, &[]),
                policy("CiliumNetworkPolicy", Some("shop"), &(1..=20).collect::<Vec<_>>()),
            ],
        }
    }

    #[test]
    fn policies_in_force_have_a_line_each_within_100_columns() {
        let shown = get(&usual(), &Style::plain(), false);
        assert!(shown.lines().all(|line| line.chars().count() <= 100), "{shown}");
        insta::assert_snapshot!(shown);
    }

    #[test]
    fn wide_names_every_endpoint_and_the_place() {
        let shown = get(&usual(), &Style { width: 200, ..Style::plain() }, true);
        assert!(shown.contains(" 18 19 20 "), "{shown}");
        assert_eq!(shown.matches("policies/db.yaml:4").count(), 3, "{shown}");
    }

    #[test]
    fn a_revision_that_is_not_in_force_says_why() {
        let problem = Some(format!("compile the policies: 9 more rows than fit {HOSTILE}"));
        let list = PolicyList {
            realized: 6,
            audit: true,
            enforcement: Enforcement::Always,
            problem,
            policies: Vec::new(),
            ..usual()
        };
        let shown = get(&list, &Style::plain(), false);
        assert!(shown.lines().all(|line| line.chars().count() <= 100), "{shown}");
        insta::assert_snapshot!(shown);
    }

    #[test]
    fn a_change_is_a_line_for_each_policy() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let first = PolicyChange { revision: 6, realized: 6, put: names(&["NetworkPolicy shop/db"]), removed: vec![] };
        let last = PolicyChange { revision: 7, realized: 7, put: vec![], removed: names(&["NetworkPolicy shop/a\n"]) };
        assert_eq!(
            changes(&[first.clone(), last.clone()]),
            "NetworkPolicy shop/db: put\nNetworkPolicy shop/a\\n: removed\nrevision 7 is in force\n"
        );
        let late = changes(&[first, PolicyChange { realized: 6, ..last }]);
        assert!(late.ends_with("revision 7 is not in force yet, 6 is; `wharf policy get` tells why\n"), "{late}");
        assert_eq!(changes(&[]), "");
    }
}
