//! The permissions of `rbac.yaml`.

use std::sync::LazyLock;

use serde::Deserialize;

#[derive(Debug, Deserialize)]
struct Role {
    metadata: Metadata,
    rules: Vec<Rule>,
}

#[derive(Debug, Deserialize)]
struct Metadata {
    namespace: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Rule {
    api_groups: Vec<String>,
    resources: Vec<String>,
    #[serde(default)]
    resource_names: Vec<String>,
    verbs: Vec<String>,
}

/// What a request does.
#[derive(Debug, Default, PartialEq, Eq)]
struct Access<'a> {
    group: &'a str,
    namespace: Option<&'a str>,
    resource: String,
    name: Option<&'a str>,
    verb: &'a str,
}

static ROLES: LazyLock<Vec<Role>> = LazyLock::new(|| {
    let text = include_str!("../../../rbac.yaml");
    text.split("\n---\n").map(|role| serde_saphyr::from_str(role).expect("a role")).collect()
});

/// Whether a role allows the request.
pub fn allows(method: &str, target: &str) -> bool {
    let access = access(method, target);
    ROLES.iter().any(|role| {
        let reaches = role.metadata.namespace.is_none() || role.metadata.namespace.as_deref() == access.namespace;
        reaches && role.rules.iter().any(|rule| rule.allows(&access))
    })
}

impl Rule {
    fn allows(&self, access: &Access<'_>) -> bool {
        let named = self.resource_names.is_empty()
            || access.name.is_some_and(|name| self.resource_names.iter().any(|allowed| allowed == name));
        named
            && self.api_groups.iter().any(|group| group == access.group)
            && self.resources.contains(&access.resource)
            && self.verbs.iter().any(|verb| verb == access.verb)
    }
}

fn access<'a>(method: &str, target: &'a str) -> Access<'a> {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut parts = path.trim_start_matches('/').split('/');
    let group = if parts.next() == Some("apis") { parts.next().unwrap_or_default() } else { "" };
    let _version = parts.next();
    let rest: Vec<&str> = parts.collect();
    let (namespace, rest) = match rest.as_slice() {
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (Some(*namespace), rest),
        rest => (None, rest),
    };
    let (resource, name) = match rest {
        [resource] => ((*resource).to_owned(), None),
        [resource, name] => ((*resource).to_owned(), Some(*name)),
        [resource, name, sub] => (format!("{resource}/{sub}"), Some(*name)),
        _ => panic!("{target}"),
    };
    let verb = match (method, name) {
        ("GET", _) if query.contains("watch=true") => "watch",
        ("GET", Some(_)) => "get",
        ("GET", None) => "list",
        ("PATCH", _) => "patch",
        ("POST", _) => "create",
        _ => panic!("{method}"),
    };
    Access { group, namespace, resource, name, verb }
}
