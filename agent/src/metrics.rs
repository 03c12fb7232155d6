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
use wharf_api::{AgentStatus, MetricRow};
use wharf_core::state::Level;

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
struct PoolLabel {
    pool: String,
    family: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Verdict {
    direction: String,
    reason: String,
}

/// What the agent counts. Label sets are of fixed words, so the families cannot grow without bound.
#[derive(Debug)]
pub struct Metrics {
    phases: Family<Phase, Histogram, fn() -> Histogram>,
    operations: Family<Outcome, Histogram, fn() -> Histogram>,
}

/// 100 microseconds to 13 seconds.
fn buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.000_1, 2.0, 18))
}

impl Default for Metrics {
    fn default() -> Self {
        Self { phases: Family::new_with_constructor(buckets), operations: Family::new_with_constructor(buckets) }
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

    /// All metrics in the OpenMetrics text format.
    #[must_use]
    pub fn encode(&self, status: &AgentStatus, verdicts: &[MetricRow]) -> String {
        let mut registry = Registry::with_prefix("wharf");
        registry.register_with_unit("phase_duration", "Time of each phase", Unit::Seconds, self.phases.clone());
        registry.register_with_unit(
            "operation_duration",
            "Time of each operation",
            Unit::Seconds,
            self.operations.clone(),
        );
        gauges(&mut registry, status);
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
    let failing = status.controllers.iter().filter(|c| c.consecutive_failures > 0).count();
    single(registry, "controllers_failing", "Controllers whose last run failed", failing as u64);

    let states = Family::<One, Gauge>::default();
    for (state, n) in &status.endpoints {
        states.get_or_create(&One { name: state.clone() }).set(number(*n));
    }
    registry.register("endpoint_state", "Endpoints by state", states);

    let (capacity, used) = (Family::<PoolLabel, Gauge>::default(), Family::<PoolLabel, Gauge>::default());
    let resting = Family::<PoolLabel, Gauge>::default();
    for pool in &status.ipam {
        let family = match pool.family {
            wharf_api::IpFamily::Ipv4 => "ipv4",
            wharf_api::IpFamily::Ipv6 => "ipv6",
        };
        let label = PoolLabel { pool: pool.name.clone(), family };
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
