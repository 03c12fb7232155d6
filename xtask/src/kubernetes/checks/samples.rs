//! Objects that the checks create.

use serde_json::{Value, json};

use super::super::images::TEST;

/// Label of all pods of the checks.
pub(crate) const APP: &str = "app";

pub(crate) fn namespace(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": {"team": name}}})
}

/// A container that serves HTTP on port 80, with a readiness probe of the kubelet.
pub(crate) fn server() -> Value {
    json!({
        "name": "server", "image": TEST, "imagePullPolicy": "Never",
        // As the first process, httpd would ignore SIGTERM.
        "command": ["sh", "-c", "trap 'exit 0' TERM; echo started; httpd -f -p '[::]:80' -h /www & wait"],
        "ports": [{"containerPort": 80, "name": "http"}],
        "readinessProbe": {"httpGet": {"port": 80, "path": "/"}, "periodSeconds": 1},
    })
}

/// Spec of a pod with one server.
pub(crate) fn pod_spec() -> Value {
    json!({"terminationGracePeriodSeconds": 5, "containers": [server()]})
}

/// A Deployment whose pods are spread evenly over the nodes.
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

/// A pod on this node.
pub(crate) fn pod(namespace: &str, name: &str, node: &str) -> Value {
    let mut spec = pod_spec();
    spec["nodeName"] = json!(node);
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": {"pod": name}}, "spec": spec,
    })
}

/// A NetworkPolicy with this spec.
pub(crate) fn policy(namespace: &str, name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"namespace": namespace, "name": name}, "spec": spec,
    })
}
