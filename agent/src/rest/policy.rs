//! `/v1/policy`, `/v1/namespace`, and an endpoint's policy.

use std::{net::IpAddr, sync::Arc};

use axum::{Json, extract::State, http::StatusCode};
use wharf_api::{
    ApiError, EndpointPolicy, ErrorCode, Namespace, NamespaceLabels, PolicyChange, PolicyDeleteQuery,
    PolicyExplainQuery, PolicyExplanation, PolicyImport, PolicyList, PolicyProtocol, PolicyVerdict,
};
use wharf_core::ids::EndpointId;
use wharf_policy::model::PolicyName;

use crate::{
    node::{Node, endpoint::Handle, sources},
    policy::{self, Ask, Policy, error::PolicyError},
    rest::{
        early::Restored,
        endpoint::accepts_work,
        error::{Answer, Body, Failure, Query, Segment},
        id,
    },
};

const MAX_FILE_NAME: usize = 4_096;

/// Imported policies, and whether they are in force.
#[utoipa::path(get, path = "/v1/policy", tag = "policy", responses((status = 200, body = PolicyList)))]
pub async fn list(State(node): State<Arc<Node>>) -> Json<PolicyList> {
    Json(node.life.policy.list().await)
}

/// Imports all policies of a text, or none; replaces policies of the same names. Answers when they are in force.
#[utoipa::path(put, path = "/v1/policy", tag = "policy", request_body = PolicyImport,
    responses((status = 200, body = PolicyChange), (status = 400, body = ApiError), (status = 409, body = ApiError),
        (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn import(State(node): State<Arc<Node>>, Body(body): Body<PolicyImport>) -> Answer<Json<PolicyChange>> {
    let PolicyImport { file, text } = body;
    if file.is_empty() || file.len() > MAX_FILE_NAME || file.chars().any(char::is_control) {
        let rule = "file has 1 to 4096 bytes without control characters";
        return Err(Failure::new(ErrorCode::InvalidRequest, format!("import policies: {rule}")));
    }
    accepts_work(&node, "import policies")?;
    let change = to_its_end(&node, move |policy| async move { policy.import(&file, &text).await }).await?;
    Ok(Json(told(&node, change)))
}

/// Also without the client: desired state, store and kernel stay consistent.
pub(super) async fn to_its_end<T, F>(node: &Node, work: impl FnOnce(Arc<Policy>) -> F) -> Answer<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T, PolicyError>> + Send + 'static,
{
    let done = node.life.tasks.operations.spawn(work(Arc::clone(&node.life.policy)));
    let stopped = |_| Failure::new(ErrorCode::Unavailable, "change policies: the agent is stopping");
    Ok(done.await.map_err(stopped)??)
}

/// Removes one imported policy, or with `all=true` all.
#[utoipa::path(delete, path = "/v1/policy", tag = "policy", params(PolicyDeleteQuery),
    responses((status = 200, body = PolicyChange), (status = 400, body = ApiError), (status = 404, body = ApiError),
        (status = 409, body = ApiError), (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn remove(
    State(node): State<Arc<Node>>,
    Query(query): Query<PolicyDeleteQuery>,
) -> Answer<Json<PolicyChange>> {
    let invalid = |why: &str| Err(Failure::new(ErrorCode::InvalidRequest, format!("delete policies: {why}")));
    let change = match (query.all.unwrap_or(false), query.kind, query.name) {
        (true, None, None) if query.namespace.is_none() => {
            accepts_work(&node, "delete policies")?;
            to_its_end(&node, |policy| async move { policy.delete_all().await }).await?
        }
        (true, ..) => return invalid("all=true stands alone"),
        (false, Some(kind), Some(name)) => {
            accepts_work(&node, "delete policies")?;
            let namespace = query.namespace.unwrap_or_default();
            let name = PolicyName { kind, namespace, name };
            to_its_end(&node, move |policy| async move { policy.delete(&name).await }).await?
        }
        (false, ..) => return invalid("kind and name say which (with namespace, where the kind has one), or all=true"),
    };
    Ok(Json(told(&node, change)))
}

fn told(node: &Node, change: PolicyChange) -> PolicyChange {
    let PolicyChange { revision, put, removed, .. } = &change;
    let what = format!("revision {revision}: {} put, {} removed", put.len(), removed.len());
    tracing::info!(revision, ?put, ?removed, "policies changed");
    node.life.telemetry.monitor.agent(None, "policy-changed", what);
    change
}

/// Whether the first packet of a flow passes, and the rule that decides.
#[utoipa::path(get, path = "/v1/policy/explain", tag = "policy", params(PolicyExplainQuery),
    responses((status = 200, body = PolicyExplanation), (status = 400, body = ApiError), (status = 404, body = ApiError),
        (status = 409, body = ApiError), (status = 503, body = ApiError)))]
pub async fn explain(
    Restored(node): Restored,
    Query(query): Query<PolicyExplainQuery>,
) -> Answer<Json<PolicyExplanation>> {
    let (from, to) = (end(&node, &query.from)?, end(&node, &query.to)?);
    let (protocol, port) = (query.protocol.unwrap_or_default(), query.port.unwrap_or_default());
    let families = families(protocol);
    let mut pairs = families.iter().filter_map(|v6| addresses(&from, &to, *v6));
    let Some((source, destination)) = pairs.next() else {
        let family = match families {
            [false] => "of IPv4, which icmp needs",
            [true] => "of IPv6, which icmpv6 needs",
            _ => "of one family",
        };
        let message = format!("explain {} to {}: they have no addresses {family}", query.from, query.to);
        return Err(Failure::new(ErrorCode::InvalidRequest, message));
    };
    let Some(to_port) = policy::destination(protocol, port) else {
        let message =
            format!("explain {} to {}: {port} is no type of ICMP; give one of 0 to 255", query.from, query.to);
        return Err(Failure::new(ErrorCode::InvalidRequest, message));
    };
    let ask = Ask { from: from.id(), source, to: to.id(), destination, to_port };
    let mut told = node.life.policy.explain(ask).await;
    if let Some((source, destination)) = pairs.next() {
        let other = node.life.policy.explain(Ask { source, destination, ..ask }).await;
        if other.verdict != told.verdict {
            let other_verdict = match other.verdict {
                PolicyVerdict::Accept => "accepted",
                PolicyVerdict::Deny => "denied",
            };
            let family = format!(
                "this is the packet from {} to {}; that from {source} to {destination} is {other_verdict}: ask for these addresses",
                ask.source, ask.destination
            );
            told.note = Some(told.note.map_or_else(|| family.clone(), |note| format!("{family}; {note}")));
        }
    }
    if let End::Elsewhere(ip) = from
        && let Some((id, _)) = sources::allowed_to(&node.life.endpoints.registry, ip).first()
    {
        let router = format!("endpoint {id} may send from {ip}; its egress rules apply to these packets too");
        told.note = Some(told.note.map_or_else(|| router.clone(), |note| format!("{note}; {router}")));
    }
    Ok(Json(told))
}

/// IPv4 first; `true` is IPv6.
const fn families(protocol: PolicyProtocol) -> &'static [bool] {
    match protocol {
        PolicyProtocol::Icmp => &[false],
        PolicyProtocol::Icmpv6 => &[true],
        _ => &[false, true],
    }
}

enum End {
    Endpoint(EndpointId, Vec<IpAddr>),
    Elsewhere(IpAddr),
}

impl End {
    fn id(&self) -> Option<EndpointId> {
        match self {
            Self::Endpoint(id, _) => Some(*id),
            Self::Elsewhere(_) => None,
        }
    }

    fn addresses(&self) -> &[IpAddr] {
        match self {
            Self::Endpoint(_, all) => all,
            Self::Elsewhere(ip) => std::slice::from_ref(ip),
        }
    }
}

fn end(node: &Node, text: &str) -> Answer<End> {
    let of = |handle: &Handle| handle.shared.read(|v| v.record.addresses().collect::<Vec<_>>());
    if let Ok(ip) = text.parse::<IpAddr>() {
        let ip = ip.to_canonical();
        let all = node.life.endpoints.registry.list();
        let there =
            all.into_iter().map(|handle| (handle.id, of(&handle))).find(|(_, addresses)| addresses.contains(&ip));
        return Ok(there.map_or(End::Elsewhere(ip), |(id, _)| End::Endpoint(id, vec![ip])));
    }
    let handle = id::find(&node.life.endpoints.registry, &id::parse(text)?, text)?;
    Ok(End::Endpoint(handle.id, of(&handle)))
}

fn addresses(from: &End, to: &End, v6: bool) -> Option<(IpAddr, IpAddr)> {
    let of = |end: &End| end.addresses().iter().copied().find(|ip| ip.is_ipv6() == v6);
    of(from).zip(of(to))
}

/// An endpoint's rules, with the packets that each decided.
#[utoipa::path(get, path = "/v1/endpoint/{id}/policy", tag = "endpoint", params(("id" = String, Path)),
    responses((status = 200, body = EndpointPolicy), (status = 400, body = ApiError), (status = 404, body = ApiError),
        (status = 409, body = ApiError), (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn of_endpoint(Restored(node): Restored, Segment(text): Segment) -> Answer<Json<EndpointPolicy>> {
    let handle = id::find(&node.life.endpoints.registry, &id::parse(&text)?, &text)?;
    Ok(Json(node.life.policy.endpoint(handle.id).await?))
}

/// Namespaces with labels.
#[utoipa::path(get, path = "/v1/namespace", tag = "policy", responses((status = 200, body = [Namespace])))]
pub async fn namespaces(State(node): State<Arc<Node>>) -> Json<Vec<Namespace>> {
    Json(node.life.policy.namespaces().await)
}

/// Replaces a namespace's labels; its endpoints are updated before the answer.
#[utoipa::path(put, path = "/v1/namespace/{name}", tag = "policy", params(("name" = String, Path)), request_body = NamespaceLabels,
    responses((status = 200, body = Namespace), (status = 400, body = ApiError), (status = 500, body = ApiError),
        (status = 503, body = ApiError)))]
pub async fn set_namespace(
    State(node): State<Arc<Node>>,
    Segment(name): Segment,
    Body(body): Body<NamespaceLabels>,
) -> Answer<Json<Namespace>> {
    accepts_work(&node, "set labels of a namespace")?;
    let set = move |policy: Arc<Policy>| async move { policy.set_namespace(&name, Some(body.labels)).await };
    Ok(Json(to_its_end(&node, set).await?))
}

/// Removes a namespace's labels, except its name.
#[utoipa::path(delete, path = "/v1/namespace/{name}", tag = "policy", params(("name" = String, Path)),
    responses((status = 204), (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 500, body = ApiError),
        (status = 503, body = ApiError)))]
pub async fn remove_namespace(State(node): State<Arc<Node>>, Segment(name): Segment) -> Answer<StatusCode> {
    accepts_work(&node, "delete a namespace")?;
    to_its_end(&node, move |policy| async move { policy.set_namespace(&name, None).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn icmp_is_of_one_family_and_the_rest_of_both() {
        let ends = ["10.88.0.2", "fd00::2"].map(|ip| ip.parse::<IpAddr>().expect("address"));
        let end = End::Endpoint(EndpointId::try_from(7).expect("id"), ends.to_vec());
        let judged =
            |protocol| families(protocol).iter().filter_map(|v6| addresses(&end, &end, *v6)).collect::<Vec<_>>();
        let [v4, v6] = ends.map(|ip| (ip, ip));
        assert_eq!(judged(PolicyProtocol::Icmp), [v4]);
        assert_eq!(judged(PolicyProtocol::Icmpv6), [v6]);
        assert_eq!(judged(PolicyProtocol::Tcp), [v4, v6]);
        assert_eq!(addresses(&end, &End::Elsewhere(ends[1]), false), None);
    }
}
