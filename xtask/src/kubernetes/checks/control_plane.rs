//! Failure and restoration of the control plane.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{
    super::{
        api::{elements, text},
        cluster::Cluster,
        node::Node,
        place::until,
    },
    basic::{self, LIMIT},
    connectivity, policy, samples,
};

const SNAPSHOT: &str = "etcd-earlier";

/// Pods keep their network without an API server; later changes arrive.
pub(super) fn api_server(cluster: &Cluster<'_>) -> Result<String> {
    let urls = connectivity::urls(&basic::pods(cluster)?);
    cluster.control.place.kill("kube-apiserver")?;
    for node in &cluster.nodes {
        for url in &urls {
            basic::page(&node.place, url)?;
        }
    }
    cluster.control.start("kube-apiserver", &cluster.api)?;
    let note = policy::tables_of(cluster, 1)?;
    until("the rows of the API", LIMIT, || rows_agree(cluster).map(Some))?;
    Ok(note)
}

/// Restores an earlier copy of etcd: objects vanish without events, versions decrease.
pub(super) fn earlier_snapshot(cluster: &Cluster<'_>) -> Result<String> {
    let (control, api) = (&cluster.control, &cluster.api);
    let stop = || -> Result<()> {
        for name in ["kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"] {
            control.place.stop(name)?;
        }
        Ok(())
    };
    stop()?;
    control.copy_of_etcd(SNAPSHOT)?;
    control.start_all(api)?;
    // Missing from the copy.
    api.apply(&[
        samples::namespace("later"),
        samples::pod("later", "a", cluster.nodes.first().map(Node::name).unwrap_or_default()),
        samples::policy("default", "later", &json!({"podSelector": {}, "policyTypes": ["Ingress"]})),
    ])?;
    api.run(&["wait", "--namespace=later", "--for=condition=Ready", "pods", "--all", "--timeout=60s"])?;
    until("the later rows", LIMIT, || rows_agree(cluster).map(Some))?;
    stop()?;
    control.restore_etcd(SNAPSHOT)?;
    control.start_all(api)?;
    // Their caches have later versions, so they need a restart; Wharf does not.
    for node in &cluster.nodes {
        for name in ["kubelet", "kube-proxy"] {
            node.place.kill(name)?;
        }
        node.join()?;
    }
    for node in &cluster.nodes {
        until(&format!("{} is ready", node.name()), LIMIT, || cluster.node_is_ready(node.name()).map(Some))?;
    }
    until("the earlier rows", LIMIT, || rows_agree(cluster).map(Some))?;
    until("all pods reach all pods", LIMIT, || connectivity::all_reach(cluster, &basic::pods(cluster)?).map(Some))?;
    Ok("rows of all nodes follow the restored state".to_owned())
}

/// Compares all agents' rows with the API.
pub(super) fn rows_agree(cluster: &Cluster<'_>) -> Result<()> {
    let expected = pods_of_the_api(cluster)?;
    let count = |kind: &str| Ok::<_, anyhow::Error>(cluster.api.list(&[kind, "--all-namespaces"])?.len());
    let (namespaces, policies) = (count("namespaces")?, count("networkpolicies")?);
    for node in &cluster.nodes {
        let name = node.name();
        let feed = cluster.wharf(node, &["cluster", "feed"])?;
        ensure!(feed.get("connected_since_unix_ms").is_some(), "no producer on {name}");
        for row in elements(&feed, "/rows") {
            let expected = match text(row, "/kind") {
                "namespace" => namespaces,
                "policy" => policies,
                _ => continue,
            };
            ensure!(row.get("in_force") == Some(&json!(expected)), "{name} has {row}, the API has {expected}");
        }
        let rows = cluster.wharf(node, &["cluster", "pods"])?;
        let addresses = |row: &Value| sorted(elements(row, "/addresses").iter().filter_map(Value::as_str));
        let found: BTreeMap<_, _> =
            elements(&rows, "/pods").iter().map(|row| (identity(row, ""), (addresses(row), labels(row, "")))).collect();
        for (pod, row) in &expected {
            ensure!(found.get(pod) == Some(row), "{name} has {:?} as {pod}, the API {row:?}", found.get(pod));
        }
        let more: Vec<_> = found.keys().filter(|pod| !expected.contains_key(*pod)).collect();
        ensure!(more.is_empty(), "{name} has the pods {more:?}, which the API does not have");
    }
    Ok(())
}

/// Namespace and name of a row, or of an object with `below` `/metadata`.
fn identity(of: &Value, below: &str) -> String {
    format!("{}/{}", text(of, &format!("{below}/namespace")), text(of, &format!("{below}/name")))
}

fn labels(of: &Value, below: &str) -> Value {
    of.pointer(&format!("{below}/labels")).cloned().unwrap_or_else(|| json!({}))
}

/// Addresses and labels of live pods without the host's network.
fn pods_of_the_api(cluster: &Cluster<'_>) -> Result<BTreeMap<String, (Vec<String>, Value)>> {
    let list = cluster.api.list(&["pods", "--all-namespaces", "--field-selector=spec.hostNetwork=false"])?;
    let runs = |pod: &&Value| !["Succeeded", "Failed"].contains(&text(pod, "/status/phase"));
    let row = |pod: &Value| {
        let addresses = sorted(elements(pod, "/status/podIPs").iter().map(|entry| text(entry, "/ip")));
        (identity(pod, "/metadata"), (addresses, labels(pod, "/metadata")))
    };
    Ok(list.iter().filter(runs).map(row).collect())
}

fn sorted<'a>(addresses: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut list: Vec<_> = addresses.map(str::to_owned).collect();
    list.sort();
    list
}
