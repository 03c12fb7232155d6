//! What `GET /v1/proxy` tells.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What the node's Envoy does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProxyState {
    /// None runs, and the agent starts none.
    #[default]
    Absent,
    /// It runs and is not connected to the agent.
    Starting,
    /// It runs and is connected.
    Serving,
    /// It ended or did not start; the agent starts it again soon.
    Waiting,
}

impl ProxyState {
    /// Its name as the API writes it.
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

/// Requests, TLS connections and queries of DNS that the proxy judged since the agent's start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyRequests {
    /// A rule let it pass, and the server got it.
    pub forwarded: u64,
    /// No rule let it pass.
    pub denied: u64,
    /// It was not understood, or the server not reached.
    pub failed: u64,
}

/// Body of `GET /v1/proxy`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyView {
    /// What Envoy does.
    pub state: ProxyState,
    /// Since when, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// True where the agent starts Envoy (`--envoy`).
    pub supervised: bool,
    /// Envoy's version; absent until it has connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Envoy's process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// How often Envoy was started again since the agent's start.
    pub restarts: u64,
    /// Why Envoy ended or did not start, last time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// xDS streams that are open.
    pub streams: u64,
    /// Settings for an Envoy that the agent does not start.
    pub bootstrap: String,
    /// Requests by verdict.
    pub requests: ProxyRequests,
    /// Records of requests that were dropped because the agent did not take them in time.
    pub records_lost: u64,
    /// Completions that deletes wait for now.
    pub completions_pending: u64,
    /// Completions that deletes gave up.
    pub completions_timed_out: u64,
    /// What Envoy has not acknowledged.
    pub outstanding: Vec<ProxyOutstanding>,
    /// Listeners that policy asks for, by port.
    pub listeners: Vec<ProxyListener>,
    /// Who waits for Envoy now, the longest wait first.
    pub completions: Vec<ProxyCompletion>,
}

/// A listener of which Envoy has not what was last asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyOutstanding {
    /// Listener.
    #[schema(example = "ingress-15000")]
    pub listener: String,
    /// Why Envoy refused it; absent while it has not answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
}

/// Who serves a listener.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProxyServer {
    /// Envoy: HTTP requests and TLS handshakes.
    #[default]
    Envoy,
    /// The agent: queries of DNS.
    Agent,
}

/// A port of the proxy: connections of some endpoints in one direction, and what they may carry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyListener {
    /// Name.
    #[schema(example = "ingress-15000")]
    pub name: String,
    /// Who serves it.
    #[serde(default)]
    pub served_by: ProxyServer,
    /// Port of the node: TCP, and UDP for DNS.
    pub port: u16,
    /// `ingress` (connections to the endpoints) or `egress` (connections from them).
    #[schema(example = "ingress")]
    pub direction: String,
    /// What passes, in words: `GET /public...`, `TLS to example.com`, `DNS of *.example.com`. Values of headers are left out: they may be
    /// secrets.
    pub passes: Vec<String>,
    /// Whether connections pass unseen while no proxy serves (`failOpen`); else they are dropped.
    pub fails_open: bool,
    /// Numbers of the endpoints.
    pub endpoints: Vec<u16>,
    /// Who serves it has it as it is here.
    pub acknowledged: bool,
    /// Why Envoy refused it, or the agent could not open its port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
}

/// A name that containers asked DNS for, and its addresses. Rules with `toFQDNs` follow them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyName {
    /// Name, in lower case, without the last dot.
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
    /// Until when DNS said so, milliseconds since the Unix epoch. The address stays longer while a connection uses it.
    pub until_unix_ms: u64,
}

/// Somebody waits until Envoy has a listener as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProxyCompletion {
    /// Listener.
    #[schema(example = "ingress-15000")]
    pub listener: String,
    /// The endpoint whose removal waits; absent for a change of policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<u16>,
    /// Since when, milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// Until when at most, milliseconds since the Unix epoch; without an answer the one who waits goes on then.
    pub until_unix_ms: u64,
}

/// A flow's way through the proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyRedirect {
    /// Port of the proxy, on the node.
    pub port: u16,
    /// What passes, in words, as [`ProxyListener::passes`] has it.
    pub passes: Vec<String>,
    /// Whether connections pass unseen while no proxy serves (`failOpen`); else they are dropped.
    pub fails_open: bool,
    /// What the proxy has not done of it; absent when it serves it.
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
