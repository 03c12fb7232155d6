//! What all formats share: documents, lists, names, bounds.

use wharf_policy::read::{Refusal, read};

use crate::{accepted, refused};

fn policy(name: &str) -> String {
    format!("{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: {name}}}, spec: {{}}}}")
}

fn names(text: &str) -> Vec<String> {
    accepted(text).iter().map(|policy| policy.name.to_string()).collect()
}

#[test]
fn a_text_is_any_number_of_documents_and_lists() {
    for empty in ["", "---\n", "# nothing\n", "---\n---\n...\n", "null\n---\n~\n"] {
        assert!(accepted(empty).is_empty(), "{empty:?}");
    }
    let (a, b, c) = (policy("a"), policy("b"), policy("c"));
    let text = format!("{a}\n---\napiVersion: v1\nkind: List\nitems:\n- {b}\n---\n# nothing\n---\n{c}\n");
    assert_eq!(names(&text), ["NetworkPolicy default/a", "NetworkPolicy default/b", "NetworkPolicy default/c"]);
    assert!(accepted("{apiVersion: v1, kind: List, metadata: {resourceVersion: ''}, items: []}").is_empty());
}

#[test]
fn json_is_read_as_yaml_is() {
    let text = "{\n\t\"apiVersion\": \"networking.k8s.io/v1\",\n\t\"kind\": \"NetworkPolicy\",\n\t\"metadata\": {\"name\": \"a\", \"namespace\": \"b\"},\n\t\"spec\": {\"podSelector\": {}, \"ingress\": [\n\t\t{}]}\n}\n";
    let policies = accepted(text);
    assert_eq!(policies[0].rules[0].origin.to_string(), "test.yaml:6: NetworkPolicy b/a, spec.ingress[0]");
}

#[test]
fn items_of_a_list_of_one_kind_need_not_repeat_it() {
    for (version, kind) in [
        ("networking.k8s.io/v1", "NetworkPolicy"),
        ("policy.networking.k8s.io/v1alpha2", "ClusterNetworkPolicy"),
        ("policy.networking.k8s.io/v1beta1", "ClusterNetworkPolicy"),
        ("cilium.io/v2", "CiliumNetworkPolicy"),
        ("cilium.io/v2", "CiliumClusterwideNetworkPolicy"),
    ] {
        let spec = match kind {
            "NetworkPolicy" => "{}",
            "ClusterNetworkPolicy" => "{tier: Admin, priority: 1, subject: {namespaces: {}}}",
            _ => "{endpointSelector: {}, ingress: [{}]}",
        };
        let item = format!("{{metadata: {{name: a}}, spec: {spec}}}");
        let whole = format!("{{apiVersion: {version}, kind: {kind}, metadata: {{name: b}}, spec: {spec}}}");
        let text = format!("{{apiVersion: {version}, kind: {kind}List, items: [{item}, {whole}]}}");
        assert_eq!(accepted(&text).len(), 2, "{text}");
    }
    let other =
        "{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicyList, items: [POLICY]}".replace("POLICY", &policy("a"));
    assert!(refused(&other).contains("in a list of CiliumNetworkPolicy"), "{}", refused(&other));
}

#[test]
fn what_is_no_known_policy_is_refused_by_its_name() {
    for (text, expected) in [
        (
            "{apiVersion: v1, kind: Pod, metadata: {name: a}}",
            "kind: \"Pod\" of \"v1\" is not supported; remove it; known are networking.k8s.io/v1 NetworkPolicy, ",
        ),
        (
            "{apiVersion: networking.k8s.io/v2, kind: NetworkPolicy}",
            "apiVersion: \"networking.k8s.io/v2\" is not known for NetworkPolicy; write networking.k8s.io/v1",
        ),
        (
            "{apiVersion: policy.networking.k8s.io/v1alpha1, kind: AdminNetworkPolicy}",
            "write a ClusterNetworkPolicy with tier Admin",
        ),
        (
            "{apiVersion: policy.networking.k8s.io/v1alpha1, kind: BaselineAdminNetworkPolicy}",
            "write a ClusterNetworkPolicy with tier Baseline",
        ),
        ("{apiVersion: v1, kind: NetworkPolicyList, items: []}", "\"NetworkPolicyList\" of \"v1\" is not supported"),
        ("{kind: NetworkPolicy}", "apiVersion: is missing"),
        ("{apiVersion: networking.k8s.io/v1}", "kind: is missing"),
        ("{apiVersion: v1, kind: List}", "items: is missing"),
        ("{apiVersion: v1, kind: List, items: {}}", "items: is a mapping; write a list"),
        ("{apiVersion: v1, kind: List, items: [], next: 1}", "next: is no field here"),
        (
            "{apiVersion: v1, kind: List, items: [{apiVersion: v1, kind: List, items: []}]}",
            "\"List\" of \"v1\" is not supported",
        ),
        ("[]", "test.yaml:1: document 1, document: is a list; write a mapping"),
        ("text", "test.yaml:1: document 1, document: is text; write a mapping"),
    ] {
        let refusals = refused(text);
        assert!(refusals.contains(expected), "{text}: {refusals}");
        assert_eq!(refusals.lines().count(), 1, "{text}: {refusals}");
    }
}

#[test]
fn metadata_has_no_influence_besides_the_name() {
    let text = policy("a").replace(
        "name: a",
        "name: a, labels: {x: y}, annotations: {z: {}}, uid: 1, managedFields: [{a: [b]}], ownerReferences: []",
    );
    let text = text.replace("spec: {}", "spec: {}, status: {conditions: [1]}");
    assert_eq!(accepted(&text), accepted(&policy("a")));
}

#[test]
fn names_keep_the_rules_of_kubernetes() {
    let long = format!("{}.{}", "a".repeat(126), "b".repeat(126));
    for good in ["a", "a-1.b", "1", "'1'", "0-0", long.as_str()] {
        let quoted = format!("'{}'", good.trim_matches('\''));
        assert_eq!(accepted(&policy(&quoted)).len(), 1, "{good}");
    }
    let longer = format!("{long}c");
    for bad in ["''", "A", "a_b", "-a", "a-", "a..b", ".a", "a/b", "'a b'", "ä", longer.as_str(), "\"a\\e[0mb\""] {
        let refusals = refused(&policy(bad));
        assert!(refusals.contains("metadata.name: ") && refusals.contains(" is no name"), "{bad}: {refusals}");
        assert!(!refusals.contains('\u{1b}') && refusals.len() < 400, "{refusals:?}");
    }
    for bad in ["a.b", "A", "''", "a-"] {
        let refusals = refused(&policy(&format!("a, namespace: {bad}")));
        assert!(refusals.contains("is no namespace"), "{bad}: {refusals}");
    }
    for (bad, expected) in [
        ("{name: a, namspace: b}", "metadata.namspace: is no field here"),
        ("{name: 1}", "metadata.name: is a number, not text; put it in quotes"),
        ("{generateName: a-}", "metadata.name: is missing"),
        ("null", "metadata: is missing"),
    ] {
        let refusals = refused(&policy("a").replace("{name: a}", bad));
        assert!(refusals.contains(expected), "{bad}: {refusals}");
    }
    let clusterwide =
        "{apiVersion: cilium.io/v2, kind: CiliumClusterwideNetworkPolicy, metadata: {name: a, namespace: b}}";
    assert!(refused(clusterwide).contains("metadata.namespace: a CiliumClusterwideNetworkPolicy is in no namespace"));
}

#[test]
fn one_policy_twice_is_refused() {
    let text = format!("{}\n---\n{}\n", policy("a"), policy("a, namespace: default"));
    let refusals = refused(&text);
    assert!(
        refusals.starts_with("test.yaml:3: NetworkPolicy default/a, document: is in the text twice, first in line 1"),
        "{refusals}"
    );
    let other =
        policy("a").replace("networking.k8s.io/v1, kind: NetworkPolicy", "cilium.io/v2, kind: CiliumNetworkPolicy");
    let other = other.replace("spec: {}", "spec: {endpointSelector: {}, egress: [{}]}");
    assert_eq!(accepted(&format!("{}\n---\n{}\n---\n{other}", policy("a"), policy("a, namespace: b"))).len(), 3);
}

#[test]
fn every_refusal_is_told_up_to_twenty_and_then_their_number() {
    let bad = |name: usize| format!("{}\n---\n", policy(&format!("p{name}")).replace("spec: {}", "spec: {a: 1, b: 2}"));
    let text: String = (0..10).map(bad).collect();
    assert_eq!(read("f", &text).map_err(|refusals| refusals.len()), Err(20));
    let text: String = (0..12).map(bad).chain([policy("good")]).collect();
    let refusals = read("f", &text).expect_err("bad documents");
    assert_eq!(refusals.len(), 21);
    assert!(matches!(refusals[20], Refusal::More { count: 4, .. }), "{:?}", refusals[20]);
    assert_eq!(refusals[20].to_string(), "f: 4 more refusals; correct those above first");
}

#[test]
fn too_much_is_refused() {
    let large = format!("# {}\n", "x".repeat(4 << 20));
    assert!(refused(&large).contains("bytes, more than 4194304; split the text"));
    let items: Vec<_> = (0..10_001).map(|at| policy(&format!("p{at}"))).collect();
    let list = |items: &[String]| format!("{{apiVersion: v1, kind: List, items: [{}]}}", items.join(",\n"));
    assert_eq!(accepted(&list(&items[1..])).len(), 10_000);
    assert!(refused(&list(&items)).contains("10001 policies, more than 10000; split the text"));
    let rules = |count: usize| {
        policy("a").replace("spec: {}", &format!("spec: {{ingress: [{}]}}", vec!["{}"; count].join(",")))
    };
    assert_eq!(accepted(&rules(10_000))[0].rules.len(), 10_000);
    assert!(refused(&rules(10_001)).contains("10001 rules, more than 10000; split the policy"));
}
