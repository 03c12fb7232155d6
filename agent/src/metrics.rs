//! Prometheus metrics: counters, histograms, and gauges computed per scrape (docs/metrics.md).

mod commands;
mod exposition;
mod proxy;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};
use wharf_api::{AgentStatus, ClusterFeed, FlowStatus, HealthState, IpFamily, MetricRow, NodeHealth, ProbeOutcome};
use wharf_common::Direction;
use wharf_core::{kernel::CounterRow, state::Level};
use wharf_kit::{controller::Runs, sync::lock};

pub use self::{
    commands::{CommandMetrics, Loss},
    exposition::Format,
};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Phase {
    operation: &'static str,
    phase: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    operation: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct One {
    name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Controller {
    name: String,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PoolLabel {
    pool: String,
    family: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Verdict {
    direction: String,
    reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Way {
    direction: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FeedRow {
    kind: String,
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProbeLabel {
    probe: &'static str,
    family: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PeerState {
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Build {
    version: String,
    abi: u32,
}

type Real = Gauge<f64, AtomicU64>;

/// Metrics with fixed labels, which bound the families.
#[derive(Debug)]
pub struct Metrics {
    phases: Family<Phase, Histogram, fn() -> Histogram>,
    operations: Family<Outcome, Histogram, fn() -> Histogram>,
    self_checks: Counter,
    self_check_alarms: Counter,
    self_checks_failing: Gauge,
    health_up: Gauge,
    health_launches: Counter,
    health_trips: Family<ProbeLabel, Real>,
    health_losses: Family<ProbeLabel, Real>,
    health_peers: Family<PeerState, Gauge>,
    unknown_pods: Family<Way, Counter>,
    /// CNI commands.
    pub commands: Arc<CommandMetrics>,
    /// Refused since start.
    pub refused_transitions: AtomicU64,
    /// Of deleted endpoints, by direction and reason: the node's totals never decrease.
    pub past_counters: Mutex<BTreeMap<(String, String), (u64, u64)>>,
}

/// 100 microseconds to 13 seconds.
fn buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.000_1, 2.0, 18))
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            phases: Family::new_with_constructor(buckets),
            operations: Family::new_with_constructor(buckets),
            self_checks: Counter::default(),
            self_check_alarms: Counter::default(),
            self_checks_failing: Gauge::default(),
            health_up: Gauge::default(),
            health_launches: Counter::default(),
            health_trips: Family::default(),
            health_losses: Family::default(),
            health_peers: Family::default(),
            unknown_pods: Family::default(),
            commands: Arc::default(),
            refused_transitions: AtomicU64::new(0),
            past_counters: Mutex::default(),
        }
    }
}

impl Metrics {
    /// Records an operation's phase.
    pub fn phase(&self, operation: &'static str, phase: &'static str, took: Duration) {
        self.phases.get_or_create(&Phase { operation, phase }).observe(took.as_secs_f64());
    }

    /// Records a regeneration.
    pub fn regeneration(&self, level: Level, took: Duration, succeeded: bool) {
        let operation = match level {
            Level::Policy => "regenerate-policy",
            Level::Datapath => "regenerate-datapath",
        };
        self.operation(operation, took, succeeded);
    }

    /// Keeps a deleted endpoint's last counters.
    pub fn keep_counters(&self, rows: &[CounterRow]) {
        let mut past = lock(&self.past_counters);
        for row in rows {
            let total = past.entry((row.direction.clone(), row.reason.clone())).or_default();
            total.0 += row.packets;
            total.1 += row.bytes;
        }
    }

    /// Records an operation.
    pub fn operation(&self, operation: &'static str, took: Duration, succeeded: bool) {
        let outcome = if succeeded { "success" } else { "failure" };
        self.operations.get_or_create(&Outcome { operation, outcome }).observe(took.as_secs_f64());
    }

    /// Counts a self-check.
    pub fn self_check(&self) {
        self.self_checks.inc();
    }

    /// Counts an alarm.
    pub fn self_check_alarm(&self) {
        self.self_check_alarms.inc();
    }

    /// Sets the last round's result.
    pub fn health(&self, health: &NodeHealth) {
        self.health_up.set(i64::from(health.state == HealthState::Ok));
        self.health_launches.inner().store(health.launches, Ordering::Relaxed);
        self.health_trips.clear();
        self.health_losses.clear();
        for probe in &health.probes {
            let label = ProbeLabel { probe: probe.probe.as_str(), family: family(probe.family) };
            if let Some(us) = probe.last_us.filter(|_| probe.outcome == ProbeOutcome::Answered) {
                self.health_trips.get_or_create(&label).set(Duration::from_micros(us).as_secs_f64());
            }
            if probe.sent > 0 {
                self.health_losses.get_or_create(&label).set(probe.lost as f64 / probe.sent as f64);
            }
        }
    }

    /// Sets the numbers of other nodes; 0 for a state without nodes.
    pub fn health_peers(&self, states: &BTreeMap<HealthState, u64>) {
        let all = [
            HealthState::Ok,
            HealthState::Starting,
            HealthState::Degraded,
            HealthState::WrongAnswer,
            HealthState::Down,
        ];
        for state in all {
            let nodes = states.get(&state).copied().unwrap_or_default();
            self.health_peers.get_or_create(&PeerState { state: state.as_str() }).set(number(nodes));
        }
    }

    /// Counts packets of containers of other nodes without known labels that policy dropped: in ingress, in egress.
    pub fn unknown_pods(&self, dropped: [u64; 2]) {
        for (direction, packets) in [Direction::Ingress, Direction::Egress].into_iter().zip(dropped) {
            self.unknown_pods.get_or_create(&Way { direction: direction.as_str() }).inc_by(packets);
        }
    }

    /// Sum of [`Metrics::unknown_pods`].
    #[must_use]
    pub fn unknown_pod_drops(&self) -> u64 {
        let of = |direction: Direction| self.unknown_pods.get_or_create(&Way { direction: direction.as_str() }).get();
        of(Direction::Ingress).saturating_add(of(Direction::Egress))
    }

    /// Sets the alarms in force.
    pub fn self_checks_failing(&self, n: u64) {
        self.self_checks_failing.set(number(n));
    }

    /// All metrics as text.
    #[must_use]
    pub fn encode(
        &self,
        format: Format,
        status: &AgentStatus,
        verdicts: &[MetricRow],
        runs: &Runs,
        stale: u64,
        feed: Option<&ClusterFeed>,
    ) -> String {
        let mut registry = Registry::with_prefix("wharf");
        self.own(&mut registry);
        self.commands.register(&mut registry);
        gauges(&mut registry, status);
        pools(&mut registry, status);
        controllers(&mut registry, status, runs, stale);
        packets(&mut registry, verdicts);
        if let Some(feed) = feed {
            cluster_feed(&mut registry, feed);
        }
        let mut text = String::new();
        if let Err(error) = encode(&mut text, &registry) {
            text.clear();
            writeln!(text, "# encoding failed: {error}").ok();
        }
        format.of(text)
    }

    fn own(&self, to: &mut Registry) {
        let phases = self.phases.clone();
        to.register_with_unit("phase_duration", "Duration of each phase of an operation", Unit::Seconds, phases);
        let operations = self.operations.clone();
        to.register_with_unit(
            "operation_duration",
            "Duration of each operation, of a delete to its answer",
            Unit::Seconds,
            operations,
        );
        to.register("self_checks", "Endpoints whose programs were given test packets", self.self_checks.clone());
        to.register("self_check_alarms", "Self-check alarms raised", self.self_check_alarms.clone());
        let failing = self.self_checks_failing.clone();
        to.register("self_checks_failing", "Endpoints with a self-check alarm", failing);
        let up = self.health_up.clone();
        to.register("health_endpoint_up", "1 while the health endpoint answers every probe", up);
        let launches = self.health_launches.clone();
        to.register("health_endpoint_launches", "Launches of the health endpoint", launches);
        let trips = self.health_trips.clone();
        to.register_with_unit("health_probe_trip", "Round-trip time of the last health probe", Unit::Seconds, trips);
        let losses = self.health_losses.clone();
        let ratio = Unit::Other("ratio".to_owned());
        to.register_with_unit("health_probe_loss", "Share of the last 60 health probes that was lost", ratio, losses);
        let peers = self.health_peers.clone();
        to.register("health_peers", "Other nodes of the cluster by the state of their probes", peers);
        // A rate misses the first increase of a new series.
        self.unknown_pods([0, 0]);
        let help = "Packets that policy dropped from or to containers of other nodes whose labels are unknown";
        to.register("unknown_pod_drops", help, self.unknown_pods.clone());
    }
}

fn number(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

const fn family(family: IpFamily) -> &'static str {
    match family {
        IpFamily::Ipv4 => "ipv4",
        IpFamily::Ipv6 => "ipv6",
    }
}

fn gauges(registry: &mut Registry, status: &AgentStatus) {
    let build = Family::<Build, Gauge>::default();
    build.get_or_create(&Build { version: status.version.clone(), abi: status.abi_version }).set(1);
    registry.register("build_info", "Version of the agent, and of its maps' layout; always 1", build);

    gauge(registry, "serving", "1 while new endpoints are accepted", u64::from(status.serving));
    gauge(registry, "prepared_program_sets", "Program sets loaded ahead of need", status.prepared.ready);
    let resident: Gauge = Gauge::default();
    resident.set(number(status.resident_bytes));
    registry.register_with_unit("resident_memory", "Resident memory of the agent", Unit::Bytes, resident);
    counter(
        registry,
        "refused_transitions",
        "Events that the endpoint state machine refused",
        status.refused_transitions,
    );

    proxy::register(registry, &status.proxy);

    let queue = &status.deletion_queue;
    gauge(registry, "deletion_queue_records", "Deletion records that wait", queue.records);
    let age = Real::default();
    age.set(Duration::from_millis(queue.oldest_age_ms).as_secs_f64());
    registry.register_with_unit("deletion_queue_oldest_age", "Age of the oldest deletion record", Unit::Seconds, age);
    counter(registry, "deletion_queue_unusable", "Deletion records set aside as unusable", queue.unusable);

    if let Some(delegate) = &status.delegate {
        let reachable = u64::from(delegate.reachable == Some(true));
        gauge(registry, "delegate_reachable", "1 while the service of delegated mode is reached", reachable);
        gauge(registry, "delegate_calls", "Calls that wait for that service", delegate.in_flight);
        gauge(registry, "delegate_unfinished", "ADDs that the service is owed a DEL for", delegate.unfinished);
    }

    gauge(registry, "stuck_steps", "Steps that have outlasted their deadline", status.stuck.len() as u64);
    gauge(registry, "quarantined_records", "Endpoint records out of service", status.quarantined.len() as u64);
    if let Some(findings) = status.audit_findings {
        gauge(registry, "audit_findings", "Findings of the last leak audit", findings);
    }
    gauge(registry, "creates_waiting", "Creates that wait for admission", status.admission.waiting);
    counter(registry, "creates_refused", "Creates asked to retry later", status.admission.refused);

    if let Some(connections) = status.network.connections {
        gauge(registry, "conntrack_entries", "Connections that the kernel tracks", connections.entries);
        gauge(registry, "conntrack_limit", "Maximum of connections that the kernel tracks", connections.limit);
    }

    if let Some(flows) = &status.network.flows {
        flow_tables(registry, flows);
    }

    let states = Family::<One, Gauge>::default();
    for (state, n) in &status.endpoints {
        states.get_or_create(&One { name: state.clone() }).set(number(*n));
    }
    registry.register("endpoint_state", "Endpoints by state", states);

    let pressure = Family::<One, Real>::default();
    for map in &status.bpf_maps {
        if let Some(entries) = map.entries.filter(|_| map.max_entries > 0) {
            pressure.get_or_create(&One { name: map.name.clone() }).set(entries as f64 / map.max_entries as f64);
        }
    }
    registry.register("bpf_map_pressure", "Share of a map's entries in use, 0 to 1", pressure);
}

fn flow_tables(registry: &mut Registry, flows: &FlowStatus) {
    gauge(registry, "flows", "Flows in the table from which nothing is evicted", flows.rows);
    gauge(registry, "flows_limit", "Maximum of flows in that table", flows.limit);
    let by_reason = |registry: &mut Registry, name: &str, help: &str, counts: &[(&'static str, u64)]| {
        let family = Family::<Reason, Counter>::default();
        for (reason, count) in counts {
            family.get_or_create(&Reason { reason }).inc_by(*count);
        }
        registry.register(name, help, family);
    };
    let collected = [("expired", flows.expired), ("orphaned", flows.orphaned)];
    by_reason(registry, "flows_collected", "Flows removed by collections", &collected);
    let not_kept = [("quota", flows.over_quota), ("full", flows.no_room), ("rate", flows.untracked)];
    by_reason(registry, "flows_not_kept", "Packets whose flow may be forgotten while it lasts", &not_kept);
    let took = Real::default();
    took.set(Duration::from_micros(flows.took_us).as_secs_f64());
    registry.register_with_unit("flows_collection", "Duration of the last collection of flows", Unit::Seconds, took);
}

fn cluster_feed(registry: &mut Registry, feed: &ClusterFeed) {
    let connected = u64::from(feed.connected_since_unix_ms.is_some());
    gauge(registry, "cluster_feed_connected", "1 while a producer has the cluster feed", connected);
    let processed = feed.processed.unwrap_or_default();
    let lag = processed.saturating_sub(feed.in_force.unwrap_or_default());
    gauge(registry, "cluster_feed_lag", "Messages that are processed and not in force", lag);
    let rows = Family::<FeedRow, Gauge>::default();
    for of in &feed.rows {
        let states =
            [("in-force", of.in_force), ("refused", of.refused), ("stale", of.stale), ("conflict", of.conflicts)];
        for (state, n) in states {
            rows.get_or_create(&FeedRow { kind: of.kind.clone(), state }).set(number(n));
        }
    }
    registry.register("cluster_feed_rows", "Rows of the cluster feed", rows);
}

fn gauge(registry: &mut Registry, name: &str, help: &str, value: u64) {
    let gauge: Gauge = Gauge::default();
    gauge.set(number(value));
    registry.register(name, help, gauge);
}

fn counter(registry: &mut Registry, name: &str, help: &str, value: u64) {
    let counter: Counter = Counter::default();
    counter.inc_by(value);
    registry.register(name, help, counter);
}

fn pools(registry: &mut Registry, status: &AgentStatus) {
    let (capacity, used) = (Family::<PoolLabel, Gauge>::default(), Family::<PoolLabel, Gauge>::default());
    let resting = Family::<PoolLabel, Gauge>::default();
    for pool in &status.ipam {
        let label = PoolLabel { pool: pool.name.clone(), family: family(pool.family) };
        capacity.get_or_create(&label).set(number(pool.total));
        used.get_or_create(&label).set(number(pool.used));
        resting.get_or_create(&label).set(number(pool.resting));
    }
    registry.register("ipam_capacity", "Addresses that a pool can lease", capacity);
    registry.register("ip_addresses", "Addresses leased", used);
    registry.register("ip_addresses_resting", "Released addresses in quarantine", resting);
}

/// Sums endpoints' runs, to bound the labels.
fn controllers(registry: &mut Registry, status: &AgentStatus, runs: &Runs, stale: u64) {
    let unwell = status.controllers_unwell;
    gauge(registry, "controllers_failing", "Controllers whose last run failed or does not end", unwell);
    gauge(registry, "status_stale_parts", "Parts of the status that do not answer in time", stale);
    let ended = Family::<Controller, Counter>::default();
    for (name, (succeeded, failed)) in runs {
        for (outcome, n) in [("success", *succeeded), ("failure", *failed)] {
            ended.get_or_create(&Controller { name: name.clone(), outcome }).inc_by(n);
        }
    }
    registry.register("controller_runs", "Runs of controllers that have ended", ended);
}

fn packets(registry: &mut Registry, verdicts: &[MetricRow]) {
    for (name, dropped) in [("drop", true), ("forward", false)] {
        let (packets, bytes) = (Family::<Verdict, Counter>::default(), Family::<Verdict, Counter>::default());
        for row in verdicts.iter().filter(|row| row.dropped == dropped) {
            let label = Verdict { direction: row.direction.clone(), reason: row.reason.clone() };
            packets.get_or_create(&label).inc_by(row.packets);
            bytes.get_or_create(&label).inc_by(row.bytes);
        }
        let verb = if dropped { "dropped" } else { "forwarded" };
        registry.register(format!("{name}_packets"), format!("Packets {verb}, by reason"), packets);
        registry.register_with_unit(name, format!("Bytes {verb}, by reason"), Unit::Bytes, bytes);
    }
}

#[cfg(test)]
mod tests;
