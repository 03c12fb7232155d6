//! Body of `GET /v1/proxy`.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// State of the node's Envoy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProxyState {
    /// Not running, and not started by the agent.
    #[default]
    Absent,
    /// Running, not connected to the agent.
    Starting,
    /// Running and connected.
    Serving,
    /// Exited or failed to start; the agent restarts it soon.
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

/// Requests, TLS connections and DNS queries since the agent's start, by verdict.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyRequests {
    /// Allowed, and the server was reached.
    pub forwarded: u64,
    /// No rule allowed it.
    pub denied: u64,
    /// Not understood, or the server was not reached.
    pub failed: u64,
}

/// Body of `GET /v1/proxy`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyView {
    /// State of Envoy.
    pub state: ProxyState,
    /// Start of the state, Unix ms.
    pub since_unix_ms: u64,
    /// Whether the agent starts Envoy.
    pub supervised: bool,
    /// Envoy's version, once connected.
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
    /// Bootstrap configuration for an external Envoy.
    pub bootstrap: String,
    /// Requests by verdict.
    pub requests: ProxyRequests,
    /// Request records lost because the agent read too slowly.
    pub records_lost: u64,
    /// Completions that deletes await.
    pub completions_pending: u64,
    /// Completions that deletes no longer await.
    pub completions_timed_out: u64,
    /// Listeners that Envoy has not acknowledged.
    pub outstanding: Vec<ProxyOutstanding>,
    /// Desired listeners, by port.
    pub listeners: Vec<ProxyListener>,
    /// Waits for Envoy, longest first.
    pub completions: Vec<ProxyCompletion>,
}

/// A listener with an unacknowledged update.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyOutstanding {
    /// Listener.
    #[schema(example = "ingress-15000")]
    pub listener: String,
    /// Why Envoy rejected it; absent before an answer.
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

/// A proxy port for connections of endpoints in one direction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyListener {
    /// Name.
    #[schema(example = "ingress-15000")]
    pub name: String,
    /// Server.
    #[serde(default)]
    pub served_by: ProxyServer,
    /// TCP port of the node; for DNS also UDP.
    pub port: u16,
    /// `ingress` (to the endpoints) or `egress` (from them).
    #[schema(example = "ingress")]
    pub direction: String,
    /// Allowed requests in words: `GET /public...`, `TLS to example.com`, `DNS of *.example.com`. Header values are
    /// omitted because they may be secrets.
    pub passes: Vec<String>,
    /// Whether connections pass uninspected, instead of being dropped, while no proxy serves (`failOpen`).
    pub fails_open: bool,
    /// Endpoint ids.
    pub endpoints: Vec<u16>,
    /// Whether the server uses this version.
    pub acknowledged: bool,
    /// Why Envoy rejected it, or why its port is not open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
}

/// A DNS name that containers resolved, with addresses for `toFQDNs` rules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyName {
    /// Lower case, without the final dot.
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
    /// Expiry of the DNS answer, Unix ms; connections may keep the address longer.
    pub until_unix_ms: u64,
}

/// A wait until Envoy acknowledges a listener.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyCompletion {
    /// Listener.
    #[schema(example = "ingress-15000")]
    pub listener: String,
    /// Endpoint of a waiting delete; absent for a policy change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<u16>,
    /// Start, Unix ms.
    pub since_unix_ms: u64,
    /// Deadline, Unix ms, after which the operation continues.
    pub until_unix_ms: u64,
}

/// Redirect of a flow to the proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyRedirect {
    /// Proxy port on the node.
    pub port: u16,
    /// Allowed requests, as `passes` of `ProxyListener`.
    pub passes: Vec<String>,
    /// As `fails_open` of `ProxyListener`.
    pub fails_open: bool,
    /// Why the proxy does not serve the flow, if so.
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
