//! Calls for policy, the proxy and namespaces.

use hyper::Method;

use super::{Call, Client, ClientError, Query, endpoint_path, escaped};
use crate::{
    EndpointPolicy, Namespace, NamespaceLabels, PolicyChange, PolicyDeleteQuery, PolicyExplainQuery, PolicyExplanation,
    PolicyImport, PolicyList, PolicyProtocol, ProxyName, ProxyView,
};

impl Client {
    /// `GET /v1/policy`: the policies, and the realized revision.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn policies(&self) -> Result<PolicyList, ClientError> {
        self.get("/v1/policy".into()).await
    }

    /// `PUT /v1/policy`: imports a text as one change; answers when the rows are in the kernel. Errors: 400: refused
    /// text, one reason a line; 429: full tables.
    pub async fn import_policy(&self, import: &PolicyImport) -> Result<PolicyChange, ClientError> {
        self.send(Method::PUT, "/v1/policy".into(), import).await
    }

    /// `DELETE /v1/policy`. Errors: 404; 409: file of the policy directory.
    pub async fn delete_policy(&self, query: &PolicyDeleteQuery) -> Result<PolicyChange, ClientError> {
        let PolicyDeleteQuery { kind, namespace, name, all } = query;
        let mut out = Query::default();
        out.add("kind", kind.as_deref());
        out.add("namespace", namespace.as_deref());
        out.add("name", name.as_deref());
        out.add("all", all.map(|all| all.to_string()).as_deref());
        let call = Call::new(Method::DELETE, out.after("/v1/policy".into()));
        let (status, body) = self.exchange(&call, None).await?;
        call.parse(status, &body)
    }

    /// `GET /v1/policy/explain`. Errors: 404: no such endpoint.
    pub async fn explain_policy(&self, query: &PolicyExplainQuery) -> Result<PolicyExplanation, ClientError> {
        let PolicyExplainQuery { from, to, protocol, port } = query;
        let mut out = Query::default();
        out.add("from", Some(from));
        out.add("to", Some(to));
        out.add("protocol", protocol.map(PolicyProtocol::as_str));
        out.add("port", port.map(|port| port.to_string()).as_deref());
        self.get(out.after("/v1/policy/explain".into())).await
    }

    /// `GET /v1/endpoint/{id}/policy`. Errors: 404.
    pub async fn endpoint_policy(&self, id: &str) -> Result<EndpointPolicy, ClientError> {
        self.get(endpoint_path(id, "/policy")).await
    }

    /// `GET /v1/proxy`: the L7 proxy, its listeners, and pending completions.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn proxy(&self) -> Result<ProxyView, ClientError> {
        self.get("/v1/proxy".into()).await
    }

    /// `GET /v1/proxy/names`, by name.
    pub async fn proxy_names(&self) -> Result<Vec<ProxyName>, ClientError> {
        self.get("/v1/proxy/names".into()).await
    }

    /// `GET /v1/namespace`, by name.
    pub async fn namespaces(&self) -> Result<Vec<Namespace>, ClientError> {
        self.get("/v1/namespace".into()).await
    }

    /// `PUT /v1/namespace/{name}`: replaces all labels. Errors: 400: invalid name or label.
    pub async fn put_namespace(&self, name: &str, labels: &NamespaceLabels) -> Result<Namespace, ClientError> {
        self.send(Method::PUT, namespace_path(name), labels).await
    }

    /// `DELETE /v1/namespace/{name}`: deletes the labels. Errors: 404.
    pub async fn delete_namespace(&self, name: &str) -> Result<(), ClientError> {
        let call = Call::new(Method::DELETE, namespace_path(name));
        let (status, body) = self.exchange(&call, None).await?;
        if status.is_success() { Ok(()) } else { Err(call.failed(status, &body)) }
    }
}

fn namespace_path(name: &str) -> String {
    format!("/v1/namespace/{}", escaped(name))
}
