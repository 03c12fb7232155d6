//! Definitions of custom resources, read as objects: after a start of the server, discovery can lack a group, which
//! would remove its policies.

use serde::Deserialize;

use crate::{
    api::{Api, Failure},
    source::{Custom, Served},
};

#[derive(Debug, Deserialize)]
struct Definition {
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Debug, Deserialize)]
struct Spec {
    #[serde(default)]
    versions: Vec<Version>,
}

#[derive(Debug, Deserialize)]
struct Version {
    name: String,
    served: bool,
}

#[derive(Debug, Default, Deserialize)]
struct Status {
    #[serde(default)]
    conditions: Option<Vec<Condition>>,
}

#[derive(Debug, Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

impl Definition {
    fn is_established(&self) -> bool {
        let conditions = self.status.conditions.as_deref().unwrap_or_default();
        conditions.iter().any(|condition| condition.kind == "Established" && condition.status == "True")
    }
}

/// The preferred version that both cluster and agent support; `None` without a definition.
///
/// # Errors
/// The definition cannot be read, or has no version that the agent reads: policies in force stay. One that does not
/// exist is no error.
pub(super) async fn served(api: &Api, custom: &Custom) -> Result<Option<Served>, Failure> {
    match api.object::<Definition>(&custom.definition()).await {
        Ok(definition) => choose(custom, &definition).map(Some),
        // A proxy's 404 must not remove policies.
        Err(Failure::Refused { code: 404, reason, .. }) if reason == "NotFound" => Ok(None),
        Err(failure) => Err(failure),
    }
}

fn choose(custom: &Custom, definition: &Definition) -> Result<Served, Failure> {
    if !definition.is_established() {
        return Err(Failure::Request(format!("the definition of {} is not established", custom.plural)));
    }
    let serves = |name: &str| definition.spec.versions.iter().any(|version| version.served && version.name == name);
    let best = custom.versions.iter().find(|name| serves(name));
    best.map(|name| Served::custom(custom, name)).ok_or_else(|| {
        let (resource, versions) = (custom.plural, custom.versions.join(", "));
        Failure::Request(format!("the cluster serves {resource} in none of the versions {versions}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Source;

    fn chosen(versions: &str, established: &str) -> Option<String> {
        let text = format!(
            r#"{{"spec": {{"versions": {versions}}},
                "status": {{"conditions": [{{"type": "Established", "status": "{established}"}}]}}}}"#
        );
        let custom = Source::ClusterNetworkPolicy.custom().expect("a custom resource");
        choose(&custom, &serde_json::from_str(&text).expect("decoded")).map(|served| served.path).ok()
    }

    #[test]
    fn the_preferred_served_version_is_chosen() {
        let alpha = r#"{"name": "v1alpha2", "served": true}"#;
        let path = |version| Some(format!("/apis/policy.networking.k8s.io/{version}/clusternetworkpolicies"));
        assert_eq!(chosen(&format!(r#"[{alpha}, {{"name": "v1beta1", "served": true}}]"#), "True"), path("v1beta1"));
        assert_eq!(chosen(&format!(r#"[{alpha}, {{"name": "v1beta1", "served": false}}]"#), "True"), path("v1alpha2"));
        assert_eq!(chosen(&format!("[{alpha}]"), "False"), None);
        assert_eq!(chosen(r#"[{"name": "v2", "served": true}]"#, "True"), None);
    }
}
