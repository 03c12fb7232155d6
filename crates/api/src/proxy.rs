//! Body of `GET /v1/proxy`.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// State of the node's Envoy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProxyState {
    /// Envoy does not run, and the agent does not start it.
    #[default]
    Absent,
    /// Envoy runs and is not connected to the agent.
    Starting,
    /// Envoy runs and is connected.
    Serving,
    /// Envoy exited or failed to start; the agent restarts it soon.
    Waiting,
}

impl ProxyState {
    /// The name in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Waiting => "waiting",
        }
    }
}

/// Requests, TLS connections and DNS queries that the proxy decided about since the agent's start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyRequests {
    /// A rule allowed it, and it reached the server.
    pub forwarded: u64,
    /// No rule allowed it.
    pub denied: u64,
    /// It was not understood, or the server was not reached.
    pub failed: u64,
}

/// Body of `GET /v1/proxy`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyView {
    /// State of Envoy.
    pub state: ProxyState,
    /// Start of the state, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// Whether the agent starts Envoy (`--envoy`).
    pub supervised: bool,
    /// Envoy's version; absent until it connects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Envoy's process id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Restarts of Envoy since the agent's start.
    pub restarts: u64,
    /// Why Envoy last exited or failed to start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Open xDS streams.
    pub streams: u64,
    /// Bootstrap configuration for an Envoy that the agent does not start.
    pub bootstrap: String,
    /// Requests by verdict.
    pub requests: ProxyRequests,
    /// Request records dropped because the agent read them too slowly.
    pub records_lost: u64,
    /// Completions that deletes are waiting for.
    pub completions_pending: u64,
    /// Completions that deletes stopped waiting for.
    pub completions_timed_out: u64,
    /// Listeners that Envoy has not acknowledged.
    pub outstanding: Vec<ProxyOutstanding>,
    /// Desired listeners, by port.
    pub listeners: Vec<ProxyListener>,
    /// Waits for Envoy, longest first.
    pub completions: Vec<ProxyCompletion>,
}

/// A listener whose last update Envoy has not acknowledged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyOutstanding {
    /// Listener.
    #[schema(example = "ingress-15000")]
    pub listener: String,
    /// Why Envoy rejected it; absent while Envoy has not answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
}

/// Server of a listener.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProxyServer {
    /// Envoy: HTTP requests and TLS handshakes.
    #[default]
    Envoy,
    /// The agent: DNS queries.
    Agent,
}

/// A listener: a proxy port for connections of some endpoints in one direction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyListener {
    /// Name.
    #[schema(example = "ingress-15000")]
    pub name: String,
    /// Server.
    #[serde(default)]
    pub served_by: ProxyServer,
    /// Port of the node: TCP, and also UDP for DNS.
    pub port: u16,
    /// `ingress` (connections to the endpoints) or `egress` (connections from them).
    #[schema(example = "ingress")]
    pub direction: String,
    /// Allowed requests in words: `GET /public...`, `TLS to example.com`, `DNS of *.example.com`. Header values are
    /// omitted because they may be secrets.
    pub passes: Vec<String>,
    /// Whether connections pass uninspected while no proxy serves (`failOpen`); otherwise they are dropped.
    pub fails_open: bool,
    /// Endpoint ids.
    pub endpoints: Vec<u16>,
    /// Whether the server uses this version of the listener.
    pub acknowledged: bool,
    /// Why Envoy rejected it, or why the agent could not open its port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
}

/// A DNS name that containers resolved. Rules with `toFQDNs` follow its addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyName {
    /// Name in lower case, without the final dot.
    #[schema(example = "api.example.com")]
    pub name: String,
    /// Addresses.
    pub addresses: Vec<ProxyNameAddress>,
}

/// An address of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyNameAddress {
    /// Address.
    #[schema(value_type = String, example = "192.0.2.7")]
    pub address: IpAddr,
    /// Expiry of the DNS answer, milliseconds since the Unix epoch. The address stays longer while a connection uses
    /// it.
    pub until_unix_ms: u64,
}

/// A wait until Envoy acknowledges a listener.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyCompletion {
    /// Listener.
    #[schema(example = "ingress-15000")]
    pub listener: String,
    /// The endpoint whose delete waits; absent for a policy change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<u16>,
    /// Start, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// Deadline, milliseconds since the Unix epoch; the waiting operation then continues without an answer.
    pub until_unix_ms: u64,
}

/// Redirect of a flow to the proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyRedirect {
    /// Proxy port on the node.
    pub port: u16,
    /// Allowed requests in words, as in [`ProxyListener::passes`].
    pub passes: Vec<String>,
    /// Whether connections pass uninspected while no proxy serves (`failOpen`); otherwise they are dropped.
    pub fails_open: bool,
    /// Why the proxy does not serve the flow; absent when it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_of_states_are_the_apis() {
        for state in [ProxyState::Absent, ProxyState::Starting, ProxyState::Serving, ProxyState::Waiting] {
            assert_eq!(serde_json::to_value(state).ok(), Some(json!(state.as_str())));
        }
    }
}
