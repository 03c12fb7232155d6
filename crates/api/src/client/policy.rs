//! Calls about policy, the proxy and namespaces.

use hyper::Method;

use super::{Call, Client, ClientError, Query, endpoint_path, escaped};
use crate::{
    EndpointPolicy, Namespace, NamespaceLabels, PolicyChange, PolicyDeleteQuery, PolicyExplainQuery, PolicyExplanation,
    PolicyImport, PolicyList, PolicyProtocol, ProxyName, ProxyView,
};

impl Client {
    /// `GET /v1/policy`: the policies, and how far they are in the kernel.
    ///
    /// # Errors
    /// No answer, or an error answer.
    pub async fn policies(&self) -> Result<PolicyList, ClientError> {
        self.get("/v1/policy".into()).await
    }

    /// `PUT /v1/policy`: puts all policies of a text in one change, and answers when their rows are in the kernel.
    ///
    /// # Errors
    /// No answer, or an error answer (400: the text is refused, a reason in each line of the message; 429: the tables
    /// have no room).
    pub async fn import_policy(&self, import: &PolicyImport) -> Result<PolicyChange, ClientError> {
        self.send(Method::PUT, "/v1/policy".into(), import).await
    }

    /// `DELETE /v1/policy`: removes one policy, or all that were imported.
    ///
    /// # Errors
    /// No answer, or an error answer (404: no such policy; 409: it comes from the policy directory).
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

    /// `GET /v1/policy/explain`: what becomes of the first packet of a flow, and why.
    ///
    /// # Errors
    /// No answer, or an error answer (404: no such endpoint).
    pub async fn explain_policy(&self, query: &PolicyExplainQuery) -> Result<PolicyExplanation, ClientError> {
        let PolicyExplainQuery { from, to, protocol, port } = query;
        let mut out = Query::default();
        out.add("from", Some(from));
        out.add("to", Some(to));
        out.add("protocol", protocol.map(PolicyProtocol::as_str));
        out.add("port", port.map(|port| port.to_string()).as_deref());
        self.get(out.after("/v1/policy/explain".into())).await
    }

    /// `GET /v1/endpoint/{id}/policy`: the rows that decide about an endpoint's packets.
    ///
    /// # Errors
    /// No answer, or an error answer (404: no such endpoint).
    pub async fn endpoint_policy(&self, id: &str) -> Result<EndpointPolicy, ClientError> {
        self.get(endpoint_path(id, "/policy")).await
    }

    /// `GET /v1/proxy`: the L7 proxy, its listeners, and who waits for it.
    ///
    /// # Errors
    /// No answer, or an error answer.
    pub async fn proxy(&self) -> Result<ProxyView, ClientError> {
        self.get("/v1/proxy".into()).await
    }

    /// `GET /v1/proxy/names`: names that containers asked DNS for, and their addresses, by name.
    ///
    /// # Errors
    /// No answer, or an error answer.
    pub async fn proxy_names(&self) -> Result<Vec<ProxyName>, ClientError> {
        self.get("/v1/proxy/names".into()).await
    }

    /// `GET /v1/namespace`: every namespace whose labels are known, by name.
    ///
    /// # Errors
    /// No answer, or an error answer.
    pub async fn namespaces(&self) -> Result<Vec<Namespace>, ClientError> {
        self.get("/v1/namespace".into()).await
    }

    /// `PUT /v1/namespace/{name}`: replaces all labels of a namespace.
    ///
    /// # Errors
    /// No answer, or an error answer (400: a name or a label that is none).
    pub async fn put_namespace(&self, name: &str, labels: &NamespaceLabels) -> Result<Namespace, ClientError> {
        self.send(Method::PUT, namespace_path(name), labels).await
    }

    /// `DELETE /v1/namespace/{name}`: forgets a namespace's labels. The answer's body is not read.
    ///
    /// # Errors
    /// No answer, or an error answer (404: no such namespace).
    pub async fn delete_namespace(&self, name: &str) -> Result<(), ClientError> {
        let call = Call::new(Method::DELETE, namespace_path(name));
        let (status, body) = self.exchange(&call, None).await?;
        if status.is_success() { Ok(()) } else { Err(call.failed(status, &body)) }
    }
}

fn namespace_path(name: &str) -> String {
    format!("/v1/namespace/{}", escaped(name))
}
