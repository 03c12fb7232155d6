//! Maps the agent's state to fields of the node's object.

use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::{
    objects::node::{HEALTH, Node, ROUTERS, Taint},
    producer::AgentState,
};

/// Keeps pods away until the agent can add them.
pub const TAINT: &str = "wharf.dev/agent-not-ready";
const EFFECT: &str = "NoSchedule";
const CONDITION: &str = "NetworkUnavailable";
/// For a restart of agent and this process: a rolling update replaces both.
pub const GRACE: Duration = Duration::from_secs(60);

/// Wanted state of the node's network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// Containers of other nodes have routes.
    pub is_available: bool,
    /// Word for programs.
    pub reason: &'static str,
    /// For people.
    pub message: String,
}

/// Wanted state of the node's object; `None` keeps a field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The node has the taint.
    pub taint: Option<bool>,
    /// The condition `NetworkUnavailable`.
    pub network: Option<Network>,
    /// `None` removes an annotation.
    pub annotations: Vec<(&'static str, Option<String>)>,
}

impl Wanted {
    /// `unsettled`: time since the agent was last settled ([`AgentState::is_settled`]); `without_routes`: time without
    /// routes since then. Missing routes keep pods away only for [`GRACE`], and only from a node that was not ready:
    /// one unreachable node must not close all others.
    #[must_use]
    pub fn new(state: &AgentState, unsettled: Duration, without_routes: Duration) -> Self {
        let annotations = annotations(state);
        let (ready, routes) = (state.condition("Ready"), state.condition("RoutesInForce"));
        if state.is_settled() {
            let (reason, message) = match routes {
                Ok(()) => ("WharfIsUp", "routes to the containers of all nodes are in force".to_owned()),
                Err(_) if without_routes < GRACE => {
                    return Self { taint: ready.is_err().then_some(true), network: None, annotations };
                }
                Err(message) => ("RoutesMissing", message),
            };
            let network = Network { is_available: true, reason, message };
            return Self { taint: Some(ready.is_err()), network: Some(network), annotations };
        }
        if unsettled >= GRACE {
            let (reason, message) = match &state.report {
                Some(_) => ("WharfIsStarting", "the agent does not have the rows of the whole cluster in force"),
                None => ("WharfIsAway", "the agent of the node is not connected"),
            };
            let network = Network { is_available: false, reason, message: message.to_owned() };
            return Self { taint: Some(true), network: Some(network), annotations };
        }
        let taint = (state.report.is_some() && ready.is_err()).then_some(true);
        Self { taint, network: None, annotations }
    }

    /// A merge patch; `None` without a difference. It names the version, because it replaces the whole list of taints.
    #[must_use]
    pub fn patch(&self, node: &Node) -> Option<Value> {
        let mut patch = Map::new();
        if let Some(taints) = self.taints(node) {
            patch.insert("spec".to_owned(), json!({ "taints": taints }));
        }
        let differs =
            |(name, value): &&(&'static str, Option<String>)| node.metadata.annotation(name) != value.as_deref();
        let changed: Map<String, Value> =
            self.annotations.iter().filter(differs).map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
        if patch.is_empty() && changed.is_empty() {
            return None;
        }
        let mut metadata = json!({ "resourceVersion": node.metadata.resource_version });
        if !changed.is_empty()
            && let Some(metadata) = metadata.as_object_mut()
        {
            metadata.insert("annotations".to_owned(), Value::Object(changed));
        }
        patch.insert("metadata".to_owned(), metadata);
        Some(Value::Object(patch))
    }

    /// A strategic merge patch of the status, which keeps other conditions; `None` without a difference.
    #[must_use]
    pub fn status_patch(&self, node: &Node, now: Timestamp) -> Option<Value> {
        let wanted = self.network.as_ref()?;
        let status = if wanted.is_available { "False" } else { "True" };
        let found = node.status.conditions.iter().flatten().find(|condition| condition.kind == CONDITION);
        let is_same = found.is_some_and(|found| {
            found.status == status
                && found.reason.as_deref() == Some(wanted.reason)
                && found.message.as_deref() == Some(&wanted.message)
        });
        if is_same {
            return None;
        }
        let now = format!("{now:.0}");
        let mut condition = json!({
            "type": CONDITION, "status": status, "reason": wanted.reason, "message": wanted.message,
            "lastHeartbeatTime": now,
        });
        if found.is_none_or(|found| found.status != status)
            && let Some(condition) = condition.as_object_mut()
        {
            condition.insert("lastTransitionTime".to_owned(), json!(now));
        }
        Some(json!({ "status": { "conditions": [condition] } }))
    }

    /// The whole list; `None` without a difference.
    fn taints(&self, node: &Node) -> Option<Vec<Taint>> {
        let is_ours = |taint: &Taint| taint.key == TAINT && taint.effect == EFFECT;
        let found = node.spec.taints.clone().unwrap_or_default();
        let wanted = self.taint?;
        if found.iter().any(is_ours) == wanted {
            return None;
        }
        let mut taints: Vec<Taint> = found.into_iter().filter(|taint| !is_ours(taint)).collect();
        if wanted {
            taints.push(Taint { key: TAINT.to_owned(), effect: EFFECT.to_owned(), rest: Map::new() });
        }
        Some(taints)
    }
}

/// Only a settled agent removes an annotation: a starting agent reports no addresses.
fn annotations(state: &AgentState) -> Vec<(&'static str, Option<String>)> {
    let Some(report) = &state.report else { return Vec::new() };
    let all = [(HEALTH, &report.health_addresses), (ROUTERS, &report.router_addresses)];
    let known = all.into_iter().filter(|(_, addresses)| !addresses.is_empty() || state.is_settled());
    known.map(|(name, addresses)| (name, (!addresses.is_empty()).then(|| addresses.join(",")))).collect()
}

#[cfg(test)]
mod tests;
