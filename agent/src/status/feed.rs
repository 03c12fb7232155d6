//! The node's report to the producer of the cluster feed.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::{Instant, timeout};
use wharf_api::{AgentStatus, ControllerStatus, Health, Verdict};
use wharf_feed::v1::{Condition, Report};
use wharf_kit::sync::lock;

use super::{PATIENCE, cluster, status};
use crate::{
    cluster::feed,
    node::{Node, network},
    policy::{self, Policy},
    selfcheck,
};

/// Most problems in a report.
const MAX_PROBLEMS: usize = 64;
/// A failure that lasts so long makes the node unready. The agent repairs shorter ones, and a producer keeps pods away
/// from a node that is not ready.
const LASTING: Duration = Duration::from_secs(30);
/// Their failures make the node unready. Without the feed's file, no policy of the feed comes into force.
const NEEDED: [&str; 3] = [network::CONTROLLER, policy::CONTROLLER, feed::KEEP_CONTROLLER];

/// Makes the agent's reports.
pub struct Reporter {
    node: Arc<Node>,
    /// Time of a failure's first report. Held for look-ups only.
    since: Mutex<BTreeMap<&'static str, Instant>>,
}

impl Reporter {
    /// Before the first report.
    #[must_use]
    pub fn new(node: &Arc<Node>) -> Self {
        Self { node: Arc::clone(node), since: Mutex::default() }
    }

    /// Takes little longer than [`status`].
    pub async fn report(&self) -> Report {
        let Self { node, .. } = self;
        let status = status(node).await;
        let cluster = &node.life.network.cluster;
        let missing = cluster.missing_routes();
        let failures = [
            ("routes", missing.why.clone().filter(|_| missing.all)),
            ("policy", policy_problem(&node.life.policy).await),
            ("controllers", failing(&status.controllers)),
            ("self-check", selfcheck::of_node(&node.self_checks)),
        ];
        // All of them: each has its own time.
        let lasting: Vec<String> = failures.into_iter().filter_map(|(name, why)| self.lasting(name, why)).collect();
        let unready = cluster.without_pools().or_else(|| not_started(&node.life.policy)).or(lasting.into_iter().next());
        let routes = cluster::without_route(&cluster.in_force()).or(missing.why);
        let health = node.health.view();
        let health_addresses = health.ipv4.map(IpAddr::V4).into_iter().chain(health.ipv6.map(IpAddr::V6));
        Report {
            conditions: vec![ready(&status, unready), condition("RoutesInForce", routes)],
            problems: problems(&status).into_iter().take(MAX_PROBLEMS).collect(),
            router_addresses: node.life.network.routers().iter().map(ToString::to_string).collect(),
            health_addresses: health_addresses.map(|address| address.to_string()).collect(),
        }
    }

    fn lasting(&self, name: &'static str, why: Option<String>) -> Option<String> {
        let mut since = lock(&self.since);
        let Some(why) = why else {
            since.remove(name);
            return None;
        };
        let began = since.entry(name).or_insert_with(Instant::now);
        (began.elapsed() >= LASTING).then(|| format!("{name}: {why}"))
    }
}

fn not_started(policy: &Policy) -> Option<String> {
    (!policy.has_started()).then(|| "policy: its first rows are not in force yet".to_owned())
}

/// Why the wanted revision is not in force. `None` while a proxy owes an answer: without a proxy, rules about requests
/// are never in force, and any user of the cluster may write one.
async fn policy_problem(policy: &Policy) -> Option<String> {
    if !policy.proxy.redirects.outstanding().is_empty() {
        return None;
    }
    let Ok(policy::Summary { revision, realized, .. }) = timeout(PATIENCE, policy.summary()).await else {
        return Some("a change waits for the kernel".to_owned());
    };
    (realized < revision).then(|| format!("in force is revision {realized} of {revision}"))
}

fn failing(controllers: &[ControllerStatus]) -> Option<String> {
    let is_needed = |controller: &&ControllerStatus| {
        // Any user of the cluster may cause its failures, but not a run without end.
        let hangs = controller.name == feed::CONTROLLER && controller.consecutive_failures == 0;
        let is_named = hangs || NEEDED.contains(&controller.name.as_str());
        controller.endpoint.is_none() && is_named && controller.is_unwell()
    };
    let failing = controllers.iter().find(is_needed)?;
    let error = failing.last_error.as_deref().filter(|_| failing.consecutive_failures > 0);
    Some(format!("{}: {}", failing.name, error.unwrap_or("its run does not end")))
}

fn ready(status: &AgentStatus, unready: Option<String>) -> Condition {
    let is_down = status.readiness() == Verdict::Down;
    let failing = status.components.iter().find(|component| component.health == Health::Failing);
    let why = failing.map_or_else(
        || "the agent does not serve yet, or stops".to_owned(),
        |component| format!("{}: {}", component.name, component.message),
    );
    condition("Ready", is_down.then_some(why).or(unready))
}

fn condition(name: &str, problem: Option<String>) -> Condition {
    Condition { name: name.to_owned(), holds: problem.is_none(), message: problem.unwrap_or_default() }
}

fn problems(status: &AgentStatus) -> Vec<String> {
    let ill = status.components.iter().filter(|component| component.health >= Health::Degraded);
    ill.map(|component| format!("{}: {}", component.name, component.message)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failures_that_no_user_of_the_cluster_can_cause_make_a_node_unready() {
        let is_failing = |name: &str, consecutive_failures, overdue| {
            let status =
                ControllerStatus { name: name.to_owned(), consecutive_failures, overdue, ..Default::default() };
            failing(&[status]).is_some()
        };
        for name in NEEDED {
            assert!(is_failing(name, 1, false) && is_failing(name, 0, true) && !is_failing(name, 0, false), "{name}");
        }
        assert!(is_failing(feed::CONTROLLER, 0, true), "no change is in force any more");
        assert!(!is_failing(feed::CONTROLLER, 1, false), "rows may be refused");
        assert!(!is_failing("masquerade", 1, true));
    }
}
