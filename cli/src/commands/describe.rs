//! The `describe` commands.

use std::collections::BTreeMap;

use wharf_api::{EndpointFilter, Namespace, PolicyInfo};

use super::{Context, endpoint::redirects};
use crate::{
    error::{CliError, Exit},
    namespace::namespace_of,
    render::describe::{self, EndpointDetails, EndpointPolicies, NamespaceDetails, PolicyDetails},
};

pub(super) async fn endpoint(cx: &Context, id: &str) -> Result<Exit, CliError> {
    let endpoint = cx.client.endpoint(id).await?;
    let id = endpoint.id.to_string();
    // Fails in delegated mode.
    let policies = cx.client.endpoint_policy(&id).await.ok();
    let policies = policies.map(|p| EndpointPolicies { ingress: p.ingress.policies, egress: p.egress.policies });
    let events = cx.client.endpoint_log(&id).await?;
    let redirects = if cx.out.is_table() { redirects(cx, endpoint.id).await } else { Vec::new() };
    let details = EndpointDetails { endpoint, redirects, policies, events };
    cx.out.emit(&details, |style| describe::endpoint(&details, style))?;
    Ok(Exit::Ok)
}

pub(super) async fn policies(cx: &Context, policies: Vec<PolicyInfo>) -> Result<Exit, CliError> {
    let all = cx.client.endpoints(&EndpointFilter::default()).await?;
    let details = policies.into_iter().map(|policy| {
        let endpoints = all.iter().filter(|e| policy.endpoints.contains(&e.id)).cloned().collect();
        PolicyDetails { policy, endpoints }
    });
    let details: Vec<PolicyDetails> = details.collect();
    cx.out.emit(&details, |style| describe::policies(&details, style))?;
    Ok(Exit::Ok)
}

pub(super) async fn namespace(cx: &Context, name: &str) -> Result<Exit, CliError> {
    let labelled = cx.client.namespaces().await?.into_iter().find(|namespace| namespace.name == name);
    let mut policies = cx.client.policies().await?.policies;
    policies.retain(|policy| policy.namespace.as_deref() == Some(name));
    let mut endpoints = cx.client.endpoints(&EndpointFilter::default()).await?;
    endpoints.retain(|e| namespace_of(e) == name);
    if labelled.is_none() && policies.is_empty() && endpoints.is_empty() {
        let error = CliError::refused(format!("show namespace {name}: it has no labels, policies or endpoints here"));
        return Err(error.hint("`wharf namespace list` shows those that have labels"));
    }
    let unlabelled = || Namespace { name: name.to_owned(), labels: BTreeMap::new() };
    let details = NamespaceDetails { namespace: labelled.unwrap_or_else(unlabelled), policies, endpoints };
    cx.out.emit(&details, |style| describe::namespace(&details, style))?;
    Ok(Exit::Ok)
}
