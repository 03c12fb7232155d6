//! Rows of the agents, compared with the objects of the API.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::super::{
    api::{elements, text},
    cluster::Cluster,
    node::Node,
};

/// Content of the rows by kind and name.
type Rows = BTreeMap<(&'static str, String), Value>;

/// Every agent has exactly the rows of the API: nodes with addresses and pod CIDRs, namespaces with labels, policies by
/// name, pods with addresses and labels.
pub(super) fn agree(cluster: &Cluster<'_>) -> Result<()> {
    let expected = of_api(cluster)?;
    for node in &cluster.nodes {
        let found = of_agent(cluster, node)?;
        let differences = differences(&expected, &found);
        ensure!(differences.is_empty(), "{}: {}", node.name(), differences.join("; "));
    }
    Ok(())
}

/// The annotations of the node's object are the addresses that its agent has now, and the other agents have them.
pub(super) fn annotations_agree(cluster: &Cluster<'_>, node: &Node) -> Result<()> {
    let name = node.name();
    let object = cluster.api.get(&["node", name])?;
    let annotation = |key: &str| sorted(text(&object, &format!("/metadata/annotations/wharf.dev~1{key}")).split(','));
    let status = cluster.wharf(node, &["status"])?;
    let routers = sorted(elements(&status, "/router").iter().filter_map(Value::as_str));
    let health = health_addresses(cluster, node, name)?;
    for (key, addresses) in [("router-addresses", &routers), ("health-addresses", &health)] {
        // The nodes have two families.
        ensure!(addresses.len() == 2, "the agent of {name} has the {key} {addresses:?}");
        ensure!(annotation(key) == *addresses, "{key} are {:?}, and {addresses:?} at the agent", annotation(key));
    }
    for other in cluster.nodes.iter().filter(|other| other.name() != name) {
        let probed = health_addresses(cluster, other, name)?;
        ensure!(probed == health, "{} probes {probed:?}, and {name} has {health:?}", other.name());
    }
    Ok(())
}

/// Addresses of the health endpoint of `of`, as the agent of `node` knows them.
fn health_addresses(cluster: &Cluster<'_>, node: &Node, of: &str) -> Result<Vec<String>> {
    let report = cluster.wharf(node, &["health", "status"])?;
    let found = elements(&report, "/nodes").iter().find(|row| text(row, "/node") == of);
    Ok(found.map(|row| sorted([text(row, "/ipv4"), text(row, "/ipv6")].into_iter())).unwrap_or_default())
}

fn of_api(cluster: &Cluster<'_>) -> Result<Rows> {
    let mut rows = Rows::new();
    for node in cluster.api.list(&["nodes"])? {
        let addresses = elements(&node, "/status/addresses").iter();
        let internal = addresses.filter(|address| text(address, "/type") == "InternalIP");
        let addresses = sorted(internal.map(|address| text(address, "/address")));
        // No route leads to a node without addresses, such as an object without a kubelet.
        if !addresses.is_empty() {
            let cidrs = sorted(elements(&node, "/spec/podCIDRs").iter().filter_map(Value::as_str));
            rows.insert(("node", text(&node, "/metadata/name").to_owned()), json!([addresses, cidrs]));
        }
    }
    for namespace in cluster.api.list(&["namespaces"])? {
        rows.insert(("namespace", text(&namespace, "/metadata/name").to_owned()), labels(&namespace, "/metadata"));
    }
    for policy in cluster.api.list(&["networkpolicies", "--all-namespaces"])? {
        rows.insert(("policy", identity(&policy, "/metadata")), Value::Null);
    }
    // Live pods without the host's network.
    let pods = cluster.api.list(&["pods", "--all-namespaces", "--field-selector=spec.hostNetwork=false"])?;
    for pod in pods.iter().filter(|pod| !["Succeeded", "Failed"].contains(&text(pod, "/status/phase"))) {
        let addresses = sorted(elements(pod, "/status/podIPs").iter().map(|entry| text(entry, "/ip")));
        let content = json!([addresses, labels(pod, "/metadata")]);
        rows.insert(("pod", identity(pod, "/metadata")), content);
    }
    Ok(rows)
}

fn of_agent(cluster: &Cluster<'_>, node: &Node) -> Result<Rows> {
    let feed = cluster.wharf(node, &["cluster", "feed"])?;
    ensure!(feed.get("connected_since_unix_ms").is_some(), "no producer on {}", node.name());
    let mut rows = Rows::new();
    for row in elements(&cluster.wharf(node, &["cluster", "nodes"])?, "/nodes") {
        let addresses = sorted(elements(row, "/addresses").iter().filter_map(Value::as_str));
        let cidrs = sorted(elements(row, "/pod_cidrs").iter().map(|cidr| text(cidr, "/cidr")));
        rows.insert(("node", text(row, "/name").to_owned()), json!([addresses, cidrs]));
    }
    for row in elements(&cluster.wharf(node, &["namespace", "list"])?, "") {
        rows.insert(("namespace", text(row, "/name").to_owned()), labels(row, ""));
    }
    for row in elements(&cluster.wharf(node, &["policy", "list"])?, "/policies") {
        rows.insert(("policy", identity(row, "")), Value::Null);
    }
    for row in elements(&cluster.wharf(node, &["cluster", "pods"])?, "/pods") {
        let addresses = sorted(elements(row, "/addresses").iter().filter_map(Value::as_str));
        rows.insert(("pod", identity(row, "")), json!([addresses, labels(row, "")]));
    }
    Ok(rows)
}

fn differences(expected: &Rows, found: &Rows) -> Vec<String> {
    let lacks = expected.iter().filter_map(|(row @ (kind, name), content)| match found.get(row) {
        Some(other) if other == content => None,
        Some(other) => Some(format!("{kind} {name} is {other}, in the API {content}")),
        None => Some(format!("{kind} {name} is missing")),
    });
    let more = found.keys().filter(|row| !expected.contains_key(*row));
    lacks.chain(more.map(|(kind, name)| format!("{kind} {name} is not in the API"))).collect()
}

/// Namespace and name of a row, or of an object with `below` `/metadata`.
fn identity(of: &Value, below: &str) -> String {
    format!("{}/{}", text(of, &format!("{below}/namespace")), text(of, &format!("{below}/name")))
}

fn labels(of: &Value, below: &str) -> Value {
    of.pointer(&format!("{below}/labels")).cloned().unwrap_or_else(|| json!({}))
}

/// Addresses and networks in one form, without empty texts.
fn sorted<'a>(texts: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut list: Vec<_> = texts.filter(|text| !text.is_empty()).map(canonical).collect();
    list.sort();
    list
}

fn canonical(text: &str) -> String {
    let (address, prefix) = text.split_once('/').map_or((text, ""), |(address, prefix)| (address, prefix));
    let address = address.trim().parse::<IpAddr>().map_or_else(|_| address.to_owned(), |parsed| parsed.to_string());
    if prefix.is_empty() { address } else { format!("{address}/{prefix}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_difference_is_named() {
        let row = |kind: &'static str, content: Value| ((kind, "default/web".to_owned()), content);
        let of = |address: &str| json!([[address], {}]);
        let expected = Rows::from([row("pod", of("10.0.0.1")), row("policy", Value::Null)]);
        assert!(differences(&expected, &expected.clone()).is_empty());
        // As many rows as in the API.
        let found = Rows::from([row("pod", of("10.0.0.2")), row("namespace", json!({}))]);
        assert_eq!(
            differences(&expected, &found),
            [
                r#"pod default/web is [["10.0.0.2"],{}], in the API [["10.0.0.1"],{}]"#,
                "policy default/web is missing",
                "namespace default/web is not in the API",
            ]
        );
    }

    #[test]
    fn addresses_have_one_form() {
        assert_eq!(sorted(["fd00:0:0:1::/64", "", "10.0.0.1"].into_iter()), ["10.0.0.1", "fd00:0:0:1::/64"]);
        assert_eq!(sorted(["fd00:0:0:0:1::/64"].into_iter()), sorted(["fd00:0::1:0:0:0/64"].into_iter()));
    }
}
