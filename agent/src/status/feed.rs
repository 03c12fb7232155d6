//! The node's report to the producer of the cluster feed.

use std::{
    collections::{BTreeMap, BTreeSet},
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
    cluster::{Cluster, feed},
    node::{Node, network, self_checks::SelfChecks},
    policy::{self, Policy},
    selfcheck,
};

/// Most problems in a report.
const MAX_PROBLEMS: usize = 64;
/// A failure of a part that has been well makes the node unready when it has lasted so long. The agent repairs shorter
/// ones, and a producer keeps pods away from a node that is not ready.
const LASTING: Duration = Duration::from_secs(30);
/// Their failures make the node unready. Without the feed's file, no policy of the feed comes into force.
const NEEDED: [&str; 3] = [network::CONTROLLER, policy::CONTROLLER, feed::KEEP_CONTROLLER];

/// Makes the agent's reports.
pub struct Reporter {
    node: Arc<Node>,
    /// Held for look-ups only.
    failures: Mutex<Failures>,
}

/// Observed state of a part of the node.
enum Part {
    Well,
    /// Not observed yet.
    Unknown,
    /// Cause.
    Failing(String),
}

impl From<Option<String>> for Part {
    fn from(why: Option<String>) -> Self {
        why.map_or(Self::Well, Self::Failing)
    }
}

/// Failing parts by name.
#[derive(Default)]
struct Failures {
    /// Time of a failure's first report.
    since: BTreeMap<&'static str, Instant>,
    /// Parts that were well in a report.
    were_well: BTreeSet<&'static str>,
}

impl Failures {
    /// Why the part makes the node unready: its failure has lasted for [`LASTING`], or the part has not been well since
    /// the agent's start. A restart of the agent repairs nothing, and must not make the node ready for 30 s.
    fn lasting(&mut self, name: &'static str, part: Part) -> Option<String> {
        if matches!(part, Part::Well) {
            self.were_well.insert(name);
        }
        let Part::Failing(why) = part else {
            self.since.remove(name);
            return None;
        };
        let began = self.since.entry(name).or_insert_with(Instant::now);
        let lasts = !self.were_well.contains(name) || began.elapsed() >= LASTING;
        lasts.then(|| format!("{name}: {why}"))
    }
}

impl Reporter {
    /// Before the first report.
    #[must_use]
    pub fn new(node: &Arc<Node>) -> Self {
        Self { node: Arc::clone(node), failures: Mutex::default() }
    }

    /// Takes little longer than [`status`].
    pub async fn report(&self) -> Report {
        let Self { node, .. } = self;
        let status = status(node).await;
        let cluster = &node.life.network.cluster;
        let missing = cluster.missing_routes();
        let parts = [
            ("routes", missing.why.clone().filter(|_| missing.all).into()),
            ("policy", policy_state(&node.life.policy).await),
            ("controllers", needed(&status.controllers)),
            ("self-check", self_checks(&node.self_checks)),
        ];
        let lasting: Vec<String> = {
            let mut failures = lock(&self.failures);
            // All of them: each has its own time.
            parts.into_iter().filter_map(|(name, part)| failures.lasting(name, part)).collect()
        };
        let unready = cluster.without_pools().or_else(|| not_started(&node.life.policy)).or(lasting.into_iter().next());
        let routes = cluster::without_route(&cluster.in_force()).or(missing.why);
        let health = node.health.view();
        let health_addresses = health.ipv4.map(IpAddr::V4).into_iter().chain(health.ipv6.map(IpAddr::V6));
        Report {
            conditions: vec![
                ready(&status, unready),
                condition("RoutesInForce", routes),
                condition("RowsComplete", missing_rows(cluster)),
            ],
            problems: problems(&status).into_iter().take(MAX_PROBLEMS).collect(),
            router_addresses: node.life.network.routers().iter().map(ToString::to_string).collect(),
            health_addresses: health_addresses.map(|address| address.to_string()).collect(),
        }
    }
}

/// Why rows of the feed may be missing, without counts: a producer compares reports.
fn missing_rows(cluster: &Cluster) -> Option<String> {
    let is_missing = cluster.feed().is_some_and(|feed| !feed.has_every_row());
    is_missing.then(|| "no producer has sent every row since the node's boot".to_owned())
}

fn not_started(policy: &Policy) -> Option<String> {
    (!policy.has_started()).then(|| "policy: its first rows are not in force yet".to_owned())
}

/// Whether the wanted revision is in force. Unknown while a proxy owes an answer: without a proxy, rules about requests
/// are never in force, and any user of the cluster may write one.
async fn policy_state(policy: &Policy) -> Part {
    if !policy.proxy.redirects.outstanding().is_empty() {
        return Part::Unknown;
    }
    let Ok(policy::Summary { revision, realized, .. }) = timeout(PATIENCE, policy.summary()).await else {
        return Part::Failing("a change waits for the kernel".to_owned());
    };
    (realized < revision).then(|| format!("in force is revision {realized} of {revision}")).into()
}

/// Unknown until a check has ended.
fn self_checks(results: &SelfChecks) -> Part {
    let (_, checked, _) = results.summary();
    if checked == 0 { Part::Unknown } else { selfcheck::of_node(results).into() }
}

/// Unknown until each needed controller has succeeded or one fails.
fn needed(controllers: &[ControllerStatus]) -> Part {
    let has_succeeded =
        |name: &&str| controllers.iter().any(|row| row.endpoint.is_none() && row.name == **name && row.successes > 0);
    match failing(controllers) {
        Some(why) => Part::Failing(why),
        None if NEEDED.iter().all(has_succeeded) => Part::Well,
        None => Part::Unknown,
    }
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
    use clap::Parser as _;
    use wharf_datapath::FakeKernel;

    use super::*;
    use crate::config::{AgentConfig, Flags};

    #[test]
    fn rows_are_missing_until_a_producer_has_sent_them() {
        let cluster = |sources: &[&str]| {
            let flags = ["wharf-agent", "--node-name=a"].iter().chain(sources);
            let flags = Flags::try_parse_from(flags).expect("flags parse");
            Cluster::new(&AgentConfig::load(flags).expect("loads"), Arc::new(FakeKernel::new()))
        };
        assert_eq!(missing_rows(&cluster(&[])), None, "without a feed");
        let why = missing_rows(&cluster(&["--cluster-feed=/nowhere/feed"])).expect("they are missing");
        assert!(why.contains("no producer"), "{why}");
    }

    fn fails() -> Part {
        Part::Failing("it fails".to_owned())
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_since_the_start_counts_at_once_until_the_part_is_well() {
        let mut failures = Failures::default();
        assert_eq!(failures.lasting("policy", Part::Unknown), None);
        let at_once = Some("policy: it fails".to_owned());
        assert_eq!(failures.lasting("policy", fails()), at_once);
        assert_eq!(failures.lasting("policy", Part::Unknown), None);
        assert_eq!(failures.lasting("policy", fails()), at_once, "it has not been well");
        assert_eq!(failures.lasting("policy", Part::Well), None);
        assert_eq!(failures.lasting("policy", fails()), None, "the agent may repair it");
        assert_eq!(failures.lasting("controllers", fails()).as_deref(), Some("controllers: it fails"), "another part");
        tokio::time::advance(LASTING).await;
        assert_eq!(failures.lasting("policy", fails()), at_once);
        assert_eq!(failures.lasting("policy", Part::Well), None);
        assert_eq!(failures.lasting("policy", fails()), None, "its time begins again");
    }

    #[test]
    fn controllers_are_well_when_each_needed_one_has_succeeded() {
        let row = |name: &str, successes, consecutive_failures| ControllerStatus {
            name: name.to_owned(),
            successes,
            consecutive_failures,
            ..Default::default()
        };
        let all = |successes| NEEDED.map(|name| row(name, successes, 0));
        assert!(matches!(needed(&[]), Part::Unknown) && matches!(needed(&all(0)), Part::Unknown));
        assert!(matches!(needed(&all(1)), Part::Well));
        let [first, second, third] = all(1);
        assert!(matches!(needed(&[first.clone(), second.clone()]), Part::Unknown), "one has not run");
        let failing = row(&third.name, 1, 1);
        assert!(matches!(needed(&[first, second, failing]), Part::Failing(_)));
        assert!(matches!(self_checks(&SelfChecks::default()), Part::Unknown), "no endpoint is checked");
    }

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
