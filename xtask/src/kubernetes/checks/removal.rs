//! Remains of pods and of Wharf.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use super::{
    super::{
        api::{elements, text},
        cluster::{Cluster, WHARF},
        node::{Node, TAINT},
        place::until,
    },
    basic::NAMESPACE,
};

const LIMIT: Duration = Duration::from_secs(90);

/// Deletes all pods; audits are then empty.
pub(super) fn pods(cluster: &Cluster<'_>) -> Result<String> {
    cluster.api.delete(&["deployments,statefulsets,daemonsets,pods", "--namespace", NAMESPACE, "--all", "--now"])?;
    for node in &cluster.nodes {
        until(&format!("nothing of a pod stays on {}", node.name()), LIMIT, || empty(cluster, node).map(Some))?;
    }
    Ok(format!("audits of {} nodes are empty", cluster.nodes.len()))
}

/// Fails for an endpoint, address, port or finding of a pod.
pub(super) fn empty(cluster: &Cluster<'_>, node: &Node) -> Result<()> {
    let all = |value: Value| value.as_array().cloned().unwrap_or_default();
    let mut endpoints = all(cluster.wharf(node, &["endpoint", "list"])?);
    endpoints.retain(|endpoint| text(endpoint, "/network") != "wharf-health");
    ensure!(endpoints.is_empty(), "endpoints: {}", Value::from(endpoints));
    let addresses = cluster.wharf(node, &["ipam", "list"])?;
    let is_of_pod = |lease: &&Value| !["node", "wharf-health"].contains(&text(lease, "/owner"));
    let leases: Vec<_> = elements(&addresses, "/leases").iter().filter(is_of_pod).collect();
    ensure!(leases.is_empty(), "addresses: {leases:?}");
    let ports = all(cluster.wharf(node, &["port", "list"])?);
    ensure!(ports.is_empty(), "ports: {}", Value::from(ports));
    let audit = cluster.wharf(node, &["audit"])?;
    let findings = elements(&audit, "/findings");
    ensure!(audit.pointer("/findings").is_some() && findings.is_empty(), "audit: {audit}");
    let links = node.place.output("sh", &["-c", "ls /run/netns; true"])?;
    ensure!(links.trim().is_empty(), "namespaces: {}", links.trim());
    Ok(())
}

/// "Uninstall" in docs/kubernetes.md.
pub(super) fn wharf(cluster: &Cluster<'_>) -> Result<String> {
    cluster.api.run(&["delete", "--filename", &cluster.manifest()?, "--timeout=120s"])?;
    cluster.api.no_pods(WHARF, "app.kubernetes.io/name=wharf", LIMIT)?;
    let agent = cluster.parts.workspace.release().join("wharf-agent");
    for node in &cluster.nodes {
        node.place.output("rm", &["-f", "/etc/cni/net.d/10-wharf.conflist", "/opt/cni/bin/wharf-cni"])?;
        node.place.output(&agent, &["cleanup"])?;
        node.place.output("rm", &["-rf", "/run/wharf", "/var/lib/wharf", "/var/lib/wharf-kube"])?;
        let name = node.name();
        let taint = format!("{TAINT}:NoSchedule-");
        // Fails without a taint.
        drop(cluster.api.run(&["taint", "nodes", name, &taint]));
        let annotations = ["wharf.dev/health-addresses-", "wharf.dev/router-addresses-"];
        cluster.api.run(&[&["annotate", "nodes", name], &annotations[..]].concat())?;
        let patch = r#"{"status":{"conditions":[{"type":"NetworkUnavailable","$patch":"delete"}]}}"#;
        cluster.api.run(&["patch", "node", name, "--subresource=status", "--type=strategic", "--patch", patch])?;
    }
    for node in &cluster.nodes {
        traces(cluster, node)?;
    }
    Ok("links, routes, rules, BPF programs, files, fields of nodes".to_owned())
}

fn traces(cluster: &Cluster<'_>, node: &Node) -> Result<()> {
    let looks = [
        ("links", "ip -o link | grep -i wharf"),
        ("routes", "ip route show table all proto 88; ip -6 route show table all proto 88"),
        ("rules", "ip rule | grep -v -E 'lookup (local|main|default)'; ip -6 rule | grep -v -E 'lookup (local|main)'"),
        ("nftables", "nft list tables | grep -i wharf"),
        ("pinned BPF objects", "find /sys/fs/bpf -mindepth 1 -not -name '*.debug'"),
        ("files", "find /etc/cni /etc/wharf /opt/cni /run /var/lib -xdev -iname '*wharf*' 2>/dev/null"),
        ("settings", "cat /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv6/conf/all/forwarding | grep -v '^0'"),
    ];
    for (what, script) in looks {
        let found = node.place.output("sh", &["-c", &format!("{script}; true")])?;
        if !found.trim().is_empty() {
            bail!("{what} stay on {}: {}", node.name(), found.trim());
        }
    }
    let object = cluster.api.get(&["node", node.name()])?;
    // The status keeps the kubelet's image list and message about the plugin.
    for field in ["/metadata/annotations", "/metadata/labels", "/spec/taints"] {
        let value = object.pointer(field).map(Value::to_string).unwrap_or_default();
        ensure!(!value.contains("wharf"), "{field} of {} stays: {value}", node.name());
    }
    let conditions = elements(&object, "/status/conditions");
    let stays = conditions.iter().any(|condition| text(condition, "/type") == "NetworkUnavailable");
    ensure!(!stays, "the condition NetworkUnavailable of {} stays", node.name());
    Ok(())
}
