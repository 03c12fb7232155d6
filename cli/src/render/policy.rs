//! `wharf policy ...` and `wharf bpf policy get`.

mod explain;
mod force;
mod rules;

use serde::Serialize;
use wharf_policy::model::{Direction, Policy, Tier};

pub(crate) use self::{
    explain::explanation,
    force::{changes, get},
    rules::rules,
};
use super::{
    Style,
    table::{Cell, cell, table, token},
};

#[derive(Debug, Serialize)]
pub(crate) struct Row {
    kind: String,
    /// `None` for kinds without a namespace.
    namespace: Option<String>,
    name: String,
    tier: &'static str,
    /// Lower first; `None` in the namespaced tier.
    priority: Option<u16>,
    subject: String,
    isolates: Vec<&'static str>,
    rules: Count,
    file: String,
    line: u32,
}

#[derive(Debug, Serialize)]
struct Count {
    ingress: usize,
    egress: usize,
}

impl From<&Policy> for Row {
    fn from(policy: &Policy) -> Self {
        let rules = |direction| policy.rules.iter().filter(|rule| rule.direction == direction).count();
        let namespace = &policy.name.namespace;
        let isolates = [(policy.isolates.ingress, "ingress"), (policy.isolates.egress, "egress")];
        let (tier, priority) = match policy.tier {
            Tier::Admin => ("admin", Some(policy.priority)),
            Tier::Namespaced => ("namespaced", None),
            Tier::Baseline => ("baseline", Some(policy.priority)),
        };
        Self {
            kind: policy.name.kind.clone(),
            namespace: (!namespace.is_empty()).then(|| namespace.clone()),
            name: policy.name.name.clone(),
            tier,
            priority,
            subject: policy.subject.to_string(),
            isolates: isolates.into_iter().filter_map(|(is, direction)| is.then_some(direction)).collect(),
            rules: Count { ingress: rules(Direction::Ingress), egress: rules(Direction::Egress) },
            file: policy.origin.file.to_string(),
            line: policy.origin.line,
        }
    }
}

pub(crate) fn list(policies: &[Row], style: &Style) -> String {
    let row = |policy: &Row| {
        let Row { kind, namespace, name, .. } = policy;
        vec![
            cell(full_name(kind, namespace.as_deref(), name)),
            tier(policy.tier, policy.priority),
            cell(&policy.subject),
            isolates(&policy.isolates),
            token(format!("{}/{}", policy.rules.ingress, policy.rules.egress)),
        ]
    };
    table(style, &["NAME", "TIER", "SUBJECT", "ISOLATES", "RULES"], policies.iter().map(row).collect())
}

/// `NetworkPolicy shop/db`.
pub(crate) fn full_name(kind: &str, namespace: Option<&str>, name: &str) -> String {
    match namespace {
        Some(namespace) => format!("{kind} {namespace}/{name}"),
        None => format!("{kind} {name}"),
    }
}

/// `namespaced`, `admin 10`.
fn tier(tier: &str, priority: Option<u16>) -> Cell {
    token(match priority {
        Some(priority) => format!("{tier} {priority}"),
        None => tier.to_owned(),
    })
}

fn isolates(directions: &[impl AsRef<str>]) -> Cell {
    token(match directions {
        [] => "-",
        [direction] => direction.as_ref(),
        _ => "both",
    })
}

#[cfg(test)]
mod tests {
    use wharf_policy::read::read;

    use super::*;

    fn rows(text: &str) -> Vec<Row> {
        read("policies.yaml", text).unwrap().iter().map(Row::from).collect()
    }

    /// All kinds, tiers and directions, and a document with several specs.
    const EACH: &str = r#"
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: db, namespace: shop}
spec:
  podSelector: {matchLabels: {app: db}}
  policyTypes: [Ingress, Egress]
  ingress: [{from: [{podSelector: {}}]}, {ports: [{port: 5432}]}]
---
apiVersion: policy.networking.k8s.io/v1alpha2
kind: ClusterNetworkPolicy
metadata: {name: monitoring}
spec:
  tier: Admin
  priority: 10
  subject: {namespaces: {matchLabels: {team: a}}}
  egress: [{action: Accept, to: [{namespaces: {}}]}]
---
apiVersion: policy.networking.k8s.io/v1beta1
kind: ClusterNetworkPolicy
metadata: {name: default}
spec: {tier: Baseline, priority: 1000, subject: {namespaces: {}}}
---
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: two}
specs:
- {endpointSelector: {}, ingress: [{}]}
- {endpointSelector: {matchLabels: {"k8s:app": web}}, egressDeny: [{toEntities: [world]}]}
---
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: a}
spec: {endpointSelector: {}, ingress: [{fromEntities: [all]}], enableDefaultDeny: {ingress: false}}
"#;

    #[test]
    fn policies_have_a_line_each() {
        let rows = rows(EACH);
        let shown = list(&rows, &Style::plain());
        assert!(shown.lines().all(|line| line.chars().count() <= 100), "{shown}");
        insta::assert_snapshot!(shown);
        insta::assert_snapshot!(serde_json::to_string_pretty(&rows[..2]).unwrap());
    }

    #[test]
    fn the_longest_names_and_selectors_stay_within_100_columns() {
        let (name, key, value) = ("n".repeat(253), "k".repeat(63), "v".repeat(63));
        let text = format!(
            "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {{name: {name}, namespace: {value}}}\n\
             spec: {{endpointSelector: {{matchLabels: {{{key}: {value}}}}}, ingress: [{{}}], egress: [{{}}]}}"
        );
        let shown = list(&rows(&text), &Style::plain());
        assert!(shown.lines().all(|line| line.chars().count() <= 100), "{shown}");
        insta::assert_snapshot!(shown);
    }

    #[test]
    fn a_selector_is_told_in_words() {
        let told = |selector: &str| {
            let text = format!(
                "apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {{name: a}}\n\
                 spec: {{endpointSelector: {selector}, ingress: [{{}}]}}"
            );
            rows(&text).into_iter().map(|row| row.subject).collect::<String>()
        };
        let expression = |key: &str, rest: &str| told(&format!("{{matchExpressions: [{{key: '{key}', {rest}}}]}}"));
        let name = "io.kubernetes.pod.namespace";
        let team = "io.cilium.k8s.namespace.labels.team";
        for (words, wanted) in [
            (told("{}"), "all endpoints"),
            (told("{matchLabels: {'k8s:app': db, tier: ''}}"), "any:tier=\"\", k8s:app=db"),
            (expression("k8s:app", "operator: In, values: [b, a]"), "k8s:app=a or b"),
            (expression("k8s:app", "operator: NotIn, values: [b, a]"), "k8s:app not a or b"),
            (expression("k8s:app", "operator: Exists"), "with k8s:app"),
            (expression("k8s:app", "operator: DoesNotExist"), "without k8s:app"),
            (expression(name, "operator: In, values: [b, a]"), "all endpoints, in namespace a or b"),
            (expression(name, "operator: NotIn, values: [a]"), "all endpoints, not in namespace a"),
            (expression(name, "operator: Exists"), "all endpoints, in any namespace"),
            (expression(name, "operator: DoesNotExist"), "all endpoints, in no namespace"),
            (expression(team, "operator: In, values: [a]"), "all endpoints, namespace team=a"),
            (expression(team, "operator: Exists"), "all endpoints, namespace with team"),
        ] {
            assert_eq!(words, wanted);
        }
    }

    #[test]
    fn without_policies_there_is_the_head_alone() {
        insta::assert_snapshot!(list(&[], &Style::plain()), @"NAME  TIER  SUBJECT  ISOLATES  RULES");
    }
}
