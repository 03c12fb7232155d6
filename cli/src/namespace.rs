//! The namespace of an endpoint.

use wharf_api::Endpoint;

/// Label of containers without a pod.
const NAMESPACE_LABEL: &str = "k8s:io.kubernetes.pod.namespace=";
/// Namespace of endpoints and documents without one.
pub(crate) const DEFAULT_NAMESPACE: &str = "default";
const HEALTH_LABEL: &str = "reserved:health";

/// As in policies.
pub(crate) fn namespace_of(e: &Endpoint) -> &str {
    let by_label = || e.labels.iter().filter_map(|l| l.strip_prefix(NAMESPACE_LABEL)).find(|name| !name.is_empty());
    e.pod_namespace.as_deref().or_else(by_label).unwrap_or(DEFAULT_NAMESPACE)
}

/// A health endpoint, not a container.
pub(crate) fn is_health(e: &Endpoint) -> bool {
    e.labels.iter().any(|l| l.trim_end_matches('=') == HEALTH_LABEL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::sample;

    #[test]
    fn the_namespace_is_the_pods_or_that_of_a_label_or_the_default() {
        let mut e = sample::endpoint();
        e.pod_namespace = Some("shop".to_owned());
        assert_eq!(namespace_of(&e), "shop");
        e.pod_namespace = None;
        e.labels = vec!["k8s:io.kubernetes.pod.namespace=store".to_owned()];
        assert_eq!(namespace_of(&e), "store");
        e.labels.clear();
        assert_eq!((namespace_of(&e), is_health(&e)), (DEFAULT_NAMESPACE, false));
    }
}
