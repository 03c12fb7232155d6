//! Objects, and the rows that they define, computed without the code under test.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use wharf_feed::v1::{self, row::Row};
use wharf_kube::source::Source;

/// The node whose program is under test.
pub const NODE: &str = "a";

/// Collection and key of an object.
pub type Id = (Source, String);

pub fn pod(name: &str, uid: &str, address: Option<&str>, label: &str) -> (Source, Value) {
    let status = match address {
        Some(address) => json!({"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}),
        None => json!({"phase": "Pending"}),
    };
    let pod = json!({
        "metadata": {"name": name, "namespace": "shop", "uid": uid, "labels": {"app": label}},
        "spec": {"nodeName": "b", "containers": [{"name": "c", "image": "i"}]},
        "status": status,
    });
    (Source::Pod, pod)
}

pub fn node(name: &str, address: &str, cidr: &str) -> (Source, Value) {
    let node = json!({
        "metadata": {"name": name, "uid": format!("uid-of-{name}")},
        "spec": {"podCIDRs": [cidr]},
        "status": {"addresses": [{"type": "InternalIP", "address": address}]},
    });
    (Source::Node, node)
}

pub fn namespace(name: &str, label: &str) -> (Source, Value) {
    (Source::Namespace, json!({"metadata": {"name": name, "uid": format!("uid-of-{name}"), "labels": {"l": label}}}))
}

pub fn policy(source: Source, name: &str, uid: &str, port: u64) -> (Source, Value) {
    let mut object = json!({"metadata": {"name": name, "uid": uid}, "spec": {"port": port}, "status": {"x": port}});
    if source != Source::ClusterNetworkPolicy {
        object["metadata"]["namespace"] = json!("shop");
    }
    (source, object)
}

pub fn key(object: &Value) -> String {
    let text = |field| object["metadata"][field].as_str();
    match (text("namespace"), text("name")) {
        (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
        (None, Some(name)) => name.to_owned(),
        _ => panic!("no name: {object}"),
    }
}

/// Whether the field selector of pods selects it.
pub fn is_live(source: Source, object: &Value) -> bool {
    source != Source::Pod
        || (object["spec"]["hostNetwork"] != json!(true)
            && !matches!(object["status"]["phase"].as_str(), Some("Succeeded" | "Failed")))
}

/// Kind, key and row.
pub type Rows = BTreeSet<(String, String, String)>;

/// The rows that the objects define for [`NODE`]; each row as text.
pub fn expected(objects: &BTreeMap<Id, Value>) -> Rows {
    let rows = rows(objects, NODE).into_iter();
    rows.map(|(kind, key, row)| (kind.to_owned(), key, format!("{row:?}"))).collect()
}

/// Kind, key and row of the objects, for the program of this node.
pub fn rows(objects: &BTreeMap<Id, Value>, own: &str) -> Vec<(&'static str, String, Row)> {
    objects.iter().filter_map(|((source, key), object)| row(*source, key, object, own)).collect()
}

fn row(source: Source, key: &str, object: &Value, own: &str) -> Option<(&'static str, String, Row)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let metadata = &object["metadata"];
    let labels = metadata["labels"].as_object().into_iter().flatten().map(|(k, v)| (k.clone(), text(v))).collect();
    let (kind, key, row) = match source {
        Source::Node => {
            let row = v1::Node {
                name: text(&metadata["name"]),
                uid: text(&metadata["uid"]),
                addresses: texts(&object["status"]["addresses"], "/address"),
                pod_cidrs: texts(&object["spec"]["podCIDRs"], ""),
                health_addresses: listed(&metadata["annotations"]["wharf.dev/health-addresses"]),
                router_addresses: listed(&metadata["annotations"]["wharf.dev/router-addresses"]),
            };
            ("node", key.to_owned(), Row::Node(row))
        }
        Source::Namespace => {
            ("namespace", key.to_owned(), Row::Namespace(v1::Namespace { name: key.to_owned(), labels }))
        }
        Source::Pod => {
            let (node, addresses) = (text(&object["spec"]["nodeName"]), texts(&object["status"]["podIPs"], "/ip"));
            if !is_live(source, object) || (addresses.is_empty() && node != own) {
                return None;
            }
            let row = v1::Pod {
                uid: text(&metadata["uid"]),
                namespace: text(&metadata["namespace"]),
                name: text(&metadata["name"]),
                node,
                addresses,
                labels,
                named_ports: Vec::new(),
            };
            ("pod", row.uid.clone(), Row::Pod(row))
        }
        policy => {
            let namespace =
                metadata["namespace"].as_str().map(|n| format!(r#","namespace":"{n}""#)).unwrap_or_default();
            let text = format!(
                r#"{{"apiVersion":"{}","kind":"{policy}","metadata":{{"name":{}{namespace}}},"spec":{}}}"#,
                policy.built_in().api_version,
                metadata["name"],
                object["spec"]
            );
            let key = format!("{policy} {key}");
            ("policy", key.clone(), Row::Policy(v1::Policy { key, text }))
        }
    };
    Some((kind, key, row))
}

/// Texts at a JSON pointer of each element.
fn texts(list: &Value, pointer: &str) -> Vec<String> {
    let elements = list.as_array().into_iter().flatten();
    elements.filter_map(|element| element.pointer(pointer)?.as_str().map(str::to_owned)).collect()
}

fn listed(annotation: &Value) -> Vec<String> {
    annotation.as_str().into_iter().flat_map(|text| text.split(',')).map(str::to_owned).collect()
}
