//! What is told of bad documents, and that no text makes the reader fall over.

use std::{fs, path::Path};

use proptest::prelude::*;
use wharf_policy::read::{Refusal, read};

/// Each file of tests/documents, with what is told of it.
#[test]
fn bad_documents_are_refused_with_place_cause_and_remedy() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/documents");
    let mut paths: Vec<_> =
        fs::read_dir(directory).expect("documents").map(|entry| entry.expect("entry").path()).collect();
    paths.sort();
    let told = paths.iter().map(|path| {
        let text = fs::read_to_string(path).expect("a document");
        let name = path.file_name().expect("name").to_string_lossy();
        let refusals = read(&name, &text).expect_err(&name);
        crate::lines(&refusals)
    });
    insta::assert_snapshot!(told.collect::<Vec<_>>().join("\n\n"));
}

/// Pieces that policies are made of.
const PIECES: [&str; 64] = [
    "apiVersion: networking.k8s.io/v1",
    "apiVersion: cilium.io/v2",
    "apiVersion: policy.networking.k8s.io/v1alpha2",
    "apiVersion: v1",
    "kind: NetworkPolicy",
    "kind: CiliumNetworkPolicy",
    "kind: ClusterNetworkPolicy",
    "kind: List",
    "items:",
    "metadata: {name: a}",
    "spec:",
    "specs:",
    "podSelector: {}",
    "endpointSelector: {}",
    "subject: {namespaces: {}}",
    "tier: Admin",
    "priority: 7",
    "policyTypes: [Egress]",
    "ingress:",
    "egress:",
    "ingressDeny:",
    "egressDeny:",
    "- {}",
    "- from:",
    "- to:",
    "- fromEndpoints:",
    "- toCIDR: [10.0.0.0/8]",
    "- fromEntities: [all]",
    "- ports:",
    "- toPorts:",
    "- action: Deny",
    "from:",
    "to:",
    "ports:",
    "protocols:",
    "- tcp: {destinationPort: {number: 80}}",
    "- port: 80",
    "  endPort: 90",
    "- namespaceSelector: {}",
    "- podSelector:",
    "matchLabels: {a: b}",
    "matchExpressions:",
    "- {key: a, operator: In, values: [b]}",
    "- ipBlock: {cidr: '::/0', except: ['fd00::/8']}",
    "---",
    "...",
    "&a",
    "*a",
    "<<: *a",
    "!!str",
    "!x",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "'",
    "\"",
    "|",
    ">",
    "null",
    "\t",
    "\u{feff}",
];

fn text() -> impl Strategy<Value = String> {
    let line = (0usize..10, prop::sample::select(&PIECES[..]))
        .prop_map(|(indent, piece)| format!("{}{piece}", "  ".repeat(indent)));
    prop_oneof![
        any::<String>(),
        prop::collection::vec(prop::sample::select(&PIECES[..]), 0..30).prop_map(|pieces| pieces.join(" ")),
        prop::collection::vec(line, 0..30).prop_map(|lines| lines.join("\n")),
    ]
}

/// A good document, cut up and with something else in one place.
fn damaged() -> impl Strategy<Value = String> {
    const GOOD: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: a, namespace: b}\nspec:\n  \
        podSelector: {matchLabels: {app: web}}\n  ingress:\n  - from:\n    - ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}\n    \
        - podSelector: {matchExpressions: [{key: a, operator: NotIn, values: [b, c]}]}\n    ports:\n    - port: 80\n      endPort: 90\n    \
        - protocol: UDP\n      port: dns\n";
    (0..GOOD.len(), 0usize..20, prop::sample::select(&PIECES[..])).prop_map(|(at, length, piece)| {
        let end = (at + length).min(GOOD.len());
        format!("{}{piece}{}", &GOOD[..at], &GOOD[end..])
    })
}

/// What holds of every refusal.
fn check(refusals: &[Refusal], text: &str) -> Result<(), TestCaseError> {
    prop_assert!(!refusals.is_empty() && refusals.len() <= 21);
    let last = u32::try_from(text.split(['\n', '\r']).count()).unwrap_or(u32::MAX);
    for refusal in refusals {
        let told = refusal.to_string();
        prop_assert!(told.starts_with("f:") && told.contains("; ") && told.len() < 2000, "{}", told);
        prop_assert!(!told.contains(char::is_control), "{:?}", told);
        let line = match refusal {
            Refusal::Field { origin, .. } => origin.line,
            Refusal::Text { line, .. } => *line,
            Refusal::More { .. } => 1,
        };
        prop_assert!((1..=last + 1).contains(&line), "line {} of {}", line, last);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_text_makes_the_reader_panic(text in prop_oneof![text(), damaged()]) {
        if let Err(refusals) = read("f", &text) {
            check(&refusals, &text)?;
        }
    }
}
