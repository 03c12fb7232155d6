//! Warnings about imported policies without a local endpoint.

use std::collections::BTreeMap;

use wharf_api::{Endpoint, EndpointFilter, PolicyChange, PolicyInfo};

use super::super::Context;
use crate::{
    namespace::{is_health, namespace_of},
    output::remark,
    render::{policy::full_name, text::safe},
};

/// Most named policies: imports may cover a whole cluster.
const MOST: usize = 5;

/// Ignores failed requests: the import is in force.
pub(super) async fn warn(cx: &Context, changes: &[PolicyChange]) {
    if changes.iter().all(|change| change.put.is_empty()) {
        return;
    }
    let Ok(list) = cx.client.policies().await else { return };
    let warnings = warnings(changes, &list.policies);
    if warnings.is_empty() {
        return;
    }
    for warning in warnings {
        remark(&format!("wharf: warning: {}", safe(&warning)));
    }
    if let Ok(endpoints) = cx.client.endpoints(&EndpointFilter::default()).await {
        remark(&format!("  hint: {}", safe(&hint(&endpoints))));
    }
}

fn warnings(changes: &[PolicyChange], policies: &[PolicyInfo]) -> Vec<String> {
    // One element per spec.
    let mut subjects: BTreeMap<String, Vec<&PolicyInfo>> = BTreeMap::new();
    for policy in policies {
        let name = full_name(&policy.kind, policy.namespace.as_deref(), &policy.name);
        subjects.entry(name).or_default().push(policy);
    }
    let put = changes.iter().flat_map(|change| &change.put);
    let mut warnings: Vec<String> = put
        .filter_map(|name| {
            let specs = subjects.get(name)?;
            let subject = specs.first()?.subject.as_str();
            let selects_none = specs.iter().all(|spec| spec.endpoints.is_empty());
            selects_none.then(|| format!("{name} selects no endpoint of this node (subject: {subject})"))
        })
        .collect();
    let more = warnings.len().saturating_sub(MOST);
    if more > 0 {
        warnings.truncate(MOST);
        warnings.push(format!("{more} more select no endpoint; `wharf policy list` shows `-` under ENDPOINTS"));
    }
    warnings
}

fn hint(endpoints: &[Endpoint]) -> String {
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    for endpoint in endpoints.iter().filter(|endpoint| !is_health(endpoint)) {
        *counts.entry(namespace_of(endpoint)).or_default() += 1;
    }
    if counts.is_empty() {
        return "this node has no endpoints".to_owned();
    }
    let more = counts.len().saturating_sub(MOST);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let named = counts.iter().take(MOST).map(|(name, count)| format!("{name} ({count})")).collect::<Vec<_>>();
    format!(
        "namespaces with endpoints: {}{more}; `wharf endpoint list --show-labels` shows the labels",
        named.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::sample;

    #[test]
    fn the_first_ones_are_named_and_the_rest_counted() {
        let policy = |name: &str, endpoints: &[u16]| PolicyInfo {
            kind: "NetworkPolicy".to_owned(),
            namespace: Some("shop".to_owned()),
            name: name.to_owned(),
            tier: "namespaced".to_owned(),
            priority: None,
            subject: "k8s:app=db, in namespace shop".to_owned(),
            isolates: Vec::new(),
            ingress_rules: 0,
            egress_rules: 0,
            file: "db.yaml".to_owned(),
            line: 1,
            endpoints: endpoints.to_vec(),
        };
        let names: Vec<String> = (0..8).map(|n| format!("p{n}")).collect();
        let mut policies: Vec<PolicyInfo> = names.iter().map(|name| policy(name, &[])).collect();
        policies.extend([policy("two", &[]), policy("two", &[7]), policy("old", &[])]);
        let put = |name: &String| format!("NetworkPolicy shop/{name}");
        let names: Vec<String> = names.iter().map(put).chain([put(&"two".to_owned())]).collect();
        let change = |put: &[String]| [PolicyChange { put: put.to_vec(), ..PolicyChange::default() }];
        let one = "NetworkPolicy shop/p0 selects no endpoint of this node (subject: k8s:app=db, in namespace shop)";
        assert_eq!(warnings(&change(&names[..1]), &policies), [one]);
        let all = warnings(&change(&names), &policies);
        assert_eq!(
            (all.len(), &*all[5]),
            (6, "3 more select no endpoint; `wharf policy list` shows `-` under ENDPOINTS")
        );
        assert_eq!(warnings(&change(&names[8..]), &policies), Vec::<String>::new());
    }

    #[test]
    fn the_hint_counts_the_endpoints_of_each_namespace() {
        let mut health = sample::endpoint();
        health.pod_namespace = None;
        health.labels = vec!["reserved:health=".to_owned()];
        assert_eq!(hint(std::slice::from_ref(&health)), "this node has no endpoints");
        let told = hint(&[sample::endpoint(), sample::endpoint(), health]);
        assert!(told.starts_with("namespaces with endpoints: default (2); "), "{told}");
    }
}
