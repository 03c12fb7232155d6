//! Failure and restoration of the control plane.

use anyhow::Result;
use serde_json::json;

use super::{
    super::{cluster::Cluster, node::Node, place::until},
    basic::{self, LIMIT},
    connectivity, policy, rows, samples,
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
    until("the rows of the API", LIMIT, || rows::agree(cluster).map(Some))?;
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
    until("the later rows", LIMIT, || rows::agree(cluster).map(Some))?;
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
    until("the earlier rows", LIMIT, || rows::agree(cluster).map(Some))?;
    until("all pods reach all pods", LIMIT, || connectivity::all_reach(cluster, &basic::pods(cluster)?).map(Some))?;
    Ok("rows of all nodes follow the restored state".to_owned())
}
