//! Prometheus metrics: counters and histograms that live here, gauges computed when asked.

use std::{fmt::Write as _, time::Duration};

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
use wharf_api::{AgentStatus, HealthState, IpFamily, MetricRow, NodeHealth, ProbeOutcome};
use wharf_core::state::Level;

use crate::controller::Runs;

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
struct ProbeLabel {
    probe: &'static str,
    family: &'static str,
}

/// What the agent counts. Label sets are of fixed words, so the families cannot grow without bound.
#[derive(Debug)]
pub struct Metrics {
    phases: Family<Phase, Histogram, fn() -> Histogram>,
    operations: Family<Outcome, Histogram, fn() -> Histogram>,
    self_checks: Counter,
    self_check_alarms: Counter,
    self_checks_failing: Gauge,
    health_up: Gauge,
    health_launches: Gauge,
    health_trips: Family<ProbeLabel, Gauge<f64, std::sync::atomic::AtomicU64>>,
    health_losses: Family<ProbeLabel, Gauge<f64, std::sync::atomic::AtomicU64>>,
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
            health_launches: Gauge::default(),
            health_trips: Family::default(),
            health_losses: Family::default(),
        }
    }
}

impl Metrics {
    /// A phase of a create, regeneration or delete ended.
    pub fn phase(&self, operation: &'static str, phase: &'static str, took: Duration) {
        self.phases.get_or_create(&Phase { operation, phase }).observe(took.as_secs_f64());
    }

    /// A create ended.
    pub fn create(&self, took: Duration, succeeded: bool) {
        self.operation("create", took, succeeded);
    }

    /// A delete ended.
    pub fn delete(&self, took: Duration, succeeded: bool) {
        self.operation("delete", took, succeeded);
    }

    /// A regeneration ended.
    pub fn regeneration(&self, level: Level, took: Duration, succeeded: bool) {
        let operation = match level {
            Level::Policy => "regenerate-policy",
            Level::Datapath => "regenerate-datapath",
        };
        self.operation(operation, took, succeeded);
    }

    fn operation(&self, operation: &'static str, took: Duration, succeeded: bool) {
        let outcome = if succeeded { "success" } else { "failure" };
        self.operations.get_or_create(&Outcome { operation, outcome }).observe(took.as_secs_f64());
    }

    /// An endpoint's programs were given test packets.
    pub fn self_check(&self) {
        self.self_checks.inc();
    }

    /// A self-check's alarm began.
    pub fn self_check_alarm(&self) {
        self.self_check_alarms.inc();
    }

    /// What probing the health endpoint gave.
    pub fn health(&self, health: &NodeHealth) {
        self.health_up.set(i64::from(health.state == HealthState::Ok));
        self.health_launches.set(number(health.launches));
        // Of an endpoint that is not there, times of before would be taken for those of today.
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

    /// So many alarms last.
    pub fn self_checks_failing(&self, n: u64) {
        self.self_checks_failing.set(number(n));
    }

    /// All metrics in the OpenMetrics text format.
    #[must_use]
    pub fn encode(&self, status: &AgentStatus, verdicts: &[MetricRow], runs: &Runs, stale_parts: u64) -> String {
        let mut registry = Registry::with_prefix("wharf");
        registry.register_with_unit("phase_duration", "Time of each phase", Unit::Seconds, self.phases.clone());
        registry.register_with_unit(
            "operation_duration",
            "Time of each operation",
            Unit::Seconds,
            self.operations.clone(),
        );
        registry.register("self_checks", "Endpoints given test packets", self.self_checks.clone());
        registry.register("self_check_alarms", "Self-checks that found a mismatch", self.self_check_alarms.clone());
        let failing = self.self_checks_failing.clone();
        registry.register("self_checks_failing", "Endpoints whose self-check finds a mismatch", failing);
        registry.register("health_endpoint_up", "1 while every probe is answered", self.health_up.clone());
        registry.register("health_endpoint_launches", "Launches since start", self.health_launches.clone());
        let trips = self.health_trips.clone();
        registry.register_with_unit("health_probe_trip", "Round-trip time of the last probe", Unit::Seconds, trips);
        let losses = self.health_losses.clone();
        registry.register_with_unit("health_probe_loss", "Probes lost of the last 60, 0 to 1", Unit::Ratios, losses);
        gauges(&mut registry, status);
        controllers(&mut registry, status, runs, stale_parts);
        totals(&mut registry, verdicts);
        let mut text = String::new();
        if let Err(error) = encode(&mut text, &registry) {
            // Writing to a String does not fail; say so in the place where it would be looked for.
            text.clear();
            writeln!(text, "# encoding failed: {error}").ok();
        }
        text
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
    let single = |registry: &mut Registry, name: &str, help: &str, value: u64| {
        let gauge: Gauge = Gauge::default();
        gauge.set(number(value));
        registry.register(name, help, gauge);
    };
    single(registry, "serving", "1 while new endpoints are accepted", u64::from(status.serving));
    single(registry, "prepared_program_sets", "Program sets ready ahead of need", status.prepared.ready);
    single(registry, "resident_memory_bytes", "Resident memory of the agent", status.resident_bytes);
    single(registry, "refused_transitions", "Moves the state machine refused since start", status.refused_transitions);
    single(registry, "proxy_completions_pending", "Completions awaited now", status.proxy.pending_completions);
    single(
        registry,
        "proxy_completions_timed_out",
        "Completions never given and passed",
        status.proxy.timed_out_completions,
    );
    let queue = &status.deletion_queue;
    single(registry, "deletion_queue_records", "Deletion records that wait", queue.records);
    single(
        registry,
        "deletion_queue_oldest_age_milliseconds",
        "Age of the oldest deletion record",
        queue.oldest_age_ms,
    );
    single(registry, "deletion_queue_unusable", "Deletion records put aside since start", queue.unusable);
    single(registry, "stuck_steps", "Steps that have not ended in their time", status.stuck.len() as u64);
    single(registry, "quarantined_records", "Records out of service", status.quarantined.len() as u64);
    single(registry, "audit_findings", "Findings that the last leak audit left", status.audit_findings.unwrap_or(0));
    single(registry, "creates_waiting", "Creates that wait for their turn", status.admission.waiting);
    single(registry, "creates_refused", "Creates told to come again since start", status.admission.refused);

    let states = Family::<One, Gauge>::default();
    for (state, n) in &status.endpoints {
        states.get_or_create(&One { name: state.clone() }).set(number(*n));
    }
    registry.register("endpoint_state", "Endpoints by state", states);

    let (capacity, used) = (Family::<PoolLabel, Gauge>::default(), Family::<PoolLabel, Gauge>::default());
    let resting = Family::<PoolLabel, Gauge>::default();
    for pool in &status.ipam {
        let label = PoolLabel { pool: pool.name.clone(), family: family(pool.family) };
        capacity.get_or_create(&label).set(number(pool.total));
        used.get_or_create(&label).set(number(pool.used));
        resting.get_or_create(&label).set(number(pool.resting));
    }
    registry.register("ipam_capacity", "Addresses a pool can give out", capacity);
    registry.register("ip_addresses", "Addresses given out", used);
    registry.register("ip_addresses_resting", "Addresses given back that rest", resting);

    let pressure = Family::<One, Gauge<f64, std::sync::atomic::AtomicU64>>::default();
    for map in &status.bpf_maps {
        if let Some(entries) = map.entries.filter(|_| map.max_entries > 0) {
            pressure.get_or_create(&One { name: map.name.clone() }).set(entries as f64 / map.max_entries as f64);
        }
    }
    registry.register("bpf_map_pressure", "Fill of a map, 0 to 1", pressure);
}

/// Runs by controller: those of endpoints are summed by name, so the labels stay as few as the names in the code.
fn controllers(registry: &mut Registry, status: &AgentStatus, runs: &Runs, stale_parts: u64) {
    let (failing, stale) = (Gauge::<i64>::default(), Gauge::<i64>::default());
    failing.set(number(status.controllers_unwell));
    registry.register("controllers_failing", "Controllers whose last run failed, or does not end", failing);
    stale.set(number(stale_parts));
    registry.register("status_stale_parts", "Parts of the status that do not answer", stale);
    let ended = Family::<Controller, Counter>::default();
    for (name, (succeeded, failed)) in runs {
        for (outcome, n) in [("success", *succeeded), ("failure", *failed)] {
            ended.get_or_create(&Controller { name: name.clone(), outcome }).inc_by(n);
        }
    }
    registry.register("controller_runs", "Runs of controllers that have ended", ended);
}

fn totals(registry: &mut Registry, verdicts: &[MetricRow]) {
    let (drops, forwards) = (Family::<Verdict, Counter>::default(), Family::<Verdict, Counter>::default());
    for row in verdicts {
        let family = if row.dropped { &drops } else { &forwards };
        let label = Verdict { direction: row.direction.clone(), reason: row.reason.clone() };
        family.get_or_create(&label).inc_by(row.packets);
    }
    registry.register("drop_count", "Packets dropped, by reason", drops);
    registry.register("forward_count", "Packets forwarded, by reason", forwards);
}
