//! Manifest, pod addresses and kubelet.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use super::{
    super::{
        api::{Pod, text},
        cluster::Cluster,
        images::PAGE,
        place::{said, until},
    },
    samples,
};
use crate::progress::spell;

pub(super) const NAMESPACE: &str = "default";
/// Deployment of most checks.
pub(super) const WEB: &str = "web";
pub(super) const SELECTOR: &str = "app=web";
const PODS_PER_NODE: usize = 3;

pub(super) const LIMIT: Duration = Duration::from_secs(120);

pub(super) fn install(cluster: &Cluster<'_>) -> Result<String> {
    let took = cluster.install()?;
    for node in &cluster.nodes {
        let status = cluster.wharf(node, &["status"])?;
        let overall = text(&status, "/overall");
        ensure!(overall == "ok", "wharf status on {}: {overall}", node.name());
    }
    Ok(format!("ready {} after kubectl apply", spell(took)))
}

/// The API server's answer, not the manifest's text.
pub(super) fn rights(cluster: &Cluster<'_>) -> Result<String> {
    const USER: &str = "--as=system:serviceaccount:wharf:wharf-kube";
    const ALLOWED: [&str; 8] = [
        "watch nodes",
        "patch nodes",
        "patch nodes --subresource=status",
        "watch namespaces",
        "watch pods",
        "watch networkpolicies.networking.k8s.io",
        "create events.events.k8s.io",
        "get customresourcedefinitions.apiextensions.k8s.io/ciliumnetworkpolicies.cilium.io",
    ];
    const REFUSED: [&str; 12] = [
        "get secrets",
        "list secrets",
        "get configmaps",
        "patch pods",
        "delete pods",
        "create pods --subresource=exec",
        "create pods",
        "delete nodes",
        "create nodes",
        "get nodes --subresource=proxy",
        "patch networkpolicies.networking.k8s.io",
        "create serviceaccounts --subresource=token",
    ];
    for (all, expected) in [(&ALLOWED[..], true), (&REFUSED[..], false)] {
        for right in all {
            let mut words = vec!["auth", "can-i", "--all-namespaces", USER];
            words.extend(right.split(' '));
            let is_allowed = cluster.api.run(&words).is_ok();
            ensure!(is_allowed == expected, "{right}: allowed is {is_allowed}");
        }
    }
    Ok(format!("{} of its requests allowed, {} others refused", ALLOWED.len(), REFUSED.len()))
}

pub(super) fn replicas(cluster: &Cluster<'_>) -> usize {
    PODS_PER_NODE * cluster.nodes.len()
}

pub(super) fn addresses(cluster: &Cluster<'_>) -> Result<String> {
    cluster.api.apply(&[samples::deployment(NAMESPACE, WEB, replicas(cluster))])?;
    cluster.api.rolled_out(NAMESPACE, "deployment/web", LIMIT)?;
    check_addresses(cluster)
}

/// Pods of the Deployment have two unique addresses in their node's pod CIDRs.
pub(super) fn check_addresses(cluster: &Cluster<'_>) -> Result<String> {
    let replicas = replicas(cluster);
    let pods = pods(cluster)?;
    ensure!(pods.len() == replicas, "{} of {replicas} pods run", pods.len());
    let mut seen = BTreeSet::new();
    for node in &cluster.nodes {
        let cidrs = cluster.pod_cidrs(node.name())?;
        for pod in pods.iter().filter(|pod| pod.node == node.name()) {
            for address in &pod.addresses {
                ensure!(cidrs.iter().any(|cidr| contains(cidr, address)), "{address} is not in {cidrs:?}");
                ensure!(seen.insert(address.clone()), "two pods have {address}");
            }
        }
    }
    ensure!(seen.len() == 2 * replicas, "{} addresses of {replicas} pods", seen.len());
    Ok(format!("{replicas} pods, {} addresses", seen.len()))
}

pub(super) fn pods(cluster: &Cluster<'_>) -> Result<Vec<Pod>> {
    cluster.api.pods(NAMESPACE, SELECTOR)
}

/// Pod CIDRs of kube-controller-manager: /24, and /64 with whole groups in the text.
fn contains(cidr: &str, address: &str) -> bool {
    let base = cidr.split('/').next().unwrap_or_default();
    if cidr.contains(':') {
        let groups = |text: &str| text.parse::<std::net::Ipv6Addr>().map(|parsed| parsed.segments());
        match (groups(base), groups(address)) {
            (Ok(base), Ok(address)) => base.iter().zip(address).take(4).all(|(a, b)| *a == b),
            _ => false,
        }
    } else {
        base.strip_suffix('0').is_some_and(|base| address.starts_with(base))
    }
}

pub(super) fn kubelet(cluster: &Cluster<'_>) -> Result<String> {
    let pods = pods(cluster)?;
    for pod in &pods {
        let said = cluster.api.script(pod, "echo $0-$1", &["here"])?;
        ensure!(said.trim() == "script-here", "exec in {} said {}", pod.name, said.trim());
        let log = cluster.api.run(&["logs", &format!("--namespace={}", pod.namespace), &pod.name])?;
        ensure!(log.contains("started"), "the log of {} is {log:?}", pod.name);
        forward(cluster, pod).with_context(|| format!("port-forward to {}", pod.name))?;
    }
    Ok(format!("{} pods", pods.len()))
}

/// Starts a command, prints the page at the URL, ends the command.
const FORWARD: &str = r#"url=$1; shift
"$@" >/dev/null & program=$!
curl --silent --fail --retry 50 --retry-delay 0 --retry-all-errors --retry-max-time 10 "$url"
status=$?
kill "$program"
exit "$status""#;

fn forward(cluster: &Cluster<'_>, pod: &Pod) -> Result<()> {
    let namespace = format!("--namespace={}", pod.namespace);
    let kubectl = cluster.api.words(&["port-forward", &namespace, &format!("pod/{}", pod.name), "8080:80"]);
    let mut command = cluster.api.place.command("sh");
    command.args(["-c", FORWARD, "forward", "http://127.0.0.1:8080/"]).args(kubectl);
    let got = said(&mut command)?;
    ensure!(got.trim() == PAGE, "another page: {:?}", got.trim());
    Ok(())
}

/// Probes of each kind; a failed probe restarts its pod.
pub(super) fn probes(cluster: &Cluster<'_>) -> Result<String> {
    let kinds = [
        ("http", json!({"httpGet": {"port": 80, "path": "/"}})),
        ("tcp", json!({"tcpSocket": {"port": 80}})),
        ("exec", json!({"exec": {"command": ["true"]}})),
        ("fails", json!({"tcpSocket": {"port": 81}})),
    ];
    let mut objects = Vec::new();
    for node in &cluster.nodes {
        for (kind, probe) in &kinds {
            let mut pod = samples::pod(NAMESPACE, &format!("probe-{kind}-{}", node.name()), node.name());
            let mut probe = probe.clone();
            probe["periodSeconds"] = json!(1);
            probe["failureThreshold"] = json!(2);
            if let Some(container) = pod.pointer_mut("/spec/containers/0") {
                container["livenessProbe"] = probe;
            }
            pod["metadata"]["labels"] = json!({"probe": kind});
            objects.push(pod);
        }
    }
    cluster.api.apply(&objects)?;
    let restarts = |selector: &str| -> Result<Vec<u64>> {
        let list = cluster.api.list(&["pods", "--selector", selector])?;
        let count = |pod: &serde_json::Value| pod.pointer("/status/containerStatuses/0/restartCount")?.as_u64();
        Ok(list.iter().map(|pod| count(pod).unwrap_or_default()).collect())
    };
    until("restarts after failed probes", LIMIT, || {
        Ok(restarts("probe=fails")?.iter().all(|count| *count > 0).then_some(()))
    })?;
    let good = restarts("probe,probe!=fails")?;
    cluster.api.delete(&["pods", "--selector=probe", "--now"])?;
    if good.iter().any(|count| *count > 0) {
        bail!("pods whose probes succeed were restarted: {good:?}");
    }
    Ok(format!("{} pods", objects.len()))
}

pub(super) fn page(place: &super::super::place::Place, url: &str) -> Result<()> {
    let got = said(place.command("curl").args(["--silent", "--show-error", "--fail", "--max-time", "2", url]))?;
    ensure!(got.trim() == PAGE, "{url} has {:?}", got.trim());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_compared_with_pod_cidrs() {
        assert!(contains("10.244.1.0/24", "10.244.1.7") && !contains("10.244.1.0/24", "10.244.10.7"));
        assert!(contains("fd44:0:0:1::/64", "fd44:0:0:1::7") && !contains("fd44::/64", "fd44:0:0:1::7"));
    }
}
