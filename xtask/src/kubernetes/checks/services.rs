//! Services and host ports.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{
    super::{
        api::{elements, in_url},
        cluster::Cluster,
        place::until,
    },
    basic::{self, NAMESPACE},
    connectivity, samples,
};

const HOST_PORT: u16 = 8088;

/// Creates a service of the Deployment; returns object and URLs.
fn make(cluster: &Cluster<'_>) -> Result<(Value, Vec<String>)> {
    cluster.api.apply(&[json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": NAMESPACE, "name": "web"},
        "spec": {
            "type": "NodePort", "selector": {"app": "web"}, "ipFamilyPolicy": "RequireDualStack",
            "ports": [{"port": 80, "targetPort": "http"}],
        },
    })])?;
    let service = cluster.api.get(&["service", "web"])?;
    let addresses: Vec<_> = elements(&service, "/spec/clusterIPs").iter().filter_map(Value::as_str).collect();
    ensure!(addresses.len() == 2, "the service has {addresses:?}");
    let urls = addresses.iter().map(|address| format!("http://{}/", in_url(address))).collect();
    Ok((service, urls))
}

/// An egress rule for pods includes their service, which has backends on all nodes.
pub(super) fn egress(cluster: &Cluster<'_>) -> Result<String> {
    const CONNECTIONS: usize = 20;
    let (_, urls) = make(cluster)?;
    let rules = json!([{"to": [{"podSelector": {"matchLabels": {"app": "web"}}}]}]);
    let spec = json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": rules});
    let run = || -> Result<String> {
        let pods = basic::pods(cluster)?;
        until("the service has backends", Duration::from_secs(20), || {
            connectivity::all_answer(cluster, &pods, &urls).map(Some)
        })?;
        cluster.api.apply(&[samples::policy(NAMESPACE, "egress", &spec)])?;
        for round in 0..CONNECTIONS {
            connectivity::all_answer(cluster, &pods, &urls).with_context(|| format!("round {round}"))?;
        }
        Ok(format!("{} connections", CONNECTIONS * pods.len() * urls.len()))
    };
    let result = run();
    cluster.api.delete(&["networkpolicy", "egress"])?;
    cluster.api.delete(&["service", "web"])?;
    result
}

/// Cluster addresses and a node port, from pods and nodes.
pub(super) fn cluster_addresses(cluster: &Cluster<'_>) -> Result<String> {
    let (service, mut urls) = make(cluster)?;
    let port = service.pointer("/spec/ports/0/nodePort").and_then(Value::as_u64).unwrap_or_default();
    for node in &cluster.nodes {
        urls.extend([node.host.ipv4(), node.host.ipv6()].map(|address| format!("http://{}:{port}/", in_url(&address))));
    }
    // Waits for kube-proxy.
    for pod in basic::pods(cluster)? {
        until(&format!("{} on {} reaches the service", pod.name, pod.node), Duration::from_secs(20), || {
            let silent = connectivity::probe(cluster, &pod, &urls)?.into_iter().filter(|(_, answers)| !answers);
            let silent: Vec<_> = silent.map(|(url, _)| url).collect();
            ensure!(silent.is_empty(), "no answer from {}", silent.join(", "));
            Ok(Some(()))
        })?;
    }
    for node in &cluster.nodes {
        for url in &urls {
            until(&format!("{} reaches {url}", node.name()), Duration::from_secs(20), || {
                basic::page(&node.place, url).map(Some)
            })?;
        }
    }
    cluster.api.delete(&["service", "web"])?;
    Ok(format!("{} addresses", urls.len()))
}

/// Host ports, from nodes and pods.
pub(super) fn host_ports(cluster: &Cluster<'_>) -> Result<String> {
    for node in &cluster.nodes {
        let mut pod = samples::pod(NAMESPACE, &format!("port-{}", node.name()), node.name());
        pod["metadata"]["labels"] = json!({"check": "host-port"});
        if let Some(port) = pod.pointer_mut("/spec/containers/0/ports/0") {
            port["hostPort"] = json!(HOST_PORT);
        }
        cluster.api.apply(&[pod])?;
    }
    cluster.api.run(&["wait", "--for=condition=Ready", "pods", "--selector=check=host-port", "--timeout=60s"])?;
    let hosts = cluster.nodes.iter().flat_map(|node| [node.host.ipv4(), node.host.ipv6()]);
    let urls: Vec<_> = hosts.map(|address| format!("http://{}:{HOST_PORT}/", in_url(&address))).collect();
    let mut count = 0;
    for node in &cluster.nodes {
        let own = format!("http://127.0.0.1:{HOST_PORT}/");
        for url in urls.iter().chain([&own]) {
            basic::page(&node.place, url)?;
            count += 1;
        }
    }
    for pod in basic::pods(cluster)? {
        for (url, answers) in connectivity::probe(cluster, &pod, &urls)? {
            ensure!(answers, "{} on {} does not reach {url}", pod.name, pod.node);
            count += 1;
        }
    }
    cluster.api.delete(&["pods", "--selector=check=host-port", "--now"])?;
    for node in &cluster.nodes {
        let ports = cluster.wharf(node, &["port", "list"])?;
        ensure!(ports.as_array().is_none_or(Vec::is_empty), "ports stay on {}: {ports}", node.name());
    }
    Ok(format!("{count} connections, also to 127.0.0.1"))
}
