//! Policy documents for the agent.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::Identity;
use crate::source::Source;

/// Fields with an effect, copied verbatim.
#[derive(Debug, Deserialize)]
struct Sent<'a> {
    #[serde(borrow)]
    spec: Option<&'a RawValue>,
    /// Only policies of Cilium.
    #[serde(borrow)]
    specs: Option<&'a RawValue>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Document<'a> {
    /// List items of built-in types lack it.
    api_version: &'a str,
    kind: &'a str,
    metadata: Named<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    spec: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    specs: Option<&'a RawValue>,
}

#[derive(Debug, Serialize)]
struct Named<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<&'a str>,
}

/// The document of a policy as JSON: version, kind, name and namespace, `spec` and `specs`. Status and other metadata
/// have no effect on policy, so their changes are not sent.
///
/// # Errors
/// The text is no object of the API.
pub fn document(source: Source, api_version: &str, object: &RawValue) -> Result<(Identity, String), serde_json::Error> {
    let identity: Identity = serde_json::from_str(object.get())?;
    let Sent { spec, specs } = serde_json::from_str(object.get())?;
    let metadata = Named {
        name: &identity.metadata.name,
        namespace: identity.metadata.namespace.as_deref().filter(|n| !n.is_empty()),
    };
    let document = Document { api_version, kind: source.object_kind(), metadata, spec, specs };
    let text = serde_json::to_string(&document)?;
    Ok((identity, text))
}
