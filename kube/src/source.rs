//! Watched resources of the API, and the kinds of their rows.

use std::fmt;

use http::Uri;

/// Kind of rows of the cluster feed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Node,
    Namespace,
    Pod,
    /// Policies.
    Policy,
}

impl Kind {
    /// In the order of a snapshot: policies come after the pods that they select.
    pub const ALL: [Self; 4] = [Self::Node, Self::Namespace, Self::Pod, Self::Policy];

    /// Name in the cluster feed.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Namespace => "namespace",
            Self::Pod => "pod",
            Self::Policy => "policy",
        }
    }
}

/// A resource of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    Node,
    Namespace,
    Pod,
    /// Kubernetes' network policies.
    NetworkPolicy,
    /// Policies of the network policy API.
    ClusterNetworkPolicy,
    /// Cilium's network policies.
    CiliumNetworkPolicy,
    /// Cilium's network policies without a namespace.
    CiliumClusterwideNetworkPolicy,
}

/// An optional custom resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Custom {
    /// Group of the API.
    pub group: &'static str,
    /// Plural name.
    pub plural: &'static str,
    /// Versions that the agent reads, preferred first.
    pub versions: &'static [&'static str],
}

impl Custom {
    /// Path of the definition.
    #[must_use]
    pub fn definition(&self) -> String {
        format!("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{}.{}", self.plural, self.group)
    }

    /// `apiVersion` of the objects.
    #[must_use]
    pub fn api_version(&self, version: &str) -> String {
        format!("{}/{version}", self.group)
    }
}

const POLICY_GROUP: &str = "policy.networking.k8s.io";
const CLUSTER: Custom =
    Custom { group: POLICY_GROUP, plural: "clusternetworkpolicies", versions: &["v1beta1", "v1alpha2"] };
const CILIUM: Custom = Custom { group: "cilium.io", plural: "ciliumnetworkpolicies", versions: &["v2"] };
const CLUSTERWIDE: Custom =
    Custom { group: "cilium.io", plural: "ciliumclusterwidenetworkpolicies", versions: &["v2"] };

/// Live pods without the host's network. A completing pod leaves the selection: the server reports a deletion.
const LIVE_PODS: &str = "spec.hostNetwork%3Dfalse%2Cstatus.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed";

impl Source {
    /// Every source.
    pub const ALL: [Self; 7] = [
        Self::Node,
        Self::Namespace,
        Self::Pod,
        Self::NetworkPolicy,
        Self::ClusterNetworkPolicy,
        Self::CiliumNetworkPolicy,
        Self::CiliumClusterwideNetworkPolicy,
    ];

    /// Kind of the rows.
    #[must_use]
    pub const fn kind(self) -> Kind {
        match self {
            Self::Node => Kind::Node,
            Self::Namespace => Kind::Namespace,
            Self::Pod => Kind::Pod,
            _ => Kind::Policy,
        }
    }

    #[must_use]
    pub const fn object_kind(self) -> &'static str {
        match self {
            Self::Node => "Node",
            Self::Namespace => "Namespace",
            Self::Pod => "Pod",
            Self::NetworkPolicy => "NetworkPolicy",
            Self::ClusterNetworkPolicy => "ClusterNetworkPolicy",
            Self::CiliumNetworkPolicy => "CiliumNetworkPolicy",
            Self::CiliumClusterwideNetworkPolicy => "CiliumClusterwideNetworkPolicy",
        }
    }

    /// The definition of a custom resource.
    #[must_use]
    pub const fn custom(self) -> Option<Custom> {
        match self {
            Self::ClusterNetworkPolicy => Some(CLUSTER),
            Self::CiliumNetworkPolicy => Some(CILIUM),
            Self::CiliumClusterwideNetworkPolicy => Some(CLUSTERWIDE),
            _ => None,
        }
    }

    /// The resource; a custom resource in its preferred version.
    #[must_use]
    pub fn built_in(self) -> Served {
        let (api_version, path) = match (self, self.custom()) {
            (_, Some(custom)) => return Served::custom(&custom, custom.versions.first().copied().unwrap_or("v1")),
            (Self::NetworkPolicy, _) => ("networking.k8s.io/v1", "/apis/networking.k8s.io/v1/networkpolicies"),
            (Self::Pod, _) => ("v1", "/api/v1/pods"),
            (Self::Namespace, _) => ("v1", "/api/v1/namespaces"),
            _ => ("v1", "/api/v1/nodes"),
        };
        Served { api_version: api_version.to_owned(), path: path.to_owned() }
    }

    /// Query for lists and watches, with a final `&`; may be empty.
    #[must_use]
    pub fn selector(self) -> String {
        if self == Self::Pod { format!("fieldSelector={LIVE_PODS}&") } else { String::new() }
    }

    /// Key of the object's row.
    #[must_use]
    pub fn row_key(self, object: &str, uid: &str) -> String {
        match self.kind() {
            Kind::Node | Kind::Namespace => object.to_owned(),
            Kind::Pod => uid.to_owned(),
            Kind::Policy => format!("{} {object}", self.object_kind()),
        }
    }

    /// Source and object of a policy's row.
    #[must_use]
    pub fn of_policy(key: &str) -> Option<(Self, &str)> {
        let (kind, object) = key.split_once(' ')?;
        let source = Self::ALL.into_iter().find(|source| source.object_kind() == kind)?;
        (source.kind() == Kind::Policy).then_some((source, object))
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.object_kind())
    }
}

/// A served resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Served {
    /// `apiVersion` of the objects.
    pub api_version: String,
    /// Path of the collection.
    pub path: String,
}

impl Served {
    /// A version of a custom resource.
    #[must_use]
    pub fn custom(custom: &Custom, version: &str) -> Self {
        let api_version = custom.api_version(version);
        Self { path: format!("/apis/{api_version}/{}", custom.plural), api_version }
    }

    /// The collection with a query.
    ///
    /// # Errors
    /// A text of the query is not allowed in a URI.
    pub fn uri(&self, query: &str) -> Result<Uri, http::Error> {
        Uri::builder().path_and_query(format!("{}?{query}", self.path)).build()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_selector_of_pods_is_that_of_live_pods_without_the_hosts_network() {
        let query = Source::Pod.selector().replace("%3D", "=").replace("%2C", ",").replace("%21", "!");
        assert_eq!(query, "fieldSelector=spec.hostNetwork=false,status.phase!=Succeeded,status.phase!=Failed&");
        assert!(Source::Pod.built_in().uri(&Source::Pod.selector()).is_ok());
    }

    #[test]
    fn the_key_of_a_policy_names_its_object() {
        for source in Source::ALL.into_iter().filter(|source| source.kind() == Kind::Policy) {
            let key = source.row_key("shop/web", "1");
            assert_eq!(Source::of_policy(&key), Some((source, "shop/web")));
        }
        assert_eq!(Source::of_policy("Pod shop/web"), None);
        assert_eq!(Source::of_policy("NetworkPolicy"), None);
        assert_eq!(Source::Pod.row_key("shop/web", "1"), "1");
    }
}
