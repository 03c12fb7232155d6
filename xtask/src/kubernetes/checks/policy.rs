//! NetworkPolicy on all nodes, as tables of reachability.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Result, bail};
use serde_json::{Value, json};

use super::{
    super::{
        api::{Pod, in_url},
        cluster::Cluster,
        place::until_right,
    },
    connectivity, samples,
};
use crate::progress::spell;

const NAMESPACES: [&str; 3] = ["x", "y", "z"];
const NAMES: [&str; 2] = ["a", "b"];

/// Until all nodes enforce a change.
const LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Who(&'static str, &'static str);

struct Case {
    name: &'static str,
    policies: fn() -> Vec<Value>,
    /// Whether the first reaches the second.
    expected: fn(Who, Who) -> bool,
}

/// Policies of the namespace `x`.
const CASES: &[Case] = &[
    Case {
        name: "deny all ingress",
        policies: || vec![in_x(&json!({"podSelector": {}, "policyTypes": ["Ingress"]}))],
        expected: |_, to| to.0 != "x",
    },
    Case {
        name: "ingress by pod label",
        policies: || vec![in_x(&ingress(&json!({}), &json!([{"podSelector": {"matchLabels": {"pod": "b"}}}])))],
        expected: |from, to| to.0 != "x" || from == Who("x", "b"),
    },
    Case {
        name: "ingress by namespace label",
        policies: || vec![in_x(&ingress(&json!({}), &json!([{"namespaceSelector": {"matchLabels": {"team": "y"}}}])))],
        expected: |from, to| to.0 != "x" || from.0 == "y",
    },
    Case {
        name: "ingress by both labels, to one pod",
        policies: || {
            let peer = json!([{
                "namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "In", "values": ["y", "z"]}]},
                "podSelector": {"matchLabels": {"pod": "a"}},
            }]);
            vec![in_x(&ingress(&json!({"matchLabels": {"pod": "b"}}), &peer))]
        },
        expected: |from, to| to != Who("x", "b") || (from.0 != "x" && from.1 == "a"),
    },
    Case {
        name: "ingress on another port",
        policies: || {
            let rules = json!([{"ports": [{"port": 81, "protocol": "TCP"}]}]);
            vec![in_x(&json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": rules}))]
        },
        expected: |_, to| to.0 != "x",
    },
    Case {
        name: "ingress on a named port",
        policies: || {
            let rules = json!([{"ports": [{"port": "http"}], "from": [{"podSelector": {}}]}]);
            vec![in_x(&json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": rules}))]
        },
        expected: |from, to| to.0 != "x" || from.0 == "x",
    },
    Case {
        name: "deny all egress",
        policies: || vec![in_x(&json!({"podSelector": {}, "policyTypes": ["Egress"]}))],
        expected: |from, _| from.0 != "x",
    },
    Case {
        name: "egress by namespace label",
        policies: || {
            let rules = json!([{"to": [{"namespaceSelector": {"matchLabels": {"team": "z"}}}]}]);
            vec![in_x(&json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": rules}))]
        },
        expected: |from, to| from.0 != "x" || to.0 == "z",
    },
    Case {
        name: "deny and allow add up",
        policies: || {
            let allow = ingress(&json!({"matchLabels": {"pod": "a"}}), &json!([{"podSelector": {}}]));
            vec![in_x(&json!({"podSelector": {}, "policyTypes": ["Ingress"]})), samples::policy("x", "allow", &allow)]
        },
        expected: |from, to| to.0 != "x" || (to.1 == "a" && from.0 == "x"),
    },
];

fn in_x(spec: &Value) -> Value {
    samples::policy("x", "case", spec)
}

fn ingress(subject: &Value, from: &Value) -> Value {
    json!({"podSelector": subject, "policyTypes": ["Ingress"], "ingress": [{"from": from}]})
}

pub(super) fn tables(cluster: &Cluster<'_>) -> Result<String> {
    tables_of(cluster, CASES.len())
}

pub(super) fn tables_of(cluster: &Cluster<'_>, count: usize) -> Result<String> {
    let pods = make(cluster)?;
    let mut worst = Duration::ZERO;
    let mut failures = Vec::new();
    compare(cluster, &pods, |_, _| true)?;
    for case in CASES.iter().take(count) {
        cluster.api.apply(&(case.policies)())?;
        match compare(cluster, &pods, case.expected) {
            Ok(took) => worst = worst.max(took),
            Err(error) => failures.push(format!("{}: {error:#}", case.name)),
        }
        cluster.api.delete(&["networkpolicies", "--namespace=x", "--all"])?;
        if let Err(error) = compare(cluster, &pods, |_, _| true) {
            failures.push(format!("after {}: {error:#}", case.name));
        }
    }
    remove(cluster)?;
    if !failures.is_empty() {
        bail!("{}", failures.join("\n"));
    }
    let pairs = pods.len() * pods.len() * 2;
    Ok(format!("{} policies, {pairs} pairs each; right within {}", count.min(CASES.len()), spell(worst)))
}

/// Changed labels of pods and namespaces change the allowed connections.
pub(super) fn labels(cluster: &Cluster<'_>) -> Result<String> {
    let pods = make(cluster)?;
    let peers = json!([
        {"podSelector": {"matchLabels": {"role": "friend"}}},
        {"namespaceSelector": {"matchLabels": {"role": "friend"}}},
    ]);
    cluster.api.apply(&[in_x(&ingress(&json!({"matchLabels": {"pod": "a"}}), &peers))])?;
    let guarded = |to: Who| to == Who("x", "a");
    let label = |arguments: &[&str]| cluster.api.run(&[&["label", "--overwrite"], arguments].concat()).map(drop);
    let run = || -> Result<()> {
        compare(cluster, &pods, |_, to| !guarded(to))?;
        label(&["pods", "--namespace=x", "b", "role=friend"])?;
        compare(cluster, &pods, |from, to| !guarded(to) || from == Who("x", "b"))?;
        label(&["namespace", "y", "role=friend"])?;
        compare(cluster, &pods, |from, to| !guarded(to) || from == Who("x", "b") || from.0 == "y")?;
        label(&["pods", "--namespace=x", "b", "role-"])?;
        label(&["namespace", "y", "role-"])?;
        compare(cluster, &pods, |_, to| !guarded(to))?;
        // The policy's subject.
        label(&["pods", "--namespace=x", "a", "pod=other"])?;
        compare(cluster, &pods, |_, _| true)?;
        Ok(())
    };
    let result = run();
    remove(cluster)?;
    result?;
    Ok("of pods, namespaces and the policy's subject".to_owned())
}

/// Pods with equal names in each namespace, spread over the nodes.
fn make(cluster: &Cluster<'_>) -> Result<BTreeMap<Who, Pod>> {
    let mut objects: Vec<_> = NAMESPACES.iter().map(|name| samples::namespace(name)).collect();
    let mut nodes = cluster.nodes.iter().cycle();
    for namespace in NAMESPACES {
        for name in NAMES {
            let Some(node) = nodes.next() else { bail!("a cluster without nodes") };
            objects.push(samples::pod(namespace, name, node.name()));
        }
        // Spreads each name over the nodes.
        nodes.next();
    }
    cluster.api.apply(&objects)?;
    let mut found = BTreeMap::new();
    for namespace in NAMESPACES {
        let namespaced = format!("--namespace={namespace}");
        cluster.api.run(&["wait", &namespaced, "--for=condition=Ready", "pods", "--all", "--timeout=60s"])?;
        for pod in cluster.api.pods(namespace, "")? {
            if let Some(name) = NAMES.iter().find(|name| **name == pod.name) {
                found.insert(Who(namespace, name), pod);
            }
        }
    }
    Ok(found)
}

fn remove(cluster: &Cluster<'_>) -> Result<()> {
    cluster.api.delete(&[&["namespaces"], &NAMESPACES[..]].concat())
}

/// Waits until exactly the expected connections succeed. Every pod reaches itself.
fn compare(cluster: &Cluster<'_>, pods: &BTreeMap<Who, Pod>, expected: impl Fn(Who, Who) -> bool) -> Result<Duration> {
    let mut targets = BTreeMap::new();
    for (who, pod) in pods {
        for address in &pod.addresses {
            targets.insert(format!("http://{}/", in_url(address)), *who);
        }
    }
    let urls: Vec<_> = targets.keys().cloned().collect();
    until_right("the table", LIMIT, || {
        let mut wrong = Vec::new();
        let found = connectivity::probe_all(cluster, pods.values(), &urls)?;
        for ((from, _), (pod, found)) in pods.iter().zip(found) {
            for (url, answers) in found {
                let Some(to) = targets.get(&url) else { continue };
                if answers != (from == to || expected(*from, *to)) {
                    let verb = if answers { "reaches" } else { "does not reach" };
                    wrong.push(format!("{}/{} on {} {verb} {}/{} {url}", from.0, from.1, pod.node, to.0, to.1));
                }
            }
        }
        Ok(wrong)
    })
}
