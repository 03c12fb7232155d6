//! Objects of the API, with the fields in use. A field that Kubernetes may write as `null` is optional.

pub mod node;
pub mod pod;
pub mod policy;

use std::collections::BTreeMap;

use serde::Deserialize;

/// Metadata of every object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// Unique in namespace and kind.
    pub name: String,
    /// Absent without a namespace.
    #[serde(default)]
    pub namespace: Option<String>,
    /// Distinguishes objects with the same name.
    #[serde(default)]
    pub uid: String,
    /// Grows with each change of any object of the kind.
    #[serde(default)]
    pub resource_version: String,
    #[serde(default)]
    pub labels: Option<BTreeMap<String, String>>,
    #[serde(default)]
    pub annotations: Option<BTreeMap<String, String>>,
}

impl Metadata {
    /// `NAMESPACE/NAME`, or the name without a namespace.
    #[must_use]
    pub fn key(&self) -> String {
        match &self.namespace {
            Some(namespace) if !namespace.is_empty() => format!("{namespace}/{}", self.name),
            _ => self.name.clone(),
        }
    }

    #[must_use]
    pub fn annotation(&self, name: &str) -> Option<&str> {
        self.annotations.as_ref()?.get(name).map(String::as_str)
    }
}

/// Any object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Any {
    pub metadata: Metadata,
}

/// Identifies an object whose other fields do not decode.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Identity {
    pub metadata: IdentityMetadata,
}

/// As [`Metadata`], without labels and annotations.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IdentityMetadata {
    pub name: String,
    #[serde(default)]
    pub namespace: Option<String>,
    #[serde(default)]
    pub uid: String,
    #[serde(default)]
    pub resource_version: String,
}

impl Identity {
    /// As [`Metadata::key`].
    #[must_use]
    pub fn key(&self) -> String {
        let IdentityMetadata { name, namespace, .. } = &self.metadata;
        Metadata { name: name.clone(), namespace: namespace.clone(), ..Metadata::default() }.key()
    }
}
