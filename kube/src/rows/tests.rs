use serde_json::json;

use super::*;

fn read(source: Source, object: &serde_json::Value) -> Defined {
    let api_version = source.built_in().api_version;
    let raw = serde_json::value::to_raw_value(object).expect("JSON");
    Reader { source, own: "a".into() }.read(&api_version, &raw).expect("decoded")
}

fn row(source: Source, object: &serde_json::Value) -> Option<Row> {
    let row = read(source, object).row?;
    v1::Row::decode(&*row).expect("a row").row
}

fn pod(object: &serde_json::Value) -> Option<v1::Pod> {
    match row(Source::Pod, object) {
        Some(Row::Pod(pod)) => Some(pod),
        None => None,
        other => panic!("{other:?}"),
    }
}

fn node(object: &serde_json::Value) -> Option<v1::Node> {
    match row(Source::Node, object) {
        Some(Row::Node(node)) => Some(node),
        None => None,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_pod_has_its_addresses_labels_and_named_ports() {
    let object = json!({
        "metadata": {"name": "web", "namespace": "shop", "uid": "u1", "labels": {"app": "web"}, "managedFields": [{}]},
        "spec": {
            "nodeName": "b",
            "containers": [{"ports": [
                {"name": "http", "containerPort": 8080},
                {"name": "http", "containerPort": 8081},
                {"name": "http", "containerPort": 8082, "protocol": "UDP"},
                {"containerPort": 1},
            ]}, {"ports": null}],
            "initContainers": [
                {"restartPolicy": "Always", "ports": [{"name": "proxy", "containerPort": 15001, "protocol": "TCP"}]},
                {"ports": [{"name": "init", "containerPort": 2}]},
            ],
        },
        "status": {"phase": "Running", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::0:1"}]},
    });
    let row = pod(&object).expect("a row");
    assert_eq!(
        (row.uid.as_str(), row.namespace.as_str(), row.name.as_str(), row.node.as_str()),
        ("u1", "shop", "web", "b")
    );
    assert_eq!(row.addresses, ["10.0.0.1", "fd00::1"]);
    assert_eq!(row.labels.get("app").map(String::as_str), Some("web"));
    let ports: Vec<_> = row.named_ports.iter().map(|p| (p.name.as_str(), p.protocol, p.port)).collect();
    assert_eq!(ports, [("http", 1, 8080), ("http", 2, 8082), ("proxy", 1, 15001)]);
    assert_eq!(read(Source::Pod, &object).object, "shop/web");
}

#[test]
fn only_live_pods_with_an_own_network_have_rows() {
    let with = |spec: serde_json::Value, status: serde_json::Value| {
        pod(&json!({"metadata": {"name": "web", "namespace": "shop", "uid": "u1"}, "spec": spec, "status": status}))
    };
    assert!(with(json!({}), json!({"phase": "Running", "podIP": "10.0.0.1"})).is_some());
    assert!(with(json!({"hostNetwork": true}), json!({"podIP": "10.0.0.1"})).is_none());
    for phase in ["Succeeded", "Failed"] {
        assert!(with(json!({}), json!({"phase": phase, "podIP": "10.0.0.1"})).is_none());
    }
    assert!(with(json!({"nodeName": "b"}), json!({"phase": "Pending", "podIP": ""})).is_none());
    assert!(with(json!({"nodeName": "a"}), json!({"phase": "Pending"})).is_some(), "a pod of this node");
}

#[test]
fn a_node_has_internal_addresses_or_else_external_ones() {
    let with = |addresses: serde_json::Value| {
        node(&json!({
            "metadata": {"name": "b", "uid": "n1", "annotations": {
                HEALTH: " 10.1.0.9 ,nonsense,,fd00::9", ROUTERS: "10.1.0.1"}},
            "spec": {"podCIDRs": ["10.1.0.0/24", "fd00::/64"], "taints": [{"key": "x", "effect": "NoSchedule"}]},
            "status": {"addresses": addresses},
        }))
    };
    let internal = with(json!([
        {"type": "Hostname", "address": "b"},
        {"type": "ExternalIP", "address": "198.51.100.1"},
        {"type": "InternalIP", "address": "192.0.2.1"},
        {"type": "InternalIP", "address": "192.0.2.1"},
    ]))
    .expect("a row");
    assert_eq!(internal.addresses, ["192.0.2.1"]);
    assert_eq!(internal.pod_cidrs, ["10.1.0.0/24", "fd00::/64"]);
    assert_eq!(internal.health_addresses, ["10.1.0.9", "fd00::9"]);
    assert_eq!(internal.router_addresses, ["10.1.0.1"]);
    let external = with(json!([{"type": "ExternalIP", "address": "198.51.100.1"}])).expect("a row");
    assert_eq!(external.addresses, ["198.51.100.1"]);
    assert!(with(json!([{"type": "Hostname", "address": "b"}])).is_none());
    assert!(with(json!(null)).is_none());
}

#[test]
fn a_policy_has_version_and_kind_and_no_status() {
    let object = json!({
        "metadata": {"name": "web", "namespace": "shop", "uid": "p1", "resourceVersion": "7", "generation": 2,
            "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {"a": "b"}, "managedFields": [{"x": 1}],
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"}},
        "spec": {"podSelector": {}, "ingress": [{"ports": [{"port": 80}]}]},
        "status": {"conditions": []},
    });
    let Some(Row::Policy(policy)) = row(Source::NetworkPolicy, &object) else { panic!("no policy") };
    assert_eq!(policy.key, "NetworkPolicy shop/web");
    let text = r#"{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"web","namespace":"shop"},"spec":{"ingress":[{"ports":[{"port":80}]}],"podSelector":{}}}"#;
    assert_eq!(policy.text, text);
    let Some(Row::Policy(cluster)) =
        row(Source::ClusterNetworkPolicy, &json!({"metadata": {"name": "deny"}, "spec": {}}))
    else {
        panic!("no policy")
    };
    assert_eq!(cluster.key, "ClusterNetworkPolicy deny");
    assert!(cluster.text.contains(r#""metadata":{"name":"deny"}"#), "{}", cluster.text);
}

fn policies(source: Source, object: &serde_json::Value) -> usize {
    let Some(Row::Policy(policy)) = row(source, object) else { panic!("no policy") };
    wharf_policy::read::read(&policy.key, &policy.text).unwrap_or_else(|why| panic!("{}: {why:?}", policy.text)).len()
}

#[test]
fn the_agent_reads_the_documents() {
    let metadata = |namespace: Option<&str>| {
        json!({"name": "web", "namespace": namespace, "uid": "p1", "resourceVersion": "7", "generation": 2,
            "creationTimestamp": "2026-01-01T00:00:00Z", "managedFields": [{"manager": "kubectl"}]})
    };
    let kubernetes = json!({"metadata": metadata(Some("shop")), "status": {}, "spec": {
        "podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"namespaceSelector": {}}], "ports": [{"port": 80, "protocol": "TCP"}]}]}});
    assert_eq!(policies(Source::NetworkPolicy, &kubernetes), 1);
    let cluster = json!({"apiVersion": "other", "kind": "Other", "metadata": metadata(None), "spec": {
        "tier": "Admin", "priority": 7, "subject": {"namespaces": {}},
        "ingress": [{"action": "Deny", "from": [{"namespaces": {}}]}]}});
    assert_eq!(policies(Source::ClusterNetworkPolicy, &cluster), 1);
    let spec = json!({"endpointSelector": {}, "ingress": [{"fromEntities": ["world"]}]});
    let cilium = json!({"metadata": metadata(Some("shop")), "spec": spec});
    assert_eq!(policies(Source::CiliumNetworkPolicy, &cilium), 1);
    let several = json!({"metadata": metadata(None), "specs": [spec, spec]});
    assert_eq!(policies(Source::CiliumClusterwideNetworkPolicy, &several), 2);
}

#[test]
fn a_row_that_no_message_can_carry_is_not_made() {
    let object = json!({"metadata": {"name": "web", "namespace": "shop"}, "spec": {"x": "y".repeat(MAX_SENT)}});
    let raw = serde_json::value::to_raw_value(&object).expect("JSON");
    let reader = Reader { source: Source::NetworkPolicy, own: "a".into() };
    assert!(matches!(reader.read("v1", &raw), Err(Unusable::TooLarge(_))));
}

#[test]
fn a_namespace_has_its_labels() {
    let namespace = row(Source::Namespace, &json!({"metadata": {"name": "shop", "labels": {"team": "a"}}}));
    let labels = [("team".to_owned(), "a".to_owned())].into();
    assert_eq!(namespace, Some(Row::Namespace(v1::Namespace { name: "shop".into(), labels })));
}

#[test]
fn an_object_with_a_wrong_type_does_not_decode() {
    let raw = serde_json::value::to_raw_value(&json!({"metadata": {"name": "b", "labels": 7}})).expect("JSON");
    let reader = Reader { source: Source::Namespace, own: "a".into() };
    assert!(reader.read("v1", &raw).is_err());
}
