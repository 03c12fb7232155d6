//! Pods and nodes come and go.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    super::{
        api::{elements, text},
        cluster::{Cluster, WHARF},
        place::until,
    },
    basic::{self, LIMIT, NAMESPACE},
    connectivity, removal, rows, samples,
};
use crate::progress::spell;

/// Kills every pod of a StatefulSet three times; replacements have the same names.
pub(super) fn stateful_set(cluster: &Cluster<'_>) -> Result<String> {
    let replicas = 2 * cluster.nodes.len();
    let labels = json!({"app": "db"});
    cluster.api.apply(&[json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"namespace": NAMESPACE, "name": "db"},
        "spec": {
            "replicas": replicas, "serviceName": "db", "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": samples::pod_spec()},
        },
    })])?;
    cluster.api.rolled_out(NAMESPACE, "statefulset/db", LIMIT)?;
    for _ in 0..3 {
        let before: BTreeSet<_> = uids(cluster)?.into_iter().collect();
        cluster.api.run(&["delete", "pods", "--selector=app=db", "--force", "--grace-period=0"])?;
        until("new pods of the StatefulSet", LIMIT, || {
            let now = uids(cluster)?;
            Ok((now.len() == replicas && now.iter().all(|uid| !before.contains(uid))).then_some(()))
        })?;
        cluster.api.run(&["wait", "--for=condition=Ready", "pods", "--selector=app=db", "--timeout=60s"])?;
        let pods = cluster.api.pods(NAMESPACE, "app=db")?;
        let addresses: BTreeSet<_> = pods.iter().flat_map(|pod| &pod.addresses).collect();
        ensure!(addresses.len() == 2 * replicas, "{} addresses of {replicas} pods", addresses.len());
        let urls = connectivity::urls(&pods);
        for pod in &pods {
            let silent = connectivity::probe(cluster, pod, &urls)?.into_iter().find(|(_, answers)| !answers);
            ensure!(silent.is_none(), "{} on {} does not reach {silent:?}", pod.name, pod.node);
        }
    }
    cluster.api.delete(&["statefulset", "db", "--namespace", NAMESPACE])?;
    cluster.api.no_pods(NAMESPACE, "app=db", LIMIT)?;
    Ok(format!("{replicas} pods, killed 3 times"))
}

fn uids(cluster: &Cluster<'_>) -> Result<Vec<String>> {
    let pods = cluster.api.list(&["pods", "--namespace", NAMESPACE, "--selector=app=db"])?;
    Ok(pods.iter().map(|pod| text(pod, "/metadata/uid").to_owned()).collect())
}

/// Cordons, drains and uncordons the last node.
pub(super) fn drain(cluster: &Cluster<'_>) -> Result<String> {
    let Some(node) = cluster.nodes.last().filter(|_| cluster.nodes.len() > 1) else {
        return Ok("nothing to do with one node".to_owned());
    };
    // Spreads the pods over schedulable nodes only.
    cluster.api.run(&["cordon", node.name()])?;
    cluster.api.run(&["drain", node.name(), "--ignore-daemonsets", "--force", "--timeout=120s"])?;
    until(&format!("nothing of a pod stays on {}", node.name()), LIMIT, || removal::empty(cluster, node).map(Some))?;
    let object = cluster.api.get(&["node", node.name()])?;
    let taints: Vec<_> = elements(&object, "/spec/taints").iter().map(|taint| text(taint, "/key")).collect();
    ensure!(taints == ["node.kubernetes.io/unschedulable"], "a drained node has the taints {taints:?}");
    cluster.api.run(&["uncordon", node.name()])?;
    cluster.node_is_ready(node.name())?;
    cluster.api.rolled_out(NAMESPACE, "deployment/web", LIMIT)?;
    Ok(format!("{} is empty after it", node.name()))
}

/// Deletes the last node's object; its kubelet registers again with other pod CIDRs.
pub(super) fn node_again(cluster: &Cluster<'_>) -> Result<String> {
    let Some(node) = cluster.nodes.last() else { return Ok("no nodes".to_owned()) };
    let before = cluster.pod_cidrs(node.name())?;
    node.place.stop("kubelet")?;
    cluster.api.delete(&["node", node.name()])?;
    // Takes the old CIDRs.
    let rest: Vec<_> = cluster.nodes.iter().filter(|other| other.name() != node.name()).collect();
    for other in &rest {
        until(&format!("{} has no route to {}", other.name(), node.name()), LIMIT, || {
            let nodes = cluster.wharf(other, &["cluster", "nodes"])?.to_string();
            Ok((!nodes.contains(&format!("\"{}\"", node.name()))).then_some(()))
        })?;
    }
    cluster.api.apply(&[json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": "placeholder"},
        "spec": {"podCIDRs": before, "podCIDR": before.first()},
    })])?;
    node.join()?;
    let after = until(&format!("pod CIDRs of {}", node.name()), LIMIT, || {
        let cidrs = cluster.pod_cidrs(node.name())?;
        Ok((!cidrs.is_empty()).then_some(cidrs))
    })?;
    ensure!(after != before, "the node got the same pod CIDRs again");
    cluster.api.delete(&["node", "placeholder"])?;
    cluster.api.rolled_out(WHARF, "daemonset/wharf", LIMIT)?;
    until(&format!("{} is ready", node.name()), LIMIT, || cluster.node_is_ready(node.name()).map(Some))?;
    // The new object had no annotations.
    until(&format!("the addresses of {}", node.name()), LIMIT, || rows::annotations_agree(cluster, node).map(Some))?;
    // Their addresses are from the former CIDRs.
    cluster.api.run(&["delete", "pods", "--selector", basic::SELECTOR, "--force", "--grace-period=0"])?;
    until("pods with new addresses", LIMIT, || basic::check_addresses(cluster).map(Some))?;
    until("the rows of the API", LIMIT, || rows::agree(cluster).map(Some))?;
    let note = connectivity::pods(cluster)?;
    Ok(format!("{} is now {}; {note}", before.join(", "), after.join(", ")))
}

/// Restarts the DaemonSet's pods while all pods connect to each other.
pub(super) fn rolling_restart(cluster: &Cluster<'_>) -> Result<String> {
    let started = std::time::Instant::now();
    cluster.api.run(&["rollout", "restart", "--namespace", WHARF, "daemonset/wharf"])?;
    let pods = basic::pods(cluster)?;
    let mut rounds = 0;
    let done = || -> Result<bool> {
        let status = cluster.api.get(&["daemonset", "wharf", "--namespace", WHARF])?;
        let number = |pointer: &str| status.pointer(pointer).and_then(serde_json::Value::as_u64).unwrap_or_default();
        let all = number("/status/desiredNumberScheduled");
        Ok(number("/status/observedGeneration") == number("/metadata/generation")
            && number("/status/updatedNumberScheduled") == all
            && number("/status/numberAvailable") == all)
    };
    while !done()? {
        ensure!(started.elapsed() < Duration::from_secs(180), "the rollout takes more than three minutes");
        connectivity::all_reach(cluster, &pods)?;
        rounds += 1;
    }
    cluster.ready()?;
    Ok(format!("{} rounds of connections in {}, none failed", rounds, spell(started.elapsed())))
}
