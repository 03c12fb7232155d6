//! Objects of the checks.

use serde_json::{Value, json};

use super::super::images::TEST;

pub(crate) const APP: &str = "app";

pub(crate) fn namespace(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": {"team": name}}})
}

/// Serves HTTP on port 80, with a readiness probe.
pub(crate) fn server() -> Value {
    json!({
        "name": "server", "image": TEST, "imagePullPolicy": "Never",
        // Otherwise httpd, as the first process, ignores SIGTERM.
        "command": ["sh", "-c", "trap 'exit 0' TERM; echo started; httpd -f -p '[::]:80' -h /www & wait"],
        "ports": [{"containerPort": 80, "name": "http"}],
        "readinessProbe": {"httpGet": {"port": 80, "path": "/"}, "periodSeconds": 1},
    })
}

pub(crate) fn pod_spec() -> Value {
    json!({"terminationGracePeriodSeconds": 5, "containers": [server()]})
}

/// Spread evenly over the nodes.
pub(crate) fn deployment(namespace: &str, name: &str, replicas: usize) -> Value {
    let labels = json!({APP: name});
    let mut spec = pod_spec();
    spec["topologySpreadConstraints"] = json!([{
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": labels},
    }]);
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "replicas": replicas, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    })
}

pub(crate) fn pod(namespace: &str, name: &str, node: &str) -> Value {
    let mut spec = pod_spec();
    spec["nodeName"] = json!(node);
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": {"pod": name}}, "spec": spec,
    })
}

pub(crate) fn policy(namespace: &str, name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"namespace": namespace, "name": name}, "spec": spec,
    })
}
